"""The first call of its kind checked against truth: a few samples run alone through the plain model."""

import copy
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from samplewise.capture import Capture
from samplewise.errors import SamplesMixError, SamplewiseError
from samplewise.intercept import paused
from samplewise.queries import Grads, capture
from samplewise.samples import Layout, Mixed
from samplewise.still import Still, attributes_put_back, same_randomness, twin

TOLERANCE = {torch.float64: 1e-6, torch.complex128: 1e-6, torch.float32: 1e-2, torch.complex64: 1e-2}
"""How far a gradient may be from truth, relative to its norm. A wrong rule is off by more."""
HALF = 0.2
"""The same for half precision."""
HALF_SUMS = 0.75
"""For gradients in half precision, where it is truth that is off: torch's own sum over 70,000 rows loses half of it. Samples
mistaken for one another are still off by more."""

MAX_KINDS = 16
"""Of calls that differ in integers alone."""

VERIFIED: weakref.WeakKeyDictionary[nn.Module, set] = weakref.WeakKeyDictionary()
"""The kinds of calls of each model that were found right."""


@dataclass(frozen=True)
class Row:
    """One parameter in the table of a verification."""

    parameter: str
    ops: str
    how: str
    layout: str
    error: float
    """‖captured - true‖ / (‖true‖ + 0.01 ‖largest true gradient of the model‖) of the worst sample checked."""
    is_right: bool


@dataclass(frozen=True)
class Verification:
    """What was checked and how far it is from truth."""

    rows: tuple[Row, ...]
    samples: tuple[int, ...]
    output_error: float
    """The largest difference of an output from that of the sample alone, relative to the largest output."""
    outputs_agree: bool

    @property
    def is_right(self) -> bool:
        return self.outputs_agree and all(row.is_right for row in self.rows)

    def __str__(self) -> str:
        header = ("parameter", "op", "by", "samples", "error")
        lines = [(r.parameter, r.ops, r.how, r.layout, f"{r.error:.1e}{'' if r.is_right else ' wrong'}") for r in self.rows]
        widths = [max(len(line[k]) for line in [header, *lines]) for k in range(len(header))]
        table = [
            "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in [header, *lines]
        ]
        agree = "agree" if self.outputs_agree else "DIFFER"
        table.append(f"outputs of samples {list(self.samples)} alone and in the batch {agree} ({self.output_error:.1e})")
        return "\n".join(table)


def verify(
    model: nn.Module,
    *args: Any,
    batch_size: int | None = None,
    batch_dim: int = 0,
    sample_ids: Tensor | None = None,
    **kwargs: Any,
) -> Verification:
    """How well per-sample gradients of `model(*args, **kwargs)` agree with those of samples run alone.

    Random state, buffers and gradients are left as they were; dropout is held still. Raises where samples mix or cannot
    be told apart.

    >>> verify(nn.Linear(2, 3), torch.ones(4, 2)).is_right
    True
    """
    return _verification(model, args, kwargs, {"batch_size": batch_size, "batch_dim": batch_dim, "sample_ids": sample_ids})


def verify_first_use(recording: Capture, module: nn.Module, args: tuple, kwargs: dict) -> None:
    """Verifies a call that a capture is about to record, unless one of its kind has been verified; raises if it is wrong."""
    B = recording.batch_size
    if B is None or B < 2:
        return
    kind = _kind(recording, module, args, kwargs)
    if kind in VERIFIED.setdefault(module, set()):
        return
    names = {id(p): name for name, p in module.named_parameters()}
    chosen = [names[id(p)] for p in recording.parameters.values() if id(p) in names]
    if not chosen:
        return
    options = {
        "batch_size": B,
        "batch_dim": recording.batch_dim,
        "sample_ids": recording.sample_ids,
        "params": chosen,
    }
    marks = {id(t): mark for t in _tensors((args, kwargs)) if isinstance(mark := recording.marks.get(t), Layout)}
    result = _verification(module, args, kwargs, options, marks)
    if not result.is_right:
        raise SamplesMixError(_complaint(result))
    VERIFIED[module].add(kind)


