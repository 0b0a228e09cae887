"""An op that nobody described: whether it keeps samples apart is found out by trying."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from samplewise.flow.call import Call, is_in_place
from samplewise.samples import Layout, Lost, Mark

KNOWN: dict[Any, int | None] = {}
"""What trying an op on tensors of these shapes has shown: the dimension of the samples in its result."""


def probed(call: Call) -> Mark:
    """The samples of the result along one dimension, if changing some samples of the arguments changes only theirs.

    Half of the samples are exchanged for one another, then the other half, in two ways of halving: each time exactly the
    exchanged samples must change along the same dimension of the result. Otherwise the op is not understood.
    """
    B = call.subject[1].num_samples
    if not isinstance(call.out, Tensor) or is_in_place(call.func) or "out" in call.kwargs or len(call.results) > 1:
        return Lost(call.name)
    axes = {id(t): mark.fold(0).axis for t, mark in call.marks if isinstance(mark, Layout)}
    if None in axes.values() or B == 0 or B not in call.out.shape:
        return Lost(call.name)
    key = _key(call, axes)
    if key not in KNOWN:
        KNOWN[key] = _axis_of_result(call, axes, B)
    axis = KNOWN[key]
    return Lost(call.name) if axis is None else Layout.along(axis, ndim=call.out.ndim, num_samples=B)


def _axis_of_result(call: Call, axes: dict[int, Any], B: int) -> int | None:
    candidates = [d for d, size in enumerate(call.out.shape) if size == B]
    order = torch.randperm(B, generator=torch.Generator().manual_seed(0))
    for halves in (order.chunk(2), torch.arange(B).chunk(2)):
        for half in halves:
            changed = _changed(call, axes, half, B)
            if changed is None:
                return None
            exchanged = torch.zeros(B, dtype=torch.bool).index_fill(0, half, True)
            candidates = [d for d in candidates if torch.equal(_any_but(changed, d), exchanged)]
    return candidates[0] if len(candidates) == 1 else None


def _changed(call: Call, axes: dict[int, Any], half: Tensor, B: int) -> Tensor | None:
    """Which elements of the result change when the samples of `half` take the values of their neighbours."""
    neighbours = torch.arange(B)
    neighbours[half] = (half + 1) % B

    def exchange(t: Tensor) -> Tensor:
        if id(t) not in axes:
            return t.detach()
        return t.detach().index_select(axes[id(t)], neighbours.to(t.device))

    args, kwargs = tree_map_only(Tensor, exchange, (call.args, call.kwargs))
    devices = [call.out.device] if call.out.is_cuda else []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            out = call.func(*args, **kwargs)
    except RuntimeError:
        return None
    if not isinstance(out, Tensor) or out.shape != call.out.shape:
        return None
    before = call.out.detach()
    return ((out != before) & ~((out != out) & (before != before))).cpu()


def _any_but(changed: Tensor, dim: int) -> Tensor:
    """For each index of `dim`: whether anything changed there."""
    return changed.movedim(dim, 0).flatten(1).any(1) if changed.ndim > 1 else changed


def _key(call: Call, axes: dict[int, Any]) -> Any:
    def spec(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return tuple(leaf.shape), leaf.dtype, axes.get(id(leaf))
        return leaf if isinstance(leaf, int | float | str | bool | None) else repr(leaf)

    return call.func, tuple(map(spec, tree_leaves((call.args, call.kwargs))))
