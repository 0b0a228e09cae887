"""Answers by kernels, which are imported when a GPU is first asked."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def has_kernel(*tensors: Tensor) -> bool:
    """Whether there are kernels for these tensors."""
    if not (IS_INTERPRETED or all(t.is_cuda for t in tensors)):
        return False
    from samplewise.kernels import backend

    return backend.has_kernel(*tensors)


def _called(op: Any) -> Callable:
    """The op where ops are written down, or have no values; else the function behind it: to call that takes 1 µs, an op 10 (Xeon)."""
    return op if torch._C._len_torch_dispatch_stack() else op._init_fn


def gram_sq_norms(a_BTI: Tensor, g_BTO: Tensor) -> tuple[Tensor, Tensor]:
    from samplewise.kernels import gram_norm

    return _called(gram_norm.gram_sq_norms)(a_BTI, g_BTO)


def direct_sq_norms(a_BTI: Tensor, g_BTO: Tensor) -> Tensor:
    from samplewise.kernels import direct_norm

    return _called(direct_norm.direct_sq_norms)(a_BTI, g_BTO)


def conv_sq_norms(x_BCHW: Tensor, g_BOHW: Tensor, *geometry: object) -> Tensor:
    from samplewise.kernels import conv_norm

    return _called(conv_norm.conv_sq_norms)(x_BCHW, g_BOHW, *geometry)


def conv_gram_sq_norms(x_BCHW: Tensor, g_BOHW: Tensor, *geometry: object) -> tuple[Tensor, Tensor]:
    from samplewise.kernels import conv_gram_norm

    return _called(conv_gram_norm.conv_gram_sq_norms)(x_BCHW, g_BOHW, *geometry)


def conv_per_sample(x_BCHW: Tensor, g_BOHW: Tensor, *geometry: object) -> Tensor:
    from samplewise.kernels import conv_norm

    return _called(conv_norm.conv_per_sample)(x_BCHW, g_BOHW, *geometry)


def depthwise_per_sample(x_BCHW: Tensor, g_BOHW: Tensor, *geometry: object) -> Tensor:
    from samplewise.kernels import depthwise

    return _called(depthwise.depthwise_per_sample)(x_BCHW, g_BOHW, *geometry)
