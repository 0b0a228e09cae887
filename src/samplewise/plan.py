"""Which way each use answers: a pure function of its shapes, the device's rates and a memory budget."""

import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache

import torch

from samplewise.tracing import untraced

ROUTES = ("gram", "direct", "build")
"""gram: norms from the T×T products of positions, in tiles. direct: gradients of a few samples at a time, squared and dropped.
build: all gradients once, as backward brings g; they replace a and g, and every later answer is one pass over them."""

CALL = 2.5
"""What a call from Python on a view takes, over the op on next to nothing: 60 of them in 0.31 ms at 2 µs (Xeon)."""

TILE = 512
"""Gram matrices are taken in tiles of this many positions: T×T is never whole, and the mirror half is not computed."""

CHUNK_BYTES = {"cpu": 1 << 22, "cuda": 1 << 28}
"""Temporaries of queries are built for so many samples at once that they stay below this.

On the CPU chunks that fit the caches win: norms of 16 gradients 768×256, T = 128, 8.2 ms at once and 3.3 ms by twos (Xeon, 2
threads). A GPU wants long kernels.
"""


@dataclass(frozen=True)
class Use:
    """The shapes of one use: for B samples a weight of G blocks O×I, each met at T positions."""

    B: int
    T: int
    G: int
    I: int
    O: int
    itemsize: int
    """Bytes of an element of a and g."""
    kept: int
    """Bytes of an element of gradients that are built and kept."""
    held: int
    """Bytes of what the factor holds until the last question: a and g, or an image and g."""
    is_patched: bool = False
    """Whether a must first be built from an image."""
    gathers: bool = False
    """Whether all routes do without, reading patches where they lie, and the direct one stores no gradient."""

    @property
    def built(self) -> int:
        """Bytes of the gradients of all samples."""
        return self.B * self.G * self.O * self.I * self.kept


use_of = lru_cache(maxsize=4096)(Use)
"""The Use of these, one object for all uses alike."""


@dataclass(frozen=True)
class Cost:
    """What norms and one weighted sum take by one route."""

    flops: float
    moved: float
    """Bytes read and written."""
    held: int
    """Bytes held between backward and the last question."""
    seconds: float


@dataclass(frozen=True)
class Rates:
    """What a device does in a second."""

    small: float
    """Floating-point operations in products whose smallest side is 16."""
    large: float
    """The same at 512."""
    memory: float
    """Bytes read or written."""
    fresh: float = math.inf
    """Bytes written to memory just allocated, which on the CPU the kernel must first map."""
    latency: float = 0.0
    """Seconds of an op on next to nothing."""

    def product(self, flops: float, rows: int) -> float:
        """Seconds of products whose smallest side is `rows`."""
        between = min(1.0, max(0.0, math.log2(max(rows, 1) / 16) / 5))
        return flops / (self.small ** (1 - between) * self.large**between)


@dataclass(frozen=True)
class Choice:
    """The route taken by one use, and what was weighed."""

    route: str
    costs: Mapping[str, Cost]
    use: Use
    is_pinned: bool = False


@lru_cache(maxsize=4096)
def costs(use: Use, rates: Rates) -> Mapping[str, Cost]:
    """{route: Cost} of norms followed by one weighted sum.

    u = 2·B·T·G·O·I is one product of a and g. gram: 2·B·G·T²(I + O) with the mirror half left out, then u for the sum.
    direct: u and u. build: u, then a pass over the gradients.
    """
    B, T, G, I, O = use.B, use.T, use.G, use.I, use.O
    wide = max(4, use.itemsize)
    u, a_and_g = 2.0 * B * T * G * O * I, float(B * T * G * (I + O) * use.itemsize)
    read = a_and_g + (2.0 * B * T * G * I * wide if use.is_patched and not use.gathers else 0)
    directly = a_and_g if use.gathers else read + 2.0 * use.built
    num_tiles = max(1, math.ceil(T / TILE))
    pairs = T * T * (num_tiles + 1) / (2 * num_tiles) if T > 1 else 0
    gram = 2.0 * B * G * pairs * (I + O)
    scaled = a_and_g + 2.0 * B * T * G * min(I, O) * wide

    def cost(products: list[tuple[float, int]], moved: float, fresh: float, num_ops: int, held: int) -> Cost:
        seconds = sum(rates.product(flops, rows) for flops, rows in products)
        seconds += moved / rates.memory + fresh / rates.fresh + num_ops * CALL * rates.latency
        return Cost(sum(flops for flops, _ in products), moved, held, seconds)

    side, whole = min(I, O, T), min(I, O, B * T)
    copy = B * T * G * min(I, O) * wide
    chunk = min(use.built, CHUNK_BYTES["cpu"])
    # Views and Python count as much as ops here: 0.2, 0.11 and 0.08 ms for 16 samples, T = 16, 64×64, at 3 µs an op.
    num_gram_ops = 20 if T == 1 else 30 + 15 * num_tiles * (num_tiles + 1)
    grams = 4.0 * B * G * pairs * wide
    return {
        "gram": cost([(gram, min(T, TILE, I, O)), (u, whole)], read + scaled + grams, copy, num_gram_ops, use.held),
        "direct": cost([(u, side), (u, whole)], directly + scaled, copy + chunk, 35, use.held),
        "build": cost([(u, side)], read + 3.0 * use.built, use.built, 25, use.built),
    }


