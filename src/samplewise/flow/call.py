"""One op call, and what all handlers of calls share."""

import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from samplewise.flow.names import ADDING
from samplewise.fold import NO_SAMPLE
from samplewise.samples import Layout, Mark, Mixed, Term
from samplewise.sight import CustomFunction
from samplewise.tracing import untraced


@dataclass
class Call:
    """One op call: its arguments, its first result, and the marks of the tensors among its arguments."""

    name: str
    func: Callable
    args: tuple
    kwargs: dict[str, Any]
    out: Any
    marks: list[tuple[Tensor, Mark]]
    """The marked tensors among the arguments, in their order."""
    results: list[Tensor] = field(default_factory=list)
    """All results, where there are several."""
    was_tried: bool = False
    """Whether it took values to tell where its samples go."""

    def __post_init__(self) -> None:
        """What an op is about stands first among `args`, also where code names it: transpose(input=x, dim0=0, dim1=1)."""
        if not self.args and "input" in self.kwargs:
            self.args, self.kwargs = (self.kwargs["input"],), {k: v for k, v in self.kwargs.items() if k != "input"}

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """The argument at this position or by this name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    @property
    def subject(self) -> tuple[Tensor, Layout]:
        """The first marked tensor."""
        tensor, mark = self.marks[0]
        assert isinstance(mark, Layout)
        return tensor, mark

    @property
    def layouts(self) -> dict[int, Layout]:
        """The layouts of the marked tensors that have one, by the tensor's id."""
        return {id(t): mark for t, mark in self.marks if isinstance(mark, Layout)}

    def layout(self, ids: Tensor) -> Layout:
        """A layout of the same samples, with these ids."""
        return Layout(ids, self.subject[1].num_samples)

    def mixed(self, **kwargs: Any) -> Mixed:
        """What a result is in which this call lets samples meet."""
        return Mixed(self.name, num_samples=self.subject[1].num_samples, **kwargs)


class Several(list[Mark | None]):
    """One mark for each of several results."""


Handler = Callable[[Call], Mark | Several | None]
"""call → the mark of its results, one for all or Several."""


@lru_cache(maxsize=4096)
def op_name(func: Callable) -> str:
    """The op's plain name: `add` for `torch.add`, `Tensor.add_`, `Tensor.__add__` and `torch.ops.aten.add.Tensor`.

    Ops that are not torch's own keep their namespace: `mine::add` may be anything.
    """
    name = getattr(func, "__name__", type(func).__name__)
    if not is_torchs(func):
        return getattr(_packet(func), "_qualified_op_name", f"custom {name}")
    if name in ("__get__", "__set__"):
        name = func.__self__.__name__  # type: ignore[attr-defined]
    return name.split(".")[0].strip("_")


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among these values and in their lists, tuples and dicts."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
        elif isinstance(value, dict):
            found += tensors_in(value.values())
    return found


def is_torchs(func: Callable) -> bool:
    """Whether the function is one of torch, and not an op or an `autograd.Function` that somebody registered."""
    if isinstance(func, types.FunctionType):
        return (func.__module__ or "torch").partition(".")[0] in ("torch", "samplewise")
    return not isinstance(func, CustomFunction) and getattr(_packet(func), "_qualified_op_name", "aten::").startswith(
        "aten::"
    )


def _packet(func: Callable) -> Any:
    """All overloads of a registered op together."""
    return getattr(func, "_overloadpacket", func)


@lru_cache(maxsize=4096)
def is_in_place(func: Callable) -> bool:
    """Whether the function changes its first argument, told by its name: add_, __iadd__, __setitem__."""
    name = getattr(func, "__name__", "").split(".")[0]
    if name in ("__invert__", "__index__", "__int__", "__iter__"):
        return False
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def aligned(ids: Tensor, ndim: int) -> Tensor:
    """ids with leading dimensions of size 1, as broadcasting adds them."""
    return ids.reshape((1,) * (ndim - ids.ndim) + ids.shape) if ids.ndim < ndim else ids


def merged(call: Call, all_ids: Iterable[Tensor]) -> Mark:
    """The ids that broadcast tensors have in common; Mixed where two samples meet in one element."""
    first, *rest = all_ids
    for ids in rest:
        if ids is first:
            continue
        try:
            left, right = torch.broadcast_tensors(first, ids)
        except RuntimeError:
            return call.mixed()
        if not bool(((left == right) | (left == NO_SAMPLE) | (right == NO_SAMPLE)).all()):
            return call.mixed()
        if bool((left == NO_SAMPLE).any()):
            first = torch.where(left == NO_SAMPLE, right, left)
        elif left.shape != first.shape:
            first = left
    same = (mark for _, mark in call.marks if isinstance(mark, Layout) and mark.ids is first and not mark.discrete)
    return next(same, None) or call.layout(first)  # the same object knows what was found out about it


def broadcast_met(call: Call, ndim: int) -> Mark:
    """The ids that all data of the call has in common, broadcast to `ndim` dimensions; Mixed where two samples meet."""
    return merged(call, [aligned(layout.ids, ndim) for layout in call.layouts.values()])


@untraced
def compressed(ids: Tensor) -> Tensor:
    """ids with every dimension along which the sample does not change cut to size 1."""
    for d in range(ids.ndim):
        if ids.shape[d] > 1 and (ids.stride(d) == 0 or bool((ids == ids.narrow(d, 0, 1)).all())):
            ids = ids.narrow(d, 0, 1)
    return ids


def reduced(call: Call, reduction: str | None, *, even: bool, num_elements: int = 1) -> Mixed:
    """The mark of a sum or mean over all samples; None if it is not known which."""
    terms = None if reduction is None else frozenset([Term(reduction, num_elements=num_elements)])
    return call.mixed(linear=True, even=even, reduction=reduction, terms=terms)


def elementwise(call: Call) -> Mark:
    """Elements at the same place meet, once broadcasting has lined the tensors up."""
    tensor, layout = call.subject
    ndim = call.out.ndim
    if all(mark is layout for _, mark in call.marks) and tensor.ndim == ndim:
        return layout
    met = broadcast_met(call, ndim)
    if isinstance(met, Mixed) and call.name in ADDING:
        terms = frozenset([Term("sum")]) if ndim == 0 and "alpha" not in call.kwargs else None
        return replace(met, linear=True, terms=terms)  # samples added up one by one
    return met
