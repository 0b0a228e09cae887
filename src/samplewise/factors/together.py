"""Small gradients of many parameters side by side: one op instead of one each."""

from collections.abc import Mapping

import torch
from torch import Tensor

from samplewise.factors.base import Factor, sq_lengths
from samplewise.factors.dense import Dense
from samplewise.precision import wide, wide_dtype

MAX_ELEMENTS = 1 << 14
"""Gradients of more elements a sample are not copied: an op on them takes longer than its call."""


class Together:
    """G = [G_1, G_2, ...] for the parameters of these names."""

    def __init__(self, factors: Mapping[str, Dense]):
        self._shapes = {name: factor.shape for name, factor in factors.items()}
        self._G_BN = torch.cat(
            [wide(f.G) if f.G.ndim == 2 else wide(f.G).reshape(f.num_samples, f.num_elements) for f in factors.values()],
            1,
        )
        self.device = self._G_BN.device

    def sq_norms(self) -> Tensor:
        """n with n[b] = sum |G[b]|², shape [B]."""
        return sq_lengths(self._G_BN)

    def weighted_sums(self, w_B: Tensor, samples: Tensor | None, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """{name: sum_b w[b] G_name[b]} over these samples, or all; each in its dtype and in memory of its own."""
        G = self._G_BN if samples is None else self._G_BN[samples]
        total, wanted = w_B.to(G.dtype) @ G, {dtypes[name] for name in self._shapes}
        total = total.to(wanted.pop()) if len(wanted) == 1 else total  # one op in place of many
        parts = total.split([torch.Size(shape).numel() for shape in self._shapes.values()])
        own = torch._foreach_mul(parts, 1.0) if G.is_cuda else [part.clone() for part in parts]  # one op there, many here
        return {n: t.reshape(shape).to(dtypes[n]) for (n, shape), t in zip(self._shapes.items(), own, strict=True)}


def small(factors: Mapping[str, Factor]) -> tuple[list[Together], dict[str, Factor]]:
    """The small ones among the factors put together, and the others."""
    groups: dict[tuple[torch.device, torch.dtype], dict[str, Dense]] = {}
    others: dict[str, Factor] = {}
    for name, factor in factors.items():
        if type(factor) is Dense and factor.num_elements <= MAX_ELEMENTS:
            key = factor.G.device, wide_dtype(factor.G)
            if key not in groups:
                groups[key] = {}
            groups[key][name] = factor
        else:
            others[name] = factor
    for group in groups.values():
        if len(group) == 1:
            others |= group
    return [Together(group) for group in groups.values() if len(group) > 1], others
