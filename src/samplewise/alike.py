"""Calls like one that was understood before, run as it was: layers and steps repeat."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from samplewise.flow.call import Several, tensors_in
from samplewise.flow.memory import REMEMBERED, Known, key_of, shapes_of
from samplewise.marking import WEIGHT, Look, Marking
from samplewise.ops.foreign import FOREIGN
from samplewise.ops.pointwise import pointwise
from samplewise.ops.recipe import Recipe
from samplewise.ops.registry import EXPANSIONS, RULES, note_of
from samplewise.samples import Layout
from samplewise.tap import Recorder, apply_gate, apply_tap

PLAIN = frozenset([float, bool, str, type(None), torch.dtype])
INTEGERS = frozenset([int])


class Alike:
    """Runs calls of one capture by what is remembered of all.

    This is the way that nearly every call of a step goes, so it is written out: x.view takes 3.1 µs more than plain, 1.2 of them
    the mode; with a look, a key and a mark in functions of their own it took 3.9 (Xeon, in a loop).
    """

    def __init__(self, recorder: Recorder, marking: Marking):
        self._recorder, self._marking, self._weights = recorder, marking, recorder.weights
        self._marks, self._marked = recorder.marks, recorder.marks.entries

    def run(self, func: Callable, args: tuple, kwargs: dict | None) -> Any:
        """The result of a call on data, captured parameters and known constants; NotImplemented if none like it is known."""
        try:
            known = REMEMBERED.get(self._key(func, args, kwargs))
        except TypeError:  # an array among the arguments
            return NotImplemented
        if known is None:
            return NotImplemented
        if known.recipe is not None:
            return self._meet(func, args, kwargs or {}, known, known.recipe) if known.recipe else NotImplemented
        out = func(*args, **kwargs) if kwargs else func(*args)
        mark = known.mark
        if type(out) is Tensor and type(mark) is Layout:
            if out.shape == known.shapes:
                self._marks.set(out, mark)
                return out
        elif self._mark(out, known):
            return out
        self._marking.mark_anew(func, args, kwargs or {}, out)
        return out

    def _key(self, func: Callable, args: tuple, kwargs: dict | None) -> Any:
        """`key_of` the call, with marked tensors looked up here."""
        marked = self._marked
        key: list[Any] = [func]
        for a in args:
            kind = type(a)
            if kind is int:
                key.append(a)
            elif kind is Tensor or kind is Parameter:
                entry = marked.get(id(a))
                mark = entry[1] if entry is not None and entry[0]() is a else self._marking.unmarked(a)
                if type(mark) is not Layout and mark is not WEIGHT and mark is not None:
                    return None
                key += (mark, a.shape, a.dtype)
            elif kind in PLAIN:
                key += (kind, a)
            elif (kind is tuple or kind is torch.Size) and INTEGERS.issuperset(map(type, a)):
                key.append((kind, *a))
            else:
                rest = key_of(func, (a,), {}, self._mark_of)
                if rest is None:
                    return None
                key += rest[1:]
        if kwargs:
            named = key_of(func, (), kwargs, self._mark_of)
            if named is None:
                return None
            key += named[1:]
        return tuple(key)

    def _mark_of(self, t: Tensor) -> Any:
        return Look(self._marking)(t)

    def _mark(self, out: Any, known: Known) -> bool:
        """Marks several results, or one that is no layout; False if their shapes are others."""
        results, mark = tensors_in((out,)), known.mark
        if mark is None or shapes_of(results) != known.shapes:
            return False
        for i, t in enumerate(results):
            each = mark[i] if isinstance(mark, Several) else mark
            if each is not None:
                self._marks.set(t, each)
        return True

    def _meet(self, func: Callable, args: tuple, kwargs: dict, known: Known, recipe: Recipe) -> Any:
        """Runs an op as its rule did, and taps its result; NotImplemented if the rule must be asked."""
        if RULES.get(func, pointwise) is not recipe.rule or func in EXPANSIONS or func in FOREIGN:
            return NotImplemented
        if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return NotImplemented
        tensors = [*args, *kwargs.values()] if kwargs else list(args)
        plain = tensors.copy()
        recorder, targets_of = self._recorder, self._weights.targets_of_parameter
        for place in recipe.weights:
            plain[place] = tensors[place].detach()
        for place, spread, factor_of, note in recipe.gates:
            targets = targets_of(tensors[place])
            recorder.note(targets, note)
            plain[place] = apply_gate(spread(tensors[place].detach()), recorder.anchor, recorder, targets, factor_of)
        if kwargs:
            num = len(args)
            out = recipe.run(*plain[:num], **dict(zip(kwargs, plain[num:], strict=True)))
        else:
            out = recipe.run(*plain)
        results = out if isinstance(out, tuple) else (out,)
        y = results[0]
        if y.shape != known.shapes:
            return NotImplemented
        tensors += results
        note = recipe.note
        if y.dtype is not note.dtype:  # autocast is not in the key
            note = note_of(note.op, note.how, note.layout, y.dtype)
        handed = []
        for place, factor_of, kept in recipe.uses:
            targets = targets_of(tensors[place])
            recorder.note(targets, note)
            handed.append((targets, factor_of, kept))
        if handed:
            y = apply_tap(y, recorder.anchor, recorder, handed, [tensors[place] for place in recipe.kept])
        self._marks.set(y, known.mark)
        return y
