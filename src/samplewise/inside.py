"""Functions of torch that are written in Python, looked into."""

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

ENGINE = {torch.autograd.backward, torch.autograd.grad}
"""Entered again inside themselves, by reentrant checkpoints."""


ONE_OP = {F.dropout, F.relu, F.silu, torch.Tensor.split, torch.functional.split}
"""Functions that are one op of their own name, or the same op in place, which leaves the samples where they are."""


class Insides:
    """Runs such functions with the mode on, so that it sees the ops inside and only the innermost need to be known."""

    def __init__(self) -> None:
        self._open: list[Callable] = []
        """One that calls itself by its own name (Tensor.unflatten) is then an op."""

    def run(self, mode: TorchFunctionMode, func: Callable, args: tuple, kwargs: dict) -> Any:
        """The function's result; NotImplemented if it is an op."""
        inside = without_override(func)
        if inside is None or func in self._open or func in ONE_OP:
            return NotImplemented
        if func not in ENGINE:
            self._open.append(func)
        try:
            with mode:
                return inside(*args, **kwargs)
        finally:
            if func not in ENGINE:
                self._open.pop()


INSIDE: dict[Callable, Callable | None] = {}


def without_override(func: Callable) -> Callable | None:
    """A Python function of torch that asks for overrides first, without that question; None for any other function."""
    if func not in INSIDE:
        INSIDE[func] = _without_override(func) if isinstance(func, types.FunctionType) else None
    return INSIDE[func]


def _without_override(func: types.FunctionType) -> Callable | None:
    questions = [n for n in func.__code__.co_names if n.startswith("has_torch_function")]
    if not questions:
        return None
    answered = {**func.__globals__, **dict.fromkeys(questions, lambda *_: False)}
    inside = types.FunctionType(func.__code__, answered, func.__name__, func.__defaults__, func.__closure__)
    inside.__kwdefaults__ = func.__kwdefaults__
    return inside
