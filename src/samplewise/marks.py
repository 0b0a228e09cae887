"""What is known of tensors, by their identity and by their memory, for as long as they live."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch._C import _current_graph_task_id
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.multiprocessing.reductions import StorageWeakRef

M = TypeVar("M")


class Marks(Generic[M]):
    """Marks by tensor; a mark goes when its tensor has died, at once or when there are many such.

    Marks that hold on to something (`at_once`) are dropped by a callback of the tensor, which costs more than the mark itself.
    So does noting the memory that a tensor takes up (`by_memory`), for `recalled`.
    """

    def __init__(self, *, at_once: bool = False, by_memory: bool = False) -> None:
        self.entries: dict[int, tuple[ref[Tensor], M]] = {}
        self._on_memory: dict[Any, tuple[StorageWeakRef, M]] = {}
        self._at_once, self._by_memory, self._max_entries = at_once, by_memory, 4096

    def get(self, t: Tensor) -> M | None:
        """The mark of this very tensor."""
        entry = self.entries.get(id(t))
        return entry[1] if entry is not None and entry[0]() is t else None

    def tensors(self) -> list[Tensor]:
        """The marked tensors that are alive."""
        return [t for alive, _ in list(self.entries.values()) if (t := alive()) is not None]

    def sharing(self, t: Tensor) -> list[Tensor]:
        """The other marked tensors on the memory of `t`."""
        memory = t.untyped_storage()._cdata
        others = [other for other in self.tensors() if other is not t and has_memory(other)]
        return [other for other in others if other.untyped_storage()._cdata == memory]

    def set(self, t: Tensor, mark: M) -> None:
        """Marks the tensor, and with `by_memory` the place that it takes up."""
        entries, key = self.entries, id(t)
        entries[key] = (ref(t, self._forgetting(key)) if self._at_once else ref(t), mark)
        if len(entries) > self._max_entries:
            self._sweep()
        if self._by_memory and (not t.requires_grad or _current_graph_task_id() != -1) and has_memory(t):
            self._on_memory[_memory(t)] = (StorageWeakRef(t.untyped_storage()), mark)

    def _forgetting(self, key: int) -> Callable[[ref], None]:
        """What drops the mark when its tensor dies, unless another tensor has got the same id since."""
        entries = self.entries

        def forget(dead: ref) -> None:
            entry = entries.get(key)
            if entry is not None and entry[0] is dead:
                del entries[key]

        return forget

    def _sweep(self) -> None:
        """Drops the marks of tensors that have died; not again before as many have come."""
        for key in [key for key, (alive, _) in list(self.entries.items()) if alive() is None]:
            self.entries.pop(key, None)
        self._max_entries = max(4096, 2 * len(self.entries))

    def recalled(self, t: Tensor) -> M | None:
        """The mark that another tensor on the same memory had, itself perhaps gone.

        So with what a checkpoint inside a checkpoint gives back, DLPack, `nn.Parameter(t)`. A tensor that needs a gradient
        tells by its graph that it is data; it is remembered in backward alone.
        """
        entry = self._on_memory.get(_memory(t)) if has_memory(t) else None
        return entry[1] if entry is not None and not entry[0].expired() else None


def has_memory(t: Tensor) -> bool:
    """Whether the tensor lies in memory that another could share."""
    is_wrapper = is_functorch_wrapped_tensor(t) or is_legacy_batchedtensor(t) or isinstance(t, FunctionalTensor)
    return t.layout is torch.strided and not t.is_meta and not is_wrapper and not t._is_zerotensor()


def _memory(t: Tensor) -> Any:
    """The place that the tensor takes up; one without values has a storage for an address."""
    if isinstance(t, FakeTensor):
        return t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype
    return t.data_ptr(), t.shape, t.stride(), t.dtype
