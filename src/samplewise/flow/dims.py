"""Ops in which elements meet along some dimensions: those of one sample keep it, those across samples mix."""

import torch
from torch import Tensor

from samplewise.flow.call import Call, compressed, elementwise, merged, reduced
from samplewise.samples import Layout, Lost, Mark


def reduction(call: Call) -> Mark:
    """Sums, maxima, norms: along dimensions of one sample they keep it, across samples they mix."""
    tensor, layout = call.subject
    if len(call.marks) > 1 or isinstance(call.arg(1, "other"), Tensor):
        return elementwise(call)  # torch.max(x, y)
    dims = _reduced_dims(call, tensor)
    if any(layout.ids.shape[d] != 1 for d in dims):
        if call.name not in ("sum", "mean"):
            return call.mixed(linear=call.name == "nansum")
        if not all(d in dims for d in layout.dims):
            return call.mixed(linear=True, even=layout.is_even)
        return reduced(call, call.name, even=layout.is_even, num_elements=tensor.numel() // max(1, call.out.numel()))
    keep = [d for d in range(tensor.ndim) if d not in dims]
    ids = layout.ids if call.out.ndim == tensor.ndim else layout.ids.reshape([layout.ids.shape[d] for d in keep])
    return call.layout(ids)


def _reduced_dims(call: Call, tensor: Tensor) -> list[int]:
    """The dimensions that the call reduces: all of them where it names none."""
    position = 2 if call.name in ("norm", "linalg_vector_norm", "linalg_norm", "kthvalue") else 1
    dim = call.arg(position, "dim", -1 if call.name in ("kthvalue", "mode") else None)
    if dim is None or isinstance(dim, bool | torch.dtype) or (isinstance(dim, list | tuple) and not dim):
        return list(range(tensor.ndim))
    return [d % max(1, tensor.ndim) for d in (dim if isinstance(dim, list | tuple) else [dim])]


def along_dim(call: Call) -> Mark:
    """Softmax, cumulative sums, topk: every element along one dimension meets the others."""
    tensor, layout = call.subject
    dim = call.arg(2 if call.name == "topk" else 1, "dim", -1)
    if isinstance(dim, bool) or call.name == "multinomial":
        dim = -1
    return call.mixed() if layout.ids.shape[dim % max(1, tensor.ndim)] != 1 else layout


def sorted_along(call: Call) -> Mark:
    """Sorting across samples is a permutation, which the resulting order tells."""
    tensor, layout = call.subject
    default = 0 if call.name == "msort" else -1
    dim = call.arg(1, "dim", default)
    dim = (dim if isinstance(dim, int) and not isinstance(dim, bool) else default) % max(1, tensor.ndim)
    if layout.ids.shape[dim] == 1:
        return layout
    if tensor.is_floating_point():
        return call.mixed()  # ranks of values: which sample comes where depends on the others
    order = call.results[-1].cpu()
    return call.layout(compressed(layout.ids.expand(tensor.shape).gather(dim, order)))


def last_dims(call: Call) -> Mark:
    """layer_norm and rms_norm: the last dimensions meet."""
    tensor, layout = call.subject
    if tensor is not call.args[0] or len(call.marks) > 1:
        return Lost(call.name)  # a scale that depends on the batch
    shape = call.arg(1, "normalized_shape", ())
    num = len(shape) if isinstance(shape, list | tuple | torch.Size) else 1
    if any(d >= tensor.ndim - num for d in layout.dims):
        return call.mixed()
    return layout


def fourier(call: Call) -> Mark:
    """Fourier transforms: every element along their dimensions meets the others."""
    tensor, layout = call.subject
    default: int | tuple[int, ...] | range = -1
    if call.name.endswith("2"):
        default = (-2, -1)
    elif call.name.endswith("n"):
        default = range(tensor.ndim)
    given = call.arg(2, "dim")
    given = default if given is None else given
    dims = [given] if isinstance(given, int) else given
    return call.mixed() if any(layout.ids.shape[d] != 1 for d in dims) else layout


def images(call: Call) -> Mark:
    """Ops on [N, C, *spatial]: each row of N is handled alone."""
    tensor, _ = call.subject
    if call.name == "batch_norm" and call.arg(5, "training", False):
        return call.mixed()
    if call.name != "grid_sampler" and (len(call.marks) > 1 or tensor is not call.args[0]):
        return Lost(call.name)  # a kernel or a statistic that depends on the batch
    rank = next((int(c) for c in reversed(call.name) if c in "123"), tensor.ndim - 2)
    unbatched = call.name.startswith("conv") and tensor.ndim == rank + 1
    return _leading(call, num_lead=0 if unbatched else 1)


def pooled(call: Call) -> Mark:
    """Ops on [*lead, *spatial] that handle each element of the leading dimensions alone."""
    tensor, _ = call.subject
    rank = next(int(c) for c in reversed(call.name) if c in "123")
    return _leading(call, num_lead=tensor.ndim - rank)


def _leading(call: Call, *, num_lead: int) -> Mark:
    """Samples along the first `num_lead` dimensions stay there; further in they mix."""
    all_ids = []
    for _, mark in call.marks:
        assert isinstance(mark, Layout)
        if any(d >= num_lead for d in mark.dims):
            return call.mixed()
        all_ids.append(mark.ids.reshape([*mark.ids.shape[:num_lead], *[1] * (call.out.ndim - num_lead)]))
    return merged(call, all_ids)
