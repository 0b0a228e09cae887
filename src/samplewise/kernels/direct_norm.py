"""Squared norms of products that are never stored: tiles of gᵀa are squared in registers."""

from typing import NamedTuple

import torch
from torch import Tensor

from samplewise.kernels import reference
from samplewise.kernels.backend import ANY_STRIDES, FUSED, check_positions, dot, has_kernel, jit, power_of_two, precision, tl
from samplewise.precision import wide_dtype


@torch.library.custom_op("samplewise::direct_sq_norms", mutates_args=(), tags=ANY_STRIDES)
def direct_sq_norms(a_BTI: Tensor, g_BTO: Tensor) -> Tensor:
    """n[b] = |sum_t g_t ⊗ a_t|², in float32 or better; nothing cancels but within one entry.

    >>> direct_sq_norms(torch.ones(1, 2, 3), torch.tensor([[[1.0], [-3.0]]])).tolist()
    [12.0]
    """
    check_positions(a_BTI, g_BTO)
    if not has_kernel(a_BTI, g_BTO):
        return reference.direct_sq_norms(a_BTI, g_BTO)
    return launch(a_BTI, g_BTO, config(a_BTI, g_BTO))


@direct_sq_norms.register_fake
def _(a_BTI: Tensor, g_BTO: Tensor) -> Tensor:
    return a_BTI.new_empty(a_BTI.shape[0], dtype=wide_dtype(g_BTO))


class Config(NamedTuple):
    """How the work is cut: one program takes block_o × block_i entries, block_t positions at a time."""

    block_o: int
    block_i: int
    block_t: int
    num_warps: int
    num_stages: int


def config(a_BTI: Tensor, g_BTO: Tensor) -> Config:
    """The cut for these shapes, within 1 % of the quickest tried on an H200 (360 µs for B4 T2048 2048→8192, bfloat16)."""
    (_, T, I), O = a_BTI.shape, g_BTO.shape[2]
    is_half = g_BTO.element_size() == 2
    block_o = power_of_two(O, least=16, most=128)
    block_i = power_of_two(I, least=16, most=64 if not is_half else 256 if block_o == 128 else 128)
    block_t = power_of_two(T, least=16, most=64 if is_half else 32)
    return Config(block_o, block_i, block_t, 8 if block_o * block_i >= 128 * 128 else 4, 3)


def launch(a_BTI: Tensor, g_BTO: Tensor, cut: Config) -> Tensor:
    """n by the kernel below, cut as told."""
    (B, T, I), O = a_BTI.shape, g_BTO.shape[2]
    num_o, num_i = -(-O // cut.block_o), -(-I // cut.block_i)
    parts = a_BTI.new_empty(B, num_o * num_i, dtype=torch.float32)
    with torch.cuda.device_of(a_BTI):
        _kernel[(B * num_o * num_i,)](
            a_BTI, g_BTO, T, I, O, *a_BTI.stride(), *g_BTO.stride(), parts, num_o, num_i,
            BLOCK_O=cut.block_o, BLOCK_I=cut.block_i, BLOCK_T=cut.block_t, PRECISION=precision(),
            num_warps=cut.num_warps, num_stages=cut.num_stages, **FUSED,
        )  # fmt: skip
    return parts.sum(1)


@jit
def grouped(tile, num_o, num_i, GROUP: tl.constexpr):
    """(row, column) of a tile: GROUP rows of tiles are walked column by column, so that their operands stay in the L2 cache."""
    first = tile // (GROUP * num_i) * GROUP
    num_rows = min(num_o - first, GROUP)
    within = tile % (GROUP * num_i)
    return first + within % num_rows, within // num_rows


@jit
def _kernel(
    a_ptr, g_ptr, T, I, O, a_stride_b, a_stride_t, a_stride_i, g_stride_b, g_stride_t, g_stride_o, parts_ptr, num_o, num_i,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: the sum of squares of one tile of a sample's gradient."""
    program = tl.program_id(0)
    b = (program // (num_o * num_i)).to(tl.int64)
    row, column = grouped(program % (num_o * num_i), num_o, num_i, 8)
    o, i, t = row * BLOCK_O + tl.arange(0, BLOCK_O), column * BLOCK_I + tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_T)
    g_at = g_ptr + b * g_stride_b + o.to(tl.int64)[:, None] * g_stride_o + t.to(tl.int64)[None, :] * g_stride_t
    a_at = a_ptr + b * a_stride_b + t.to(tl.int64)[:, None] * a_stride_t + i.to(tl.int64)[None, :] * a_stride_i
    tile = tl.zeros((BLOCK_O, BLOCK_I), dtype=tl.float32)
    for at in range(0, T, BLOCK_T):
        g = tl.load(g_at, mask=(o < O)[:, None] & (at + t < T)[None, :], other=0.0)
        a = tl.load(a_at, mask=(at + t < T)[:, None] & (i < I)[None, :], other=0.0)
        tile = dot(g, a, tile, PRECISION)
        g_at += tl.cast(g_stride_t, tl.int64) * BLOCK_T
        a_at += tl.cast(a_stride_t, tl.int64) * BLOCK_T
    tl.store(parts_ptr + program, tl.sum(tl.sum(tile * tile, 1), 0))
