"""Any differentiable op: exact, from the op's own backward, one sample at a time."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map_only

from samplewise.errors import UnattributedError
from samplewise.factors.dense import Dense
from samplewise.ops.registry import Meeting
from samplewise.samples import Layout
from samplewise.saving import kept_as_is


def generic(meeting: Meeting) -> Any:
    """Runs the op on stand-ins for the weights that do need a gradient, beside the main graph.

    G[b] = the op's vector-Jacobian product of g with everything but the rows of sample b left out. The layout of the
    result, which tells those rows, is filled in by the caller as `result_layout`.
    """
    stand_ins: dict[int, Tensor] = {}

    def stand_in(t: Tensor) -> Tensor:
        if not meeting.is_weight(t):
            return t
        return stand_ins.setdefault(id(t), t.detach().requires_grad_())

    tensors = [t for t in tree_leaves((meeting.args, meeting.kwargs)) if isinstance(t, Tensor)]
    args, kwargs = tree_map_only(Tensor, stand_in, (meeting.args, meeting.kwargs))
    with kept_as_is():
        y = meeting.func(*args, **kwargs)
    if not isinstance(y, Tensor):
        return NotImplemented
    if not y.requires_grad:  # integers, comparisons
        return y
    edge = get_gradient_edge(y)
    data = tuple(t for t in tensors if meeting.is_data(t))
    for weight in {id(t): t for t in tensors if meeting.is_weight(t)}.values():
        meeting.use(weight, GenericFactor(meeting, edge, stand_ins[id(weight)], weight, data), keep=data)
    return y


class GenericFactor:
    """g → Dense, through the graph of one op call."""

    def __init__(self, meeting: Meeting, edge: Any, stand_in: Tensor, weight: Tensor, data: tuple[Tensor, ...]):
        self.edge, self.stand_in = edge, stand_in
        self.func, self.args, self.kwargs = meeting.func, *tree_map_only(Tensor, id, (meeting.args, meeting.kwargs))
        self.layouts = {id(t): meeting.layout(t) for t in data}
        self.others = {
            id(t): meeting.plain(t).detach()
            for t in tree_leaves((meeting.args, meeting.kwargs))
            if isinstance(t, Tensor) and not meeting.is_data(t)
        }
        self.weight_id = id(weight)
        self.data_ids = [id(t) for t in data]
        self.result_layout: Layout | None = None

    def __call__(self, g: Tensor, *data: Tensor) -> Dense:
        assert self.result_layout is not None
        B, ids = self.result_layout.num_samples, self.result_layout.ids.to(g.device)
        if all(bool(t.isfinite().all()) for t in (g, *data)):
            rows = [self._vjp(self.edge, self.stand_in, torch.where(ids == b, g, 0)) for b in range(B)]
        else:  # left out by selection: what is not finite would pass through a product with zero
            rows = [self._alone(b, g, data) for b in range(B)]
        return Dense(torch.stack(rows) if rows else self.stand_in.new_zeros(0, *self.stand_in.shape))

    def _alone(self, b: int, g: Tensor, data: tuple[Tensor, ...]) -> Tensor:
        """The op once more on the rows of sample b."""
        assert self.result_layout is not None
        if any(len(layout.dims) != 1 for layout in (self.result_layout, *self.layouts.values())):
            return self._vjp(self.edge, self.stand_in, torch.where(self.result_layout.ids.to(g.device) == b, g, 0))
        cut = {key: _rows_of(b, t, self.layouts[key]) for key, t in zip(self.data_ids, data, strict=True)}
        weight = self.stand_in.detach().requires_grad_()
        values = {**self.others, **cut, self.weight_id: weight}
        known = values.keys()
        args, kwargs = tree_map_only(int, lambda a: values[a] if a in known else a, (self.args, self.kwargs))
        own = _rows_of(b, g, self.result_layout)
        with torch.enable_grad():
            y = self.func(*args, **kwargs)
        if y.shape != own.shape:  # the weight itself has a row a sample
            raise UnattributedError(
                f"sample {b} or another is not finite, and {self.func.__name__} cannot be run on one sample alone to keep them "
                "apart, because its weight has a row for each. Leave out samples that are not finite."
            )
        return self._vjp(y, weight, own)

    @staticmethod
    def _vjp(y: Any, weight: Tensor, g: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(y, weight, g, retain_graph=True, allow_unused=True, materialize_grads=True)
        return gradient


def _rows_of(b: int, t: Tensor, layout: Layout) -> Tensor:
    (axis,) = layout.dims
    return t.index_select(axis, (layout.ids.flatten() == b).nonzero().squeeze(1).to(t.device))
