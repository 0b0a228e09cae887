"""Linear layers, matrix products and einsum: weights that multiply."""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samplewise.contraction import Contraction, along, in_order, operands
from samplewise.factors.blocks import Blocks
from samplewise.factors.dense import Dense
from samplewise.factors.outer import Outer
from samplewise.ops.pointwise import spread_sum
from samplewise.ops.registry import Meeting, rule
from samplewise.samples import Layout, same_ids


@rule(F.linear)
def linear(meeting: Meeting, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """y = x @ weight.T + bias, so weight gets g ⊗ x and bias gets g."""
    if not meeting.is_data(input) or meeting.is_data(weight) or meeting.is_data(bias) or weight.ndim != 2:
        return NotImplemented
    rows = meeting.rows(input, features=1)
    if rows is None:
        return NotImplemented
    meeting.use(weight, lambda g, x: Outer.of_rows(rows(x), rows(g)), keep=(input,))
    meeting.use(bias, lambda g: Dense.of_sum(rows(g)))
    return meeting.run()


@rule(
    torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__,
    torch.mm, torch.Tensor.mm, torch.bmm, torch.Tensor.bmm, torch.mv, torch.Tensor.mv, torch.einsum,
    torch.sparse.mm, torch.inner, torch.Tensor.inner, torch.tensordot,
)  # fmt: skip
def product(meeting: Meeting, *args: Any, **kwargs: Any) -> Any:
    """y = x · w over the letters they share, so w gets g ⊗ x over the letters they do not."""
    if not _use_product(meeting, operands(meeting.name, args, kwargs)):
        return NotImplemented
    return meeting.run()


@rule(
    torch.addmm, torch.Tensor.addmm, torch.baddbmm, torch.Tensor.baddbmm, torch.addmv, torch.Tensor.addmv,
    torch.sparse.addmm,
)  # fmt: skip
def added_product(meeting: Meeting, input: Tensor, *args: Any, beta: Any = 1, alpha: Any = 1, **kwargs: Any) -> Any:
    """y = beta·input + alpha·x @ w, so input gets beta·g and w gets alpha·g ⊗ x."""
    factors = operands(meeting.name, (input, *args), kwargs)
    if factors is None or beta == 0:
        return NotImplemented
    letters, tensors = factors
    if any(map(meeting.is_weight, tensors)) and not _use_product(meeting, factors, scale=alpha):
        return NotImplemented
    if meeting.is_weight(input):
        data = [(t, term) for t, term in zip(tensors, letters.terms, strict=True) if meeting.is_data(t)]
        if len(data) != 1:
            return NotImplemented
        ((x, term),) = data
        if any(term[d] not in letters.out for d in meeting.layout(x).dims):
            return NotImplemented
        of_x = meeting.layout(x)
        layout = of_x.derived((term, letters.out), lambda: along(of_x.ids, term, letters.out))
        shape = tuple(input.shape)
        meeting.use(input, lambda g: spread_sum(g if beta == 1 else g * beta.conjugate(), layout, shape))
    return meeting.run()


@rule(F.bilinear)
def bilinear(meeting: Meeting, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """y_o = x1 · weight_o · x2 + bias_o, so weight gets g ⊗ x1 ⊗ x2 and bias gets g."""
    data = [x for x in (input1, input2) if meeting.is_data(x)]
    others = [t for t in (weight, bias) if meeting.is_data(t)]
    layouts = [meeting.layout(x) for x in data]
    if others or any(map(meeting.is_weight, (input1, input2))) or not data:
        return NotImplemented
    if any(not same_ids(layout, layouts[0]) for layout in layouts) or input1.ndim - 1 in layouts[0].dims:
        return NotImplemented
    rows = layouts[0].fold(1)
    shape = tuple(weight.shape)

    def outer(g: Tensor, x1: Tensor, x2: Tensor) -> Outer:
        a = rows((x1.unsqueeze(-1) * x2.unsqueeze(-2)).flatten(-2))
        return Outer(a.unsqueeze(2), rows(g).unsqueeze(2), sizes=shape, order=(0, 1, 2), shape=shape)

    meeting.use(weight, outer, keep=(input1, input2))
    meeting.use(bias, lambda g: Dense.of_sum(rows(g)))
    return meeting.run()


@rule(*(f for f in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)) if f is not None))
def grouped_product(meeting: Meeting, input: Tensor, mat2: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Rows of x, sorted by group, each times the matrix of its group (experts): weight[e] gets g ⊗ x of its rows."""
    offs = args[0] if args else kwargs.get("offs")
    if not meeting.is_data(input) or not meeting.is_weight(mat2) or offs is None or input.ndim != 2 or mat2.ndim != 3:
        return NotImplemented
    layout = meeting.layout(input)
    if 1 in layout.dims:
        return NotImplemented
    ids = layout.ids.expand(input.shape[0], 1).squeeze(1)
    ends = offs.tolist()
    cuts = list(zip([0, *ends[:-1]], ends, strict=True))
    folds = [Layout(ids[start:end], layout.num_samples).fold(0) for start, end in cuts]

    def blocks(g: Tensor, x: Tensor) -> Blocks:
        parts = [(fold(g[start:end]), fold(x[start:end])) for fold, (start, end) in zip(folds, cuts, strict=True)]
        return Blocks([Outer.of_rows(g_BTO, x_BTI) for g_BTO, x_BTI in parts])

    meeting.use(mat2, blocks, keep=(input,))
    return meeting.func(input, meeting.plain(mat2), *args, **kwargs)


def _use_product(meeting: Meeting, factors: tuple[Contraction, list[Tensor]] | None, *, scale: Any = 1) -> bool:
    """Records the use of the weight in a product of one weight and one tensor of data; False if it is something else."""
    if factors is None:
        return False
    letters, tensors = factors
    if len(tensors) != 2:
        return False
    w_at = 1 if meeting.is_weight(tensors[1]) else 0
    w, x = tensors[w_at], tensors[1 - w_at]
    if not meeting.is_weight(w) or not meeting.is_data(x):
        return False
    w_term, x_term = letters.terms[w_at], letters.terms[1 - w_at]
    outer_of = _outer_of(x_term, w_term, letters.out, tuple(x.shape), tuple(w.shape), meeting.layout(x))
    if outer_of is None:
        return False
    meeting.use(w, lambda g, x: outer_of(x, g * scale.conjugate() if scale != 1 else g), keep=(x,))
    return True


@lru_cache(maxsize=1024)  # layers and steps repeat
def _outer_of(
    x_term: str, w_term: str, out: str, x_shape: tuple[int, ...], w_shape: tuple[int, ...], layout: Layout
) -> Callable[[Tensor, Tensor], Outer] | None:
    """(x, g) → Outer, or None where the product has no such form.

    Letters of w are groups (in x and y too), inputs (in x alone) or outputs (in y alone); the other letters of x are
    positions, samples among them.
    """
    sizes = dict(zip(w_term, w_shape, strict=True))
    x_sizes = dict(zip(x_term, x_shape, strict=True))
    if any(sizes[c] != x_sizes.get(c, sizes[c]) for c in w_term):  # broadcast against each other
        return None
    groups = [c for c in w_term if c in x_term and c in out]
    inputs = [c for c in w_term if c in x_term and c not in out]
    outputs = [c for c in w_term if c not in x_term and c in out]
    positions = [c for c in x_term if c not in w_term]
    if len(groups) + len(inputs) + len(outputs) != len(w_term) or any(c not in out for c in positions):
        return None
    if any(x_term[d] not in positions for d in layout.dims):
        return None
    rows = layout.derived((x_term, "".join(positions)), lambda: along(layout.ids, x_term, "".join(positions))).fold(0)
    extents = [math.prod(sizes[c] for c in part) for part in (groups, inputs, outputs)]
    num_groups, num_inputs, num_outputs = extents
    ordered = groups + outputs + inputs
    of_sizes, order = tuple(sizes[c] for c in ordered), tuple(ordered.index(c) for c in w_term)
    of_x, of_g = "".join(positions + groups + inputs), "".join(positions + groups + outputs)

    B, num_rows = layout.num_samples, math.prod(x_sizes[c] for c in positions)

    def outer(x: Tensor, g: Tensor) -> Outer:
        a, g = in_order(x, x_term, of_x), in_order(g, out, of_g)
        if rows.is_leading and num_rows:
            a = a.reshape(B, num_rows // B, num_groups, num_inputs)
            return Outer(a, g.reshape(B, num_rows // B, num_groups, num_outputs), sizes=of_sizes, order=order, shape=w_shape)
        lead = a.shape[: len(positions)]
        a, g = a.reshape(*lead, num_groups, num_inputs), g.reshape(*lead, num_groups, num_outputs)
        return Outer(rows(a), rows(g), sizes=of_sizes, order=order, shape=w_shape)

    return outer
