"""How the samples flow through an op: from the marks of its arguments to the marks of its results.

Ops that only move elements are applied to the sample ids themselves, so that views, permutations and indexing need no
rules of their own. Ops are known by name, one name for `torch.add`, `Tensor.add_` and `+`. What is not known is `Lost`,
and refused where it meets a parameter.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samplewise.contraction import along, operands
from samplewise.samples import NO_SAMPLE, Layout, Lost, Mark, Mixed


@dataclass
class Call:
    """One op call: its arguments, its first result, and the marks of the tensors among its arguments."""

    name: str
    func: Callable
    args: tuple
    kwargs: dict[str, Any]
    out: Any
    marks: list[tuple[Tensor, Mark]]
    """The marked tensors among the arguments, in their order."""

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    @property
    def subject(self) -> tuple[Tensor, Layout]:
        """The first marked tensor."""
        tensor, mark = self.marks[0]
        assert isinstance(mark, Layout)
        return tensor, mark

    def layout(self, ids: Tensor) -> Layout:
        return Layout(ids, self.subject[1].num_samples)

    def mixed(self, **kwargs: bool) -> Mixed:
        return Mixed(self.name, **kwargs)


Handler = Callable[[Call], Mark | None]


def op_name(func: Callable) -> str:
    """The op's plain name: `add` for `torch.add`, `Tensor.add_`, `Tensor.__add__` and `torch.ops.aten.add.Tensor`."""
    name = getattr(func, "__name__", type(func).__name__)
    if name in ("__get__", "__set__"):
        name = func.__self__.__name__  # type: ignore[attr-defined]
    return name.split(".")[0].strip("_")


def flow(call: Call) -> Mark | None:
    """The mark of the call's results."""
    marks = [mark for _, mark in call.marks]
    if any(isinstance(mark, Lost) for mark in marks):
        return next(mark for mark in marks if isinstance(mark, Lost))
    handler = HANDLERS.get(call.name)
    if any(isinstance(mark, Mixed) for mark in marks):
        return _flow_of_mixed(call, handler)
    if isinstance(call.out, Tensor) and marks[0].num_samples == 1:  # type: ignore[union-attr]
        return call.layout(torch.zeros([1] * call.out.ndim, dtype=torch.long))
    return handler(call) if handler else Lost(call.name)


def _flow_of_mixed(call: Call, handler: Handler | None) -> Mark:
    """A loss stays a weighted sum of its samples under sums, and under products with what needs no gradient."""
    mixed = [mark for _, mark in call.marks if isinstance(mark, Mixed)]
    learning = [t for t, _ in call.marks if t.requires_grad]
    nonlinear = Mixed(mixed[0].op)
    if len(mixed) != len(call.marks) or not all(mark.linear for mark in mixed):
        return nonlinear  # a statistic of the batch goes back into its samples
    if call.name in LINEAR or call.name in ("sum", "mean") or handler in MOVES:
        return Mixed(mixed[0].op, linear=True, even=all(mark.even for mark in mixed))
    numerator = call.marks[0][0] if call.name in DIVIDING else None
    if call.name in SCALING and len(learning) <= 1 and (numerator is None or not learning or learning[0] is numerator):
        return Mixed(mixed[0].op, linear=True, even=len(mixed) == 1 and mixed[0].even)
    return nonlinear


# --- ids of several tensors ------------------------------------------------------------------------------------------


def aligned(ids: Tensor, ndim: int) -> Tensor:
    """ids with leading dimensions of size 1, as broadcasting adds them."""
    return ids.reshape((1,) * (ndim - ids.ndim) + ids.shape) if ids.ndim < ndim else ids


def merged(call: Call, all_ids: Iterable[Tensor]) -> Mark:
    """The ids that broadcast tensors have in common; Mixed where two samples meet in one element."""
    first, *rest = all_ids
    for ids in rest:
        if ids is first:
            continue
        try:
            left, right = torch.broadcast_tensors(first, ids)
        except RuntimeError:
            return call.mixed()
        if not bool(((left == right) | (left == NO_SAMPLE) | (right == NO_SAMPLE)).all()):
            return call.mixed()
        first = torch.where(left == NO_SAMPLE, right, left) if bool((left == NO_SAMPLE).any()) else left
    return call.layout(first)


