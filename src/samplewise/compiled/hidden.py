"""State that objects keep elsewhere than in attributes, items or code: of generators, iterators and buffers."""

import array
import contextvars
import ctypes
import itertools
import random
import sys
import types
import warnings
from collections.abc import Iterator, Sized
from typing import Any

BUFFERS = (array.array, bytearray, memoryview, ctypes._SimpleCData, ctypes.Array, ctypes.Structure)


def hidden_state(value: Any) -> Any:
    """Something that is equal as long as the object is as it was; None if it hides nothing that is known of.

    >>> count = itertools.count()
    >>> hidden_state(count), next(count), hidden_state(count)
    ('count(0)', 0, 'count(1)')
    """
    if isinstance(value, BUFFERS):
        return bytes(memoryview(value))
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else value.getstate()  # the system has none that can be seen
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return frame and (frame.f_lasti, repr(frame.f_locals))
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools", "_collections"):
        return _position(value)
    if isinstance(value, contextvars.ContextVar):
        return repr(value.get(None))
    shared = getattr(sys.modules.get("numpy.random.mtrand"), "_rand", None)  # NumPy's own, which traces look after
    if type(value).__module__.startswith("numpy.random") and value is not shared:
        generator: Any = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", value)
        return repr(generator.state)
    return None


def _position(value: Any) -> Any:
    """How far an iterator is, by what it would be copied from: lists and dicts by their length; new each time where that is not told.

    >>> numbers = itertools.cycle([1, 2])
    >>> before, _, after = _position(numbers), next(numbers), _position(numbers)
    >>> before == after
    False
    """
    if isinstance(value, tuple):
        return tuple(map(_position, value))
    if not isinstance(value, Iterator):
        return (
            value
            if isinstance(value, int | float | str | None)
            else (type(value), len(value) if isinstance(value, Sized) else None)
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.14 on those of itertools do not tell
            return _position(value.__reduce__())  # type: ignore[arg-type]
    except TypeError:
        return object()
