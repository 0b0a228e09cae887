"""Random models against the oracle: `python tests/fuzz.py --num 10000 --seed 0`; an integer determines an example."""

import argparse
import random
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from fuzz_ops import COMPLEX, MIXING, OPS
from fuzz_sketch import MOST_ELEMENTS, Sketch, Value
from torch import Tensor, nn

from samplewise import capture
from samplewise.errors import SamplewiseError
from samplewise.plan import ROUTES
from samplewise.testing import oracle

TOLERANCE = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float32: 1e-3}
"""How far a number may be off, relative to the largest of its kind: sums of a few hundred terms, layers a few deep."""


# --- drawing a model -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """A model as source, and its batch."""

    seed: int
    source: str
    ops: tuple[str, ...]
    batch_size: int
    batch_dim: int
    inputs: tuple[tuple[str, tuple[int, ...]], ...]
    says_batch_size: bool
    mixes: str
    """The op in it that mixes samples, if one does."""

    def __str__(self) -> str:
        inputs = ", ".join(f"{name} {list(shape)}" for name, shape in self.inputs)
        return f"seed {self.seed}: batch of {self.batch_size} along dimension {self.batch_dim}, {inputs}\n\n{self.source}"

    @cached_property
    def scope(self) -> dict[str, Any]:
        scope: dict[str, Any] = {"torch": torch, "nn": nn, "F": F}
        exec(compile(self.source, f"<seed {self.seed}>", "exec"), scope)
        return scope

    @property
    def loss(self) -> Callable[..., Tensor]:
        return self.scope["loss"]

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        model = self.scope["Model"]()
        with torch.no_grad():
            for p in model.parameters():  # away from the ones and zeros of norms and biases
                p.mul_(0.7).add_(torch.randn_like(p), alpha=0.3)
            for module in model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.running_mean.uniform_(-0.5, 0.5)  # type: ignore[union-attr]
                    module.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr]
        return model

    def batch(self) -> tuple[Tensor, ...]:
        torch.manual_seed(self.seed + 1)
        dtype = self.scope["D"]
        return tuple(
            torch.randint(12, shape) if name == "ids" else torch.randn(shape, dtype=dtype) for name, shape in self.inputs
        )


def example(seed: int) -> Example:
    """The example of this seed."""
    rng = random.Random(seed)
    B = rng.randint(1, 5)
    batch_dim = 1 if rng.random() < 0.25 else 0
    dtype = rng.choices(["torch.float64", "torch.float32", "torch.complex128"], [8, 1, 1])[0]
    m = Sketch(rng, batch_size=B, batch_dim=batch_dim, dtype=dtype)
    sizes = [m.size() for _ in range(rng.randint(1, 3))]
    sizes.insert(batch_dim, B)
    x = Value("x", tuple(("B",) if d == batch_dim else (n,) for d, n in enumerate(sizes)))
    names = [name for name in OPS if not m.is_complex or name in COMPLEX]
    often = [OPS[name][1] for name in names]
    num_ops = rng.randint(2, 8)
    mixing_at = rng.randrange(num_ops) if rng.random() < 0.1 and not m.is_complex else None
    m.values.append(x)
    mixes = ""
    for k in range(num_ops):
        if k == mixing_at:
            mixes = rng.choice(list(MIXING))
            x = _drawn(m, x, mixes, MIXING) or x
        y = None
        while y is None:
            y = _drawn(m, x, rng.choices(names, often)[0], OPS)
        x = y
    m.op = "head"
    if not m.pool:
        x = m.plain_last(x)
        x = m.derived(x, f"{{x}} @ {m.parameter(x.last, 2)}", x.with_dim(-1, 2))
    outs = [m.arranged(m.unfolded(x), 2)]
    if len(m.values) > 2 and m.coin(0.2):
        outs.append(m.arranged(m.unfolded(rng.choice(m.values[1:])), 2))
    if m.coin(0.1):
        m.parameter(2, 3)
    inputs = [("x", tuple(sizes))]
    if m.needs_ids:
        inputs.append(("ids", (B, m.num_ids) if batch_dim == 0 else (m.num_ids, B)))
    out = f"torch.cat([{', '.join(map(str, outs))}], 1)" if len(outs) > 1 else str(outs[0])
    source = m.source(out, _loss(m), [name for name, _ in inputs])
    return Example(seed, source, tuple(m.ops), B, batch_dim, tuple(inputs), m.coin(0.2), mixes)


