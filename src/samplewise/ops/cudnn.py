"""The steps of RNN, LSTM and GRU by cuDNN, forward and backward, without the gradients of weights that nobody asked for.

The identity stands for the input weights, so that the gradient of the input is the gradient of every gate. Both ways are ops of
their own: a graph holds them as they are, and tensors without values pass them by their shapes.
"""

from typing import Any

import torch
from torch import Tensor

from samplewise.errors import UnattributedError

MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


def takes(gates: Tensor) -> bool:
    """Whether cuDNN takes the steps with these gates."""
    return (
        gates.is_cuda
        and gates.dtype in DTYPES
        and gates.numel() > 0
        and torch.backends.cudnn.enabled
        and not torch.version.hip
    )


class Cudnn(torch.autograd.Function):
    """(outputs, *last states) of one layer in one direction, from the gates [T, B, G] or, by `sizes` of steps, [R, G]."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, kind: str, sizes: list[int], gates: Tensor, w: Tensor, b: Tensor | None, *first: Tensor
    ) -> tuple[Tensor, ...]:
        like = {"dtype": gates.dtype, "device": gates.device}
        nothing = torch.zeros(gates.shape[-1], **like)
        weights = [
            torch.eye(gates.shape[-1], **like),
            w.to(gates.dtype),
            nothing,
            nothing if b is None else b.to(gates.dtype),
        ]
        states = [state.to(gates.dtype).contiguous() for state in first]
        y, *ends, reserve, packed = cudnn_steps(kind, sizes, gates.contiguous(), weights, states)
        ctx.kind, ctx.sizes = kind, sizes
        ctx.save_for_backward(gates, y, reserve, packed, *weights, *states)
        return y, *ends[: len(first)]

    @staticmethod
    def backward(ctx: Any, gy: Tensor, *ends: Tensor) -> Any:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise UnattributedError(
                f"a backward with create_graph=True met {ctx.kind} in a captured model, where it can be differentiated once "
                "alone. Take the second derivative outside of the capture."
            )
        gates, y, reserve, packed, *rest = ctx.saved_tensors
        grads = [t.contiguous() for t in (gy, *ends)]
        g, *states = cudnn_steps_backward(
            ctx.kind, ctx.sizes, gates.contiguous(), y, grads, reserve, packed, rest[:4], rest[4:]
        )
        return None, None, g, None, None, *states


@torch.library.custom_op("samplewise::cudnn_steps", mutates_args=())
def cudnn_steps(kind: str, sizes: list[int], gates: Tensor, weights: list[Tensor], states: list[Tensor]) -> list[Tensor]:
    """[outputs, last h, last c, what backward needs, the weights as cuDNN has them]"""
    with torch.autocast("cuda", enabled=False):
        return list(
            torch.ops.aten._cudnn_rnn(gates, weights, 4, None, *_pair(states), *_options(kind, states[0]), sizes, None)
        )


@torch.library.custom_op("samplewise::cudnn_steps_backward", mutates_args=())
def cudnn_steps_backward(
    kind: str,
    sizes: list[int],
    gates: Tensor,
    y: Tensor,
    grads: list[Tensor],
    reserve: Tensor,
    packed: Tensor,
    weights: list[Tensor],
    states: list[Tensor],
) -> list[Tensor]:
    """[gradient of the gates, of the first h, of the first c]"""
    options, no_weights = _options(kind, states[0]), [True, True, len(states) > 1, False]
    given = [grads[0], *_pair(grads[1:])]
    with torch.autocast("cuda", enabled=False):
        g, *rest = torch.ops.aten._cudnn_rnn_backward(
            gates, weights, 4, packed, *_pair(states), y, *given, *options, sizes, None, reserve, no_weights
        )
    return [g, *rest[: len(states)]]


@cudnn_steps.register_fake
def _(kind: str, sizes: list[int], gates: Tensor, weights: list[Tensor], states: list[Tensor]) -> list[Tensor]:
    y = gates.new_empty(*gates.shape[:-1], states[0].shape[-1])
    ends = [torch.empty_like(t) for t in states] + [gates.new_empty(0)] * (2 - len(states))
    return [y, *ends, gates.new_empty(0, dtype=torch.uint8), gates.new_empty(0)]  # sizes that only cuDNN knows


@cudnn_steps_backward.register_fake
def _(
    kind: str,
    sizes: list[int],
    gates: Tensor,
    y: Tensor,
    grads: list[Tensor],
    reserve: Tensor,
    packed: Tensor,
    weights: list[Tensor],
    states: list[Tensor],
) -> list[Tensor]:
    return [torch.empty_like(gates), *map(torch.empty_like, states)]


def _pair(states: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    return states[0], states[1] if len(states) > 1 else None


def _options(kind: str, h: Tensor) -> tuple:
    """One layer in one direction, time first, no dropout, in training, as backward must follow."""
    return MODES[kind], h.shape[-1], 0, 1, False, 0.0, True, False
