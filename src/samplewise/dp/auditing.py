"""A lower bound on the epsilon of a private training, measured with one run of it.

Each of m canaries is in the training set or not by a fair coin. Whoever sees the result of the training guesses r of the
coins; if the training is (epsilon, delta)-private, few guesses can be right. More right ones refute the claim. After Steinke,
Nasr, Jagielski, "Privacy Auditing with One (1) Training Run", 2023.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from samplewise.losses import LossFn

PRECISION = 1e-6
"""How close the bound comes, from below, to the epsilon at which the p-value meets its level."""


def p_value(*, num_canaries: int, num_guesses: int, num_correct: int, epsilon: float, delta: float) -> float:
    """The most that the probability of `num_correct` right guesses or more can be under (epsilon, delta)-privacy.

    P[W >= v] + 2 m delta max_i P[v - i <= W < v] / i   with W ~ Binomial(r, q), q = 1 / (1 + exp(-epsilon)), i = 1 ... v

    m canaries, r guesses, v of them right (Appendix D of the paper). It holds for a number of guesses that was fixed before
    the scores were seen.

    >>> round(p_value(num_canaries=3, num_guesses=2, num_correct=2, epsilon=0.0, delta=0.0), 6)
    0.25
    >>> round(p_value(num_canaries=3, num_guesses=2, num_correct=2, epsilon=0.0, delta=0.01), 6)  # 0.25 + 6 · 0.01 · 0.5
    0.28
    """
    m, r, v = num_canaries, num_guesses, num_correct
    if not 0 <= v <= r <= m:
        raise ValueError(f"{v} right of {r} guesses about {m} canaries; there are no more right than guesses than canaries")
    if not (0 <= delta <= 1 and 0 <= epsilon < math.inf):
        raise ValueError(f"epsilon is finite and 0 or more and delta a probability, got {epsilon} and {delta}")
    pmf = _binomial(r, epsilon)
    windows = pmf[:v].flip(0).cumsum(0) / torch.arange(1, v + 1, dtype=torch.float64)
    alpha = windows.max().item() if v else 0.0
    return min(1.0, pmf[v:].sum().item() + 2 * m * delta * alpha)


def epsilon_lower_bound(
    *, num_canaries: int, num_guesses: int, num_correct: int, delta: float, confidence: float = 0.95
) -> float:
    """The largest epsilon that is refuted: e with p_value(e) = 1 - confidence, or 0 if not even 0 is.

    A training that is (epsilon, delta)-private gets a bound above epsilon with probability at most 1 - confidence. The figure
    below is the paper's (Appendix D).

    >>> found = {"num_canaries": 1000, "num_guesses": 100, "num_correct": 75}
    >>> round(epsilon_lower_bound(**found, delta=1e-4, confidence=0.95), 3)
    0.673
    """
    _check_confidence(confidence)
    level = 1 - confidence
    is_refuted = lambda epsilon: (
        p_value(num_canaries=num_canaries, num_guesses=num_guesses, num_correct=num_correct, epsilon=epsilon, delta=delta)
        < level
    )
    if not is_refuted(0.0):
        return 0.0
    # A level below 1/2 is crossed once. With c = 2 m delta, the i-th term P[W >= v] + c/i P[v-i <= W < v] grows with q where
    # c <= i. Where it shrinks, c > i and v - i is at most the median of W, so that it is over P[W >= v - i] >= 1/2 from there on.
    low, high = 0.0, 1.0
    while is_refuted(high):
        low, high = high, 2 * high
    while high - low > PRECISION:
        middle = (low + high) / 2
        low, high = (middle, high) if is_refuted(middle) else (low, middle)
    return low


def _check_confidence(confidence: float) -> None:
    if not 0.5 < confidence < 1:
        raise ValueError(f"confidence lies between 0.5 and 1, got {confidence}")


def _binomial(r: int, epsilon: float) -> Tensor:
    """P[W = k] for k = 0 ... r in float64, from log q and log(1 - q) that stay exact where q rounds to 1."""
    k = torch.arange(r + 1, dtype=torch.float64)
    log_q = -math.log1p(math.exp(-epsilon))
    log_choose = math.lgamma(r + 1) - torch.lgamma(k + 1) - torch.lgamma(r - k + 1)
    return (log_choose + k * log_q + (r - k) * (log_q - epsilon)).exp()


# --- the guesses -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Guesses:
    """So many guesses, how many were right, and the epsilon that they refute."""

    num_guesses: int
    num_correct: int
    lower_bound: float


@dataclass(frozen=True)
class Audit:
    """What one run showed about a claimed (epsilon, delta): `rows`, one for each number of guesses that was settled before.

    All bounds hold together with probability `confidence`, so that the largest may be picked.
    """

    epsilon: float
    delta: float
    confidence: float
    num_canaries: int
    rows: tuple[Guesses, ...]

    @property
    def best(self) -> Guesses:
        """The row with the largest bound."""
        return max(self.rows, key=lambda row: row.lower_bound)

    @property
    def is_refuted(self) -> bool:
        """Whether the claim is false; a true one is called false with probability 1 - confidence at most."""
        return self.best.lower_bound > self.epsilon


def guesses(scores: Tensor, *, num_guesses: int) -> Tensor:
    """g [m]: 1 (in) for the upper half of the guesses by score, -1 (out) for the lower half, 0 where there is none.

    >>> guesses(torch.tensor([0.3, 2.0, -1.0, 0.1]), num_guesses=2).tolist()
    [0, 1, -1, 0]
    """
    order = scores.argsort(descending=True)
    guessed = torch.zeros(len(scores), dtype=torch.long)
    guessed[order[: (num_guesses + 1) // 2]] = 1
    guessed[order[len(order) - num_guesses // 2 :]] = -1
    return guessed


def audit(
    train: Callable[[Tensor], Tensor],
    *,
    num_canaries: int,
    epsilon: float,
    delta: float,
    confidence: float = 0.95,
    num_guesses: Iterable[int] | None = None,
    generator: torch.Generator | None = None,
) -> Audit:
    """What one run of `train` shows about its claim to be (epsilon, delta)-private.

    `train(is_in)` trains on its own data and on the canaries with is_in[i], [m] of booleans, and returns a score [m] for each
    canary, higher where it looks as if it were in. Beside the training itself nothing may look at `is_in`, and no random
    number of the training may come from `generator` or its seed: then the scores know more than was released.

    `num_guesses` lists the numbers of guesses to try, m, m/2, m/4, m/8 and m/16 unless told. They are tried on the same
    scores, so each is judged at (1 - confidence) / (how many there are).

    **Guarantee.** If `train` releases no more than (epsilon, delta)-privacy allows under adding or removing one canary, then
    `is_refuted` with probability at most 1 - confidence. Not being refuted proves nothing.

    | case | result |
    |-|-|
    | no number of guesses, or one below 1 or above m | raises, before the training |
    | a claim that so many canaries cannot refute, NaN, negative | raises, before the training |
    | a score is NaN, or there is not one for each canary | raises |
    | scores that know nothing, such as all equal or all inf | a bound near 0 |

    >>> peeking = lambda is_in: is_in.float()  # releases the coins
    >>> seeded = torch.Generator().manual_seed(0)
    >>> result = audit(peeking, num_canaries=64, epsilon=1.0, delta=1e-5, num_guesses=[32], generator=seeded)
    >>> result.best.num_correct, round(result.best.lower_bound, 2), result.is_refuted
    (32, 2.32, True)
    """
    _check_confidence(confidence)
    m = num_canaries
    counts = tuple(dict.fromkeys([max(1, m // 2**k) for k in range(5)] if num_guesses is None else num_guesses))
    if not counts or not all(0 < r <= m for r in counts):
        raise ValueError(f"guesses number 1 to {m}, as there are {m} canaries, got {list(counts)}")
    bound = partial(epsilon_lower_bound, num_canaries=m, delta=delta, confidence=1 - (1 - confidence) / len(counts))
    limit = max(bound(num_guesses=r, num_correct=r) for r in counts)
    if not 0 <= epsilon < limit:
        raise ValueError(
            f"guesses that are all right refute an epsilon of {limit:.2f} with {m} canaries, so {epsilon} would stand whatever "
            "the training does. Use more canaries."
        )
    if generator is None:
        generator = torch.Generator()
        generator.seed()
    is_in = torch.randint(2, (m,), generator=generator).bool()
    scores = train(is_in.clone()).detach().cpu()
    if scores.shape != is_in.shape or scores.isnan().any():
        raise ValueError(
            f"the training returned scores of shape {tuple(scores.shape)}, {int(scores.isnan().sum())} of them NaN, for "
            f"{m} canaries. It must return a number for each, shape [{m}]."
        )
    rows = []
    for r in counts:
        guessed = guesses(scores, num_guesses=r)
        v = int(((guessed == 1) & is_in | (guessed == -1) & ~is_in).sum())
        rows.append(Guesses(r, v, bound(num_guesses=r, num_correct=v)))
    return Audit(epsilon, delta, confidence, m, tuple(rows))


# --- canaries ----------------------------------------------------------------------------------------------------------------


ROW, NOBODY = -1, -2
"""In place of a canary's coordinate: an ordinary row, and a row that has no gradient."""


