"""What every factor answers, with a default for each answer built on `materialize`."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate

import torch
from torch import Tensor

from samplewise.plan import CHUNK_BYTES, Use
from samplewise.precision import kept_dtype, wide, wide_dtype
from samplewise.tracing import doubt, is_tracing

CHUNK_ELEMENTS = 1 << 24
"""What is built for all samples, rows of a weight or pairs of samples, is built for so many at once that it stays below this."""


def fitting(elements: int) -> int:
    """How many things of so many elements each are built at once, at least one."""
    return max(1, CHUNK_ELEMENTS // max(1, elements))


def flat(t: Tensor) -> Tensor:
    """`t` as [B, everything else]."""
    return t.flatten(1) if t.ndim > 1 else t.unsqueeze(1)


def sq_lengths(t: Tensor) -> Tensor:
    """n with n[b] = sum |t[b]|², shape [B], in float32 or better; no square is stored."""
    rows = flat(t)
    return torch.linalg.vector_norm(rows, dim=1, dtype=wide_dtype(rows)).square()


def squares(t: Tensor) -> Tensor:
    """|t|² element by element, in float32 or better."""
    return t.real.square() + t.imag.square() if t.is_complex() else wide(t).square()


@dataclass
class Hasty:
    """Squared norms of which some may have lost their digits, and how those are taken without loss."""

    n: Tensor
    is_doubtful: Tensor | None = None
    exactly: Callable[[Tensor], Tensor] | None = None

    @classmethod
    def of_terms(cls, n: Tensor, terms: Tensor, exactly: Callable[[Tensor], Tensor]) -> "Hasty":
        """Those are doubtful that are small against the terms they are a sum of.

        A sum that cancels down to a thousandth of its terms has lost three digits, down to 1e-7 of them all digits, in
        float32; too low a norm would break a privacy bound.
        """
        return cls(n, ~(n >= 1e-3 * terms), exactly)  # NaN, where terms overflowed, is doubtful


def mended(norms: Sequence[Hasty]) -> list[Tensor]:
    """The squared norms, those that are doubtful taken exactly. All are looked at at once: on a GPU a look waits for it."""
    out = [hasty.n for hasty in norms]
    doubted = [(i, hasty.is_doubtful) for i, hasty in enumerate(norms) if hasty.is_doubtful is not None]
    if not doubted:
        return out
    if is_tracing():
        doubt(reduce(torch.logical_or, (is_doubtful.to(doubted[0][1].device) for _, is_doubtful in doubted)).any())
        return out
    flags = torch.cat([is_doubtful.to(doubted[0][1].device) for _, is_doubtful in doubted])
    ends = list(accumulate(len(is_doubtful) for _, is_doubtful in doubted))
    places: dict[int, list[int]] = {}
    for place in flags.nonzero().squeeze(1).tolist():
        row = bisect_right(ends, place)
        places.setdefault(doubted[row][0], []).append(place - (ends[row - 1] if row else 0))
    for i, samples in places.items():
        exactly, n = norms[i].exactly, out[i]
        assert exactly is not None
        at = torch.tensor(samples, device=n.device)
        out[i] = n.index_copy(0, at, exactly(at).to(n.dtype))
    return out


class Factor(ABC):
    """The gradients of one parameter for each of B samples, in a form that need not be built.

    `shape` is the shape of one sample's gradient. A new factor writes `materialize`, `select` and `tensors`;
    everything else has a default that it may override for speed.
    """

    num_samples: int
    shape: tuple[int, ...]
    is_pulled_back = False
    """Whether it is pulled back through what weights were computed from."""

    @abstractmethod
    def materialize(self) -> Tensor:
        """G with G[b] the gradient of sample b, shape [B, *shape]."""

    @abstractmethod
    def select(self, samples: Tensor | slice) -> "Factor":
        """The factor of these samples alone."""

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that the factor reads when it answers."""

    def elements_per_sample(self) -> int:
        """How many elements the largest temporary for one sample has."""
        return max(1, torch.Size(self.shape).numel())

    def num_at_once(self, elements: int, max_bytes: int | None = None) -> int:
        """How many samples are worked on at once if each takes temporaries of so many elements.

        A compiled step takes all at once, unless it is told otherwise, so that it is the same for every size of the batch.
        """
        if is_tracing() and max_bytes is None:
            return max(1, self.num_samples)
        t = self.tensors()[-1]
        limit = CHUNK_BYTES.get(t.device.type, CHUNK_BYTES["cuda"])
        return max(1, min(limit, max_bytes or limit) // (max(4, t.element_size()) * max(1, elements)))

    def chunks(self, max_bytes: int | None = None) -> Iterator[tuple[slice, "Factor"]]:
        """The factor cut into runs of samples whose temporaries stay small."""
        step = self.num_at_once(self.elements_per_sample(), max_bytes)
        if step >= self.num_samples:
            yield slice(0, self.num_samples), self
            return
        for start in range(0, self.num_samples, step):
            part = slice(start, min(start + step, self.num_samples))
            yield part, self.select(part)

    def use(self) -> Use | None:
        """The shapes that a plan weighs routes by; None for a factor that has no choice."""
        return None

    def built(self) -> "Factor":
        """The factor with its gradients there, in the dtype that `precision.kept_dtype` says."""
        from samplewise.factors.dense import Dense

        t = self.tensors()[-1]
        return Dense(self.materialize() if kept_dtype(t) == t.dtype else self.materialize_wide())

    def sq_norms(self, route: str | None = None) -> Tensor:
        """n with n[b] = sum |G[b]|², shape [B], in float32 or better; `route` is one of `plan.ROUTES`, for factors with a choice."""
        parts = [sq_lengths(part.materialize_wide()) for _, part in self.chunks()]
        return torch.cat(parts) if len(parts) != 1 else parts[0]

    def hasty_sq_norms(self, route: str | None = None) -> Hasty:
        """As `sq_norms`, but for what is doubtful, so that it can be looked at for many factors at once."""
        return Hasty(self.sq_norms(route))

    def weighted_sum(self, w_B: Tensor, *, rounded: bool = False) -> Tensor:
        """sum_b w[b] * G[b], shape [*shape], in float32 or better, or `rounded` to the op's dtype where that is quicker.

        w is real, in float32 or better.
        """
        total = None
        for samples, part in self.chunks():
            G = part.materialize_wide()
            term = torch.tensordot(w_B[samples].to(G.dtype), G, dims=1)
            total = term if total is None else total + term
        assert total is not None
        return total

    def dots(self, direction: Tensor) -> Tensor:
        """d with d[b] = Re sum conj(direction) * G[b], shape [B], in float32 or better."""
        parts = []
        for _, part in self.chunks():
            G = part.materialize_wide()
            parts.append(_real(flat(G) @ direction.to(G.dtype).conj().flatten()))
        return torch.cat(parts)

    def inner(self, other: "Factor") -> Tensor:
        """d with d[b] = Re sum conj(G[b]) * H[b] for another factor H of the same samples, shape [B]."""
        parts = []
        for samples, part in self.chunks():
            product = part.materialize_wide().conj() * other.select(samples).materialize_wide()
            parts.append(flat(_real(product)).sum(1))
        return torch.cat(parts)

    def joined(self, other: "Factor") -> "Factor | None":
        """One factor of the same kind for G + H, or None if the two structures do not combine."""
        return None

    def arranged(self, sizes: tuple[int, ...], order: tuple[int, ...], shape: tuple[int, ...]) -> "Factor":
        """The factor with each G[b] viewed as `sizes`, permuted to `order`, and viewed as `shape`."""
        from samplewise.factors.dense import Dense

        return Dense(arrange(self.materialize(), sizes, order, shape))

    # --- pairs of samples, squares, projections ----------------------------------------------------------------------

    def is_complex(self) -> bool:
        """Whether the gradients are complex numbers."""
        return self.tensors()[-1].is_complex()

    def materialize_wide(self) -> Tensor:
        """G in float32 or better, without a product that was rounded to half precision in between."""
        return wide(self.materialize())

    def occupied(self) -> Tensor | None:
        """The rows of the weight, in order, outside of which every G[b] is zero; None if they may be any.

        In a graph, where sizes cannot follow values, a row may come several times: `band` then gives zeros for all but its first,
        so that all are to be asked for at once.
        """
        return None

    def band(self, rows: Tensor) -> "Factor | None":
        """The factor of G[:, rows] for sorted rows of the weight; None where it could only be cut out of the whole."""
        return None

    def pairs(self, other: "Factor") -> Tensor | None:
        """`gram` by a route that builds no gradient; None where there is none, or building is cheaper."""
        return None

    def terms(self) -> Tensor:
        """t with t[b] the square of the sizes that `pairs` adds up to G[b], shape [B]: above |G[b]|² where they cancel."""
        return self.sq_norms()

    def gram(self, other: "Factor") -> Tensor:
        """K with K[b, c] = Re sum conj(G[b]) * H[c] for another factor H of any samples, shape [B, C], in float32 or better."""
        from samplewise.factors.pairs import gram

        return gram(self, other)

    def square_sum(self, center: Tensor | None = None) -> Tensor:
        """sum_b |G[b] - center|² element by element, shape [*shape], real, in float32 or better; center 0 if None."""
        total = None
        for _, part in self.chunks():
            G = part.materialize_wide()
            term = squares(G if center is None else G - center.to(G.dtype)).sum(0)
            total = term if total is None else total + term
        assert total is not None
        return total

    def two_sided(self, left_OK: Tensor | None, right_IK: Tensor | None) -> Tensor:
        """leftᵀ G[b] right with G[b] viewed as [O, I], shape [B, K, K]; None stands for the identity.

        O is the first dimension of the weight, I all others, and the two parts of a complex number one more.
        """
        parts = []
        for _, part in self.chunks():
            G = as_real(part.materialize_wide())
            G = (G if self.shape else G.unsqueeze(1)).unsqueeze(-1).flatten(2)
            G = G if right_IK is None else G @ right_IK.to(G.dtype)
            parts.append(G if left_OK is None else left_OK.to(G.dtype).mT @ G)
        return torch.cat(parts)

    def pieces(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(samples, elements, G[samples][:, elements]) that add up to G, each small: elements [N] of the flat gradient.

        The two parts of a complex number are two elements. An element that no piece has is zero.
        """
        device = self.tensors()[0].device
        if self.shape and self.band(torch.arange(0, device=device)) is not None:
            width = torch.Size(self.shape[1:]).numel() * (2 if self.is_complex() else 1)
            rows, columns = self.occupied(), torch.arange(width, device=device)
            for block in in_blocks(rows, self.shape[0], self.num_samples * width, device):
                band = self.band(block)
                assert band is not None
                elements = (block.unsqueeze(1) * width + columns).flatten()
                yield slice(0, self.num_samples), elements, flat(as_real(band.materialize_wide()))
            return
        for samples, part in self.chunks():
            G = flat(as_real(part.materialize_wide()))
            yield samples, torch.arange(G.shape[1], device=device), G


def in_blocks(rows: Tensor | None, num_rows: int, elements: int, device: torch.device) -> tuple[Tensor, ...]:
    """These rows of a weight, or all, cut into runs of as many as are built at once if each takes so many elements."""
    if rows is not None and is_tracing():
        return (rows,)
    rows = torch.arange(num_rows, device=device) if rows is None else rows
    return rows.split(fitting(elements))


def as_real(t: Tensor) -> Tensor:
    """`t` with the two parts of a complex number as one more dimension."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def arrange(G: Tensor, sizes: tuple[int, ...], order: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """Each G[b] viewed as `sizes`, permuted to `order`, viewed as `shape`."""
    B = G.shape[0]
    return G.reshape(B, *sizes).permute(0, *(d + 1 for d in order)).reshape(B, *shape)


def _real(t: Tensor) -> Tensor:
    return t.real if t.is_complex() else t
