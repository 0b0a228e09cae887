"""Ops that only move elements: what they do to a tensor they do to its sample ids."""

from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from samplewise.constants import on_cpu
from samplewise.flow.call import Call, Several, aligned, compressed, merged
from samplewise.samples import NO_SAMPLE, Layout, Lost, Mark
from samplewise.tracing import untraced

SPLITS = {"hsplit": 1, "vsplit": 0, "dsplit": 2}
DIM_IS_SECOND = {"chunk", "split", "split_with_sizes", "tensor_split", "roll", "repeat_interleave"}


def reshaped(call: Call) -> Mark:
    tensor, layout = call.subject
    if tensor.numel() != call.out.numel() or len(call.marks) > 1 or len(call.results) > 1:
        return Lost(call.name)  # seen as another dtype; atleast_2d of several
    return call.layout(reshape_ids(layout.ids, tuple(tensor.shape), tuple(call.out.shape)))


def reshape_ids(ids: Tensor, source: tuple[int, ...], target: tuple[int, ...]) -> Tensor:
    """The ids of a tensor of shape `source` after a row-major reshape to `target`.

    Dimensions fall into blocks of equal extent, such as (B, T) → (B·T); only blocks that hold samples are spelt out.

    >>> reshape_ids(torch.tensor([[0], [1]]), (2, 3), (6,)).tolist()
    [0, 0, 0, 1, 1, 1]
    """
    if 0 in source:
        return torch.zeros([0 if size == 0 else 1 for size in target], dtype=torch.long, device="cpu")
    spelt_source: list[int] = []
    spelt_target: list[int] = []
    i = j = 0
    while i < len(source) or j < len(target):
        i0, j0 = i, j
        left, right = 1, 1
        if i < len(source):
            left, i = source[i], i + 1
        if j < len(target) and (left != 1 or i0 == len(source)):
            right, j = target[j], j + 1
        while left != right:
            if left < right:
                left, i = left * source[i], i + 1
            else:
                right, j = right * target[j], j + 1
        holds_samples = any(ids.shape[d] != 1 for d in range(i0, i))
        spelt_source += source[i0:i] if holds_samples else [1] * (i - i0)
        spelt_target += target[j0:j] if holds_samples else [1] * (j - j0)
    return compressed(ids.expand(spelt_source).reshape(spelt_target))


def permuted(call: Call) -> Mark:
    _, layout = call.subject
    return call.layout(call.func(layout.ids, *call.args[1:], **call.kwargs))


def expanded(call: Call) -> Mark:
    _, layout = call.subject
    return call.layout(aligned(layout.ids, call.out.ndim))


def last_dim_changed(call: Call) -> Mark:
    """view_as_complex and view_as_real: the last dimension goes or comes."""
    tensor, layout = call.subject
    if call.out.ndim > tensor.ndim:
        return call.layout(layout.ids.unsqueeze(-1))
    return call.mixed() if tensor.ndim - 1 in layout.dims else call.layout(layout.ids.squeeze(-1))


def broadcast(call: Call) -> Several:
    """broadcast_tensors(...): each in the shape of all."""
    layouts = {id(t): mark for t, mark in call.marks if isinstance(mark, Layout)}
    each = [layouts.get(id(t)) for t in tree_leaves(call.args)]
    ndim = call.out.ndim
    return Several([None if layout is None else call.layout(aligned(layout.ids, ndim)) for layout in each])


def repeated(call: Call) -> Mark:
    _, layout = call.subject
    ids = call.func(layout.ids, *call.args[1:], **call.kwargs)
    # a dimension that holds no samples has size 1 in ids, whatever it is repeated to
    return call.layout(compressed(ids))


def indexed_along(call: Call) -> Mark:
    """Ops that pick, cut or reorder along one dimension."""
    tensor, layout = call.subject
    if call.name in SPLITS and tensor.ndim > 1:
        call = replace(call, func=torch.tensor_split, args=(*call.args[:2], SPLITS[call.name]), name="tensor_split")
    if tensor is not call.args[0] or len(call.marks) > 1:
        return _selected_by_data(call) if call.name == "index_select" else Lost(call.name)
    if call.name == "flip":
        given = call.kwargs.get("dims", call.args[1] if len(call.args) == 2 else call.args[1:])
    else:
        position = 1 if call.name not in DIM_IS_SECOND else 2
        keyword = {"roll": "dims", "unfold": "dimension"}.get(call.name, "dim")
        given = call.arg(position, keyword, None if call.name in ("roll", "repeat_interleave") else 0)
    if given is None:
        return Lost(call.name)  # works on the flattened tensor
    dims = [d % tensor.ndim for d in (given if isinstance(given, list | tuple) else [given])]
    if not any(layout.ids.shape[d] != 1 for d in dims):
        ids = layout.ids
        if call.out.ndim < tensor.ndim:
            ids = ids.squeeze(dims[0])
        elif call.out.ndim > tensor.ndim:
            ids = ids.unsqueeze(-1)
        return call.layout(ids)
    if call.name == "unfold":
        return Lost(call.name)
    args = [on_cpu(a) if isinstance(a, Tensor) else a for a in call.args[1:]]
    kwargs = {k: on_cpu(v) if isinstance(v, Tensor) else v for k, v in call.kwargs.items()}
    out = call.func(layout.ids, *args, **kwargs)
    if isinstance(out, Tensor):
        return call.layout(compressed(out))
    return Several([call.layout(compressed(ids)) for ids in out])  # type: ignore[return-value]


