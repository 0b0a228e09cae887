"""Sees each op; where a weight meets data, the op's rule runs in place of the op."""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_map_only

import samplewise.ops  # noqa: F401  (registers the rules)
from samplewise.backwards import follow, followed_hook
from samplewise.errors import SamplesMixError, UnattributedError
from samplewise.factors.dense import Dense
from samplewise.flow import ELEMENTWISE, LOSSES, PATTERNS, Call, Several, flow, is_in_place, moves, op_name, routes, written
from samplewise.ops.foreign import FOREIGN, ExpandedWeight
from samplewise.ops.generic import Generic
from samplewise.ops.pointwise import pointwise
from samplewise.ops.registry import EXPANSIONS, RULES, FactorOf, Meeting
from samplewise.samples import Layout, Lost, Mark, Marks, Mixed
from samplewise.saving import kept_as_is
from samplewise.sight import CustomFunction
from samplewise.tap import Gate, Note, Recorder, Tap, Targets, is_wanted
from samplewise.trees import tensors_in
from samplewise.weights import Weight

OPAQUE = set(
    "array backward_hooks base contains data_ptr deepcopy device dim dtype element_size format get_device grad grad_fn "
    "has_names hash is_complex is_contiguous is_cpu is_cuda is_floating_point is_inference is_leaf is_meta is_mkldnn is_mps "
    "is_nested is_quantized is_same_size is_set_to is_signed is_sparse is_view is_xla is_xpu item itemsize layout len names "
    "nbytes ndim nelement numel numpy output_nr reduce_ex register_hook register_post_accumulate_grad_hook repr "
    "requires_grad retain_grad shape size storage_offset stride tolist untyped_storage version as_subclass".split()
)
"""Questions about a tensor that give no tensor of values: answered as they are."""

