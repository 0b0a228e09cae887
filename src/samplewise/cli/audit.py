"""The job of `samplewise audit`: digits trained privately with canaries among them, and what they show about the claim."""

import copy
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import dp_accounting as dpa
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

import samplewise as sw
from samplewise.cli.console import progress_bar
from samplewise.cli.demo import NUM_CLASSES, captured_grads, flipped_digits, predictions, small_cnn
from samplewise.dp.auditing import NOBODY, ROW, Audit, GradientCanaries, audit

BATCH_SIZE = 256
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
        result = audited_digits(
            epsilon=epsilon,
            delta=delta,
            num_canaries=canaries,
            black_box=black_box,
            steps=steps,
            confidence=confidence,
            noise_factor=BROKEN if broken else 1.0,
            seed=seed,
            on_step=lambda accuracy: bar.update(task, advance=1, state=f"test accuracy {accuracy:.1%}"),
        )
    console.print(table(result))
    is_refuted, words = result.is_refuted, verdict(result)
    shown = ("refuted", "bold red") if is_refuted else ("not refuted", "bold green")
    console.print(Text.assemble(shown, f": {words}"))
    console.print(f"Took {time.perf_counter() - start:.1f} s", highlight=False)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        figures = {"black_box": black_box, "steps": steps, "is_broken": broken, "seed": seed, "is_refuted": is_refuted}
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
    confidence: float,
    noise_factor: float,
    seed: int,
    on_step: Callable[[float], object] = lambda accuracy: None,
) -> Audit:
    """The audit of a CNN trained on digits with the noise of (epsilon, delta) times `noise_factor`."""
    # coins that shared random numbers with the training would be guessed for that reason alone
    coins, data, training = (torch.Generator().manual_seed(3 * seed + k) for k in range(3))
    digits = flipped_digits(fraction=0.01, generator=data)
    x, y = digits.x, digits.true
    losses = GradientCanaries(small_cnn(seed=seed), cross_entropies, length=LENGTH)
    canaries = (input_canaries if black_box else gradient_canaries)(num_canaries, losses, generator=data)
    sample_rate = BATCH_SIZE / (len(x) + num_canaries)
    sigma = noise_factor * noise_multiplier(epsilon, delta, sample_rate=sample_rate, steps=steps)

    def train(is_in: Tensor) -> Tensor:
        ids = torch.cat([torch.full((len(x),), ROW), torch.where(is_in, canaries[0], NOBODY)])
        rows = ids, torch.cat([x, canaries[1]]), torch.cat([y, canaries[2]])
        seen = copy.deepcopy(losses)  # has the weights that were released last, and no part in the training
        first, drift = seen.weights().detach(), torch.zeros(len(seen.weights()))
        for weights in private_weights(losses, rows, sample_rate=sample_rate, sigma=sigma, steps=steps, generator=training):
            if not black_box:
                drift += sample_rate * clipped_sum(seen.model, x, y)
            vector_to_parameters(weights, seen.parameters())
            on_step((predictions(seen.model, digits.test[0]) == digits.test[1]).double().mean().item())
        if black_box:
            return -cross_entropies(seen.model, *canaries[1:])
        noisy_sums = (first - seen.weights()) * BATCH_SIZE / LEARNING_RATE
        return (noisy_sums - drift)[canaries[0]]

    return audit(train, num_canaries=num_canaries, epsilon=epsilon, delta=delta, confidence=confidence, generator=coins)


def cross_entropies(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def clipped_sum(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The sum [P] of the clipped gradients of all digits, which whoever knows the data can take off what was released.

    What remains along a canary's coordinate is the canary, the noise and the chance of the draw. Without it a tenth of the
    noise goes unnoticed: 60 steps, 1,000 canaries refute an epsilon of 1.6 instead of 4.0.
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


def noise_multiplier(epsilon: float, delta: float, *, sample_rate: float, steps: int) -> float:
    step = lambda sigma: dpa.PoissonSampledDpEvent(sample_rate, dpa.GaussianDpEvent(sigma))
    total = lambda sigma: dpa.SelfComposedDpEvent(step(sigma), steps)
    return dpa.calibrate_dp_mechanism(dpa.pld.PLDAccountant, total, epsilon, delta)


def private_weights(
    losses: GradientCanaries, rows: Rows, *, sample_rate: float, sigma: float, steps: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """The weights [P] after each step of DP-SGD."""
    for _ in range(steps):
        is_drawn = torch.rand(len(rows[0]), generator=generator) < sample_rate
        with sw.capture(losses) as grads:
            grads.backward(losses(*(part[is_drawn] for part in rows)))
        total = torch.cat([g.flatten() for g in grads.clipped_sum(max_norm=MAX_NORM).values()])
        noisy = total + sigma * MAX_NORM * torch.randn(len(total), generator=generator)
        weights = losses.weights().detach() - LEARNING_RATE / BATCH_SIZE * noisy
        vector_to_parameters(weights, losses.parameters())
        yield weights
