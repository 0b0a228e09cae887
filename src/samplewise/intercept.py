"""Sees each op; where a weight meets data, the op's rule runs in place of the op."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_map_only

import samplewise.ops  # noqa: F401  (registers the rules)
from samplewise.backwards import follow, followed_hook
from samplewise.errors import UnattributedError
from samplewise.factors.dense import Dense
from samplewise.flow import flow
from samplewise.flow.call import Call, Several, is_in_place, tensors_in
from samplewise.flow.handlers import moves
from samplewise.flow.memory import Known, key_of, recalled
from samplewise.flow.names import ELEMENTWISE, LOSSES, SCALING
from samplewise.flow.routing import PATTERNS, ROUTING, routes
from samplewise.inside import Insides
from samplewise.kinds import Kind, kind_of
from samplewise.marking import Look, Marking
from samplewise.ops.foreign import FOREIGN, ExpandedWeight
from samplewise.ops.generic import Generic
from samplewise.ops.pointwise import pointwise
from samplewise.ops.recipe import Recipe, recipe_of
from samplewise.ops.registry import EXPANSIONS, RULES, FactorOf, Meeting, Use
from samplewise.refusals import (
    are_given,
    describe,
    refuse,
    refuse_crossing,
    refuse_given_gradients,
    refuse_grad,
    refuse_hook,
    refuse_in_place,
    refuse_picked,
    refuse_strangers,
    refuse_transform,
)
from samplewise.samples import Layout, Lost, Mark, Mixed
from samplewise.saving import kept_as_is
from samplewise.sight import CustomFunction
from samplewise.tap import Gate, Guard, Recorder, Targets, apply_tap, is_wanted, note_of
from samplewise.weights import Weight, looked_up

FRESH = set("new_zeros new_ones new_full new_empty".split())
"""Ops on data that take only its shape and type."""

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

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kind = kind_of(func)
        if kind.is_question or self.is_paused:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = {SYNONYMS.get(k, k): v for k, v in kwargs.items()} if kwargs else {}
        guard, since = self.recorder.guard, torch.autograd._get_sequence_nr()
        if guard is not None:
            self._tell(guard, kind, args, kwargs)
        if kind.is_opaque:
            return self._opaque(func, kind.name, args, kwargs)
        out = self._understood(kind, func, args, kwargs)
        if guard is not None and isinstance(func, CustomFunction):
            guard.saw(since)
        return out

    def _understood(self, kind: Kind, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs an op, and keeps track of where its samples go and of what it does with weights."""
        if (kind.may_repeat or kind.has_inside) and "out" not in kwargs:
            look = Look(self.marking)
            key = key_of(func, args, kwargs, look)
            if key is not None and look.data:
                out = self._familiar(kind, func, args, kwargs, look, key)
                if out is not NotImplemented:
                    return out
        name = kind.name
        tensors, data, weights, routed = self._sorted(name, args, kwargs)
        if weights and func is torch.autograd.grad:
            refuse_grad(weights)
        if func is torch.autograd.backward:
            losses = [(t, self.marks.get(t)) for t in tensors if t.requires_grad]
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
                out = EXPANSIONS[func](self._meeting(func, name, args, kwargs, data, weights), *args, **kwargs)
            if out is not NotImplemented:
                return out
        if meets and func in FOREIGN:
            return self._foreign(func, name, args, kwargs, data, weights)
        if not (meets and func in RULES):
            out = self.insides.run(self, func, args, kwargs)
            if out is not NotImplemented:
                return out
        if meets:
            return self._meet(func, name, args, kwargs, data, weights)
        if not data:
            return self._derive(func, name, args, kwargs, weights, routed)
        if isinstance(func, CustomFunction):
            return self._custom(func, name, args, kwargs, data)
        out = func(*args, **kwargs)
        self.marking.mark(Call(name, func, args, kwargs, out, data))
        if name in FRESH:
            self.recorder.constants.set(out, True)
        return out

    def _tell(self, guard: Guard, kind: Kind, args: tuple, kwargs: dict) -> None:
        """Tells of data that are read or scaled, and of all that is taken outside of the model."""
        values = (*args, *kwargs.values())
        if not self.recorder.is_inside:
            guard.met(tensors_in(values))
        if not (kind.is_reading or kind.name in SCALING):
            return
        numbers = [float(a) for a in values if isinstance(a, int | float)]
        for t in tensors_in(values):
            mark = self.marks.get(t)
            if mark is not None and kind.is_reading:
                guard.read(kind.name, mark, is_inside=self.recorder.is_inside)
            elif mark is not None and t.requires_grad and numbers:
                guard.scaled(mark, numbers, is_inside=self.recorder.is_inside)

    def _familiar(self, kind: Kind, func: Callable, args: tuple, kwargs: dict, look: Look, key: Any) -> Any:
        """Runs an op on data, captured parameters and known constants; NotImplemented if more must be known to understand it."""
        known = recalled(key)
        if look.weights:
            rule = RULES.get(func) if func not in EXPANSIONS and func not in FOREIGN else None
            if rule is None or not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
                return NotImplemented
            if known is not None and known.recipe and known.recipe.rule is rule:
                y = self._meet_again(kind.name, args, kwargs, known)
                if y is not NotImplemented:
                    return y
            return self._meet(func, kind.name, args, kwargs, look.data, look.weights, key)
        if known is None:
            return self.insides.run(self, func, args, kwargs) if kind.has_inside else NotImplemented
        out = func(*args, **kwargs)
        if not self.marking.mark_again(out, known):
            self.marking.mark(Call(kind.name, func, args, kwargs, out, look.data))
        return out

    def _meet_again(self, name: str, args: tuple, kwargs: dict, known: Known) -> Any:
        """Runs an op as its rule did in a call alike, and taps its result; NotImplemented if that has another shape."""
        recipe: Recipe = known.recipe
        tensors = [*args, *kwargs.values()]
        plain = tensors.copy()
        for place in recipe.weights:
            plain[place] = tensors[place].detach()
        num = len(args)
        out = recipe.run(*plain[:num], **dict(zip(kwargs, plain[num:], strict=True))) if kwargs else recipe.run(*plain)
        results = out if isinstance(out, tuple) else (out,)
        if results[0].shape != known.shapes:
            return NotImplemented
        tensors += results
        uses = [Use(tensors[place], of, tuple([tensors[k] for k in keep])) for place, of, keep in recipe.uses]
        y = self._tapped(results[0], uses, name, recipe.how, recipe.layout)
        self.marks.set(y, known.mark)
        return y

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
        if name in ("deepcopy", "as_subclass") and mark is not None:
            self.marks.set(out, mark)
        return out

    def _custom(self, func: CustomFunction, name: str, args: tuple, kwargs: dict, data: list[tuple[Tensor, Mark]]) -> Any:
        """Somebody's `autograd.Function` of data: where its samples lie shows inside, or by trying."""
        out = self._watched(func)(*args, **kwargs)
        results = tensors_in((out,))
        if any(self.marks.get(t) is None for t in results):
            self.marking.mark(Call(name, func, args, kwargs, out, data))
        follow(self.marks, name, [a for a in args if isinstance(a, Tensor)], results)
        if self.recorder.guard is not None and any(isinstance(self.marks.get(t), Mixed) for t in results):
            self.recorder.guard.hid(f"a sum over samples by {name}", is_inside=self.recorder.is_inside)
        return out

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
        picked = routed or any(weight.is_picked for _, weight in weights)
        if picked and not routed and not (name in ELEMENTWISE or moves(name)):
            refuse_picked(name, weights)
        rows = None if picked else looked_up(name, args, kwargs)
        with kept_as_is():
            out = func(*args, **kwargs)
        for t in tensors_in((out,)):
            self.weights.derive(t, weights, name, is_picked=picked, rows=rows)
            if not t.requires_grad:
                self.recorder.constants.set(t, True)
        return out

    def _meet(
        self,
        func: Callable,
        name: str,
        args: tuple,
        kwargs: dict,
        data: list[tuple[Tensor, Mark]],
        weights: list,
        key: Any = None,
    ) -> Any:
        """Runs the op by its rule and taps its result; what is found out is remembered by the key."""
        meeting = self._meeting(func, name, args, kwargs, data, weights)
        y = NotImplemented
        if func in RULES:
            y = RULES[func](meeting, *args, **kwargs)
        if y is NotImplemented and name in ELEMENTWISE and not (is_in_place(func) and meeting.is_weight(args[0])):
            meeting.how = "elementwise"
            y = pointwise(meeting)
        if y is NotImplemented:
            return self._meet_generic(meeting, data, weights)
        if meeting.marks is not None:
            for t, layout in zip(y, meeting.marks, strict=True):
                self.marks.set(t, layout)
            return y
        if y is None:  # written into an argument, which keeps its samples
            return None
        mark = flow(Call(name, func, args, kwargs, y, data), key)
        if isinstance(mark, Several):
            (mark,) = mark
        if not isinstance(mark, Layout) or mark.has_strays:
            refuse(name, mark, weights)
        if meeting.uses:
            known = recalled(key)
            if known is not None and known.mark is mark and known.recipe is not False and func in RULES:
                known.recipe = recipe_of(RULES[func], meeting, y) or False
            y = self.tap(meeting, y)
        self.marks.set(y, mark)
        return y

    def _meet_generic(self, meeting: Meeting, data: list[tuple[Tensor, Mark]], weights: list) -> Any:
        """Runs any op, and taps each of its results."""
        name, func = meeting.name, meeting.func
        if is_in_place(func):
            refuse_in_place(name, weights)
        meeting.uses.clear()
        meeting.how = "generic"
        run = Generic(meeting, self._watched(func))
        results = tensors_in((run.out,))
        marks: Any = [self.marks.get(t) for t in results]
        if any(mark is None and t.requires_grad for t, mark in zip(results, marks, strict=True)):
            marks = flow(Call(name, func, meeting.args, meeting.kwargs, results[0], data, results))
        for k, t in enumerate(results):
            mark = marks[k] if isinstance(marks, list) else marks
            if t.requires_grad and (not isinstance(mark, Layout) or mark.has_strays):
                refuse(name, mark, weights)
            self.marks.set(t, mark or Lost(name, discrete=not t.is_floating_point()))
        if isinstance(func, CustomFunction):
            follow(self.marks, name, [a for a in meeting.args if isinstance(a, Tensor)], results)
        tapped: dict[int, Tensor] = {}
        for k, t in enumerate(results):
            mark = self.marks.get(t)
            assert mark is not None
            tapped[id(t)] = t
            if t.requires_grad and isinstance(mark, Layout):  # not integers, not comparisons
                run.use(k, t, mark)
                tapped[id(t)] = self.tap(meeting, t)
            self.marks.set(tapped[id(t)], mark)
        return tree_map_only(Tensor, lambda t: tapped[id(t)], run.out)

    def _watched(self, func: Callable) -> Callable:
        """The function, its inside watched if it is somebody's `autograd.Function`: where its samples lie shows there."""
        if not isinstance(func, CustomFunction):
            return func

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return func.without_override(*args, **kwargs)

        return run

    def _meeting(
        self, func: Callable, name: str, args: tuple, kwargs: dict, data: list[tuple[Tensor, Mark]], weights: list
    ) -> Meeting:
        layouts = {id(t): layout for t, layout in self._layouts(name, data, weights)}
        return Meeting(name, func, args, kwargs, layouts, {id(t) for t, _ in weights}, self)

    def tap(self, meeting: Meeting, t: Tensor) -> Tensor:
        uses, meeting.uses = meeting.uses, []
        return self._tapped(t, uses, meeting.name, meeting.how, meeting.first_layout)

    def _tapped(self, t: Tensor, uses: list[Use], name: str, how: str, layout: Layout) -> Tensor:
        kept: list[Tensor] = []
        places_of: dict[int, int] = {}
        handed = []
        note = note_of(name, how, layout, t.dtype)
        for use in uses:
            places = []
            for one in use.keep:
                place = places_of.setdefault(id(one), len(kept))
                if place == len(kept):
                    kept.append(one)
                places.append(place)
            targets = self.weights.targets(use.weight)
            self.recorder.note(targets, note)
            handed.append((targets, use.factor_of, places))
        return apply_tap(t, self.recorder.anchor, self.recorder, handed, *kept)

    def gate(self, meeting: Meeting, weight: Tensor, spread: Tensor, factor_of: FactorOf) -> Tensor:
        targets = self.weights.targets(weight)
        self.recorder.note(targets, note_of(meeting.name, meeting.how, meeting.first_layout, spread.dtype))
        return Gate.apply(spread, self.recorder.anchor, self.recorder, targets, factor_of)  # type: ignore[return-value]

    def _foreign(
        self, func: Callable, name: str, args: tuple, kwargs: dict, data: list[tuple[Tensor, Mark]], weights: list
    ) -> Any:
        """Runs the op by a rule of torch's registry, which gets the weights as ExpandedWeights."""
        (_, layout), *_ = self._layouts(name, data, weights)
        axis = layout.fold(0).axis
        if axis not in (0, 1):
            raise UnattributedError(
                f"{name} has a rule from the ExpandedWeights registry, which knows samples along dimension 0 or 1 alone, and "
                f"met {layout} with {describe(weights)}. Remove that rule, or call the op on [B, ...]."
            )
        expanded: dict[int, ExpandedWeight] = {}
        for t, _ in weights:
            weight = ExpandedWeight(t, layout.num_samples, self.recorder.loss_reduction)
            weight.batch_first = axis == 0
            targets = self.weights.targets(t)
            self.recorder.note(targets, note_of(name, "foreign", layout, t.dtype))
            weight.deliver = self._deliver_dense(targets, get_gradient_edge(weight).node)
            expanded[id(t)] = weight
        values = [expanded.get(id(a), a) for a in (*args, *kwargs.values())]
        y = FOREIGN[func].apply(tuple(kwargs), func, *values)
        self.marking.mark(Call(name, func, args, kwargs, y, data))
        return y

    def _deliver_dense(self, targets: Targets, leaf_node: Any) -> Callable[[Tensor], None]:
        def deliver(G: Tensor) -> None:
            if is_wanted(leaf_node):
                self.recorder.deliver(targets, Dense(G))

        return deliver

    def _layouts(self, name: str, data: list[tuple[Tensor, Mark]], weights: list) -> list[tuple[Tensor, Layout]]:
        layouts = [(t, mark) for t, mark in data if isinstance(mark, Layout) and not mark.has_strays]
        if len(layouts) != len(data):
            refuse(name, next(mark for _, mark in data if not isinstance(mark, Layout) or mark.has_strays), weights)
        return layouts


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