ENGINE = {torch.autograd.backward, torch.autograd.grad}

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
        self._looked_at: Marks[bool] = Marks()
        self._inside: list[Callable] = []
        """Functions being looked into; one that calls itself by its own name (Tensor.unflatten) is then an op."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = {SYNONYMS.get(k, k): v for k, v in kwargs.items()} if kwargs else {}
        name = op_name(func)
        if self.is_paused:
            return func(*args, **kwargs)
        if name in OPAQUE and func not in ENGINE:
            return self._opaque(func, name, args, kwargs)
        read = {k: v for k, v in kwargs.items() if k != "out"} if "out" in kwargs else kwargs
        tensors = tensors_in(args[:1] if name in PATTERNS else (args, read))
        data: list[tuple[Tensor, Mark]] = []
        weights: list[tuple[Tensor, Weight]] = []
        routed = False
        for t in tensors:
            if (mark := self.marks.get(t)) is None:
                mark = self._alias(t)
            if mark is not None:
                if routes(name, t, mark, args, self.marks.get):
                    routed = True
                else:
                    data.append((t, mark))
            elif (weight := self.weights.get(t)) is not None:
                if weight.is_data:
                    data.append((t, self.marks.recalled(t) or Lost("code that was not seen")))
                else:
                    weights.append((t, weight))
        if weights and func is torch.autograd.grad:
            raise UnattributedError(
                f"autograd.grad was asked for the gradient of {describe(weights)} inside the block, where ordinary gradients do "
                "not reach captured parameters. Take it outside of the block, or leave the parameter out: "
                f"capture(model, exclude={names_of(weights)})."
            )
        if func is torch.autograd.backward:
            self.recorder.check_losses([(t, self.marks.get(t)) for t in tensors if t.requires_grad])
            self._check_given_gradients(*args[1:2], **kwargs)
        if not data and not weights:
            return self._constant(func, args, kwargs, tensors)
        if weights and torch.is_grad_enabled() and torch._C._are_functorch_transforms_active():
            raise UnattributedError(
                f"{name} uses {describe(weights)} inside a transform of torch.func (vmap, grad, jvp ...) in the model, which "
                f"samplewise does not follow. Write it out, or leave the parameter out: capture(model, exclude={names_of(weights)})."
            )
        if weights and not data:
            self._refuse_strangers(name, tensors, weights)

        if data and (name in ELEMENTWISE or name in LOSSES):
            self._refuse_crossing(name, tensors, data)
        meets = bool(data and weights) and torch.is_grad_enabled()
        if meets and func in EXPANSIONS:
            with self:
                out = EXPANSIONS[func](self._meeting(func, name, args, kwargs, data, weights), *args, **kwargs)
            if out is not NotImplemented:
                return out
        if meets and func in FOREIGN:
            return self._foreign(func, name, args, kwargs, data, weights)
        if not (meets and func in RULES) and func not in self._inside and (inside := without_override(func)) is not None:
            if func in ENGINE:  # which a reentrant checkpoint calls again inside
                with self:
                    return inside(*args, **kwargs)
            self._inside.append(func)
            try:
                with self:
                    return inside(*args, **kwargs)
            finally:
                self._inside.pop()
        if meets:
            return self._meet(func, name, args, kwargs, data, weights)
        if not data:
            return self._derive(func, name, args, kwargs, weights, routed)
        if isinstance(func, CustomFunction):
            return self._custom(func, name, args, kwargs, data)
        out = func(*args, **kwargs)
        self._mark(Call(name, func, args, kwargs, out, data))
        if name in FRESH:
            self.recorder.constants.set(out, True)
        return out

    def _opaque(self, func: Callable, name: str, args: tuple, kwargs: dict) -> Any:
        """A question about a tensor; a hook on one is followed, a copy of one has its samples."""
        t = args[0]
        mark = self.marks.get(t) if isinstance(t, Tensor) else None
        if name == "register_hook" and mark is not None:
            hook = followed_hook(self, self.marks, mark, args[1] if len(args) > 1 else kwargs["hook"])
            return func(t, hook)
        if name == "register_hook" and (weight := self.weights.get(t)) is not None and weight.pull is not None:
            raise UnattributedError(
                f"a gradient hook was put on {describe([(t, weight)])}, which per-sample gradients do not pass. Remove the "
                f"hook, or leave the parameter out: capture(model, exclude={names_of([(t, weight)])})."
            )
        out = func(*args, **kwargs)
        if name in ("deepcopy", "as_subclass") and mark is not None:
            self.marks.set(out, mark)
        return out

    def _custom(self, func: CustomFunction, name: str, args: tuple, kwargs: dict, data: list[tuple[Tensor, Mark]]) -> Any:
        """Somebody's `autograd.Function` of data: where its samples lie shows inside, or by trying."""
        out = self._watched(func)(*args, **kwargs)
        results = tensors_in(out)
        if any(self.marks.get(t) is None for t in results):
            self._mark(Call(name, func, args, kwargs, out, data))
        follow(self.marks, name, [a for a in args if isinstance(a, Tensor)], results)
        return out

    def _check_given_gradients(self, grad_tensors: Any = None, **_: Any) -> None:
        for t in tensors_in(grad_tensors):
            mark = self.marks.get(t)
            if isinstance(mark, Mixed | Lost):
                raise SamplesMixError(
                    f"backward was given a gradient made by {mark.op}, in which samples of the batch met, so that what it gives "
                    "one sample depends on the others. Give one that keeps samples apart."
                )

    def _constant(self, func: Callable, args: tuple, kwargs: dict, tensors: list[Tensor]) -> Any:
        """Runs an op on neither data nor weights, and keeps track of what was made inside the block."""
        out = func(*args, **kwargs)
        known = all(self.recorder.constants.get(t) for t in tensors)
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, Tensor):
                self.recorder.constants.set(t, known)
        return out

    def _refuse_strangers(self, name: str, tensors: list[Tensor], weights: list) -> None:
        """A tensor with a row a sample that came from outside and is not marked would pass for a constant."""
        B, dim = self.recorder.batch_size, self.recorder.batch_dim
        if torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled():
            return  # the formula of somebody's backward
        for t in tensors:
            if t.requires_grad or self.recorder.constants.get(t) or B in (None, 1) or t.ndim <= dim or t.shape[dim] != B:
                continue
            raise UnattributedError(
                f"{name} uses {describe(weights)} on a tensor {tuple(t.shape)} from outside of the block, which is not known to "
                "hold samples, though it has as many rows. If it does, say so, grads.mark(tensor); if it is a constant, make "
                "it a buffer of the model."
            )

    def _alias(self, t: Tensor) -> Mark | None:
        """The mark of an unmarked tensor that came about unseen on the memory of a marked one (DLPack, nn.Parameter(t))."""
        if self._looked_at.get(t) or self.recorder.constants.get(t) is not None or self.weights.is_known(t):
            return None
        self._looked_at.set(t, True)
        mark = self.marks.recalled(t)
        if mark is not None:
            self.marks.set(t, mark)
        return mark

    def _refuse_crossing(self, name: str, tensors: list[Tensor], data: list[tuple[Tensor, Mark]]) -> None:
        """Labels [B] beside outputs [B, 1] give [B, B]: each sample against the label of every other."""
        B, dim = self.recorder.batch_size, self.recorder.batch_dim
        ndim = max(t.ndim for t in tensors)
        for t in tensors:
            if B in (None, 1) or t.ndim <= dim or t.shape[dim] != B or self.marks.get(t) or self.recorder.constants.get(t):
                continue
            at = ndim - t.ndim + dim - ndim  # where its rows lie, counted from the end
            for other, mark in data:
                lies_across = other.ndim >= -at and other.shape[at] == 1
                if lies_across and isinstance(mark, Layout) and mark.dims and not t.requires_grad:
                    raise SamplesMixError(
                        f"{name} broadcasts {tuple(other.shape)} of the batch against a tensor {tuple(t.shape)} from outside with "
                        "as many rows as the batch: every sample meets every row (labels [B] beside outputs [B, 1]?). Give them "
                        "the same shape; if it is a constant, make it a buffer of the model."
                    )

    def _derive(self, func: Callable, name: str, args: tuple, kwargs: dict, weights: list, routed: bool) -> Any:
        """Runs an op on weights alone, in ordinary autograd; queries walk its graph again."""
        picked = routed or any(weight.is_picked for _, weight in weights)
        if picked and not routed and not (name in ELEMENTWISE or moves(name)):
            raise UnattributedError(
                f"{name} combines rows of {describe(weights)} that were picked by integers made across the samples, so that what a "
                "sample gets may depend on the others. Pick rows for each sample, or combine them after they were given back "
                "to their samples."
            )
        with kept_as_is():
            out = func(*args, **kwargs)
        for t in tensors_in(out):
            self.weights.derive(t, weights, name, is_picked=picked)
            if not t.requires_grad:
                self.recorder.constants.set(t, True)
        return out

    def _meet(
        self, func: Callable, name: str, args: tuple, kwargs: dict, data: list[tuple[Tensor, Mark]], weights: list
    ) -> Any:
        """Runs the op by its rule and taps its result."""
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
        mark = flow(Call(name, func, args, kwargs, y, data))
        if isinstance(mark, Several):
            (mark,) = mark
        if not isinstance(mark, Layout) or mark.has_strays:
            self._refuse(name, mark, weights)
        if meeting.uses:
            y = self.tap(meeting, y)
        self.marks.set(y, mark)
        return y

    def _meet_generic(self, meeting: Meeting, data: list[tuple[Tensor, Mark]], weights: list) -> Any:
        """Runs any op, and taps each of its results."""
        name, func = meeting.name, meeting.func
        if is_in_place(func):
            raise UnattributedError(
                f"{describe(weights)} is written by {name} into a tensor in place, which samplewise cannot follow. "
                "Write the op out of place (torch.cat, torch.where, x + w)."
            )
        meeting.uses.clear()
        meeting.how = "generic"
        run = Generic(meeting, self._watched(func))
        results = tensors_in(run.out)
        inside = [self.marks.get(t) for t in results]
        marks = inside if all(inside) else flow(Call(name, func, meeting.args, meeting.kwargs, results[0], data, results))
        for k, t in enumerate(results):
            mark = marks[k] if isinstance(marks, list) else marks
            if not isinstance(mark, Layout) or mark.has_strays:
                self._refuse(name, mark, weights)
            self.marks.set(t, mark)
        if isinstance(func, CustomFunction):
            follow(self.marks, name, [a for a in meeting.args if isinstance(a, Tensor)], results)
        tapped: dict[int, Tensor] = {}
        for k, t in enumerate(results):
            mark = self.marks.get(t)
            assert isinstance(mark, Layout)
            tapped[id(t)] = t
            if t.requires_grad:  # not integers, not comparisons
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
        weight_ids = {id(t) for t, _ in weights}
        return Meeting(
            name,
            func,
            args,
            kwargs,
            layout_of=lambda t: layouts.get(id(t)),
            is_weight=lambda t: id(t) in weight_ids,
            taps=self,
            first_layout=next(iter(layouts.values())),
        )

    def tap(self, meeting: Meeting, t: Tensor) -> Tensor:
        kept: list[Tensor] = []
        uses = []
        for use in meeting.uses:
            places = []
            for one in use.keep:
                place = next((i for i, other in enumerate(kept) if other is one), len(kept))
                if place == len(kept):
                    kept.append(one)
                places.append(place)
            targets = self.weights.targets(use.weight)
            self.recorder.note(targets, Note(meeting.name, meeting.how, meeting.first_layout, t.dtype))
            uses.append((targets, use.factor_of, places))
        meeting.uses.clear()
        return Tap.apply(t, self.recorder.anchor, self.recorder, uses, *kept)  # type: ignore[return-value]

    def gate(self, meeting: Meeting, weight: Tensor, spread: Tensor, factor_of: FactorOf) -> Tensor:
        targets = self.weights.targets(weight)
        self.recorder.note(targets, Note(meeting.name, meeting.how, meeting.first_layout, spread.dtype))
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
            self.recorder.note(targets, Note(name, "foreign", layout, t.dtype))
            weight.deliver = self._deliver_dense(targets, get_gradient_edge(weight).node)
            expanded[id(t)] = weight
        values = [expanded.get(id(a), a) for a in (*args, *kwargs.values())]
        y = FOREIGN[func].apply(tuple(kwargs), func, *values)
        self._mark(Call(name, func, args, kwargs, y, data))
        return y

    def _deliver_dense(self, targets: Targets, leaf_node: Any) -> Callable[[Tensor], None]:
        def deliver(G: Tensor) -> None:
            if is_wanted(leaf_node):
                self.recorder.deliver(targets, Dense(G))

        return deliver

    def _mark(self, call: Call) -> None:
        """Marks the results of an op on data."""
        if call.name == "setitem":
            self._mark_written(call)
            return
        if call.name == "data" and len(call.args) == 2:  # t.data = other
            self.marks.set(
                call.args[0], next((mark for t, mark in call.marks if t is call.args[1]), Lost("a write to .data"))
            )
            return
        call.results = tensors_in(call.out)
        if not call.results:
            return
        call.out = call.results[0]
        mark = flow(call)
        for i, t in enumerate(call.results):
            each = mark[i] if isinstance(mark, Several) else mark
            if each is not None:
                self._set_mark(t, each, in_place=is_in_place(call.func) or "out" in call.kwargs)

    def _mark_written(self, call: Call) -> None:
        target = call.args[0]
        before = self.marks.get(target)
        if any(isinstance(mark, Layout) for _, mark in call.marks) and (before is None or isinstance(before, Layout)):
            others = [mark for t, mark in call.marks if t is not target and not isinstance(mark, Layout)]
            self._set_mark(target, others[0] if others else written(call, before), in_place=True)
        elif call.marks:
            self._set_mark(target, next(mark for _, mark in call.marks if not isinstance(mark, Layout)), in_place=True)

    def _set_mark(self, t: Tensor, mark: Mark, *, in_place: bool) -> None:
        """Marks `t`; writing other samples into it leaves it open what tensors that share its memory hold."""
        if in_place and not same_samples(mark, self.marks.get(t)):
            for other in self.marks.sharing(t):
                self.marks.set(other, Lost("a write into memory that it shares"))
        self.marks.set(t, mark)

    def _layouts(self, name: str, data: list[tuple[Tensor, Mark]], weights: list) -> list[tuple[Tensor, Layout]]:
        layouts = [(t, mark) for t, mark in data if isinstance(mark, Layout) and not mark.has_strays]
        if len(layouts) != len(data):
            self._refuse(name, next(mark for _, mark in data if not isinstance(mark, Layout) or mark.has_strays), weights)
        return layouts

    def _refuse(self, name: str, mark: Mark | Several | None, weights: list) -> NoReturn:
        leave_out = f"leave the parameter out: capture(model, exclude={names_of(weights)})"
        if isinstance(mark, Mixed) and mark.linear:
            raise SamplesMixError(
                f"{name} uses {describe(weights)} together with a sum over samples (made by {mark.op}). Such a term, "
                f"weight decay for one, belongs to no sample. Either add it outside of the capture, or {leave_out}."
            )
        if isinstance(mark, Mixed):
            raise SamplesMixError(
                f"{name} uses {describe(weights)} on values in which {mark.op} mixed the samples of the batch (a BatchNorm "
                "in training mode? a statistic over the batch?). Per-sample gradients do not exist for it. Either take the "
                f"mixing out (put the layer in eval mode), or {leave_out}."
            )
        if isinstance(mark, Layout):
            raise UnattributedError(
                f"{name} uses {describe(weights)} on rows of which some belong to no sample (constants joined to the batch). "
                f"Handle the two apart, or {leave_out}."
            )
        op = mark.op if isinstance(mark, Lost) else name
        raise UnattributedError(
            f"{name} uses {describe(weights)} on the result of {op}, of which samplewise does not know where its samples "
            f"lie. Either tell it, grads.mark(tensor, batch_dim=...), or {leave_out}."
        )


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