def _complaint(result: Verification) -> str:
    wrong = [row for row in result.rows if not row.is_right]
    if not result.outputs_agree:
        what = "the model gives a sample another output alone than in its batch: samples influence each other in it"
    else:
        row = wrong[0]
        what = f"the gradient of parameter {row.parameter!r} (used by {row.ops}) is not that of the sample run alone"
    return (
        f"{what}. Per-sample gradients would be wrong.\n{result}\nPut layers that use statistics of the batch in eval mode, "
        "mark data that reaches the model in another way than as an argument, or leave parameters out with exclude=[...]. "
        "If a sample alone rightly differs, turn this check off: capture(model, verify=False)."
    )


def _verification(
    module: nn.Module, args: tuple, kwargs: dict, options: dict[str, Any], marks: dict[int, Layout] | None = None
) -> Verification:
    copies: list[tuple[Tensor, Layout]] = []

    def copied(t: Tensor) -> Tensor:
        own = t.detach().clone()
        if marks is not None and id(t) in marks:
            copies.append((own, marks[id(t)]))
        return own

    args, kwargs = tree_map_only(Tensor, copied, (args, kwargs))
    model = twin(module)
    with attributes_put_back(module), Still(), torch.enable_grad():
        with capture(model, verify=False, **options) as grads:
            for t, layout in copies:
                grads.marks.set(t, layout)
            grads.mark_inputs(args, kwargs)
            samples = tuple(sorted({0, (grads.batch_size or 1) - 1}))
            own, named = tree_map(_fresh, (args, kwargs))
            with same_randomness(module):
                out = model(*own, **named)
            _refuse_mixed(out, grads)
            with paused():
                alone = {b: _run_alone(b, module, grads, args, kwargs) for b in samples}
            outputs = _outputs(out, grads, alone)
            _backward(outputs, grads)
        return _compared(grads, outputs, alone, module)


@dataclass
class Output:
    """An output of the batch: its samples, and the gradient that it is given."""

    whole: Tensor
    layout: Layout
    v: Tensor


@dataclass
class Loss:
    """What a model returns that computes its own loss: samples added up."""

    whole: Tensor
    share: float | None
    """What the gradient of a sample in the batch is of that of the sample alone, if that is certain."""


def _refuse_mixed(out: Any, grads: Grads) -> None:
    marks = [grads.marks.get(t) for t in _tensors(out)]
    mixed = [mark for mark in marks if isinstance(mark, Mixed) and not mark.linear]
    if mixed and not any(isinstance(mark, Layout) for mark in marks):
        raise SamplesMixError(
            f"the output of the model is made by {mixed[0].op}, which mixes the samples of the batch (a BatchNorm in training "
            "mode?), so it has no per-sample gradients. Put the layer in eval mode."
        )


def _run_alone(b: int, module: nn.Module, grads: Grads, args: tuple, kwargs: dict) -> list[Tensor]:
    """The outputs of the plain model for sample b."""
    own, named = tree_map(_alone(b, grads), (args, kwargs), is_leaf=lambda a: isinstance(a, PackedSequence))
    own, named = tree_map(_fresh, (own, named))
    try:
        with same_randomness(module):
            return _tensors(twin(module)(*own, **named))
    except Exception as error:
        raise SamplewiseError(
            f"the model could not be run on sample {b} alone, so it was not verified ({type(error).__name__}: {error}). "
            "Turn the check off: capture(model, verify=False)."
        ) from error


def _fresh(leaf: Any) -> Any:
    """An object among the arguments that a forward may change (a cache of keys and values) as a copy of its own."""
    if isinstance(leaf, Tensor | nn.Module | type) or not hasattr(leaf, "__dict__") or callable(leaf):
        return leaf
    return copy.deepcopy(leaf)


def _outputs(out: Any, grads: Grads, alone: dict[int, list[Tensor]]) -> list[Output | Loss | None]:
    """For each output that has samples, a gradient in which no two of its elements are alike; and the first loss.

    Beside other outputs a loss counts only if it is known what a sample's share in it is.
    """
    outputs: list[Output | Loss | None] = []
    for k, t in enumerate(_tensors(out)):
        layout = grads.marks.get(t)
        if not isinstance(layout, Layout) or not t.requires_grad:
            outputs.append(None)
            continue
        v = torch.arange(1, t.numel() + 1, device=t.device, dtype=torch.float64).mul(1.7).sin().reshape(t.shape).to(t)
        for b, theirs in alone.items():  # padding that a sample does not have alone is left out
            places = layout.fold(0)(torch.arange(t.numel(), device=t.device).reshape(t.shape))[b]
            v.view(-1)[places[theirs[k].numel() :] if k < len(theirs) else places] = 0
        outputs.append(Output(t, layout, v))
    has_rows = any(outputs)
    for k, t in enumerate(_tensors(out)):
        mark = grads.marks.get(t)
        if isinstance(mark, Mixed) and mark.linear and t.numel() == 1 and t.requires_grad:
            shares = {"sum": 1.0, "mean": 1.0 / (grads.batch_size or 1)}
            share = shares.get(mark.reduction or "") if mark.even else None
            if share is not None or not has_rows:
                outputs[k] = Loss(t, share)
                break
    return outputs