def _loss(m: Sketch) -> str:
    """One loss a sample from out [B, n]."""
    if m.is_complex:
        return "out.abs().square().sum(1)"
    curved = "(out.sin() + 0.3 * out.square()).sum(1)"  # as in cases.curved
    squared = 'F.mse_loss(out, torch.ones_like(out), reduction="none").mean(1)'
    classes = 'F.cross_entropy(out, torch.zeros(len(out), dtype=torch.long), reduction="none")'
    return m.pick(curved, curved, squared, "out.square().mean(-1)", classes)


def _drawn(m: Sketch, x: Value, name: str, table: dict) -> Value | None:
    """What the op made of x, or None and no trace of it."""
    lists = (m.init, m.body, m.pool, m.layers)
    before, count, needs_ids, m.op = [len(some) for some in lists], m.count, m.needs_ids, name
    y = (table[name][0] if table is OPS else table[name])(m, x)
    if y is not None and prod(y.shape) * prod(f for f in y.dims[y.axis] if f != "B") <= MOST_ELEMENTS and y.ndim <= 4:
        m.values.append(y)
        m.ops.append(name)
        return y
    for some, n in zip(lists, before, strict=True):
        del some[n:]
    m.count, m.needs_ids = count, needs_ids
    return None


# --- judging it ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What became of an example."""

    kind: str
    """"right", "refused", "mixing refused", "WRONG", "CRASH", or "invalid" where the plain model does not run."""
    detail: str = ""
    op: str = ""
    """The op drawn at which it stopped."""


