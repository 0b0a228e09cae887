"""The handler of each op that is known, by name."""

from samplewise.flow.attention import attention, varlen
from samplewise.flow.call import Call, Handler, elementwise
from samplewise.flow.dims import along_dim, fourier, images, last_dims, pooled, reduction, sorted_along
from samplewise.flow.indexing import coordinates, gathered, indexed
from samplewise.flow.lookups import bags, embedded, one_hot
from samplewise.flow.losses import class_loss, compared, ctc, loss
from samplewise.flow.moves import (
    broadcast,
    concatenated,
    expanded,
    indexed_along,
    last_dim_changed,
    padded,
    permuted,
    repeated,
    reshaped,
    windows,
)
from samplewise.flow.names import (
    ALONG_DIM,
    ELEMENTWISE,
    FOURIER,
    IMAGES,
    INDEXED_ALONG,
    LOSSES,
    PERMUTED,
    POOLS,
    REDUCTIONS,
    RESHAPED,
)
from samplewise.flow.products import contracted, crossed, paired_rows, routed_product
from samplewise.flow.sequences import cell, packed, recurrent, sequences, unpacked
from samplewise.flow.writes import added_along, put, scattered


def unmarked(call: Call) -> None:
    """Results that do not depend on the data: fresh tensors, shapes."""
    return None


MOVES = (reshaped, permuted, expanded, repeated, indexed_along, indexed, concatenated)
"""Handlers of ops that only move elements."""
BY_SHAPES = (
    elementwise, reduction, along_dim, images, pooled, contracted, last_dims, fourier, embedded, one_hot, paired_rows, cell,
    attention, class_loss,
)  # fmt: skip
"""Handlers of ops in which elements meet that look at shapes alone, unless they say that the call was tried."""

HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    "prelu": elementwise,
    **dict.fromkeys("new_zeros new_ones new_full new_empty new_tensor".split(), unmarked),
    **dict.fromkeys(RESHAPED, reshaped),
    **dict.fromkeys(PERMUTED, permuted),
    **dict.fromkeys(INDEXED_ALONG, indexed_along),
    **dict.fromkeys(["expand", "expand_as", "broadcast_to"], expanded),
    **dict.fromkeys(["repeat", "tile"], repeated),
    **dict.fromkeys(["cat", "concat", "concatenate", "stack"], concatenated),
    **dict.fromkeys(["view_as_complex", "view_as_real"], last_dim_changed),
    "broadcast_tensors": broadcast,
    "as_strided": windows,
    "pad": padded,
    "getitem": indexed,
    **dict.fromkeys(["gather", "take_along_dim"], gathered),
    **dict.fromkeys(["nonzero", "argwhere"], coordinates),
    "index_put": put,
    **dict.fromkeys(["index_add", "index_copy"], added_along),
    **dict.fromkeys(["scatter", "scatter_add", "scatter_reduce"], scattered),
    "embedding": embedded,
    "embedding_bag": bags,
    "one_hot": one_hot,
    **dict.fromkeys(REDUCTIONS, reduction),
    **dict.fromkeys(ALONG_DIM, along_dim),
    **dict.fromkeys(["sort", "argsort", "msort"], sorted_along),
    **dict.fromkeys(["layer_norm", "rms_norm"], last_dims),
    **dict.fromkeys(FOURIER, fourier),
    **dict.fromkeys(IMAGES, images),
    **dict.fromkeys(POOLS, pooled),
    **dict.fromkeys(
        "matmul mm bmm mv addmm baddbmm addmv einsum linear sparse_mm sparse_addmm inner tensordot".split(), contracted
    ),
    "grouped_mm": routed_product,
    "bilinear": paired_rows,
    **dict.fromkeys(["cross", "linalg_cross"], crossed),
    "scaled_dot_product_attention": attention,
    "torch_attn::_varlen_attn": varlen,
    **dict.fromkeys(["lstm", "gru", "rnn_tanh", "rnn_relu"], recurrent),
    **dict.fromkeys(["lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"], cell),
    "pack_padded_sequence": packed,
    "pad_packed_sequence": unpacked,
    "pad_sequence": sequences,
    **dict.fromkeys(LOSSES, loss),
    **dict.fromkeys(["cross_entropy_loss", "nll_loss", "nll_loss_nd"], class_loss),
    "cosine_similarity": compared,
    "ctc_loss": ctc,
}
"""Family by family; view_as_real, though elementwise, has a handler of its own."""


def handler_of(call: Call) -> Handler | None:
    """What knows the flow through this call; None for an op that nobody described."""
    if call.name == "where" and len(call.args) + len(call.kwargs) == 1:
        return coordinates
    return HANDLERS.get(call.name)


def moves(name: str) -> bool:
    """Whether the op of that name only moves elements."""
    return HANDLERS.get(name) in MOVES


def flows_by_shapes(name: str) -> bool:
    """Whether the flow through ops of that name may depend on marks, shapes and numbers alone, and so be remembered."""
    return HANDLERS.get(name) in BY_SHAPES or moves(name)