def compressed(ids: Tensor) -> Tensor:
    """ids with every dimension along which the sample does not change cut to size 1."""
    for d in range(ids.ndim):
        if ids.shape[d] > 1 and (ids.stride(d) == 0 or bool((ids == ids.narrow(d, 0, 1)).all())):
            ids = ids.narrow(d, 0, 1)
    return ids


# --- ops that work element by element --------------------------------------------------------------------------------


def elementwise(call: Call) -> Mark:
    tensor, layout = call.subject
    ndim = call.out.ndim
    if all(mark is layout for _, mark in call.marks) and tensor.ndim == ndim:
        return layout
    return merged(call, [aligned(mark.ids, ndim) for _, mark in call.marks if isinstance(mark, Layout)])


# --- ops that move elements ------------------------------------------------------------------------------------------


def reshaped(call: Call) -> Mark:
    tensor, layout = call.subject
    return call.layout(reshape_ids(layout.ids, tuple(tensor.shape), tuple(call.out.shape)))


def reshape_ids(ids: Tensor, source: tuple[int, ...], target: tuple[int, ...]) -> Tensor:
    """The ids of a tensor of shape `source` after a row-major reshape to `target`.

    Dimensions fall into blocks of equal extent, such as (B, T) → (B·T); only blocks that hold samples are spelt out.

    >>> reshape_ids(torch.tensor([[0], [1]]), (2, 3), (6,)).tolist()
    [0, 0, 0, 1, 1, 1]
    """
    if 0 in source:
        return torch.zeros([0 if size == 0 else 1 for size in target], dtype=torch.long)
    spelt_source: list[int] = []
    spelt_target: list[int] = []
    i = j = 0
    while i < len(source) or j < len(target):
        i0, j0 = i, j
        left, right = 1, 1
        if i < len(source):
            left, i = source[i], i + 1
        if j < len(target) and (left != 1 or i0 == len(source)):
            right, j = target[j], j + 1
        while left != right:
            if left < right:
                left, i = left * source[i], i + 1
            else:
                right, j = right * target[j], j + 1
        holds_samples = any(ids.shape[d] != 1 for d in range(i0, i))
        spelt_source += source[i0:i] if holds_samples else [1] * (i - i0)
        spelt_target += target[j0:j] if holds_samples else [1] * (j - j0)
    return compressed(ids.expand(spelt_source).reshape(spelt_target))


def permuted(call: Call) -> Mark:
    _, layout = call.subject
    return call.layout(call.func(layout.ids, *call.args[1:], **call.kwargs))


def expanded(call: Call) -> Mark:
    _, layout = call.subject
    return call.layout(aligned(layout.ids, call.out.ndim))


def repeated(call: Call) -> Mark:
    _, layout = call.subject
    ids = call.func(layout.ids, *call.args[1:], **call.kwargs)
    # a dimension that holds no samples has size 1 in ids, whatever it is repeated to
    return call.layout(compressed(ids))


def indexed_along(call: Call) -> Mark:
    """Ops that pick, cut or reorder along one dimension."""
    tensor, layout = call.subject
    position = 1 if call.name not in DIM_IS_SECOND else 2
    given = call.arg(position, "dims" if call.name in ("flip", "roll") else "dim", 0)
    dims = [d % tensor.ndim for d in (given if isinstance(given, list | tuple) else [given])]
    if not any(layout.ids.shape[d] != 1 for d in dims):
        ids = layout.ids
        if call.out.ndim < tensor.ndim:
            ids = ids.squeeze(dims[0])
        elif call.out.ndim > tensor.ndim:
            ids = ids.unsqueeze(-1)
        return call.layout(ids)
    if call.name == "unfold":
        return Lost(call.name)
    args = [a.cpu() if isinstance(a, Tensor) else a for a in call.args[1:]]
    kwargs = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in call.kwargs.items()}
    out = call.func(layout.ids, *args, **kwargs)
    if isinstance(out, Tensor):
        return call.layout(compressed(out))
    return Several([call.layout(compressed(ids)) for ids in out])  # type: ignore[return-value]


