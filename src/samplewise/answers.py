"""Questions whose answers follow from norms, products and weighted sums, whether of one parameter or of all."""

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from samplewise import noise
from samplewise.noise import NoiseScale

Like = TypeVar("Like")
"""What has the form of a gradient: a tensor, or {name: tensor}."""


class Answers(ABC, Generic[Like]):
    """The per-sample gradients G[b] of something, and what follows from their norms, products and weighted sums."""

    @abstractmethod
    def sq_norms(self) -> Tensor: ...

    @abstractmethod
    def weighted_sum(self, w: Tensor) -> Like: ...

    @abstractmethod
    def dots(self, direction: Any) -> Tensor: ...

    @abstractmethod
    def gram(self, other: Any = None) -> Tensor: ...

    @abstractmethod
    def dots_with_sum(self, samples: Tensor | None = None) -> Tensor:
        """d with d[b] = <G[b], sum of these samples, or all>, shape [B], in float32 or better."""

    @abstractmethod
    def _norm_of(self, direction: Any) -> Tensor:
        """|direction|."""

    def norms(self) -> Tensor:
        """n with n[b] = ‖G[b]‖, shape [B], in float32 or better."""
        return self.sq_norms().sqrt()

    def clipped_sum(self, *, max_norm: float) -> Like:
        """sum_b min(1, max_norm / ‖G[b]‖) G[b]; a sample whose norm is inf or NaN is left out."""
        return self.weighted_sum(clipping(self.norms(), max_norm))

    def normalized_sum(self, *, eps: float = 0.01) -> Like:
        """sum_b G[b] / (‖G[b]‖ + eps), as in AUTO-S (Bu et al., 2023); a sample whose norm is inf or NaN is left out."""
        return self.weighted_sum(normalizing(self.norms(), eps))

    def cosines(self, other: Any = None) -> Tensor:
        """<G[b], H[c]> / (‖G[b]‖ ‖H[c]‖): [B, B] among themselves, [B, C] with other samples, [B] with a direction.

        With a gradient that is zero it is 0.
        """
        if other is None or isinstance(other, Answers):
            norms = self.norms()
            return _over(self.gram(other), norms.unsqueeze(1), norms if other is None else other.norms())
        return _over(self.dots(other), self.norms(), self._norm_of(other))

    def noise_scale(self) -> NoiseScale:
        """tr(Σ) / |G|², the gradient noise scale, with its standard error over samples.

        Unbiased estimates of the trace of the covariance and of the squared norm of the mean, from the norms of the
        samples and their dots with the sum: no gradient is kept. A sample that is not finite makes it NaN.
        """
        q = self.sq_norms()
        if len(q) < 2:
            raise ValueError(f"a noise scale is estimated from two samples or more, the batch has {len(q)}")
        return noise.of_samples(q, self.dots_with_sum())


def clipping(norms: Tensor, max_norm: float) -> Tensor:
    """min(1, max_norm / n) for each norm, 0 where it is not finite."""
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}")
    return torch.where(norms.isfinite(), torch.where(norms > max_norm, max_norm / norms, 1.0), 0.0)


def normalizing(norms: Tensor, eps: float) -> Tensor:
    """1 / (n + eps) for each norm, 0 where it is not finite."""
    if not eps > 0:
        raise ValueError(f"eps must be positive, got {eps}")
    return torch.where(norms.isfinite(), 1 / (norms + eps), 0.0)


def _over(products: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """products / (left * right), in [-1, 1]; 0 where a norm is."""
    zero = (left == 0) | (right == 0)
    return torch.where(zero, 0.0, products / left.to(products) / right.to(products)).clamp(-1, 1)
