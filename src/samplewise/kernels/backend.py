"""Triton where it is installed, and which tensors its kernels take."""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None

if TYPE_CHECKING:
    import triton.language as tl
else:  # without it kernels are read and never run
    tl = import_module("triton.language") if HAS_TRITON else SimpleNamespace(constexpr=bool)

jit: Any = import_module("triton").jit if HAS_TRITON else lambda kernel: kernel

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton reads it as it is imported: kernels then run in Python, on tensors of the CPU."""

IN_NUMPY = tl.constexpr(IS_INTERPRETED)

ANY_STRIDES = (torch.Tag.flexible_layout,)
"""The compiler hands tensors over as they lie. Else it would copy them to the strides they had in the trace: the gradient of
GPT-2's logits, whose rows it aligns, 393 MB of a step's 3,000 and 538 µs for its norms in place of 210 (B16 T256, H200)."""

FUSED = {"enable_fp_fusion": True}
"""For all kernels: a product and the sum that it goes into are one instruction. Triton 3.9 warns where a launch does not say so, and
from 3.10 on they would be two."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@jit
def dot(x, y, total, PRECISION: tl.constexpr):
    """total + x @ y, added in float32."""
    if IN_NUMPY:  # which has no bfloat16
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, total, input_precision=PRECISION)


def has_kernel(*tensors: Tensor) -> bool:
    """Whether the kernels take these tensors; else the reference does."""
    if not HAS_TRITON or not all(t.is_cuda or IS_INTERPRETED for t in tensors):
        return False
    return all(t.dtype in DTYPES and t.numel() > 0 for t in tensors)


def check_positions(a_BTI: Tensor, g_BTO: Tensor) -> None:
    """Raises where a and g are not rows of the same samples and positions, which a kernel would read past."""
    if not a_BTI.ndim == g_BTO.ndim == 3 or a_BTI.shape[:2] != g_BTO.shape[:2] or a_BTI.device != g_BTO.device:
        of_a, of_g = (f"{tuple(t.shape)} on {t.device}" for t in (a_BTI, g_BTO))
        raise ValueError(f"a {of_a} and g {of_g} must be [B, T, I] and [B, T, O] on one device, for the same B and T")


def precision() -> str:
    """How products of float32 use the tensor cores: rounded to tf32 where torch's own may be, else in three parts that keep
    float32's digits."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def num_processors(t: Tensor) -> int:
    """How many programs the device runs side by side, at one a multiprocessor."""
    return _num_processors(t.device.index) if t.is_cuda else 4


@cache
def _num_processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def power_of_two(n: int, *, least: int, most: int) -> int:
    """The least power of two that is at least n, within bounds that are powers of two themselves.

    >>> [power_of_two(n, least=16, most=128) for n in (1, 17, 197)]
    [16, 32, 128]
    """
    return min(max(least, 1 << max(0, n - 1).bit_length()), most)
