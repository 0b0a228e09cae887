"""A weight of several matrices, each with a factor of its own: experts."""

from functools import reduce

import torch
from torch import Tensor

from samplewise.factors.base import Factor


class Blocks(Factor):
    """G[b] = the stacked gradients of the blocks."""

    def __init__(self, blocks: list[Factor]):
        self.blocks = blocks
        self.num_samples, self.shape = blocks[0].num_samples, (len(blocks), *blocks[0].shape)

    def materialize(self) -> Tensor:
        return torch.stack([block.materialize() for block in self.blocks], 1)

    def select(self, samples: Tensor | slice) -> "Blocks":
        return Blocks([block.select(samples) for block in self.blocks])

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for block in self.blocks for t in block.tensors())

    def sq_norms(self, route: str | None = None) -> Tensor:
        return reduce(torch.add, (block.sq_norms(route) for block in self.blocks))

    def weighted_sum(self, w_B: Tensor, *, rounded: bool = False) -> Tensor:
        return torch.stack([block.weighted_sum(w_B, rounded=rounded) for block in self.blocks])

    def arranged(self, sizes: tuple[int, ...], order: tuple[int, ...], shape: tuple[int, ...]) -> Factor:
        if order[0] == 0 and sizes == self.shape and shape[0] == len(self.blocks):  # within each block
            inner = tuple(d - 1 for d in order[1:])
            return Blocks([block.arranged(sizes[1:], inner, shape[1:]) for block in self.blocks])
        return super().arranged(sizes, order, shape)

    def materialize_wide(self) -> Tensor:
        return torch.stack([block.materialize_wide() for block in self.blocks], 1)

    def dots(self, direction: Tensor) -> Tensor:
        return reduce(torch.add, (block.dots(part) for block, part in zip(self.blocks, direction, strict=True)))

    def pairs(self, other: Factor) -> Tensor | None:
        if not isinstance(other, Blocks):
            return None
        return reduce(torch.add, (G.gram(H) for G, H in zip(self.blocks, other.blocks, strict=True)))

    def square_sum(self, center: Tensor | None = None) -> Tensor:
        centers = [None] * len(self.blocks) if center is None else list(center)
        return torch.stack([block.square_sum(c) for block, c in zip(self.blocks, centers, strict=True)])
