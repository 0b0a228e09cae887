"""Which sample each element of a tensor belongs to."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from samplewise.tracing import untraced

NO_SAMPLE = -1
"""The id of elements that belong to no sample (rows of a constant in a `torch.cat` with data)."""


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
    @lru_cache(maxsize=64)  # one object for all steps, with what it knows about itself
    @untraced
    def along(cls, dim: int, *, ndim: int, num_samples: int) -> "Layout":
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

    @cached_property
    def _derived(self) -> dict[Any, "Layout"]:
        return {}

    @cached_property
    def _folds(self) -> dict[int, "Fold"]:
        return {}

    @untraced
    def fold(self, features: int) -> "Fold":
        """How a tensor with this layout is brought into the form [B, T, *features], `features` counting its last dims."""
        if features not in self._folds:
            lead = self.ids.ndim - features
            if any(d >= lead for d in self.dims):
                raise ValueError(f"samples change along feature dimension {self.dims[-1]}")
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
        B, lead, features = self.num_samples, t.shape[: self.ids.ndim], t.shape[self.ids.ndim :]
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
        ids = self.ids.expand(lead).reshape(-1)
        order = torch.argsort(ids, stable=True)
        order = order[ids[order] != NO_SAMPLE]
        sample = ids[order]
        counts = torch.bincount(sample, minlength=self.num_samples)
        first = counts.cumsum(0) - counts
        slot = torch.arange(len(sample), device="cpu") - first[sample]
        return order, sample, slot, int(counts.max()) if len(counts) else 0


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


M = TypeVar("M")


class Marks(Generic[M]):
    """Marks by tensor identity; a mark goes when its tensor has died, at once or when there are many such.

    Marks that hold on to something (`at_once`) are dropped by a callback of the tensor, which costs more than the mark itself.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self._entries: dict[int, tuple[weakref.ref[Tensor], M]] = {}
        self._on_memory: dict[Any, tuple[StorageWeakRef, M]] = {}
        self._at_once, self._max_entries = at_once, 4096

    def get(self, t: Tensor) -> M | None:
        entry = self._entries.get(id(t))
        return entry[1] if entry is not None and entry[0]() is t else None

    def tensors(self) -> list[Tensor]:
        """The marked tensors that are alive."""
        return [t for ref, _ in list(self._entries.values()) if (t := ref()) is not None]

    def sharing(self, t: Tensor) -> list[Tensor]:
        """The other marked tensors on the memory of `t`."""
        memory = t.untyped_storage()._cdata
        others = [other for other in self.tensors() if other is not t and has_memory(other)]
        return [other for other in others if other.untyped_storage()._cdata == memory]

    def set(self, t: Tensor, mark: M) -> None:
        self._entries[id(t)] = (weakref.ref(t, self._forgetting(id(t))) if self._at_once else weakref.ref(t), mark)
        if len(self._entries) > self._max_entries:
            self._sweep()
        if (not t.requires_grad or torch._C._current_graph_task_id() != -1) and has_memory(t):
            self._on_memory[_memory(t)] = (StorageWeakRef(t.untyped_storage()), mark)

    def _forgetting(self, key: int) -> Callable[[weakref.ref], None]:
        entries = self._entries

        def forget(ref: weakref.ref) -> None:
            entry = entries.get(key)
            if entry is not None and entry[0] is ref:
                del entries[key]

        return forget

    def _sweep(self) -> None:
        for key in [key for key, (ref, _) in list(self._entries.items()) if ref() is None]:
            self._entries.pop(key, None)
        self._max_entries = max(4096, 2 * len(self._entries))

    def recalled(self, t: Tensor) -> M | None:
        """The mark that another tensor on the same memory had, itself perhaps gone.

        So with what a checkpoint inside a checkpoint gives back, DLPack, `nn.Parameter(t)`. A tensor that needs a gradient
        tells by its graph that it is data; it is remembered in backward alone.
        """
        entry = self._on_memory.get(_memory(t)) if has_memory(t) else None
        return entry[1] if entry is not None and not entry[0].expired() else None


def has_memory(t: Tensor) -> bool:
    return t.layout is torch.strided and not t.is_meta and not is_functorch_wrapped_tensor(t)


def _memory(t: Tensor) -> Any:
    if isinstance(t, FakeTensor):
        return t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype
    return t.data_ptr(), t.shape, t.stride(), t.dtype
