"""Where weights meet data: the op's rule runs in place of the op, and its result is tapped."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from samplewise.backwards import follow
from samplewise.errors import UnattributedError
from samplewise.factors.dense import Dense
from samplewise.flow import flow
from samplewise.flow.call import Call, Several, is_in_place, tensors_in
from samplewise.flow.memory import recalled
from samplewise.flow.names import ELEMENTWISE
from samplewise.marking import Marking
from samplewise.ops.foreign import FOREIGN, ExpandedWeight
from samplewise.ops.generic import Generic
from samplewise.ops.pointwise import pointwise
from samplewise.ops.recipe import recipe_of
from samplewise.ops.registry import RULES, Gated, Meeting, Use, note_of
from samplewise.refusals import describe, refuse, refuse_in_place
from samplewise.samples import Layout, Lost, Mark
from samplewise.sight import CustomFunction
from samplewise.tap import Recorder, Targets, apply_gate, apply_tap, is_wanted


class Meetings:
    """Runs the ops of one capture in which weights meet data; somebody's own Functions with the mode on."""

    def __init__(self, recorder: Recorder, marking: Marking, mode: TorchFunctionMode):
        self.recorder, self.marking = recorder, marking
        self._mode = weakref.ref(mode)  # which holds this
        self.marks, self.weights = recorder.marks, recorder.weights

    def meet(
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
        meeting, rule = self.meeting(func, name, args, kwargs, data, weights), RULES.get(func)
        y = NotImplemented if rule is None else rule(meeting, *args, **kwargs)
        if y is NotImplemented and name in ELEMENTWISE and not (is_in_place(func) and meeting.is_weight(args[0])):
            meeting.how, rule = "elementwise", pointwise
            y = pointwise(meeting)
        if y is NotImplemented or rule is None:
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
        known = recalled(key) if meeting.uses or meeting.gates else None
        if known is not None and known.mark is mark:
            known.recipe = recipe_of(rule, meeting, y) or False
        if meeting.uses:
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
        run = Generic(meeting, self.watched(func))
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

    def watched(self, func: Callable) -> Callable:
        """The function, its inside watched if it is somebody's `autograd.Function`: where its samples lie shows there."""
        if not isinstance(func, CustomFunction):
            return func

        mode = self._mode()
        assert mode is not None

        def run(*args: Any, **kwargs: Any) -> Any:
            with mode:
                return func.without_override(*args, **kwargs)

        return run

    def meeting(
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
        return apply_tap(t, self.recorder.anchor, self.recorder, handed, kept)

    def gate(self, meeting: Meeting, gated: Gated) -> Tensor:
        targets, spread = self.weights.targets(gated.source), gated.spread(gated.source.detach())
        self.recorder.note(targets, note_of(meeting.name, meeting.how, meeting.first_layout, spread.dtype))
        return apply_gate(spread, self.recorder.anchor, self.recorder, targets, gated.factor_of)

    def foreign(
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
