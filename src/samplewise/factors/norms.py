"""What is left of a parameter's gradients when norms alone are asked for."""

from typing import NoReturn

from torch import Tensor

from samplewise.errors import SamplewiseError
from samplewise.factors.base import Factor


class Norms(Factor):
    """n with n[b] = sum |G[b]|²; G itself is gone.

    >>> import torch
    >>> Norms(torch.tensor([4.0, 9.0]), shape=(3, 2)).sq_norms().tolist()
    [4.0, 9.0]
    """

    def __init__(self, sq_norms: Tensor, *, shape: tuple[int, ...]):
        self.n, self.shape, self.num_samples = sq_norms, shape, len(sq_norms)

    def sq_norms(self, route: str | None = None) -> Tensor:
        return self.n

    def select(self, samples: Tensor | slice) -> "Norms":
        return Norms(self.n[samples], shape=self.shape)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.n,)

    def materialize(self) -> NoReturn:
        raise SamplewiseError(
            "norms are all that was kept of these gradients, as capture(model, keep=...) asked. Leave keep= out to ask for anything "
            'else; keep="graph" answers weighted and clipped sums of the whole model too, inside the block.'
        )
