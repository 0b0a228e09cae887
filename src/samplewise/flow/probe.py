"""An op that nobody described: whether it keeps samples apart is found out by trying."""

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from samplewise.flow.call import Call, Several, is_in_place, is_torchs
from samplewise.samples import Layout, Lost, Mark

CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""How much more than equal two runs may differ that sum in another order; half precision by 0.02."""


def probed(call: Call) -> Several | Mark:
    """The samples of each result along one dimension, if the op gives each half of the samples alone what it gives them here.

    A statistic of the batch would show, as it is another one for a half. Asked anew in every call, because it is the
    values that decide.
    """
    _, layout = call.subject
    results = call.results or [call.out]
    marked = {
        id(t): mark for t, mark in call.marks if isinstance(mark, Layout) and len(mark.dims) == 1 and not mark.has_strays
    }
    known = len(marked) == len({id(t) for t, _ in call.marks}) and layout.num_samples > 1
    if not known or writes(call) or (is_torchs(call.func) and len(results) > 1):
        return Lost(call.name)
    rows = layout.ids.flatten()  # the sample of each row
    candidates = [[d for d, size in enumerate(t.shape) if size == len(rows)] for t in results]
    order = torch.randperm(layout.num_samples, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    for half in order.chunk(2):
        alone = _of_some(call, marked, half)
        if len(alone) != len(results):
            return Lost(call.name)
        for k, t in enumerate(results):
            candidates[k] = [d for d in candidates[k] if _agree(alone[k], t, d, _rows_of(layout, half))]
    if any(len(dims) != 1 for dims in candidates):
        return Lost(call.name)
    shapes = [[len(rows) if d == dim else 1 for d in range(t.ndim)] for t, (dim,) in zip(results, candidates, strict=True)]
    return Several(call.layout(rows.reshape(shape)) for shape in shapes)


def writes(call: Call) -> bool:
    """Whether the op changes an argument, so that running it again would change it again."""
    schemas = getattr(call.func, "_schemas", {}).values() or [getattr(call.func, "_schema", None)]
    changes = any(a.alias_info is not None and a.alias_info.is_write for s in schemas if s for a in s.arguments)
    return changes or is_in_place(call.func) or "out" in call.kwargs


def _rows_of(layout: Layout, samples: Tensor) -> Tensor:
    return torch.isin(layout.ids.flatten(), samples).nonzero().squeeze(1)


def _of_some(call: Call, marked: dict[int, Layout], samples: Tensor) -> list[Tensor]:
    """The results of the op for these samples alone; none if they cannot be had."""

    def cut(t: Tensor) -> Tensor:
        if id(t) not in marked:
            return t.detach().clone()  # an autograd.Function may write into it
        return t.detach().index_select(marked[id(t)].dims[0], _rows_of(marked[id(t)], samples).to(t.device))

    devices = [call.out.device] if call.out.is_cuda else []
    try:
        args, kwargs = tree_map_only(Tensor, cut, (call.args, call.kwargs))
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            out = call.func(*args, **kwargs)
    except Exception:  # whatever an unknown op has against fewer rows
        return []
    return [t for t in tree_leaves(out) if isinstance(t, Tensor)]


def _agree(alone: Tensor, whole: Tensor, dim: int, rows_of_some: Tensor) -> bool:
    """Whether the result for some samples alone is those rows of the whole, but for the order of sums."""
    rows = whole.detach().index_select(dim, rows_of_some.to(whole.device))
    if alone.shape != rows.shape:
        return False
    if not whole.is_floating_point() and not whole.is_complex():
        return torch.equal(alone, rows)
    close = CLOSE.get(whole.dtype.to_real(), 0.02)
    sizes = rows.abs()[rows.isfinite()]
    largest = float(sizes.max()) if sizes.numel() else 0.0
    return torch.allclose(alone, rows, rtol=close, atol=close * largest, equal_nan=True)
