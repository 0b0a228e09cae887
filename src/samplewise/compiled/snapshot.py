"""What Python code reads beside its arguments, and whether it is still what it was."""

import dis
import enum
import functools
import itertools
import operator
import os
import sys
import types
from collections import UserDict, UserList, UserString, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.compiled.hidden import hidden_state
from samplewise.compiled.untouched import PLAIN, Containers, Entry

MISSING = object()
OF_MODELS = frozenset({"transformers", "peft", "torchvision", "timm", "diffusers"})
OF_TOOLS = frozenset(
    "numpy scipy sympy mpmath einops einx opt_einsum triton typing_extensions jaxtyping beartype loguru tqdm".split()
)
LIBRARIES = frozenset({"torch", "samplewise", *OF_TOOLS, *OF_MODELS, *sys.stdlib_module_names} - {"__main__"})
"""Packages whose own code is taken to read nothing that changes."""
UNCALLED = {"__init__", "__new__", "__init_subclass__", "__repr__", "__module__", "__doc__", "__dict__", "__weakref__"}
"""Attributes of a class that a step does not call."""
REFLECTION = {"vars", "__dict__", "asdict", "__getattr__", "__getattribute__", "attrgetter", "methodcaller", "eval", "exec"}
"""Code with one of these names may read attributes that it does not name."""


class Facts(tuple):
    """What is compared of a value that is not followed."""


SIMPLE = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum, slice, range, Facts)


