"""The one canonical form of tensors: `[B, T, *features]`, whatever way the samples lie."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from samplewise.tracing import untraced

NO_SAMPLE = -1
"""The id of elements that belong to no sample (rows of a constant in a `torch.cat` with data)."""


class Fold:
    """Brings `[*lead, *features]` into the one canonical form `[B, T, *features]`.

    `ids` says for the leading dimensions to which sample each position belongs. Samples with fewer positions than others
    are filled up with zeros, which every factor ignores.

    >>> rows = Fold(torch.tensor([0, 1, 1, 0]), num_samples=2)
    >>> rows(torch.tensor([[1.0], [2.0], [3.0], [4.0]])).squeeze(-1).tolist()
    [[1.0, 4.0], [2.0, 3.0]]
    """

    def __init__(self, ids: Tensor, num_samples: int):
        self.ids = ids
        self.num_samples = num_samples
        full = [d for d, size in enumerate(ids.shape) if size != 1]
        self.axis: int | None = None
        """The dimension along which sample b lies at place b."""
        self.folded: tuple[int, tuple[int, int], int] | None = None
        """(dimension, its sizes once unfolded, which of them counts samples) where rows are folded as (B·T) or (T·B)."""
        self.is_leading = False
        """Whether samples already come one after the other, so that a view will do."""
        if len(full) == 1:
            self._find_axis(full[0], ids.flatten())
        elif num_samples == 1 and not full and ids.ndim and int(ids.flatten()[0]) == 0:
            self.axis = 0
        self.is_leading = self.axis == 0 or (self.folded is not None and self.folded[0] == self.folded[2] == 0)

    def _find_axis(self, dim: int, ids: Tensor) -> None:
        """Looks for samples in their order along the only dimension that holds several, one row each or T."""
        B, num_rows = self.num_samples, len(ids)
        samples = torch.arange(B, device="cpu")
        if num_rows == B:
            self.axis = dim if torch.equal(ids, samples) else None
        elif B and num_rows % B == 0:
            T = num_rows // B
            if torch.equal(ids.view(B, T), samples.unsqueeze(1).expand(B, T)):
                self.folded = (dim, (B, T), 0)
            elif torch.equal(ids.view(T, B), samples.expand(T, B)):
                self.folded = (dim, (T, B), 1)

    def __call__(self, t: Tensor) -> Tensor:
        """`t` as [B, T, *features]: a view where samples come one after the other."""
        num_lead = self.ids.ndim
        if self.axis == 0 and num_lead == 2 and t.shape[0] == self.num_samples:
            return t
        B, lead, features = self.num_samples, t.shape[:num_lead], t.shape[num_lead:]
        num_positions = lead.numel() // B if B else 0
        if self.is_leading:
            return t.reshape(B, num_positions, *features)
        if self.axis is not None:
            return t.movedim(self.axis, 0).reshape(B, num_positions, *features)
        if self.folded is not None:
            dim, sizes, which = self.folded
            return t.unflatten(dim, sizes).movedim(dim + which, 0).reshape(B, num_positions, *features)
        order, sample, slot, width = self._slots(tuple(lead), t.device)
        rows = t.reshape(lead.numel(), *features)
        out = rows.new_zeros(B, width, *features)
        out[sample, slot] = rows[order]
        return out

    def total(self, t: Tensor) -> Tensor:
        """`t` as [B, *features], the positions of each sample added up."""
        is_one_each = self.axis == 0 and self.ids.ndim == 1 and t.shape[0] == self.num_samples
        return t if is_one_each else self(t).sum(1)

    @untraced
    def _slots(self, lead: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor, int]:
        """Row `order[i]` goes to position `slot[i]` of sample `sample[i]`; rows of no sample are left out."""
        if (lead, device) not in self._known_slots:
            *places, width = self._find_slots(lead)
            order, sample, slot = (place.to(device) for place in places)
            self._known_slots[lead, device] = order, sample, slot, width
        return self._known_slots[lead, device]

    @cached_property
    def _known_slots(self) -> dict[Any, tuple[Tensor, Tensor, Tensor, int]]:
        return {}

    def _find_slots(self, lead: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, int]:
        """(order, sample, slot, the largest number of rows of a sample), on the CPU."""
        ids = self.ids.expand(lead).reshape(-1)
        order = torch.argsort(ids, stable=True)
        order = order[ids[order] != NO_SAMPLE]
        sample = ids[order]
        counts = torch.bincount(sample, minlength=self.num_samples)
        first = counts.cumsum(0) - counts
        slot = torch.arange(len(sample), device="cpu") - first[sample]
        return order, sample, slot, int(counts.max()) if len(counts) else 0