class Several(list):
    """One mark for each of several results (chunk, split, unbind of the sample dimension)."""


def indexed(call: Call) -> Mark:
    """x[index]: the index is applied to the ids, spelt out along the dimensions that it consumes."""
    tensor, layout = call.subject
    if tensor is not call.args[0]:
        return Lost(call.name)  # a table of constants indexed by data
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    if any(isinstance(i, list) for i in index):
        index = tuple(torch.tensor(i) if isinstance(i, list) else i for i in index)
    index = tuple(i.cpu() if isinstance(i, Tensor) else i for i in index)
    consumed = sum(_consumed(i) for i in index)
    dots = [k for k, i in enumerate(index) if i is Ellipsis]
    if dots:
        fill = (slice(None),) * (tensor.ndim - consumed)
        index = index[: dots[0]] + fill + index[dots[0] + 1 :]
        consumed = tensor.ndim
    ids = layout.ids.expand([*tensor.shape[:consumed], *layout.ids.shape[consumed:]])
    return call.layout(compressed(ids[index]))


def _consumed(index: Any) -> int:
    if index is None or index is Ellipsis:
        return 0
    return index.ndim if isinstance(index, Tensor) and index.dtype == torch.bool else 1


def concatenated(call: Call) -> Mark:
    tensors = call.arg(0, "tensors")
    dim = call.arg(1, "dim", 0)
    new = 1 if call.name == "stack" else 0
    ndim = call.out.ndim
    dim = dim % ndim
    layouts = {id(t): mark for t, mark in call.marks if isinstance(mark, Layout)}

    def ids_of(t: Tensor) -> Tensor:
        ids = layouts[id(t)].ids
        return ids.unsqueeze(dim) if new else ids

    if all(new or layouts[id(t)].ids.shape[dim] == 1 for t in tensors if id(t) in layouts):
        same = merged(call, [ids_of(t) for t in tensors if id(t) in layouts])
        if isinstance(same, Layout):
            return same
    parts = []
    others = [size for d, size in enumerate(call.out.shape) if d != dim]
    for t in tensors:
        if t.ndim == 1 and t.numel() == 0 and ndim > 1:
            continue  # torch.cat skips empty vectors
        length = 1 if new else t.shape[dim]
        ids = ids_of(t) if id(t) in layouts else torch.full([1] * ndim, NO_SAMPLE)
        parts.append(ids.expand([*others[:dim], length, *others[dim:]]) if ids.ndim else ids)
    return call.layout(compressed(_cat_narrow(parts, dim)))


def _cat_narrow(parts: list[Tensor], dim: int) -> Tensor:
    """torch.cat without spelling out dimensions that no part spells out."""
    ndim = parts[0].ndim
    flat = [d for d in range(ndim) if d != dim and all(p.stride(d) == 0 or p.shape[d] == 1 for p in parts)]
    for d in flat:
        parts = [p.narrow(d, 0, 1) for p in parts]
    return torch.cat(parts, dim)


# --- ops that look along dimensions ----------------------------------------------------------------------------------


def reduction(call: Call) -> Mark:
    """Sums, maxima, norms: along dimensions of one sample they keep it, across samples they mix."""
    tensor, layout = call.subject
    if len(call.marks) > 1 or isinstance(call.arg(1, "other"), Tensor):
        return elementwise(call)  # torch.max(x, y)
    dims = _reduced_dims(call, tensor)
    if any(layout.ids.shape[d] != 1 for d in dims):
        counts = torch.bincount((layout.ids.flatten() + 1).clamp(min=0), minlength=layout.num_samples + 1)
        even = bool((counts[1:] == counts[-1]).all()) and int(counts[0]) == 0
        return call.mixed(linear=call.name in ("sum", "mean", "nansum"), even=even and call.name != "nansum")
    keep = [d for d in range(tensor.ndim) if d not in dims]
    ids = layout.ids if call.out.ndim == tensor.ndim else layout.ids.reshape([layout.ids.shape[d] for d in keep])
    return call.layout(ids)


