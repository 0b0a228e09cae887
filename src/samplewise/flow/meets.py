"""Ops in which elements meet: within a sample it stays that sample, across samples they mix."""

from itertools import pairwise

import torch
from torch import Tensor

from samplewise.contraction import along, operands
from samplewise.flow.call import Call, Several, aligned, compressed, elementwise, merged, reduced
from samplewise.samples import NO_SAMPLE, Layout, Lost, Mark, Mixed
from samplewise.tracing import occurs


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
    position = 2 if call.name in ("norm", "linalg_vector_norm", "linalg_norm", "kthvalue") else 1
    dim = call.arg(position, "dim", -1 if call.name in ("kthvalue", "mode") else None)
    if dim is None or isinstance(dim, bool | torch.dtype) or (isinstance(dim, list | tuple) and not dim):
        return list(range(tensor.ndim))
    return [d % max(1, tensor.ndim) for d in (dim if isinstance(dim, list | tuple) else [dim])]


def along_dim(call: Call) -> Mark:
    """Softmax, cumulative sums, sorting: every element along one dimension meets the others."""
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


def routed_product(call: Call) -> Mark:
    """grouped_mm(x, w, offs=...): row i of the result is row i of x times the matrix of its group."""
    tensor, layout = call.subject
    return layout if tensor is call.args[0] and 1 not in layout.dims and tensor.ndim == 2 else Lost(call.name)


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


def paired_rows(call: Call) -> Mark:
    """bilinear(x1, x2, weight): rows of the two inputs meet one to one."""
    inputs = [(t, mark) for t, mark in call.marks if isinstance(mark, Layout) and any(t is a for a in call.args[:2])]
    if len(inputs) != len(call.marks) or any(t.ndim - 1 in mark.dims for t, mark in inputs):
        return Lost(call.name)
    return merged(call, [mark.ids for _, mark in inputs])


def recurrent(call: Call) -> Several | Mark:
    """rnn, lstm and gru: (outputs in the layout of the input, last states with the samples second)."""
    tensor, layout = call.subject
    if tensor is not call.args[0] or any(d == tensor.ndim - 1 for d in layout.dims):
        return Lost(call.name)
    of_states = [mark for _, mark in call.marks[1:] if isinstance(mark, Layout)]
    if tensor.ndim == 2:  # packed: the first rows are those of step 0, one a sample
        states = layout.ids[: call.results[1].shape[1]].reshape(1, -1, 1)
    else:
        (axis,) = layout.dims or (0,)
        states = layout.ids.reshape(1, -1, 1) if axis in (0, 1) else None
        batch_first = call.args[-1] if isinstance(call.args[-1], bool) else False
        if states is None or axis != (0 if batch_first else 1):
            return call.mixed()
    if any(not torch.equal(mark.ids, states) for mark in of_states):
        return call.mixed()  # a state of another sample
    return Several([layout, *[call.layout(states)] * (len(call.results) - 1)])


def cell(call: Call) -> Mark:
    """One step of an rnn: rows of the input and of the states meet one to one."""
    inputs = [(t, mark) for t, mark in call.marks if isinstance(mark, Layout)]
    if any(t.ndim - 1 in mark.dims for t, mark in inputs):
        return call.mixed()
    return merged(call, [mark.ids for _, mark in inputs])


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
    if tensor is not call.args[0] or len(call.marks) > 1:
        return Lost(call.name)  # a scale that depends on the batch
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


def ctc(call: Call) -> Mark:
    """ctc_loss(log_probabilities [T, B, C], ...): one loss a sample, or their sum, or a mean weighted by lengths."""
    tensor, layout = call.subject
    if tensor is not call.args[0] or layout.dims != (1,) or tensor.ndim != 3:
        return Lost(call.name)
    reduction = call.arg(5, "reduction", 1)
    if reduction == 0:
        return call.layout(layout.ids.flatten())
    return reduced(call, "sum" if reduction == 2 else "mean", even=reduction == 2)


def one_hot(call: Call) -> Mark:
    return call.layout(call.subject[1].ids.unsqueeze(-1))


