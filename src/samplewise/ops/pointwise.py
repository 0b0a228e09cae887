"""Direct use of a parameter in broadcasting arithmetic, and beside data in `torch.cat`."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves

from samplewise.factors.dense import Dense
from samplewise.flow.call import aligned, compressed
from samplewise.flow.indexing import spelt_index
from samplewise.fold import Fold
from samplewise.ops.registry import Meeting, rule
from samplewise.precision import wide
from samplewise.samples import Layout
from samplewise.tracing import untraced


def pointwise(meeting: Meeting) -> Any:
    """y = f(x, w) element by element: w is spread to y's shape, autograd gives the spread gradient, samples keep theirs.

    So one rule serves `x + pos`, `x * gamma`, `where`, `lerp`, `maximum` and every other elementwise op.
    """
    tensors = [a for a in (*meeting.args, *meeting.kwargs.values()) if isinstance(a, Tensor)]
    shape = torch.broadcast_tensors(*tensors)[0].shape  # torch.broadcast_shapes would import sympy: 40 MB
    layout = common_layout(meeting, tensors, len(shape))
    if layout is None:
        return NotImplemented
    for weight in filter(meeting.is_weight, tensors):
        gate(meeting, weight, shape, layout)
    return meeting.run()


def gate(meeting: Meeting, weight: Tensor, shape: torch.Size, layout: Layout) -> None:
    """Lets the op run on the weight spread to this shape, whose gradient falls into samples by the layout."""
    source = unspread(weight)
    own = tuple(source.shape)
    meeting.gate(weight, source, lambda w: w.expand(shape), lambda g: spread_sum(g, layout, own))


@rule(torch.masked_fill, torch.Tensor.masked_fill)
def masked_fill(meeting: Meeting, input: Tensor, mask: Tensor, value: Any) -> Any:
    """where(mask, value, x): masked_fill itself takes no value of the result's shape."""
    return pointwise(replace(meeting, func=torch.where, args=(mask, value, input), kwargs={}, gates={}))


@rule(torch.Tensor.__setitem__)
def written(meeting: Meeting, target: Tensor, index: Any, value: Tensor) -> Any:
    """x[index] = weight: the weight gets g of the elements that it was written to."""
    if not meeting.is_data(target) or not meeting.is_weight(value) or any(map(meeting.is_data, tree_leaves(index))):
        return NotImplemented
    gate(meeting, value, target[index].shape, _layout_at(index, target, meeting.layout(target)))
    return meeting.run()


@untraced
def _layout_at(index: Any, target: Tensor, layout: Layout) -> Layout:
    """The layout of target[index]."""
    spelt, consumed = spelt_index(index, target.ndim)
    ids = layout.ids.expand([*target.shape[:consumed], *layout.ids.shape[consumed:]])
    return Layout(compressed(ids[spelt]), layout.num_samples)


@rule(torch.cat, torch.concat, torch.concatenate, torch.stack)
def concatenated(meeting: Meeting, tensors: list[Tensor], dim: int = 0, **kwargs: Any) -> Any:
    """Each weight among the tensors gets its own stretch of g."""
    dim = kwargs.pop("axis", dim)
    new_dim = meeting.name == "stack"
    layout = common_layout(meeting, list(tensors), tensors[0].ndim)
    if layout is None or kwargs or (not new_dim and (dim % tensors[0].ndim) in layout.dims):
        return NotImplemented
    for weight in filter(meeting.is_weight, tensors):
        gate(meeting, weight, weight.shape, layout)
    return meeting.run()


@untraced
def common_layout(meeting: Meeting, tensors: list[Tensor], ndim: int) -> Layout | None:
    """The layout in which all data among the tensors agree once broadcast to `ndim` dimensions."""
    layouts = [meeting.layout(t) for t in tensors if meeting.is_data(t)]
    ids = aligned(layouts[0].ids, ndim)
    for layout in layouts[1:]:
        if layout is layouts[0]:
            continue
        left, right = torch.broadcast_tensors(ids, aligned(layout.ids, ndim))
        if not torch.equal(left, right):
            return None
        ids = left
    return layouts[0] if ids is layouts[0].ids else Layout(ids, layouts[0].num_samples)


def unspread(weight: Tensor) -> Tensor:
    """`weight` without what `expand` repeated: dimensions of stride 0 cut to size 1, so that a class token [B, 1, D]
    counts as the [1, 1, D] that it is.

    Only of what `expand` made is it known that each place gives its gradient to the same number: not of memory that repeats
    by itself, of a value with hooks, or of what somebody's Function gave.
    """
    if not is_expanded(weight):
        return weight
    for d, (size, stride) in enumerate(zip(weight.shape, weight.stride(), strict=True)):
        if size > 1 and stride == 0:
            weight = weight.narrow(d, 0, 1)
    return weight


VIEWS = frozenset(
    f"{name}Backward0" for name in "View ReshapeAlias Unsqueeze Squeeze Permute Transpose T Alias Slice Select".split()
)


def is_expanded(weight: Tensor) -> bool:
    """Whether the weight is a view of what `expand` gave, and of what lay in memory once."""
    node, is_found = None if weight._backward_hooks else weight.grad_fn, False  # type: ignore[attr-defined]
    while node is not None and (node.name() in VIEWS or node.name() == "ExpandBackward0"):
        is_found = is_found or node.name() == "ExpandBackward0"
        node = node.next_functions[0][0]
    leaf = getattr(node, "variable", None)
    repeats = leaf is not None and 0 in leaf.stride()
    return is_found and not repeats and not isinstance(node, BackwardCFunction)


def spread_sum(g: Tensor, layout: Layout, shape: tuple[int, ...]) -> Dense:
    """G[b] = the elements of g that belong to sample b, summed down to `shape`, to which g was broadcast from.

    g has the shape of the result; in the ordinary case samples lie along dimensions in which the weight has size 1.
    """
    B, (own, order, rows) = layout.num_samples, _spreading(layout, g.ndim, shape)
    if rows is not None:
        total = Dense.of_sum(rows(g if order is None else g.permute(order)))
        return total if total.shape == shape else Dense(total.G.reshape(B, *shape))
    # the weight itself has a dimension along which samples change: each sample sees its own stretch of it
    ids = layout.ids_on(g.device)
    mine = (ids == torch.arange(B, device=g.device).reshape(-1, *[1] * g.ndim)).expand(B, *g.shape)
    G = torch.where(mine, wide(g), 0)
    dropped = [d + 1 for d in range(g.ndim) if not own[d]]
    return Dense((G.sum(dropped) if dropped else G).reshape(B, *shape))


@lru_cache(maxsize=1024)  # layers and steps repeat
@untraced
def _spreading(
    layout: Layout, ndim: int, shape: tuple[int, ...]
) -> tuple[tuple[bool, ...], tuple[int, ...] | None, Fold | None]:
    """(which dimensions of g the weight really has, the order that puts the others first, how those fold into samples).

    The order is None if it is that of g; the fold is None if samples change along a dimension that the weight has.
    """
    own = (*[False] * (ndim - len(shape)), *(size != 1 for size in shape))
    if any(own[d] for d in layout.dims):
        return own, None, None
    lead, kept = [d for d in range(ndim) if not own[d]], [d for d in range(ndim) if own[d]]
    order = (*lead, *kept)
    ids = layout.ids.permute(order).reshape([layout.ids.shape[d] for d in lead])
    return own, None if order == tuple(range(ndim)) else order, Layout(ids, layout.num_samples).fold(0)