def sequences(call: Call) -> Mark:
    """pad_sequence([...]): each of one sample, its padding too."""
    tensors, batch_first = call.arg(0, "sequences"), call.arg(1, "batch_first", False)
    layouts = {id(t): mark for t, mark in call.marks if isinstance(mark, Layout)}
    if any(id(t) not in layouts or layouts[id(t)].ids.numel() != 1 for t in tensors):
        return Lost(call.name)
    shape = [1] * call.out.ndim
    shape[0 if batch_first else 1] = len(tensors)
    return call.layout(torch.cat([layouts[id(t)].ids.flatten() for t in tensors]).reshape(shape))


def _selected_by_data(call: Call) -> Mark:
    """x.index_select(dim, index) with an index of data: row i of the result is of the sample that picks it."""
    source, dim, index = call.args[0], call.arg(1, "dim"), call.arg(2, "index")
    layouts = {id(t): mark for t, mark in call.marks if isinstance(mark, Layout)}
    dim = dim % max(1, source.ndim)
    shape = [1] * call.out.ndim
    shape[dim] = -1
    parts = [layouts[id(index)].ids.reshape(shape)] if id(index) in layouts else []
    if id(source) in layouts:
        ids = layouts[id(source)].ids
        parts.append(ids if ids.shape[dim] == 1 else ids.index_select(dim, on_cpu(index)))
    return merged(call, parts)


def indexed(call: Call) -> Mark:
    """x[index]: the index is applied to the ids. What data picks is of the sample that picks it."""
    source, given = call.args[0], call.args[1]
    layouts = {id(t): mark for t, mark in call.marks if isinstance(mark, Layout)}
    parts = []
    if id(source) in layouts:
        ids = layouts[id(source)].ids
        index, consumed = spelt_index(given, source.ndim, ids)
        ids = ids.expand([*source.shape[:consumed], *ids.shape[consumed:]])
        parts.append(compressed(ids[index]))
    pickers = given if isinstance(given, tuple) else (given,)
    if any(id(i) in layouts for i in pickers):
        of_pickers = _samples_of_pickers(call, pickers, layouts, call.out.ndim)
        if of_pickers is None:
            return Lost(call.name)
        parts.append(of_pickers)
    return merged(call, parts)


def _samples_of_pickers(call: Call, pickers: tuple, layouts: dict[int, Layout], ndim: int) -> Tensor | None:
    """The samples of the elements that data picks; None for an index that is not one run of tensors behind full slices."""
    lead = next(k for k, i in enumerate(pickers) if not (isinstance(i, slice) and i == slice(None)))
    run = list(takewhile(lambda i: isinstance(i, Tensor), pickers[lead:]))
    if not run or any(isinstance(i, Tensor | list) for i in pickers[lead + len(run) :]):
        return None
    if [i.dtype for i in run] == [torch.bool]:
        mask = run[0]
        ids = layouts[id(mask)].ids.expand(mask.shape)[on_cpu(mask)]  # one element for each that the mask picks
    elif any(i.dtype == torch.bool for i in run):
        return None
    else:
        widest = max(i.ndim for i in run)
        met = merged(call, [aligned(layouts[id(i)].ids, widest) for i in run if id(i) in layouts])
        if not isinstance(met, Layout):
            return None
        ids = met.ids
    return ids.reshape([1] * lead + list(ids.shape) + [1] * (ndim - lead - ids.ndim))


