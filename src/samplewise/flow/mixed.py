"""What ops make of values in which samples met: a loss stays a weighted sum of its samples, or it does not."""

from dataclasses import replace
from numbers import Real

from torch import Tensor

from samplewise.flow.call import Call
from samplewise.flow.names import ADDING, DIVIDING, LINEAR, SCALING
from samplewise.samples import Layout, Mark, Mixed, Term


def of_mixed(call: Call, *, is_move: bool) -> Mark:
    """A loss stays a weighted sum of its samples under sums, and under products with what needs no gradient."""
    mixed = [mark for _, mark in call.marks if isinstance(mark, Mixed)]
    learning = [t for t, _ in call.marks if t.requires_grad]
    nonlinear = Mixed(mixed[0].op)
    if call.name in ADDING and call.out.ndim == 0 and all(mark.linear for mark in mixed):
        even = len(mixed) == len(call.marks) and all(mark.even for mark in mixed)
        return replace(mixed[0], even=even, reduction=_reduction_of_terms(mixed), terms=_terms_together(call))
    if len(mixed) != len(call.marks) or not all(mark.linear for mark in mixed):
        return nonlinear  # a statistic of the batch goes back into its samples
    if call.name in LINEAR or call.name in ("sum", "mean") or is_move:
        even = all(mark.even for mark in mixed)
        return replace(mixed[0], even=even, reduction=_reduction_of_terms(mixed), terms=_terms_together(call))
    only_numerator_learns = call.name not in DIVIDING or not learning or learning[0] is call.args[0]
    if len(mixed) > 1 and call.name not in DIVIDING:
        return nonlinear  # a statistic that every sample is multiplied with
    if call.name in SCALING and len(learning) <= 1 and only_numerator_learns:
        if len(mixed) > 1:
            return replace(mixed[0], even=False, reduction=None, terms=None)
        return replace(mixed[0], reduction=_reduction_scaled(call, mixed[0]), terms=_terms_scaled(call, mixed[0]))
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


def _terms_together(call: Call) -> frozenset[Term] | None:
    """The terms of all that the op adds up or moves; not known where a value may be repeated, or scaled on the way."""
    moved = sum(t.numel() for t, mark in call.marks if isinstance(mark, Mixed))
    if call.out.numel() > moved or "alpha" in call.kwargs or _repeats(call):
        return None
    of_each = [frozenset([Term("sum")]) if isinstance(mark, Layout) else mark.terms for _, mark in call.marks]  # type: ignore[union-attr]
    known = [terms for terms in of_each if terms is not None]
    return frozenset[Term]().union(*known) if len(known) == len(of_each) else None


def _repeats(call: Call) -> bool:
    """Whether a move may give a value several times."""
    index = call.args[1] if call.name == "getitem" else ()
    picks = any(isinstance(i, list | Tensor) for i in (index if isinstance(index, tuple) else (index,)))
    return picks or call.name in REPEATING


REPEATING = set("index_select expand expand_as broadcast_to repeat tile repeat_interleave unfold".split())


def _terms_scaled(call: Call, mark: Mixed) -> frozenset[Term] | None:
    """The terms multiplied with, or divided by, a Python number; not known for a tensor."""
    others = [a for a in (*call.args, *call.kwargs.values()) if not isinstance(a, Tensor)]
    if mark.terms is None or len(others) != 1 or not isinstance(others[0], Real):
        return None
    number = float(others[0])
    if number == 0:
        return None if call.name in DIVIDING else frozenset()
    factor = 1 / number if call.name in DIVIDING else number
    return frozenset(term._replace(factor=term.factor * factor) for term in mark.terms)
