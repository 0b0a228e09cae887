"""Losses: rows of predictions and targets meet, and their terms are kept apart or summed up over all samples."""

import torch
from torch import Tensor

from samplewise.flow.call import Call, broadcast_met, merged, reduced
from samplewise.samples import Layout, Lost, Mark
from samplewise.tracing import occurs

COMPARING = set(
    "triplet_margin_loss cosine_embedding_loss multi_margin_loss multilabel_margin_loss pairwise_distance".split()
)
"""Losses of which one term is made of a whole row."""


def loss(call: Call) -> Mark:
    """Losses of rows that meet one to one, summed up over all or not; some compare along the last dimension."""
    ndim = max(t.ndim for t, _ in call.marks)
    met = broadcast_met(call, ndim)
    if not isinstance(met, Layout):
        return met
    if call.name in COMPARING and ndim - 1 in met.dims:
        return call.mixed()
    if call.out.ndim == 0 and ndim > 0:
        shape = torch.broadcast_shapes(*(t.shape for t, _ in call.marks))
        return reduced(call, _given_reduction(call), even=met.is_even, num_elements=shape.numel())
    if call.out.ndim == ndim - 1 and ndim - 1 not in met.dims:
        return call.layout(met.ids.squeeze(-1))
    return met if call.out.ndim == ndim else call.mixed()


def _given_reduction(call: Call) -> str | None:
    """What the call says it does over all terms; the innermost losses take a number."""
    position = {
        "hinge_embedding_loss": 3, "binary_cross_entropy": 3, "binary_cross_entropy_with_logits": 4, "cosine_embedding_loss": 4,
        "margin_ranking_loss": 4, "poisson_nll_loss": 5, "multi_margin_loss": 5, "triplet_margin_loss": 7,
    }.get(call.name, 2)  # fmt: skip
    return {1: "mean", 2: "sum"}.get(call.arg(position, "reduction"))


def class_loss(call: Call) -> Mark:
    """Cross entropy: the class dimension goes; a mean over rows that do not all count gives samples unequal weight."""
    tensor, layout = call.subject
    if tensor is not call.args[0]:
        return Lost(call.name)
    class_dim = 1 if tensor.ndim > 1 else 0
    if class_dim in layout.dims:
        return call.mixed()
    target, weight = call.args[1], call.arg(2, "weight")
    met = call.layout(layout.ids.squeeze(class_dim))
    for t, mark in call.marks[1:]:
        assert isinstance(mark, Layout)
        if t is not target:
            return Lost(call.name)
        of_target = mark.ids.squeeze(class_dim) if t.ndim == tensor.ndim else mark.ids
        both = merged(call, [met.ids, of_target]) if of_target.ndim == met.ids.ndim else call.mixed()
        if not isinstance(both, Layout):
            return both
    if call.out.ndim == 0 and tensor.ndim > 1:
        mean = call.arg(3, "reduction", 1) == 1
        even = met.is_even if not mean else weight is None and _counts_evenly(call, target, met)
        return reduced(call, "mean" if mean else "sum", even=even, num_elements=tensor.numel() // tensor.shape[class_dim])
    return met


def _counts_evenly(call: Call, target: Tensor, layout: Layout) -> bool:
    """Whether as many targets count for every sample; those of `ignore_index` do not."""
    call.was_tried = True
    if target.is_floating_point():
        return layout.is_even
    if layout.has_strays or layout.num_samples == 0:
        return not layout.has_strays
    rows, ignored = layout.fold(0), call.arg(4, "ignore_index", -100)

    def differ() -> Tensor:
        counts = rows(target != ignored).sum(1)
        return (counts != counts[0]).any()

    return not occurs(differ)


def ctc(call: Call) -> Mark:
    """ctc_loss(log_probabilities [T, B, C], ...): one loss a sample, or their sum, or a mean weighted by lengths.

    Targets [B, S] and lengths [B] are of their row's sample; targets of all in one vector lie one after the other.
    """
    tensor, layout = call.subject
    if tensor is not call.args[0] or layout.dims != (1,) or tensor.ndim != 3:
        return Lost(call.name)
    samples = layout.ids.flatten()
    for t, mark in call.marks[1:]:
        is_flat = t is call.args[1] and t.ndim == 1
        of_rows = samples.repeat_interleave(torch.as_tensor(call.args[3]).cpu()) if is_flat else samples
        if not isinstance(mark, Layout) or not torch.equal(mark.ids.flatten(), of_rows):
            return call.mixed()
    reduction = call.arg(5, "reduction", 1)
    if reduction == 0:
        return call.layout(layout.ids.flatten())
    return reduced(call, "sum" if reduction == 2 else "mean", even=reduction == 2)


def compared(call: Call) -> Mark:
    """cosine_similarity(x1, x2, dim): rows meet one to one and the compared dimension goes."""
    ndim = call.out.ndim + 1
    met = broadcast_met(call, ndim)
    dim = call.arg(2, "dim", 1) % ndim
    if not isinstance(met, Layout) or dim in met.dims:
        return call.mixed()
    return call.layout(met.ids.squeeze(dim))
