"""Convolution weights: outer products over patches that are built only when an answer needs them."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from samplewise.factors.base import Factor, flat, wide
from samplewise.factors.outer import Outer


@dataclass(frozen=True)
class Geometry:
    """A convolution but for its weights: one entry a spatial dimension, first dimension first."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    """(before, after)"""
    dilation: tuple[int, ...]
    groups: int


class Patches(Factor):
    """G[b] = sum over output positions of g ⊗ the patch of x under the kernel, per group.

    `x_BRC` [B, R, C, *S] and `g_BRO` [B, R, O, *L]: R images a sample (1 in the ordinary case), S input and L output
    extents. The weight is [O, C / groups, *kernel].
    """

    def __init__(self, x_BRC: Tensor, g_BRO: Tensor, geometry: Geometry):
        self.x, self.g, self.geometry = x_BRC.to(g_BRO.dtype), g_BRO, geometry
        self.num_samples = x_BRC.shape[0]
        self.shape = (g_BRO.shape[2], x_BRC.shape[2] // geometry.groups, *geometry.kernel)

    def materialize(self) -> Tensor:
        parts = [part.outer().materialize() for _, part in self.chunks() if isinstance(part, Patches)]
        return torch.cat(parts) if len(parts) != 1 else parts[0]

    def select(self, samples: Tensor | slice) -> "Patches":
        return Patches(self.x[samples], self.g[samples], self.geometry)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.x, self.g

    def elements_per_sample(self) -> int:
        R, positions = self.g.shape[1], self.g.shape[3:].numel()
        return max(1, R * positions * self.x.shape[2] * torch.Size(self.geometry.kernel).numel())

    def sq_norms(self) -> Tensor:
        return torch.cat([part.outer().sq_norms() for _, part in self.chunks() if isinstance(part, Patches)])

    def weighted_sum(self, w_B: Tensor) -> Tensor:
        if self.x.is_complex():
            return self.outer().weighted_sum(w_B)
        geometry = self.geometry
        x, g = wide(self._padded()).flatten(0, 1), wide(self.g)
        g = (g * w_B.to(g.dtype).reshape(-1, *[1] * (g.ndim - 1))).flatten(0, 1)
        num_spatial = len(geometry.kernel)
        _, gradient, _ = torch.ops.aten.convolution_backward(
            g,
            x,
            x.new_empty(self.shape),
            None,
            geometry.stride,
            [0] * num_spatial,
            geometry.dilation,
            False,
            [0] * num_spatial,
            geometry.groups,
            [False, True, False],
        )
        return gradient

    def materialize_wide(self) -> Tensor:
        return torch.cat([part.outer().materialize_wide() for _, part in self.chunks() if isinstance(part, Patches)])

    def dots(self, direction: Tensor) -> Tensor:
        """<g, x convolved with the direction>: no gradient and no patch built."""
        if self.x.is_complex():
            return super().dots(direction)
        geometry, x, g = self.geometry, wide(self._padded()), wide(self.g)
        convolve = (F.conv1d, F.conv2d, F.conv3d)[len(geometry.kernel) - 1]
        y = convolve(
            x.flatten(0, 1),
            direction.to(x.dtype),
            stride=geometry.stride,
            dilation=geometry.dilation,
            groups=geometry.groups,
        )
        return flat(y.view(g.shape) * g).sum(1)

    def band(self, rows: Tensor) -> "Patches | None":
        return Patches(self.x, self.g[:, :, rows], self.geometry) if self.geometry.groups == 1 else None

    def two_sided(self, left_OK: Tensor | None, right_IK: Tensor | None) -> Tensor:
        parts = [part.outer().two_sided(left_OK, right_IK) for _, part in self.chunks() if isinstance(part, Patches)]
        return torch.cat(parts)

    def outer(self) -> Outer:
        """The same factor with its patches built: a[b, t, group, channel·kernel]."""
        (B, R, C), O, geometry = self.x.shape[:3], self.g.shape[2], self.geometry
        patches = self._padded()
        for d, (kernel, stride, dilation) in enumerate(
            zip(geometry.kernel, geometry.stride, geometry.dilation, strict=True)
        ):
            patches = patches.unfold(3 + d, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
        num_spatial, groups = len(geometry.kernel), geometry.groups
        # [B, R, C, *L, *kernel] -> [B, R, *L, C, *kernel]
        spatial = range(3, 3 + num_spatial)
        patches = patches.permute(0, 1, *spatial, 2, *range(3 + num_spatial, 3 + 2 * num_spatial))
        T = self.g.shape[3:].numel() * R
        a = patches.reshape(B, T, groups, C // groups * torch.Size(geometry.kernel).numel())
        g = self.g.permute(0, 1, *spatial, 2).reshape(B, T, groups, O // groups)
        return Outer(a, g, sizes=self.shape, order=tuple(range(len(self.shape))), shape=self.shape)

    def _padded(self) -> Tensor:
        """x with its padding, cut to what the kernel reaches, as a stride may leave a margin unread."""
        geometry, x = self.geometry, self.x
        if any(side for pair in geometry.padding for side in pair):
            x = F.pad(x, [side for pair in reversed(geometry.padding) for side in pair])
        for d, (kernel, stride, dilation) in enumerate(
            zip(geometry.kernel, geometry.stride, geometry.dilation, strict=True)
        ):
            x = x.narrow(3 + d, 0, max(0, (self.g.shape[3 + d] - 1) * stride + dilation * (kernel - 1) + 1))
        return x
