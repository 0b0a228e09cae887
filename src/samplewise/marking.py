"""Marks on the results of ops, and on memory that several tensors share."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from samplewise.flow import flow
from samplewise.flow.call import Call, Several, is_in_place, op_name, tensors_in
from samplewise.flow.memory import key_of
from samplewise.flow.writes import written
from samplewise.inside import ONE_OP
from samplewise.marks import Marks, has_memory
from samplewise.rowwise import know, reaches_own_rows
from samplewise.samples import Layout, Lost, Mark, Mixed, same_ids
from samplewise.tap import Recorder
from samplewise.tracing import untraced
from samplewise.weights import Weight


class Marking:
    """Keeps the marks of one capture."""

    def __init__(self, recorder: Recorder):
        self.recorder, self.marks, self.weights = recorder, recorder.marks, recorder.weights
        self._looked_at: Marks[bool] = Marks()
        self._written: dict[int, tuple[StorageWeakRef, weakref.ref[Tensor]]] = {}
        """Memory that data was written into in place, and the tensor through which it was."""

    @property
    def written(self) -> frozenset[int]:
        """The memory, as long as it is there, that data was written into in place."""
        return frozenset(memory for memory, (storage, _) in self._written.items() if not storage.expired())

    def mark(self, call: Call) -> None:
        """Marks the results of an op on data."""
        if call.name == "setitem":
            self._mark_written(call)
            return
        if call.name == "data" and len(call.args) == 2:  # t.data = other
            self.marks.set(
                call.args[0], next((mark for t, mark in call.marks if t is call.args[1]), Lost("a write to .data"))
            )
            return
        call.results = tensors_in((call.out,))
        if not call.results:
            return
        if torch._C._are_functorch_transforms_active() or call.name == "add_batch_dim":  # tensors hide dimensions there
            for t in call.results:
                self.marks.set(t, Lost("a transform of torch.func"))
            return
        call.out = call.results[0]
        mark, in_place = flow(call), is_in_place(call.func) or "out" in call.kwargs or is_told_in_place(call)
        for i, t in enumerate(call.results):
            each = mark[i] if isinstance(mark, Several) else mark
            if each is not None:
                self._set(t, each, in_place=in_place)

    def mark_gradients(
        self,
        gradients: Any,
        outputs: Any,
        inputs: Any,
        grad_outputs: Any = None,
        *_: Any,
        is_grads_batched: bool = False,
        **__: Any,
    ) -> None:
        """Marks what `autograd.grad` gave: it is of the samples of the inputs, where the outputs keep samples apart.

        So it is of a tensor without a mark that is met row by row: each sample's perturbation, in adversarial training.
        """
        marks = [self.marks.get(t) for t in tensors_in((outputs, grad_outputs)) if t.requires_grad or self.marks.get(t)]
        is_apart = all(isinstance(mark, Layout) or (isinstance(mark, Mixed) and mark.linear) for mark in marks)
        for t, g in zip(tree_leaves(inputs), tree_leaves(gradients, is_leaf=lambda a: a is None), strict=True):
            mark = self.marks.get(t)
            if g is not None and isinstance(mark, Layout) and is_apart:
                batched = lambda mark=mark: mark.ids.unsqueeze(0)
                self.marks.set(g, mark.derived("batched gradients", batched) if is_grads_batched else mark)
            elif (
                g is not None
                and mark is None
                and is_apart
                and not is_grads_batched
                and self._has_rows(t, tensors_in((outputs,)))
            ):
                self.recorder.mark(g)
            elif g is not None:
                self.marks.set(g, Lost("autograd.grad"))

    def know(self, out: Any) -> None:
        """Notes what data came of a tensor without a mark, of which `autograd.grad` may be asked for the gradient."""
        for t in tensors_in((out,)):
            if isinstance(mark := self.marks.get(t), Layout):
                know(t, mark)

    def _has_rows(self, t: Tensor, outputs: list[Tensor]) -> bool:
        """Whether the gradient of `t`, which has no mark, lies row by row as the batch does."""
        rows, dim = self.recorder.num_rows, self.recorder.batch_dim
        return t.ndim > dim and t.shape[dim] == rows and reaches_own_rows(t, outputs, self.recorder.rows_of(t, dim))

    def mark_anew(self, func: Callable, args: tuple, kwargs: dict, out: Any) -> None:
        """Marks the results of an op on data of the simple kinds, of which nothing is remembered that fits."""
        look = Look(self)
        key_of(func, args, kwargs, look)
        self.mark(Call(op_name(func), func, args, kwargs, out, look.data))

    def unmarked(self, t: Tensor) -> Any:
        """WEIGHT for a captured parameter, None for a known constant; NotImplemented for anything else without a mark."""
        if self._written:
            return NotImplemented  # it may hold samples
        if self.weights.is_parameter(t):
            return WEIGHT
        return None if not t.requires_grad and self.recorder.constants.get(t) else NotImplemented

    def _mark_written(self, call: Call) -> None:
        target = call.args[0]
        before = self.marks.get(target)
        if any(isinstance(mark, Layout) for _, mark in call.marks) and (before is None or isinstance(before, Layout)):
            others = [mark for t, mark in call.marks if t is not target and not isinstance(mark, Layout)]
            self._set(target, others[0] if others else written(call, before), in_place=True)
        elif call.marks:
            self._set(target, next(mark for _, mark in call.marks if not isinstance(mark, Layout)), in_place=True)

    def _set(self, t: Tensor, mark: Mark, *, in_place: bool) -> None:
        """Marks `t`; writing other samples into it leaves it open what tensors that share its memory hold."""
        if in_place and not same_samples(mark, self.marks.get(t)):
            if self.recorder.guard is not None and isinstance(self.marks.get(t), Layout) and not isinstance(mark, Layout):
                self.recorder.guard.hid(
                    "a write of several samples into the place of one", is_inside=self.recorder.is_inside
                )
            of_base = _layout_of_base(t, mark)
            for other in self.marks.sharing(t):
                if other is not t._base or not same_samples(of_base, self.marks.get(other)):
                    self.marks.set(other, Lost("a write into memory that it shares"))
            if t._base is not None and of_base is not None and self.marks.get(t._base) is None:
                self.marks.set(t._base, of_base)
            storage = t.untyped_storage()
            self._written[storage._cdata] = (StorageWeakRef(storage), weakref.ref(t))
        self.marks.set(t, mark)

    def wrote(self, t: Tensor, args: tuple) -> bool:
        """Whether what was written into the memory of `t` is what `t[index] = value` now puts there: t[index] += ..."""
        entry = self._written.get(t.untyped_storage()._cdata) if t is args[0] and has_memory(t) else None
        if entry is None or entry[1]() is not args[2]:
            return False
        place, value = t[args[1]], args[2]
        return (place.data_ptr(), place.shape, place.stride()) == (value.data_ptr(), value.shape, value.stride())

    def alias(self, t: Tensor) -> Mark | None:
        """The mark of an unmarked tensor that came about unseen on the memory of a marked one (DLPack, nn.Parameter(t))."""
        if (
            self._written
            and has_memory(t)
            and (entry := self._written.get(t.untyped_storage()._cdata))
            and not entry[0].expired()
        ):
            return Lost("a write into memory that it shares")
        if self._looked_at.get(t) or self.recorder.constants.get(t) is not None or self.weights.is_known(t):
            return None
        self._looked_at.set(t, True)
        mark = self.marks.recalled(t)
        if mark is not None:
            self.marks.set(t, mark)
        return mark


def is_told_in_place(call: Call) -> bool:
    """Whether the call is one of a function that takes the word `inplace`, and was given it: F.relu(x, inplace=True)."""
    return call.func in ONE_OP and any(call.out is t for t in (*call.args, *call.kwargs.values()))


WEIGHT = "weight"


class Look:
    """One look at the tensors of a call, as long as they are of the simple kinds."""

    __slots__ = ("_marking", "data", "weights")

    def __init__(self, marking: Marking):
        self._marking = marking
        self.data: list[tuple[Tensor, Mark]] = []
        self.weights: list[tuple[Tensor, Weight]] = []

    def __call__(self, t: Tensor) -> Any:
        """The layout of data, WEIGHT for a captured parameter, None for a known constant; NotImplemented for anything else."""
        marking = self._marking
        mark = marking.marks.get(t)
        if mark is not None:
            self.data.append((t, mark))
            return mark if type(mark) is Layout else NotImplemented
        kind = marking.unmarked(t)
        if kind is WEIGHT:
            self.weights.append((t, marking.weights.of_parameter(t)))
        return kind


@untraced
def _layout_of_base(view: Tensor, mark: Mark) -> Layout | None:
    """The layout that a tensor of constants gets when data is written through a view of it that spans all its samples.

    So with a cache or an output that is filled slice by slice. None if the view is not a part of its base along dimensions.
    """
    base, d = view._base, 0
    if base is None or not isinstance(mark, Layout):
        return None
    shape = [1] * base.ndim
    for k in range(view.ndim):
        while d < base.ndim and base.stride(d) != view.stride(k):
            d += 1
        if d == base.ndim or (k in mark.dims and view.shape[k] != base.shape[d]):
            return None
        shape[d] = mark.ids.shape[k]
        d += 1
    return Layout(mark.ids.reshape(shape), mark.num_samples)


def same_samples(mark: Mark | None, other: Mark | None) -> bool:
    return isinstance(mark, Layout) and isinstance(other, Layout) and same_ids(mark, other)
