"""Squared norms from the products of positions: tiles of both Gram matrices meet in registers."""

from typing import NamedTuple

import torch
from torch import Tensor

from samplewise.kernels import reference
from samplewise.kernels.backend import (
    ANY_STRIDES,
    FUSED,
    check_positions,
    dot,
    has_kernel,
    jit,
    num_processors,
    power_of_two,
    precision,
    tl,
)
from samplewise.precision import wide_dtype


@torch.library.custom_op("samplewise::gram_sq_norms", mutates_args=(), tags=ANY_STRIDES)
def gram_sq_norms(a_BTI: Tensor, g_BTO: Tensor) -> tuple[Tensor, Tensor]:
    """(n, m): n[b] = sum_{s,t} <a_s, a_t> <g_s, g_t> and m[b] = (sum_t |a_t| |g_t|)², in float32 or better.

    No T×T is in memory, and of tiles (i, j) and (j, i) one is computed and counted twice. Where n is small against m, positions
    cancelled and n has lost digits.

    >>> a, g = torch.ones(1, 2, 3), torch.tensor([[[1.0], [-3.0]]])
    >>> [t.tolist() for t in gram_sq_norms(a, g)]
    [[12.0], [48.0]]
    """
    check_positions(a_BTI, g_BTO)
    if not has_kernel(a_BTI, g_BTO):
        return reference.gram_sq_norms(a_BTI, g_BTO)
    return launch(a_BTI, g_BTO, config(a_BTI, g_BTO))


@gram_sq_norms.register_fake
def _(a_BTI: Tensor, g_BTO: Tensor) -> tuple[Tensor, Tensor]:
    n = a_BTI.new_empty(a_BTI.shape[0], dtype=wide_dtype(g_BTO))
    return n, torch.empty_like(n)


class Config(NamedTuple):
    """How the work is cut."""

    block_t: int
    block_k: int
    num_splits: int
    """1: both sums of a tile stay in one program. More: about so many programs share them, by partial tiles in memory."""
    num_warps: int
    num_stages: int


