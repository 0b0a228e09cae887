"""Gradients of a depthwise convolution's weight for each sample, as plain sums: no patch in memory."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from samplewise.kernels import reference
from samplewise.kernels.backend import ANY_STRIDES, FUSED, has_kernel, jit, num_processors, power_of_two, tl
from samplewise.kernels.conv_norm import check_images
from samplewise.precision import wide_dtype


@torch.library.custom_op("samplewise::depthwise_per_sample", mutates_args=(), tags=ANY_STRIDES)
def depthwise_per_sample(
    x_BCHW: Tensor,
    g_BOHW: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """G of `conv_per_sample` where each channel is a group, [B, O, 1, *kernel], in float32 or better: no product of matrices is in it.

    >>> x, g = torch.tensor([[[[1.0, 2.0, 3.0]], [[4.0, 5.0, 6.0]]]]), torch.tensor([[[[1.0, 10.0]], [[1.0, 10.0]]]])
    >>> depthwise_per_sample(x, g, [1, 2], [1, 1], [0, 0], [1, 1]).flatten().tolist()
    [21.0, 32.0, 54.0, 65.0]
    """
    check_images(x_BCHW, g_BOHW, x_BCHW.shape[1])
    if not has_kernel(x_BCHW, g_BOHW):
        return reference.conv_per_sample(x_BCHW, g_BOHW, kernel, stride, padding, dilation, x_BCHW.shape[1]).contiguous()
    return launch(x_BCHW, g_BOHW, kernel, stride, padding, dilation, config(g_BOHW, kernel))


@depthwise_per_sample.register_fake
def _(x_BCHW, g_BOHW, kernel, stride, padding, dilation):
    return g_BOHW.new_empty(*g_BOHW.shape[:2], 1, *kernel, dtype=wide_dtype(g_BOHW))


class Config(NamedTuple):
    """How the work is cut: one program takes block_o × block_n entries of a gradient [O, N], block_l outputs at a time,
    and of all outputs one part in num_splits."""

    block_o: int
    block_n: int
    block_l: int
    num_splits: int


def config(g_BOHW: Tensor, kernel: Sequence[int]) -> Config:
    """The cut for these shapes. Of a program's tile each of 128 threads keeps 64 entries, or 16 for a kernel of 3×3."""
    O, L, N = g_BOHW.shape[1], g_BOHW.shape[2] * g_BOHW.shape[3], kernel[0] * kernel[1]
    block_o, block_n, block_l = (power_of_two(size, least=1, most=most) for size, most in ((O, 32), (N, 64), (L, 4)))
    num_programs = g_BOHW.shape[0] * -(-O // block_o) * -(-N // block_n)
    num_splits = min(8 * num_processors(g_BOHW) // num_programs, L // (8 * block_l))
    return Config(block_o, block_n, block_l, max(1, num_splits))


def launch(
    x_BCHW: Tensor,
    g_BOHW: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    cut: Config,
) -> Tensor:
    """G by the kernel below, cut as told."""
    (B, C, H, W), (_, O, _, W_out) = x_BCHW.shape, g_BOHW.shape
    if C >= 16 and x_BCHW.stride(1) != 1:  # a copy of the image, once, for loads of 16 bytes instead of 2
        x_BCHW = x_BCHW.contiguous(memory_format=torch.channels_last)
    g_BOL, N = g_BOHW.flatten(2), kernel[0] * kernel[1]
    L = g_BOL.shape[2]
    num_o, num_n = -(-O // cut.block_o), -(-N // cut.block_n)
    parts = g_BOL.new_empty(cut.num_splits, B, O, N, dtype=torch.float32)
    steps = -(-L // (cut.num_splits * cut.block_l))
    with torch.cuda.device_of(g_BOL):
        _kernel[(cut.num_splits * B * num_o * num_n,)](
            x_BCHW, g_BOL, parts, B, O, O // C, H, W, L, W_out, N, kernel[1], *stride, *padding, *dilation,
            *x_BCHW.stride(), *g_BOL.stride(), num_o, num_n, steps * cut.block_l,
            BLOCK_O=cut.block_o, BLOCK_N=cut.block_n, BLOCK_L=cut.block_l, num_warps=4, **FUSED,
        )  # fmt: skip
    G = parts.sum(0) if cut.num_splits > 1 else parts
    return G.view(B, O, 1, *kernel)


@jit
def _kernel(
    x_ptr, g_ptr, out_ptr, B, O, outs_of_channel, H, W, L, W_out, N, kernel_w, stride_h, stride_w, padding_h, padding_w,
    dilation_h, dilation_w, x_stride_b, x_stride_c, x_stride_h, x_stride_w, g_stride_b, g_stride_o, g_stride_l,
    num_o, num_n, part_l, BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """One program: one tile of a sample's gradient [N, O], over `part_l` outputs.

    Sums are kept for each of BLOCK_L outputs and added up at the end, so that no thread waits for another before.
    """
    program = tl.program_id(0)
    tile, sample = program % (num_o * num_n), program // (num_o * num_n)
    split, b = sample // B, (sample % B).to(tl.int64)
    o, n = (tile % num_o) * BLOCK_O + tl.arange(0, BLOCK_O), (tile // num_o) * BLOCK_N + tl.arange(0, BLOCK_N)
    y_of_n, x_of_n = n // kernel_w * dilation_h - padding_h, n % kernel_w * dilation_w - padding_w
    moved = y_of_n.to(tl.int64) * x_stride_h + x_of_n.to(tl.int64) * x_stride_w
    x_at = x_ptr + b * x_stride_b + ((o // outs_of_channel).to(tl.int64) * x_stride_c)[None, :] + moved[:, None]
    g_at = g_ptr + b * g_stride_b + o.to(tl.int64) * g_stride_o
    total = tl.zeros((BLOCK_L, BLOCK_N, BLOCK_O), dtype=tl.float32)
    for at in range(split * part_l, min(split * part_l + part_l, L), BLOCK_L):
        l = at + tl.arange(0, BLOCK_L)
        y_of_l, x_of_l = l // W_out * stride_h, l % W_out * stride_w
        y, x = y_of_l[:, None] + y_of_n[None, :], x_of_l[:, None] + x_of_n[None, :]
        is_inside = (y >= 0) & (y < H) & (x >= 0) & (x < W) & (l < L)[:, None] & (n < N)[None, :]
        rows = y_of_l.to(tl.int64) * x_stride_h + x_of_l.to(tl.int64) * x_stride_w
        is_read = is_inside[:, :, None] & (o < O)[None, None, :]
        patch = tl.load(x_at[None, :, :] + rows[:, None, None], mask=is_read, other=0.0)
        of_g = g_at[None, :] + (l.to(tl.int64) * g_stride_l)[:, None]
        g = tl.load(of_g, mask=(l < L)[:, None] & (o < O)[None, :], other=0.0)
        total += patch.to(tl.float32) * g.to(tl.float32)[:, None, :]
    out = out_ptr + (sample.to(tl.int64) * O + o)[None, :] * N + n[:, None]
    tl.store(out, tl.sum(total, 0), mask=(o < O)[None, :] & (n < N)[:, None])
