"""Elements picked by an index: it is applied to the sample ids, and what data picks is of the sample that picks it."""

from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from samplewise.constants import on_cpu
from samplewise.flow.call import Call, Several, aligned, compressed, merged
from samplewise.samples import Layout, Lost, Mark


def indexed(call: Call) -> Mark:
    """x[index]: the index is applied to the ids. What data picks is of the sample that picks it."""
    source, given = call.args[0], call.args[1]
    layouts = call.layouts
    parts = []
    if id(source) in layouts:
        ids = layouts[id(source)].ids
        index, consumed = spelt_index(given, source.ndim, ids)
        ids = ids.expand([*source.shape[:consumed], *ids.shape[consumed:]])
        parts.append(compressed(ids[index]))
    pickers = given if isinstance(given, tuple) else (given,)
    if any(id(i) in layouts for i in pickers):
        of_pickers = samples_of_pickers(call, pickers, layouts, call.out.ndim)
        if of_pickers is None:
            return Lost(call.name)
        parts.append(of_pickers)
    return merged(call, parts)


def samples_of_pickers(call: Call, pickers: tuple, layouts: dict[int, Layout], ndim: int) -> Tensor | None:
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


def _consumed(index: Any) -> int:
    """How many dimensions of the tensor one part of an index takes up."""
    if index is None or index is Ellipsis:
        return 0
    return index.ndim if isinstance(index, Tensor) and index.dtype == torch.bool else 1


def selected_by_data(call: Call) -> Mark:
    """x.index_select(dim, index) with an index of data: row i of the result is of the sample that picks it."""
    source, dim, index = call.args[0], call.arg(1, "dim"), call.arg(2, "index")
    layouts = call.layouts
    dim = dim % max(1, source.ndim)
    shape = [1] * call.out.ndim
    shape[dim] = -1
    parts = [layouts[id(index)].ids.reshape(shape)] if id(index) in layouts else []
    if id(source) in layouts:
        ids = layouts[id(source)].ids
        parts.append(ids if ids.shape[dim] == 1 else ids.index_select(dim, on_cpu(index)))
    return merged(call, parts)


def gathered(call: Call) -> Mark:
    """x.gather(dim, index): an element comes from the sample that it is picked from; take_along_dim broadcasts the two."""
    source = call.args[0]
    position, index_position = (1, 2) if call.name == "gather" else (2, 1)
    dim, index = call.arg(position, "dim"), call.arg(index_position, "index", call.kwargs.get("indices"))
    if dim is None or source.ndim != index.ndim:
        return Lost(call.name)
    layouts = call.layouts
    dim = dim % max(1, source.ndim)
    parts = [layouts[id(index)].ids] if id(index) in layouts else []  # along the other dimensions the two line up
    if id(source) in layouts:
        ids = layouts[id(source)].ids
        for d in range(source.ndim):
            if d != dim and ids.shape[d] > call.out.shape[d]:
                ids = ids.narrow(d, 0, call.out.shape[d])
        if ids.shape[dim] != 1:
            ids = ids.expand([call.out.shape[d] if d != dim else source.shape[d] for d in range(source.ndim)])
            ids = compressed(ids.gather(dim, on_cpu(index).expand(call.out.shape)))
        parts.append(ids)
    return merged(call, parts)


def coordinates(call: Call) -> Several | Mark:
    """nonzero(x), where(x): each place belongs to the sample of the element that it is the place of."""
    tensor, layout = call.subject
    found = layout.ids.expand(tensor.shape)[(tensor != 0).cpu()]
    return Several(call.layout(found.reshape([-1] + [1] * (t.ndim - 1))) for t in call.results)
