"""Embedding tables: weights of which a sample touches few rows."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samplewise.factors.rows import Rows
from samplewise.fold import Fold
from samplewise.ops.registry import Meeting, expansion, rule
from samplewise.samples import Layout
from samplewise.tracing import untraced


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
            g_BTD = g_BTD / _frequencies(ids_BT, positions(torch.ones_like(ids, dtype=g.dtype)))
        return Rows(ids_BT, g_BTD, num_rows=num_rows)

    meeting.use(weight, rows, keep=(input,))
    return meeting.run()


def _frequencies(ids_BT: Tensor, real_BT: Tensor) -> Tensor:
    """How often the sample of each id looks up that id itself, [B, T, 1]; what only fills samples up is not real."""
    same_BTT = (ids_BT.unsqueeze(1) == ids_BT.unsqueeze(2)).to(real_BT.dtype)
    return (same_BTT @ real_BT.unsqueeze(2)).clamp(min=1)


@rule(F.embedding_bag)
def embedding_bag(
    meeting: Meeting,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """y[i] = sum or mean of weight[ids of bag i], so row v of weight gets g of every bag that holds v.

    With `scale_grad_by_freq` a row's gradient is divided by how often the sample itself looks it up.
    """
    if meeting.is_weight(per_sample_weights) or mode == "max":
        return NotImplemented
    by_offsets = offsets is not None and meeting.is_data(offsets)
    layout = meeting.layout(offsets) if offsets is not None and by_offsets else meeting.layout(input)
    if layout.dims not in ((0,), ()):
        return NotImplemented
    num_rows = weight.shape[0]
    if padding_idx is not None:
        padding_idx = padding_idx % num_rows

    def rows(g: Tensor, ids: Tensor, *rest: Tensor) -> Rows:
        num_bags = g.shape[0]
        if offsets is None:
            bag = torch.arange(num_bags, device=ids.device).repeat_interleave(ids.shape[1])
        else:
            ends = torch.cat([rest[0][1:], rest[0].new_tensor([len(ids)])])[:num_bags]
            bag = torch.repeat_interleave(torch.arange(num_bags, device=ids.device), ends - rest[0][:num_bags])
        flat = ids.flatten()
        counts = (flat != padding_idx) if padding_idx is not None else torch.ones_like(flat, dtype=torch.bool)
        scale = counts.to(g.dtype)
        if mode == "mean":
            scale = scale / torch.zeros(num_bags, dtype=g.dtype, device=g.device).index_add_(0, bag, scale).clamp(min=1)[bag]
        if per_sample_weights is not None:
            scale = scale * rest[-1].flatten()
        if offsets is None:
            positions = _positions_of_bags(layout, ids.shape)
        else:
            sample = layout.ids.flatten().expand(num_bags)[bag.cpu()] if by_offsets else layout.ids.flatten()
            positions = Fold(sample, layout.num_samples)
        ids_BT, g_BTD = positions(flat), positions(g[bag] * scale.unsqueeze(1))
        if scale_grad_by_freq:
            g_BTD = g_BTD / _frequencies(ids_BT, positions(torch.ones_like(flat, dtype=g.dtype)))
        return Rows(ids_BT, g_BTD, num_rows=num_rows)

    keep = [t for t in (input, offsets, per_sample_weights) if t is not None]
    meeting.use(weight, rows, keep=tuple(keep))
    return F.embedding_bag(
        input, meeting.plain(weight), offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights,
        include_last_offset, padding_idx,
    )  # fmt: skip


@untraced
def _positions_of_bags(layout: Layout, shape: torch.Size) -> Fold:
    """Which sample each of the ids [bags, length] is of, once flattened."""
    return Fold(layout.ids.reshape(-1, 1).expand(shape).flatten(), layout.num_samples)


@expansion(torch.Tensor.__getitem__, torch.index_select, torch.Tensor.index_select)
def picked_rows(meeting: Meeting, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """weight[ids] or weight[i, j] for ids of the batch: an embedding with the rest of the weight as features."""
    dim: Any = 0
    ids: Any = args[0] if args else None
    if meeting.name == "index_select":
        dim = args[0] if args else kwargs["dim"]
        ids = args[1] if len(args) > 1 else kwargs["index"]
    several = list(ids) if isinstance(ids, tuple) else [ids]
    whole = all(isinstance(i, Tensor) and i.dtype in (torch.int64, torch.int32) for i in several)
    if dim != 0 or not whole or not meeting.is_weight(input) or not any(map(meeting.is_data, several)):
        return NotImplemented
    flat = torch.zeros_like(several[0])
    for i, size in zip(several, input.shape, strict=False):  # one number for the row that several indices name
        flat = flat * size + torch.where(i < 0, i + size, i)
    lead, rest = input.shape[: len(several)], input.shape[len(several) :]
    return F.embedding(flat, input.reshape(lead.numel(), rest.numel())).reshape(*flat.shape, *rest)
