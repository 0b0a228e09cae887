"""The values of constants that a step makes while it is traced, on tensors without values.

`arange(B)` is not data: what it holds follows from the call. Where such numbers tell which sample a row goes to, they are worked
out here, beside the graph and on the CPU. The graph itself makes its constants anew in every step.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
LIKE = {aten.new_zeros, aten.new_ones, aten.new_full, aten.zeros_like, aten.ones_like, aten.full_like}
"""Ops that take only the shape and the type of their tensor."""
LITERALS = {aten.lift_fresh, aten.lift_fresh_copy}
"""What `torch.tensor([1, 2])` is lifted into a trace by."""
EMPTY = {aten.empty, aten.new_empty, aten.empty_like, aten.empty_strided, aten.new_empty_strided, aten.empty_permuted}


class Constant:
    """A tensor that follows from the calls that made it; they are made when its value is asked for."""

    def __init__(self, func: Callable, args: tuple, kwargs: dict):
        self._call = func, args, kwargs

    @cached_property
    def value(self) -> Any:
        func, args, kwargs = self._call
        given: Any = tree_map(_worked_out, (args, kwargs))
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            return func(*given[0], **given[1])


class Part(Constant):
    """One of several results."""

    def __init__(self, whole: Constant, place: int):
        self._whole, self._place = whole, place

    @cached_property
    def value(self) -> Any:
        return self._whole.value[self._place]


class Constants(TorchDispatchMode):
    """Knows, while it is entered, the constants that are made; `Constants.current` is the innermost."""

    current: "Constants | None" = None

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[Tensor, int, Constant]] = {}
        """By the id of a tensor, which is held so that no other gets its id: its memory, and what it is."""
        self._written: set[int] = set()

    def __enter__(self) -> "Constants":
        self._outer, Constants.current = Constants.current, self
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        Constants.current = self._outer
        super().__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        constant = self._constant(func, args, kwargs)
        if constant is not None and func.overloadpacket in READING:
            return constant.value
        with (
            torch._C.DisableTorchFunction()
        ):  # torch may hold a lock here that a look at the graph waits for (2.11, in checkpoints)
            out = func(*args, **kwargs)
        if func._schema.is_mutable:
            written = zip(func._schema.arguments, args, strict=False)
            tensors = tree_leaves([[a for spec, a in written if spec.is_write], kwargs])
            self._written.update(_memory(t) for t in tensors if isinstance(t, Tensor))
        elif constant is not None:
            for k, t in enumerate(out if isinstance(out, list | tuple) else [out]):
                if isinstance(t, FakeTensor):
                    self._known[id(t)] = (t, _memory(t), constant if t is out else Part(constant, k))
        return out

    def of(self, t: Tensor) -> Constant | None:
        """The constant that the tensor is; None if it depends on the batch or on parameters, or was written into."""
        _, memory, constant = self._known.get(id(t), (None, None, None))
        return constant if constant and memory == _memory(t) and memory not in self._written else None

    def _constant(self, func: Any, args: tuple, kwargs: dict) -> Constant | None:
        packet = func.overloadpacket
        if packet in EMPTY or torch.Tag.nondeterministic_seeded in func.tags or func._schema.is_mutable:
            return None

        def known(value: Any) -> Any:
            if isinstance(value, torch.device):
                return torch.device("cpu")
            if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
                raise LookupError
            if not isinstance(value, Tensor):
                return value
            if packet in LITERALS and not isinstance(value, FakeTensor):
                return Constant(torch.clone, (value.detach().clone(),), {})
            if (constant := self.of(value)) is not None:
                return constant
            if packet in LIKE:
                return Constant(_stand_in, (value.shape, value.dtype), {})
            raise LookupError

        try:
            return Constant(func, *tree_map(known, (args, kwargs)))
        except LookupError:
            return None


READING = {aten._local_scalar_dense, aten.is_nonzero, aten.equal}
"""Ops that give Python a number."""


def _memory(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def _worked_out(value: Any) -> Any:
    return value.value if isinstance(value, Constant) else value


def _stand_in(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=dtype, device="cpu").expand(shape)


def on_cpu(t: Tensor) -> Tensor:
    """The tensor on the CPU, its values for this process to look at; while a step is traced, if it is a constant."""
    constants = Constants.current
    constant = constants.of(t) if constants is not None else None
    return t.cpu() if constant is None else constant.value