def _backward(outputs: list[Output | Loss | None], grads: Grads) -> None:
    terms = [(o.whole * o.v).sum() if isinstance(o, Output) else o.whole.sum() for o in outputs if o is not None]
    if terms:
        total = reduce(torch.add, terms)
        grads._set_scale(1.0)
        grads._takes_each = True
        with gradients_put_back(grads.model):
            (total.real if total.is_complex() else total).backward()


def _compared(
    grads: Grads, outputs: list[Output | Loss | None], alone: dict[int, list[Tensor]], module: nn.Module
) -> Verification:
    parameters = {name: grads.parameters[name] for name in grads}
    errors, right = dict.fromkeys(parameters, 0.0), dict.fromkeys(parameters, True)
    allowed = max(map(tolerance, _dtypes(grads, outputs)))
    output_error, agree = 0.0, True
    for b, theirs in alone.items():
        pairs = [(output, t) for output, t in zip(outputs, theirs, strict=False) if output is not None]
        for output, t in pairs:
            if isinstance(output, Loss):
                continue
            mine = output.layout.fold(0)(output.whole.detach())[b][: t.numel()]
            if mine.numel() != t.numel() or _holds_others(output, t):
                agree = False
                continue
            error = _difference(mine, t.detach().flatten(), output.whole.detach())
            output_error = max(output_error, error)
            agree = agree and error <= allowed
        if not agree:
            break
        terms = [_term(output, t, b) for output, t in pairs]
        total = reduce(torch.add, terms, torch.zeros((), device="cpu"))
        if not total.requires_grad:
            continue
        truth = _gradients(total.real if total.is_complex() else total, list(parameters.values()), module)
        overall = max((float(T.norm()) for T in truth if T is not None), default=0.0)
        if not math.isfinite(overall):
            continue  # a sample that is not finite has no gradient to compare
        own = {name: grads[name].of_samples([b])[0] for name in parameters}
        share = _share([output for output, _ in pairs], own, truth)
        for (name, G), T in zip(own.items(), truth, strict=True):
            T = torch.zeros_like(G) if T is None else share * (T.to_dense() if T.is_sparse else T)
            off, norm = float((G - T).norm()), float(T.norm())
            # a gradient that is zero but for rounding is compared with the others
            errors[name] = max(errors[name], off / (norm + 1e-2 * overall or 1.0))
            right[name] = (
                right[name] and off <= (HALF_SUMS if allowed == HALF else allowed) * norm + 1e-2 * allowed * overall
            )
    rows = tuple(_row(name, grads, errors[name], right[name]) for name in parameters)
    return Verification(rows, tuple(alone), output_error, agree)


def _holds_others(output: Output, alone: Tensor) -> bool:
    """Whether a sample has an element for each sample of the batch ([B, B]): that is no padding."""
    whole, layout = output.whole, output.layout
    sizes = [
        (whole.shape[d], alone.shape[d]) for d in range(whole.ndim) if d not in layout.dims and alone.ndim == whole.ndim
    ]
    return layout.num_samples > 1 and (layout.num_samples, 1) in sizes


def _term(output: Output | Loss, t: Tensor, b: int) -> Tensor:
    """What backward starts from for sample b alone."""
    if isinstance(output, Loss):
        return t.sum() * (1.0 if output.share is None else output.share)
    return (t.flatten() * output.layout.fold(0)(output.v)[b][: t.numel()]).sum()


def _share(outputs: list[Output | Loss], own: dict[str, Tensor], truth: list[Tensor | None]) -> float:
    """What the gradient in the batch is of that alone; for a loss whose weights are not known, what fits best."""
    if not any(isinstance(output, Loss) and output.share is None for output in outputs):
        return 1.0
    pairs = [(G, T.to_dense() if T.is_sparse else T) for G, T in zip(own.values(), truth, strict=True) if T is not None]
    square = sum(float(T.abs().square().sum()) for _, T in pairs)
    return sum(float((G * T.conj()).real.sum()) for G, T in pairs) / (square or 1.0)


