"""Ops in which elements meet: within a sample it stays that sample, across samples they mix."""

import torch
from torch import Tensor

from samplewise.contraction import along, operands
from samplewise.flow.call import Call, Several, aligned, compressed, elementwise, merged
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
        return call.mixed(linear=True, even=layout.is_even, reduction=call.name)
    keep = [d for d in range(tensor.ndim) if d not in dims]
    ids = layout.ids if call.out.ndim == tensor.ndim else layout.ids.reshape([layout.ids.shape[d] for d in keep])
    return call.layout(ids)


def _reduced_dims(call: Call, tensor: Tensor) -> list[int]:
    position = 2 if call.name in ("norm", "linalg_vector_norm", "linalg_norm", "kthvalue") else 1
    dim = call.arg(position, "dim", -1 if call.name in ("kthvalue", "mode") else None)
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


def sorted_along(call: Call) -> Mark:
    """Sorting across samples is a permutation, which the resulting order tells."""
    tensor, layout = call.subject
    dim = call.arg(1, "dim", -1)
    dim = (dim if isinstance(dim, int) and not isinstance(dim, bool) else -1) % max(1, tensor.ndim)
    if layout.ids.shape[dim] == 1:
        return layout
    if tensor.is_floating_point():
        return call.mixed()  # ranks of values: which sample comes where depends on the others
    order = call.results[-1].cpu()
    return call.layout(compressed(layout.ids.expand(tensor.shape).gather(dim, order)))


def routed_product(call: Call) -> Mark:
    """grouped_mm(x, w, offs=...): row i of the result is row i of x times the matrix of its group."""
    tensor, layout = call.subject
    return layout if tensor is call.args[0] and 1 not in layout.dims and tensor.ndim == 2 else Lost(call.name)


def bags(call: Call) -> Mark:
    """embedding_bag: one row a bag; the bags' samples are those of the offsets, or of the rows of ids."""
    for t, mark in call.marks:
        if isinstance(mark, Layout) and not t.is_floating_point():
            return call.layout(mark.ids.reshape([mark.ids.shape[0], 1])) if mark.dims in ((0,), ()) else call.mixed()
    return Lost(call.name)


def paired_rows(call: Call) -> Mark:
    """bilinear(x1, x2, weight): rows of the two inputs meet one to one."""
    inputs = [(t, mark) for t, mark in call.marks if isinstance(mark, Layout) and t.ndim == call.out.ndim]
    if len(inputs) != len(call.marks) or any(t.ndim - 1 in mark.dims for t, mark in inputs):
        return Lost(call.name)
    return merged(call, [mark.ids for _, mark in inputs])


def recurrent(call: Call) -> Several | Mark:
    """rnn, lstm and gru: (outputs in the layout of the input, last states with the samples second)."""
    tensor, layout = call.subject
    if tensor is not call.args[0] or any(d == tensor.ndim - 1 for d in layout.dims):
        return Lost(call.name)
    if tensor.ndim == 2:  # packed: the first rows are those of step 0, one a sample
        states = layout.ids[: call.results[1].shape[1]].reshape(1, -1, 1)
    else:
        (axis,) = layout.dims or (0,)
        states = layout.ids.reshape(1, -1, 1) if axis in (0, 1) else None
        batch_first = call.args[-1] if isinstance(call.args[-1], bool) else False
        if states is None or axis != (0 if batch_first else 1):
            return call.mixed()
    return Several([layout, *[call.layout(states)] * (len(call.results) - 1)])


def packed(call: Call) -> Several | Mark:
    """_pack_padded_sequence(x, lengths, batch_first): the ids packed in the same way."""
    tensor, layout = call.subject
    if tensor is not call.args[0]:
        return Lost(call.name)
    shape = tensor.shape[:2]
    ids = layout.ids.expand([*shape, *layout.ids.shape[2:]])
    data, _ = call.func(ids, *call.args[1:])
    return Several([call.layout(data), None])


def unpacked(call: Call) -> Several | Mark:
    """_pad_packed_sequence(data, batch_sizes, batch_first, ...): a row is of one sample, its padding too."""
    tensor, layout = call.subject
    ids = layout.ids.expand([len(tensor), *layout.ids.shape[1:]])
    padded, _ = call.func(ids, call.args[1], call.args[2], 0, call.args[4])
    time = 1 if call.args[2] else 0
    return Several([call.layout(padded.narrow(time, 0, 1)), None])


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
    tensor, _ = call.subject
    if call.name == "batch_norm" and call.arg(5, "training", False):
        return call.mixed()
    if len(call.marks) > 1 and call.name != "grid_sampler":
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


def fourier(call: Call) -> Mark:
    """Fourier transforms mix along their dimensions."""
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
    """Losses of rows that meet one to one, summed up over all or not."""
    ndim = max(t.ndim for t, _ in call.marks)
    met = merged(call, [aligned(mark.ids, ndim) for _, mark in call.marks if isinstance(mark, Layout)])
    if not isinstance(met, Layout):
        return met
    if call.out.ndim == 0 and ndim > 0:
        return call.mixed(linear=True, even=met.is_even)
    if call.out.ndim == ndim - 1 and ndim - 1 not in met.dims:
        return call.layout(met.ids.squeeze(-1))
    return met if call.out.ndim == ndim else call.mixed()


def compared(call: Call) -> Mark:
    """cosine_similarity(x1, x2, dim): rows meet one to one and the compared dimension goes."""
    ndim = max(t.ndim for t, _ in call.marks)
    met = merged(call, [aligned(mark.ids, ndim) for _, mark in call.marks if isinstance(mark, Layout)])
    dim = call.arg(2, "dim", 1) % max(1, ndim)
    if not isinstance(met, Layout) or dim in met.dims:
        return call.mixed()
    return call.layout(met.ids.squeeze(dim))


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
        uneven = mean and (weight is not None or _ignores(call, target))
        reduction = "mean" if mean else "sum"
        return call.mixed(linear=True, even=not uneven and met.is_even, reduction=reduction)
    return met


def _ignores(call: Call, target: Tensor) -> bool:
    if target.is_floating_point():
        return False
    return bool((target == call.arg(4, "ignore_index", -100)).any())


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
