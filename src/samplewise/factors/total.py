"""Several uses of one parameter, joined: norms do not add over uses, so the uses are summed before any question."""

from collections.abc import Iterator
from functools import reduce

import torch
from torch import Tensor

from samplewise.factors.base import Factor, Hasty, mended


class Total(Factor):
    """G = sum of factors whose structures do not combine into one (a table looked up and multiplied with)."""

    def __init__(self, parts: list[Factor]):
        self.parts = parts
        self.num_samples, self.shape = parts[0].num_samples, parts[0].shape

    @property
    def is_pulled_back(self) -> bool:  # type: ignore[override]
        return any(part.is_pulled_back for part in self.parts)

    def is_complex(self) -> bool:
        return any(part.is_complex() for part in self.parts)

    def materialize(self) -> Tensor:
        return reduce(torch.add, (part.materialize() for part in self.parts))

    def select(self, samples: Tensor | slice) -> "Total":
        return Total([part.select(samples) for part in self.parts])

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for part in self.parts for t in part.tensors())

    def elements_per_sample(self) -> int:
        return max(part.elements_per_sample() for part in self.parts)

    def sq_norms(self, route: str | None = None) -> Tensor:
        return mended([self.hasty_sq_norms(route)])[0]

    def hasty_sq_norms(self, route: str | None = None) -> Hasty:
        """sum_i |G_i|² + 2 sum_{i<j} <G_i, G_j>."""
        terms = total = reduce(torch.add, (part.sq_norms(route) for part in self.parts))
        for j, later in enumerate(self.parts):
            for earlier in self.parts[:j]:
                total = total + 2 * earlier.inner(later)
        return Hasty.of_terms(total, terms, lambda doubtful: Factor.sq_norms(self.select(doubtful)))

    def weighted_sum(self, w_B: Tensor, *, rounded: bool = False) -> Tensor:
        return reduce(torch.add, (part.weighted_sum(w_B, rounded=rounded) for part in self.parts))

    def materialize_wide(self) -> Tensor:
        return reduce(torch.add, (part.materialize_wide() for part in self.parts))

    def dots(self, direction: Tensor) -> Tensor:
        return reduce(torch.add, (part.dots(direction) for part in self.parts))

    def band(self, rows: Tensor) -> "Total | None":
        bands = [part.band(rows) for part in self.parts]
        return Total([band for band in bands if band is not None]) if None not in bands else None

    def pairs(self, other: Factor) -> Tensor:
        """sum_i <G_i, H>: each part meets the other factor in its own cheapest way."""
        return reduce(torch.add, (part.gram(other) for part in self.parts))

    def terms(self) -> Tensor:
        return reduce(torch.add, (part.sq_norms() for part in self.parts))

    def two_sided(self, left_OK: Tensor | None, right_IK: Tensor | None) -> Tensor:
        return reduce(torch.add, (part.two_sided(left_OK, right_IK) for part in self.parts))

    def pieces(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        return (piece for part in self.parts for piece in part.pieces())


def join(factors: list[Factor]) -> Factor:
    """One factor for the sum of all: those of one structure combine, the rest stand side by side in a `Total`."""
    kinds: list[Factor] = []
    for factor in factors:
        for i, kind in enumerate(kinds):
            together = kind.joined(factor)
            if together is not None:
                kinds[i] = together
                break
        else:
            kinds.append(factor)
    # Rows first: it knows its product with a tied head without building the table
    kinds.sort(key=lambda factor: type(factor).__name__, reverse=True)
    return kinds[0] if len(kinds) == 1 else Total(kinds)
