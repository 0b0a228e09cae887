"""Estimates over many batches: each takes a batch at a time, merges with those of other processes, and can be saved."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from samplewise import noise
from samplewise.noise import NoiseScale
from samplewise.queries import Grads


class Running(ABC):
    """An estimate over all samples seen so far.

    `update(grads)` adds a batch, `merge(other)` what another process saw: in any order and division, the same numbers but
    for rounding. A sample whose gradient is not finite is left out and counted in `num_left_out`.
    """

    def __init__(self) -> None:
        self.num_samples = self.num_left_out = 0

    @abstractmethod
    def update(self, grads: Grads) -> None:
        """Adds the samples of a batch."""

    @abstractmethod
    def merge(self, other: Any) -> None:
        """Adds the samples that another estimate has seen."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers from which `load_state_dict` makes the same estimate."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the state of another estimate in place of its own."""

    def _finite(self, grads: Grads) -> tuple[Tensor | None, Tensor]:
        """The samples that are finite (None if all are), and their squared norms; the others are counted."""
        q = grads.sq_norms()
        keep = q.isfinite().nonzero().squeeze(1)
        self.num_left_out += len(q) - len(keep)
        return (None, q) if len(keep) == len(q) else (keep, q[keep])


class RunningMoments(Running):
    """Mean, second moment and variance of the gradient, element by element; holds twice the parameters.

    Merged as by Chan, Golub and LeVeque (1979): squares are of deviations from the mean, so nothing cancels. A parameter
    that took no part in a batch counts as zero there.

    >>> from samplewise import per_sample
    >>> model, moments = torch.nn.Linear(1, 1, bias=False), RunningMoments()
    >>> for x in ([[1.0], [2.0]], [[6.0]]):
    ...     moments.update(per_sample(model, lambda model, x: model(x).squeeze(1))(torch.tensor(x)))
    >>> moments.mean()["weight"].item(), moments.variance()["weight"].item()
    (3.0, 7.0)
    """

    def __init__(self) -> None:
        super().__init__()
        self._means: dict[str, Tensor] = {}
        self._deviations: dict[str, Tensor] = {}

    def update(self, grads: Grads) -> None:
        keep, q = self._finite(grads)
        of = {name: grads[name].deviations(keep) for name in grads} if len(q) else {}
        self._add(len(q), {n: mean for n, (mean, _) in of.items()}, {n: deviation for n, (_, deviation) in of.items()})

    def merge(self, other: "RunningMoments") -> None:
        self.num_left_out += other.num_left_out
        self._add(other.num_samples, other._means, other._deviations)

    def mean(self) -> dict[str, Tensor]:
        """{name: (1/n) sum_b G[b]}, in float32 or better."""
        self._check(1)
        return _copies(self._means)

    def second_moment(self) -> dict[str, Tensor]:
        """{name: sum_b |G[b]|² element by element}."""
        n = self.num_samples
        return {name: d + n * self._means[name].abs().square() for name, d in self._deviations.items()}

    def fisher_diagonal(self) -> dict[str, Tensor]:
        """{name: (1/n) sum_b |G[b]|² element by element}: the diagonal of the empirical Fisher matrix."""
        self._check(1)
        return {name: moment / self.num_samples for name, moment in self.second_moment().items()}

    def variance(self) -> dict[str, Tensor]:
        """{name: 1/(n-1) sum_b |G[b] - mean|² element by element}."""
        self._check(2)
        return {name: d / (self.num_samples - 1) for name, d in self._deviations.items()}

    def state_dict(self) -> dict[str, Any]:
        counts = {"num_samples": self.num_samples, "num_left_out": self.num_left_out}
        return {**counts, "means": _copies(self._means), "deviations": _copies(self._deviations)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_samples, self.num_left_out = state["num_samples"], state["num_left_out"]
        self._means, self._deviations = _copies(state["means"]), _copies(state["deviations"])

    def _add(self, num: int, means: dict[str, Tensor], deviations: dict[str, Tensor]) -> None:
        total = self.num_samples + num
        if num == 0:
            return
        for name in [*self._means, *(n for n in means if n not in self._means)]:
            like = means[name] if name in means else self._means[name]
            mean, new = (some.get(name, torch.zeros_like(like)).to(like) for some in (self._means, means))
            old_squares = self._deviations.get(name, torch.zeros_like(like.abs()))
            new_squares = deviations.get(name, torch.zeros_like(like.abs())).to(old_squares)
            delta = new - mean
            self._means[name] = mean + delta * (num / total)
            between = delta.abs().square() * (self.num_samples * num / total)
            self._deviations[name] = old_squares + new_squares + between
        self.num_samples = total

    def _check(self, num: int) -> None:
        if self.num_samples < num:
            raise ValueError(f"this needs {num} samples or more, so far there were {self.num_samples}")


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in tensors.items()}


class RunningNoiseScale(Running):
    """The gradient noise scale over many batches; holds three numbers a batch and no gradient.

    |G|² is estimated from pairs of samples of the same batch, so that the parameters may change from batch to batch, and a
    batch of one sample adds to the norms alone. The standard error is the jackknife's over batches.
    """

    def __init__(self) -> None:
        super().__init__()
        self._batches: list[tuple[int, float, float]] = []

    def update(self, grads: Grads) -> None:
        keep, q = self._finite(grads)
        d = grads.dots_with_sum(keep)
        d = d if keep is None else d[keep]
        self._batches.append((len(q), float(q.double().sum()), float(d.double().sum())))
        self.num_samples += len(q)

    def merge(self, other: "RunningNoiseScale") -> None:
        self._batches += other._batches
        self.num_samples += other.num_samples
        self.num_left_out += other.num_left_out

    def noise_scale(self) -> NoiseScale:
        """tr(Σ) / |G|² with its standard error."""
        if not any(num > 1 for num, _, _ in self._batches):
            raise ValueError("a noise scale is estimated from pairs of samples, but no batch so far had two")
        n, Q, N = torch.tensor(self._batches, dtype=torch.float64, device="cpu").unbind(1)
        return noise.of_batches(n, Q, N)

    def state_dict(self) -> dict[str, Any]:
        return {"num_left_out": self.num_left_out, "batches": list(self._batches)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_left_out, self._batches = state["num_left_out"], [tuple(batch) for batch in state["batches"]]
        self.num_samples = sum(num for num, _, _ in self._batches)


class RunningNorms(Running):
    """Mean, standard deviation, smallest and largest of the samples' gradient norms; holds four numbers.

    >>> from samplewise import per_sample
    >>> model, norms = torch.nn.Linear(1, 1, bias=False), RunningNorms()
    >>> for x in ([[1.0], [2.0]], [[-6.0]]):
    ...     norms.update(per_sample(model, lambda model, x: model(x).squeeze(1))(torch.tensor(x)))
    >>> norms.mean(), round(norms.std(), 4), norms.smallest, norms.largest
    (3.0, 2.6458, 1.0, 6.0)
    """

    def __init__(self) -> None:
        super().__init__()
        self._mean = self._deviation = 0.0
        self.smallest, self.largest = float("inf"), float("-inf")

    def update(self, grads: Grads) -> None:
        norms = self._finite(grads)[1].double().sqrt()
        batch = RunningNorms()
        if len(norms):
            batch.num_samples, batch._mean = len(norms), float(norms.mean())
            batch._deviation = float((norms - norms.mean()).square().sum())
            batch.smallest, batch.largest = float(norms.min()), float(norms.max())
        self.merge(batch)

    def merge(self, other: "RunningNorms") -> None:
        total = self.num_samples + other.num_samples
        self.num_left_out += other.num_left_out
        if other.num_samples == 0:
            return
        delta = other._mean - self._mean
        self._mean += delta * other.num_samples / total
        self._deviation += other._deviation + delta**2 * self.num_samples * other.num_samples / total
        self.smallest, self.largest = min(self.smallest, other.smallest), max(self.largest, other.largest)
        self.num_samples = total

    def mean(self) -> float:
        """The mean norm; NaN before the first sample."""
        return self._mean if self.num_samples else float("nan")

    def std(self) -> float:
        """The standard deviation of the norms, of n - 1; NaN before the second sample."""
        return (self._deviation / (self.num_samples - 1)) ** 0.5 if self.num_samples > 1 else float("nan")

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
