"""An op that nobody described: whether it keeps samples apart is found out by trying."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from samplewise.flow.call import Call, is_in_place
from samplewise.samples import Layout, Lost, Mark

CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""How much more than equal two runs may differ that sum in another order; half precision by 0.02."""


def probed(call: Call) -> Mark:
    """The samples of the result along one dimension, if the op gives each half of the samples alone what it gives them here.

    A statistic of the batch would show, as it is another one for a half. Asked anew in every call, because it is the
    values that decide.
    """
    B = call.subject[1].num_samples
    if not isinstance(call.out, Tensor) or is_in_place(call.func) or "out" in call.kwargs or len(call.results) > 1:
        return Lost(call.name)
    axes = {id(t): mark.fold(0).axis for t, mark in call.marks if isinstance(mark, Layout)}
    candidates = [d for d, size in enumerate(call.out.shape) if size == B]
    if None in axes.values() or B < 2 or not candidates:
        return Lost(call.name)
    order = torch.randperm(B, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    for half in order.chunk(2):
        alone = _of_some(call, axes, half)
        candidates = [d for d in candidates if alone is not None and _agree(alone, call.out, d, half)]
    return (
        call.layout(Layout.along(candidates[0], ndim=call.out.ndim, num_samples=B).ids)
        if len(candidates) == 1
        else Lost(call.name)
    )


def _of_some(call: Call, axes: dict[int, Any], samples: Tensor) -> Tensor | None:
    """The op of these samples alone, or None if it cannot be had."""

    def cut(t: Tensor) -> Tensor:
        return t.detach() if id(t) not in axes else t.detach().index_select(axes[id(t)], samples.to(t.device))

    args, kwargs = tree_map_only(Tensor, cut, (call.args, call.kwargs))
    devices = [call.out.device] if call.out.is_cuda else []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            out = call.func(*args, **kwargs)
    except Exception:  # whatever an unknown op has against fewer rows
        return None
    return out if isinstance(out, Tensor) else None


def _agree(alone: Tensor, whole: Tensor, dim: int, samples: Tensor) -> bool:
    rows = whole.detach().index_select(dim, samples.to(whole.device))
    if alone.shape != rows.shape:
        return False
    if not whole.is_floating_point() and not whole.is_complex():
        return torch.equal(alone, rows)
    close = CLOSE.get(whole.dtype.to_real(), 0.02)
    return torch.allclose(alone, rows, rtol=close, atol=close * float(rows.abs().max()), equal_nan=True)
