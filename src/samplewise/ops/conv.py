"""Convolutions: weights that multiply patches."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from samplewise.factors.dense import Dense
from samplewise.factors.patches import Geometry, Patches
from samplewise.fold import Fold
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


def _images(
    meeting: Meeting, input: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> tuple[Fold, Geometry] | None:
    """How the input falls into images of samples, and the convolution's geometry; the bias gets g. None if it is no such call."""
    num_spatial = weight.ndim - 2
    others_are_data = meeting.is_data(weight) or meeting.is_data(bias)
    images = meeting.rows(input, features=num_spatial + 1) if meeting.is_data(input) and not others_are_data else None
    if images is None or input.ndim != num_spatial + 2:
        return None
    kernel, dilations = tuple(weight.shape[2:]), _each(dilation, num_spatial)
    meeting.use(bias, lambda g: Dense.of_sum(images(g), (1, *range(3, 3 + num_spatial))))
    return images, Geometry(kernel, _each(stride, num_spatial), _padding(padding, kernel, dilations), dilations, groups)


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
    found = _images(meeting, input, weight, bias, stride, padding, dilation, groups)
    if found is None:
        return NotImplemented
    images, geometry = found
    meeting.use(weight, lambda g, x: Patches(images(x), images(g), geometry), keep=(input,))
    return meeting.run()


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
    found = _images(meeting, input, weight, bias, stride, padding, dilation, groups)
    if found is None:
        return NotImplemented
    images, geometry = found
    meeting.use(weight, lambda g, x: Patches(images(g).conj(), images(x).conj(), geometry), keep=(input,))
    return meeting.run()
