"""What a graph is made for: the kind of a batch, whatever its size, and what torch is told to do beside it."""

import enum
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.errors import SamplewiseError

COMPARED = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
FIXED = (torch.Size, slice, range, enum.Enum)
"""What an answer may hold besides, of which nobody changes anything."""


def refuse_negated(tensors: list[Tensor]) -> None:
    """Raises if a step reads one of these from its memory with the other sign, of which torch's compiler does not know."""
    for t in tensors:
        if t.is_neg():
            raise SamplewiseError(
                f"a tensor {tuple(t.shape)} that the step reads has torch's negative bit, which compiled code does not heed. Give it "
                "memory of its own, t.resolve_neg(), or take the step op by op: per_sample_step(..., compile=False)."
            )


def refuse_strange(tensors: list[Tensor]) -> None:
    """Raises if a graph cannot take these."""
    refuse_negated(tensors)
    op_by_op = "take the step op by op: per_sample_step(..., compile=False)."
    for t in tensors:
        if t.requires_grad:
            raise SamplewiseError(
                f"a tensor of the batch needs a gradient, which a compiled step does not give it. Detach it, or {op_by_op}"
            )
        if t.layout is not torch.strided or t.is_nested:
            kind = "nested" if t.is_nested else "sparse"
            raise SamplewiseError(
                f"a compiled step was given a {kind} tensor, whose sizes depend on values. Give it dense, or {op_by_op}"
            )


def refuse_opaque(results: list[Any]) -> None:
    """Raises if a step gives what holds tensors or can be used up: it would be that of the trace for good."""
    for value in results:
        if not isinstance(value, (Tensor, *COMPARED, *FIXED)):
            raise SamplewiseError(
                f"a compiled step cannot give a {type(value).__name__}: its loss and answer are tensors, numbers and strings, in "
                "tuples, lists and dicts. Give those (dict(grads.stream()) in place of grads.stream()), or take the step op by op: "
                "per_sample_step(..., compile=False)."
            )


def kind_of(leaf: Any, batch_dim: int, size: int) -> Any:
    """What of one part of a batch a graph has baked in: a number itself, of a tensor all but its values and its rows."""
    if isinstance(leaf, Tensor):
        shape = [-1 if d == batch_dim and n == size else n for d, n in enumerate(leaf.shape)]
        strides = None if leaf.is_contiguous() else leaf.stride()
        return tuple(shape), strides, leaf.dtype, leaf.device
    if not isinstance(leaf, COMPARED):
        raise SamplewiseError(
            f"a compiled step was given a {type(leaf).__name__}, and would not see it change: a batch is of tensors, numbers and "
            "strings, in tuples, lists and dicts. Give what is in it, let loss_fn read it from a variable, or take the step op by "
            "op: per_sample_step(..., compile=False)."
        )
    return type(leaf), repr(leaf)  # True and 1.0 are equal to 1, and -0.0 to 0.0, but not to code


def has_rows(t: Any, batch_dim: int, size: int) -> bool:
    """Whether a tensor has a row for each of so many samples."""
    return isinstance(t, Tensor) and t.ndim > batch_dim and t.shape[batch_dim] == size


def resized(leaf: Any, batch_dim: int, size: int, other: int) -> Any:
    """A tensor like this with another number of rows; its values are not read."""
    if not has_rows(leaf, batch_dim, size):
        return leaf
    shape = list(leaf.shape)
    shape[batch_dim] = other
    return leaf.new_zeros(shape)


HOOKS_OF_ALL_MODULES = [name for name in vars(nn.modules.module) if name.startswith("_global_") and name.endswith("_hooks")]


def surroundings() -> Any:
    """What torch itself does otherwise from the same call."""
    return (
        tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        tuple(tuple(vars(nn.modules.module)[hooks]) for hooks in HOOKS_OF_ALL_MODULES),
    )
