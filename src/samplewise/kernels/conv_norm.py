"""Gradients of a convolution's weight for each sample, and their squared norms, by patches that are gathered as they are read."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from samplewise.kernels import reference
from samplewise.kernels.backend import ANY_STRIDES, FUSED, dot, has_kernel, jit, num_processors, power_of_two, precision, tl
from samplewise.precision import wide_dtype


@torch.library.custom_op("samplewise::conv_per_sample", mutates_args=(), tags=ANY_STRIDES)
def conv_per_sample(
    x_BCHW: Tensor,
    g_BOHW: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """G[b,o,c,i,j] = sum_{y,x} g[b,o,y,x] · image[b, c, y·stride + i·dilation - padding, x·...], [B, O, C/groups, *kernel].

    Two spatial dimensions (one is two with a height of 1). `padding` is what lies before the image; what lies after it follows
    from g. Added in float32, given in g's dtype, channels last in memory.

    >>> x, g = torch.tensor([[[[1.0, 2.0, 3.0]]]]), torch.tensor([[[[1.0, 10.0, 100.0]]]])
    >>> conv_per_sample(x, g, [1, 3], [1, 1], [0, 1], [1, 1], 1).flatten().tolist()
    [210.0, 321.0, 32.0]
    """
    check_images(x_BCHW, g_BOHW, groups)
    if not has_kernel(x_BCHW, g_BOHW):
        return reference.conv_per_sample(x_BCHW, g_BOHW, kernel, stride, padding, dilation, groups).to(g_BOHW.dtype)
    G = _empty_gradients(x_BCHW, g_BOHW, kernel, groups)
    return launch(x_BCHW, g_BOHW, kernel, stride, padding, dilation, groups, config(x_BCHW, g_BOHW, kernel, groups), G)


@torch.library.custom_op("samplewise::conv_sq_norms", mutates_args=(), tags=ANY_STRIDES)
def conv_sq_norms(
    x_BCHW: Tensor,
    g_BOHW: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """n[b] = |G[b]|² of `conv_per_sample`, in float32 or better, no gradient stored."""
    check_images(x_BCHW, g_BOHW, groups)
    if not has_kernel(x_BCHW, g_BOHW):
        return reference.conv_sq_norms(x_BCHW, g_BOHW, kernel, stride, padding, dilation, groups)
    cut = config(x_BCHW, g_BOHW, kernel, groups)
    return launch(x_BCHW, g_BOHW, kernel, stride, padding, dilation, groups, cut)


@conv_per_sample.register_fake
def _(x_BCHW, g_BOHW, kernel, stride, padding, dilation, groups):
    return _empty_gradients(x_BCHW, g_BOHW, kernel, groups)


@conv_sq_norms.register_fake
def _(x_BCHW, g_BOHW, kernel, stride, padding, dilation, groups):
    return g_BOHW.new_empty(g_BOHW.shape[0], dtype=wide_dtype(g_BOHW))


def _empty_gradients(x_BCHW: Tensor, g_BOHW: Tensor, kernel: Sequence[int], groups: int) -> Tensor:
    """[B, O, C/groups, *kernel], in memory [B, O, *kernel, C/groups], as the tiles of the product are written.

    The weight's own order would scatter every store: so written, 256 samples of 256 to 256 channels of 8×8 took 2,278 µs where
    unfold and bmm take 136 (H200).
    """
    B, O, C = g_BOHW.shape[0], g_BOHW.shape[1], x_BCHW.shape[1]
    return g_BOHW.new_empty(B, O, *kernel, C // groups).permute(0, 1, 4, 2, 3)


def check_images(x_BCHW: Tensor, g_BOHW: Tensor, groups: int) -> None:
    """Raises where image and gradient do not belong together, which a kernel would read past."""
    fit = x_BCHW.ndim == g_BOHW.ndim == 4 and len(x_BCHW) == len(g_BOHW) and x_BCHW.device == g_BOHW.device
    if not fit or x_BCHW.shape[1] % groups or g_BOHW.shape[1] % groups:
        of_x, of_g = (f"{tuple(t.shape)} on {t.device}" for t in (x_BCHW, g_BOHW))
        raise ValueError(
            f"x {of_x} and g {of_g} must be [B, C, H, W] and [B, O, H', W'] on one device, for the same B, with C and O "
            f"multiples of groups = {groups}"
        )


class Config(NamedTuple):
    """How the work is cut: one program takes block_o × block_n entries of a gradient [O, N], block_l outputs at a time,
    and of all outputs one part in num_splits."""

    block_o: int
    block_n: int
    block_l: int
    num_splits: int
    num_warps: int
    num_stages: int


def config(x_BCHW: Tensor, g_BOHW: Tensor, kernel: Sequence[int], groups: int) -> Config:
    """The cut for these shapes."""
    is_half = g_BOHW.element_size() == 2
    L, N = g_BOHW.shape[2] * g_BOHW.shape[3], x_BCHW.shape[1] // groups * kernel[0] * kernel[1]
    block_o = power_of_two(g_BOHW.shape[1] // groups, least=16, most=128)
    block_n = power_of_two(N, least=16, most=128 if is_half and block_o < 128 else 64)
    block_l = power_of_two(L, least=16, most=64 if is_half else 32)
    num_programs = g_BOHW.shape[0] * groups * -(-g_BOHW.shape[1] // groups // block_o) * -(-N // block_n)
    num_splits = min(4 * num_processors(g_BOHW) // num_programs, L // (8 * block_l))
    return Config(block_o, block_n, block_l, max(1, num_splits), 4, 3)


def launch(
    x_BCHW: Tensor,
    g_BOHW: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    cut: Config,
    G: Tensor | None = None,
) -> Tensor:
    """n by the kernel below, cut as told; or G, where one is given to be filled ([B, O, *kernel, C/groups] in memory)."""
    (B, C, H, W), (_, O, _, W_out) = x_BCHW.shape, g_BOHW.shape
    C, O = C // groups, O // groups
    if C >= 16 and x_BCHW.stride(1) != 1:  # a copy of the image, once, for loads of 16 bytes instead of 2
        x_BCHW = x_BCHW.contiguous(memory_format=torch.channels_last)
    dtype = torch.promote_types(x_BCHW.dtype, g_BOHW.dtype)
    x_BCHW, g_BOL = x_BCHW.to(dtype), g_BOHW.to(dtype).flatten(2)
    N = C * kernel[0] * kernel[1]
    num_o, num_n = -(-O // cut.block_o), -(-N // cut.block_n)
    num_tiles, L = groups * num_o * num_n, g_BOL.shape[2]
    is_norm, is_split = G is None and cut.num_splits == 1, cut.num_splits > 1
    parts = g_BOL.new_empty((cut.num_splits, B, groups * O, N) if is_split else (B, num_tiles), dtype=torch.float32)
    out = parts if G is None or is_split else G
    steps = -(-L // (cut.num_splits * cut.block_l))
    with torch.cuda.device_of(g_BOL):
        _kernel[(cut.num_splits * B * num_tiles,)](
            x_BCHW, g_BOL, out, B, C, O, H, W, L, W_out, N, kernel[1], *stride, *padding, *dilation, groups,
            *x_BCHW.stride(), *g_BOL.stride(), num_o, num_n, steps * cut.block_l,
            IS_NORM=is_norm, BLOCK_O=cut.block_o, BLOCK_N=cut.block_n, BLOCK_L=cut.block_l, PRECISION=precision(),
            num_warps=cut.num_warps, num_stages=cut.num_stages, **FUSED,
        )  # fmt: skip
    if not is_split:
        return parts.sum(1) if G is None else G
    total = parts.sum(0)
    if G is None:
        return total.square().sum((1, 2))
    return G.copy_(total.view(B, groups * O, *kernel, C).permute(0, 1, 4, 2, 3))


@jit
def _kernel(
    x_ptr, g_ptr, out_ptr, B, C, O, H, W, L, W_out, N, kernel_w, stride_h, stride_w, padding_h, padding_w,
    dilation_h, dilation_w, groups, x_stride_b, x_stride_c, x_stride_h, x_stride_w, g_stride_b, g_stride_o, g_stride_l,
    num_o, num_n, part_l,
    IS_NORM: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: one tile of a sample's gradient [O, N] of a group, over `part_l` outputs, stored or squared and summed.

    C, O and N are of one group. Columns n run over (i, j, c), the channel fastest, so that they are adjacent in an image whose
    channels are; an entry (o, n) multiplies g[o, l] with the image at y = y(l)·stride + i·dilation - padding, and x alike.
    """
    program = tl.program_id(0)
    tile = program % (num_o * num_n)
    group, sample = (program // (num_o * num_n)) % groups, program // (num_o * num_n * groups)
    split, b = sample // B, (sample % B).to(tl.int64)
    o, n = (tile % num_o) * BLOCK_O + tl.arange(0, BLOCK_O), (tile // num_o) * BLOCK_N + tl.arange(0, BLOCK_N)
    tap, c = n // C, n % C
    y_of_n, x_of_n = tap // kernel_w * dilation_h - padding_h, tap % kernel_w * dilation_w - padding_w
    channel = (group * C + c).to(tl.int64)
    x_at = (
        x_ptr + b * x_stride_b + channel * x_stride_c + y_of_n.to(tl.int64) * x_stride_h + x_of_n.to(tl.int64) * x_stride_w
    )
    g_at = g_ptr + b * g_stride_b + (group * O + o).to(tl.int64) * g_stride_o
    total = tl.zeros((BLOCK_O, BLOCK_N), dtype=tl.float32)
    for at in range(split * part_l, min(split * part_l + part_l, L), BLOCK_L):
        l = at + tl.arange(0, BLOCK_L)
        y_of_l, x_of_l = l // W_out * stride_h, l % W_out * stride_w
        y, x = y_of_l[:, None] + y_of_n[None, :], x_of_l[:, None] + x_of_n[None, :]
        is_inside = (y >= 0) & (y < H) & (x >= 0) & (x < W) & (l < L)[:, None] & (n < N)[None, :]
        rows = y_of_l.to(tl.int64) * x_stride_h + x_of_l.to(tl.int64) * x_stride_w
        patch = tl.load(x_at[None, :] + rows[:, None], mask=is_inside, other=0.0)
        of_g = g_at[:, None] + (l.to(tl.int64) * g_stride_l)[None, :]
        g = tl.load(of_g, mask=(o < O)[:, None] & (l < L)[None, :], other=0.0)
        total = dot(g, patch, total, PRECISION)
    if IS_NORM:
        tl.store(out_ptr + program, tl.sum(tl.sum(total * total, 1), 0))
    else:
        row = (sample.to(tl.int64) * groups + group) * O + o
        out = out_ptr + row[:, None] * N + n[None, :]
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=(o < O)[:, None] & (n < N)[None, :])
