"""Answers by kernels, which are imported when a GPU is first asked."""

import os

from torch import Tensor

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def has_kernel(*tensors: Tensor) -> bool:
    """Whether there are kernels for these tensors."""
    if not (IS_INTERPRETED or all(t.is_cuda for t in tensors)):
        return False
    from samplewise.kernels import backend

    return backend.has_kernel(*tensors)


def gram_sq_norms(a_BTI: Tensor, g_BTO: Tensor) -> tuple[Tensor, Tensor]:
    from samplewise.kernels import gram_norm

    return gram_norm.gram_sq_norms(a_BTI, g_BTO)


def direct_sq_norms(a_BTI: Tensor, g_BTO: Tensor) -> Tensor:
    from samplewise.kernels import direct_norm

    return direct_norm.direct_sq_norms(a_BTI, g_BTO)


def conv_sq_norms(x_BCHW: Tensor, g_BOHW: Tensor, *geometry: object) -> Tensor:
    from samplewise.kernels import conv_norm

    return conv_norm.conv_sq_norms(x_BCHW, g_BOHW, *geometry)  # type: ignore[arg-type]


def conv_gram_sq_norms(x_BCHW: Tensor, g_BOHW: Tensor, *geometry: object) -> tuple[Tensor, Tensor]:
    from samplewise.kernels import conv_gram_norm

    return conv_gram_norm.conv_gram_sq_norms(x_BCHW, g_BOHW, *geometry)  # type: ignore[arg-type]


def conv_per_sample(x_BCHW: Tensor, g_BOHW: Tensor, *geometry: object) -> Tensor:
    from samplewise.kernels import conv_norm

    return conv_norm.conv_per_sample(x_BCHW, g_BOHW, *geometry)  # type: ignore[arg-type]


def depthwise_per_sample(x_BCHW: Tensor, g_BOHW: Tensor, *geometry: object) -> Tensor:
    from samplewise.kernels import depthwise

    return depthwise.depthwise_per_sample(x_BCHW, g_BOHW, *geometry)  # type: ignore[arg-type]