class Snapshot:
    """The attributes of a model's modules, and what its code and functions read beside their arguments, as they are now.

    Numbers and strings count by value, containers and other objects by what is in them, tensors by identity and by what
    a graph is made for. Code is followed into the functions and classes that it names, if they are not torch's, and objects
    into the attributes that code names.

    >>> scale = [2.0]
    >>> seen = Snapshot(nn.Linear(1, 1), lambda x: x * scale[0])
    >>> seen.change()
    >>> scale[0] = 3.0
    >>> seen.change()
    'scale'
    """

    def __init__(self, model: nn.Module, *functions: Callable):
        self._entries: list[Entry] = []
        self._containers = Containers()
        self._seen: dict[int, Any] = {}  # with the objects: the id of one that is gone may come again
        self._pending: list[tuple[str, Any]] = []
        self._given = functions
        self._named: set[str] = set()
        self._unnamed: dict[str, list[Callable[[], None]]] = {}
        for value in (model, *functions):
            self._later(getattr(value, "__name__", "") if value is not model else "", value)
        while self._pending:
            self._follow(*self._pending.pop())
        self._entries = [(name, now, now()) for name, now, _ in self._entries]  # all that code names is known now

    def change(self) -> str | None:
        """The name of something that is not what it was, or None."""
        for name, now, before in itertools.chain(self._containers.suspects(), self._entries):
            value = now()
            if value is not before and not (type(value) is type(before) and _is_simple(before) and _is_equal(value, before)):
                return name.removesuffix(".__dict__")
        return None

    def leaves(self) -> list[Tensor]:
        """The tensors that were met and may be given a gradient."""
        return [t for t in self.all_tensors() if t.is_leaf and t.requires_grad]

    def all_tensors(self) -> list[Tensor]:
        """The tensors that were met."""
        return [t for t in self._seen.values() if isinstance(t, Tensor)]

    def tensors(self) -> list[Tensor]:
        """The tensors that were met and are no parameters."""
        return [t for t in self.all_tensors() if not isinstance(t, nn.Parameter)]

    def _see(self, name: str, now: Callable[[], Any]) -> None:
        value = now()
        self._entries.append((name, now, value))
        self._later(name, value)

    def _later(self, name: str, value: Any) -> None:
        if isinstance(value, enum.Enum):
            self._later(type(value).__name__, type(value))
        if not _is_simple(value) and id(value) not in self._seen:
            self._seen[id(value)] = value
            self._pending.append((name, value))

    def _follow(self, name: str, value: Any) -> None:
        start = len(self._entries)
        self._see_into(name, value)
        is_module = isinstance(value, nn.Module)
        if is_module or type(value) in PLAIN:
            entries, self._entries[start:] = self._entries[start:], []
            self._containers.add(value.__dict__ if is_module else value, entries, value if is_module else None)

    def _see_into(self, name: str, value: Any) -> None:
        prefix, facts = f"{name}." if name else "", _facts(value)
        if facts is not None:
            self._entries.append((name, lambda: _facts(value), facts))
        if isinstance(value, Mapping | list | tuple | deque):
            for key in list(value) if isinstance(value, Mapping) else range(len(value)):
                self._see(name, lambda key=key: _item(value, key))
        if isinstance(value, Mapping | set | frozenset):
            for key in list(value):
                self._later(name, key)
        if isinstance(value, UserDict | UserList | UserString):
            self._see(name, lambda: value.data)
        if facts is not None:
            if not _is_of_library(type(value)) and type(value).__module__ != "builtins":
                self._later(type(value).__name__, type(value))
            more = ["grad"] if isinstance(value, Tensor) and value.is_leaf else []
            self._see_attributes_named(prefix, value, [*getattr(value, "__dict__", ()), *more])
        elif isinstance(value, types.FunctionType):
            self._follow_function(value)
        elif isinstance(value, type):
            if not _is_of_library(value):
                names = [key for key in vars(value) if key not in UNCALLED]
                called = [
                    key for key in names if key.startswith("__") or any(hasattr(base, key) for base in _library_bases(value))
                ]
                self._see(f"{value.__name__}.__dict__", lambda: Facts(vars(value)))
                self._see_attributes(f"{value.__name__}.", value, called)
                self._see_attributes_named(f"{value.__name__}.", value, set(names) - set(called))
                for base in value.__mro__:
                    self._later(base.__name__, base)
        elif isinstance(value, nn.Module):  # code of torch reads its attributes too
            self._see(f"{prefix}__class__", lambda: type(value))
            self._see(f"{prefix}__dict__", lambda: Facts(vars(value)))
            for key in list(vars(value)):
                self._see(f"{prefix}{key}", lambda key=key: vars(value).get(key, MISSING))
        elif type(value) in PARTS:
            self._see_attributes(prefix, value, PARTS[type(value)])
        elif isinstance(value, types.BuiltinMethodType | types.MethodWrapperType):
            if isinstance(value.__self__, Mapping | list | set | deque):
                self._see_attributes(prefix, value, ["__self__"])
        elif isinstance(value, operator.attrgetter):
            self._name({part for name in value.__reduce__()[1] for part in name.split(".")})
        elif isinstance(value, operator.methodcaller):
            self._see_called(name, value)
        elif isinstance(value, types.ModuleType):
            if value.__name__.partition(".")[0] not in LIBRARIES:
                self._see(f"{prefix}__dict__", lambda: Facts(k for k in vars(value) if k in self._named))
                self._see_attributes_named(prefix, value, list(vars(value)))
        elif not isinstance(value, torch.Generator):
            self._see(f"{prefix}__class__", lambda: type(value))
            self._see(f"{prefix}__dict__", lambda: Facts(k for k in getattr(value, "__dict__", ()) if k in self._named))
            if _root(type(value)) in OF_MODELS:  # a configuration, which code that is not followed reads
                self._see_attributes(prefix, value, getattr(value, "__dict__", ()))
            self._see_attributes_named(prefix, value, [*getattr(value, "__dict__", ()), *_slots(type(value))])
            for base in _library_bases(type(value)):  # what a method or property of torch reads, if code names it
                for key, method in vars(base).items():
                    method = getattr(method, "fget", getattr(method, "func", method))
                    if isinstance(method, types.FunctionType) and not key.startswith("__"):
                        self._once_named(key, lambda method=method: self._name(_names(method.__code__)))

    def _see_called(self, name: str, caller: operator.methodcaller) -> None:
        """The method's name, and what it is called with."""
        make, (method, *args) = caller.__reduce__()  # type: ignore[misc]
        method, kwargs = (make.args[0], make.keywords) if isinstance(make, functools.partial) else (method, {})
        self._name({method})
        for value in (*args, *kwargs.values()):
            self._later(name, value)

    def _see_attributes(self, prefix: str, owner: Any, names: Iterable[str]) -> None:
        for key in set(names) - {"__dict__", "__weakref__", "__doc__"}:
            self._see(f"{prefix}{key}", lambda key=key: _attribute(owner, key))

    def _see_attributes_named(self, prefix: str, owner: Any, names: Iterable[str]) -> None:
        """Those attributes that code names, also if it is met later."""
        for key in names:
            self._once_named(key, lambda key=key: self._see_attributes(prefix, owner, [key]))

    def _once_named(self, key: str, see: Callable[[], None]) -> None:
        if key in self._named or REFLECTION & self._named:
            see()
        else:
            self._unnamed.setdefault(key, []).append(see)

    def _follow_function(self, function: types.FunctionType) -> None:
        if function is os.getenv:
            self._later("os.environ", os.environ)
        if _is_of_library(function) and function not in self._given:
            return
        self._see_attributes(f"{function.__name__}.", function, ("__code__", "__defaults__", "__kwdefaults__"))
        names = _names(function.__code__)
        self._name(names)
        self._see_attributes(f"{function.__name__}.", function, vars(function))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._see_variable(name, lambda cell=cell: _contents(cell), names)
        for name in _imported(function, names):
            self._see_variable(name, lambda name=name: sys.modules.get(name, MISSING), names)
        space, of_space = function.__globals__, names if "globals" in names else _globals(function.__code__)
        self._see(f"{function.__name__}.__globals__", lambda: Facts(name for name in of_space if name in space))
        for name in of_space & space.keys():
            self._see_variable(name, lambda name=name: function.__globals__.get(name, MISSING), names)

    def _name(self, names: set[str]) -> None:
        new, self._named = names - self._named, self._named | names
        for key in list(self._unnamed) if REFLECTION & new else new & self._unnamed.keys():
            for see in self._unnamed.pop(key, ()):  # to see may name more
                see()

    def _see_variable(self, name: str, now: Callable[[], Any], names: set[str]) -> None:
        """A variable, and of a Python module what code with these names may read there."""
        self._see(name, now)
        space = now()
        if isinstance(space, types.ModuleType):
            for key in names & vars(space).keys():
                inner = lambda key=key: vars(space).get(key, MISSING)
                if isinstance(inner(), types.ModuleType) and id(inner()) not in self._seen:
                    self._see_variable(f"{name}.{key}", inner, names)
                else:
                    self._see(f"{name}.{key}", inner)


