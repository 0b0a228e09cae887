"""The job of `samplewise audit`: digits trained privately with canaries among them, and what they show about the claim."""

import copy
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typer import BadParameter

from samplewise.cli.console import progress_bar
from samplewise.cli.demo import NUM_CLASSES, captured_grads, flipped_digits, predictions, small_cnn
from samplewise.dp import PoissonLoader, PrivateOptimizer, make_private, noise_multiplier_for
from samplewise.dp.auditing import NOBODY, ROW, Audit, GradientCanaries, audit
from samplewise.dp.noise import derived_seed

LEARNING_RATE = 1.0
MAX_NORM = 1.0
LENGTH = 1000 * MAX_NORM
BROKEN = 0.1

Rows = tuple[Tensor, Tensor, Tensor]
"""(coordinates, images, labels) of as many rows; coordinate ROW or NOBODY where the row is no gradient canary."""


def show_audit(
    *,
    epsilon: float,
    delta: float,
    canaries: int,
    black_box: bool,
    steps: int,
    batch_size: int,
    confidence: float,
    broken: bool,
    seed: int,
    output: Path | None,
) -> bool:
    """Prints the table and the verdict on the terminal, writes the figures to `output`; True if the claim stands."""
    console, start = Console(), time.perf_counter()
    what, noise = "input" if black_box else "gradient", f"{BROKEN} of the noise" if broken else "the noise"
    console.print(f"{canaries:,} {what} canaries among digits, {steps} steps, {noise} that the claim needs; seed {seed}")
    with progress_bar(console) as bar:
        task = bar.add_task("training", total=steps, state="")
        try:
            result = audited_digits(
                epsilon=epsilon,
                delta=delta,
                num_canaries=canaries,
                black_box=black_box,
                steps=steps,
                batch_size=batch_size,
                confidence=confidence,
                noise_factor=BROKEN if broken else 1.0,
                seed=seed,
                on_step=lambda accuracy: bar.update(task, advance=1, state=f"test accuracy {accuracy:.1%}"),
            )
        except ValueError as error:
            raise BadParameter(str(error)) from error
    console.print(table(result))
    is_refuted, words = result.is_refuted, verdict(result)
    shown = ("refuted", "bold red") if is_refuted else ("not refuted", "bold green")
    console.print(Text.assemble(shown, f": {words}"))
    console.print(f"Took {time.perf_counter() - start:.1f} s", highlight=False)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        figures = {
            "black_box": black_box,
            "steps": steps,
            "batch_size": batch_size,
            "is_broken": broken,
            "seed": seed,
            "is_refuted": is_refuted,
        }
        lower_bound = result.best.lower_bound
        output.write_text(
            json.dumps(asdict(result) | {"lower_bound": lower_bound} | figures, indent=2) + "\n", encoding="utf-8"
        )
    return not is_refuted


def table(result: Audit) -> Table:
    """The table of an audit, a row for each number of guesses."""
    shown = Table(
        title=f"What the guesses refute with confidence {result.confidence:.0%}, all together", title_justify="left"
    )
    for heading in ("guesses", "right", "accuracy", "epsilon is over"):
        shown.add_column(heading, justify="right")
    for row in result.rows:
        accuracy, bound = f"{row.num_correct / row.num_guesses:.1%}", f"{row.lower_bound:.2f}"
        shown.add_row(
            str(row.num_guesses), str(row.num_correct), accuracy, bound, style="bold" if row == result.best else None
        )
    return shown


def verdict(result: Audit) -> str:
    """What was measured against what was claimed, in words."""
    measured = f"epsilon is over {result.best.lower_bound:.2f} (delta {result.delta:g}), and {result.epsilon:g} is claimed"
    if result.is_refuted:
        return f"{measured}. A training that keeps the claim gets this verdict with probability {1 - result.confidence:.0%} at most."
    return f"{measured}. The training leaks no more than it claims as far as these canaries can see, which is no proof."


# --- the run -----------------------------------------------------------------------------------------------------------------


