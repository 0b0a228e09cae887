"""How the samples flow through an op: from the marks of its arguments to the marks of its results.

Ops that only move elements are applied to the sample ids themselves, so that views, permutations and indexing need no
rules of their own. Ops are known by name, one name for `torch.add`, `Tensor.add_` and `+`. What is not known is `Lost`,
and refused where it meets a parameter.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from samplewise.flow.call import (
    Call,
    Handler,
    Several,
    aligned,
    elementwise,
    is_in_place,
    is_torchs,
    op_name,
    tensors_in,
)
from samplewise.flow.meets import (
    along_dim,
    attention,
    bags,
    cell,
    class_loss,
    compared,
    contracted,
    crossed,
    ctc,
    embedded,
    fourier,
    images,
    last_dims,
    loss,
    one_hot,
    packed,
    padded,
    paired_rows,
    pooled,
    recurrent,
    reduction,
    routed_product,
    sorted_along,
    unpacked,
    varlen,
)
from samplewise.flow.memory import key_of, recalled, remember, shapes_of
from samplewise.flow.mixed import LINEAR, SCALING, of_mixed
from samplewise.flow.moves import (
    added_along,
    broadcast,
    concatenated,
    coordinates,
    expanded,
    gathered,
    indexed,
    indexed_along,
    last_dim_changed,
    permuted,
    put,
    repeated,
    reshaped,
    scattered,
    sequences,
    written,
)
from samplewise.flow.probe import probed
from samplewise.samples import NO_SAMPLE, Layout, Lost, Mark, Mixed, one_each
from samplewise.tracing import untraced

__all__ = [
    "ELEMENTWISE",
    "LOSSES",
    "PATTERNS",
    "ROUTING",
    "SCALING",
    "Call",
    "Several",
    "aligned",
    "flow",
    "flows_by_shapes",
    "is_in_place",
    "is_torchs",
    "moves",
    "op_name",
    "routes",
    "tensors_in",
    "written",
]

ROUTING = set(
    "getitem setitem index_select index_add index_copy index_put gather take_along_dim grouped_mm repeat_interleave "
    "embedding_bag".split()
)
"""Ops with integers that only tell where rows go: these may come from anywhere, without the samples mixing."""


PATTERNS = {"to", "type_as", "view_as", "reshape_as", "expand_as", "is_same_size"}
"""Ops whose further tensors only lend their shape or type."""


def routes(name: str, t: Tensor, mark: Mark, args: tuple, mark_of: Callable[[Tensor], Mark | None]) -> bool:
    """Whether this argument of the op only tells where rows go, and is of no one sample.

    Rows that are read from a constant are another matter: which ones a sample gets is then up to the others.
    """
    tells = name in ROUTING and t.dtype in DISCRETE and not (args and t is args[0] and name != "embedding_bag")
    if name in READING and args and not (args[0].requires_grad or isinstance(mark_of(args[0]), Layout)):
        return False
    if name in WRITING and not any(isinstance(a, Tensor) and isinstance(mark_of(a), Layout) for a in args[2:]):
        return False  # which rows are overwritten with a constant is up to all samples
    return tells and isinstance(mark, Mixed | Lost) and mark.discrete


READING = {"getitem", "index_select", "gather", "take_along_dim"}
WRITING = {"setitem", "index_put"}


def moves(name: str) -> bool:
    """Whether the op of that name only moves elements."""
    return HANDLERS.get(name) in MOVES


@untraced
def flow(call: Call, key: Any = None) -> Mark | Several | None:
    """The mark of the call's results; remembered where it does not depend on values, as layers and steps repeat.

    `key` tells more of the call than its flow depends on, if that is to be remembered with it.
    """
    of_flow = _key(call)
    if of_flow is None:
        return _found_flow(call)
    key = of_flow if key is None else key
    known, shapes = recalled(key), shapes_of(call.results or [call.out])
    if known is not None and known.shapes == shapes:
        return known.mark
    mark = _found_flow(call)
    if isinstance(mark, Lost) or call.was_tried:
        return mark
    if isinstance(mark, Several):
        mark = Several([one_each(each) if isinstance(each, Layout) else each for each in mark])
    mark = one_each(mark) if isinstance(mark, Layout) else mark
    remember(key, shapes, mark)
    return mark


def _key(call: Call) -> Any:
    """All that the call's flow depends on; None if that may be values."""
    handler = handler_of(call)
    if handler not in BY_SHAPES and handler not in MOVES:
        return None
    marks = {id(t): mark for t, mark in call.marks}
    if not all(isinstance(mark, Layout) for mark in marks.values()):
        return None
    if handler in (indexed, indexed_along) and len(tensors_in((*call.args, *call.kwargs.values()))) > 1:
        return None  # where an index puts rows is in its values
    return key_of(call.func, call.args, call.kwargs, lambda t: marks.get(id(t)))


