"""PyTorch's private ExpandedWeights API on this engine: the drop-in, and the names with which its rules are written."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.utils._pytree import arg_tree_leaves, tree_leaves

from samplewise.capture import Capture, unseen
from samplewise.errors import SamplewiseError, UnattributedError
from samplewise.factors.base import Factor
from samplewise.factors.total import join
from samplewise.intercept import Intercept
from samplewise.ops.foreign import FOREIGN, ExpandedWeight
from samplewise.ops.registry import Note
from samplewise.sight import close_eyes, open_eyes
from samplewise.tap import Targets

__all__ = [
    "ExpandedWeight",
    "call_for_per_sample_grads",
    "forward_helper",
    "implements_per_sample_grads",
    "is_batch_first",
    "set_grad_sample_if_exists",
    "standard_kwargs",
    "sum_over_all_but_batch_and_last_n",
    "unpack_expanded_weight_or_tensor",
]


def call_for_per_sample_grads(
    module: nn.Module, *, batch_size: int | None = None, loss_reduction: str = "sum", batch_first: bool = True
) -> Callable[..., Any]:
    """`module` as a function whose backward puts per-sample gradients [B, *shape] into each parameter's `grad_sample`.

    `.grad` stays as it was; `grad_sample` of a trainable parameter that took no part is None. With
    `loss_reduction="mean"` gradients are multiplied by the batch size, which a mean over the batch divided by. Without
    `batch_size` all tensor arguments must agree on it; `batch_first=False` looks for it in dimension 1. The loss is computed
    outside of what is watched: that it keeps samples apart is up to the caller here, where `capture` would refuse.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> call_for_per_sample_grads(model)(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
    >>> model.weight.grad_sample.tolist(), model.weight.grad
    ([[[1.0, 2.0]], [[3.0, 4.0]]], None)
    """
    if loss_reduction not in ("sum", "mean"):
        raise RuntimeError(f"loss_reduction is 'sum' or 'mean', got {loss_reduction!r}")
    if not isinstance(module, nn.Module):
        raise RuntimeError(f"call_for_per_sample_grads takes an nn.Module, got {type(module).__name__}")
    if not (batch_size is None or isinstance(batch_size, int)):
        raise RuntimeError(f"batch_size is None or an int, got {type(batch_size).__name__}")
    if batch_size is not None and batch_size < 1:
        raise RuntimeError(f"batch_size must be positive, got {batch_size}")
    _require_cleared(module)
    batch_dim = 0 if batch_first else 1

    @functools.wraps(module.forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        _require_cleared(module)
        size = _common_batch_size(args, kwargs, batch_dim) if batch_size is None else batch_size
        recording = GradSampleCall(module, batch_size=size, batch_dim=batch_dim, loss_reduction=loss_reduction, verify=False)
        return recording.forward(args, kwargs)

    return call


class GradSampleCall(Capture):
    """One call of the drop-in: records while the module runs, writes `grad_sample` when a backward through it ends."""

    def forward(self, args: tuple, kwargs: dict) -> Any:
        for parameter in self.parameters.values():
            parameter.grad_sample = None  # type: ignore[attr-defined]
        self._written: dict[str, Tensor] = {}
        self._is_open = True
        open_eyes()
        self._watch_modules()
        try:
            with Intercept(self):
                out = self.model(*args, **kwargs)
        finally:
            self._let_go()
            close_eyes()
        leaked = self.weights.reached_from(*(t for t in tree_leaves(out) if isinstance(t, Tensor)))
        if leaked:
            raise UnattributedError(unseen(leaked))
        return out

    def note(self, targets: Targets, use: Note) -> None:
        """A checkpoint would run forward again in backward, which is outside of what is watched."""
        hooks = _top_saved_tensors_default_hooks(False)
        if hooks is not None and "_checkpoint_hook" in hooks[0].__qualname__:
            raise SamplewiseError(
                f"{use.op} uses parameter {targets[0][0]!r} inside a checkpoint, which call_for_per_sample_grads does not serve: "
                "its backward runs unwatched. Use `with samplewise.capture(model) as grads`, with backward inside the block."
            )
        super().note(targets, use)

    def deliver(self, targets: Targets, factor: Factor) -> None:
        if not self._factors:
            torch.autograd.Variable._execution_engine.queue_callback(self._write)
        super().deliver(targets, factor)

    def _write(self) -> None:
        """At the end of a backward: sums up the uses of each parameter."""
        factors, self._factors = self._factors, {}
        self._versions.clear()
        for name, uses in factors.items():
            parameter = self.parameters[name]
            G = join(uses).materialize() * (self._scale or 0.0)
            before = getattr(parameter, "grad_sample", None)
            if before is not None:
                if before is not self._written.get(name):
                    raise SamplewiseError(
                        f"grad_sample of {name!r} already holds the samples of another call, to which the rows of this one "
                        "cannot be added. Set it to None between the two."
                    )
                G = before + G  # a second backward of the same call, as .grad would add it up
            self._written[name] = G.to(parameter.dtype)
            parameter.grad_sample = self._written[name]  # type: ignore[attr-defined]


def _require_cleared(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if getattr(parameter, "grad_sample", None) is not None:
            raise RuntimeError(
                f"grad_sample of parameter {name!r} still holds the samples of an earlier call, to which those of a new one "
                "cannot be added. Set it to None first."
            )


def _common_batch_size(args: tuple, kwargs: dict, batch_dim: int) -> int:
    sizes = {t.shape[batch_dim] for t in arg_tree_leaves(*args, **kwargs) if isinstance(t, Tensor)}
    if not sizes:
        raise RuntimeError("found no tensor among the arguments to read the batch size from. Give batch_size=...")
    if len(sizes) > 1:
        raise RuntimeError(
            f"the arguments have sizes {sorted(sizes)} along dimension {batch_dim}, so the batch size is not clear. "
            "Give batch_size=...; arguments of another size are then shared by all samples."
        )
    return sizes.pop()


# --- the names with which rules for torch's registry are written -----------------------------------------------------


def implements_per_sample_grads(torch_function: Callable) -> Callable[[type], type]:
    """Registers an `autograd.Function` as the rule of `torch_function`, before any rule of samplewise's own.

    It is applied to `(kwarg_names, torch_function, *args, *kwarg_values)` with weights as ExpandedWeights.
    """

    def register(autograd_function: type) -> type:
        FOREIGN[torch_function] = autograd_function
        return autograd_function

    return register


def is_batch_first(expanded_args_and_kwargs: Any) -> bool | None:
    """Whether the samples of the weights among the arguments lie along dimension 0; None if there is no weight."""
    found = {arg.batch_first for arg in expanded_args_and_kwargs if isinstance(arg, ExpandedWeight)}
    if len(found) > 1:
        raise RuntimeError("weights of one op disagree on batch_first")
    return found.pop() if found else None


def standard_kwargs(kwarg_names: tuple[str, ...], expanded_args: tuple) -> tuple[tuple, dict[str, Any]]:
    """(args, kwargs) from the flat arguments of a rule, the last of which are the values of `kwarg_names`."""
    split = len(expanded_args) - len(kwarg_names)
    return expanded_args[:split], dict(zip(kwarg_names, expanded_args[split:], strict=True))


def forward_helper(func: Callable, expanded_args: tuple, expanded_kwargs: dict[str, Any]) -> Any:
    """`func` of the arguments with every ExpandedWeight as its original weight, after checks of the batch size.

    The first argument must be the input, a tensor with its samples along dimension 0 (or 1 for weights that say so).
    """
    input, name = expanded_args[0], getattr(func, "__name__", repr(func))
    if isinstance(input, ExpandedWeight):
        raise RuntimeError(f"{name} got an ExpandedWeight as its input; the input must be a tensor of data")
    if not isinstance(input, Tensor):
        raise RuntimeError(f"{name} needs a tensor as its input to read the batch size from, got {type(input).__name__}")
    if input.ndim == 0:
        raise RuntimeError(f"{name} got an input without dimensions, so without a batch")
    if input.shape[0] == 0:
        raise RuntimeError(f"{name} got an input {tuple(input.shape)}; 0 is not a batch size for this rule")
    weights = [arg for arg in (*expanded_args, *expanded_kwargs.values()) if isinstance(arg, ExpandedWeight)]
    for weight in weights:
        size = input.shape[0 if weight.batch_first else 1]
        if size > weight.batch_size or (size < weight.batch_size and not weight.allow_smaller_batches):
            raise RuntimeError(f"{name} got a batch of {size}, but its weights expect {weight.batch_size} samples")
    if len({weight.loss_reduction for weight in weights}) > 1:
        raise RuntimeError(f"the weights of {name} disagree on loss_reduction")
    args = [arg.orig_weight if isinstance(arg, ExpandedWeight) else arg for arg in expanded_args]
    kwargs = {k: arg.orig_weight if isinstance(arg, ExpandedWeight) else arg for k, arg in expanded_kwargs.items()}
    return func(*args, **kwargs)


def set_grad_sample_if_exists(maybe_expanded_weight: Any, per_sample_grad_fn: Callable[[Tensor], Tensor]) -> None:
    """Hands over `per_sample_grad_fn(weight)`, shape [B, *shape], if the argument is an ExpandedWeight."""
    weight = unpack_expanded_weight_or_tensor(maybe_expanded_weight)
    if not isinstance(maybe_expanded_weight, ExpandedWeight):
        return
    G = per_sample_grad_fn(weight)
    missing = maybe_expanded_weight.batch_size - G.shape[0]
    if missing > 0:
        G = torch.cat([G, G.new_zeros(missing, *G.shape[1:])])
    if maybe_expanded_weight.deliver is not None:
        maybe_expanded_weight.deliver(G)
        return
    if maybe_expanded_weight.loss_reduction == "mean":
        G = G * maybe_expanded_weight.batch_size
    before = getattr(weight, "grad_sample", None)
    weight.grad_sample = G if before is None else before + G


def unpack_expanded_weight_or_tensor(maybe_expanded_weight: Any, func: Callable[[Any], Any] = lambda x: x) -> Any:
    """`func` of the original weight, or of a tensor that needs no gradient; None of anything that is no tensor."""
    if isinstance(maybe_expanded_weight, ExpandedWeight):
        return func(maybe_expanded_weight.orig_weight)
    if isinstance(maybe_expanded_weight, Tensor):
        if maybe_expanded_weight.requires_grad:
            raise RuntimeError("a rule got a weight that needs a gradient beside ExpandedWeights, which it would not get")
        return func(maybe_expanded_weight)
    return None


def sum_over_all_but_batch_and_last_n(tensor: Tensor, n_dims: int) -> Tensor:
    """`tensor` summed over all dimensions but the first and the last `n_dims`.

    >>> sum_over_all_but_batch_and_last_n(torch.ones(1, 2, 3, 4, 5), n_dims=2).shape
    torch.Size([1, 4, 5])
    """
    dims = list(range(1, tensor.ndim - n_dims))
    return tensor.sum(dims) if dims else tensor
