"""Embedding tables: weights of which a sample touches few rows."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samplewise.factors.rows import Rows
from samplewise.ops.registry import Meeting, rule


@rule(F.embedding)
def embedding(
    meeting: Meeting,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """y[t] = weight[ids[t]], so row v of weight gets the sum of g[t] over the t with ids[t] = v.

    With `scale_grad_by_freq` a row's gradient is divided by how often the sample itself looks it up.
    """
    if not meeting.is_data(input):
        return NotImplemented
    positions = meeting.layout(input).fold(0)
    num_rows = weight.shape[0]
    if padding_idx is not None:
        padding_idx = padding_idx % num_rows

    def rows(g: Tensor, ids: Tensor) -> Rows:
        # a sample with fewer positions than others is filled up with row 0 and gradient 0
        ids_BT, g_BTD = positions(ids), positions(g)
        if padding_idx is not None:
            g_BTD = torch.where((ids_BT == padding_idx).unsqueeze(2), 0, g_BTD)
        if scale_grad_by_freq:
            real_BT = positions(torch.ones_like(ids, dtype=g.dtype))
            same_BTT = (ids_BT.unsqueeze(1) == ids_BT.unsqueeze(2)).to(g.dtype)
            g_BTD = g_BTD / (same_BTT @ real_BT.unsqueeze(2)).clamp(min=1)
        return Rows(ids_BT, g_BTD, num_rows=num_rows)

    meeting.use(weight, rows, keep=(input,))
    return F.embedding(input, meeting.plain(weight), padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
