"""Rows looked up by ids: each is of the sample that asks for it."""

import torch
from torch import Tensor

from samplewise.flow.call import Call
from samplewise.fold import NO_SAMPLE
from samplewise.samples import Layout, Lost, Mark


def embedded(call: Call) -> Mark:
    """One more dimension than the ids have."""
    tensor, layout = call.subject
    if tensor.is_floating_point() or len(call.marks) > 1:  # the table itself depends on the batch
        return Lost(call.name)
    return call.layout(layout.ids.unsqueeze(-1))


def one_hot(call: Call) -> Mark:
    return call.layout(call.subject[1].ids.unsqueeze(-1))


def bags(call: Call) -> Mark:
    """embedding_bag: one row a bag; its sample is that of its offset, or of the ids in it."""
    layouts = {id(t): mark for t, mark in call.marks if isinstance(mark, Layout) and not t.is_floating_point()}
    ids, offsets = _bag_arguments(call)
    if offsets is not None and id(offsets) in layouts:
        return call.layout(layouts[id(offsets)].ids.reshape(-1, 1))
    if id(ids) not in layouts:
        return Lost(call.name)
    layout = layouts[id(ids)]
    if offsets is None:
        return call.mixed() if 1 in layout.dims else call.layout(layout.ids.reshape(-1, 1))
    of_bags = samples_of_bags(layout, offsets, num_bags=call.out.shape[0])
    return call.mixed() if of_bags is None else call.layout(of_bags.unsqueeze(1))


def _bag_arguments(call: Call) -> tuple[Tensor, Tensor | None]:
    """(ids, offsets) of F.embedding_bag(ids, weight, offsets) or torch.embedding_bag(weight, ids, offsets)."""
    first, second = call.args[0], call.args[1]
    return (second if first.is_floating_point() else first), call.arg(2, "offsets")


def samples_of_bags(layout: Layout, offsets: Tensor, *, num_bags: int) -> Tensor | None:
    """The sample of each bag of flat ids with this layout, [num_bags]; None where a bag holds ids of several."""
    ids = layout.ids.flatten()
    starts = offsets[:num_bags].cpu()
    ends = torch.cat([offsets[1:].cpu(), torch.tensor([len(ids)], device="cpu")])[:num_bags]
    parts = [ids[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    if any(len(part) and bool((part != part[0]).any()) for part in parts):
        return None
    found = torch.tensor([int(part[0]) if len(part) else NO_SAMPLE for part in parts], device="cpu")
    one_each = torch.arange(num_bags, device="cpu")
    fits = num_bags == layout.num_samples and bool(((found == one_each) | (found == NO_SAMPLE)).all())
    return one_each if fits else found  # an empty bag among bags of one sample each is of the sample in its place
