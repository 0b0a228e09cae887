"""What a loss must be for its samples to have gradients of their own."""

from collections.abc import Callable

from torch import Tensor

from samplewise.errors import SamplesMixError, SamplewiseError, UnattributedError
from samplewise.samples import Lost, Mark, Mixed

LossFn = Callable[..., Tensor]
"""(model, *batch) → one loss a sample, shape [B]."""


def check_loss(mark: Mark | None, loss_reduction: str | None) -> None:
    """Raises if a loss with this mark mixes samples, or is a mean that does not weigh them alike."""
    if isinstance(mark, Lost):
        raise UnattributedError(
            f"the loss was made by {mark.op}, of which it is not known whether it keeps samples apart. Compute one loss a "
            "sample from ops that are known, or say where its samples lie: grads.mark(losses)."
        )
    if not isinstance(mark, Mixed):
        return
    if not mark.linear:
        raise SamplesMixError(
            f"the loss mixes samples ({mark.op} combines them other than by a weighted sum), so it has no per-sample "
            "gradients. A loss must be a sum or mean of one term a sample."
        )
    if loss_reduction == "mean" and not mark.even:
        raise SamplesMixError(
            f'loss_reduction="mean", but the mean made by {mark.op} does not weigh all samples alike (ignored targets, class '
            "weights or rows of unequal number). Give one loss a sample to grads.backward(losses)."
        )


def check_reduction(mark: Mark | None, loss_reduction: str) -> None:
    """Raises if a loss with this mark is certainly not the reduction that it is said to be."""
    if isinstance(mark, Mixed) and mark.reduction not in (None, loss_reduction):
        raise SamplewiseError(
            f'the loss is a {mark.reduction} over the samples, but loss_reduction="{loss_reduction}". '
            f'Say capture(model, loss_reduction="{mark.reduction}"), or give one loss a sample to grads.backward(losses).'
        )