def audited_digits(
    *,
    epsilon: float,
    delta: float,
    num_canaries: int,
    black_box: bool,
    steps: int,
    batch_size: int,
    confidence: float,
    noise_factor: float,
    seed: int,
    on_step: Callable[[float], object] = lambda accuracy: None,
) -> Audit:
    """The audit of a CNN trained on digits with the noise that (epsilon, delta) needs, times `noise_factor`."""
    # coins that shared random numbers with the training, whose seeds derive from 0 and 1, would be guessed for that alone
    coins, data = (torch.Generator().manual_seed(derived_seed(seed, k)) for k in (2, 3))
    digits = flipped_digits(fraction=0.01, generator=data)
    x, y = digits.x, digits.true
    losses = GradientCanaries(small_cnn(seed=seed), cross_entropies, length=LENGTH)
    canaries = (input_canaries if black_box else gradient_canaries)(num_canaries, losses, generator=data)
    sample_rate = batch_size / (len(x) + num_canaries)
    z = noise_multiplier_for(target_epsilon=epsilon, target_delta=delta, sample_rate=sample_rate, steps=steps)

    def train(is_in: Tensor) -> Tensor:
        ids = torch.cat([torch.full((len(x),), ROW), torch.where(is_in, canaries[0], NOBODY)])
        rows = ids, torch.cat([x, canaries[1]]), torch.cat([y, canaries[2]])
        seen = copy.deepcopy(losses)  # has the weights that were released last, and no part in the training
        first, drift = seen.weights().detach(), torch.zeros(len(seen.weights()))
        optimizer, loader = private(losses, rows, batch_size=batch_size, noise_multiplier=noise_factor * z, seed=seed)
        for batch in itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), steps):
            optimizer.zero_grad()
            losses(*batch).mean().backward()
            optimizer.step()
            if not black_box:
                drift += sample_rate * clipped_sum(seen.model, x, y)
            seen.load_state_dict(losses.state_dict())
            on_step((predictions(seen.model, digits.test[0]) == digits.test[1]).double().mean().item())
        if black_box:
            return -cross_entropies(seen.model, *canaries[1:])
        noisy_sums = (first - seen.weights()) * batch_size / LEARNING_RATE
        return (noisy_sums - drift)[canaries[0]]

    return audit(train, num_canaries=num_canaries, epsilon=epsilon, delta=delta, confidence=confidence, generator=coins)


def cross_entropies(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def clipped_sum(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The sum [P] of the clipped gradients of all digits, which whoever knows the data can take off what was released.

    What remains along a canary's coordinate is the canary, the noise and the chance of the draw. Without it a tenth of the
    noise goes unnoticed: 1,000 canaries in 60 steps of 256 rows refute an epsilon of 1.6 instead of 4.0.
    """
    grads, _ = captured_grads(model, x, y)
    return torch.cat([g.flatten() for g in grads.clipped_sum(max_norm=MAX_NORM).values()])


def gradient_canaries(m: int, losses: GradientCanaries, *, generator: torch.Generator) -> Rows:
    """m rows that each pull at a coordinate of the parameters."""
    return losses.draw(m, generator=generator), torch.zeros(m, 1, 8, 8), torch.zeros(m, dtype=torch.long)


def input_canaries(m: int, losses: GradientCanaries, *, generator: torch.Generator) -> Rows:
    """m ordinary rows of random pixels with a random label."""
    x, y = torch.rand(m, 1, 8, 8, generator=generator), torch.randint(NUM_CLASSES, (m,), generator=generator)
    return torch.full((m,), ROW), x, y


def private(
    losses: GradientCanaries, rows: Rows, *, batch_size: int, noise_multiplier: float, seed: int
) -> tuple[PrivateOptimizer, PoissonLoader]:
    """The optimizer and the loader of the private training that users run."""
    optimizer = torch.optim.SGD(losses.parameters(), lr=LEARNING_RATE)
    loader = DataLoader(TensorDataset(*rows), batch_size=batch_size)
    _, private_optimizer, private_loader = make_private(
        losses, optimizer, loader, noise_multiplier=noise_multiplier, max_grad_norm=MAX_NORM, seed=seed
    )
    return private_optimizer, private_loader
