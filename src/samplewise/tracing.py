"""What holds while a step is traced: where samples lie is worked out in numbers, what depends on values is put off."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

P = ParamSpec("P")
R = TypeVar("R")

PROXY = torch._C._TorchDispatchModeKey.PROXY


def is_tracing() -> bool:
    """Whether ops are being written down, on tensors without values."""
    return torch._C._get_dispatch_mode(PROXY) is not None


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """The function, its own tensors real ones also while a step is traced: for sample ids, which are known then."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not is_tracing():
            return function(*args, **kwargs)
        with _disable_current_modes():
            result = function(*args, **kwargs)
        if Doubts.current is not None:
            pending, Doubts.current.pending = Doubts.current.pending, []
            for flag in pending:
                doubt(flag())
        return result

    return run


class Doubts:
    """Flags of a traced step, each a tensor with one bool: if one is set, the step must be taken op by op instead."""

    current: "Doubts | None" = None

    def __init__(self) -> None:
        self.flags: list[Tensor] = []
        self.pending: list[Callable[[], Tensor]] = []
        """Flags that are to be computed once ops are written down again."""
        self.others: list[Any] = []
        """The captures besides the step's own that are asked."""

    def any(self) -> Tensor | None:
        return torch.stack(self.flags).any() if self.flags else None


@contextmanager
def collecting() -> Iterator[Doubts]:
    """Inside, doubts about values that are not there yet are collected."""
    outer, Doubts.current = Doubts.current, Doubts()
    try:
        yield Doubts.current
    finally:
        Doubts.current = outer


def occurs(flag: Callable[[], Tensor]) -> bool:
    """Whether the flag is set; while a step is traced it is taken not to be, and a doubt if it is."""
    if Doubts.current is None:
        return bool(flag())
    Doubts.current.pending.append(flag)
    return False


def asks(other: Any) -> None:
    """Says that the answer is made of what another capture holds now."""
    assert Doubts.current is not None
    if not any(other is known for known in Doubts.current.others):
        Doubts.current.others.append(other)


def doubt(flag: Tensor) -> None:
    """Says that the answer holds only if this turns out False, once there are values."""
    assert Doubts.current is not None
    Doubts.current.flags.append(flag)
