"""Forward, backward and clipping of a private step in one call, which can be compiled."""

from collections.abc import Callable, Mapping
from glob import escape
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from samplewise.choice import Groups
from samplewise.dp.alone import refuse_dependence
from samplewise.dp.clipping import Clipped
from samplewise.dp.session import Session, clipped_of
from samplewise.errors import SamplewiseError
from samplewise.losses import LossFn
from samplewise.queries import Grads
from samplewise.step import StepResult, step_with


class Whole:
    """(bounds, batch) → (loss, clipped gradients) of a session, by `loss_fn(model, *batch)`.

    **Guarantee.** As `samplewise.dp.clipped`, whether compiled or not; bounds are read anew in each step.

    | | |
    |-|-|
    | several rows of one sample (users, views) | refused |
    | a loss that gives samples something else when one is taken out | refused, by trying it on the first batch |
    | a sample that is not finite, norms that cancelled | the batch is taken op by op |
    """

    def __init__(
        self,
        session: Session,
        loss_fn: LossFn,
        *,
        groups: Groups | None,
        eps: float | None,
        compile: bool,
        options: dict[str, Any],
    ):
        self._session, self._loss_fn, self._groups, self._eps = session, loss_fn, groups, eps
        self._compile, self._options = compile, options
        self._bounds: dict[str, Tensor] = {}
        self._step: Callable[..., StepResult] | None = None
        self._trainable: frozenset[str] = frozenset()
        self._is_tried = False

    def __call__(self, bounds: Mapping[str, float], batch: tuple) -> tuple[Tensor, Clipped]:
        part = self._session.part
        assert part is not None
        if part.ids is not None:
            raise SamplewiseError(
                "step_on() takes one row a sample, and the loader gives several (sample_ids, views). Write the loop with backward "
                "and step()."
            )
        dim = self._options.get("batch_dim", 0)
        sizes = [t.shape[dim] for t in tree_leaves(batch) if isinstance(t, Tensor) and t.ndim > dim]
        if any(size != part.num_samples for size in sizes):
            raise SamplewiseError(
                f"step_on() got tensors of {sizes} rows, the batch of the private loader has {part.num_samples} samples. Give it "
                "that batch, whole."
            )
        if self._step is None or self._session.trainable() != self._trainable or bounds.keys() != self._bounds.keys():
            self._make_step(bounds)
        if not self._is_tried and part.num_samples > 1:
            params = [escape(name) for name in sorted(self._trainable)]
            refuse_dependence(self._session.model, self._loss_fn, batch, params, self._options)
            self._is_tried = True
        for group, bound in bounds.items():
            self._bounds[group].fill_(bound)
        assert self._step is not None
        loss, (sums, is_below) = self._step(*batch)
        if len(is_below) != part.num_samples:
            raise SamplewiseError(
                f"loss_fn gave the model {len(is_below)} samples, the batch of the private loader has {part.num_samples}: each "
                "of them would be clipped as a sample of its own. Give the model the batch as it is."
            )
        return loss, Clipped(sums, part.num_samples, is_below)

    def _make_step(self, bounds: Mapping[str, float]) -> None:
        session, groups, eps = self._session, self._groups, self._eps
        device = next(iter(session.parameters.values())).device
        tensors = {group: torch.zeros((), dtype=torch.float64, device=device) for group in bounds}
        model, self._bounds, self._trainable = session.model, tensors, session.trainable()

        def query(grads: Grads) -> tuple[dict[str, Tensor], Tensor]:
            result = clipped_of(model, grads, tensors, groups, eps)
            return result.sums, result.is_below

        self._is_tried = False
        params = [escape(name) for name in sorted(self._trainable)]
        self._step = step_with(
            session.guard, model, self._loss_fn, query, compile=self._compile, params=params, **self._options
        )
