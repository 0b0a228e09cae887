"""Convolution weights: outer products over patches that are built only when an answer needs them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from samplewise.factors.base import Factor, Hasty, flat, mended, sq_lengths
from samplewise.factors.outer import Outer
from samplewise.fused import conv_gram_sq_norms, conv_per_sample, conv_sq_norms, depthwise_per_sample, has_kernel
from samplewise.plan import Use, norm_route, use_of
from samplewise.precision import HALF, kept_dtype, scaled, wide, wide_dtype

MANY_OUTPUTS = 128
"""From here on gradients are built quicker by gathered patches: 87 µs in place of 204 for 32×32 outputs (64 to 64 channels, 256
images), 35 in place of 46 for 28×28; for 8×8 180 in place of 136 (H200, bfloat16)."""


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
        self._use: Use | None = None

    def materialize(self) -> Tensor:
        if self._has_kernel() and self.g.shape[3:].numel() >= MANY_OUTPUTS:
            return conv_per_sample(*self._images()).reshape(self.num_samples, *self.shape)
        if self._is_depthwise():
            return self.materialize_wide().to(self.g.dtype)
        if self._is_quicker_as_groups():
            return self._materialize_as_groups()
        parts = [part.outer().materialize() for _, part in self.chunks() if isinstance(part, Patches)]
        return torch.cat(parts) if len(parts) != 1 else parts[0]

    def use(self) -> Use:
        if self._use is None:
            self._use = self._found_use()
        return self._use

    def _found_use(self) -> Use:
        O, I, *kernel = self.shape
        T, groups = self.g.shape[1] * self.g.shape[3:].numel(), self.geometry.groups
        held = sum(t.numel() * t.element_size() for t in self.tensors())
        I *= torch.Size(kernel).numel()
        sizes = (self.num_samples, T, groups, I, O // groups, self.g.element_size(), kept_dtype(self.g).itemsize, held)
        return use_of(*sizes, is_patched=True, gathers=self._has_kernel() or self._is_depthwise())

    def select(self, samples: Tensor | slice) -> "Patches":
        return Patches(self.x[samples], self.g[samples], self.geometry)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.x, self.g

    def elements_per_sample(self) -> int:
        R, positions = self.g.shape[1], self.g.shape[3:].numel()
        return max(1, R * positions * self.x.shape[2] * torch.Size(self.geometry.kernel).numel())

    def sq_norms(self, route: str | None = None) -> Tensor:
        return mended([self.hasty_sq_norms(route)])[0]

    def hasty_sq_norms(self, route: str | None = None) -> Hasty:
        by_gram = (route or norm_route(self.use())) == "gram"
        if self._has_kernel():
            if by_gram:
                return Hasty.of_terms(*conv_gram_sq_norms(*self._images()), self._direct_sq_norms_of)
            return Hasty(conv_sq_norms(*self._images()))
        if not by_gram and self._is_depthwise():
            return Hasty(sq_lengths(self.materialize_wide()))
        if not by_gram and self._is_quicker_as_groups():
            return Hasty(super().sq_norms())
        return Hasty(torch.cat([part.outer().sq_norms(route) for _, part in self.chunks() if isinstance(part, Patches)]))

    def weighted_sum(self, w_B: Tensor, *, rounded: bool = False) -> Tensor:
        if self.x.is_complex():
            return self.outer().weighted_sum(w_B)
        g, form = (
            (self.g, lambda x: x.flatten(0, 1))
            if self.g.is_cuda and rounded
            else (wide(self.g), lambda x: wide(x).flatten(0, 1))
        )
        g = scaled(g, w_B.reshape(-1, *[1] * (g.ndim - 1)).to(wide_dtype(g))).flatten(0, 1)
        return self._weight_gradient(form, g, self.shape, self.geometry.groups)

    def materialize_wide(self) -> Tensor:
        if self._is_depthwise():
            *images, _ = self._images()
            return depthwise_per_sample(*images).reshape(self.num_samples, *self.shape)
        if self.g.dtype not in HALF:
            return self.materialize()
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
        """The same factor with its patches built: a[b, t, group, channel·kernel].

        In memory positions come last, so that whole rows of the image are copied: for 32 channels of 16×16 and a 3×3 kernel
        5.5 ms where channels last took 14.6 (B = 64, Xeon, 2 threads).
        """
        (B, R, C), O, geometry = self.x.shape[:3], self.g.shape[2], self.geometry
        patches = self._padded()
        for d, (kernel, stride, dilation) in enumerate(
            zip(geometry.kernel, geometry.stride, geometry.dilation, strict=True)
        ):
            patches = patches.unfold(3 + d, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
        num_spatial, groups = len(geometry.kernel), geometry.groups
        # [B, R, C, *L, *kernel] -> [B, C, *kernel, R, *L]
        spatial = range(3, 3 + num_spatial)
        patches = patches.permute(0, 2, *range(3 + num_spatial, 3 + 2 * num_spatial), 1, *spatial)
        T = self.g.shape[3:].numel() * R
        a = patches.reshape(B, groups, C // groups * torch.Size(geometry.kernel).numel(), T)
        g = self.g.transpose(1, 2).reshape(B, groups, O // groups, T)
        order = tuple(range(len(self.shape)))
        return Outer(a.permute(0, 3, 1, 2), g.permute(0, 3, 1, 2), sizes=self.shape, order=order, shape=self.shape)

    def _has_kernel(self) -> bool:
        """Whether patches are best gathered as they are read.

        256 images of 64 to 64 channels of 32×32, 3×3, have their norms in 94 µs, and in 212 by patches in memory; 256 to 256 of
        8×8 by Gram matrices in 25, and in 67; but 32 images of 3 channels, 7×7, in 878, and in 438 (H200, bfloat16).
        """
        return self.shape[1] >= 16 and self._are_images() and has_kernel(self.x, self.g)

    def _is_depthwise(self) -> bool:
        """Whether each channel is a group, so that gradients are plain sums: 54 µs for 32 images of 384 channels of 14×14, 7×7, and
        516 by patches in memory (H200, bfloat16). For 4 channels a group such sums took 509 µs where patches took 242."""
        return self.geometry.groups == self.x.shape[2] > 1 and self._are_images() and has_kernel(self.x, self.g)

    def _are_images(self) -> bool:
        return self.g.shape[1] == 1 and len(self.geometry.kernel) <= 2

    def _images(self) -> tuple:
        """x, g and the geometry as the kernels take them: one image a sample, with a height of 1 where it has none."""
        geometry, x, g = self.geometry, self.x[:, 0], self.g[:, 0]
        before = tuple(before for before, _ in geometry.padding)
        extents = (geometry.kernel, geometry.stride, before, geometry.dilation)
        if len(geometry.kernel) == 1:
            x, g = x.unsqueeze(2), g.unsqueeze(2)
            extents = tuple((fill, *extent) for fill, extent in zip((1, 1, 0, 1), extents, strict=True))
        return x, g, *extents, geometry.groups

    def _direct_sq_norms_of(self, samples: Tensor) -> Tensor:
        return self.select(samples).sq_norms("direct")

    def _is_quicker_as_groups(self) -> bool:
        """Whether the samples' gradients are best taken as one convolution in which every sample is a group.

        oneDNN has it for float32 on the CPU: 64 samples, 32 to 64 channels of 16×16, 3×3, 3.7 ms beside 5.5 by patches and
        3.4 for the gradient of the whole batch. It loses where channels are few (3: 4.0 and 1.8) or positions (7×7).
        """
        if self.x.device.type != "cpu" or self.g.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
            return False
        channels, positions = self.shape[1], self.g.shape[3:].numel()
        return (
            len(self.geometry.kernel) > 1
            and max(self.shape[2:]) > 1
            and (channels == 1 or channels >= 8)
            and positions >= 64
        )

    def _materialize_as_groups(self) -> Tensor:
        B, O = self.num_samples, self.g.shape[2]
        one_image = lambda t: t.transpose(0, 1).flatten(1, 2)
        G = self._weight_gradient(one_image, one_image(self.g), (B * O, *self.shape[1:]), B * self.geometry.groups)
        return G.reshape(B, *self.shape)

    def _weight_gradient(self, form: Callable[[Tensor], Tensor], g: Tensor, shape: tuple[int, ...], groups: int) -> Tensor:
        """The gradient of a weight of this shape for a batch of images `form(x)` and gradients g of their results."""
        geometry, none = self.geometry, [0] * len(self.geometry.kernel)
        x, padding = self.x, [before for before, _ in geometry.padding]
        if not self._is_ordinary():
            x, padding = self._padded(), none
        x = form(x)
        weight, wanted = x.new_empty(shape), [False, True, False]
        _, gradient, _ = torch.ops.aten.convolution_backward(
            g, x, weight, None, geometry.stride, padding, geometry.dilation, False, none, groups, wanted
        )
        return gradient

    def _is_ordinary(self) -> bool:
        """Whether both sides are padded alike and g covers all that the kernel reaches, as a transposed convolution's may not."""
        geometry = self.geometry
        reach = [dilation * (kernel - 1) for kernel, dilation in zip(geometry.kernel, geometry.dilation, strict=True)]
        padded = [S + before + after for S, (before, after) in zip(self.x.shape[3:], geometry.padding, strict=True)]
        natural = [(S - r - 1) // stride + 1 for S, r, stride in zip(padded, reach, geometry.stride, strict=True)]
        return all(before == after for before, after in geometry.padding) and natural == list(self.g.shape[3:])

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
