"""Which sample each element of a tensor belongs to, or why that cannot be said."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samplewise.fold import NO_SAMPLE, Fold
from samplewise.tracing import untraced
from samplewise.unwatched import unwatched


class Layout:
    """The sample of every element: `ids` broadcasts against the tensor that it describes.

    `ids` is a small int64 tensor on the CPU with as many dimensions as the tensor; a dimension is either as long as the
    tensor's or 1. Leading batch: `[B, 1, 1]`. Batch second: `[1, B, 1]`. Folded (B·T) rows: `[B·T, 1]`.

    >>> Layout.along(0, ndim=2, num_samples=3).ids.tolist()
    [[0], [1], [2]]
    """

    __slots__ = ("__dict__", "__weakref__", "discrete", "ids", "num_samples")

    def __init__(self, ids: Tensor, num_samples: int, *, discrete: bool = False):
        self.ids = ids
        self.num_samples = num_samples
        self.discrete = discrete
        """Whether the values were made of integers alone."""

    @classmethod
    @lru_cache(maxsize=1024)  # one object for all steps, with what it knows about itself; sizes of the batch come in dozens
    @untraced
    def along(cls, dim: int, *, ndim: int, num_samples: int) -> "Layout":
        """Sample b at place b of dimension `dim`."""
        shape = [1] * ndim
        shape[dim] = num_samples
        return cls(torch.arange(num_samples, device="cpu").reshape(shape), num_samples)

    def __repr__(self) -> str:
        return f"Layout({self})"

    @cached_property
    def dims(self) -> tuple[int, ...]:
        """The dimensions along which the sample changes."""
        return tuple(d for d, size in enumerate(self.ids.shape) if size != 1)

    def __str__(self) -> str:
        sizes = [str(size) if size != 1 else "·" for size in self.ids.shape]
        return f"{self.num_samples} samples along [{', '.join(sizes)}]" if self.dims else "one sample"

    @cached_property
    @untraced
    def has_strays(self) -> bool:
        """Whether some elements belong to no sample."""
        return bool((self.ids == NO_SAMPLE).any())

    @cached_property
    @untraced
    def is_even(self) -> bool:
        """Whether every sample has as many elements as any other."""
        counts = torch.bincount(self.ids.flatten() + 1, minlength=self.num_samples + 1)
        return int(counts[0]) == 0 and bool((counts[1:] == counts[-1]).all())

    @untraced
    def derived(self, key: Any, ids: Callable[[], Tensor]) -> "Layout":
        """The layout with these other ids, made once for the key, which tells how they come from the ids of this one."""
        if key not in self._derived:
            self._derived[key] = Layout(ids(), self.num_samples)
        return self._derived[key]

    def ids_on(self, device: torch.device) -> Tensor:
        """The ids for an op on data there; a graph makes them anew where they only count, so that it serves other sizes too."""
        in_order = self.fold(0).axis is not None
        return torch.arange(self.num_samples, device=device).reshape(self.ids.shape) if in_order else self.ids.to(device)

    @cached_property
    def _derived(self) -> dict[Any, "Layout"]:
        return {}

    @cached_property
    def _folds(self) -> dict[int, "Fold"]:
        return {}

    @untraced
    @unwatched
    def fold(self, features: int) -> "Fold":
        """How a tensor with this layout is brought into the form [B, T, *features], `features` counting its last dims."""
        if features not in self._folds:
            lead = self.ids.ndim - features
            if any(d >= lead for d in self.dims):
                raise ValueError(
                    f"samples lie along dimension {self.dims[-1]} of {self.ids.ndim}, but the last {features} are taken for "
                    "features of one sample. Fold with fewer features, or refuse the op."
                )
            self._folds[features] = Fold(self.ids.reshape(self.ids.shape[:lead]), self.num_samples)
        return self._folds[features]


_ONE_EACH: weakref.WeakValueDictionary[Any, Layout] = weakref.WeakValueDictionary()


def one_each(layout: Layout) -> Layout:
    """The layout, as one object for all that are equal, so that what is known of one is known of all."""
    if layout.ids.numel() > 1 << 16:
        return layout
    key = (layout.num_samples, layout.discrete, layout.ids.shape, layout.ids.numpy().tobytes())
    return _ONE_EACH.setdefault(key, layout)


@untraced
def same_ids(layout: Layout, other: Layout) -> bool:
    """Whether the two put the same samples in the same places."""
    return torch.equal(layout.ids, other.ids)


@dataclass(frozen=True)
class Mixed:
    """A value in which samples met each other.

    `linear`: a weighted sum of per-sample values, as a loss over the batch is; `even`: each sample has the same weight.
    `discrete`: made of integers alone, so that it can tell where rows go but not what they hold.
    """

    op: str
    linear: bool = False
    even: bool = False
    discrete: bool = False
    reduction: str | None = None
    """"sum" or "mean" where it is certain that it is just that over the samples."""
    num_samples: int | None = None
    terms: "frozenset[Term] | None" = None
    """What it is a sum of; None where that is not known."""


class Term(NamedTuple):
    """A number times the sum, or the mean, of the samples' values."""

    reduction: str
    factor: float = 1.0
    num_elements: int = 1
    """How many elements were summed."""


@dataclass(frozen=True)
class Lost:
    """A value that depends on the batch, made by an op of which it is not known where it puts the samples."""

    op: str
    discrete: bool = False


Mark = Layout | Mixed | Lost


def picked(t: Tensor, dim: int, index: Tensor) -> Tensor:
    """t.index_select, for compressed layouts too, of which torch has none."""
    if t.layout in (torch.sparse_csr, torch.sparse_csc):
        return t.to_sparse().index_select(dim, index).to_sparse(layout=t.layout)
    return t.index_select(dim, index)