def outcome(ex: Example) -> Outcome:
    """The captured answers of an example against the oracle and against plain training."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _outcome(ex)


def _outcome(ex: Example) -> Outcome:
    model = ex.model()
    try:
        losses = ex.loss(model, *ex.batch())
        losses.sum().backward()
        truth, alone = _truth(ex)
    except (RuntimeError, ValueError) as error:
        return Outcome("invalid", f"{type(error).__name__}: {error}", _op_of(error, ex))
    if not bool((losses.abs() < 1e8).all()):
        return Outcome("invalid", "the loss is too large")
    if not ex.mixes and _off(losses.detach(), alone, 1.0) > TOLERANCE[losses.dtype]:
        return Outcome("invalid", "a sample alone has another loss (a write into what is a view for one sample alone)")
    plain = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model = ex.model()
    before = _traces(model)
    options: dict[str, Any] = {"batch_size": ex.batch_size} if ex.says_batch_size else {}
    plan = {"*": ROUTES[ex.seed % 4]} if ex.seed % 4 < len(ROUTES) else None  # as it comes, or pinned
    grads = capture(model, batch_dim=ex.batch_dim, verify=False, plan=plan, **options)
    problem = None
    try:
        with grads:
            captured = ex.loss(model, *ex.batch())
            grads.backward(captured)
        if _off(captured.detach(), losses.detach(), 1.0) > TOLERANCE[losses.dtype]:
            problem = f"the losses {captured.tolist()} instead of {losses.tolist()}"
        problem = problem or next(_problems(ex, grads, truth, plain), None)
    except SamplewiseError as error:
        found = Outcome("refused", str(error), _op_of(error, ex))
        if ex.mixes:
            found = Outcome("mixing refused", type(error).__name__, ex.mixes)
    except Exception as error:
        # torch's own refusal, where a rule keeps a tensor that plain training does not
        kind = "refused" if "modified by an inplace operation" in str(error) else "CRASH"
        found = Outcome(kind, f"{type(error).__name__}: {error}\n{traceback.format_exc()}", _op_of(error, ex))
    else:
        found = Outcome("WRONG", problem) if problem else Outcome("right")
    left = [name for name, trace in _traces(model).items() if trace != before.get(name)]
    return Outcome("WRONG", f"something is left on {left}, after: {found}") if left else found


def _problems(ex: Example, grads: Any, truth: dict[str, Tensor], plain: dict[str, Tensor]) -> Iterator[str]:
    """Each way in which the answers are not the true ones."""
    for name in set(grads) - set(truth):
        if float(grads[name].norms().max()):
            yield f"{name} has gradients though it took no part"
    missing = [name for name in truth if name not in grads]
    if missing:
        yield f"{missing} missing"
        return
    B = ex.batch_size
    rng = torch.Generator().manual_seed(ex.seed)
    w = torch.randn(B, generator=rng, dtype=torch.float64) * torch.randint(2, (B,), generator=rng)
    squares = {name: _squares(G) for name, G in truth.items()}
    norms = torch.stack([*squares.values()]).sum(0).sqrt() if squares else torch.zeros(B)
    overall = float(norms.max())
    max_norm = float(norms.median()) or 1.0
    answers = {
        "weighted_sum": grads.weighted_sum(w),
        "sum": grads.sum(),
        "clipped_sum": grads.clipped_sum(max_norm=max_norm),
    }
    coefficients = (max_norm / norms).clamp(max=1)
    worst = max((TOLERANCE[p.dtype] for p in grads.parameters.values()), default=0.0)
    for name, G in truth.items():
        p = grads.parameters[name]
        # what is zero but for rounding is compared with the gradient of all parameters
        floor = max(overall, 1.0) * (0.1 if p.dtype == torch.float32 else 1e-4)
        mine = max(TOLERANCE[p.dtype], TOLERANCE[ex.scope["D"]])
        for what, got, true, tolerance in (
            ("materialize()", grads[name].materialize(), G, mine),
            ("norms()", grads[name].norms(), squares[name].sqrt(), mine),
            (f"weighted_sum({w.tolist()})", answers["weighted_sum"][name], torch.einsum("b,b...", w.to(G), G), mine),
            ("clipped_sum", answers["clipped_sum"][name], torch.einsum("b,b...", coefficients.to(G), G), worst),
            ("sum()", answers["sum"][name], plain[name].to(G), mine),
        ):
            off = _off(got, true, floor)
            if off > tolerance:
                yield f"{name}: {what} is off by {off:.1e}:\n{str(got)[:1000]}\ninstead of\n{str(true)[:1000]}"
    if truth and _off(grads.norms(), norms, max(overall, 1.0)) > worst:
        yield f"norms() {grads.norms().tolist()} instead of {norms.tolist()}"


def _truth(ex: Example) -> tuple[dict[str, Tensor], Tensor]:
    """The oracle's gradients and the losses of samples alone; casts in the model must lead to the oracle's dtype."""
    model, batch, dtype = ex.model(), ex.batch(), ex.scope["D"]
    losses: list[Tensor] = []

    def loss(*args: Any) -> Tensor:
        losses.append(ex.loss(*args))
        return losses[-1]

    ex.scope["D"] = torch.promote_types(dtype, torch.float64)
    try:
        gradients = oracle(model, loss, *batch, batch_dim=ex.batch_dim)
    finally:
        ex.scope["D"] = dtype
    return gradients, torch.cat(losses).detach()


def _squares(G: Tensor) -> Tensor:
    return G.abs().square().reshape(len(G), -1).sum(1)


def _off(got: Tensor, truth: Tensor, floor: float) -> float:
    """The largest difference relative to the largest true number, or to `floor` if that is larger."""
    if got.shape != truth.shape:
        return float("inf")
    scale = max(float(truth.abs().max()) if truth.numel() else 0.0, floor) or 1.0
    off = float((got.to(truth.dtype) - truth).abs().max()) / scale if truth.numel() else 0.0
    return off if off == off else float("inf")


def _traces(model: nn.Module) -> dict[str, Any]:
    """What a capture could leave behind on the modules and parameters."""
    hooks = {
        name: sorted((k, len(v) if isinstance(v, dict) else 0) for k, v in m.__dict__.items())
        for name, m in model.named_modules()
    }
    return hooks | {
        f"parameter {name}": (p.grad is None, p._backward_hooks, sorted(p.__dict__), p.requires_grad, p._version)
        for name, p in model.named_parameters()
    }


def _op_of(error: BaseException, ex: Example) -> str:
    """The drawn op whose line raised, or whose parameter the message names."""
    lines = ex.source.splitlines()
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename == f"<seed {ex.seed}>" and frame.name == "forward":
            found = re.match(r"\s*(\w+?)_\d+\b", lines[(frame.lineno or 1) - 1])
            return found[1] if found else "output"
    found = re.search(r"'(\w+?)_\d+", str(error))
    return found[1] if found else "backward"


# --- the command -----------------------------------------------------------------------------------------------------


def run(seeds: Iterable[int], *, say: Callable[[str], Any] = print, verbose: bool = False) -> Counter[str]:
    """How often each kind of outcome came, with a table of them; failures are printed as they come."""
    kinds: Counter[str] = Counter()
    stops: Counter[tuple[str, str, str]] = Counter()
    first: dict[tuple[str, str, str], int] = {}
    drawn: Counter[str] = Counter()
    began = time.perf_counter()
    for num, seed in enumerate(seeds, 1):
        ex = example(seed)
        found = outcome(ex)
        kinds[found.kind] += 1
        drawn.update(set(ex.ops))
        if found.kind != "right":
            stop = (found.kind, found.op, shorthand(found.detail))
            stops[stop] += 1
            first.setdefault(stop, seed)
        if found.kind in ("WRONG", "CRASH") or verbose:
            say(f"{found.kind} {found.detail}\n{ex}")
        if num % 1000 == 0:
            say(f"{num} examples, {time.perf_counter() - began:.0f} s, {dict(kinds)}")
    seconds, total = time.perf_counter() - began, sum(kinds.values())
    say(f"\n{total} examples in {seconds:.0f} s ({1000 * seconds / max(1, total):.1f} s for 1,000)\n")
    say("\n".join(f"{n:7} {100 * n / total:5.1f} %  {kind}" for kind, n in kinds.most_common()))
    for kind in ("WRONG", "CRASH", "refused", "mixing refused", "invalid"):
        rows = [(stop, n) for stop, n in stops.most_common() if stop[0] == kind]
        if rows:
            say(f"\n{kind}: times, op drawn, first seed, why")
            say("\n".join(f"{n:7}  {stop[1]:24} {first[stop]:7}  {stop[2]}" for stop, n in rows))
    say("\nexamples with each op: " + ", ".join(f"{name} {n}" for name, n in sorted(drawn.items())))
    return kinds


def shorthand(message: str) -> str:
    """The first words of a message without names and numbers, so that like messages count as one."""
    words = re.sub(r"'[^']*'(, '[^']*')*", "'…'", message.split("\n")[0].partition(": [")[0])
    words = re.sub(r"\([\d, ]*\)(, \([\d, ]*\))*", "(…)", words)
    return re.sub(r"-?\d[\d.e+-]*", "N", words)[:170]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=1000, help="how many examples")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first; the others follow")
    parser.add_argument("--verbose", action="store_true", help="print every model")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kinds = run(range(args.seed, args.seed + args.num), verbose=args.verbose, say=lambda text: print(text, flush=True))
    return 1 if kinds["WRONG"] or kinds["CRASH"] else 0


if __name__ == "__main__":
    sys.exit(main())