@untraced
def written(call: Call, before: Layout | None) -> Mark:
    """x[index] = value: the ids of the value are written into those of x."""
    target, value = call.args[0], call.args[2]
    layouts = {id(t): mark for t, mark in call.marks if isinstance(mark, Layout) and t is not target}
    of_value = layouts.pop(id(value), None) if isinstance(value, Tensor) else None
    index, consumed = spelt_index(call.args[1], target.ndim)
    pickers = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    if before is not None and any(id(i) in layouts for i in pickers):  # what is written where is up to who picks the place
        picked = before.ids.expand(target.shape)[index]
        of_pickers = _samples_of_pickers(call, pickers, layouts, picked.ndim)
        if of_pickers is None:
            return call.mixed()
        if not target.is_floating_point() and not target.is_complex() and of_value is None:
            of_value = Layout(of_pickers, before.num_samples)  # a table of places: inverse[order] = arange(n)
        elif not isinstance(merged(call, [picked, of_pickers]), Layout):
            return call.mixed()
    if of_value is None:
        return before or Lost(call.name)
    ids = torch.full([1] * target.ndim, NO_SAMPLE, device="cpu") if before is None else before.ids
    if any(d >= consumed for d in range(target.ndim) if ids.shape[d] != 1):
        consumed = target.ndim
    ids = ids.expand([*target.shape[:consumed], *ids.shape[consumed:]]).clone()
    ids[index] = aligned(of_value.ids, ids[index].ndim)
    return Layout(adopted(compressed(ids), of_value.num_samples), of_value.num_samples)


def adopted(ids: Tensor, num_samples: int) -> Tensor:
    """ids in which constants beside data of a sample are of that sample too, if each sample lies at a place of its own."""
    filled = ids
    for d in range(ids.ndim):
        if filled.shape[d] > 1:
            samples = filled.amax(d, keepdim=True)
            if bool(((filled == samples) | (filled == NO_SAMPLE)).all()):
                filled = samples
    return filled if bool((filled >= 0).all()) and filled.unique().numel() == filled.numel() == num_samples else ids


def coordinates(call: Call) -> Several | Mark:
    """nonzero(x), where(x): each place belongs to the sample of the element that it is the place of."""
    tensor, layout = call.subject
    found = layout.ids.expand(tensor.shape)[(tensor != 0).cpu()]
    return Several(call.layout(found.reshape([-1] + [1] * (t.ndim - 1))) for t in call.results)


def put(call: Call) -> Mark:
    """x.index_put(indices, values): as x[indices] = values."""
    tensor, indices, values = call.args[0], call.arg(1, "indices"), call.arg(2, "values")
    before = next((mark for t, mark in call.marks if t is tensor), None)
    if call.arg(3, "accumulate", False) or any(t is not tensor and t is not values for t, _ in call.marks):
        return Lost(call.name)
    assert before is None or isinstance(before, Layout)
    return written(replace(call, args=(tensor, tuple(indices), values)), before)


def added_along(call: Call) -> Mark:
    """x.index_add(dim, index, source): rows of the source land on rows of x, which must be of the same sample."""
    target, dim, index, source = call.args[0], call.arg(1, "dim"), call.arg(2, "index"), call.arg(3, "source")
    layouts = {id(t): mark for t, mark in call.marks if isinstance(mark, Layout)}
    if id(source) not in layouts:
        known = id(target) in layouts and id(index) not in layouts
        return layouts[id(target)] if known else call.mixed()  # how often a row is added to is up to all samples
    dim = dim % max(1, target.ndim)
    of_source = layouts[id(source)].ids
    if all(layout.ids.shape[dim] == 1 for layout in (layouts.get(id(t)) for t in (target, source)) if layout is not None):
        return merged(call, [layouts[id(t)].ids for t in (target, source) if id(t) in layouts])
    index = on_cpu(index)
    shape = list(of_source.shape)
    of_source = of_source.expand([*shape[:dim], len(index), *shape[dim + 1 :]])
    shape[dim] = target.shape[dim]
    landed = torch.full(shape, NO_SAMPLE, device="cpu").index_copy(dim, index, of_source)
    if not torch.equal(landed.index_select(dim, index), of_source):
        return call.mixed()
    if id(target) not in layouts:
        return call.layout(compressed(landed))
    if call.name == "index_copy":  # what was there is gone
        return call.layout(compressed(torch.where(landed == NO_SAMPLE, layouts[id(target)].ids, landed)))
    return merged(call, [layouts[id(target)].ids, landed])


