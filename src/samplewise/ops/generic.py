"""Any differentiable op: exact, from the op's own backward, one sample at a time."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_map_only

from samplewise.factors.dense import Dense
from samplewise.ops.registry import Meeting
from samplewise.samples import Layout


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

    weights = {id(t): t for t in _tensors(meeting) if meeting.is_weight(t)}
    args, kwargs = tree_map_only(Tensor, stand_in, (meeting.args, meeting.kwargs))
    y = meeting.func(*args, **kwargs)
    if not isinstance(y, Tensor):
        return NotImplemented
    if not y.requires_grad:  # integers, comparisons
        return y
    edge = get_gradient_edge(y)
    for key, weight in weights.items():
        meeting.use(weight, GenericFactor(edge, stand_ins[key]))
    return y


class GenericFactor:
    """g → Dense, through the graph of one op call."""

    def __init__(self, edge: Any, stand_in: Tensor):
        self.edge, self.stand_in = edge, stand_in
        self.result_layout: Layout | None = None

    def __call__(self, g: Tensor) -> Dense:
        assert self.result_layout is not None
        ids, B = self.result_layout.ids.to(g.device), self.result_layout.num_samples
        rows = [self._vjp(torch.where(ids == b, g, 0)) for b in range(B)]
        return Dense(torch.stack(rows) if rows else self.stand_in.new_zeros(0, *self.stand_in.shape))

    def _vjp(self, g: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(
            self.edge, self.stand_in, g, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return gradient


def _tensors(meeting: Meeting) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map_only(Tensor, found.append, (meeting.args, meeting.kwargs))
    return found
