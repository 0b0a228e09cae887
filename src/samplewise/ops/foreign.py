"""Rules written as an `autograd.Function` for torch's private ExpandedWeights registry."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FOREIGN: dict[Callable, type[torch.autograd.Function]] = {}
"""function → the autograd.Function that runs it; filled by `expanded_weights.implements_per_sample_grads`."""


class ExpandedWeight(Tensor):
    """A weight as such a rule sees it: the parameter, how many samples there are, and where they lie.

    `deliver`, if given, takes the per-sample gradient [B, *shape] that the rule computes; without it the gradient goes to
    `orig_weight.grad_sample`, as in torch.
    """

    orig_weight: Tensor
    batch_size: int
    loss_reduction: str
    batch_first: bool
    allow_smaller_batches: bool
    deliver: Callable[[Tensor], None] | None

    handled_functions = FOREIGN

    @staticmethod
    def __new__(cls, orig_weight: Any, batch_size: int, loss_reduction: str) -> "ExpandedWeight":
        if not isinstance(orig_weight, Tensor):
            raise RuntimeError(f"an ExpandedWeight is made of a tensor, got {type(orig_weight).__name__}")
        if not orig_weight.requires_grad:
            raise RuntimeError("an ExpandedWeight is made of a tensor that requires a gradient, got one that does not")
        return Tensor._make_subclass(cls, orig_weight.detach(), True)

    def __init__(self, orig_weight: Tensor, batch_size: int, loss_reduction: str):
        self.orig_weight, self.batch_size, self.loss_reduction = orig_weight, batch_size, loss_reduction
        self.batch_first, self.allow_smaller_batches = True, False
        self.deliver = None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def set_batch_first(self, is_batch_first: bool = True) -> None:
        self.batch_first = is_batch_first

    def set_allow_smaller_batches(self, is_allow_smaller_batches: bool) -> None:
        self.allow_smaller_batches = is_allow_smaller_batches
