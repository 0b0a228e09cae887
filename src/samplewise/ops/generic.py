"""Any differentiable op: exact, from the op's own backward, one sample at a time."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map_only

from samplewise.errors import UnattributedError
from samplewise.factors.dense import Dense
from samplewise.flow.call import is_torchs
from samplewise.ops.registry import Meeting
from samplewise.samples import Layout
from samplewise.saving import kept_as_is
from samplewise.tracing import doubt, is_tracing

COARSE = 0.02
"""How far somebody's own backward may be from itself, relative to its largest entry: half precision inside is no error."""
_WAYS_OUT = (
    "If it is a checkpoint of your own, use torch.utils.checkpoint; or write it in ops of torch, or leave its parameters out: "
    "capture(model, exclude=[...])."
)
TRIED: set[Any] = set()
"""Functions and registered ops whose backward was found to give a sample alone what it gives it in its batch."""


class Generic:
    """A call run on stand-ins for its weights that do need a gradient, beside the main graph.

    G[b] = the op's vector-Jacobian product of g with everything but the rows of sample b left out.
    """

    def __init__(self, meeting: Meeting, run: Callable[..., Any]):
        if is_tracing() and not is_torchs(meeting.func):
            raise UnattributedError(
                f"the step cannot be compiled: {meeting.name} meets a parameter and is somebody's own, and whether its backward keeps "
                "samples apart is checked on values, which a step has none of while it is traced. Write it in ops of torch, or take "
                "the step op by op: per_sample_step(..., compile=False)."
            )
        self.meeting = meeting
        self.stand_ins: dict[int, Tensor] = {}
        self.tensors = [t for t in tree_leaves((meeting.args, meeting.kwargs)) if isinstance(t, Tensor)]
        args, kwargs = tree_map_only(Tensor, self._stand_in, (meeting.args, meeting.kwargs))
        before = self._state()
        with kept_as_is():
            self.out = run(*args, **kwargs)
        self.is_repeatable = self._state() == before
        """Whether the call can be run again: it drew no random numbers and changed no argument."""

    def _state(self) -> Any:
        if is_torchs(self.meeting.func):
            return None
        random = torch.cuda.get_rng_state() if any(t.is_cuda for t in self.tensors) else torch.get_rng_state()
        return random.tolist(), [t._version for t in self.tensors]

    def _stand_in(self, t: Tensor) -> Tensor:
        if not self.meeting.is_weight(t):
            return t
        return self.stand_ins.setdefault(id(t), t.detach().requires_grad_())

    def use(self, place: int, y: Tensor, layout: Layout) -> None:
        """Records the uses of the weights in one result of the call, which stands at this place among its results."""
        data = tuple(t for t in self.tensors if self.meeting.is_data(t))
        for weight in {id(t): t for t in self.tensors if self.meeting.is_weight(t)}.values():
            factor = GenericFactor(self.meeting, place, y, self.stand_ins[id(weight)], weight, data, layout)
            factor.is_repeatable = self.is_repeatable
            self.meeting.use(weight, factor, keep=data)