class GradientCanaries(nn.Module):
    """The losses [B] of a batch in which rows may be canaries: rows whose gradient is one coordinate of the parameters alone.

    losses[b] = length · θ[k]  where k = coordinates[b] >= 0;  loss_fn(model, *batch)[b]  where it is ROW;  0  where NOBODY

    θ [P] are all trainable parameters in a row. With a length over the clipping norm C, a canary that is in moves the clipped
    sum by C along coordinate k: the most that a sample can do, and no other canary is disturbed. `draw` picks coordinates all
    over the model, so that every parameter's clipping and noise is met in proportion to its size. A canary that is out leaves
    NOBODY in its place, so that the size of the data, and the sampling rate with it, says nothing about the coins.

    >>> import samplewise as sw
    >>> model = nn.Linear(2, 1)
    >>> canaries = GradientCanaries(model, lambda model, x: model(x).squeeze(1), length=100.0)
    >>> with sw.capture(canaries) as grads:
    ...     grads.backward(canaries(torch.tensor([NOBODY, 2]), torch.ones(2, 2)))  # θ is weight, weight, bias
    >>> grads["model.weight"].norms().tolist(), grads["model.bias"].norms().tolist()
    ([0.0, 0.0], [0.0, 100.0])
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn, *, length: float):
        super().__init__()
        self.model, self.loss_fn, self.length = model, loss_fn, length

    def weights(self) -> Tensor:
        """θ [P]."""
        return torch.cat([p.flatten() for p in self.model.parameters() if p.requires_grad])

    def draw(self, num_canaries: int, *, generator: torch.Generator) -> Tensor:
        """Distinct coordinates [m], drawn uniformly."""
        num_weights = len(self.weights())
        if num_canaries > num_weights:
            raise ValueError(
                f"{num_canaries} canaries need a coordinate each, but the model has {num_weights} trainable parameters. Use "
                "fewer canaries or a larger model."
            )
        return torch.randperm(num_weights, generator=generator)[:num_canaries]

    def forward(self, coordinates: Tensor, *batch: Tensor) -> Tensor:
        canaries = self.length * self.weights()[coordinates.clamp(min=0)]
        rows = torch.where(coordinates == ROW, self.loss_fn(self.model, *batch), 0.0)
        return torch.where(coordinates >= 0, canaries, rows)
