"""Ops that only move elements: what they do to a tensor they do to its sample ids."""

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from samplewise.constants import on_cpu
from samplewise.flow.call import Call, Several, aligned, compressed, merged
from samplewise.flow.indexing import selected_by_data
from samplewise.fold import NO_SAMPLE
from samplewise.samples import Layout, Lost, Mark


def reshaped(call: Call) -> Mark:
    """view, reshape, flatten, squeeze: elements keep their order."""
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
    """permute, transpose: dimensions change places."""
    _, layout = call.subject
    return call.layout(call.func(layout.ids, *call.args[1:], **call.kwargs))


def expanded(call: Call) -> Mark:
    """expand: ids broadcast as the tensor does."""
    _, layout = call.subject
    return call.layout(aligned(layout.ids, call.out.ndim))


def repeated(call: Call) -> Mark:
    """repeat and tile: a dimension that holds no samples has size 1 in ids again, whatever it is repeated to."""
    _, layout = call.subject
    return call.layout(compressed(call.func(layout.ids, *call.args[1:], **call.kwargs)))


def windows(call: Call) -> Mark:
    """as_strided, where each row of the result lies in the memory of the same row of the tensor (Longformer's windows)."""
    tensor, layout = call.subject
    size, stride = (tuple(map(int, call.arg(at, name))) for at, name in ((1, "size"), (2, "stride")))
    is_by_rows = layout.dims in ((), (0,)) and call.arg(3, "storage_offset") in (None, tensor.storage_offset())
    if not is_by_rows or not _lies_in_rows(tuple(tensor.shape), tensor.stride(), size, stride):
        return Lost(call.name)
    return call.layout(layout.ids.reshape([-1, *[1] * (len(size) - 1)]))


@lru_cache(maxsize=1024)
def _lies_in_rows(
    source: tuple[int, ...], source_stride: tuple[int, ...], target: tuple[int, ...], target_stride: tuple[int, ...]
) -> bool:
    """Whether no two elements of the source share memory, and what the target has in a row, the source has in it too.

    >>> _lies_in_rows((2, 8), (8, 1), (2, 3, 4), (8, 2, 1)), _lies_in_rows((2, 8), (8, 1), (2, 4, 4), (8, 2, 1))
    (True, False)
    >>> _lies_in_rows((2, 8), (1, 1), (2, 4), (1, 1))
    False
    """
    extent = 1
    for step, num in sorted(zip(source_stride, source, strict=True)):
        if num > 1 and step < extent:
            return False
        extent += step * (num - 1)
    if (source[:1], source_stride[:1]) != (target[:1], target_stride[:1]) or not target:
        return False
    rows, others = ([*zip(n[1:], s[1:], strict=True)] for n, s in ((source, source_stride), (target, target_stride)))
    if rows and others and rows[-1] == others[-1]:  # features, which need not be counted out
        rows, others = rows[:-1], others[:-1]
    return set(_places(others)) <= set(_places(rows))


def _places(dims: list[tuple[int, int]]) -> list[int]:
    """Where the elements of these (size, stride) lie."""
    places = [0]
    for num, step in dims:
        places = [place + step * i for place in places for i in range(num)]
    return places


def broadcast(call: Call) -> Several:
    """broadcast_tensors(...): each in the shape of all."""
    layouts = call.layouts
    each = [layouts.get(id(t)) for t in tree_leaves(call.args)]
    ndim = call.out.ndim
    return Several([None if layout is None else call.layout(aligned(layout.ids, ndim)) for layout in each])


def last_dim_changed(call: Call) -> Mark:
    """view_as_complex and view_as_real: the last dimension goes or comes."""
    tensor, layout = call.subject
    if call.out.ndim > tensor.ndim:
        return call.layout(layout.ids.unsqueeze(-1))
    return call.mixed() if tensor.ndim - 1 in layout.dims else call.layout(layout.ids.squeeze(-1))


SPLITS = {"hsplit": 1, "vsplit": 0, "dsplit": 2}
"""The dimension that each splits, of a tensor with several."""
DIM_IS_SECOND = {"chunk", "split", "split_with_sizes", "tensor_split", "roll", "repeat_interleave"}


def indexed_along(call: Call) -> Mark:
    """Ops that pick, cut or reorder along one dimension."""
    tensor, layout = call.subject
    if call.name in SPLITS and tensor.ndim > 1:
        call = replace(call, func=torch.tensor_split, args=(*call.args[:2], SPLITS[call.name]), name="tensor_split")
    if tensor is not call.args[0] or len(call.marks) > 1:
        return selected_by_data(call) if call.name == "index_select" else Lost(call.name)
    dims = _dims_along(call, tensor.ndim)
    if dims is None:
        return Lost(call.name)
    if all(layout.ids.shape[d] == 1 for d in dims):
        ids = layout.ids
        if call.out.ndim < tensor.ndim:
            ids = ids.squeeze(dims[0])
        elif call.out.ndim > tensor.ndim:
            ids = ids.unsqueeze(-1)
        return call.layout(ids)
    if call.name == "unfold":
        return Lost(call.name)
    args = [on_cpu(a) if isinstance(a, Tensor) else a for a in call.args[1:]]
    kwargs = {k: on_cpu(v) if isinstance(v, Tensor) else v for k, v in call.kwargs.items() if k != "out"}
    out = call.func(layout.ids, *args, **kwargs)
    if isinstance(out, Tensor):
        return call.layout(compressed(out))
    return Several([call.layout(compressed(ids)) for ids in out])  # type: ignore[return-value]


def _dims_along(call: Call, ndim: int) -> list[int] | None:
    """The dimensions along which the call picks, cuts or reorders; None where it works on the flattened tensor."""
    if call.name == "flip":
        given = call.kwargs.get("dims", call.args[1] if len(call.args) == 2 else call.args[1:])
    else:
        keyword = {"roll": "dims", "unfold": "dimension"}.get(call.name, "dim")
        default = None if call.name in ("roll", "repeat_interleave") else 0
        given = call.arg(2 if call.name in DIM_IS_SECOND else 1, keyword, default)
    return None if given is None else [d % ndim for d in (given if isinstance(given, list | tuple) else [given])]


def concatenated(call: Call) -> Mark:
    """cat and stack: side by side along a dimension; what all parts agree on stays as short as it is."""
    tensors, ndim, is_new = call.arg(0, "tensors"), call.out.ndim, call.name == "stack"
    dim = call.arg(1, "dim", 0) % ndim
    layouts = call.layouts

    def ids_of(t: Tensor) -> Tensor:
        ids = layouts[id(t)].ids
        return ids.unsqueeze(dim) if is_new else ids

    if all(is_new or layouts[id(t)].ids.shape[dim] == 1 for t in tensors if id(t) in layouts):
        same = merged(call, [ids_of(t) for t in tensors if id(t) in layouts])
        if isinstance(same, Layout):
            return same
    parts = []
    others = [size for d, size in enumerate(call.out.shape) if d != dim]
    for t in tensors:
        if t.ndim == 1 and t.numel() == 0 and ndim > 1:
            continue  # torch.cat skips empty vectors
        length = 1 if is_new else t.shape[dim]
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


def padded(call: Call) -> Mark:
    """pad(x, pad): what is added must not lie beside the samples, as it would be of none."""
    tensor, layout = call.subject
    pad = call.arg(1, "pad")
    touched = {tensor.ndim - 1 - k // 2 for k, size in enumerate(pad) if size}
    return Lost(call.name) if touched & set(layout.dims) else layout