def flows_by_shapes(name: str) -> bool:
    """Whether the flow through ops of that name may depend on marks, shapes and numbers alone, and so be remembered."""
    return HANDLERS.get(name) in BY_SHAPES or moves(name)


def _found_flow(call: Call) -> Mark | Several | None:
    mark = _flow(call)
    if not all(mark.discrete or t.dtype in DISCRETE for t, mark in call.marks):
        return mark
    discrete = {id(t) for t, mark in call.marks if mark.discrete}
    if all(t.dtype in DISCRETE or id(t) in discrete for t in tensors_in((*call.args, *call.kwargs.values()))):
        if isinstance(mark, Mixed | Lost):
            return replace(mark, discrete=True)
        if isinstance(mark, Layout) and not mark.discrete:
            return Layout(mark.ids, mark.num_samples, discrete=True)
    return mark


DISCRETE = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def handler_of(call: Call) -> Handler | None:
    if call.name == "where" and len(call.args) + len(call.kwargs) == 1:
        return coordinates
    return HANDLERS.get(call.name)


def _flow(call: Call) -> Mark | Several | None:
    marks = [mark for _, mark in call.marks]
    if any(isinstance(mark, Lost) for mark in marks):
        return next(mark for mark in marks if isinstance(mark, Lost))
    handler = handler_of(call)
    if is_in_place(call.func) and handler in MOVES:
        return Lost(call.name)  # its shape before is gone
    if any(isinstance(mark, Mixed) for mark in marks):
        if call.name == "scaled_dot_product_attention" and all(mark.discrete for mark in marks if isinstance(mark, Mixed)):
            return attention(call)  # a block mask, made of the samples' ids
        return of_mixed(call, is_move=handler in MOVES)
    sample = _only_sample(marks)
    if sample is not None:  # whatever the op does with it
        return Several([call.layout(torch.full([1] * t.ndim, sample, device="cpu")) for t in call.results or [call.out]])
    mark = handler(call) if handler else Lost(call.name)
    if isinstance(mark, Lost):
        call.was_tried = True
        return probed(call)
    return mark


@untraced
def _only_sample(marks: list[Mark]) -> int | None:
    """The sample that all of these are of; None if there are several."""
    ids = [int(mark.ids) if isinstance(mark, Layout) and mark.ids.numel() == 1 else NO_SAMPLE for mark in marks]
    return ids[0] if ids[0] != NO_SAMPLE and len(set(ids)) == 1 else None


ELEMENTWISE = (
    LINEAR
    | SCALING
    | set(
        "abs absolute acos acosh addcdiv addcmul alpha_dropout and angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh "
        "asin asinh atan atan2 atanh bernoulli bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift "
        "bitwise_xor bool byte ceil celu char clamp clamp_max clamp_min clip complex conj conj_physical copy copysign cos cosh "
        "deg2rad digamma dropout elu empty_like eq erf erfc erfinv exp exp2 expm1 feature_alpha_dropout feature_dropout fill "
        "float_power floor floor_divide floordiv fmax fmin fmod frac full_like gcd ge gelu greater greater_equal gt hardshrink "
        "hardsigmoid hardswish hardtanh heaviside hypot iand idiv ifloordiv ilshift imag imod int invert ior ipow irshift "
        "isclose isfinite isinf isnan isneginf isposinf isreal ixor ldexp le leaky_relu lerp less less_equal lgamma log log10 "
        "log1p log2 log_sigmoid logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit logsigmoid long lt "
        "masked_fill maximum minimum mish mod mul_ nan_to_num native_dropout ne negative nextafter not not_equal ones_like or "
        "polar positive pow rad2deg rand_like randn_like rdiv real reciprocal relu relu6 remainder resolve_conj resolve_neg "
        "rfloordiv rmod round rpow rrelu rrelu_with_noise rsqrt rtruediv selu sgn short sigmoid sign signbit silu sin sinc sinh "
        "softplus softshrink sqrt square subtract tan tanh tanhshrink threshold tril triu trunc type_as view_as_real_ where "
        "xlogy xor zero zeros_like exponential geometric cauchy log_normal random normal uniform randint_like".split()
    )
)

