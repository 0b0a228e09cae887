"""How far outputs and gradients of the batch are from those of samples alone."""

import math
from collections.abc import Iterable, Iterator
from functools import reduce

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from samplewise.precision import rounded_kinds
from samplewise.queries import Grads
from samplewise.verification.alone import Alone, gradients_of
from samplewise.verification.outputs import Loss, Output, term_of
from samplewise.verification.table import Verification, row_of

TOLERANCE = {torch.float64: 1e-6, torch.complex128: 1e-6, torch.float32: 1e-2, torch.complex64: 1e-2}
"""How far a gradient may be from truth, relative to its norm. A wrong rule is off by more."""
HALF = 0.2
"""The same for half precision, and where torch rounds float32 to TF32 (11 bits, as float16 has) or bfloat16."""
HALF_SUMS = 0.75
"""For gradients in half precision, where it is truth that is off: torch's own sum over 70,000 rows loses half of it. Samples
mistaken for one another are still off by more."""


def compared(grads: Grads, outputs: list[Output | Loss | None], alone: dict[int, Alone]) -> Verification:
    """The worst of all samples that were run alone, for each parameter; where outputs differ, gradients are not looked at."""
    dtypes = _dtypes(grads, outputs)
    rounded = rounded_kinds(grads.parameters.values(), dtypes)
    rounds = rounded and rounded & _kinds(grads, [t for one in alone.values() for t in one.outputs])
    allowed = max([HALF if rounds else 0.0, *map(tolerance, dtypes)])
    errors: dict[str, tuple[float, bool]] = dict.fromkeys(grads, (0.0, True))
    output_error = 0.0
    for b, one in alone.items():
        pairs = [(output, t) for output, t in zip(outputs, one.outputs, strict=False) if output is not None]
        output_error = max([output_error, *(_output_error(o, t, b) for o, t in pairs if isinstance(o, Output))])
        if output_error > allowed:
            break
        for name, (error, is_right) in _gradient_errors(grads, pairs, b, one.model, allowed).items():
            worst, was_right = errors[name]
            errors[name] = max(worst, error), was_right and is_right
    rows = tuple(row_of(name, grads, error, is_right) for name, (error, is_right) in errors.items())
    return Verification(rows, tuple(alone), output_error, output_error <= allowed)


def _output_error(output: Output, alone: Tensor, b: int) -> float:
    """The largest difference of sample b's output from that alone, relative to the largest output; inf if it is of another kind.

    Of another kind: with other elements, or not finite in other places.
    """
    whole, theirs = output.whole.detach(), alone.detach().flatten()
    mine = output.layout.fold(0)(whole)[b][: len(theirs)]
    if len(mine) != len(theirs) or _holds_others(output, alone) or not torch.equal(mine.isfinite(), theirs.isfinite()):
        return math.inf
    finite = whole[whole.isfinite()]
    off = (mine - theirs)[mine.isfinite()]
    return float(off.abs().max()) / (float(finite.abs().max()) or 1.0) if off.numel() else 0.0


def _gradient_errors(
    grads: Grads, pairs: list[tuple[Output | Loss, Tensor]], b: int, model: nn.Module, allowed: float
) -> dict[str, tuple[float, bool]]:
    """{name: (error of the gradient of sample b, whether it is right)}; none where the sample has no gradient to compare."""
    total = reduce(torch.add, [term_of(output, t, b) for output, t in pairs], torch.zeros((), device="cpu"))
    if not total.requires_grad:
        return {}
    truth = gradients_of(total, list(grads), model)
    overall = max((float(T.norm()) for T in truth if T is not None), default=0.0)
    if not math.isfinite(overall):
        return {}
    own = {name: grads[name].of_samples([b])[0] for name in grads}
    share = _share([output for output, _ in pairs], own, truth)
    relative = HALF_SUMS if allowed == HALF else allowed
    errors = {}
    for (name, G), T in zip(own.items(), truth, strict=True):
        T = torch.zeros_like(G) if T is None else share * T
        off, norm = float((G - T).norm()), float(T.norm())
        # a gradient that is zero but for rounding is compared with the others
        errors[name] = off / (norm + 1e-2 * overall or 1.0), off <= relative * norm + 1e-2 * allowed * overall
    return errors


def _holds_others(output: Output, alone: Tensor) -> bool:
    """Whether a sample has an element for each sample of the batch ([B, B]): that is no padding."""
    whole, layout = output.whole, output.layout
    sizes = [
        (whole.shape[d], alone.shape[d]) for d in range(whole.ndim) if d not in layout.dims and alone.ndim == whole.ndim
    ]
    return layout.num_samples > 1 and (layout.num_samples, 1) in sizes


def _share(outputs: list[Output | Loss], own: dict[str, Tensor], truth: list[Tensor | None]) -> float:
    """What the gradient in the batch is of that alone; for a loss whose weights are not known, what fits best."""
    if not any(isinstance(output, Loss) and output.share is None for output in outputs):
        return 1.0
    pairs = [(G, T) for G, T in zip(own.values(), truth, strict=True) if T is not None]
    square = sum(float(T.abs().square().sum()) for _, T in pairs)
    return sum(float((G * T.conj()).real.sum()) for G, T in pairs) / (square or 1.0)


def _dtypes(grads: Grads, outputs: list[Output | Loss | None]) -> set[torch.dtype]:
    """The dtypes that gradients passed through: the coarsest sets how well they can agree."""
    used = {note.dtype for notes in grads.notes.values() for note in notes}
    return used | {output.whole.dtype for output in outputs if output} | {p.dtype for p in grads.parameters.values()}


def _kinds(grads: Grads, outputs: Iterable[Tensor]) -> set[str]:
    """Which of "matmul", "conv" and "rnn" the outputs came about by; "matmul" is taken for granted."""
    names = {note.op for notes in grads.notes.values() for note in notes} | {node.name() for node in _nodes(outputs)}
    parts = {"conv": ("conv", "Conv"), "rnn": ("Rnn", "recurrence")}
    return {"matmul"} | {kind for kind in parts if any(part in name for part in parts[kind] for name in names)}


def _nodes(outputs: Iterable[Tensor]) -> Iterator[Node]:
    """The nodes of autograd's graph behind the outputs."""
    todo, seen = [t.grad_fn for t in outputs], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo += [node for node, _ in node.next_functions]


def tolerance(dtype: torch.dtype) -> float:
    """How far what passed through this dtype may be from truth."""
    return TOLERANCE.get(dtype, HALF)
