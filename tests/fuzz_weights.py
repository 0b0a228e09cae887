"""Weights of a given shape, drawn as expressions over parameters alone: as they are, tied, sliced, normalised, merged."""

from collections.abc import Callable
from math import prod

from fuzz_sketch import Sketch

Shape = tuple[int, ...]
FORMS: list[Callable[[Sketch, Shape], str | None]] = []
"""Each gives the source of a weight of that shape, or None where it does not apply."""


def weight(m: Sketch, *shape: int, plain: float = 0.55) -> str:
    """The source of a weight of this shape."""
    while not m.coin(plain):
        source = m.rng.choice(FORMS)(m, shape)
        if source is not None:
            return source
    return m.parameter(*shape)


def form(draw: Callable[[Sketch, Shape], str | None]) -> Callable[[Sketch, Shape], str | None]:
    FORMS.append(draw)
    return draw


@form
def tied(m: Sketch, shape: Shape) -> str | None:
    same = [source for source, other in m.pool if other == shape]
    same += [f"{source}.T" for source, other in m.pool if len(shape) == 2 and other == shape[::-1]]
    same += [f"{source}.reshape{shape}" for source, other in m.pool if sorted(other) == sorted(shape) and len(shape) > 1]
    return m.rng.choice(same) if same else None


@form
def transposed(m: Sketch, shape: Shape) -> str | None:
    if len(shape) < 2:
        return None
    if m.coin():
        p = m.parameter(*shape[:-2], shape[-1], shape[-2])
        return p + m.pick(".transpose(-1, -2)", ".mT")
    return f"{m.parameter(*shape[::-1])}.permute{tuple(range(len(shape)))[::-1]}"


@form
def sliced(m: Sketch, shape: Shape) -> str | None:
    if not shape:
        return f"{m.parameter(3)}[1]"
    n, p = shape[0], m.parameter(shape[0] + 2, *shape[1:])
    return p + m.pick("[2:]", f"[:{n}]", f"[1:{n + 1}]", f".narrow(0, 1, {n})", f".split([{n}, 2])[0]", f".flip(0)[:{n}]")


@form
def picked(m: Sketch, shape: Shape) -> str | None:
    if not shape:
        return None
    n = m.size()
    p, index = m.parameter(n, *shape[1:]), m.constant(f"torch.arange({shape[0]}) % {n}")
    if len(shape) == 2 and not m.is_complex and m.coin():
        return f"F.embedding({index}, {p})"
    return m.pick(f"{p}[{index}]", f"{p}.index_select(0, {index})")


@form
def normed(m: Sketch, shape: Shape) -> str | None:
    if len(shape) < 2:
        return None
    v, g = m.parameter(*shape), m.parameter(shape[0], *[1] * (len(shape) - 1))
    return f"({g} * {v} / (1 + {v}.norm(dim={m.pick(0, -1)}, keepdim=True)))"


@form
def low_rank(m: Sketch, shape: Shape) -> str | None:
    if len(shape) != 2:
        return None
    r = m.size()
    return f"({m.parameter(*shape)} + 0.5 * {m.parameter(shape[0], r)} @ {m.parameter(r, shape[1])})"


@form
def cast(m: Sketch, shape: Shape) -> str | None:
    if m.dtype != "torch.float64":
        return f"{m.parameter(*shape)}.to(D)"
    return f"{m.parameter(*shape, dtype='torch.float32')}" + m.pick(".to(D)", ".double()")


@form
def expanded(m: Sketch, shape: Shape) -> str | None:
    small = [1 if m.coin() else size for size in shape]
    while small and small[0] == 1 and m.coin():
        small = small[1:]
    return f"{m.parameter(*small)}.expand({', '.join(map(str, shape))})" if shape else None


@form
def joined(m: Sketch, shape: Shape) -> str | None:
    dims = [d for d, size in enumerate(shape) if size > 1]
    if not dims:
        return None
    d = m.rng.choice(dims)
    k = m.rng.randint(1, shape[d] - 1)
    a, b = m.parameter(*shape[:d], k, *shape[d + 1 :]), m.parameter(*shape[:d], shape[d] - k, *shape[d + 1 :])
    return f"torch.cat([{a}, {b}], {d})"


@form
def stacked(m: Sketch, shape: Shape) -> str | None:
    return f"torch.stack([{', '.join(m.parameter(*shape[1:]) for _ in range(shape[0]))}])" if shape else None


@form
def over_constant(m: Sketch, shape: Shape) -> str | None:
    if len(shape) != 2:
        return None
    k = m.size()
    return f"F.linear({m.constant(f'torch.randn({shape[0]}, {k}, dtype=D)')}, {m.parameter(shape[1], k)})"


@form
def computed(m: Sketch, shape: Shape) -> str | None:
    p = m.parameter(*shape)
    q = m.parameter(*shape) if m.coin() else p
    forms = [f"{p}.tanh()", f"({p} * {q})", f"({p} + {q})", f"{p}.clone()", f"({p}.detach() * {q})", f"(1 + 0.5 * {p})"]
    if not m.is_complex:
        forms += [f"torch.where({p} > 0, {p}, {q})", f"F.softplus({p})"]
        forms += [f"F.softmax({p}, -1)", f"torch.tril({p})"] if len(shape) > 1 else []
    return m.rng.choice(forms)


@form
def viewed(m: Sketch, shape: Shape) -> str | None:
    return f"{m.parameter(prod(shape))}.view({', '.join(map(str, shape))})" if shape else f"{m.parameter(1)}.squeeze()"
