"""Attention: queries, keys and values of one sample meet, in sequences of their own or packed into one."""

from itertools import pairwise

import torch
from torch import Tensor

from samplewise.flow.call import Call, Several, broadcast_met
from samplewise.samples import Layout, Lost, Mark, Mixed


def attention(call: Call) -> Mark:
    """Queries, keys and values of one sample meet; samples lie along leading dimensions, or packed behind a block mask."""
    if any(isinstance(mark, Mixed) for _, mark in call.marks):
        return _packed_attention(call)
    if any(d >= t.ndim - 2 for t, mark in call.marks if isinstance(mark, Layout) for d in mark.dims):
        return _packed_attention(call)
    return broadcast_met(call, call.out.ndim)


def _packed_attention(call: Call) -> Mark:
    """Several samples in one sequence: the mask must let each see itself alone."""
    call.was_tried = True
    layouts = call.layouts
    query, key, value = (call.arg(i, name) for i, name in enumerate(("query", "key", "value")))
    mask = call.arg(3, "attn_mask")
    made_across = [t for t, mark in call.marks if not isinstance(mark, Layout)]
    if any(t is not mask or mask.dtype != torch.bool for t in made_across):
        return call.mixed()
    if mask is None or not all(id(t) in layouts and layouts[id(t)].dims == (t.ndim - 2,) for t in (query, key, value)):
        return call.mixed()
    of_query, of_key, of_value = (layouts[id(t)].ids.flatten() for t in (query, key, value))
    sees = mask if mask.dtype == torch.bool else mask > -1e9 + 1 if mask.dtype != torch.float16 else mask > -1e4
    strangers = (of_query.unsqueeze(1) != of_key.unsqueeze(0)).to(mask.device)
    if not torch.equal(of_key, of_value) or bool((sees & strangers).any()):
        return call.mixed()
    if mask.dtype != torch.bool and bool((~sees).all(-1).any()):  # a row that sees nothing sees all, if its mask is finite
        return call.mixed()
    return layouts[id(query)]


def varlen(call: Call) -> Several | Mark:
    """varlen_attn(q, k, v, cu_seq_q, cu_seq_k, ...): packed sequences, each of which must be of one sample."""
    layouts = call.layouts
    query, key, value, of_query, of_key = call.args[:5]
    if any(id(t) not in layouts or layouts[id(t)].dims != (0,) for t in (query, key, value)) or len(layouts) > 3:
        return call.mixed()
    samples = [
        _samples_of_sequences(layouts[id(t)], ends) for t, ends in ((query, of_query), (key, of_key), (value, of_key))
    ]
    if None in samples or samples[0] != samples[1] or samples[1] != samples[2]:
        return call.mixed()
    return Several([layouts[id(query)], *[Lost(call.name)] * (len(call.results) - 1)])


def _samples_of_sequences(layout: Layout, ends: Tensor) -> list[int] | None:
    """The sample of each sequence between two ends; None if one holds several."""
    ids = layout.ids.flatten()
    parts = [ids[start:end].unique().tolist() for start, end in pairwise(ends.tolist())]
    return None if any(len(part) > 1 for part in parts) else [sample for part in parts for sample in part]
