"""Questions about the gradients of one parameter: asks its factor, and puts the scale of the loss right."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from samplewise.answers import Answers
from samplewise.factors.base import Factor, squares
from samplewise.planner import Planner
from samplewise.precision import wide, wide_dtype
from samplewise.projections import Projector, projector_of
from samplewise.tracing import doubt, is_tracing
from samplewise.unwatched import unwatched


class ParameterGrads(Answers[Tensor]):
    """The per-sample gradients G[b] of one parameter."""

    def __init__(self, name: str, parameter: Tensor, factor: Callable[[], Factor], scale: float, planner: Planner):
        """`factor()` is that of all uses of the parameter, joined; G[b] is `scale` times what it holds."""
        self.name, self._parameter, self._factor, self._scale = name, parameter, factor, scale
        self._planner = planner

    def __repr__(self) -> str:
        factor = self._factor()
        shape = "x".join(map(str, self._parameter.shape))
        return f"<gradients of {self.name!r} ({shape}) for {factor.num_samples} samples as {type(factor).__name__}>"

    @unwatched
    def materialize(self) -> Tensor:
        """G with G[b] the gradient of sample b, shape [B, *shape], in the parameter's dtype."""
        return self._scaled(self._factor().materialize())

    @unwatched
    def of_samples(self, samples: Tensor | Sequence[int]) -> Tensor:
        """G of these samples alone, shape [len(samples), *shape], in the parameter's dtype."""
        samples = samples if isinstance(samples, Tensor) else torch.tensor(samples, dtype=torch.long)
        return self._scaled(self._of(samples).materialize())

    def stream(self, *, samples: int) -> Iterator[tuple[slice, Tensor]]:
        """(which samples, their G) for runs of so many samples, in order."""
        for run in runs(self._factor().num_samples, samples):
            yield run, self._scaled(self._factor().select(run).materialize())

    @unwatched
    def sq_norms(self) -> Tensor:
        """n with n[b] = sum |G[b]|², shape [B], in float32 or better."""
        return self._planner.sq_norms(self.name, self._factor()) * self._scale**2

    @unwatched
    def dots(self, direction: "Tensor | ParameterGrads") -> Tensor:
        """d with d[b] = <direction, G[b]>, shape [B], in float32 or better; with other samples [B, C], as `gram`."""
        if isinstance(direction, ParameterGrads):
            return self.gram(direction)
        self._check_shape(direction.shape, "direction")
        return self._factor().dots(direction) * self._scale

    @unwatched
    def gram(self, other: "ParameterGrads | None" = None) -> Tensor:
        """K with K[b, c] = <G[b], H[c]>, H the samples of another capture or these, in float32 or better."""
        other = self if other is None else other
        self._check_shape(other._parameter.shape, f"other {other.name!r}")
        return self._factor().gram(other._factor()) * (self._scale * other._scale)

    @unwatched
    def weighted_sum(self, w: Tensor) -> Tensor:
        """sum_b w[b] G[b], like the parameter; a sample with w[b] = 0 is left out, unless w needs a gradient."""
        return self._weighted_sum(*kept(w, self._factor().num_samples))

    @unwatched
    def sum(self) -> Tensor:
        """sum_b G[b], like the parameter: what `.grad` would be."""
        return (self._wide_sum() * self._scale).to(self._parameter.dtype)

    @unwatched
    def second_moment(self) -> Tensor:
        """sum_b |G[b]|² element by element, shaped like the parameter, real, in float32 or better."""
        return self._factor().square_sum() * self._scale**2

    @unwatched
    def fisher_diagonal(self) -> Tensor:
        """(1/B) sum_b |G[b]|² element by element: the diagonal of the empirical Fisher matrix."""
        return self.second_moment() / self._at_least(1, "a mean")

    @unwatched
    def variance(self) -> Tensor:
        """1/(B-1) sum_b |G[b] - mean|² element by element, shaped like the parameter, real, in float32 or better."""
        B = self._at_least(2, "a variance")
        return self.deviations()[1] / (B - 1)

    @unwatched
    def project(self, projector: Projector | None = None, *, dim: int | None = None, seed: int = 0) -> Tensor:
        """p with p[b] the projection of G[b], shape [B, K], in float32 or better; `dim=` stands for Rademacher(dim, seed)."""
        return projector_of(projector, dim, seed).project(self.name, self._factor()) * self._scale

    @unwatched
    def deviations(self, samples: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(mean, sum_b |G[b] - mean|²) over these samples, or all: what running estimates add up."""
        factor = self._of(samples)
        mean = self._wide_sum(samples) / max(1, factor.num_samples)
        return mean * self._scale, factor.square_sum(mean) * self._scale**2

    @unwatched
    def dots_with_sum(self, samples: Tensor | None = None) -> Tensor:
        """d with d[b] = <G[b], sum of these samples, or all>, shape [B], in float32 or better."""
        return self._factor().dots(self._wide_sum(samples)) * self._scale**2

    def _wide_sum(self, samples: Tensor | None = None) -> Tensor:
        factor = self._of(samples)
        ones = torch.ones(factor.num_samples, dtype=torch.float64, device=factor.tensors()[0].device)
        return factor.weighted_sum(ones)

    def _weighted_sum(self, keep: Tensor | None, w: Tensor) -> Tensor:
        is_half = wide_dtype(self._parameter) != self._parameter.dtype
        return self._wide_weighted_sum(keep, w, rounded=is_half).to(self._parameter.dtype)

    def _wide_weighted_sum(self, keep: Tensor | None, w: Tensor, *, rounded: bool = False) -> Tensor:
        """In float32 or better, as private sums need: what is rounded before noise is added is not bounded any more."""
        factor = self._of(keep)
        if factor.num_samples == 0:
            return torch.zeros_like(wide(self._parameter))
        w = scaled_by(w.to(factor.tensors()[0].device), self._scale)
        return self._planner.weighted_sum(factor, w, rounded=rounded)

    def _of(self, samples: Tensor | None) -> Factor:
        factor = self._factor()
        return factor if samples is None else factor.select(samples.to(factor.tensors()[0].device))

    def _scaled(self, G: Tensor) -> Tensor:
        return (G * self._scale if self._scale != 1 else G).to(self._parameter.dtype)

    @unwatched
    def _norm_of(self, direction: Tensor) -> Tensor:
        return sq_size(direction).sqrt()

    def _check_shape(self, shape: torch.Size, what: str) -> None:
        if shape != self._parameter.shape:
            raise ValueError(f"{self.name!r} is {tuple(self._parameter.shape)}, its {what} {tuple(shape)}")

    def _at_least(self, num: int, what: str) -> int:
        B = self._factor().num_samples
        if num > B:
            raise ValueError(f"{what} over samples needs {num} or more, the batch has {B}")
        return B


def kept(w: Tensor, num_samples: int | None) -> tuple[Tensor | None, Tensor]:
    """The samples with a weight, and their weights; None for all of them.

    Weights that need a gradient are all taken: that of w[b] is <G[b], ...> whatever w[b] is.
    """
    if w.shape != (num_samples,):
        raise ValueError(f"one weight a sample: expected shape ({num_samples},), got {tuple(w.shape)}")
    if w.is_complex():
        raise ValueError(f"weights of samples are real, got {w.dtype}")
    w = w.to(torch.promote_types(w.dtype, torch.float32) if w.is_floating_point() else torch.float64)
    if w.requires_grad and not is_tracing():
        return None, w
    if is_tracing():
        doubt((w == 0).any())
        return None, w
    keep = w.nonzero().squeeze(1)
    return (None, w) if len(keep) == len(w) else (keep, w[keep])


def sq_size(direction: Tensor) -> Tensor:
    """|direction|² in float32 or better, also of integers."""
    return squares(direction.to(torch.promote_types(direction.dtype, torch.float32))).sum()


def scaled_by(w: Tensor, scale: float) -> Tensor:
    """w * scale, not rounded before it is multiplied with gradients."""
    return w if scale == 1.0 else w.double() * scale


def runs(num_samples: int, size: int) -> Iterator[slice]:
    """The samples cut into runs of `size`."""
    if size < 1:
        raise ValueError(f"a run has one sample or more, got {size}")
    return (slice(start, min(start + size, num_samples)) for start in range(0, num_samples, size))
