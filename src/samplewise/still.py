"""Randomness held still: dropout passes everything, noise is its mean."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from samplewise.flow import op_name
from samplewise.intercept import without_override

DROPOUT = set("dropout alpha_dropout feature_dropout feature_alpha_dropout native_dropout".split())
NOISE = {"rand": 0.5, "rand_like": 0.5, "randn": 0.0, "randn_like": 0.0, "normal": 0.0, "bernoulli": 1.0, "uniform": 0.5}
"""What a random number is replaced by, so that it does not depend on how many are drawn."""


class Still(TorchFunctionMode):
    """Runs random ops without their randomness."""

    def __init__(self) -> None:
        super().__init__()
        self._inside: list[Callable] = []

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = op_name(func)
        if name in DROPOUT and args:
            return args[0]
        if name in NOISE:
            out = func(*args, **kwargs)
            return out.detach().fill_(NOISE[name]) if isinstance(out, Tensor) and out.is_floating_point() else out
        if name == "scaled_dot_product_attention":
            kwargs = {k: v for k, v in kwargs.items() if k != "dropout_p"}
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):  # (..., has_biases, num_layers, dropout, train, ...)
            floats = [i for i, a in enumerate(args) if isinstance(a, float)]
            args = tuple(0.0 if i in floats else a for i, a in enumerate(args))
        inside = without_override(func)
        if inside is not None and func not in self._inside:
            self._inside.append(func)
            try:
                with self:
                    return inside(*args, **kwargs)
            finally:
                self._inside.pop()
        return func(*args, **kwargs)


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Puts random state and buffers back as they were."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    devices = {p.device.index for p in module.parameters() if p.is_cuda}
    try:
        with torch.random.fork_rng(devices=sorted(d for d in devices if d is not None)):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