def attention(call: Call) -> Mark:
    """Queries, keys and values of one sample meet; samples lie along leading dimensions, or packed behind a block mask."""
    ndim = call.out.ndim
    if any(isinstance(mark, Mixed) for _, mark in call.marks):
        return _packed_attention(call)
    if any(d >= t.ndim - 2 for t, mark in call.marks if isinstance(mark, Layout) for d in mark.dims):
        return _packed_attention(call)
    return merged(call, [aligned(mark.ids, ndim) for _, mark in call.marks if isinstance(mark, Layout)])


def _packed_attention(call: Call) -> Mark:
    """Several samples in one sequence: the mask must let each see itself alone."""
    call.was_tried = True
    layouts = {id(t): mark for t, mark in call.marks if isinstance(mark, Layout)}
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
    layouts = {id(t): mark for t, mark in call.marks if isinstance(mark, Layout)}
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


COMPARING = set(
    "triplet_margin_loss cosine_embedding_loss multi_margin_loss multilabel_margin_loss pairwise_distance".split()
)
"""Losses of which one term is made of a whole row."""


def loss(call: Call) -> Mark:
    """Losses of rows that meet one to one, summed up over all or not; some compare along the last dimension."""
    ndim = max(t.ndim for t, _ in call.marks)
    met = merged(call, [aligned(mark.ids, ndim) for _, mark in call.marks if isinstance(mark, Layout)])
    if not isinstance(met, Layout):
        return met
    if call.name in COMPARING and ndim - 1 in met.dims:
        return call.mixed()
    if call.out.ndim == 0 and ndim > 0:
        shape = torch.broadcast_shapes(*(t.shape for t, _ in call.marks))
        return reduced(call, _given_reduction(call), even=met.is_even, num_elements=shape.numel())
    if call.out.ndim == ndim - 1 and ndim - 1 not in met.dims:
        return call.layout(met.ids.squeeze(-1))
    return met if call.out.ndim == ndim else call.mixed()


def _given_reduction(call: Call) -> str | None:
    """What the call says it does over all terms; the innermost losses take a number."""
    position = {
        "hinge_embedding_loss": 3, "binary_cross_entropy": 3, "binary_cross_entropy_with_logits": 4, "cosine_embedding_loss": 4,
        "margin_ranking_loss": 4, "poisson_nll_loss": 5, "multi_margin_loss": 5, "triplet_margin_loss": 7,
    }.get(call.name, 2)  # fmt: skip
    return {1: "mean", 2: "sum"}.get(call.arg(position, "reduction"))


def compared(call: Call) -> Mark:
    """cosine_similarity(x1, x2, dim): rows meet one to one and the compared dimension goes."""
    ndim = max(t.ndim for t, _ in call.marks)
    met = merged(call, [aligned(mark.ids, ndim) for _, mark in call.marks if isinstance(mark, Layout)])
    dim = call.arg(2, "dim", 1) % max(1, ndim)
    if not isinstance(met, Layout) or dim in met.dims:
        return call.mixed()
    return call.layout(met.ids.squeeze(dim))


def crossed(call: Call) -> Mark:
    """cross(x, y, dim): the three elements along the dimension meet."""
    ndim = call.out.ndim
    met = merged(call, [aligned(mark.ids, ndim) for _, mark in call.marks if isinstance(mark, Layout)])
    dim = call.arg(2, "dim", -1 if call.name == "linalg_cross" else None)
    return call.mixed() if dim is None or (isinstance(met, Layout) and dim % ndim in met.dims) else met


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
        even = met.is_even if not mean else weight is None and _counts_evenly(call, target, met)
        return reduced(call, "mean" if mean else "sum", even=even, num_elements=tensor.numel() // tensor.shape[class_dim])
    return met


def _counts_evenly(call: Call, target: Tensor, layout: Layout) -> bool:
    """Whether as many targets count for every sample; those of `ignore_index` do not."""
    call.was_tried = True
    if target.is_floating_point():
        return layout.is_even
    if layout.has_strays or layout.num_samples == 0:
        return not layout.has_strays
    rows, ignored = layout.fold(0), call.arg(4, "ignore_index", -100)

    def differ() -> Tensor:
        counts = rows(target != ignored).sum(1)
        return (counts != counts[0]).any()

    return not occurs(differ)


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
