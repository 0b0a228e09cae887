"""Flows that were found, by all that they depend on: layers and steps repeat."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from samplewise.samples import Layout

MAX_REMEMBERED = 1 << 13
"""Calls: 40 to 80 are made for each size of the batch or the sequence, and private training draws dozens of sizes."""
MAX_BYTES = 1 << 26
"""Of ids: those of (B·T) folded rows are as long as the rows."""


@dataclass(slots=True)
class Known:
    """What is known of calls alike."""

    shapes: Any
    """Of their results."""
    mark: Any
    """Of their results: one for all, or Several."""
    recipe: Any = None
    """Where weights meet data in them: the rule's `ops.recipe.Recipe`, or False if the rule must be asked."""


class Remembered(dict[Any, Known]):
    """What is known of calls, by their keys; all of it is forgotten when it has become too much."""

    num_bytes = 0
    """Of the ids that it holds, counted for each call that gives them."""

    def keep(self, key: Any, known: Known) -> None:
        if len(self) >= MAX_REMEMBERED or self.num_bytes > MAX_BYTES:
            self.clear()
            self.num_bytes = 0
        self[key] = known
        marks = known.mark if isinstance(known.mark, list) else [known.mark]
        self.num_bytes += sum(mark.ids.untyped_storage().nbytes() for mark in marks if isinstance(mark, Layout))


REMEMBERED = Remembered()


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
    try:
        REMEMBERED.keep(key, Known(shapes, mark, False if meets else None))
    except TypeError:
        return


def shapes_of(results: Sequence[Tensor]) -> Any:
    """The shape of the only result, or of each of several."""
    return results[0].shape if len(results) == 1 else tuple(t.shape for t in results)
