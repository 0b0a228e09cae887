"""What backward starts from: the outputs of the batch, each with a gradient, and the same for a sample alone."""

from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from samplewise.errors import SamplesMixError
from samplewise.queries import Grads
from samplewise.samples import Layout, Mixed
from samplewise.verification.alone import gradients_put_back, tensors_of


@dataclass
class Output:
    """An output of the batch: its samples, and the gradient that it is given."""

    whole: Tensor
    layout: Layout
    v: Tensor


@dataclass
class Loss:
    """What a model returns that computes its own loss: samples added up."""

    whole: Tensor
    share: float | None
    """What the gradient of a sample in the batch is of that of the sample alone, if that is certain."""


def refuse_mixed(out: Any, grads: Grads) -> None:
    """Raises if the model lets samples meet in all that it returns, other than in a loss."""
    marks = [grads.marks.get(t) for t in tensors_of(out)]
    mixed = [mark for mark in marks if isinstance(mark, Mixed) and not mark.linear]
    if mixed and not any(isinstance(mark, Layout) for mark in marks):
        raise SamplesMixError(
            f"the output of the model is made by {mixed[0].op}, which mixes the samples of the batch (a BatchNorm in training "
            "mode?), so it has no per-sample gradients. Put the layer in eval mode."
        )


def outputs_of(out: Any, grads: Grads, alone: dict[int, list[Tensor]]) -> list[Output | Loss | None]:
    """For each output that has samples, a gradient in which no two of its elements are alike; and the first loss.

    Beside other outputs a loss counts only if it is known what a sample's share in it is.
    """
    tensors = tensors_of(out)
    outputs: list[Output | Loss | None] = [_output(k, t, grads, alone) for k, t in enumerate(tensors)]
    has_rows = any(outputs)
    for k, t in enumerate(tensors):
        loss = _loss(t, grads)
        if loss is not None and (loss.share is not None or not has_rows):
            outputs[k] = loss
            break
    return outputs


def _output(k: int, t: Tensor, grads: Grads, alone: dict[int, list[Tensor]]) -> Output | None:
    """Output number k, with a gradient of 0 in the padding that a sample does not have alone; None if it has no samples."""
    layout = grads.marks.get(t)
    if not isinstance(layout, Layout) or not t.requires_grad:
        return None
    v = torch.arange(1, t.numel() + 1, device=t.device, dtype=torch.float64).mul(1.7).sin().reshape(t.shape).to(t)
    for b, theirs in alone.items():
        places = layout.fold(0)(torch.arange(t.numel(), device=t.device).reshape(t.shape))[b]
        v.view(-1)[places[theirs[k].numel() :] if k < len(theirs) else places] = 0
    return Output(t, layout, v)


def _loss(t: Tensor, grads: Grads) -> Loss | None:
    """The output as a loss; None if it is none."""
    mark = grads.marks.get(t)
    if not isinstance(mark, Mixed) or not mark.linear or t.numel() != 1 or not t.requires_grad:
        return None
    shares = {"sum": 1.0, "mean": 1.0 / (grads.batch_size or 1)}
    return Loss(t, shares.get(mark.reduction or "") if mark.even else None)


def backward_from(outputs: list[Output | Loss | None], grads: Grads) -> None:
    """Backward of the captured batch, each output with its gradient; `.grad` is left as it is."""
    terms = [(o.whole * o.v).sum() if isinstance(o, Output) else o.whole.sum() for o in outputs if o is not None]
    if terms:
        total = reduce(torch.add, terms)
        grads._set_scale(1.0)
        grads._takes_each = True
        with gradients_put_back(grads.model):
            (total.real if total.is_complex() else total).backward()


def term_of(output: Output | Loss, t: Tensor, b: int) -> Tensor:
    """What backward starts from for sample b alone."""
    if isinstance(output, Loss):
        return t.sum() * (1.0 if output.share is None else output.share)
    return (t.flatten() * output.layout.fold(0)(output.v)[b][: t.numel()]).sum()
