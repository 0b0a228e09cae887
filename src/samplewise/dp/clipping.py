"""Sums of per-sample gradients in which no sample counts for more than a bound."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from samplewise.choice import Groups, grouped
from samplewise.parameter import kept
from samplewise.precision import rounded_kinds
from samplewise.queries import Grads

WHOLE = ""
"""The one group of a flat bound."""
MARGIN = {torch.float64: 1e-9, torch.float32: 1e-4}
"""By how much a norm may come out too small, relative to itself: it is taken for so much larger. Sums that cancel down to a
thousandth of their terms are taken as they are (`factors.base.mended`), which in float32 leaves 3e-5."""
COARSE_MARGIN = 2.0**-7
"""The same where products or gradients are rounded to 8 or 11 bits: bfloat16, float16, TF32."""
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Automatic:
    """Every gradient scaled to about the bound, C · G[b] / (‖G[b]‖ + eps) (AUTO-S, Bu et al., 2023): the bound need not be tuned."""

    eps: float = 0.01


@dataclass(frozen=True)
class Clipped:
    """What a batch gives to a private step."""

    sums: dict[str, Tensor]
    """{name: sum_b w[b] G[b]} in float32 or better, for the parameters that took part."""
    num_samples: int
    is_below: Tensor
    """For each sample whether it has, in every group, a norm up to the bound."""


def bounds_of(
    aliases: Mapping[str, str], max_grad_norm: float | Mapping[str, float], groups: Groups | None
) -> dict[str, float]:
    """{group: bound on a sample's gradient in it}; `aliases` has for every name of a parameter its first.

    One number bounds the whole gradient: split evenly over G groups, C_g = C / sqrt(G).

    >>> bounds_of({"a.weight": "a.weight", "b.weight": "b.weight", "c.weight": "c.weight", "d.weight": "d.weight"}, 1.0, "layer")
    {'a': 0.5, 'b': 0.5, 'c': 0.5, 'd': 0.5}
    """
    names = [WHOLE] if groups is None else list(grouped(aliases, groups))
    if not isinstance(max_grad_norm, Mapping):
        return dict.fromkeys(names, max_grad_norm / math.sqrt(len(names)))
    if groups is None or max_grad_norm.keys() != set(names):
        raise ValueError(f"max_grad_norm has bounds for {sorted(max_grad_norm)}, the groups are {sorted(names)}")
    return {name: float(max_grad_norm[name]) for name in names}


Bound = float | Tensor
"""A bound on a sample's gradient; a tensor with one number is read when a compiled step runs."""


def clip_weights(norms: Tensor, bound: Bound, *, eps: float | None = None, margin: float = 0.0) -> Tensor:
    """w with w[b] = min(1, C / n[b]), or C / (n[b] + eps) with eps (AUTO-S, Bu et al., 2023); 0 where n is not finite.

    **Guarantee.** w[b] · n[b] <= C, for norms that are too small by at most `margin` of themselves.

    | n | w | with eps |
    |-|-|-|
    | 0 | 1 | C / eps |
    | up to C / (1 + margin) | 1 | below C / n |
    | above | C / (n (1 + margin)) | below C / n |
    | inf, NaN | 0 | 0 |
    | C = inf | 1 | refused |
    | C a tensor with NaN, 0 or less | NaN | NaN |

    >>> clip_weights(torch.tensor([0.0, 0.5, 4.0, torch.inf, torch.nan]), 2.0).tolist()
    [1.0, 1.0, 0.5, 0.0, 0.0]
    """
    if not isinstance(bound, Tensor) and not bound > 0:
        raise ValueError(f"a bound on gradients is positive, got {bound}")
    if eps is not None and not (eps > 0 and (isinstance(bound, Tensor) or bound < math.inf)):
        raise ValueError(f"automatic clipping takes a positive eps and a finite bound, got {eps} and {bound}")
    n = norms.to(torch.promote_types(norms.dtype, torch.float32)) * (1 + margin)
    bound = bound.to(n) if isinstance(bound, Tensor) else n.new_full((), bound)  # torch divides a number as 1 / n * bound
    w = torch.where(n > bound, bound / n, 1.0) if eps is None else bound / (n + eps)
    return torch.where(n.isfinite(), torch.where(bound > 0, w, torch.nan), 0.0)


def clipped(grads: Grads, bounds: Mapping[str, Bound], *, groups: Groups | None = None, eps: float | None = None) -> Clipped:
    """{name: sum_b w_g[b] G[b]}, w_g[b] = min(1, C_g / ‖G_g[b]‖) or C_g / (‖G_g[b]‖ + eps), for each group g of parameters.

    **Guarantee.** One sample more or less changes the sums of group g by at most C_g in the 2-norm, and by at most
    sqrt(sum_g C_g²) together. Norms are taken over all uses of a parameter, in float32 or better, and taken for so much larger
    as they may be wrong by (`MARGIN`). Sums are float32 or better whatever the model is; that the rounding of a sum of others
    changes when a sample joins is not counted (in float32 6e-8 of the sum, element by element).

    | sample | counts with |
    |-|-|
    | gradient 0 | 0 |
    | norm above 1e19 in float32 (its square overflows), inf, NaN, in any group | 0, in all groups |
    | NaN in another sample | what it would without |
    | none (batch of 0) | sums of 0 |
    | half precision, also on the way from a weight to its parameter | its own gradient rounded; the sum is not |
    """
    names_of = {WHOLE: list(grads)} if groups is None else grouped(grads._aliases, groups)
    B = grads.batch_size or 0
    if not len(grads) or B == 0:
        return Clipped({}, B, torch.zeros(B, dtype=torch.bool))
    norms = {WHOLE: grads.norms()} if groups is None else grads.norms(groups=groups)
    margin = _margin(grads)
    weights = {g: clip_weights(n, bounds[g], eps=eps, margin=margin) for g, n in norms.items()}
    below = torch.stack([n * (1 + margin) <= bounds[g] for g, n in norms.items()]).all(0)
    counted = torch.stack([n.isfinite() for n in norms.values()]).all(0)
    sums = {}
    for g, names in names_of.items():
        keep, w = kept(torch.where(counted, weights[g], 0.0), B)
        sums |= {name: grads[name]._wide_weighted_sum(keep, w) for name in names if name in grads}
    return Clipped(sums, B, below & counted)


def _margin(grads: Grads) -> float:
    """By how much norms of these gradients may be too small."""
    dtypes = {note.dtype for notes in grads.notes.values() for note in notes}
    dtypes |= {p.dtype for p in grads.parameters.values()}
    if dtypes & set(HALF) or rounded_kinds(grads.parameters.values(), dtypes):
        return COARSE_MARGIN
    return max(MARGIN.get(dtype.to_real(), MARGIN[torch.float32]) for dtype in dtypes)
