"""What an op is refused for, in words: what met what, why it stops, the way out."""

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from samplewise.errors import SamplesMixError, UnattributedError
from samplewise.flow.call import Several
from samplewise.marks import Marks
from samplewise.samples import Layout, Lost, Mark, Mixed
from samplewise.tap import Recorder
from samplewise.weights import Weight

WeightsMet = list[tuple[Tensor, Weight]]


def refuse(name: str, mark: Mark | Several | None, weights: WeightsMet) -> NoReturn:
    leave_out = leaving_out(weights)
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


def refuse_strangers(recorder: Recorder, name: str, tensors: list[Tensor], weights: WeightsMet) -> None:
    """A tensor with a row a sample that came from outside and is not marked would pass for a constant."""
    B, dim = recorder.batch_size, recorder.batch_dim
    if not torch.is_grad_enabled():
        return  # an optimizer's step, the formula of somebody's backward
    for t in tensors:
        if t.requires_grad or recorder.constants.get(t) or B in (None, 1) or t.ndim <= dim or t.shape[dim] != B:
            continue
        if t.layout is torch.strided and t.stride(dim) == 0:
            continue  # one row, expanded
        raise UnattributedError(
            f"{name} uses {describe(weights)} on a tensor {tuple(t.shape)} from outside of the block, which is not known to "
            "hold samples, though it has as many rows. If it does, say so, grads.mark(tensor); if it is a constant, make "
            "it a buffer of the model."
        )


def refuse_crossing(recorder: Recorder, name: str, tensors: list[Tensor], data: list[tuple[Tensor, Mark]]) -> None:
    """Labels [B] beside outputs [B, 1] give [B, B]: each sample against the label of every other."""
    B, dim = recorder.batch_size, recorder.batch_dim
    ndim = max(t.ndim for t in tensors)
    for t in tensors:
        if B in (None, 1) or t.ndim <= dim or t.shape[dim] != B or recorder.marks.get(t) or recorder.constants.get(t):
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


def are_given(grad_tensors: Any = None, **_: Any) -> bool:
    """Whether backward was given gradients to start with."""
    return any(t is not None for t in tree_leaves(grad_tensors))


def refuse_given_gradients(marks: Marks[Mark], grad_tensors: Any = None, **_: Any) -> None:
    for t in tree_leaves(grad_tensors):
        mark = marks.get(t) if isinstance(t, Tensor) else None
        if isinstance(mark, Mixed | Lost):
            raise SamplesMixError(
                f"backward was given a gradient made by {mark.op}, in which samples of the batch met, so that what it gives "
                "one sample depends on the others. Give one that keeps samples apart."
            )


def refuse_grad(weights: WeightsMet) -> NoReturn:
    raise UnattributedError(
        f"autograd.grad was asked for the gradient of {describe(weights)} inside the block, where ordinary gradients do not "
        f"reach captured parameters. Take it outside of the block, or {leaving_out(weights)}."
    )


def refuse_transform(name: str, weights: WeightsMet) -> NoReturn:
    raise UnattributedError(
        f"{name} uses {describe(weights)} inside a transform of torch.func (vmap, grad, jvp ...) in the model, which "
        f"samplewise does not follow. Write it out, or {leaving_out(weights)}."
    )


def refuse_hook(weights: WeightsMet) -> NoReturn:
    raise UnattributedError(
        f"a gradient hook was put on {describe(weights)}, which per-sample gradients do not pass. Remove the hook, or "
        f"{leaving_out(weights)}."
    )


def refuse_picked(name: str, weights: WeightsMet) -> NoReturn:
    raise UnattributedError(
        f"{name} combines rows of {describe(weights)} that were picked by integers made across the samples, so that what a "
        "sample gets may depend on the others. Pick rows for each sample, or combine them after they were given back to "
        "their samples."
    )


def refuse_in_place(name: str, weights: WeightsMet) -> NoReturn:
    raise UnattributedError(
        f"{describe(weights)} is written by {name} into a tensor in place, which samplewise cannot follow. "
        "Write the op out of place (torch.cat, torch.where, x + w)."
    )


def leaving_out(weights: WeightsMet) -> str:
    return f"leave the parameter out: capture(model, exclude={names_of(weights)})"


def names_of(weights: WeightsMet) -> list[str]:
    return sorted(frozenset().union(*(weight.roots for _, weight in weights)))


def describe(weights: WeightsMet) -> str:
    """The parameters behind the weights of a call, by name and shape."""
    names = names_of(weights)
    shapes = ", ".join(str(tuple(t.shape)) for t, _ in weights)
    return f"parameter{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))} {shapes}"
