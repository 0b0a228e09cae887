"""Flows that were found, by all that they depend on: layers and steps repeat."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

REMEMBERED: "dict[Any, Known]" = {}
MAX_REMEMBERED = 1024


@dataclass(slots=True)
class Known:
    """What is known of calls alike."""

    shapes: Any
    """Of their results."""
    mark: Any
    """Of their results: one for all, or Several."""
    recipe: Any = None
    """Where weights meet data in them: the rule's `ops.recipe.Recipe`, or False if the rule must be asked."""


def key_of(func: Callable, args: tuple, kwargs: dict, mark_of: Callable[[Tensor], Any]) -> Any:
    """The function, the mark, shape and dtype of each tensor among its arguments, and all other arguments with their types.

    `mark_of` gives NotImplemented for a tensor that there can be no key with; then, and with an argument that cannot be
    compared (an array), the key is None.
    """
    key: list[Any] = [func]
    for a in args:
        kind = type(a)
        if kind is int:
            key.append(a)
        elif isinstance(a, Tensor):
            mark = mark_of(a)
            if mark is NotImplemented:
                return None
            key += mark, a.shape, a.dtype
        elif isinstance(a, NESTED):
            inner = key_of(kind, (a.start, a.stop, a.step) if kind is slice else a, {}, mark_of)  # type: ignore[arg-type]
            if inner is None:
                return None
            key.append(inner)
        else:
            key += kind, a  # True and 1.0 are equal to 1, but not here
    if kwargs:
        named = key_of(dict, tuple(kwargs.values()), {}, mark_of)
        if named is None:
            return None
        key += tuple(kwargs), named
    return tuple(key)


NESTED = (list, tuple, slice)


def recalled(key: Any) -> Known | None:
    """What is known of calls with this key; None if there was none."""
    try:
        return REMEMBERED.get(key)
    except TypeError:  # an array among the arguments
        return None


def remember(key: Any, shapes: Any, mark: Any, *, meets: bool) -> None:
    """Remembers the marks of the results of such calls, and whether weights meet data in them."""
    if len(REMEMBERED) >= MAX_REMEMBERED:
        REMEMBERED.clear()
    try:
        REMEMBERED[key] = Known(shapes, mark, False if meets else None)
    except TypeError:
        return


def shapes_of(results: Sequence[Tensor]) -> Any:
    """The shape of the only result, or of each of several."""
    return results[0].shape if len(results) == 1 else tuple(t.shape for t in results)
