"""The weighted sum of all samples' gradients as one product, the weights applied to what is loaded."""

from typing import NamedTuple

import torch
from torch import Tensor

from samplewise.kernels import reference
from samplewise.kernels.backend import check_positions, dot, has_kernel, jit, num_processors, power_of_two, precision, tl
from samplewise.kernels.direct_norm import grouped
from samplewise.precision import wide_dtype


@torch.library.custom_op("samplewise::weighted_sum", mutates_args=())
def weighted_sum(a_BTI: Tensor, g_BTO: Tensor, w_B: Tensor) -> Tensor:
    """sum_b w[b] · sum_t g[b,t] ⊗ a[b,t], [O, I], in float32 or better.

    Samples with w[b] = 0 are left out by selection: what they hold, NaN included, is never read. w·g is taken in float32 and
    rounded to g's dtype for the product.

    >>> a, g = torch.ones(2, 1, 2), torch.tensor([[[3.0]], [[torch.nan]]])
    >>> weighted_sum(a, g, torch.tensor([2.0, 0.0])).tolist()
    [[6.0, 6.0]]
    """
    check_positions(a_BTI, g_BTO)
    if w_B.shape != a_BTI.shape[:1] or w_B.device != a_BTI.device:
        raise ValueError(f"w {tuple(w_B.shape)} on {w_B.device} must have one weight for each of {len(a_BTI)} samples")
    if not has_kernel(a_BTI, g_BTO):
        return reference.weighted_sum(a_BTI, g_BTO, w_B)
    return launch(a_BTI, g_BTO, w_B, config(a_BTI, g_BTO))


@weighted_sum.register_fake
def _(a_BTI: Tensor, g_BTO: Tensor, w_B: Tensor) -> Tensor:
    return g_BTO.new_empty(g_BTO.shape[2], a_BTI.shape[2], dtype=wide_dtype(g_BTO))


class Config(NamedTuple):
    """How the work is cut: one program takes block_o × block_i entries, block_r positions at a time."""

    block_o: int
    block_i: int
    block_r: int
    num_splits: int
    """So many programs share the positions of one tile, and their sums are added after."""
    num_warps: int
    num_stages: int


def config(a_BTI: Tensor, g_BTO: Tensor) -> Config:
    """The cut for these shapes."""
    (B, T, I), O = a_BTI.shape, g_BTO.shape[2]
    is_half = g_BTO.element_size() == 2
    block_o, block_i = (power_of_two(K, least=16, most=128 if is_half else 64) for K in (O, I))
    block_r = power_of_two(B * T, least=16, most=64 if is_half else 32)
    num_tiles = -(-O // block_o) * -(-I // block_i)
    num_splits = max(1, min(2 * num_processors(a_BTI) // num_tiles, B * T // 512))
    return Config(block_o, block_i, block_r, num_splits, 8 if block_o * block_i >= 128 * 128 else 4, 3)


def launch(a_BTI: Tensor, g_BTO: Tensor, w_B: Tensor, cut: Config) -> Tensor:
    """The sum by the kernel below, cut as told."""
    dtype = torch.promote_types(a_BTI.dtype, g_BTO.dtype)
    a_BTI, g_BTO, w_B = a_BTI.to(dtype), g_BTO.to(dtype), w_B.float()
    (B, T, I), O = a_BTI.shape, g_BTO.shape[2]
    num_o, num_i = -(-O // cut.block_o), -(-I // cut.block_i)
    steps = -(-B * T // (cut.num_splits * cut.block_r))
    num_splits = -(-B * T // (steps * cut.block_r))
    sums = g_BTO.new_empty(num_splits, O, I, dtype=torch.float32)
    with torch.cuda.device_of(a_BTI):
        _kernel[(num_o * num_i * num_splits,)](
            a_BTI, g_BTO, w_B, sums, B * T, T, I, O, *a_BTI.stride(), *g_BTO.stride(), w_B.stride(0), num_o, num_i, steps,
            BLOCK_O=cut.block_o, BLOCK_I=cut.block_i, BLOCK_R=cut.block_r, PRECISION=precision(),
            num_warps=cut.num_warps, num_stages=cut.num_stages,
        )  # fmt: skip
    return sums[0] if num_splits == 1 else sums.sum(0)


@jit
def _kernel(
    a_ptr, g_ptr, w_ptr, sums_ptr, R, T, I, O, a_stride_b, a_stride_t, a_stride_i, g_stride_b, g_stride_t, g_stride_o,
    w_stride, num_o, num_i, steps,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: one tile of the sum over some of the R = B·T positions r = (b, t)."""
    program = tl.program_id(0)
    split = program // (num_o * num_i)
    row, column = grouped(program % (num_o * num_i), num_o, num_i, 8)
    o, i = row * BLOCK_O + tl.arange(0, BLOCK_O), column * BLOCK_I + tl.arange(0, BLOCK_I)
    g_at = g_ptr + (o.to(tl.int64) * g_stride_o)[:, None]
    a_at = a_ptr + (i.to(tl.int64) * a_stride_i)[None, :]
    total = tl.zeros((BLOCK_O, BLOCK_I), dtype=tl.float32)
    start = split * steps * BLOCK_R
    for at in range(start, min(start + steps * BLOCK_R, R), BLOCK_R):
        r = at + tl.arange(0, BLOCK_R)
        b, t = (r // T).to(tl.int64), (r % T).to(tl.int64)
        w = tl.load(w_ptr + b * w_stride, mask=r < R, other=0.0)
        counts = w != 0
        g = tl.load(g_at + (b * g_stride_b + t * g_stride_t)[None, :], mask=(o < O)[:, None] & counts[None, :], other=0.0)
        a = tl.load(a_at + (b * a_stride_b + t * a_stride_t)[:, None], mask=counts[:, None] & (i < I)[None, :], other=0.0)
        total = dot((g.to(tl.float32) * w[None, :]).to(g.dtype), a, total, PRECISION)
    entry = (split.to(tl.int64) * O + o)[:, None] * I + i[None, :]
    tl.store(sums_ptr + entry, total, mask=(o < O)[:, None] & (i < I)[None, :])
