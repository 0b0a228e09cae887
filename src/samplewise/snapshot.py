"""What Python code reads beside its arguments, and whether it is still what it was."""

import enum
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

SIMPLE = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum, slice, range)
DEPTH = 4
"""How far objects in attributes of objects are followed."""
MISSING = object()


class Snapshot:
    """The attributes of a model's modules, and the variables that functions close over, as they are now.

    Tensors, modules and functions count by identity, numbers and strings by value, containers and other objects by what
    is in them.

    >>> scale = [2.0]
    >>> seen = Snapshot(nn.Linear(1, 1), lambda x: x * scale[0])
    >>> seen.change()
    >>> scale[0] = 3.0
    >>> seen.change()
    'scale'
    """

    def __init__(self, model: nn.Module, *functions: Callable):
        self._entries: list[tuple[str, Callable[[], Any], Any]] = []
        self._seen: set[int] = set()
        for name, module in model.named_modules():
            self._see_namespace(f"{name}." if name else "", vars(module), 0)
        for function in functions:
            self._see_function(function, 0)

    def change(self) -> str | None:
        """The name of something that is not what it was, or None."""
        for name, now, before in self._entries:
            value = now()
            if value is not before and not (type(value) is type(before) and _is_simple(before) and value == before):
                return name
        return None

    def _see(self, name: str, now: Callable[[], Any], depth: int) -> None:
        value = now()
        self._entries.append((name, now, value))
        if _is_simple(value) or isinstance(value, torch.Tensor | type | types.ModuleType | torch.Generator):
            return
        if id(value) in self._seen or depth > DEPTH:
            return
        self._seen.add(id(value))
        if isinstance(value, dict | list | set | frozenset | tuple):
            if not isinstance(value, tuple | frozenset):
                self._entries.append((f"the size of {name}", lambda: len(value), len(value)))
            for key, _ in _items(value):
                self._see(name, lambda key=key: _item(value, key), depth + 1)
        elif isinstance(value, types.FunctionType | types.MethodType):
            self._see_function(value, depth + 1)
        elif isinstance(value, nn.Module):
            for part, module in value.named_modules():
                if id(module) not in self._seen or module is value:
                    self._seen.add(id(module))
                    self._see_namespace(f"{name}.{part}.", vars(module), depth + 1)
        elif hasattr(value, "__dict__"):
            self._see_namespace(f"{name}.", vars(value), depth + 1)

    def _see_namespace(self, prefix: str, space: dict[str, Any], depth: int) -> None:
        self._entries.append((f"{prefix}__dict__", lambda: len(space), len(space)))
        for key in space:
            self._see(f"{prefix}{key}", lambda key=key: space.get(key, MISSING), depth)

    def _see_function(self, function: Callable, depth: int) -> None:
        if isinstance(function, types.MethodType):
            method: types.MethodType = function
            self._see(f"{method.__name__}.__self__", lambda: method.__self__, depth)
            function = method.__func__
        if not isinstance(function, types.FunctionType):
            self._see_namespace(f"{type(function).__name__}.", getattr(function, "__dict__", {}), depth)
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._see(name, lambda cell=cell: _contents(cell), depth)
        for name in _global_names(function.__code__):
            if name in function.__globals__:
                self._see(name, lambda name=name: function.__globals__.get(name, MISSING), depth)
        self._see(f"{function.__name__}.__defaults__", lambda: function.__defaults__, depth)


def _is_simple(value: Any) -> bool:
    return isinstance(value, SIMPLE)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return MISSING


def _items(container: Any) -> Iterator[tuple[Any, Any]]:
    return iter(container.items()) if isinstance(container, dict) else enumerate(container)


def _item(container: Any, key: Any) -> Any:
    if isinstance(container, set | frozenset):
        return len(container)
    try:
        return container[key]
    except (KeyError, IndexError):
        return MISSING


def _global_names(code: types.CodeType) -> set[str]:
    """The names that the code, and functions defined in it, may look up among the globals."""
    nested = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*map(_global_names, nested))