def config(a_BTI: Tensor, g_BTO: Tensor) -> Config:
    """The cut for these shapes, by what was quickest on an H200.

    Tiles of 64 unsplit, where both sums are a few thousand long: B16 T256 768→2304 26 µs, in tiles of 128 by fours 28. Sums as
    long as a vocabulary go in parts of about 6,400, in tiles of 128: 768→50257 537 µs by eights, 830 by twos. Parts also keep
    rounding down: by twos n or m was off by 1.1e-4 of m, by eights less than 1e-4.
    """
    (B, T, I), O = a_BTI.shape, g_BTO.shape[2]
    is_half, is_long, num_programs = g_BTO.element_size() == 2, I + O >= 8192, 2 * num_processors(a_BTI)
    block_t = power_of_two(T, least=16, most=128 if is_half and is_long else 64)
    num_tiles = -(-T // block_t)
    num_pairs = B * num_tiles * (num_tiles + 1) // 2
    if not is_half:  # three products each: programs wait for themselves, and more of them fit
        return Config(block_t, 32, max(1, min(3 * num_programs // num_pairs, (I + O) // 512, 5)), 4, 3)
    if is_long and num_pairs <= num_programs:
        return Config(block_t, 64, max(num_programs // num_pairs, round((I + O) / 6400)), 8 if block_t == 128 else 4, 3)
    if block_t == 128:
        return Config(block_t, 64, 1, 8, 3)
    return Config(block_t, 128, 1, 4, 3) if num_pairs <= num_programs else Config(block_t, 64, 1, 4, 4)


def launch(a_BTI: Tensor, g_BTO: Tensor, cut: Config) -> tuple[Tensor, Tensor]:
    """(n, m) by the kernels below, cut as told."""
    dtype = torch.promote_types(a_BTI.dtype, g_BTO.dtype)
    a_BTI, g_BTO = a_BTI.to(dtype), g_BTO.to(dtype)
    (B, T, I), O = a_BTI.shape, g_BTO.shape[2]
    num_tiles = -(-T // cut.block_t)
    P = num_tiles * (num_tiles + 1) // 2
    sides = (a_BTI, g_BTO, T, I, O, *a_BTI.stride(), *g_BTO.stride())
    is_aligned = a_BTI.stride(1) % 8 == g_BTO.stride(1) % 8 == 0
    blocks = {"IS_ALIGNED": is_aligned, "BLOCK_T": cut.block_t, "BLOCK_K": cut.block_k, "PRECISION": precision()}
    how = {"num_warps": cut.num_warps, "num_stages": cut.num_stages, **FUSED}
    with torch.cuda.device_of(a_BTI):
        if cut.num_splits == 1:
            n, m = (a_BTI.new_empty(B, P, dtype=torch.float32) for _ in range(2))
            _fused_kernel[(B * P,)](*sides, n, m, P, IS_ONLY=P == 1, **blocks, **how)
            if P == 1:
                return n.view(B), m.view(B)
        else:
            steps = -(-(I + O) // (cut.num_splits * cut.block_k))
            num_a, num_g = (-(-K // (steps * cut.block_k)) for K in (I, O))
            tiles = a_BTI.new_empty(B, P, num_a + num_g, cut.block_t, cut.block_t, dtype=torch.float32)
            is_dense = a_BTI.stride(2) == g_BTO.stride(2) == 1
            _partial_kernel[(B * P * (num_a + num_g),)](
                *sides, tiles, P, steps, num_a, num_g, IS_DENSE=is_dense, **blocks, **how
            )
            rows = min(16, cut.block_t)
            num_slabs = cut.block_t // rows
            n, m = (a_BTI.new_empty(B, P * num_slabs, dtype=torch.float32) for _ in range(2))
            _meet_kernel[(B * P * num_slabs,)](
                tiles, n, m, P, num_a, num_g, BLOCK_T=cut.block_t, ROWS=rows, NUM_SLABS=num_slabs, num_warps=4, **FUSED
            )
        (parts_n, parts_m), Q = (n, m), n.shape[1]
        n, m = (a_BTI.new_empty(B, dtype=torch.float32) for _ in range(2))
        total_kernel[(B,)](parts_n, parts_m, n, m, Q, BLOCK=power_of_two(Q, least=16, most=1024), num_warps=1, **FUSED)
        return n, m


@jit
def pair_of_tiles(p):
    """(i, j) with i <= j: the pth of (0,0) (0,1) (1,1) (0,2) ..."""
    j = ((tl.sqrt(8.0 * p.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    j = tl.where(j * (j + 1) // 2 > p, j - 1, j)  # float32's square root may be off by one
    j = tl.where((j + 1) * (j + 2) // 2 <= p, j + 1, j)
    return p - j * (j + 1) // 2, j


@jit
def gram_tile(
    x_ptr, stride_t, stride_k, i, j, T, start, stop,
    IS_ALIGNED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """<x_s, x_t> over k in [start, stop), for s in tile i and t in tile j; start is a multiple of BLOCK_K.

    Where rows are aligned and the bound of columns is seen to be a multiple of 16, columns are loaded by eights; a few that are
    left are a product of their own. GPT-2's head at B16 T256, rows of 50,257 numbers 50,304 apart: 538 → 210 µs (H200). Rows
    that are not aligned only pay for it: 538 → 942.
    """
    s, t, k = i * BLOCK_T + tl.arange(0, BLOCK_T), j * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)
    left = x_ptr + s.to(tl.int64)[:, None] * stride_t
    right = x_ptr + t.to(tl.int64)[:, None] * stride_t
    tile = tl.zeros((BLOCK_T, BLOCK_T), dtype=tl.float32)
    even = stop // 16 * 16 if IS_ALIGNED else stop
    if i == j:  # one load serves both sides
        for at in range(start, even, BLOCK_K):
            columns, is_column = (at + k).to(tl.int64)[None, :] * stride_k, (at + k < even)[None, :]
            x = tl.load(left + columns, mask=(s < T)[:, None] & is_column, other=0.0)
            tile = dot(x, tl.trans(x), tile, PRECISION)
    else:
        for at in range(start, even, BLOCK_K):
            columns, is_column = (at + k).to(tl.int64)[None, :] * stride_k, (at + k < even)[None, :]
            x = tl.load(left + columns, mask=(s < T)[:, None] & is_column, other=0.0)
            y = tl.load(right + columns, mask=(t < T)[:, None] & is_column, other=0.0)
            tile = dot(x, tl.trans(y), tile, PRECISION)
    if even < stop:
        last = even + tl.arange(0, 16)
        columns, is_column = last.to(tl.int64)[None, :] * stride_k, (last < stop)[None, :]
        x = tl.load(left + columns, mask=(s < T)[:, None] & is_column, other=0.0)
        y = tl.load(right + columns, mask=(t < T)[:, None] & is_column, other=0.0)
        tile = dot(x, tl.trans(y), tile, PRECISION)
    return tile


@jit
def _fused_kernel(
    a_ptr, g_ptr, T, I, O, a_stride_b, a_stride_t, a_stride_i, g_stride_b, g_stride_t, g_stride_o, n_ptr, m_ptr, P,
    IS_ONLY: tl.constexpr, IS_ALIGNED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: what tiles (i, j) and (j, i) of a sample bring to n and to the root of m."""
    program = tl.program_id(0)
    b = (program // P).to(tl.int64)
    i, j = pair_of_tiles(program % P)
    of_a = gram_tile(a_ptr + b * a_stride_b, a_stride_t, a_stride_i, i, j, T, 0, I, IS_ALIGNED, BLOCK_T, BLOCK_K, PRECISION)
    of_g = gram_tile(g_ptr + b * g_stride_b, g_stride_t, g_stride_o, i, j, T, 0, O, IS_ALIGNED, BLOCK_T, BLOCK_K, PRECISION)
    n = tl.sum(tl.sum(of_a * of_g, 1), 0)
    r = tl.arange(0, BLOCK_T)
    is_diagonal = (i == j) & (r[:, None] == r[None, :])
    lengths = tl.sqrt(tl.sum(tl.where(is_diagonal, of_a, 0.0), 1)) * tl.sqrt(tl.sum(tl.where(is_diagonal, of_g, 0.0), 1))
    length = tl.sum(lengths, 0)
    tl.store(n_ptr + program, tl.where(i == j, n, n + n))
    tl.store(m_ptr + program, length * length if IS_ONLY else length)


@jit
def _partial_kernel(
    a_ptr, g_ptr, T, I, O, a_stride_b, a_stride_t, a_stride_i, g_stride_b, g_stride_t, g_stride_o,
    tiles_ptr, P, steps, num_a, num_g,
    IS_DENSE: tl.constexpr, IS_ALIGNED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: a tile of one Gram matrix of a sample, summed over one chunk (`steps` blocks) of I or of O, into memory."""
    program = tl.program_id(0)
    p, num_chunks = program % P, num_a + num_g  # programs that read the same chunk run side by side
    c, b = (program // P) % num_chunks, (program // (P * num_chunks)).to(tl.int64)
    i, j = pair_of_tiles(p)
    r = tl.arange(0, BLOCK_T)
    out = tiles_ptr + ((b * P + p) * num_chunks + c) * BLOCK_T * BLOCK_T + r[:, None] * BLOCK_T + r[None, :]
    # Chosen and not branched upon: the loops of two branches would each have their own shared memory.
    is_a = c < num_a
    x_ptr = tl.where(is_a, a_ptr + b * a_stride_b, g_ptr + b * g_stride_b)
    stride_t, K = tl.where(is_a, a_stride_t, g_stride_t), tl.where(is_a, I, O)
    at = tl.where(is_a, c, c - num_a) * steps * BLOCK_K
    stop = min(at + steps * BLOCK_K, K)
    if IS_DENSE:  # loads are wide where the compiler sees that columns are adjacent
        tile = gram_tile(x_ptr, stride_t, 1, i, j, T, at, stop, IS_ALIGNED, BLOCK_T, BLOCK_K, PRECISION)
    else:
        stride_k = tl.where(is_a, a_stride_i, g_stride_o)
        tile = gram_tile(x_ptr, stride_t, stride_k, i, j, T, at, stop, IS_ALIGNED, BLOCK_T, BLOCK_K, PRECISION)
    tl.store(out, tile)


@jit
def _meet_kernel(
    tiles_ptr, n_ptr, m_ptr, P, num_a, num_g,
    BLOCK_T: tl.constexpr, ROWS: tl.constexpr, NUM_SLABS: tl.constexpr,
):  # fmt: skip
    """One program: the chunks of some rows of a pair of tiles are added, then the two Gram matrices meet."""
    program = tl.program_id(0)
    pair = (program // NUM_SLABS).to(tl.int64)
    i, j = pair_of_tiles((program // NUM_SLABS) % P)
    r, t = (program % NUM_SLABS) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_T)
    at = tiles_ptr + pair * (num_a + num_g) * BLOCK_T * BLOCK_T + r[:, None] * BLOCK_T + t[None, :]
    of_a = tl.zeros((ROWS, BLOCK_T), dtype=tl.float32)
    of_g = tl.zeros((ROWS, BLOCK_T), dtype=tl.float32)
    for _ in range(num_a):
        of_a += tl.load(at)
        at += BLOCK_T * BLOCK_T
    for _ in range(num_g):
        of_g += tl.load(at)
        at += BLOCK_T * BLOCK_T
    n = tl.sum(tl.sum(of_a * of_g, 1), 0)
    is_diagonal = (i == j) & (r[:, None] == t[None, :])
    lengths = tl.sqrt(tl.sum(tl.where(is_diagonal, of_a, 0.0), 1)) * tl.sqrt(tl.sum(tl.where(is_diagonal, of_g, 0.0), 1))
    tl.store(n_ptr + program, tl.where(i == j, n, n + n))
    tl.store(m_ptr + program, tl.sum(lengths, 0))


@jit
def total_kernel(parts_n_ptr, parts_m_ptr, n_ptr, m_ptr, num, BLOCK: tl.constexpr):
    """One program: n and m of a sample from their parts, always in the same order."""
    b = tl.program_id(0)
    row, column = b.to(tl.int64) * num, tl.arange(0, BLOCK)
    n = tl.zeros((BLOCK,), dtype=tl.float32)
    length = tl.zeros((BLOCK,), dtype=tl.float32)
    for at in range(0, num, BLOCK):
        n += tl.load(parts_n_ptr + row + at + column, mask=at + column < num, other=0.0)
        length += tl.load(parts_m_ptr + row + at + column, mask=at + column < num, other=0.0)
    total = tl.sum(length, 0)
    tl.store(n_ptr + b, tl.sum(n, 0))
    tl.store(m_ptr + b, total * total)