def _difference(mine: Tensor, theirs: Tensor, whole: Tensor) -> float:
    """The largest difference, relative to the largest output; what is not finite must be so in both."""
    if not torch.equal(mine.isfinite(), theirs.isfinite()):
        return math.inf
    finite = whole[whole.isfinite()]
    off = (mine - theirs)[mine.isfinite()]
    return float(off.abs().max()) / (float(finite.abs().max()) or 1.0) if off.numel() else 0.0


def _gradients(total: Tensor, parameters: list[Tensor], module: nn.Module) -> list[Tensor | None]:
    """Plain gradients, with `.grad` of all parameters left as it is."""
    try:
        truth = torch.autograd.grad(total, parameters, allow_unused=True, retain_graph=True)
        if all(T is not None for T in truth):
            return list(truth)
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
    # autograd.grad does not see what lies in a reentrant checkpoint
    with gradients_put_back(module):
        total.backward()
        return [p.grad for p in parameters]


@contextmanager
def gradients_put_back(module: nn.Module) -> Iterator[None]:
    """`.grad` of all parameters None inside, and as it was afterwards."""
    before = [(p, p.grad) for p in module.parameters()]
    try:
        for p, _ in before:
            p.grad = None
        yield
    finally:
        for p, grad in before:
            p.grad = grad


def _alone(b: int, grads: Grads) -> Callable[[Any], Any]:
    """An argument as sample b alone would have it."""

    def alone(leaf: Any) -> Any:
        data = leaf.data if isinstance(leaf, PackedSequence) else leaf
        mark = grads.marks.get(data) if isinstance(data, Tensor) else None
        if not isinstance(mark, Layout) or not mark.dims:
            return leaf.clone() if isinstance(leaf, Tensor) else leaf
        (axis,) = mark.dims
        rows = data.index_select(axis, (mark.ids.flatten() == b).nonzero().squeeze(1).to(data.device))
        return pack_sequence([rows]) if isinstance(leaf, PackedSequence) else rows

    return alone


def _row(name: str, grads: Grads, error: float, is_right: bool) -> Row:
    notes = grads.notes.get(name, [])
    ops = ", ".join(dict.fromkeys(note.op for note in notes))
    how = ", ".join(dict.fromkeys(note.how for note in notes))
    layouts = list(dict.fromkeys(str(note.layout) for note in notes))
    return Row(name, ops, how, layouts[0] if len(layouts) == 1 else f"{len(layouts)} layouts", error, is_right)


def _dtypes(grads: Grads, outputs: list[Output | Loss | None]) -> set[torch.dtype]:
    """The dtypes that gradients passed through: the coarsest sets how well they can agree."""
    used = {note.dtype for notes in grads.notes.values() for note in notes}
    return used | {output.whole.dtype for output in outputs if output} | {p.dtype for p in grads.parameters.values()}


def tolerance(dtype: torch.dtype) -> float:
    return TOLERANCE.get(dtype, HALF)


def _tensors(tree: Any) -> list[Tensor]:
    """The tensors in containers, dataclasses and plain objects."""
    found = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, type | nn.Module) and not callable(leaf):
            found += [t for value in vars(leaf).values() for t in tree_leaves(value) if isinstance(t, Tensor)]
    return found


def _kind(recording: Capture, module: nn.Module, args: tuple, kwargs: dict) -> Any:
    """Calls of one kind differ in sizes alone, not in which sizes are 1 or the batch size."""
    B = recording.batch_size
    few = len(VERIFIED.get(module, ())) < MAX_KINDS  # a counter among the arguments would make each call a kind of its own

    def spec(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.dtype, leaf.device, tuple("B" if size == B else min(size, 2) for size in leaf.shape)
        return leaf if isinstance(leaf, bool | str | None) or (few and isinstance(leaf, int)) else type(leaf)

    modules = recording._modules if module is recording.model else module.modules()
    modes = tuple([(type(m), *[v for v in vars(m).values() if v is None or type(v) in (bool, str)]) for m in modules])
    return tuple(map(spec, tree_leaves((args, kwargs)))), modes, recording.batch_dim, tuple(recording.parameters)