def _reduced_dims(call: Call, tensor: Tensor) -> list[int]:
    position = 2 if call.name in ("norm", "linalg_vector_norm", "linalg_norm", "kthvalue") else 1
    dim = call.arg(position, "dim", call.kwargs.get("axis"))
    if dim is None or isinstance(dim, bool | torch.dtype) or (isinstance(dim, list | tuple) and not dim):
        return list(range(tensor.ndim))
    return [d % max(1, tensor.ndim) for d in (dim if isinstance(dim, list | tuple) else [dim])]


def along_dim(call: Call) -> Mark:
    """Softmax, cumulative sums, sorting: every element along one dimension meets the others."""
    tensor, layout = call.subject
    dim = call.arg(2 if call.name == "topk" else 1, "dim", -1)
    if isinstance(dim, bool):
        dim = -1
    return call.mixed() if layout.ids.shape[dim % max(1, tensor.ndim)] != 1 else layout


def last_dims(call: Call) -> Mark:
    """Ops that mix the last dimensions alone: layer norms, and glu along its own dimension."""
    tensor, layout = call.subject
    shape = call.arg(1, "normalized_shape", ())
    num = len(shape) if isinstance(shape, list | tuple | torch.Size) else 1
    if any(d >= tensor.ndim - num for d in layout.dims):
        return call.mixed()
    return layout


def images(call: Call) -> Mark:
    """Ops on [N, C, *spatial]: each row of N is handled alone."""
    tensor, layout = call.subject
    rank = next((int(c) for c in reversed(call.name) if c in "123"), call.out.ndim - 2)
    if tensor.ndim != rank + 2 or layout.dims not in ((0,), ()):
        return call.mixed()
    if call.name == "batch_norm" and call.arg(5, "training", False):
        return call.mixed()
    ids = layout.ids.reshape([layout.ids.shape[0]] + [1] * (call.out.ndim - 1))
    return merged(call, [ids] + [m.ids for t, m in call.marks[1:] if isinstance(m, Layout) and m.dims == (0,) and t.ndim])


def padded(call: Call) -> Mark:
    tensor, layout = call.subject
    pad = call.arg(1, "pad")
    touched = {tensor.ndim - 1 - k // 2 for k, size in enumerate(pad) if size}
    return Lost(call.name) if touched & set(layout.dims) else layout


def embedded(call: Call) -> Mark:
    """One more dimension than the ids have."""
    tensor, layout = call.subject
    if tensor.is_floating_point() or len(call.marks) > 1:  # the table itself depends on the batch
        return Lost(call.name)
    return call.layout(layout.ids.unsqueeze(-1))


def one_hot(call: Call) -> Mark:
    return call.layout(call.subject[1].ids.unsqueeze(-1))


def attention(call: Call) -> Mark:
    """Queries, keys and values of one sample meet; samples lie along leading dimensions."""
    ndim = call.out.ndim
    if any(d >= t.ndim - 2 for t, mark in call.marks if isinstance(mark, Layout) for d in mark.dims):
        return Lost(call.name)
    return merged(call, [aligned(mark.ids, ndim) for _, mark in call.marks if isinstance(mark, Layout)])


def loss(call: Call) -> Mark:
    """Losses element by element, or summed up over all."""
    tensor, _ = call.subject
    if call.out.ndim == 0 and tensor.ndim > 0:
        return call.mixed(linear=True, even=True)
    return elementwise(call)


def class_loss(call: Call) -> Mark:
    """Cross entropy: the class dimension goes; a mean over rows that do not all count gives samples unequal weight."""
    tensor, layout = call.subject
    if tensor is not call.args[0]:
        return Lost(call.name)
    class_dim = 1 if tensor.ndim > 1 else 0
    if class_dim in layout.dims:
        return call.mixed()
    target, weight = call.args[1], call.arg(2, "weight")
    if call.out.ndim == 0 and tensor.ndim > 1:
        mean = call.arg(3, "reduction", 1) == 1
        uneven = mean and (weight is not None or _ignores(call, target))
        return call.mixed(linear=True, even=not uneven)
    return call.layout(layout.ids.squeeze(class_dim))


def _ignores(call: Call, target: Tensor) -> bool:
    if target.is_floating_point():
        return False
    return bool((target == call.arg(4, "ignore_index", -100)).any())


# --- contractions ----------------------------------------------------------------------------------------------------


def contracted(call: Call) -> Mark:
    """Products: samples must lie along dimensions that the result keeps."""
    found = operands(call.name, call.args, call.kwargs)
    if found is None:
        return Lost(call.name)
    letters, tensors = found
    layouts = {id(t): mark for t, mark in call.marks if isinstance(mark, Layout)}
    all_ids = []
    for term, tensor in zip(letters.terms, tensors, strict=True):
        layout = layouts.get(id(tensor))
        if layout is None:
            continue
        if any(term[d] not in letters.out for d in layout.dims):
            return call.mixed()
        all_ids.append(along(layout.ids, term, letters.out))
    factors = {id(t) for t in tensors}
    added = [layout for key, layout in layouts.items() if key not in factors]  # addmm's input, a bias
    return merged(call, all_ids + [aligned(layout.ids, len(letters.out)) for layout in added])


# --- the table -------------------------------------------------------------------------------------------------------

LINEAR = set(
    "add radd iadd sub rsub isub neg pos clone contiguous to float double half bfloat16 type view_as detach cuda cpu "
    "requires_grad squeeze unsqueeze alias retain_grad".split()
)
"""Elementwise ops that keep a weighted sum a weighted sum."""
DIVIDING = set("div truediv itruediv true_divide divide".split())
SCALING = DIVIDING | set("mul rmul imul multiply".split())

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
        "xlogy xor zero zeros_like".split()
    )
)