PARTS: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__self__", "__func__"),
    functools.partial: ("func", "args", "keywords"),
    property: ("fget",),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    functools.partialmethod: ("func", "args", "keywords"),
    functools.cached_property: ("func",),
    type(functools.cache(int)): ("__wrapped__",),
}
"""What there is in what wraps a function."""


def _is_simple(value: Any) -> bool:
    return isinstance(value, SIMPLE)


def _is_equal(value: Any, other: Any) -> bool:
    """Whether code finds no difference: -0.0 equals 0.0, and range(0, 3, 2) equals range(0, 4, 2)."""
    return value == other and (not isinstance(value, float | complex | range) or repr(value) == repr(other))


def _facts(value: Any) -> Facts | None:
    """What of the value can change while it stays the same object; None if that is its attributes."""
    if isinstance(value, Tensor):
        return Facts((value.requires_grad, value.dtype, value.device, value.shape, _strides(value), value.is_neg()))
    if isinstance(value, Mapping):
        return Facts(key if _is_simple(key) else id(key) for key in value)
    if isinstance(value, set | frozenset):
        return Facts([frozenset(value)])
    if isinstance(value, list | tuple | deque):
        return Facts([len(value)])
    if hasattr(type(value), "__array_interface__"):
        return Facts((value.shape, value.dtype, value.tobytes()))
    hidden = None if isinstance(value, nn.Module | type) else hidden_state(value)
    return None if hidden is None else Facts([hidden])


def _strides(t: Tensor) -> tuple[int, ...] | None:
    return t.stride() if t.layout == torch.strided else None


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return MISSING


def _item(container: Any, key: Any) -> Any:
    try:
        return container[key]
    except (KeyError, IndexError):
        return MISSING


def _attribute(owner: Any, key: str) -> Any:
    """The attribute where it is kept: a class's own descriptors as they are."""
    space = getattr(owner, "__dict__", {})
    return space[key] if key in space else MISSING if isinstance(owner, type) else getattr(owner, key, MISSING)


def _slots(cls: type) -> list[str]:
    slots = [vars(base).get("__slots__", ()) for base in cls.__mro__ if not _is_of_library(base)]
    return [name for some in slots for name in ([some] if isinstance(some, str) else some)]


def _library_bases(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if _is_of_library(base) and base is not object]


def _is_of_library(value: Any) -> bool:
    return _root(value) in LIBRARIES


def _root(value: Any) -> str:
    """The package that a function or class is of."""
    return str(getattr(value, "__module__", None) or "").partition(".")[0]


def _imported(function: types.FunctionType, names: set[str]) -> set[str]:
    """The Python modules that the function may import as it runs."""
    package = function.__globals__.get("__package__") or ""
    full = {f"{package}.{name}".rstrip(".") for name in names} | {f"{package.rpartition('.')[0]}.{name}" for name in names}
    return {name for name in names | full if name in sys.modules}


def _globals(code: types.CodeType) -> set[str]:
    """The names of global variables in the code and in functions defined in it; not of attributes, which may be called alike."""
    nested = (const for const in code.co_consts if isinstance(const, types.CodeType))
    own = {str(i.argval) for i in dis.get_instructions(code) if "GLOBAL" in i.opname or i.opname == "LOAD_NAME"}
    return own.union(*map(_globals, nested))


def _names(code: types.CodeType) -> set[str]:
    """The names, and strings that may be names, in the code and in functions defined in it."""
    nested = (const for const in code.co_consts if isinstance(const, types.CodeType))
    consts = [
        c for const in code.co_consts for c in (const if isinstance(const, tuple) else (const,))
    ]  # patterns of `match`
    strings = (const for const in consts if isinstance(const, str) and const.isidentifier())
    return set(code.co_names).union(strings, *map(_names, nested))
