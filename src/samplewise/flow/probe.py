"""An op that nobody described: whether it keeps samples apart is found out by trying."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from samplewise.flow.call import Call, Several, is_in_place
from samplewise.samples import Layout, Lost, Mark

CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""How much more than equal two runs may differ that sum in another order; half precision by 0.02."""


def probed(call: Call) -> Several | Mark:
    """The samples of each result along one dimension, if the op gives each half of the samples alone what it gives them here.

    A statistic of the batch would show, as it is another one for a half. Asked anew in every call, because it is the
    values that decide.
    """
    B = call.subject[1].num_samples
    results = call.results or [call.out]
    axes = {id(t): mark.fold(0).axis for t, mark in call.marks if isinstance(mark, Layout)}
    if is_in_place(call.func) or "out" in call.kwargs or None in axes.values() or B < 2:
        return Lost(call.name)
    candidates = [[d for d, size in enumerate(t.shape) if size == B] for t in results]
    order = torch.randperm(B, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    for half in order.chunk(2):
        alone = _of_some(call, axes, half)
        if len(alone) != len(results):
            return Lost(call.name)
        for k, t in enumerate(results):
            candidates[k] = [d for d in candidates[k] if _agree(alone[k], t, d, half)]
    if any(len(dims) != 1 for dims in candidates):
        return Lost(call.name)
    layouts = [Layout.along(dim, ndim=t.ndim, num_samples=B) for t, (dim,) in zip(results, candidates, strict=True)]
    return Several(map(call.layout, (layout.ids for layout in layouts)))


def _of_some(call: Call, axes: dict[int, Any], samples: Tensor) -> list[Tensor]:
    """The results of the op for these samples alone; none if they cannot be had."""

    def cut(t: Tensor) -> Tensor:
        return t.detach() if id(t) not in axes else t.detach().index_select(axes[id(t)], samples.to(t.device))

    devices = [call.out.device] if call.out.is_cuda else []
    try:
        args, kwargs = tree_map_only(Tensor, cut, (call.args, call.kwargs))
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            out = call.func(*args, **kwargs)
    except Exception:  # whatever an unknown op has against fewer rows
        return []
    return [t for t in tree_leaves(out) if isinstance(t, Tensor)]


def _agree(alone: Tensor, whole: Tensor, dim: int, samples: Tensor) -> bool:
    rows = whole.detach().index_select(dim, samples.to(whole.device))
    if alone.shape != rows.shape:
        return False
    if not whole.is_floating_point() and not whole.is_complex():
        return torch.equal(alone, rows)
    close = CLOSE.get(whole.dtype.to_real(), 0.02)
    sizes = rows.abs()[rows.isfinite()]
    largest = float(sizes.max()) if sizes.numel() else 0.0
    return torch.allclose(alone, rows, rtol=close, atol=close * largest, equal_nan=True)
