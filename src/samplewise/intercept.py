"""Sees each op, and tells what it is: of data, of weights, of constants, or where weights meet data."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

import samplewise.ops  # noqa: F401  (registers the rules)
from samplewise.alike import Alike
from samplewise.backwards import follow, followed_hook
from samplewise.flow.call import Call, is_in_place, tensors_in
from samplewise.flow.handlers import moves
from samplewise.flow.memory import key_of
from samplewise.flow.names import CLASS_LOSSES, ELEMENTWISE, LOSSES, SCALING
from samplewise.flow.routing import PATTERNS, ROUTING, routes
from samplewise.higher import refuse_hidden, run_branch
from samplewise.inside import Insides
from samplewise.kinds import SIZED_BY_VALUES, Kind, kind_of, read_by_torch
from samplewise.marking import Look, Marking
from samplewise.marks import Marks
from samplewise.meetings import Meetings
from samplewise.ops.foreign import FOREIGN
from samplewise.ops.registry import EXPANSIONS, RULES
from samplewise.refusals import (
    are_given,
    refuse_crossing,
    refuse_given_gradients,
    refuse_grad,
    refuse_hook,
    refuse_picked,
    refuse_strangers,
    refuse_transform,
)
from samplewise.samples import Lost, Mark, Mixed
from samplewise.saving import kept_as_is
from samplewise.sight import CustomFunction
from samplewise.tap import Guard, Recorder
from samplewise.weights import Weight, looked_up, needs_gradient

FRESH = set("new_zeros new_ones new_full new_empty".split())
"""Ops on data that take only its shape and type."""

SPREADING = frozenset(ELEMENTWISE - PATTERNS)
"""Ops that take a weight element by element with data; `w.to(x)` takes x for a pattern alone."""

SYNONYMS = {"axis": "dim", "keepdims": "keepdim"}
"""NumPy's keywords, which torch takes for its own."""