def same_samples(mark: Mark, other: Mark | None) -> bool:
    return isinstance(mark, Layout) and isinstance(other, Layout) and torch.equal(mark.ids, other.ids)


def names_of(weights: list[tuple[Tensor, Weight]]) -> list[str]:
    return sorted(frozenset().union(*(weight.roots for _, weight in weights)))


def describe(weights: list[tuple[Tensor, Weight]]) -> str:
    """The parameters behind the weights of a call, by name and shape."""
    names = names_of(weights)
    shapes = ", ".join(str(tuple(t.shape)) for t, _ in weights)
    return f"parameter{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))} {shapes}"


INSIDE: dict[Callable, Callable | None] = {}


def without_override(func: Callable) -> Callable | None:
    """A Python function of torch that asks for overrides first, without that question; None for any other function.

    So the ops inside `F.multi_head_attention_forward` are seen one by one, and only the innermost need to be known.
    """
    if func not in INSIDE:
        INSIDE[func] = _without_override(func) if isinstance(func, types.FunctionType) else None
    return INSIDE[func]


def _without_override(func: types.FunctionType) -> Callable | None:
    questions = [n for n in func.__code__.co_names if n.startswith("has_torch_function")]
    if not questions:
        return None
    answered = {**func.__globals__, **dict.fromkeys(questions, lambda *_: False)}
    inside = types.FunctionType(func.__code__, answered, func.__name__, func.__defaults__, func.__closure__)
    inside.__kwdefaults__ = func.__kwdefaults__
    return inside
