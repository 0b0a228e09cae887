"""Normalisation layers: scales and shifts of normalised input."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samplewise.factors.dense import Dense
from samplewise.fold import Fold
from samplewise.ops.pointwise import spread_sum
from samplewise.ops.registry import Meeting, rule
from samplewise.plan import CHUNK_BYTES
from samplewise.precision import wide, wide_dtype
from samplewise.tracing import is_tracing


def _one_data_input(meeting: Meeting, input: Tensor, *others: Any) -> bool:
    return meeting.is_data(input) and not any(meeting.is_data(t) for t in others)


@rule(F.layer_norm)
def layer_norm(
    meeting: Meeting,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """y = x̂ · weight + bias with x̂ = (x - mean) · rstd, so weight gets x̂ · g and bias gets g."""
    features = len(normalized_shape)
    rows = meeting.rows(input, features=features) if _one_data_input(meeting, input, weight, bias) else None
    if rows is None:
        return NotImplemented
    y, mean, rstd = meeting.run(_with_statistics)

    def scale(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Dense:
        return Dense(rows((x - wide(mean)).mul_(rstd).mul_(g)).sum(1))  # in mean's dtype: no copy of x in float32

    meeting.use(weight, scale, keep=(input, mean, rstd))
    meeting.use(bias, lambda g: Dense.of_sum(rows(g)))
    return y


def _with_statistics(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """(layer_norm, mean, rstd)."""
    return torch.native_layer_norm(input, list(normalized_shape), weight, bias, eps)


@rule(F.rms_norm)
def rms_norm(
    meeting: Meeting, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Any:
    """y = x̂ · weight with x̂ = x / rms(x), so weight gets x̂ · g."""
    features = len(normalized_shape)
    rows = meeting.rows(input, features=features) if _one_data_input(meeting, input, weight) else None
    if rows is None:
        return NotImplemented

    def scale(g: Tensor, x: Tensor) -> Dense:
        return Dense(rows(F.rms_norm(wide(x), normalized_shape, None, eps_of_x).conj() * wide(g)).sum(1))

    eps_of_x = torch.finfo(input.dtype).eps if eps is None else eps
    meeting.use(weight, scale, keep=(input,))
    return meeting.run()


@rule(F.batch_norm)
def batch_norm(
    meeting: Meeting,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """In eval mode: y = x̂ · weight + bias with x̂ normalised by running statistics. In training mode samples mix."""
    images = meeting.rows(input, features=input.ndim - 1) if _one_data_input(meeting, input, weight, bias) else None
    if images is None or training:
        return NotImplemented
    meeting.use(bias, lambda g: per_channel(g, images))
    scale_by(meeting, weight, input, running_mean, running_var, eps, images)
    return F.batch_norm(input, running_mean, running_var, meeting.plain(weight), meeting.plain(bias), False, momentum, eps)


@rule(F.group_norm)
def group_norm(
    meeting: Meeting,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """y = x̂ · weight + bias with x̂ normalised over each group of channels: weight gets x̂ · g, bias gets g."""
    images = meeting.rows(input, features=input.ndim - 1) if _one_data_input(meeting, input, weight, bias) else None
    if images is None:
        return NotImplemented
    if input.shape[1] % num_groups or not input.numel():
        return NotImplemented  # torch's own words for it
    y, mean, rstd = meeting.run(_with_group_statistics)

    def centred_sum(x: Tensor, g: Tensor, mean: Tensor) -> Tensor:
        """[N, C]: (x - mean) · g summed over space."""
        return over_space((x - of_channels(wide(mean), x)).mul_(g))  # in mean's dtype: no copy of x in float32

    def scale(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Dense:
        # A few images at a time: on the CPU, memory that is mapped anew for all of them costs more than the arithmetic.
        step = max(1, CHUNK_BYTES.get(x.device.type, CHUNK_BYTES["cuda"]) // (4 * math.prod(x.shape[1:])))
        if is_tracing() or step >= len(x):
            summed = centred_sum(x, g, mean)
        else:
            summed = torch.cat(list(map(centred_sum, x.split(step), g.split(step), mean.split(step))))
        # rstd is one number a group, so it can wait until space is summed over
        summed = summed.reshape(*mean.shape, -1) * rstd.unsqueeze(2)
        return Dense(images.total(summed.reshape(x.shape[:2])))

    meeting.use(weight, scale, keep=(input, mean, rstd))
    meeting.use(bias, lambda g: per_channel(g, images))
    return y


def _with_group_statistics(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """(group_norm, mean, rstd)."""
    N, C, *space = input.shape
    weight = input.new_ones(C) if weight is None and bias is not None else weight
    return torch.native_group_norm(input.contiguous(), weight, bias, N, C, math.prod(space), num_groups, eps)


@rule(F.instance_norm)
def instance_norm(
    meeting: Meeting,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """y = x̂ · weight + bias with x̂ normalised over each channel of each image, or by running statistics."""
    images = meeting.rows(input, features=input.ndim - 1) if _one_data_input(meeting, input, weight, bias) else None
    if images is None or not input.numel() or input.ndim < 3:
        return NotImplemented
    meeting.use(bias, lambda g: per_channel(g, images))
    if not use_input_stats:
        scale_by(meeting, weight, input, running_mean, running_var, eps, images)
        return F.instance_norm(
            input, running_mean, running_var, meeting.plain(weight), meeting.plain(bias), False, momentum, eps
        )

    # An instance norm is a batch norm of the N·C channels of one wide image; asked for that way, it hands out its
    # mean and rstd.
    N, C = input.shape[:2]

    def repeated(t: Any) -> Any:
        return None if t is None else meeting.plain(t).repeat(N)

    running = (repeated(running_mean), repeated(running_var))
    y, mean, rstd = torch.native_batch_norm(
        input.contiguous().reshape(1, N * C, *input.shape[2:]),
        repeated(weight),
        repeated(bias),
        *running,
        True,
        momentum,
        eps,
    )
    y = with_plain_gradient(y)
    for statistic, spread in zip((running_mean, running_var), running, strict=True):
        if statistic is not None:
            statistic.copy_(spread.reshape(N, C).mean(0))

    def scale(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Dense:
        shape = (N, C, *[1] * (x.ndim - 2))
        return per_channel((wide(x) - mean.reshape(shape)).mul_(rstd.reshape(shape)).mul_(g), images)

    meeting.use(weight, scale, keep=(input, mean.detach(), rstd.detach()))
    return y.reshape(input.shape)


def with_plain_gradient(y: Tensor) -> Tensor:
    """The result of a batch norm, whose backward on the CPU (torch 2.15) reads gradients of some strides in a wrong order."""
    if y.requires_grad:
        y.register_hook(torch.Tensor.contiguous)
    return y


def scale_by(
    meeting: Meeting, weight: Any, input: Tensor, mean: Tensor | None, var: Tensor | None, eps: float, images: Fold
) -> None:
    """Weight gets x̂ · g with x̂ normalised by given statistics."""

    def scale(g: Tensor, x: Tensor, mean: Tensor, var: Tensor) -> Dense:
        shape = (1, -1, *[1] * (x.ndim - 2))
        normalised = (wide(x) - mean.reshape(shape)) * (var.reshape(shape) + eps).rsqrt()
        return per_channel(normalised * wide(g), images)

    assert mean is not None
    assert var is not None
    meeting.use(weight, scale, keep=(input, mean, var))


@rule(torch.prelu, torch.Tensor.prelu, F.prelu)
def prelu(meeting: Meeting, input: Tensor, weight: Tensor) -> Any:
    """y = max(0, x) + weight · min(0, x) with a weight for all or one a channel, so weight gets g · min(0, x)."""
    if not _one_data_input(meeting, input, weight) or (weight.numel() != 1 and input.ndim < 2):
        return NotImplemented
    layout = meeting.layout(input)
    shape = (1,) if weight.numel() == 1 else (weight.numel(), *[1] * (input.ndim - 2))
    if weight.numel() != 1 and 1 in layout.dims:
        return NotImplemented

    def slope(g: Tensor, x: Tensor) -> Dense:
        G = spread_sum(wide(g) * wide(x).clamp(max=0), layout, shape).G
        return Dense(G.reshape(len(G), *weight.shape))

    meeting.use(weight, slope, keep=(input,))
    return F.prelu(input, meeting.plain(weight))


def per_channel(t: Tensor, images: Fold) -> Dense:
    """t [N, C, *spatial] summed over space and over the images of a sample."""
    return Dense(images.total(over_space(t)))


def over_space(t: Tensor) -> Tensor:
    """t [N, C, *spatial] summed over space, in float32 or better."""
    return t.sum(tuple(range(2, t.ndim)), dtype=wide_dtype(t)) if t.ndim > 2 else wide(t)


def of_channels(of_group_NG: Tensor, x: Tensor) -> Tensor:
    """[N, C, 1, ...]: for each channel of x the number of its group."""
    N, C = x.shape[:2]
    each = of_group_NG.unsqueeze(2).expand(*of_group_NG.shape, C // of_group_NG.shape[1])
    return each.reshape(N, C, *[1] * (x.ndim - 2))