@lru_cache(maxsize=4096)
def choose(use: Use, rates: Rates, *, spare: int = 0, pinned: str | None = None) -> Choice:
    """The quickest route that holds at most `spare` bytes more than the factor does.

    By FLOPs the Gram route is cheaper than building just where a and g are smaller than the gradients, T(I + O) < O·I, so
    that without spare memory the quick choice is nearly always the small one too.
    """
    weighed = costs(use, rates)
    allowed = [route for route in ROUTES if weighed[route].held <= use.held + spare]
    best = min(allowed, key=lambda route: (weighed[route].seconds, -ROUTES.index(route)))
    return Choice(pinned or best, weighed, use, pinned is not None)


def norm_route(use: Use) -> str:
    """ "gram" or "direct", whichever has fewer FLOPs: what a factor does that no plan speaks for."""
    weighed = costs(use, Rates(small=1.0, large=1.0, memory=math.inf))
    return "gram" if weighed["gram"].flops < weighed["direct"].flops else "direct"


@cache
@untraced
def measured_rates(device: str, dtype: torch.dtype = torch.float32) -> Rates:
    """What this device does in products of this dtype, measured once a process in about 30 ms."""

    def best(run) -> float:
        times = []
        for _ in range(12):  # others may use the machine
            _wait(device)
            start = time.perf_counter()
            run()
            _wait(device)
            times.append(time.perf_counter() - start)
        return min(times)

    def product(num: int, rows: int, inner: int) -> float:
        a = torch.ones(num, rows, inner, device=device, dtype=dtype)
        out = torch.empty(num, rows, rows, device=device, dtype=dtype)
        return 2 * num * rows * inner * rows / best(lambda: torch.bmm(a, a.mT, out=out))

    is_cpu = torch.device(device).type == "cpu"
    num, one = 1 << (20 if is_cpu else 26), torch.ones(1, device=device)
    source, copy = torch.ones(num, device=device), torch.empty(num, device=device)
    return Rates(
        small=product(64 if is_cpu else 4096, 16, 256),
        large=product(1 if is_cpu else 256, 512, 512),
        memory=8 * num / best(lambda: copy.copy_(source)),
        fresh=4 * num / best(lambda: torch.zeros(num, device=device).add_(0)) if is_cpu else math.inf,
        latency=best(lambda: one + one),
    )


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def num_bytes(memory: str | int | float, device: str) -> int:
    """ "4GiB", a number of bytes, or a fraction of the device's memory, in bytes.

    >>> num_bytes("1.5 GiB", "cpu"), num_bytes(4096, "cpu")
    (1610612736, 4096)
    """
    if isinstance(memory, str):
        found = re.fullmatch(r"\s*([0-9.]+)\s*([a-zA-Z]+)\s*", memory)
        if found is None or found[2].upper() not in UNITS:
            raise ValueError(f'memory is like "4GiB" or "500MB", a number of bytes, or a fraction below 1; got {memory!r}')
        return int(float(found[1]) * UNITS[found[2].upper()])
    if not memory > 0:
        raise ValueError(f"memory must be positive, got {memory}")
    if isinstance(memory, int) or memory >= 1:
        return int(memory)
    if torch.device(device).type == "cuda":
        return int(memory * torch.cuda.mem_get_info(device)[1])
    return int(memory * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
