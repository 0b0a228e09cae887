"""The job of `samplewise demo`: digits with flipped labels, a small CNN, and the rankings that should find them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import samplewise as sw
from samplewise.cli.ranking import Quality, chance, quality, ranked

NUM_CLASSES = 10
NUM_VALIDATION = 200
NUM_TEST = 200
BATCH_SIZE = 64

NORM = "gradient norm"
AGAINST = "against validation"
LOSS = "loss"
CHANCE = "chance, expected"


@dataclass(frozen=True)
class Digits:
    """Images [N, 1, 8, 8] in 0..1 and their labels: `given` to the training, `true`, and clean rows held out."""

    x: Tensor
    given: Tensor
    true: Tensor
    is_flipped: Tensor
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @property
    def num_flipped(self) -> int:
        return int(self.is_flipped.sum())


@dataclass(frozen=True)
class Epoch:
    """The state after one pass: mean training loss, test accuracy, and a score [N] a ranking."""

    number: int
    loss: float
    accuracy: float
    scores: dict[str, Tensor]


@dataclass(frozen=True)
class Findings:
    """What the rankings found, and the rows as the model of the last epoch sees them.

    `scores` [N] are means over the epochs, `orders` the rows from the most to the least suspicious, `predicted` [N] the
    classes of the training rows.
    """

    digits: Digits
    accuracy: float
    scores: dict[str, Tensor]
    orders: dict[str, Tensor]
    qualities: dict[str, Quality]
    predicted: Tensor


def flip_labels(labels: Tensor, *, fraction: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The labels with round(fraction · N) of them, at least one, moved to another class, and which [N] those are."""
    num_flipped = max(1, round(fraction * len(labels)))
    rows = torch.randperm(len(labels), generator=generator)[:num_flipped]
    given, is_flipped = labels.clone(), torch.zeros(len(labels), dtype=torch.bool)
    given[rows] = (labels[rows] + torch.randint(1, NUM_CLASSES, (num_flipped,), generator=generator)) % NUM_CLASSES
    is_flipped[rows] = True
    return given, is_flipped


def flipped_digits(*, fraction: float, generator: torch.Generator) -> Digits:
    """scikit-learn's 1,797 digits, split at random; only training labels are flipped."""
    images, labels = load_digits(return_X_y=True)
    shuffled = torch.randperm(len(labels), generator=generator)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)[shuffled] / 16
    y = torch.tensor(labels)[shuffled]
    sizes = [len(y) - NUM_VALIDATION - NUM_TEST, NUM_VALIDATION, NUM_TEST]
    (x_train, *x_held), (true, *y_held) = x.split(sizes), y.split(sizes)
    given, is_flipped = flip_labels(true, fraction=fraction, generator=generator)
    validation, test = zip(x_held, y_held, strict=True)
    return Digits(x_train, given, true, is_flipped, validation, test)


def small_cnn(*, seed: int) -> nn.Sequential:
    """A CNN of 10 thousand parameters; GroupNorm, since BatchNorm would mix the samples."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, stride=2),
            nn.GroupNorm(8, 32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, NUM_CLASSES),
        )


def suspicion(model: nn.Module, digits: Digits) -> dict[str, Tensor]:
    """A score [N] a ranking, higher for more suspicious rows, at the model's present weights.

    gradient norm ‖g_b‖; against validation -<v, g_b>, v the gradient summed over the validation rows, so that
    a step on a high row would raise the validation loss; and for comparison the loss.
    """
    captured, losses = captured_grads(model, digits.x, digits.given)
    validation, _ = captured_grads(model, *digits.validation)
    return {NORM: captured.norms(), AGAINST: -captured.dots(validation.sum()), LOSS: losses}


def captured_grads(model: nn.Module, x: Tensor, y: Tensor) -> tuple[sw.Grads, Tensor]:
    """The gradients of the cross entropy of every row, and its values [B]."""
    with sw.capture(model) as grads:
        losses = F.cross_entropy(model(x), y, reduction="none")
        grads.backward(losses)
    return grads, losses.detach()


def training(model: nn.Module, digits: Digits, *, epochs: int, generator: torch.Generator) -> Iterator[Epoch]:
    """One `Epoch` a pass over the training rows, with the labels as given."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number in range(1, epochs + 1):
        total = 0.0
        for rows in torch.randperm(len(digits.x), generator=generator).split(BATCH_SIZE):
            loss = F.cross_entropy(model(digits.x[rows]), digits.given[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
        x, y = digits.test
        accuracy = (predictions(model, x) == y).double().mean().item()
        yield Epoch(number, total / len(digits.x), accuracy, suspicion(model, digits))


def predictions(model: nn.Module, x: Tensor) -> Tensor:
    """The class [B] that the model holds most likely."""
    with torch.no_grad():
        return model(x).argmax(1)


def findings(model: nn.Module, digits: Digits, history: list[Epoch]) -> Findings:
    """What the rankings by the mean score over the epochs found, and what chance would find."""
    scores = {name: torch.stack([epoch.scores[name] for epoch in history]).mean(0) for name in history[0].scores}
    orders = {name: ranked(score) for name, score in scores.items()}
    qualities = {name: quality(order, digits.is_flipped) for name, order in orders.items()}
    qualities[CHANCE] = chance(len(digits.x), digits.num_flipped)
    return Findings(digits, history[-1].accuracy, scores, orders, qualities, predictions(model, digits.x))
