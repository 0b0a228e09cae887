"""Elements written by an index: what lands in a place must be of its sample, or makes it that sample's."""

from dataclasses import replace

import torch
from torch import Tensor

from samplewise.constants import on_cpu
from samplewise.flow.call import Call, aligned, compressed, merged
from samplewise.flow.indexing import samples_of_pickers, spelt_index
from samplewise.fold import NO_SAMPLE
from samplewise.samples import Layout, Lost, Mark
from samplewise.tracing import untraced


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
        of_pickers = samples_of_pickers(call, pickers, layouts, picked.ndim)
        if of_pickers is None:
            return call.mixed()
        if not target.is_floating_point() and not target.is_complex() and of_value is None:
            of_value = Layout(of_pickers, before.num_samples)  # a table of places: inverse[order] = arange(n)
        elif not isinstance(merged(call, [picked, of_pickers]), Layout):
            return call.mixed()
    if of_value is None:
        return before or _picked_out(call, pickers, layouts)
    ids = torch.full([1] * target.ndim, NO_SAMPLE, device="cpu") if before is None else before.ids
    num_behind = target.ndim - consumed  # dimensions that no index picks from
    if any(size != 1 for size in (*ids.shape[consumed:], *of_value.ids.shape[max(0, of_value.ids.ndim - num_behind) :])):
        consumed = target.ndim
    ids = ids.expand([*target.shape[:consumed], *ids.shape[consumed:]]).clone()
    ids[index] = aligned(of_value.ids, ids[index].ndim)
    return Layout(adopted(compressed(ids), of_value.num_samples), of_value.num_samples)


def _picked_out(call: Call, pickers: tuple, layouts: dict[int, Layout]) -> Mark:
    """mask[arange(B), lengths] = 1: where samples pick the places, each along rows of its own, a row is of the sample in it."""
    target, of_pickers = call.args[0], [layouts[id(i)].ids for i in pickers if id(i) in layouts]
    rows = [d for d, i in enumerate(pickers) if id(i) not in layouts]
    if not rows or any(not isinstance(i, Tensor) or i.dtype in (torch.bool, torch.uint8) for i in pickers):
        return Lost(call.name)
    met = merged(call, [aligned(ids, max(i.ndim for i in pickers)) for ids in of_pickers])
    if not isinstance(met, Layout):
        return met
    *places, samples = torch.broadcast_tensors(*[on_cpu(pickers[d]) for d in rows], met.ids)
    index = tuple(places[rows.index(d)] if d in rows else 0 for d in range(len(pickers)))
    ids = torch.full([target.shape[d] if d in rows else 1 for d in range(target.ndim)], NO_SAMPLE, device="cpu")
    ids[index] = samples.reshape(samples.shape + (1,) * (target.ndim - len(pickers)))
    is_apart = torch.equal(ids[index].flatten(), samples.flatten())
    return call.layout(compressed(ids)) if is_apart else call.mixed()


def adopted(ids: Tensor, num_samples: int) -> Tensor:
    """ids in which constants beside data of a sample are of that sample too, if each sample lies at a place of its own."""
    filled = ids
    for d in range(ids.ndim):
        if filled.shape[d] > 1:
            samples = filled.amax(d, keepdim=True)
            if bool(((filled == samples) | (filled == NO_SAMPLE)).all()):
                filled = samples
    return filled if bool((filled >= 0).all()) and filled.unique().numel() == filled.numel() == num_samples else ids


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
    layouts = call.layouts
    if id(source) not in layouts:
        known = id(target) in layouts and id(index) not in layouts
        return layouts[id(target)] if known else call.mixed()  # how often a row is added to is up to all samples
    dim = dim % max(1, target.ndim)
    of_source = layouts[id(source)].ids
    if all(layout.ids.shape[dim] == 1 for layout in (layouts.get(id(t)) for t in (target, source)) if layout is not None):
        if id(index) in layouts:
            return call.mixed()  # where a feature of every sample lands is up to the one that the index is of
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
    if call.name in ("index_copy", "scatter"):  # what was there is gone
        return call.layout(compressed(torch.where(landed == NO_SAMPLE, layouts[id(target)].ids, landed)))
    return merged(call, [layouts[id(target)].ids, landed])


def scattered(call: Call) -> Mark:
    """x.scatter(dim, index, value): what lands in an element must be of its sample. Whole rows land as those of `index_add` do."""
    target, dim, index, source = call.args[0], call.arg(1, "dim"), call.arg(2, "index"), call.arg(3, "src")
    dim = dim % max(1, target.ndim)
    of_source = call.layouts.get(id(source))
    if of_source is not None and dim in of_source.dims and source.shape == index.shape:
        rows = _whole_rows(on_cpu(index), dim)
        if rows is not None:
            return added_along(replace(call, args=(target, dim, rows, source), kwargs={}))
    layouts = [mark for _, mark in call.marks if isinstance(mark, Layout)]
    met = merged(call, [layout.ids for layout in layouts if layout.ids.ndim == target.ndim])
    if not isinstance(met, Layout) or len(layouts) != len(call.marks) or dim in met.dims:
        return Lost(call.name)
    return met if all(index.shape[d] == target.shape[d] for d in met.dims) else Lost(call.name)


def _whole_rows(index: Tensor, dim: int) -> Tensor | None:
    """Where each row along `dim` goes, if all of its elements go to the same place, as with an index that was expanded."""
    told = index.movedim(dim, 0).reshape(index.shape[dim], -1)
    return told[:, 0] if told.numel() and bool((told == told[:, :1]).all()) else None
