"""What each kernel means: the mathematics in torch, in float32 or better."""

import torch
from torch import Tensor

from samplewise.factors.base import wide


def gram_sq_norms(a_BTI: Tensor, g_BTO: Tensor) -> tuple[Tensor, Tensor]:
    """(n, m): n[b] = sum_{s,t} <a_s, a_t> <g_s, g_t> = |sum_t g_t ⊗ a_t|², and m[b] = (sum_t |a_t| |g_t|)², which bounds it."""
    a, g = wide(a_BTI), wide(g_BTO)
    lengths_BT = torch.linalg.vector_norm(a, dim=2) * torch.linalg.vector_norm(g, dim=2)
    return ((a @ a.mT) * (g @ g.mT)).sum((1, 2)), lengths_BT.sum(1).square()


def direct_sq_norms(a_BTI: Tensor, g_BTO: Tensor) -> Tensor:
    """n[b] = |sum_t g_t ⊗ a_t|²."""
    return (wide(g_BTO).mT @ wide(a_BTI)).square().sum((1, 2))