RESHAPED = (
    "view view_as reshape flatten unflatten ravel reshape_as unsafe_view squeeze unsqueeze atleast_1d atleast_2d atleast_3d"
)
PERMUTED = "permute transpose swapaxes swapdims movedim moveaxis t T mT H mH adjoint"
INDEXED_ALONG = (
    "select narrow chunk split split_with_sizes tensor_split hsplit vsplit dsplit unbind index_select flip roll "
    "repeat_interleave unfold"
)
REDUCTIONS = (
    "sum mean prod amax amin max min argmax argmin any all logsumexp norm linalg_norm linalg_vector_norm var std var_mean "
    "std_mean median nanmean nansum nanmedian count_nonzero mode kthvalue aminmax"
)
ALONG_DIM = "softmax log_softmax cumsum cumprod cummax cummin logcumsumexp topk glu multinomial"
POOLS = (
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
    "adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d max_pool1d_with_indices "
    "max_pool2d_with_indices max_pool3d_with_indices max_unpool2d max_unpool3d upsample_nearest1d upsample_nearest2d "
    "upsample_nearest3d upsample_nearest_exact1d upsample_nearest_exact2d upsample_nearest_exact3d upsample_linear1d "
    "upsample_bilinear2d upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d upsample_bicubic2d_aa"
)
IMAGES = (
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d batch_norm group_norm instance_norm "
    "pixel_shuffle pixel_unshuffle channel_shuffle grid_sampler affine_grid_generator im2col col2im"
)
FOURIER = " ".join(
    f"fft_{kind}{rank}" for kind in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft") for rank in ("", "2", "n")
)
LOSSES = set(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div "
    "soft_margin_loss poisson_nll_loss triplet_margin_loss cosine_embedding_loss margin_ranking_loss hinge_embedding_loss "
    "multi_margin_loss multilabel_margin_loss pairwise_distance".split()
)


MOVES = (reshaped, permuted, expanded, repeated, indexed_along, indexed, concatenated)
"""Handlers of ops that only move elements."""


BY_SHAPES = (
    elementwise, reduction, along_dim, images, pooled, contracted, last_dims, fourier, embedded, one_hot, paired_rows, cell,
    attention, class_loss,
)  # fmt: skip
"""Handlers of ops in which elements meet that look at shapes alone, unless they say that the call was tried."""


def unmarked(call: Call) -> None:
    """Results that do not depend on the data: fresh tensors, shapes."""
    return None


HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(RESHAPED.split(), reshaped),
    **dict.fromkeys(PERMUTED.split(), permuted),
    **dict.fromkeys(["expand", "expand_as", "broadcast_to"], expanded),
    **dict.fromkeys(["repeat", "tile"], repeated),
    **dict.fromkeys(INDEXED_ALONG.split(), indexed_along),
    **dict.fromkeys(REDUCTIONS.split(), reduction),
    **dict.fromkeys(ALONG_DIM.split(), along_dim),
    **dict.fromkeys(IMAGES.split(), images),
    **dict.fromkeys(POOLS.split(), pooled),
    **dict.fromkeys(LOSSES, loss),
    **dict.fromkeys(["cross_entropy_loss", "nll_loss", "nll_loss_nd"], class_loss),
    **dict.fromkeys(["cat", "concat", "concatenate", "stack"], concatenated),
    **dict.fromkeys("matmul mm bmm mv addmm baddbmm addmv einsum linear".split(), contracted),
    **dict.fromkeys(["layer_norm", "rms_norm"], last_dims),
    **dict.fromkeys("new_zeros new_ones new_full new_empty new_tensor".split(), unmarked),
    **dict.fromkeys(["sort", "argsort", "msort"], sorted_along),
    **dict.fromkeys(["gather", "take_along_dim"], gathered),
    **dict.fromkeys(["grouped_mm"], routed_product),
    **dict.fromkeys(["lstm", "gru", "rnn_tanh", "rnn_relu"], recurrent),
    **dict.fromkeys(FOURIER.split(), fourier),
    "view_as_complex": last_dim_changed,
    "view_as_real": last_dim_changed,
    "broadcast_tensors": broadcast,
    "bilinear": paired_rows,
    "cosine_similarity": compared,
    **dict.fromkeys(["cross", "linalg_cross"], crossed),
    "index_put": put,
    **dict.fromkeys(["nonzero", "argwhere"], coordinates),
    "pad_sequence": sequences,
    "ctc_loss": ctc,
    "torch_attn::_varlen_attn": varlen,
    **dict.fromkeys(["scatter", "scatter_add", "scatter_reduce"], scattered),
    "pack_padded_sequence": packed,
    "pad_packed_sequence": unpacked,
    **dict.fromkeys(["lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"], cell),
    "prelu": elementwise,
    "index_copy": added_along,
    "index_add": added_along,
    "embedding_bag": bags,
    "getitem": indexed,
    "pad": padded,
    "embedding": embedded,
    "one_hot": one_hot,
    "scaled_dot_product_attention": attention,
}