RESHAPED = "view reshape flatten unflatten ravel reshape_as unsafe_view squeeze unsqueeze atleast_1d atleast_2d atleast_3d"
PERMUTED = "permute transpose swapaxes swapdims movedim moveaxis t T mT H mH adjoint"
DIM_IS_SECOND = {"chunk", "split", "split_with_sizes", "tensor_split", "roll", "repeat_interleave"}
INDEXED_ALONG = (
    "select narrow chunk split split_with_sizes tensor_split unbind index_select flip roll repeat_interleave unfold"
)
REDUCTIONS = (
    "sum mean prod amax amin max min argmax argmin any all logsumexp norm linalg_norm linalg_vector_norm var std var_mean "
    "std_mean median nanmean nansum nanmedian count_nonzero mode kthvalue aminmax"
)
ALONG_DIM = "softmax log_softmax cumsum cumprod cummax cummin logcumsumexp sort argsort topk glu"
IMAGES = (
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d max_pool1d max_pool2d max_pool3d avg_pool1d "
    "avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d "
    "adaptive_max_pool2d adaptive_max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices "
    "batch_norm group_norm instance_norm upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d "
    "upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d pixel_shuffle pixel_unshuffle channel_shuffle prelu "
    "grid_sampler"
)
LOSSES = (
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div "
    "soft_margin_loss poisson_nll_loss"
)


MOVES = (reshaped, permuted, expanded, repeated, indexed_along, indexed, concatenated)
"""Handlers of ops that only move elements."""


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
    **dict.fromkeys(LOSSES.split(), loss),
    **dict.fromkeys(["cross_entropy_loss", "nll_loss", "nll_loss_nd"], class_loss),
    **dict.fromkeys(["cat", "concat", "concatenate", "stack"], concatenated),
    **dict.fromkeys("matmul mm bmm mv addmm baddbmm addmv einsum linear".split(), contracted),
    **dict.fromkeys(["layer_norm", "rms_norm"], last_dims),
    **dict.fromkeys("new_zeros new_ones new_full new_empty new_tensor".split(), unmarked),
    "getitem": indexed,
    "pad": padded,
    "embedding": embedded,
    "one_hot": one_hot,
    "scaled_dot_product_attention": attention,
}
