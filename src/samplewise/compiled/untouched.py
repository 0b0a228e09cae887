"""What containers hold, compared at once by identity: modules have dozens of attributes, and steps are short."""

from collections import OrderedDict, deque
from collections.abc import Callable
from operator import is_
from typing import Any

Entry = tuple[str, Callable[[], Any], Any]
"""A name, what gives the value of now, and the value as it was."""

PLAIN = (dict, OrderedDict, list, tuple, deque, set, frozenset)
"""Containers that tell by their items alone whether they are as they were, if they are of just these types."""


class Container:
    """The items of one plain container, or the attributes of an object that keeps them in its `__dict__`, as they are now."""

    __slots__ = ("_container", "_keys", "_kind", "_owner", "_values", "entries")

    def __init__(self, container: Any, entries: list[Entry], owner: Any = None):
        self._container, self._owner, self._kind, self.entries = container, owner, type(owner), entries
        self._keys = tuple(container) if isinstance(container, dict) else None
        self._values = tuple(container.values() if isinstance(container, dict) else container)

    def is_untouched(self) -> bool:
        """Whether all is the very same; if not, it may still be equal, and the entries tell."""
        container, keys = self._container, self._keys
        if self._owner is not None and (type(self._owner) is not self._kind or self._owner.__dict__ is not container):
            return False
        if len(container) != len(self._values):
            return False
        if keys is None:
            return all(map(is_, container, self._values))
        return all(map(is_, container.values(), self._values)) and all(map(is_, container, keys))


class Containers:
    """Many of them: those that were empty need but one look together.

    >>> settings, hooks = {"scale": 2.0}, []
    >>> containers = Containers()
    >>> containers.add(settings, [("scale", lambda: settings["scale"], 2.0)])
    >>> containers.add(hooks, [("hooks", lambda: len(hooks), 0)])
    >>> containers.suspects()
    []
    >>> settings["scale"] = 3.0
    >>> [name for name, now, before in containers.suspects() if now() != before]
    ['scale']
    """

    def __init__(self) -> None:
        self._filled: list[Container] = []
        self._empty: list[Any] = []
        self._of_empty: list[Entry] = []

    def add(self, container: Any, entries: list[Entry], owner: Any = None) -> None:
        if container or owner is not None:
            self._filled.append(Container(container, entries, owner))
        else:
            self._empty.append(container)
            self._of_empty += entries

    def suspects(self) -> list[Entry]:
        """The entries of containers that are not untouched."""
        found = list(self._of_empty) if any(self._empty) else []
        for each in self._filled:
            if not each.is_untouched():
                found += each.entries
        return found
