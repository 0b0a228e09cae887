"""What ops make of values in which samples met: a loss stays a weighted sum of its samples, or it does not."""

from dataclasses import replace

from torch import Tensor

from samplewise.flow.call import Call
from samplewise.flow.names import ADDING, DIVIDING, LINEAR, SCALING
from samplewise.samples import Mark, Mixed


def of_mixed(call: Call, *, is_move: bool) -> Mark:
    """A loss stays a weighted sum of its samples under sums, and under products with what needs no gradient."""
    mixed = [mark for _, mark in call.marks if isinstance(mark, Mixed)]
    learning = [t for t, _ in call.marks if t.requires_grad]
    nonlinear = Mixed(mixed[0].op)
    if call.name in ADDING and call.out.ndim == 0 and all(mark.linear for mark in mixed):
        even = len(mixed) == len(call.marks) and all(mark.even for mark in mixed)
        return replace(mixed[0], even=even, reduction=_reduction_of_terms(mixed))
    if len(mixed) != len(call.marks) or not all(mark.linear for mark in mixed):
        return nonlinear  # a statistic of the batch goes back into its samples
    if call.name in LINEAR or call.name in ("sum", "mean") or is_move:
        return replace(mixed[0], even=all(mark.even for mark in mixed), reduction=_reduction_of_terms(mixed))
    only_numerator_learns = call.name not in DIVIDING or not learning or learning[0] is call.args[0]
    if len(mixed) > 1 and call.name not in DIVIDING:
        return nonlinear  # a statistic that every sample is multiplied with
    if call.name in SCALING and len(learning) <= 1 and only_numerator_learns:
        one = len(mixed) == 1
        return replace(mixed[0], even=one and mixed[0].even, reduction=_reduction_scaled(call, mixed[0]) if one else None)
    return nonlinear


def _reduction_of_terms(terms: list[Mixed]) -> str | None:
    """What a sum of these is over the samples: certainly no sum if one of them is a mean."""
    certain = {mark.reduction for mark in terms} - {None}
    return "mean of one term and sum of another" if len(certain) > 1 else certain.pop() if certain else None


def _reduction_scaled(call: Call, mark: Mixed) -> str | None:
    """A sum divided by the number of samples is their mean."""
    by = call.args[1] if call.name in DIVIDING and len(call.args) > 1 else None
    is_mean = mark.reduction == "sum" and not isinstance(by, Tensor) and by == mark.num_samples and by != 1
    return "mean" if is_mean else None
