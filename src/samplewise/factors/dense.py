"""Gradients that are already there as [B, *shape]: biases, norm scales, broadcasts."""

import math

from torch import Tensor

from samplewise.factors.base import Factor, flat, sq_lengths
from samplewise.precision import wide, wide_dtype
from samplewise.tracing import is_tracing


class Dense(Factor):
    """G itself.

    >>> import torch
    >>> Dense(torch.tensor([[3.0, 4.0], [0.0, 1.0]])).sq_norms().tolist()
    [25.0, 1.0]
    """

    def __init__(self, G: Tensor):
        self.G = G
        self.num_samples, *shape = G.shape
        self.shape = tuple(shape)

    @property
    def num_elements(self) -> int:
        """Of one sample's gradient."""
        return math.prod(self.shape)

    @classmethod
    def of_sum(cls, t: Tensor, dims: int | tuple[int, ...] = 1) -> "Dense":
        """The factor of t [B, ...] summed over these dimensions, in float32 or better."""
        return cls(t.sum(dims, dtype=wide_dtype(t)))

    def materialize(self) -> Tensor:
        return self.G

    def select(self, samples: Tensor | slice) -> "Dense":
        return Dense(self.G[samples])

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.G,)

    def sq_norms(self, route: str | None = None) -> Tensor:
        return sq_lengths(self.G)

    def weighted_sum(self, w_B: Tensor, *, rounded: bool = False) -> Tensor:
        if is_tracing():  # one pass, whatever the dtype
            w = w_B.to(wide_dtype(self.G).to_real())
            return (w.reshape(-1, *[1] * len(self.shape)) * self.G).sum(0)
        G = wide(self.G)
        return (w_B.to(G.dtype) @ flat(G)).reshape(self.shape)

    def joined(self, other: Factor) -> "Dense | None":
        return Dense(wide(self.G) + wide(other.G)) if isinstance(other, Dense) else None

    def band(self, rows: Tensor) -> "Dense | None":
        return Dense(self.G[:, rows]) if self.shape else None
