"""Squared norms of a convolution's gradients from the products of positions, where outputs are few: no patch in memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from samplewise.kernels import reference
from samplewise.kernels.backend import ANY_STRIDES, FUSED, dot, has_kernel, jit, power_of_two, precision, tl
from samplewise.kernels.conv_norm import check_images
from samplewise.kernels.gram_norm import Config, gram_tile, pair_of_tiles, total_kernel
from samplewise.precision import wide_dtype


@torch.library.custom_op("samplewise::conv_gram_sq_norms", mutates_args=(), tags=ANY_STRIDES)
def conv_gram_sq_norms(
    x_BCHW: Tensor,
    g_BOHW: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> tuple[Tensor, Tensor]:
    """(n, m) of `gram_sq_norms` with a the patches under the kernel, summed over groups, in float32 or better.

    With L outputs it takes L²(N + O) products where `conv_sq_norms` takes L·N·O, N the entries of a patch.

    >>> x, g = torch.tensor([[[[1.0, 2.0, 3.0]]]]), torch.tensor([[[[1.0, 10.0, 100.0]]]])
    >>> [round(t.item()) for t in conv_gram_sq_norms(x, g, [1, 3], [1, 1], [0, 1], [1, 1], 1)]
    [148165, 160166]
    """
    check_images(x_BCHW, g_BOHW, groups)
    if not has_kernel(x_BCHW, g_BOHW):
        return reference.conv_gram_sq_norms(x_BCHW, g_BOHW, kernel, stride, padding, dilation, groups)
    return launch(x_BCHW, g_BOHW, kernel, stride, padding, dilation, groups, config(g_BOHW))


@conv_gram_sq_norms.register_fake
def _(x_BCHW, g_BOHW, kernel, stride, padding, dilation, groups):
    n = g_BOHW.new_empty(g_BOHW.shape[0], dtype=wide_dtype(g_BOHW))
    return n, torch.empty_like(n)


def config(g_BOHW: Tensor) -> Config:
    """The cut for these shapes; sums are never split."""
    is_half = g_BOHW.element_size() == 2
    block_t = power_of_two(g_BOHW.shape[2] * g_BOHW.shape[3], least=16, most=64)
    return Config(block_t, 64 if is_half else 32, 1, 4, 3)


def launch(
    x_BCHW: Tensor,
    g_BOHW: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    cut: Config,
) -> tuple[Tensor, Tensor]:
    """(n, m) by the kernel below, cut as told."""
    (B, C, H, W), (_, O, _, W_out) = x_BCHW.shape, g_BOHW.shape
    C, O = C // groups, O // groups
    if C >= 16 and x_BCHW.stride(1) != 1:  # a copy of the image, once, for loads of 16 bytes instead of 2
        x_BCHW = x_BCHW.contiguous(memory_format=torch.channels_last)
    g_BOL, N = g_BOHW.flatten(2), C * kernel[0] * kernel[1]
    L = g_BOL.shape[2]
    num_tiles = -(-L // cut.block_t)
    P = num_tiles * (num_tiles + 1) // 2
    n, m = (g_BOL.new_empty(B * groups, P, dtype=torch.float32) for _ in range(2))
    with torch.cuda.device_of(g_BOL):
        _kernel[(B * groups * P,)](
            x_BCHW, g_BOL, n, m, C, O, H, W, L, W_out, N, kernel[1], *stride, *padding, *dilation, groups,
            *x_BCHW.stride(), *g_BOL.stride(), P,
            IS_ONLY=P == 1, BLOCK_T=cut.block_t, BLOCK_K=cut.block_k, PRECISION=precision(),
            num_warps=cut.num_warps, num_stages=cut.num_stages, **FUSED,
        )  # fmt: skip
        if P > 1:
            parts_n, parts_m = n, m
            n, m = (g_BOL.new_empty(B * groups, 1, dtype=torch.float32) for _ in range(2))
            total_kernel[(B * groups,)](
                parts_n, parts_m, n, m, P, BLOCK=power_of_two(P, least=16, most=1024), num_warps=1, **FUSED
            )
    return (n.view(B), m.view(B)) if groups == 1 else (n.view(B, groups).sum(1), m.view(B, groups).sum(1))


@jit
def _patch(
    x_at, l, n, L, N, C, H, W, W_out, kernel_w, stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w,
    x_stride_c, x_stride_h, x_stride_w,
):  # fmt: skip
    """What entries n = (i, j, c) of the kernel see at outputs l: [l, n], zero outside the image."""
    tap, c = n // C, n % C
    y_of_n, x_of_n = tap // kernel_w * dilation_h - padding_h, tap % kernel_w * dilation_w - padding_w
    y_of_l, x_of_l = l // W_out * stride_h, l % W_out * stride_w
    y, x = y_of_l[:, None] + y_of_n[None, :], x_of_l[:, None] + x_of_n[None, :]
    is_inside = (y >= 0) & (y < H) & (x >= 0) & (x < W) & (l < L)[:, None] & (n < N)[None, :]
    rows = y_of_l.to(tl.int64) * x_stride_h + x_of_l.to(tl.int64) * x_stride_w
    columns = c.to(tl.int64) * x_stride_c + y_of_n.to(tl.int64) * x_stride_h + x_of_n.to(tl.int64) * x_stride_w
    return tl.load(x_at + columns[None, :] + rows[:, None], mask=is_inside, other=0.0)


@jit
def _kernel(
    x_ptr, g_ptr, n_ptr, m_ptr, C, O, H, W, L, W_out, N, kernel_w, stride_h, stride_w, padding_h, padding_w,
    dilation_h, dilation_w, groups, x_stride_b, x_stride_c, x_stride_h, x_stride_w, g_stride_b, g_stride_o, g_stride_l, P,
    IS_ONLY: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: what tiles (i, j) and (j, i) of a group of a sample bring to n and to the root of m."""
    program = tl.program_id(0)
    i, j = pair_of_tiles(program % P)
    group, b = ((program // P) % groups).to(tl.int64), (program // (P * groups)).to(tl.int64)
    x_at = x_ptr + b * x_stride_b + group * C * x_stride_c
    g_at = g_ptr + b * g_stride_b + group * O * g_stride_o
    r = tl.arange(0, BLOCK_T)
    of_a = tl.zeros((BLOCK_T, BLOCK_T), dtype=tl.float32)
    for at in range(0, N, BLOCK_K):
        k = at + tl.arange(0, BLOCK_K)
        left = _patch(
            x_at, i * BLOCK_T + r, k, L, N, C, H, W, W_out, kernel_w, stride_h, stride_w, padding_h, padding_w,
            dilation_h, dilation_w, x_stride_c, x_stride_h, x_stride_w,
        )  # fmt: skip
        if IS_ONLY:
            right = left
        else:
            right = _patch(
                x_at, j * BLOCK_T + r, k, L, N, C, H, W, W_out, kernel_w, stride_h, stride_w, padding_h, padding_w,
                dilation_h, dilation_w, x_stride_c, x_stride_h, x_stride_w,
            )  # fmt: skip
        of_a = dot(left, tl.trans(right), of_a, PRECISION)
    of_g = gram_tile(g_at, g_stride_l, g_stride_o, i, j, L, 0, O, False, BLOCK_T, BLOCK_K, PRECISION)
    n = tl.sum(tl.sum(of_a * of_g, 1), 0)
    is_diagonal = (i == j) & (r[:, None] == r[None, :])
    lengths = tl.sqrt(tl.sum(tl.where(is_diagonal, of_a, 0.0), 1)) * tl.sqrt(tl.sum(tl.where(is_diagonal, of_g, 0.0), 1))
    length = tl.sum(lengths, 0)
    tl.store(n_ptr + program, tl.where(i == j, n, n + n))
    tl.store(m_ptr + program, length * length if IS_ONLY else length)
