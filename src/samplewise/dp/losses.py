"""Which losses may be trained on privately: those in which what a sample counts for is not up to the others."""

import math
import sys
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor

from samplewise.errors import SamplesMixError, SamplewiseError
from samplewise.marks import Marks
from samplewise.samples import Layout, Mark, Mixed, Term
from samplewise.sight import function_of

POWERS = (1.0, -1.0, 0.5, -0.5, 2.0, -2.0)


@dataclass
class Scales:
    """What the losses of the batches so far were multiplied with."""

    sizes: dict[float, set[int]] = field(default_factory=dict)
    """{factor of a sum: sizes of the batches that had it}."""
    last: tuple[int, tuple[float, ...]] = (0, ())
    """The size of the batch before, and all numbers that its losses were multiplied with."""

    outside: Marks[int] = field(default_factory=Marks)
    """Tensors from outside that losses were made of, and the batch in which each was met first."""
    num_batches: int = 0

    def is_new(self, t: Tensor) -> bool:
        """Whether the tensor was in no loss of an earlier batch."""
        first = self.outside.get(t)
        if first is None:
            self.outside.set(t, self.num_batches)
        return first in (None, self.num_batches)

    def is_known(self, factor: float, size: int) -> bool:
        """Whether a sum over a batch of another size had this factor, so that the size is not where it comes from."""
        sizes = self.sizes.setdefault(factor, set())
        sizes.add(size)
        return sizes != {size}

    def follow_size(self, numbers: tuple[float, ...], size: int) -> float | None:
        """A number that is another one for a batch of another size, by a power of the ratio of the sizes; None if there is none."""
        (before, known), self.last = self.last, (size, numbers)
        if before in (0, size) or len(known) != len(numbers):
            return None
        return next((a for a, b in zip(numbers, known, strict=True) if _follows(a, b, size / before)), None)


def _follows(number: float, before: float, ratio: float) -> bool:
    if number == before or number * before <= 0:
        return False
    return any(math.isclose(number / before, ratio**power, rel_tol=1e-6) for power in POWERS)


