"""Few rows of a big table: embeddings."""

import torch
from torch import Tensor

from samplewise.factors.base import Factor, squares
from samplewise.precision import wide, wide_dtype
from samplewise.tracing import is_tracing


class Rows(Factor):
    """G[b][v] = sum of g[b,t] over the positions t with ids[b,t] = v.

    `ids_BT` name rows of a table [V, D], `g_BTD` are the gradients of what was looked up. Positions that must not count
    (padding) come with g = 0.

    >>> Rows(torch.tensor([[0, 2, 0]]), torch.tensor([[[1.0], [2.0], [3.0]]]), num_rows=4).sq_norms().tolist()
    [20.0]
    """

    def __init__(self, ids_BT: Tensor, g_BTD: Tensor, *, num_rows: int):
        self.ids, self.g = ids_BT.long(), g_BTD
        self.num_samples = g_BTD.shape[0]
        self.shape = (num_rows, g_BTD.shape[2])

    def materialize(self) -> Tensor:
        G = self.g.new_zeros(self.num_samples, *self.shape, dtype=wide_dtype(self.g))
        return G.scatter_add_(1, self.ids.unsqueeze(2).expand(self.g.shape), wide(self.g))

    def select(self, samples: Tensor | slice) -> "Rows":
        return Rows(self.ids[samples], self.g[samples], num_rows=self.shape[0])

    def tensors(self) -> tuple[Tensor, ...]:
        return self.ids, self.g

    def sq_norms(self, route: str | None = None) -> Tensor:
        _, _, sums = self._segments()
        return squares(sums).sum((1, 2))

    def weighted_sum(self, w_B: Tensor, *, rounded: bool = False) -> Tensor:
        g = wide(self.g)
        g = g * w_B.to(g.real.dtype).reshape(-1, 1, 1)
        return g.new_zeros(self.shape).index_add_(0, self.ids.flatten(), g.flatten(0, 1))

    def inner(self, other: Factor) -> Tensor:
        """With a tied output head H, no table built: Re sum_t <H[ids_t], g_t>; H is there, or an Outer, sum_s z_s ⊗ a_s."""
        from samplewise.factors.dense import Dense
        from samplewise.factors.outer import Outer

        if isinstance(other, Dense):
            looked_up = other.G.gather(1, self.ids.unsqueeze(2).expand(self.g.shape))
            product = wide(looked_up).conj() * wide(self.g)
            return (product.real if product.is_complex() else product).sum((1, 2))
        table = (0, 1) if isinstance(other, Outer) and other.shape == other.sizes else None
        if not isinstance(other, Outer) or other.order != table or other.a.shape[2] != 1:
            return super().inner(other)
        a, z = wide(other.a[:, :, 0]), other.g[:, :, 0]  # [B, S, D], [B, S, V]
        out = []
        step = self.num_at_once(z.shape[1] * self.ids.shape[1])
        for start in range(0, max(1, self.num_samples), step):
            part = slice(start, start + step)
            ids = self.ids[part].unsqueeze(1).expand(-1, z.shape[1], -1)
            z_at_ids = wide(z[part].gather(2, ids))  # [B, S, T]
            product = z_at_ids * (a[part].conj() @ wide(self.g[part]).conj().transpose(1, 2))
            out.append((product.real if product.is_complex() else product).sum((1, 2)))
        return torch.cat(out)

    def joined(self, other: Factor) -> "Rows | None":
        if not isinstance(other, Rows) or other.g.dtype != self.g.dtype:
            return None
        return Rows(torch.cat([self.ids, other.ids], 1), torch.cat([self.g, other.g], 1), num_rows=self.shape[0])

    def dots(self, direction: Tensor) -> Tensor:
        """sum_t <direction[ids_t], g_t>: only the rows that were looked up are read."""
        product = wide(direction)[self.ids].conj() * wide(self.g)
        return (product.real if product.is_complex() else product).sum((1, 2))

    def occupied(self) -> Tensor:
        return self.ids.flatten().sort().values if is_tracing() else self.ids.unique()

    def band(self, rows: Tensor) -> "Rows":
        if len(rows) == 0:
            return Rows(self.ids[:, :0], self.g[:, :0], num_rows=0)
        at = torch.searchsorted(rows, self.ids.contiguous()).clamp(max=len(rows) - 1)
        inside = (rows[at] == self.ids).unsqueeze(2)
        return Rows(at, torch.where(inside, self.g, 0), num_rows=len(rows))

    def square_sum(self, center: Tensor | None = None) -> Tensor:
        """Rows that a sample did not look up are |0 - center|², counted and not built."""
        rows, is_used, sums = self._segments()
        center = sums.new_zeros(self.shape) if center is None else center.to(sums.dtype)
        num_users = (
            squares(center).new_zeros(self.shape[0]).index_add_(0, rows.flatten(), is_used.flatten().to(squares(center)))
        )
        total = squares(center) * (self.num_samples - num_users).unsqueeze(1)
        own = torch.where(is_used.unsqueeze(2), squares(sums - center[rows]), 0)
        return total.index_add_(0, rows.flatten(), own.flatten(0, 1))

    def two_sided(self, left_OK: Tensor | None, right_IK: Tensor | None) -> Tensor:
        """sum_t left[ids_t] ⊗ rightᵀ g_t."""
        if left_OK is None or self.g.is_complex():
            return super().two_sided(left_OK, right_IK)
        g = wide(self.g)
        g = g if right_IK is None else g @ right_IK.to(g.dtype)
        return left_OK.to(g.dtype)[self.ids].mT @ g

    def _segments(self) -> tuple[Tensor, Tensor, Tensor]:
        """(rows, is_used, sums): the row [B, T] and the gradient [B, T, D] of each segment.

        A segment is a row that a sample looks up, however often: at most T a sample. What is left over is zero and not used.
        """
        ids, order = self.ids.sort(1)
        begins = torch.cat([torch.ones_like(ids[:, :1]), (ids[:, 1:] != ids[:, :-1]).to(ids.dtype)], 1)
        segment_of = torch.zeros_like(ids).scatter_(1, order, begins.cumsum(1) - 1)
        rows = torch.zeros_like(ids).scatter_(1, segment_of, self.ids)
        is_used = torch.zeros_like(ids, dtype=torch.bool).scatter_(1, segment_of, True)
        sums = self.g.new_zeros(self.g.shape, dtype=wide_dtype(self.g))
        return rows, is_used, sums.scatter_add_(1, segment_of.unsqueeze(2).expand(self.g.shape), wide(self.g))
