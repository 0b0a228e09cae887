"""Convolutions: weights that multiply patches."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from samplewise.factors.dense import Dense
from samplewise.factors.patches import Geometry, Patches
from samplewise.ops.registry import Meeting, rule


def _each(value: Any, num: int) -> tuple[int, ...]:
    """One entry a spatial dimension."""
    return (value,) * num if isinstance(value, int) else tuple(value) * (num if len(value) == 1 else 1)


def _padding(padding: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """(before, after) for each spatial dimension; "same" puts the odd one behind, as torch does."""
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    return tuple((p, p) for p in _each(padding, len(kernel)))


@rule(F.conv1d, F.conv2d, F.conv3d)
def conv(
    meeting: Meeting,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """y = the sum over patches of x under weight, so weight gets g ⊗ patches and bias gets g."""
    if not meeting.is_data(input) or meeting.is_data(weight) or meeting.is_data(bias):
        return NotImplemented
    num_spatial = weight.ndim - 2
    if input.ndim != num_spatial + 2:
        return NotImplemented
    images = meeting.rows(input, features=num_spatial + 1)
    if images is None:
        return NotImplemented
    kernel, dilations = tuple(weight.shape[2:]), _each(dilation, num_spatial)
    geometry = Geometry(kernel, _each(stride, num_spatial), _padding(padding, kernel, dilations), dilations, groups)
    meeting.use(weight, lambda g, x: Patches(images(x), images(g), geometry), keep=(input,))
    meeting.use(bias, lambda g: Dense.of_sum(images(g), (1, *range(3, 3 + num_spatial))))
    return meeting.func(input, meeting.plain(weight), meeting.plain(bias), stride, padding, dilation, groups)


@rule(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
def conv_transpose(
    meeting: Meeting,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    """y is what a convolution would map to x, so weight gets x ⊗ patches of g: a convolution with x and g swapped."""
    if not meeting.is_data(input) or meeting.is_data(weight) or meeting.is_data(bias):
        return NotImplemented
    num_spatial = weight.ndim - 2
    if input.ndim != num_spatial + 2:
        return NotImplemented
    images = meeting.rows(input, features=num_spatial + 1)
    if images is None:
        return NotImplemented
    kernel, dilations = tuple(weight.shape[2:]), _each(dilation, num_spatial)
    geometry = Geometry(kernel, _each(stride, num_spatial), _padding(padding, kernel, dilations), dilations, groups)
    meeting.use(weight, lambda g, x: Patches(images(g).conj(), images(x).conj(), geometry), keep=(input,))
    meeting.use(bias, lambda g: Dense.of_sum(images(g), (1, *range(3, 3 + num_spatial))))
    return meeting.func(input, meeting.plain(weight), meeting.plain(bias), stride, padding, output_padding, groups, dilation)