class Strict:
    """Stands by one capture, and raises where a loss would give a sample a scale that depends on the others.

    **Guarantee.** Backward starts only from a sum over the samples times a number, or from their mean times a number, as
    `loss_reduction` says. The numbers are Python's, and nothing of several samples was read into Python before.

    | | |
    |-|-|
    | "mean": `losses.mean()`, `losses.sum() / len(x)`, times a number | taken |
    | "mean": `losses.sum() / 64` | refused unless the batch has 64 samples |
    | "sum": `losses.sum()`, `losses.sum() / 64` | taken |
    | "sum": `losses.sum() / len(x)` | refused |
    | a product with a tensor, a division by labels | refused |
    | `.item()`, `if`, `.tolist()` of several samples before backward, outside of the model | refused |
    | a gradient hook, a sum by somebody's autograd.Function, outside of the model | refused |
    | an autograd.Function whose `apply` was looked up before the model was called, outside of the model | refused |
    | a number that follows the size of the batch otherwise, `(losses / len(x)).sum()` | refused from the second size on |
    """

    def __init__(self, scales: Scales):
        self._scales = scales
        scales.num_batches += 1
        self._read: str | None = None
        self._hidden: str | None = None
        self._is_read_inside = False
        self._numbers: list[float] = []
        self._seen: list[tuple[int, int]] = []
        """Spans of autograd's numbers of its nodes: calls of the model, Functions that were seen."""
        self._functions: dict[int, str] = {}
        """{number of a node: the Function that it is of}, of those whose results were met outside of the model."""

    def read(self, name: str, mark: Mark, *, is_inside: bool) -> None:
        if isinstance(mark, Layout) and not mark.dims:
            return  # of one sample
        if is_inside:
            self._is_read_inside = True  # verification has seen what the model does with it
        elif not _is_torchs_own_code():
            self._read = self._read or name

    def scaled(self, mark: Mark, numbers: list[float], *, is_inside: bool) -> None:
        if isinstance(mark, Mixed):
            if is_inside and self._is_read_inside:
                self._read = self._read or "the model's code"
        elif not is_inside:
            self._numbers += numbers

    def hid(self, what: str, *, is_inside: bool) -> None:
        if not is_inside:
            self._hidden = self._hidden or what

    def saw(self, since: int) -> None:
        self._seen.append((since, torch.autograd._get_sequence_nr()))

    def is_of_batch(self, t: Tensor) -> bool:
        return self._scales.is_new(t)

    def met(self, tensors: list[Tensor]) -> None:
        found = [f for f in map(function_of, tensors) if f is not None]
        if found and torch._C._current_graph_task_id() == -1:  # not within a backward, by a checkpoint
            self._functions |= {number: name for name, number in found}

    def _hide_unseen(self) -> None:
        """What was made before the model was called does not depend on its parameters."""
        for number, name in self._functions.items():
            if self._seen and number >= self._seen[0][0] and not any(a <= number < z for a, z in self._seen):
                what = f"{name}, an autograd.Function whose apply was looked up before the model was called"
                self.hid(f"{what} (out = model(x) and then {name}.apply(out) is seen),", is_inside=False)

    def check(self, mark: Mark | None, *, num_samples: int, loss_reduction: str, is_weighted: bool) -> None:
        self._hide_unseen()
        if self._read is not None:
            raise SamplewiseError(
                f"values of several samples were read into Python ({self._read}: .item(), float(), if, .tolist()) before backward, "
                "and what becomes of such a number is not seen: a loss divided by it has a scale that depends on all samples. "
                "Read them after backward(), or calculate with tensors."
            )
        if self._hidden is not None:
            raise SamplewiseError(
                f"{self._hidden} took part in the loss, outside of the model, and may make what a sample counts for depend on the "
                "others. Write the loss with torch's ops on each sample alone, or put it into the model, where it is checked against "
                "samples run alone."
            )
        if is_weighted:
            raise SamplewiseError(
                "backward was given a gradient (loss.backward(gradient)), by which samples may count for anything. Multiply the loss "
                "with a Python number, and call backward()."
            )
        if mark is None or num_samples < 2:
            return
        if isinstance(mark, Layout):
            if loss_reduction == "mean":
                raise SamplewiseError(
                    'backward started from losses of samples alone, but loss_reduction="mean": their gradients would be multiplied '
                    'by the size of the batch. Take the mean of all, or say make_private(..., loss_reduction="sum").'
                )
            terms: frozenset[Term] = frozenset()
        elif isinstance(mark, Mixed) and mark.terms is not None:
            terms = mark.terms
        else:
            raise SamplesMixError(
                f"the loss, made by {mark.op}, was scaled by a tensor (by a GradScaler?), or put together in a way of which it is "
                "not known what each sample counts for: that may depend on the others. Bring the losses to one number a sample, "
                "weigh those by what is of their own sample, take .sum() or .mean(), and multiply that with Python numbers alone."
            )
        factors = [self._factor(term, num_samples, loss_reduction) for term in sorted(terms)]
        number = self._scales.follow_size((*self._numbers, *factors), num_samples)
        if number is not None:
            raise SamplesMixError(
                f"losses were multiplied or divided by {number:.6g}, which changes with the size of the batch, now {num_samples}: "
                "what a sample counts for would depend on how many others were drawn. Multiply with constants; for a mean, take "
                '.mean() and loss_reduction="mean".'
            )

    def _factor(self, term: Term, size: int, loss_reduction: str) -> float:
        """What each sample's loss was multiplied with beside the reduction; raises if that is another."""
        sizes = {size, term.num_elements} - {1}
        by_size = term.reduction == "sum" and any(math.isclose(term.factor * n, 1.0, rel_tol=1e-6) for n in sizes)
        if loss_reduction == "mean":
            if term.reduction == "sum" and not by_size:
                _refuse_constant(term, size)
            return 1.0 if by_size else term.factor
        if term.reduction == "mean" or (not self._scales.is_known(term.factor, size) and by_size):
            raise SamplewiseError(
                f'the loss is a mean over the {size} samples, but loss_reduction="sum": what a sample counts for would depend on how '
                'many were drawn. Say make_private(..., loss_reduction="mean"), or divide by nothing.'
            )
        return term.factor


def _refuse_constant(term: Term, size: int) -> NoReturn:
    raise SamplewiseError(
        f'the loss is {term.factor:.6g} times a sum over {size} samples, but loss_reduction="mean". The size of a draw is random, '
        "and a sum divided by a constant (the expected size?) is not its mean. Take losses.mean(), or say make_private(..., "
        'loss_reduction="sum"), with which such a loss is right.'
    )


BETWEEN = ("samplewise.", "torch.overrides", "torch._tensor")
"""Modules that a question passes on its way from the code that asks it."""


def _is_torchs_own_code() -> bool:
    """Whether it is code of torch that reads: checks of arguments, as in torch.distributions."""
    frame = sys._getframe(1)
    while frame is not None and (frame.f_code.co_name == "__torch_function__" or _module(frame).startswith(BETWEEN)):
        frame = frame.f_back
    return frame is not None and _module(frame).partition(".")[0] == "torch"


def _module(frame: object) -> str:
    return str(frame.f_globals.get("__name__", ""))  # type: ignore[attr-defined]
