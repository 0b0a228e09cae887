"""Projections of gradients to few numbers: the same seed gives the same projection on any device, in any process and order."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b

import torch
from torch import Tensor

from samplewise.factors.base import Factor, fitting
from samplewise.tracing import is_tracing

WORDS_BITS = 20
"""An element has at most 2^20 hashes of its own, so that its counter (element << 20) + word is not another's."""


class Projector(ABC):
    """A random linear map of the gradient to K numbers, with E <Px, Py> = <x, y>.

    Every entry is a hash of (seed, parameter name, element, column) in integers, so that no generator state, device or
    chunk size matters. The two parts of a complex number are two elements.
    """

    side_by_side = False
    """Whether the projections of several parameters are put beside each other; otherwise they are added."""

    @abstractmethod
    def project(self, name: str, factor: Factor) -> Tensor:
        """[B, K] of the parameter called `name`, in float32 or better."""

    @abstractmethod
    def width(self, parameter: Tensor) -> int:
        """K for this parameter."""


class Mixing(Projector):
    """Every element goes to `dim` numbers that all parameters share."""

    dim: int
    seed: int

    @abstractmethod
    def add(self, out_BK: Tensor, G_BN: Tensor, elements_N: Tensor, keys: tuple[int, int]) -> None:
        """Adds the projection of some elements."""

    def project(self, name: str, factor: Factor) -> Tensor:
        keys, out = hash_keys(self.seed, name), None
        for samples, elements, G in factor.pieces():
            if out is None:
                out = G.new_zeros(factor.num_samples, self.dim)
            step = fitting(self.dim)
            for part, some in zip(G.split(step, 1), elements.split(step), strict=True):
                self.add(out[samples], part, some, keys)
        return factor.sq_norms().new_zeros(factor.num_samples, self.dim) if out is None else out

    def width(self, parameter: Tensor) -> int:
        return self.dim


@dataclass(frozen=True)
class Filled(Mixing):
    """A projection without zeros, made by rows of `entries`."""

    dim: int
    seed: int = 0

    def __post_init__(self) -> None:
        _check_dim(self.dim)

    def add(self, out_BK: Tensor, G_BN: Tensor, elements_N: Tensor, keys: tuple[int, int]) -> None:
        out_BK += G_BN @ self.entries(elements_N, keys).to(G_BN.dtype)

    @abstractmethod
    def entries(self, elements_N: Tensor, keys: tuple[int, int]) -> Tensor:
        """These rows of the projection, [N, dim], in float32."""


@dataclass(frozen=True)
class Rademacher(Filled):
    """Entries ±1/√dim.

    >>> Rademacher(4, seed=1).entries(torch.arange(2), hash_keys(1, "weight")).tolist()
    [[0.5, -0.5, -0.5, 0.5], [0.5, -0.5, 0.5, 0.5]]
    """

    def entries(self, elements_N: Tensor, keys: tuple[int, int]) -> Tensor:
        return signs(elements_N, keys, self.dim) * self.dim**-0.5


