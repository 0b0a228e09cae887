"""Sums of outer products: the gradient of every weight that multiplies."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from samplewise.factors.base import Factor, Hasty, arrange, fitting, mended, sq_lengths, squares
from samplewise.fused import direct_sq_norms, gram_sq_norms, has_kernel
from samplewise.plan import TILE, Use, norm_route, use_of
from samplewise.precision import HALF, kept_dtype, scaled, wide, wide_dtype, wide_product
from samplewise.tracing import is_tracing


class Outer(Factor):
    """G[b] = sum_t g[b,t] ⊗ conj(a[b,t]) for each group, viewed as the weight.

    `a_BTGI` are the op's inputs, `g_BTGO` the gradients of its outputs, G groups that do not meet (1 for a linear layer).
    The product [G, O, I] is viewed as `sizes`, permuted to `order` and viewed as `shape`, which is the weight's.

    >>> a, g = torch.ones(1, 2, 3), torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    >>> Outer.of_rows(a, g).materialize().tolist()
    [[[4.0, 4.0, 4.0], [6.0, 6.0, 6.0]]]
    """

    def __init__(
        self,
        a_BTGI: Tensor,
        g_BTGO: Tensor,
        *,
        sizes: tuple[int, ...],
        order: tuple[int, ...],
        shape: tuple[int, ...],
    ):
        self.a, self.g = a_BTGI if a_BTGI.dtype is g_BTGO.dtype else a_BTGI.to(g_BTGO.dtype), g_BTGO
        self.sizes, self.order, self.shape = sizes, order, shape
        self.num_samples = a_BTGI.shape[0]
        self._use: Use | None = None
        self._is_simple: bool | None = None

    @classmethod
    def of_rows(cls, a_BTI: Tensor, g_BTO: Tensor) -> "Outer":
        """The factor of a weight [O, I]."""
        shape = (g_BTO.shape[-1], a_BTI.shape[-1])
        return cls(a_BTI.unsqueeze(2), g_BTO.unsqueeze(2), sizes=shape, order=(0, 1), shape=shape)

    def materialize(self) -> Tensor:
        if self.is_turned:
            return self.a[:, :, 0].conj().mT @ self.g[:, :, 0]
        return arrange(self._product(self.a, self.g), self.sizes, self.order, self.shape)

    def select(self, samples: Tensor | slice) -> "Outer":
        return self.of(self.a[samples], self.g[samples])

    def tensors(self) -> tuple[Tensor, ...]:
        return self.a, self.g

    def elements_per_sample(self) -> int:
        (_, T, G, I), O = self.a.shape, self.g.shape[-1]
        return max(1, G * O * I, T * G * max(I, O))

    def use(self) -> Use:
        if self._use is None:
            self._use = _use_of(self.a.shape, self.g.shape, self.g.dtype, kept_dtype(self.g))
        return self._use

    @property
    def form(self) -> Any:
        """What factors have in common whose norms can be taken side by side; None for one whose cannot."""
        a, g = self.a, self.g
        return (a.shape, g.shape, g.dtype, g.device, self.order) if self.is_simple and a.shape[1] > 1 else None

    @property
    def is_simple(self) -> bool:
        """Whether it is that of a matrix or its transpose, on real numbers that lie sample by sample."""
        if self._is_simple is None:
            self._is_simple = self._lies_simply()
        return self._is_simple

    def _lies_simply(self) -> bool:
        if self.a.shape[2] != 1 or self.g.is_complex() or not (self.a.is_contiguous() and self.g.is_contiguous()):
            return False
        return self.is_turned or (len(self.shape) == 2 and self._is_plain())

    def sq_norms(self, route: str | None = None) -> Tensor:
        return mended([self.hasty_sq_norms(route)])[0]

    def hasty_sq_norms(self, route: str | None = None) -> Hasty:
        if self.a.shape[1] == 1:  # one position: |g ⊗ a|² = |g|² |a|²
            return Hasty((squares(self.a).sum(-1) * squares(self.g).sum(-1)).sum((1, 2)))
        if (route or norm_route(self.use())) != "gram":
            return Hasty(self._direct_sq_norms())
        if self._has_kernel():
            norms, terms = gram_sq_norms(*self._rows())
            return Hasty.of_terms(norms, terms, self._direct_sq_norms_of)
        (_, T, G, I), O = self.a.shape, self.g.shape[-1]
        copied = T * G * (I + O) if self.g.element_size() < 4 and not self.g.is_cuda else 0
        step = self.num_at_once(2 * G * min(T, TILE) ** 2 + copied)
        starts = range(0, max(1, self.num_samples), step)
        parts = [_gram_sq_norms(self.a[b : b + step], self.g[b : b + step]) for b in starts]
        norms, terms = (torch.cat(column) for column in zip(*parts, strict=True))
        # Positions that cancel leave the rounding of large terms behind: those samples are taken directly.
        return Hasty.of_terms(norms, terms, self._direct_sq_norms_of)

    def weighted_sum(self, w_B: Tensor, *, rounded: bool = False) -> Tensor:
        if not is_tracing() and self.is_simple:
            return self._simple_weighted_sum(w_B, rounded=rounded)
        a, g = (self.a, self.g) if self.g.is_cuda else (wide(self.a), wide(self.g))
        w = w_B.to(wide_dtype(g).to_real()).reshape(-1, 1, 1, 1)
        a, g = (scaled(a, w), g) if a.shape[-1] < g.shape[-1] else (a, scaled(g, w))
        if g.stride(0) < g.stride(1):  # sequence first, as in recurrent layers: the product need not copy it
            a, g = a.transpose(0, 1), g.transpose(0, 1)
        rows_a, rows_g = a.flatten(0, 1).transpose(0, 1).conj(), g.flatten(0, 1).transpose(0, 1)  # [G, BT, ·]
        product = torch.matmul if rounded else wide_product
        if self.is_turned:
            return product(rows_a.mT, rows_g)[0]
        return self._arranged(product(rows_g.mT, rows_a))

    def _simple_weighted_sum(self, w_B: Tensor, *, rounded: bool) -> Tensor:
        """As of any, by fewer views."""
        a, g = self.a, self.g
        is_half = g.dtype in HALF
        if is_half and not g.is_cuda:
            a, g, is_half = a.float(), g.float(), False
        (B, T, _, I), O = a.shape, g.shape[-1]
        w = w_B.to(torch.float32 if is_half else g.dtype).view(B, 1, 1, 1)
        if I < O:
            a = scaled(a, w)
        else:
            g = scaled(g, w)
        left, right = (a.view(B * T, I), g.view(B * T, O)) if self.is_turned else (g.view(B * T, O), a.view(B * T, I))
        if rounded or not is_half:
            return torch.mm(left.t(), right)
        return wide_product(left.t().unsqueeze(0), right.unsqueeze(0))[0]

    def dots(self, direction: Tensor) -> Tensor:
        """sum_t <g_t, direction · a_t>: one product with the direction, no gradient built."""
        if self.shape != self.sizes or self.order != (0, 1) or self.a.is_complex():
            return super().dots(direction)
        a, g = wide(self.a[:, :, 0]), wide(self.g[:, :, 0])
        return (a @ direction.to(a.dtype).mT * g).sum((1, 2))

    def joined(self, other: Factor) -> "Outer | None":
        if not isinstance(other, Outer) or (other.sizes, other.order) != (self.sizes, self.order):
            return None
        if other.a.shape[2:] != self.a.shape[2:] or other.g.dtype != self.g.dtype:
            return None
        return self.of(torch.cat([self.a, other.a], 1), torch.cat([self.g, other.g], 1))

    def arranged(self, sizes: tuple[int, ...], order: tuple[int, ...], shape: tuple[int, ...]) -> Factor:
        trivial = self.order == tuple(range(len(self.order)))
        if trivial and sizes == self.sizes:  # the views compose into one
            return Outer(self.a, self.g, sizes=sizes, order=order, shape=shape)
        return super().arranged(sizes, order, shape)

    def materialize_wide(self) -> Tensor:
        return arrange(self._wide_product(), self.sizes, self.order, self.shape)

    def band(self, rows: Tensor) -> "Outer | None":
        O = self.g.shape[-1]
        if self._is_plain():
            sizes = (len(rows), *self.sizes[1:])
            return Outer(self.a, self.g[..., rows], sizes=sizes, order=self.order, shape=sizes)
        if self.is_turned:
            return Outer(self.a[..., rows], self.g, sizes=(O, len(rows)), order=(1, 0), shape=(len(rows), O))
        return None

    def pairs(self, other: Factor) -> Tensor | None:
        """Re sum_{t,s} <a_t, a'_s> conj<g_t, g'_s>, by FLOPs against building both."""
        if not isinstance(other, Outer) or (other.sizes, other.order) != (self.sizes, self.order):
            return None
        if other.a.shape[2:] != self.a.shape[2:]:
            return None
        (B, T, G, I), O, (C, S) = self.a.shape, self.g.shape[-1], other.a.shape[:2]
        if B * T * C * S * (I + O) > (B * T + C * S + B * C) * I * O:
            return None
        dtype = torch.promote_types(wide_dtype(self.g), wide_dtype(other.g))
        a, g, a2, g2 = (t.to(dtype).permute(2, 0, 1, 3) for t in (self.a, self.g, other.a, other.g))  # [G, B, T, ·]
        step_C = fitting(G * T * S)
        step_B = fitting(G * T * S * min(step_C, C))
        out = self.g.new_zeros(B, C, dtype=dtype.to_real())
        for c in range(0, C, step_C):
            right, right_g = (t[:, c : c + step_C].flatten(1, 2).mH for t in (a2, g2))
            for b in range(0, B, step_B):
                left, left_g = (t[:, b : b + step_B].flatten(1, 2) for t in (a, g))
                product = (left @ right) * (left_g @ right_g).conj()
                product = product.real if product.is_complex() else product
                of_pairs = product.reshape(G, -1, T, right.shape[-1] // max(1, S), S).sum((0, 2, 4)) if S and T else 0
                out[b : b + step_B, c : c + step_C] = of_pairs
        return out

    def terms(self) -> Tensor:
        return (squares(self.a).sum(-1) * squares(self.g).sum(-1)).sqrt().sum(1).square().sum(1)

    def square_sum(self, center: Tensor | None = None) -> Tensor:
        """One position: sum_b |g|² ⊗ |a|², no gradient built."""
        if self.a.shape[1] != 1:
            return super().square_sum(center)
        if center is None:
            return self._arranged(torch.einsum("bgo,bgi->goi", squares(self.g[:, 0]), squares(self.a[:, 0])))
        # sum |G|² - 2 Re conj(center) sum G + B |center|² cancels where samples are alike: in float64
        dtype = torch.complex128 if self.g.is_complex() else torch.float64
        exact, center = self.of(self.a.to(dtype), self.g.to(dtype)), center.to(dtype)
        total = exact.weighted_sum(torch.ones(self.num_samples, dtype=torch.float64, device=self.g.device))
        cross = (center.conj() * (2 * total - self.num_samples * center)).real
        return (exact.square_sum() - cross).clamp(min=0).to(wide_dtype(self.g).to_real())

    def two_sided(self, left_OK: Tensor | None, right_IK: Tensor | None) -> Tensor:
        """(g left)ᵀ (a right): both sides are projected before they meet."""
        if self.a.is_complex() or not (self._is_plain() or self.is_turned):
            return super().two_sided(left_OK, right_IK)
        a, g = wide(self.a[:, :, 0]), wide(self.g[:, :, 0])
        rows, columns = (g, a) if self._is_plain() else (a, g)
        rows = rows if left_OK is None else rows @ left_OK.to(a.dtype)
        columns = columns if right_IK is None else columns @ right_IK.to(a.dtype)
        return rows.mT @ columns

    def _is_plain(self) -> bool:
        """Whether the weight viewed as [first dimension, others] is the product itself."""
        in_order = self.order == tuple(range(len(self.order))) and self.shape == self.sizes
        return in_order and self.a.shape[2] == 1 and self.shape[:1] == self.g.shape[-1:]

    @property
    def is_turned(self) -> bool:
        """Whether the weight is the product transposed."""
        return self.order == (1, 0) and self.a.shape[2] == 1 and self.shape == (self.a.shape[-1], self.g.shape[-1])

    def _arranged(self, product_GOI: Tensor) -> Tensor:
        return arrange(product_GOI.unsqueeze(0), self.sizes, self.order, self.shape)[0]

    def of(self, a: Tensor, g: Tensor) -> "Outer":
        """The factor of the same weight for other a and g."""
        return Outer(a, g, sizes=self.sizes, order=self.order, shape=self.shape)

    def _parts(self) -> Iterator["Outer"]:
        return (part for _, part in self.chunks() if isinstance(part, Outer))

    def _has_kernel(self) -> bool:
        return self.a.shape[2] == 1 and has_kernel(self.a, self.g)

    def _rows(self) -> tuple[Tensor, Tensor]:
        """a [B, T, I] and g [B, T, O] of the only group."""
        return self.a[:, :, 0], self.g[:, :, 0]

    def _direct_sq_norms_of(self, samples: Tensor) -> Tensor:
        return self.select(samples)._direct_sq_norms()

    def _direct_sq_norms(self) -> Tensor:
        if self._has_kernel():
            return direct_sq_norms(*self._rows())
        return torch.cat([sq_lengths(part._wide_product()) for part in self._parts()])

    def _wide_product(self) -> Tensor:
        """[B, G, O, I] in float32 or better."""
        return wide_product(self.g.permute(0, 2, 3, 1), self.a.conj().transpose(1, 2))

    @staticmethod
    def _product(a: Tensor, g: Tensor) -> Tensor:
        """[B, G, O, I]"""
        return g.permute(0, 2, 3, 1) @ a.conj().transpose(1, 2)


@lru_cache(maxsize=1024)  # layers and steps repeat
def _use_of(of_a: torch.Size, of_g: torch.Size, dtype: torch.dtype, kept: torch.dtype) -> Use:
    """The shapes of a factor whose a and g have these shapes and this dtype, their gradients kept in that one."""
    (B, T, G, I), O = of_a, of_g[-1]
    return use_of(B, T, G, I, O, dtype.itemsize, kept.itemsize, (of_a.numel() + of_g.numel()) * dtype.itemsize)


def _gram_sq_norms(a_BTGI: Tensor, g_BTGO: Tensor) -> tuple[Tensor, Tensor]:
    """(n, m) with n[b] = Re sum_{s,t} <a_t, a_s> conj<g_t, g_s>, and m[b] = (sum_t |a_t| |g_t|)², which bounds it."""
    a, g = a_BTGI.transpose(1, 2), g_BTGO.transpose(1, 2)  # [B, G, T, ·]
    norms = lengths = wide(a[:0]).real.new_zeros(a.shape[:2])
    for i in range(0, a.shape[2], TILE):
        for j in range(i, a.shape[2], TILE):
            of_a = wide_product(a[:, :, i : i + TILE], a[:, :, j : j + TILE].mH)
            of_g = wide_product(g[:, :, i : i + TILE], g[:, :, j : j + TILE].mH)
            if i == j:
                squared = of_a.diagonal(dim1=2, dim2=3).real * of_g.diagonal(dim1=2, dim2=3).real
                lengths = lengths + squared.sqrt().sum(2)
            products = of_a.mul_(of_g.conj()).real.sum((2, 3))
            norms = norms + (products if i == j else 2 * products)
    return norms.sum(1), lengths.square().sum(1)
