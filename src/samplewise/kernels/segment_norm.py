"""Squared norms of an embedding's gradient: positions that looked up one row are added, then squared."""

from typing import NamedTuple

import torch
from torch import Tensor

from samplewise.kernels import reference
from samplewise.kernels.backend import dot, has_kernel, jit, power_of_two, precision, tl
from samplewise.precision import wide_dtype


@torch.library.custom_op("samplewise::segment_sq_norms", mutates_args=())
def segment_sq_norms(ids_BT: Tensor, g_BTD: Tensor, padding_id: int | None = None) -> Tensor:
    """n[b] = sum_v |sum of g[b,t] over t with ids[b,t] = v|², v over all ids but `padding_id`, in float32 or better.

    Each position adds up all that share its id, as a product of (ids_s = ids_t) with g, and the first of them counts. No sort
    and nothing asked of the host; unlike a Gram norm with that matrix it adds before it squares, so that nothing cancels.

    >>> segment_sq_norms(torch.tensor([[0, 2, 0]]), torch.tensor([[[1.0], [2.0], [3.0]]])).tolist()
    [20.0]
    """
    if ids_BT.shape != g_BTD.shape[:2] or g_BTD.ndim != 3 or ids_BT.device != g_BTD.device:
        of_ids, of_g = (f"{tuple(t.shape)} on {t.device}" for t in (ids_BT, g_BTD))
        raise ValueError(f"ids {of_ids} and g {of_g} must be [B, T] and [B, T, D] on one device, for the same B and T")
    if not has_kernel(g_BTD):
        return reference.segment_sq_norms(ids_BT, g_BTD, padding_id)
    return launch(ids_BT, g_BTD, padding_id, config(g_BTD))


@segment_sq_norms.register_fake
def _(ids_BT: Tensor, g_BTD: Tensor, padding_id: int | None = None) -> Tensor:
    return g_BTD.new_empty(g_BTD.shape[0], dtype=wide_dtype(g_BTD))


class Config(NamedTuple):
    """How the work is cut: one program takes block_t × block_d sums, block_s positions at a time."""

    block_t: int
    block_d: int
    block_s: int
    num_warps: int
    num_stages: int


def config(g_BTD: Tensor) -> Config:
    """The cut for these shapes."""
    _, T, D = g_BTD.shape
    is_half = g_BTD.element_size() == 2
    block_t, block_d = power_of_two(T, least=16, most=64), power_of_two(D, least=16, most=128 if is_half else 64)
    return Config(block_t, block_d, power_of_two(T, least=16, most=64 if is_half else 32), 4, 3)


def launch(ids_BT: Tensor, g_BTD: Tensor, padding_id: int | None, cut: Config) -> Tensor:
    """n by the kernel below, cut as told."""
    B, T, D = g_BTD.shape
    num_t, num_d = -(-T // cut.block_t), -(-D // cut.block_d)
    parts = g_BTD.new_empty(B, num_t * num_d, dtype=torch.float32)
    with torch.cuda.device_of(g_BTD):
        _kernel[(B * num_t * num_d,)](
            ids_BT, g_BTD, parts, T, D, *ids_BT.stride(), *g_BTD.stride(), num_t, num_d, padding_id or 0,
            HAS_PADDING=padding_id is not None, BLOCK_T=cut.block_t, BLOCK_D=cut.block_d, BLOCK_S=cut.block_s,
            PRECISION=precision(), num_warps=cut.num_warps, num_stages=cut.num_stages,
        )  # fmt: skip
    return parts.sum(1)


@jit
def _kernel(
    ids_ptr, g_ptr, parts_ptr, T, D, ids_stride_b, ids_stride_t, g_stride_b, g_stride_t, g_stride_d, num_t, num_d, padding_id,
    HAS_PADDING: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: for some positions t the sum of g over all s with t's id, squared where t is the first of them."""
    program = tl.program_id(0)
    b = (program // (num_t * num_d)).to(tl.int64)
    tile = program % (num_t * num_d)
    t, d = (tile // num_d) * BLOCK_T + tl.arange(0, BLOCK_T), (tile % num_d) * BLOCK_D + tl.arange(0, BLOCK_D)
    ids_ptr += b * ids_stride_b
    ids = tl.load(ids_ptr + t.to(tl.int64) * ids_stride_t, mask=t < T, other=0)
    g_at = g_ptr + b * g_stride_b + (d.to(tl.int64) * g_stride_d)[None, :]
    sums = tl.zeros((BLOCK_T, BLOCK_D), dtype=tl.float32)
    num_before = tl.zeros((BLOCK_T,), dtype=tl.int32)
    for at in range(0, T, BLOCK_S):
        s = at + tl.arange(0, BLOCK_S)
        others = tl.load(ids_ptr + s.to(tl.int64) * ids_stride_t, mask=s < T, other=0)
        is_row = (s < T) & (others != padding_id) if HAS_PADDING else s < T  # what padding holds is never read
        is_same = (ids[:, None] == others[None, :]) & is_row[None, :]
        num_before += tl.sum((is_same & (s[None, :] < t[:, None])).to(tl.int32), 1)
        g = tl.load(g_at + (s.to(tl.int64) * g_stride_t)[:, None], mask=is_row[:, None] & (d < D)[None, :], other=0.0)
        sums = dot(is_same.to(tl.float32).to(g.dtype), g, sums, PRECISION)
    is_first = (t < T) & (num_before == 0)
    tl.store(parts_ptr + program, tl.sum(tl.sum(tl.where(is_first[:, None], sums * sums, 0.0), 1), 0))