@dataclass(frozen=True)
class Gaussian(Filled):
    """Entries N(0, 1/dim), each one of 65,536 quantiles."""

    def entries(self, elements_N: Tensor, keys: tuple[int, int]) -> Tensor:
        which = _cut(hashes(elements_N, keys, num_words=-(-self.dim // 4)), torch.int16).int() + (1 << 15)
        normal = quantiles().to(which.device).index_select(0, which.flatten()).view(which.shape)
        return normal[:, : self.dim] * self.dim**-0.5


@dataclass(frozen=True)
class SparseJL(Mixing):
    """Every element goes to `num_nonzeros` of the `dim` numbers, one in each of as many equal blocks, as ±1/√num_nonzeros.

    The sparse Johnson-Lindenstrauss transform of Kane and Nelson (2014): the cost does not depend on `dim`.
    """

    dim: int
    seed: int = 0
    num_nonzeros: int = 4

    def __post_init__(self) -> None:
        _check_dim(self.dim)
        if self.num_nonzeros < 1 or self.dim % self.num_nonzeros:
            raise ValueError(f"dim is a multiple of num_nonzeros, got {self.dim} and {self.num_nonzeros}")

    def add(self, out_BK: Tensor, G_BN: Tensor, elements_N: Tensor, keys: tuple[int, int]) -> None:
        columns, signs = self.nonzeros(elements_N, keys)
        for j in range(self.num_nonzeros):
            out_BK.index_add_(1, columns[:, j], G_BN * (signs[:, j] * self.num_nonzeros**-0.5).to(G_BN.dtype))

    def nonzeros(self, elements_N: Tensor, keys: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """For each element the columns and signs of its nonzeros, [N, num_nonzeros]."""
        words, block = hashes(elements_N, keys, num_words=self.num_nonzeros), self.dim // self.num_nonzeros
        columns = _shifted(words, 1) % block + torch.arange(self.num_nonzeros, device=words.device) * block
        return columns, ((words & 1) * 2 - 1).float()


@dataclass(frozen=True)
class Kronecker(Projector):
    """P_outᵀ G P_in of each parameter viewed as [first dimension, all others], as in LoGra (Choe et al., 2024).

    Entries are ±1/√K; a side that has no more than K rows is left as it is. The projections of the parameters stand side
    by side in the order of the model, zero for those without a gradient: K = sum of at most out_dim · in_dim each. A weight
    that multiplies never has its gradient built: (g P_out)ᵀ (a P_in).
    """

    out_dim: int
    in_dim: int
    seed: int = 0
    side_by_side = True

    def __post_init__(self) -> None:
        _check_dim(self.out_dim)
        _check_dim(self.in_dim)

    def project(self, name: str, factor: Factor) -> Tensor:
        device = factor.tensors()[0].device
        O, I = _matrix(factor.shape, is_complex=factor.is_complex())
        sides = self.side(name, "out", O, device), self.side(name, "in", I, device)
        return factor.two_sided(*sides).flatten(1)

    def width(self, parameter: Tensor) -> int:
        O, I = _matrix(parameter.shape, is_complex=parameter.is_complex())
        return min(O, self.out_dim) * min(I, self.in_dim)

    def side(self, name: str, side: str, size: int, device: torch.device) -> Tensor | None:
        """The projection of one side ("out" or "in") of `size` rows, [size, K] in float32; None for the identity."""
        dim = self.out_dim if side == "out" else self.in_dim
        if size <= dim:
            return None
        return signs(torch.arange(size, device=device), hash_keys(self.seed, f"{name}:{side}"), dim) * dim**-0.5


def projector_of(projector: Projector | None, dim: int | None, seed: int) -> Projector:
    """The projector, or Rademacher(dim, seed)."""
    if (projector is None) == (dim is None):
        raise TypeError("project takes a projector, as in project(Gaussian(512)), or dim=")
    return Rademacher(dim, seed) if projector is None and dim is not None else projector  # type: ignore[return-value]


# --- entries -------------------------------------------------------------------------------------------------------------


def hash_keys(seed: int, name: str) -> tuple[int, int]:
    """128 bits of the seed and the name, as two numbers of int64."""
    digest = blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
    first, second = (int.from_bytes(half, "little", signed=True) for half in (digest[:8], digest[8:]))
    return first, second


def hashes(elements_N: Tensor, keys: tuple[int, int], *, num_words: int) -> Tensor:
    """64 random bits for each element and word, [N, num_words] of int64: splitmix64 with a key before and within."""
    if is_tracing() and elements_N.is_cpu:
        return torch.ops.samplewise.hashes(elements_N, *keys, num_words)
    return _hashes(elements_N, *keys, num_words)


@torch.library.custom_op("samplewise::hashes", mutates_args=())
def _(elements_N: Tensor, before: int, within: int, num_words: int) -> Tensor:
    """Not for the compiler on a CPU: in torch 2.11 its int64 overflows as C++ pleases, and not as it wraps."""
    return _hashes(elements_N, before, within, num_words)


@torch.library.register_fake("samplewise::hashes")
def _(elements_N, before, within, num_words):
    return elements_N.new_empty(len(elements_N), num_words, dtype=torch.int64)


def _hashes(elements_N: Tensor, before: int, within: int, num_words: int) -> Tensor:
    x = (elements_N.long().unsqueeze(1) << WORDS_BITS) + torch.arange(num_words, device=elements_N.device)
    # in place, as new memory costs more than the arithmetic: 24 instead of 48 ms for a million hashes on one core
    x.bitwise_xor_(before)
    x.bitwise_xor_(_shifted(x, 30)).mul_(-4658895280553007687)  # 0xBF58476D1CE4E5B9
    x.add_(within)
    x.bitwise_xor_(_shifted(x, 27)).mul_(-7723592293110705685)  # 0x94D049BB133111EB
    return x.bitwise_xor_(_shifted(x, 31))


def signs(elements_N: Tensor, keys: tuple[int, int], dim: int) -> Tensor:
    """±1 for each element and column, [N, dim] in float32: one bit of a hash each."""
    which = _cut(hashes(elements_N, keys, num_words=-(-dim // 64)), torch.uint8).int()
    table = _signs_of_bytes().to(which.device)
    return table.index_select(0, which.flatten()).view(*which.shape, 8).flatten(1)[:, :dim]


@cache
def quantiles() -> Tensor:
    """The 65,536 quantiles of a normal distribution with variance 1, in steps of 2^-12, so that float32 has them exactly."""
    middle = (torch.arange(1 << 16, dtype=torch.float64, device="cpu") + 0.5) / (1 << 16)
    normal = torch.special.ndtri(middle)
    normal = normal / normal.square().mean().sqrt()
    return ((normal * 4096).round() / 4096).float()


@cache
def _signs_of_bytes() -> Tensor:
    """Eight signs for each byte, [256, 8]."""
    bits = torch.arange(256, device="cpu").unsqueeze(1) >> torch.arange(8, device="cpu")
    return (bits & 1).float() * 2 - 1


def _cut(words_NW: Tensor, dtype: torch.dtype) -> Tensor:
    """Each 64 bits as so many numbers of `dtype`, those of the lowest bits first."""
    if not is_tracing():
        return words_NW.view(dtype)
    places = torch.arange(
        0, 64, 8 * dtype.itemsize, device=words_NW.device
    )  # torch 2.11's compiler lays a single word otherwise
    return (words_NW.unsqueeze(2) >> places).to(dtype).flatten(1)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x >> bits with zeros from the left."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _matrix(shape: tuple[int, ...], *, is_complex: bool) -> tuple[int, int]:
    O = shape[0] if shape else 1
    return O, torch.Size(shape[1:]).numel() * (2 if is_complex else 1)


def _check_dim(dim: int) -> None:
    if dim < 1:
        raise ValueError(f"a projection has one dimension or more, got {dim}")
