"""Attention with learned scores: a bias by the distance of two positions, as T5 has it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samplewise.ops.registry import Meeting, expansion


@expansion(F.scaled_dot_product_attention)
def biased_attention(
    meeting: Meeting,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """softmax(q kᵀ scale + w) v, written out where w is a weight; a row that may see nothing sees nothing.

    The fused kernel would hand out the gradient of w summed over samples alone.
    """
    if not meeting.is_weight(attn_mask):
        return NotImplemented
    assert attn_mask is not None
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = query * (query.shape[-1] ** -0.5 if scale is None else scale) @ key.mT + attn_mask
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    seen = F.softmax(scores.masked_fill(blind, 0), -1).masked_fill(blind, 0)
    return F.dropout(seen, dropout_p) @ value