def gathered(call: Call) -> Mark:
    """x.gather(dim, index): an element comes from the sample that it is picked from."""
    source = call.args[0]
    position, index_position = (1, 2) if call.name == "gather" else (2, 1)
    dim, index = call.arg(position, "dim"), call.arg(index_position, "index", call.kwargs.get("indices"))
    if dim is None or source.ndim != index.ndim:
        return Lost(call.name)
    layouts = {id(t): mark for t, mark in call.marks if isinstance(mark, Layout)}
    dim = dim % max(1, source.ndim)
    parts = [layouts[id(index)].ids] if id(index) in layouts else []  # along the other dimensions the two line up
    if id(source) in layouts:
        ids = layouts[id(source)].ids
        for d in range(source.ndim):
            if d != dim and ids.shape[d] > index.shape[d]:
                ids = ids.narrow(d, 0, index.shape[d])
        if ids.shape[dim] != 1:
            ids = ids.expand([index.shape[d] if d != dim else source.shape[d] for d in range(source.ndim)])
            ids = compressed(ids.gather(dim, on_cpu(index)))
        parts.append(ids)
    return merged(call, parts)


def scattered(call: Call) -> Mark:
    """x.scatter(dim, index, value): what lands in an element must be of its sample."""
    target, dim, index = call.args[0], call.arg(1, "dim"), call.arg(2, "index")
    dim = dim % max(1, target.ndim)
    layouts = [mark for _, mark in call.marks if isinstance(mark, Layout)]
    met = merged(call, [layout.ids for layout in layouts if layout.ids.ndim == target.ndim])
    if not isinstance(met, Layout) or len(layouts) != len(call.marks) or dim in met.dims:
        return Lost(call.name)
    return met if all(index.shape[d] == target.shape[d] for d in met.dims) else Lost(call.name)


def spelt_index(index: Any, ndim: int, ids: Tensor | None = None) -> tuple[tuple, int]:
    """An index as a tuple without Ellipsis, its tensors on the CPU, and how many dimensions it consumes.

    With the ids that it is for, tensors that pick along a dimension without samples pick its first place: any other is the same.
    """
    parts = index if isinstance(index, tuple) else (index,)
    parts = tuple(torch.tensor(i, device="cpu") if isinstance(i, list) else i for i in parts)
    consumed = sum(map(_consumed, parts))
    dots = [k for k, i in enumerate(parts) if i is Ellipsis]
    if dots:
        parts = (*parts[: dots[0]], *[slice(None)] * (ndim - consumed), *parts[dots[0] + 1 :])
        consumed = ndim
    spelt, dim = [], 0
    for i in parts:
        if isinstance(i, Tensor):
            is_same = ids is not None and i.dtype in (torch.int64, torch.int32) and ids.shape[dim] == 1
            spelt.append(torch.zeros(i.shape, dtype=torch.long, device="cpu") if is_same else on_cpu(i))
        else:
            spelt.append(i)
        dim += _consumed(i)
    return tuple(spelt), consumed


def unsqueezed(ids: Tensor, ndim: int) -> Tensor:
    """ids with trailing dimensions of size 1."""
    return ids.reshape(ids.shape + (1,) * (ndim - ids.ndim))


def _consumed(index: Any) -> int:
    if index is None or index is Ellipsis:
        return 0
    return index.ndim if isinstance(index, Tensor) and index.dtype == torch.bool else 1


def concatenated(call: Call) -> Mark:
    tensors = call.arg(0, "tensors")
    dim = call.arg(1, "dim", 0)
    new = 1 if call.name == "stack" else 0
    ndim = call.out.ndim
    dim = dim % ndim
    layouts = {id(t): mark for t, mark in call.marks if isinstance(mark, Layout)}

    def ids_of(t: Tensor) -> Tensor:
        ids = layouts[id(t)].ids
        return ids.unsqueeze(dim) if new else ids

    if all(new or layouts[id(t)].ids.shape[dim] == 1 for t in tensors if id(t) in layouts):
        same = merged(call, [ids_of(t) for t in tensors if id(t) in layouts])
        if isinstance(same, Layout):
            return same
    parts = []
    others = [size for d, size in enumerate(call.out.shape) if d != dim]
    for t in tensors:
        if t.ndim == 1 and t.numel() == 0 and ndim > 1:
            continue  # torch.cat skips empty vectors
        length = 1 if new else t.shape[dim]
        ids = ids_of(t) if id(t) in layouts else torch.full([1] * ndim, NO_SAMPLE, device="cpu")
        parts.append(ids.expand([*others[:dim], length, *others[dim:]]) if ids.ndim else ids)
    return call.layout(compressed(_cat_narrow(parts, dim)))


def _cat_narrow(parts: list[Tensor], dim: int) -> Tensor:
    """torch.cat without spelling out dimensions that no part spells out."""
    ndim = parts[0].ndim
    flat = [d for d in range(ndim) if d != dim and all(p.stride(d) == 0 or p.shape[d] == 1 for p in parts)]
    for d in flat:
        parts = [p.narrow(d, 0, 1) for p in parts]
    return torch.cat(parts, dim)
