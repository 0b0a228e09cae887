"""What each kernel means: the mathematics in torch, in float32 or better."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from samplewise.precision import wide


def gram_sq_norms(a_BTI: Tensor, g_BTO: Tensor) -> tuple[Tensor, Tensor]:
    """(n, m): n[b] = sum_{s,t} <a_s, a_t> <g_s, g_t> = |sum_t g_t ⊗ a_t|², and m[b] = (sum_t |a_t| |g_t|)², which bounds it."""
    a, g = wide(a_BTI), wide(g_BTO)
    lengths_BT = torch.linalg.vector_norm(a, dim=2) * torch.linalg.vector_norm(g, dim=2)
    return ((a @ a.mT) * (g @ g.mT)).sum((1, 2)), lengths_BT.sum(1).square()


def direct_sq_norms(a_BTI: Tensor, g_BTO: Tensor) -> Tensor:
    """n[b] = |sum_t g_t ⊗ a_t|²."""
    return (wide(g_BTO).mT @ wide(a_BTI)).square().sum((1, 2))


def conv_per_sample(
    x_BCHW: Tensor,
    g_BOHW: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """G[b,o,c,i,j] = sum_{y,x} g[b,o,y,x] · image[b, c, y·stride + i·dilation - padding, x·...], zero outside the image.

    c runs over the channels of o's group; `padding` is what lies before the image, what lies after it follows from g.
    """
    B, C, O = len(x_BCHW), x_BCHW.shape[1], g_BOHW.shape[1]
    g = wide(g_BOHW).reshape(B, groups, O // groups, -1)
    taps = _taps(wide(x_BCHW), g_BOHW, kernel, stride, padding, dilation)
    of_taps = [(g @ tap.reshape(B, groups, C // groups, -1).mT).reshape(B, O, C // groups) for tap in taps]
    return torch.stack(of_taps, 2).reshape(B, O, *kernel, C // groups).permute(0, 1, 4, 2, 3)


def conv_sq_norms(
    x_BCHW: Tensor,
    g_BOHW: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """n[b] = |G[b]|² of `conv_per_sample`."""
    G = conv_per_sample(x_BCHW, g_BOHW, kernel, stride, padding, dilation, groups)
    return G.square().sum((1, 2, 3, 4))


def conv_gram_sq_norms(
    x_BCHW: Tensor,
    g_BOHW: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> tuple[Tensor, Tensor]:
    """`gram_sq_norms` of the patches under the kernel and g, summed over groups."""
    B, C, O, L = len(x_BCHW), x_BCHW.shape[1], g_BOHW.shape[1], g_BOHW.shape[2:].numel()
    taps = _taps(x_BCHW, g_BOHW, kernel, stride, padding, dilation)
    a = torch.stack([tap.reshape(B, groups, C // groups, L) for tap in taps], 2).flatten(2, 3)
    g = g_BOHW.reshape(B, groups, O // groups, L)
    n, m = gram_sq_norms(a.flatten(0, 1).mT, g.flatten(0, 1).mT)
    return n.view(B, groups).sum(1), m.view(B, groups).sum(1)


def _taps(
    x_BCHW: Tensor,
    g_BOHW: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[Tensor]:
    """What each entry of the kernel sees at each output: [B, C, H', W'], zero outside the image."""
    sizes, outs = x_BCHW.shape[2:], g_BOHW.shape[2:]
    reached = [(out - 1) * s + d * (k - 1) + 1 for out, s, d, k in zip(outs, stride, dilation, kernel, strict=True)]
    after = [max(0, reach - size - before) for reach, size, before in zip(reached, sizes, padding, strict=True)]
    image = F.pad(x_BCHW, [padding[1], after[1], padding[0], after[0]])
    rows, columns = (
        [slice(i * d, i * d + (out - 1) * s + 1, s) for i in range(k)]
        for out, s, d, k in zip(outs, stride, dilation, kernel, strict=True)
    )
    return [image[:, :, row, column] for row in rows for column in columns]