class Intercept(TorchFunctionMode):
    """Watches the ops of this thread while it is entered.

    Parameters stay what they are and are known by identity, so nothing is replaced in the model and nothing needs to be
    put back.
    """

    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder = recorder
        self.marks, self.weights = recorder.marks, recorder.weights
        self.is_paused = False
        self.marking, self.insides = Marking(recorder), Insides()
        self.sized: Marks[Mark] = Marks()
        """Tensors cut to size by values of samples, outside of a model that is guarded, and the marks of those values."""
        self.alike = Alike(recorder, self.marking)
        self._run_alike = self.alike.run
        self.meetings = Meetings(recorder, self.marking, self)

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kind = kind_of(func)
        if kind.is_question or self.is_paused:
            if kind.asks_size and self.sized.entries and not self.is_paused:
                self._asked(kind.name, args[0])
            if kind.is_higher and kind.name == "cond":  # of itself it would lose gradients
                return run_branch(*args, **(kwargs or {}))
            return func(*args, **kwargs) if kwargs else func(*args)
        if self.recorder.guard is not None:
            return self._guarded(self.recorder.guard, kind, func, args, kwargs or {})
        return self._taken(kind, func, args, kwargs)

    def _taken(self, kind: Kind, func: Callable, args: tuple, kwargs: dict | None) -> Any:
        """Runs a call as one like it was run before, or by understanding it."""
        if kind.is_alike and not (kwargs and "out" in kwargs):
            out = self._run_alike(func, args, kwargs)
            if out is not NotImplemented:
                return out
        return self._understood(kind, func, args, {SYNONYMS.get(k, k): v for k, v in kwargs.items()} if kwargs else {})

    def _understood(self, kind: Kind, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs a call that is like none before, or of a kind that nothing is remembered of."""
        if kind.is_opaque:
            return self._opaque(func, kind.name, args, kwargs)
        if kind.is_higher:
            if kind.name == "cond":
                with self:
                    return run_branch(*args, **kwargs)
            refuse_hidden(kind.name, args, kwargs)
        if kind.is_alike and "out" not in kwargs:
            look = Look(self.marking)
            key = key_of(func, args, kwargs, look)
            if key is not None and look.data:
                out = self._simple(kind, func, args, kwargs, look, key)
                if out is not NotImplemented:
                    return out
        name = kind.name
        tensors, data, weights, routed = self._sorted(name, args, kwargs)
        if func is torch.autograd.grad:
            return self._gradients(func, args, kwargs, weights)
        if func is torch.autograd.backward:
            began = tensors_in(args[:1] or (kwargs["tensors"],))
            losses = [(t, self.marks.get(t)) for t in began if t.requires_grad]
            self.recorder.check_losses(losses, is_weighted=are_given(*args[1:2], **kwargs))
            refuse_given_gradients(self.marks, *args[1:2], **kwargs)
        if not data and not weights:
            return self._constant(func, args, kwargs, tensors)
        if weights and torch.is_grad_enabled() and torch._C._are_functorch_transforms_active():
            refuse_transform(name, weights)
        if weights and not data:
            refuse_strangers(self.recorder, name, tensors, weights)
        if data and (name in ELEMENTWISE or name in LOSSES):
            refuse_crossing(self.recorder, name, tensors, data)
        meets = bool(data and weights) and torch.is_grad_enabled()
        if meets and func in EXPANSIONS:
            with self:
                out = EXPANSIONS[func](self.meetings.meeting(func, name, args, kwargs, data, weights), *args, **kwargs)
            if out is not NotImplemented:
                return out
        if meets and func in FOREIGN:
            return self.meetings.foreign(func, name, args, kwargs, data, weights)
        if not (meets and func in RULES):
            out = self.insides.run(self, func, args, kwargs)
            if out is not NotImplemented:
                return out
        if meets:
            return self.meetings.meet(func, name, args, kwargs, data, weights)
        if not data:
            return self._derive(func, name, args, kwargs, weights, routed)
        if isinstance(func, CustomFunction):
            return self._custom(func, name, args, kwargs, data)
        out = func(*args, **kwargs)
        self.marking.mark(Call(name, func, args, kwargs, out, data))
        if any(t.requires_grad and self.marks.get(t) is None for t in tensors):
            self.marking.know(out)
        if name in FRESH:
            self.recorder.constants.set(out, True)
        return out

    def _guarded(self, guard: Guard, kind: Kind, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs a call, and tells the guard of data that are read or scaled, and of all that is taken outside of the model."""
        since, values = torch.autograd._get_sequence_nr(), (*args, *kwargs.values())
        if not self.recorder.is_inside:
            guard.met(tensors_in(values))
            weighs_classes = kind.name in CLASS_LOSSES or kind.name in LOSSES  # by what comes after outputs and targets
            self._mark_of_batch(guard, tensors_in(args[:2] if weighs_classes else values))
        for t in read_by_torch(kind.name, args, kwargs):
            if (mark := self.marks.get(t)) is not None:
                guard.read(kind.name, mark, is_inside=self.recorder.is_inside)
        if kind.is_reading or kind.name in SCALING:
            numbers = [float(a) for a in values if isinstance(a, int | float)]
            for t in tensors_in(values):
                mark = self.sized.get(t) or self.marks.get(t)
                if mark is not None and kind.is_reading:
                    guard.read(kind.name, mark, is_inside=self.recorder.is_inside)
                elif mark is not None and t.requires_grad and numbers:
                    guard.scaled(mark, numbers, is_inside=self.recorder.is_inside)
        out = self._taken(kind, func, args, kwargs)
        if isinstance(func, CustomFunction):
            guard.saw(since)
        if not self.recorder.is_inside:
            self._note_size(kind.name, args, values, out)
        return out

    def _mark_of_batch(self, guard: Guard, tensors: list[Tensor]) -> None:
        """Marks tensors from outside that came with the batch: they were moved or converted before the model was called."""
        rows, dim = self.recorder.num_rows, self.recorder.batch_dim
        for t in tensors:
            if self.marks.get(t) is not None or self.recorder.constants.get(t) is not None or t.requires_grad:
                continue
            if self.weights.is_known(t) or self.marking.alias(t) is not None or not guard.is_of_batch(t):
                continue
            has_rows = rows is not None and rows > 1 and t.ndim > dim and t.shape[dim] == rows
            if has_rows and not (t.layout is torch.strided and t.stride(dim) == 0):
                self.recorder.mark(t)

    def _note_size(self, name: str, args: tuple, values: tuple, out: Any) -> None:
        """Notes results that have a size by values of samples, or are made of such."""
        by: Mark | None = None
        if name in SIZED_BY_VALUES:
            by = next((mark for t in tensors_in(values) if (mark := self.marks.get(t)) is not None), None)
        elif name == "getitem":
            masks = [t for t in tensors_in(args[1:]) if t.dtype in (torch.bool, torch.uint8)]
            by = next((mark for t in masks if (mark := self.marks.get(t)) is not None), None)
        if by is None and self.sized.entries:
            by = next((mark for t in tensors_in(values) if (mark := self.sized.get(t)) is not None), None)
        if by is not None:
            for t in tensors_in((out,)):
                self.sized.set(t, by)

    def _asked(self, name: str, t: Any) -> None:
        """Tells the guard that a number was read which follows values of samples: how many rows a mask left."""
        mark = self.sized.get(t) if isinstance(t, Tensor) and t.ndim else None
        if mark is not None and self.recorder.guard is not None:
            self.recorder.guard.read(name, mark, is_inside=self.recorder.is_inside)

    def _simple(self, kind: Kind, func: Callable, args: tuple, kwargs: dict, look: Look, key: Any) -> Any:
        """Runs an op on data, captured parameters and known constants; NotImplemented if more must be known to understand it."""
        if look.weights:
            has_rule = func in RULES or (kind.name in SPREADING and not kind.has_inside)
            if not has_rule or func in EXPANSIONS or func in FOREIGN or is_in_place(func):
                return NotImplemented
            if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
                return NotImplemented
            return self.meetings.meet(func, kind.name, args, kwargs, look.data, look.weights, key)
        return self.insides.run(self, func, args, kwargs) if kind.has_inside else NotImplemented

    def _sorted(
        self, name: str, args: tuple, kwargs: dict
    ) -> tuple[list[Tensor], list[tuple[Tensor, Mark]], list[tuple[Tensor, Weight]], bool]:
        """(all tensors, data, weights) that the op reads, and whether data only tell it where rows go."""
        read = {k: v for k, v in kwargs.items() if k != "out"} if "out" in kwargs else kwargs
        tensors = tensors_in(args[:1] if name in PATTERNS else (*args, *read.values()))
        data: list[tuple[Tensor, Mark]] = []
        weights: list[tuple[Tensor, Weight]] = []
        routed = False
        for t in tensors:
            if (mark := self.marks.get(t)) is None and not (name == "setitem" and self.marking.wrote(t, args)):
                mark = self.marking.alias(t)
            if mark is not None:
                if name in ROUTING and routes(name, t, mark, args, self.marks.get):
                    routed = True
                    if self.recorder.guard is not None:
                        self.recorder.guard.hid(f"{name} by integers made across samples", is_inside=self.recorder.is_inside)
                else:
                    data.append((t, mark))
            elif (weight := self.weights.get(t)) is not None:
                if weight.is_data:
                    data.append((t, self.marks.recalled(t) or Lost("code that was not seen")))
                else:
                    weights.append((t, weight))
        return tensors, data, weights, routed

    def _opaque(self, func: Callable, name: str, args: tuple, kwargs: dict) -> Any:
        """A question about a tensor; a hook on one is followed, a copy of one has its samples."""
        t = args[0]
        mark = self.marks.get(t) if isinstance(t, Tensor) else None
        if name == "register_hook" and mark is not None:
            if self.recorder.guard is not None:
                self.recorder.guard.hid("a gradient hook", is_inside=self.recorder.is_inside)
            hook = followed_hook(self, self.marks, mark, args[1] if len(args) > 1 else kwargs["hook"])
            return func(t, hook)
        if name == "register_hook" and (weight := self.weights.get(t)) is not None and weight.pull is not None:
            refuse_hook([(t, weight)])
        out = func(*args, **kwargs)
        if name in ("deepcopy", "as_subclass", "grad") and mark is not None and isinstance(out, Tensor):
            self.marks.set(out, mark)
        return out

    def _custom(self, func: CustomFunction, name: str, args: tuple, kwargs: dict, data: list[tuple[Tensor, Mark]]) -> Any:
        """Somebody's `autograd.Function` of data: where its samples lie shows inside, or by trying."""
        out = self.meetings.watched(func)(*args, **kwargs)
        results = tensors_in((out,))
        if any(self.marks.get(t) is None for t in results):
            self.marking.mark(Call(name, func, args, kwargs, out, data))
        follow(self.marks, name, [a for a in args if isinstance(a, Tensor)], results)
        if self.recorder.guard is not None and any(isinstance(self.marks.get(t), Mixed) for t in results):
            self.recorder.guard.hid(f"a sum over samples by {name}", is_inside=self.recorder.is_inside)
        return out

    def _gradients(self, func: Callable, args: tuple, kwargs: dict, weights: list[tuple[Tensor, Weight]]) -> Any:
        """Gradients by `autograd.grad`, which are of the samples that they are the gradients of."""
        if weights:
            refuse_grad(weights)
        gradients = self.insides.run(self, func, args, kwargs)
        self.marking.mark_gradients(gradients, *args, **kwargs)
        return gradients

    def _constant(self, func: Callable, args: tuple, kwargs: dict, tensors: list[Tensor]) -> Any:
        """Runs an op on neither data nor weights, and keeps track of what was made inside the block."""
        out = func(*args, **kwargs)
        known = all(self.recorder.constants.get(t) for t in tensors)
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, Tensor):
                self.recorder.constants.set(t, known)
        return out

    def _derive(self, func: Callable, name: str, args: tuple, kwargs: dict, weights: list, routed: bool) -> Any:
        """Runs an op on weights alone, in ordinary autograd; queries walk its graph again."""
        if name == "make_dual":
            refuse_transform(name, weights)
        picked = routed or any(weight.is_picked for _, weight in weights)
        if picked and not routed and not (name in ELEMENTWISE or moves(name)):
            refuse_picked(name, weights)
        rows = None if picked else looked_up(name, args, kwargs)
        with kept_as_is():
            out = func(*args, **kwargs)
        for t in tensors_in((out,)):
            self.weights.derive(t, weights, name, is_picked=picked, rows=rows)
            if not needs_gradient(t) and not self.weights.is_parameter(t):
                self.recorder.constants.set(t, True)
        return out


@contextmanager
def paused() -> Iterator[None]:
    """Inside, no capture of this thread sees anything."""
    watching = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, Intercept) and not mode.is_paused]
    for mode in watching:
        mode.is_paused = True
    try:
        yield
    finally:
        for mode in watching:
            mode.is_paused = False