class GenericFactor:
    """g → Dense, through the graph of one op call."""

    def __init__(
        self,
        meeting: Meeting,
        place: int,
        y: Tensor,
        stand_in: Tensor,
        weight: Tensor,
        data: tuple[Tensor, ...],
        result_layout: Layout,
    ):
        self.place, self.edge, self.stand_in, self.result_layout = place, get_gradient_edge(y), stand_in, result_layout
        self.func, self.args, self.kwargs = meeting.func, *tree_map_only(Tensor, id, (meeting.args, meeting.kwargs))
        self.layouts = {id(t): meeting.layout(t) for t in data}
        others = [t for t in tree_leaves((meeting.args, meeting.kwargs)) if isinstance(t, Tensor) and not meeting.is_data(t)]
        self.others = {id(t): meeting.plain(t).detach() for t in others}
        self.weights = {id(t): t for t in others if meeting.is_weight(t)}
        self.is_repeatable = True
        self.weight_id = id(weight)
        self.data_ids = [id(t) for t in data]

    def __call__(self, g: Tensor, *data: Tensor) -> Dense:
        B, ids = self.result_layout.num_samples, self.result_layout.ids_on(g.device)
        if self._are_finite(g, *data):
            if not is_torchs(self.func):
                self._refuse_other_weight(g, data)
            rows = [self._vjp(self.edge, self.stand_in, torch.where(ids == b, g, 0)) for b in range(B)]
            if not is_torchs(self.func) and rows:
                self._refuse_other_sum(g, rows)
                self._refuse_other_alone(g, data, rows)
        else:  # left out by selection: what is not finite would pass through a product with zero
            rows = [self._alone(b, g, data) for b in range(B)]
        return Dense(torch.stack(rows) if rows else self.stand_in.new_zeros(0, *self.stand_in.shape))

    def _are_finite(self, *tensors: Tensor) -> bool:
        finite = [t.isfinite().all() for t in tensors]
        if not is_tracing():
            return all(map(bool, finite))
        doubt(~torch.stack(finite).all())
        return True

    def _alone(self, b: int, g: Tensor, data: tuple[Tensor, ...], weights: Mapping[int, Tensor] | None = None) -> Tensor:
        """The op once more on the rows of sample b, and on these weights, or else on a stand-in for that which is asked for."""
        if not self.is_repeatable or any(len(layout.dims) != 1 for layout in (self.result_layout, *self.layouts.values())):
            return self._vjp(self.edge, self.stand_in, torch.where(self.result_layout.ids_on(g.device) == b, g, 0))
        cut = {key: _rows_of(b, t, self.layouts[key]) for key, t in zip(self.data_ids, data, strict=True)}
        weights = weights or {self.weight_id: self.stand_in.detach().requires_grad_()}
        own = _rows_of(b, g, self.result_layout)
        with torch.enable_grad():
            y = self._run({**self.others, **cut, **weights})
        if y.shape != own.shape:  # the weight itself has a row a sample
            raise UnattributedError(
                f"sample {b} or another is not finite, and {self.func.__name__} cannot be run on one sample alone to keep them "
                "apart, because its weight has a row for each. Leave out samples that are not finite."
            )
        return self._vjp(y, weights[self.weight_id], own)

    def _refuse_other_weight(self, g: Tensor, data: tuple[Tensor, ...]) -> None:
        """Somebody's own backward may take the gradient of the weight itself, which it has by another way than its arguments."""
        try:
            if _gradient(self.edge, self.stand_in, g) is not None:
                return
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise UnattributedError(
                f"the backward of {self.func.__name__} cannot be asked for the share of one parameter ({error}). {_WAYS_OUT}"
            ) from error
        values = {**self.others, **{key: t.clone() for key, t in zip(self.data_ids, data, strict=True)}, **self.weights}
        with torch.random.fork_rng([t.device for t in data if t.is_cuda]), torch.enable_grad():
            y = self._run(values)
            if _gradient(y, self.weights[self.weight_id], g) is None:
                return
        raise UnattributedError(
            f"the backward of {self.func.__name__} gives a parameter its gradient although none of its arguments leads there: it runs "
            f"code that holds the parameter. {_WAYS_OUT}"
        )

    def _run(self, values: Mapping[int, Tensor]) -> Tensor:
        """The op once more, on these tensors in the places of those that it was called with."""
        args, kwargs = tree_map_only(int, lambda a: values.get(a, a), (self.args, self.kwargs))
        return tree_leaves(self.func(*args, **kwargs))[self.place]

    def _refuse_other_sum(self, g: Tensor, rows: list[Tensor]) -> None:
        """Somebody's own backward may mix samples, or change what it keeps: then its parts are not parts of its whole."""
        whole, total = self._vjp(self.edge, self.stand_in, g), torch.stack(rows).sum(0)
        largest = max(float(row.abs().max()) for row in rows)
        off = float((total - whole).abs().max())
        if off > COARSE * len(rows) ** 0.5 * largest:
            raise UnattributedError(
                f"the backward of {self.func.__name__} gives the whole batch something else than the sum of what it gives each "
                f"sample (off by {off:.1e}): it mixes samples, is not linear in the gradient, or "
                "changes what it keeps. Write it in ops of torch, or leave its parameters out: capture(model, exclude=[...])."
            )

    def _refuse_other_alone(self, g: Tensor, data: tuple[Tensor, ...], rows: list[Tensor]) -> None:
        """Somebody's own backward may give a sample what other samples kept: then the sample alone gets something else."""
        b, kind = len(rows) - 1, getattr(self.func, "cls", self.func)
        if kind in TRIED or not self.is_repeatable:
            return
        TRIED.add(kind)  # once, as running it may have effects of its own
        try:
            alone = self._alone(b, g, data, self.weights)  # those themselves, which its backward may have by another way too
        except Exception:  # it cannot be run on one sample
            return
        off = float((alone - rows[b]).abs().max())
        if off > COARSE * max(float(alone.abs().max()), float(rows[b].abs().max())):
            TRIED.discard(kind)
            raise UnattributedError(
                f"the backward of {self.func.__name__} gives sample {b} alone something else than in its batch (off by {off:.1e}): "
                "it uses what it kept of other samples. Write it in ops of torch, or leave its parameters out: "
                "capture(model, exclude=[...])."
            )

    @staticmethod
    def _vjp(y: Any, weight: Tensor, g: Tensor) -> Tensor:
        gradient = _gradient(y, weight, g)
        return torch.zeros_like(weight) if gradient is None else gradient


def _gradient(y: Any, weight: Tensor, g: Tensor) -> Tensor | None:
    """The gradient that g of `y` gives the weight; None if there is no way from one to the other."""
    return torch.autograd.grad(y, weight, g, retain_graph=True, allow_unused=True)[0]


def _rows_of(b: int, t: Tensor, layout: Layout) -> Tensor:
    (axis,) = layout.dims
    return t.index_select(axis, (layout.ids.flatten() == b).nonzero().squeeze(1).to(t.device))
