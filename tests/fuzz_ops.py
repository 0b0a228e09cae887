"""The ops that random models are drawn from: each writes lines that turn one value into another."""

from collections.abc import Callable
from math import prod

from fuzz_sketch import Sketch, Value, is_plain, length
from fuzz_weights import weight

Op = Callable[[Sketch, Value], Value | None]
OPS: dict[str, tuple[Op, float]] = {}
"""By name: what draws the op, None where it does not apply, and how often it is tried."""
COMPLEX: set[str] = set()
"""Ops that also take complex numbers."""
MIXING: dict[str, Op] = {}
"""Ops by which samples of the batch influence each other."""


def op(*, often: float = 1.0, of_complex: bool = False) -> Callable[[Op], Op]:
    def add(draw: Op) -> Op:
        OPS[draw.__name__] = (draw, often)
        if of_complex:
            COMPLEX.add(draw.__name__)
        return draw

    return add


def mixing(draw: Op) -> Op:
    MIXING[draw.__name__] = draw
    return draw


# --- linear and products ---


@op(often=2, of_complex=True)
def linear(m: Sketch, x: Value) -> Value | None:
    x = m.plain_last(x)
    layers = [(layer, O) for layer, I, O in m.layers if x.last == I]
    if layers and m.coin(0.4):
        layer, O = m.rng.choice(layers)
    elif m.is_complex or m.coin(0.3):
        O = m.size()
        bias = weight(m, O) if m.coin() else None
        return m.derived(x, f"F.linear({{x}}, {weight(m, O, x.last)}, {bias})", x.with_dim(-1, O))
    else:
        O = m.size()
        layer = m.module(f"nn.Linear({x.last}, {O}, bias={m.coin(0.7)})")
        m.layers.append((layer, x.last, O))
        same = [source for source, shape in m.pool if shape == (O, x.last)]
        if same and m.coin():
            m.init.append(f"{layer}.weight = {m.rng.choice(same)}")
        elif m.coin(0.1):
            m.init.append(f"nn.utils.parametrizations.weight_norm({layer})")
        else:
            m.pool.append((f"{layer}.weight", (O, x.last)))
    call = f"torch.utils.checkpoint.checkpoint({layer}, {{x}}, use_reentrant=False)" if m.coin(0.06) else f"{layer}({{x}})"
    return m.derived(x, call, x.with_dim(-1, O))


@op(often=2, of_complex=True)
def matmul(m: Sketch, x: Value) -> Value | None:
    x, O = m.plain_last(x), m.size()
    forms = ["right", "function", "vector"]
    if x.ndim > 1 and is_plain(x.dims[-2]):
        forms += ["left"]
    if x.ndim > 2 and is_plain(x.dims[-3]) and is_plain(x.dims[-2]):
        forms += ["heads", "broadcast"]
    match m.rng.choice(forms):
        case "right":
            return m.derived(x, f"{{x}} @ {weight(m, x.last, O)}", x.with_dim(-1, O))
        case "function":
            return m.derived(x, f"torch.matmul({{x}}, {weight(m, O, x.last)}.T)", x.with_dim(-1, O))
        case "vector" if x.ndim > 1:
            return m.derived(x, f"{{x}} @ {weight(m, x.last)}", x.dims[:-1])
        case "left":
            return m.derived(x, f"{weight(m, O, x.shape[-2])} @ {{x}}", x.with_dim(x.ndim - 2, O))
        case "heads":
            return m.derived(x, f"{{x}} @ {weight(m, x.shape[-3], x.last, O)}", x.with_dim(-1, O))
        case "broadcast":
            return m.derived(x, f"{{x}} @ {weight(m, 1, x.last, O)}", x.with_dim(-1, O))
    return None


@op(often=3, of_complex=True)
def einsum(m: Sketch, x: Value) -> Value | None:
    """Letters at random: some of the data's in the weight, some summed, the result in any order."""
    letters = "abcdefgh"[: x.ndim]
    plain = [c for c, dim in zip(letters, x.dims, strict=True) if is_plain(dim)]
    dim_of = dict(zip(letters, x.dims, strict=True))
    operands = [letters]
    sources = ["{x}"]
    for k in range(m.pick(1, 1, 2)):
        mine = [c for c in plain if m.coin()] + (["xy"[k]] if m.coin(0.8) else [])
        mine = mine or plain[:1] or ["x"]
        if "xy"[k] in mine:
            dim_of["xy"[k]] = (m.size(),)
        if k == 1 and "x" in dim_of and "x" not in mine and m.coin():
            mine.append("x")
        m.rng.shuffle(mine)
        operands.append("".join(mine))
        sources.append(weight(m, *(dim_of[c][0] for c in mine)))  # type: ignore[arg-type]
    used = sorted(set("".join(operands)))
    out = [c for c in used if not is_plain(dim_of[c]) or m.coin(0.75)]
    m.rng.shuffle(out)
    both = list(zip(operands, sources, strict=True))
    m.rng.shuffle(both)
    equation = ",".join(o for o, _ in both) + "->" + "".join(out)
    return m.derived(x, f'torch.einsum("{equation}", {", ".join(s for _, s in both)})', tuple(dim_of[c] for c in out))


@op(of_complex=True)
def addmm(m: Sketch, x: Value) -> Value | None:
    x, O = m.arranged(x, 2), m.size()
    bias = m.pick(lambda: weight(m, O), lambda: weight(m, 1, O))()
    scales = m.pick("", ", beta=0.5, alpha=2")
    return m.derived(x, f"torch.addmm({bias}, {{x}}, {weight(m, x.last, O)}{scales})", x.with_dim(-1, O))


@op(of_complex=True)
def bmm(m: Sketch, x: Value) -> Value | None:
    x, O = m.arranged(x, 3), m.size()
    if m.coin():
        w = f"{weight(m, x.last, O)}.expand({length(x.dims[0])}, -1, -1)"
        return m.derived(x, f"torch.bmm({{x}}, {w})", x.with_dim(-1, O))
    x = m.derived(x, "{x}.transpose(0, 1)", (x.dims[1], x.dims[0], x.dims[2]))
    w, bias = weight(m, x.shape[0], x.last, O), weight(m, x.shape[0], 1, O)
    return m.derived(x, m.pick(f"torch.bmm({{x}}, {w})", f"torch.baddbmm({bias}, {{x}}, {w})"), x.with_dim(-1, O))


@op()
def bilinear(m: Sketch, x: Value) -> Value | None:
    x = m.plain_last(x)
    y, O = m.partner(x), m.size()
    bias = weight(m, O) if m.coin() else None
    return m.derived(x, f"F.bilinear({{x}}, {y}, {weight(m, O, x.last, y.last)}, {bias})", x.with_dim(-1, O))


# --- convolutions ---


@op(often=2)
def conv(m: Sketch, x: Value) -> Value | None:
    rank = m.pick(1, 1, 2)
    x = m.arranged(x, rank + 2)
    C, spatial = x.shape[1], x.shape[2:]
    groups = m.split(C)
    O = groups * m.rng.randint(1, 2)
    kernel = [m.rng.randint(1, 3) for _ in spatial]
    if m.coin(0.25):
        stride, dilation, padding = [1] * rank, [m.rng.randint(1, 2) for _ in spatial], "'same'"
        sizes = list(spatial)
    else:
        stride = [m.rng.randint(1, 3) for _ in spatial]
        dilation = [m.rng.randint(1, 2) for _ in spatial]
        paddings = [m.rng.randint(0, 2) for _ in spatial]
        padding = str(paddings)
        sizes = [
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, p, d, k, s in zip(spatial, paddings, dilation, kernel, stride, strict=True)
        ]
        if any(n + 2 * p < d * (k - 1) + 1 for n, p, d, k in zip(spatial, paddings, dilation, kernel, strict=True)):
            return None
    dims = (x.dims[0], (O,), *((n,) for n in sizes))
    if m.coin(0.4):
        mode = m.pick("zeros", "zeros", "circular", "replicate")
        if mode == "circular" and (padding == "'same'" or any(p > n for p, n in zip(paddings, spatial, strict=True))):
            mode = "zeros"
        options = f"stride={stride}, padding={padding}, dilation={dilation}, groups={groups}, padding_mode={mode!r}"
        layer = m.module(f"nn.Conv{rank}d({C}, {O}, {kernel}, {options}, bias={m.coin()})")
        return m.derived(x, f"{layer}({{x}})", dims)
    bias = weight(m, O) if m.coin() else None
    w = weight(m, O, C // groups, *kernel)
    return m.derived(x, f"F.conv{rank}d({{x}}, {w}, {bias}, {stride}, {padding}, {dilation}, {groups})", dims)


@op()
def conv_transpose(m: Sketch, x: Value) -> Value | None:
    rank = m.pick(1, 1, 2)
    x = m.arranged(x, rank + 2)
    C, spatial = x.shape[1], x.shape[2:]
    groups = m.split(C)
    per_group = m.rng.randint(1, 2)
    kernel = [m.rng.randint(1, 3) for _ in spatial]
    stride = [m.rng.randint(1, 3) for _ in spatial]
    dilation = [m.rng.randint(1, 2) for _ in spatial]
    padding = [m.rng.randint(0, 1) for _ in spatial]
    extra = [m.rng.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True)]
    sizes = [
        (n - 1) * s - 2 * p + d * (k - 1) + e + 1
        for n, s, p, d, k, e in zip(spatial, stride, padding, dilation, kernel, extra, strict=True)
    ]
    if min(sizes) < 1:
        return None
    bias = weight(m, groups * per_group) if m.coin() else None
    w = weight(m, C, per_group, *kernel)
    dims = (x.dims[0], (groups * per_group,), *((n,) for n in sizes))
    call = f"F.conv_transpose{rank}d({{x}}, {w}, {bias}, {stride}, {padding}, {extra}, {groups}, {dilation})"
    return m.derived(x, call, dims)


# --- embeddings ---


def _ids(m: Sketch, x: Value, num: int) -> Value:
    """Integers below `num`: an input of the model, or made from the data."""
    if m.coin(0.2):
        x = m.plain_last(x)
        return m.derived(x, f"{{x}}.argmax(-1) % {num}", x.dims[:-1])
    if m.coin(0.2):
        return m.derived(x, f"({{x}} > 0).long() % {num}")
    dims = (("B",), (m.num_ids,)) if m.batch_dim == 0 else ((m.num_ids,), ("B",))
    ids = m.emit(f"ids % {num}", dims)
    m.needs_ids = True
    return ids


@op(often=2)
def embedding(m: Sketch, x: Value) -> Value | None:
    num, E = m.rng.randint(1, 4), m.size()
    ids = _ids(m, x, num)
    if ids.ndim > 3:
        return None
    if m.coin():
        layer = m.module(f"nn.Embedding({num}, {E}, padding_idx={m.pick(None, 0)})")
        m.pool.append((f"{layer}.weight", (num, E)))
        call = f"{layer}({{x}})"
    else:
        call = f"F.embedding({{x}}, {weight(m, num, E)}, padding_idx={m.pick(None, None, num - 1)})"
    return m.derived(ids, call, (*ids.dims, (E,)))


@op(often=0.7)
def embedding_bag(m: Sketch, x: Value) -> Value | None:
    num, E = m.rng.randint(1, 4), m.size()
    ids = m.arranged(_ids(m, x, num), 1)
    ids = m.derived(ids, f"torch.stack([{{x}}, ({{x}} + 1) % {num}], 1)", (*ids.dims, (2,)))
    mode = m.pick("sum", "mean", "max", "weighted")
    options = f"mode={mode!r}"
    if mode == "weighted":
        options = f"mode='sum', per_sample_weights={m.derived(ids, '{x}.to(D) + 0.5')}"
    padding = m.pick("", "", ", padding_idx=0")
    return m.derived(ids, f"F.embedding_bag({{x}}, {weight(m, num, E)}, {options}{padding})", (ids.dims[0], (E,)))


@op()
def position(m: Sketch, x: Value) -> Value | None:
    """Ids that all samples share."""
    x = m.plain_last(x)
    if x.ndim < 2 or not is_plain(x.dims[-2]):
        return None
    T, E = x.shape[-2:]
    table = weight(m, T + 1, E)
    ids = f"torch.arange({T})" if m.coin() else m.constant(f"torch.arange({T})")
    if m.coin(0.3):
        ids = f"{ids}.expand({', '.join(map(length, x.dims[:-1]))})"
    return m.derived(x, f"{{x}} + F.embedding({ids}, {table})")


# --- norms ---


@op()
def layer_norm(m: Sketch, x: Value) -> Value | None:
    x = m.plain_last(x)
    n = 2 if x.ndim > 2 and is_plain(x.dims[-2]) and m.coin() else 1
    shape = x.shape[-n:]
    if m.coin(0.3):
        return m.derived(x, f"F.rms_norm({{x}}, {shape}, {weight(m, *shape)}, 0.1)")
    w, b = (weight(m, *shape) if m.coin(0.8) else None for _ in range(2))
    return m.derived(x, f"F.layer_norm({{x}}, {shape}, {w}, {b}, 0.1)")


@op()
def channel_norm(m: Sketch, x: Value) -> Value | None:
    x = m.arranged(x, m.pick(3, 4))
    C = x.shape[1]
    w, b = (weight(m, C) if m.coin(0.8) else None for _ in range(2))
    groups = m.split(C)
    if m.coin() and C // groups * prod(x.shape[2:]) > 1:
        return m.derived(x, f"F.group_norm({{x}}, {groups}, {w}, {b}, 0.1)")
    if prod(x.shape[2:]) == 1:
        return None
    return _with_plain_gradient(m, m.derived(x, f"F.instance_norm({{x}}, weight={w}, bias={b}, eps=0.1)"))


def _with_plain_gradient(m: Sketch, y: Value) -> Value:
    """y, whose gradient comes contiguous as x does: torch 2.15 reads them in the wrong order where one is channels-last."""
    m.line(f"{y}.requires_grad and {y}.register_hook(torch.Tensor.contiguous)")
    return y


@op()
def batch_norm(m: Sketch, x: Value) -> Value | None:
    x = m.arranged(x, m.pick(2, 3, 4))
    layer = m.module(f"nn.BatchNorm{max(1, x.ndim - 2)}d({x.shape[1]})")
    m.init.append(f"{layer}.eval()")
    return _with_plain_gradient(m, m.derived(x, f"{layer}({{x}}.contiguous())"))


@op()
def prelu(m: Sketch, x: Value) -> Value | None:
    channels = [1]
    if x.ndim > 1 and is_plain(x.dims[1]):
        channels += [x.shape[1]] * 2
    return m.derived(x, f"F.prelu({{x}}, {weight(m, m.rng.choice(channels))})")


# --- recurrent and attention ---


@op(often=1.5)
def recurrent(m: Sketch, x: Value) -> Value | None:
    batch_first = m.coin()
    x = m.arranged(x, 3, row=0 if batch_first else 1)
    rows, steps = x.dims[x.axis], x.dims[1 - x.axis]
    kind, H, layers, both = m.pick("RNN", "LSTM", "GRU"), m.size(), m.pick(1, 1, 2), m.coin(0.3)
    options = f"num_layers={layers}, bidirectional={both}, batch_first={batch_first}, bias={m.coin(0.8)}"
    out = H
    if kind == "LSTM" and H > 1 and m.coin(0.3):
        out = H - 1
        options += f", proj_size={out}"
    if kind == "RNN":
        options += f", nonlinearity={m.pick('tanh', 'relu')!r}"
    layer = m.module(f"nn.{kind}({x.last}, {H}, {options})")
    states = layers * (1 + both)
    given = ""
    if m.coin(0.3):
        first = [f"{weight(m, states, 1, n)}.expand(-1, {length(rows)}, -1).contiguous()" for n in (out, H)]
        given = f", ({first[0]}, {first[1]})" if kind == "LSTM" else f", {first[0]}"
    if m.coin(0.7):
        return m.derived(x, f"{layer}({{x}}{given})[0]", x.with_dim(-1, out * (1 + both)))
    last = "[1][0]" if kind == "LSTM" else "[1]"
    if steps == (0,):
        return None
    return m.derived(x, f"{layer}({{x}}{given}){last}", ((states,), rows, (out,)))


@op(often=0.5)
def cell(m: Sketch, x: Value) -> Value | None:
    x, H, kind = m.arranged(x, 2), m.size(), m.pick("RNN", "LSTM", "GRU")
    layer = m.module(f"nn.{kind}Cell({x.last}, {H})")
    return m.derived(x, f"{layer}({{x}})" + ("[0]" if kind == "LSTM" else ""), x.with_dim(-1, H))


@op(often=1.5)
def attention(m: Sketch, x: Value) -> Value | None:
    batch_first = m.coin()
    x = m.arranged(x, 3, row=0 if batch_first else 1)
    E = x.last
    heads = m.split(E)
    if m.coin(0.3):
        options = f"norm_first={m.coin()}, activation={m.pick('relu', 'gelu')!r}, batch_first={batch_first}"
        layer = m.module(f"nn.TransformerEncoderLayer({E}, {heads}, {m.size()}, dropout=0.0, {options})")
        if m.coin(0.3):
            m.init.append(f"{layer}.eval()")
        return m.derived(x, f"{layer}({{x}})")
    y = m.partner(x)
    options = f"batch_first={batch_first}, bias={m.coin()}, add_bias_kv={m.coin(0.2)}, add_zero_attn={m.coin(0.1)}"
    layer = m.module(f"nn.MultiheadAttention({E}, {heads}, {options})")
    q, k, v = m.pick((x, x, x), (x, y, y), (y, x, x), (x, x, y))
    return m.derived(x, f"{layer}({q}, {k}, {v}, need_weights={m.coin()})[0]")


@op()
def dot_product_attention(m: Sketch, x: Value) -> Value | None:
    x = m.arranged(x, m.pick(3, 4))
    T = x.shape[-2]
    y = m.partner(x)
    if m.coin():
        mask = m.pick("", ", is_causal=True", f", attn_mask={weight(m, T, T)}")
        return m.derived(x, f"F.scaled_dot_product_attention({{x}}, {y}, {y}{mask})")
    scores = m.derived(x, f"{{x}} @ {y}.mT", x.with_dim(-1, T))
    scores = m.derived(scores, f"({{x}} + {weight(m, T, T)}).softmax(-1)")
    return m.derived(x, f"{scores} @ {{x}}")


# --- parameters in arithmetic ---


def _beside(m: Sketch, x: Value) -> str:
    """A weight that broadcasts against x."""
    shape = [1 if m.coin(0.25) else size for size in x.shape]
    while shape and shape[0] == 1 and m.coin(0.7):
        shape = shape[1:]
    return weight(m, *shape)


@op(often=3, of_complex=True)
def arithmetic(m: Sketch, x: Value) -> Value | None:
    p = _beside(m, x)
    forms = [f"{{x}} + {p}", f"{p} + {{x}}", f"{{x}} - {p}", f"{p} - {{x}}", f"{{x}} * {p}", f"{p} * {{x}}"]
    forms += [f"{{x}}.add({p}, alpha=2)", f"torch.mul({{x}}, {p}).neg()", f"torch.sub({p}, {{x}}, alpha=0.5)"]
    if not m.is_complex:
        forms += [f"{{x}} / (1 + {p}.square())", f"{p} / (1 + {{x}}.square())", f"torch.maximum({{x}}, {p})"]
        forms += [f"torch.where({{x}} > 0, {{x}}, {p})", f"torch.lerp({{x}}, {p}.expand_as({{x}}), 0.3)"]
        forms += [f"torch.where({p} > 0, {{x}}, {p})", f"{{x}} * {p}.exp()", f"torch.clamp({{x}}, min={p})"]
        forms += [f"torch.atan2({{x}}, 2 + {p}.square())", f"({{x}}.abs() + 1) ** {p}.tanh()", f"{{x}} + 0 * {p}"]
    return m.derived(x, m.rng.choice(forms))


@op(of_complex=True)
def arithmetic_with_partner(m: Sketch, x: Value) -> Value | None:
    y, p = m.partner(x), _beside(m, x)
    return m.derived(x, m.pick(f"torch.lerp({{x}}, {y}, {p})", f"torch.addcmul({{x}}, {y}, {p}, value=0.5)",
                               f"{{x}} * {p} + {y} * {p}", f"{{x}} + {p} * {y}"))  # fmt: skip


@op(of_complex=True)
def token(m: Sketch, x: Value) -> Value | None:
    """A learned row in front of those of each sample."""
    d = m.plain_dim(x)
    if d is None:
        return None
    k = m.pick(1, 1, 2)
    w = weight(m, *(k if i == d else size for i, size in enumerate(x.shape)))
    sizes = ", ".join(str(k) if i == d else length(dim) for i, dim in enumerate(x.dims))
    w = f"{w}.expand({sizes})"
    return m.derived(x, f"torch.cat([{m.pick(f'{w}, {{x}}', f'{{x}}, {w}')}], {d})", x.with_dim(d, x.shape[d] + k))


@op(often=0.7, of_complex=True)
def stack(m: Sketch, x: Value) -> Value | None:
    if x.ndim > 3:
        return None
    d, other = m.rng.randint(0, x.ndim), m.pick(f"{_beside(m, x)}.expand_as({{x}})", str(m.partner(x)))
    return m.derived(x, f"torch.stack([{{x}}, {other}], {d})", (*x.dims[:d], (2,), *x.dims[d:]))


@op(of_complex=True)
def setitem(m: Sketch, x: Value) -> Value | None:
    d = m.plain_dim(x)
    if d is None:
        return None
    index = ":, " * d + m.pick("0", "-1", ":1", "[0]")
    kept = [(size if m.coin() else 1) if i != d else 1 for i, size in enumerate(x.shape)]
    shape = kept if index.endswith(("1", "]")) and not index.endswith("-1") else kept[:d] + kept[d + 1 :]
    y = m.derived(x, m.pick("{x}.clone()", "{x} * 1", "torch.zeros_like({x}) + {x}"))
    m.line(f"{y}[{index}] = {weight(m, *shape)}" if m.coin(0.8) else f"{y}[{index}] = {y}[{index}] * {weight(m, *shape)}")
    return y


@op(of_complex=True)
def in_place_arithmetic(m: Sketch, x: Value) -> Value | None:
    y = m.derived(x, m.pick("{x}.clone()", "{x} + 1"))
    p = _beside(m, x)
    m.line(m.pick(f"{y} += {p}", f"{y}.mul_({p})", f"{y}.add_({p}, alpha=2)", f"{y} *= {p}", f"{y} -= {p}"))
    return y


# --- layout ---


@op(often=2, of_complex=True)
def permute(m: Sketch, x: Value) -> Value | None:
    order = list(range(x.ndim))
    m.rng.shuffle(order)
    dims = tuple(x.dims[d] for d in order)
    if x.ndim == 2 and order == [1, 0]:
        return m.derived(x, m.pick("{x}.T", "{x}.t()", "{x}.transpose(0, 1)", "{x}.mT"), dims)
    return m.derived(x, f"{{x}}.permute({', '.join(map(str, order))})" + m.pick("", ".contiguous()"), dims)


@op(often=2, of_complex=True)
def flatten(m: Sketch, x: Value) -> Value | None:
    if x.ndim < 2:
        return None
    d = m.rng.randrange(x.ndim - 1)
    a, b = x.dims[d], x.dims[d + 1]
    if x.order and not (is_plain(a) and is_plain(b)):
        return None
    dim = (a[0] * b[0],) if is_plain(a) and is_plain(b) else (*a, *b)
    dims = (*x.dims[:d], dim, *x.dims[d + 2 :])
    sizes = ", ".join(map(length, dims))
    return m.derived(x, m.pick(f"{{x}}.flatten({d}, {d + 1})", f"{{x}}.reshape({sizes})"), dims)


@op(often=2, of_complex=True)
def unflatten(m: Sketch, x: Value) -> Value | None:
    folded = [d for d, dim in enumerate(x.dims) if len(dim) > 1 or (is_plain(dim) and dim[0] > 1)]
    if not folded or x.ndim > 3:
        return None
    d = m.rng.choice(folded)
    if x.order and d == x.axis:
        return None
    if len(x.dims[d]) > 1:
        k = m.rng.randint(1, len(x.dims[d]) - 1)
        a, b = x.dims[d][:k], x.dims[d][k:]
        a, b = ((prod(part),) if is_plain(part) else part for part in (a, b))
    else:
        k = m.split(x.shape[d])
        a, b = (k,), (x.shape[d] // k,)
    dims = (*x.dims[:d], a, b, *x.dims[d + 1 :])
    sizes = ", ".join(map(length, dims))
    return m.derived(x, m.pick(f"{{x}}.unflatten({d}, ({length(a)}, {length(b)}))", f"{{x}}.reshape({sizes})"), dims)


@op(of_complex=True)
def repeat(m: Sketch, x: Value) -> Value | None:
    d, k = m.rng.randrange(x.ndim), 2
    plain = is_plain(x.dims[d])
    if not plain and (x.order or len(x.dims[d]) > 2):
        return None
    if m.coin():
        return m.derived(
            x, f"{{x}}.repeat_interleave({k}, {d})", x.with_dim(d, (x.shape[d] * k,) if plain else (*x.dims[d], k))
        )
    dims = x.with_dim(d, (x.shape[d] * k,) if plain else (k, *x.dims[d]))
    repeats = ", ".join(str(k) if i == d else "1" for i in range(x.ndim))
    other = m.partner(x)
    return m.derived(
        x, m.pick(f"{{x}}.repeat({repeats})", f"torch.cat([{{x}}, {other}], {d})", f"{{x}}.tile({repeats})"), dims
    )


@op(of_complex=True)
def chunk(m: Sketch, x: Value) -> Value | None:
    d = m.rng.randrange(x.ndim)
    function = m.pick("chunk({x}, 2, %d)", "split({x}, 1, %d)", "tensor_split({x}, 2, %d)") % d
    order = "" if not is_plain(x.dims[d]) or m.coin() else "[::-1]"
    return m.derived(x, f"torch.cat(torch.{function}{order}, {d})")


@op(of_complex=True)
def shuffle(m: Sketch, x: Value) -> Value | None:
    """Rows in another order, which is undone later."""
    if x.order:
        return m.in_order(x)
    d, n = x.axis, length(x.dims[x.axis])
    order = m.name()
    generator = f"torch.Generator().manual_seed({m.rng.randrange(100)})"
    m.line(f"{order} = " + m.pick(f"torch.randperm({n}, generator={generator})", f"torch.arange({n}).flip(0)"))
    return m.emit(m.pick(f"{x}[{':, ' * d}{order}]", f"{x}.index_select({d}, {order})"), x.dims, order=order)


@op(of_complex=True)
def unsqueeze(m: Sketch, x: Value) -> Value | None:
    if x.ndim > 3:
        return None
    d = m.rng.randint(0, x.ndim)
    dims = (*x.dims[:d], (1,), *x.dims[d:])
    if m.coin():
        k = m.size()
        dims = (*x.dims[:d], (k,), *x.dims[d:])
        sizes = ", ".join(map(length, dims))
        return m.derived(x, f"{{x}}.unsqueeze({d}).expand({sizes})", dims)
    return m.derived(x, m.pick(f"{{x}}.unsqueeze({d})", f"{{x}}[{':, ' * d}None]"), dims)


@op(of_complex=True)
def slice_features(m: Sketch, x: Value) -> Value | None:
    d = m.plain_dim(x)
    if d is None:
        return None
    n, at = x.shape[d], m.rng.randrange(x.shape[d])
    forms = [(f"{{x}}.flip({d})", (n,)), (f"{{x}}.roll(1, {d})", (n,)), (f"{{x}}.narrow({d}, {at}, {n - at})", (n - at,))]
    if x.ndim > 1:
        forms += [(f"{{x}}.select({d}, {at})", ()), (f"{{x}}[{':, ' * d}{at}]", ()), (f"{{x}}.unbind({d})[{at}]", ())]
    source, size = m.rng.choice(forms)
    return m.derived(x, source, x.with_dim(d, *size))


# --- the rest ---


@op(often=2)
def activation(m: Sketch, x: Value) -> Value | None:
    return m.derived(x, m.pick("F.relu({x})", "F.gelu({x})", "{x}.sigmoid()", "F.silu({x})", "F.softplus({x})", "F.elu({x})",
                               "F.leaky_relu({x}, 0.2)", "{x}.clamp(-1, 1)", "F.dropout({x}, 0.0)", "{x}.abs()",
                               "F.hardtanh({x})", "{x}.double().to(D)", "{x} + {x}.detach()"))  # fmt: skip


@op(often=1, of_complex=True)
def smooth(m: Sketch, x: Value) -> Value | None:
    return m.derived(x, m.pick("{x}.sin()", "{x}.square() * 0.3", "-{x}", "torch.cos({x})", "{x} * {x}.detach()"))


@op(of_complex=True)
def in_place(m: Sketch, x: Value) -> Value | None:
    if not m.is_complex and m.coin():
        y = m.derived(x, m.pick("{x} + 1", "{x}.clone()", "-{x}"))
        return m.derived(y, m.pick("F.relu({x}, inplace=True)", "{x}.relu_()", "{x}.sigmoid_()", "{x}.clamp_(min=-0.5)"))
    return m.derived(x, m.pick("{x}.add_(1)", "{x}.mul_(0.7)", "{x}.neg_()"))


@op(often=0.7, of_complex=True)
def in_place_later(m: Sketch, x: Value) -> Value | None:
    """A value changed after others were computed from it; where torch keeps it for backward, it raises."""
    earlier = m.rng.choice(m.values)
    m.line(f"{earlier}.{m.pick('add_(1)', 'mul_(0.7)', 'neg_()', 'zero_()')}")
    return m.derived(x, m.pick("-{x}", "{x} * 0.5"))


@op(of_complex=True)
def gather(m: Sketch, x: Value) -> Value | None:
    """Features picked or summed by a fixed index."""
    d = m.plain_dim(x)
    if d is None:
        return None
    n, k = x.shape[d], m.size()
    index = m.constant(f"torch.arange({k}) * 2 % {n}")
    if m.coin():
        return m.derived(x, m.pick(f"{{x}}.index_select({d}, {index})", f"{{x}}[{':, ' * d}{index}]"), x.with_dim(d, k))
    y = m.partner(x)
    index = m.constant(f"torch.arange({n}) * 2 % {n}")
    return m.derived(x, f"{{x}}.index_add({d}, {index}, {y})")


@op(often=1.5, of_complex=True)
def residual(m: Sketch, x: Value) -> Value | None:
    return m.derived(x, m.pick("{x} + %s", "{x} * %s", "{x} - %s") % m.partner(x))


@op(often=0.7, of_complex=True)
def concatenate(m: Sketch, x: Value) -> Value | None:
    d, y = m.plain_dim(x), m.partner(x)
    return None if d is None else m.derived(x, f"torch.cat([{{x}}, {y}], {d})", x.with_dim(d, 2 * x.shape[d]))


@op(often=1.5)
def reduce(m: Sketch, x: Value) -> Value | None:
    d = m.plain_dim(x)
    if d is None or x.ndim == 1:
        return None
    call = m.pick("sum({d})", "mean({d})", "amax({d})", "logsumexp({d})", "max({d})[0]", "max({d}).values", "sum(dim={d})")
    return m.derived(x, "{x}." + call.replace("{d}", str(d)), x.with_dim(d))


@op()
def along_features(m: Sketch, x: Value) -> Value | None:
    d = m.plain_dim(x)
    if d is None:
        return None
    return m.derived(x, m.pick(f"{{x}}.softmax({d})", f"F.log_softmax({{x}}, {d})", f"{{x}}.cumsum({d})",
                               f"{{x}} - {{x}}.mean({d}, keepdim=True)", f"{{x}}.sort({d}).values",
                               f"F.normalize({{x}}, dim={d}, eps=0.5)", f"{{x}}.cummax({d}).values"))  # fmt: skip


@op()
def pool(m: Sketch, x: Value) -> Value | None:
    rank = m.pick(1, 2)
    x = m.arranged(x, rank + 2)
    n = m.size()
    if m.coin(0.4):
        return m.derived(x, f"F.adaptive_{m.pick('avg', 'max')}_pool{rank}d({{x}}, {n})", (*x.dims[:2], *[(n,)] * rank))
    if m.coin(0.3):
        dims = (*x.dims[:2], *((2 * size,) for size in x.shape[2:]))
        return m.derived(x, "F.interpolate({x}, scale_factor=2)", dims)
    k = m.rng.randint(1, 2)
    if min(x.shape[2:]) < k:
        return None
    dims = (*x.dims[:2], *(((size - k) // k + 1,) for size in x.shape[2:]))
    return m.derived(x, f"F.{m.pick('avg', 'max')}_pool{rank}d({{x}}, {k})", dims)


@op(often=0.5)
def pad(m: Sketch, x: Value) -> Value | None:
    x = m.plain_last(x)
    return m.derived(x, "F.pad({x}, (1, 0))", x.with_dim(-1, x.last + 1))


@op(often=0.7, of_complex=True)
def samples_meet_themselves(m: Sketch, x: Value) -> Value | None:
    """A product of a sample with itself."""
    x = m.arranged(x, 3)
    y = m.partner(x)
    T = x.shape[1]
    return m.derived(x, m.pick(f"{{x}} @ {y}.mT", f"torch.bmm({{x}}, {y}.transpose(1, 2))",
                               f'torch.einsum("bti,bsi->bts", {{x}}, {y})'), (x.dims[0], (T,), (T,)))  # fmt: skip


# --- what mixes samples ---


@mixing
def statistic(m: Sketch, x: Value) -> Value | None:
    d = x.axis
    return m.derived(x, m.pick(f"{{x}} - {{x}}.mean({d}, keepdim=True)", "{x} / (1 + {x}.square().sum())",
                               f"{{x}} + {{x}}.amax({d}, keepdim=True)", f"{{x}} - {{x}}.detach().mean({d}, keepdim=True)",
                               f"{{x}} / (1 + {{x}}.norm(dim={d}, keepdim=True))", f"F.normalize({{x}}, dim={d})"))  # fmt: skip


@mixing
def batch_statistics(m: Sketch, x: Value) -> Value | None:
    x = m.arranged(x, 3)
    if x.shape[2] == 1:
        return None  # torch refuses one sample alone
    return m.derived(x, f"{m.module(f'nn.BatchNorm1d({x.shape[1]}, affine={m.coin()})')}({{x}})")


@mixing
def along_batch(m: Sketch, x: Value) -> Value | None:
    d = x.axis
    return m.derived(x, m.pick(f"{{x}}.cumsum({d})", f"{{x}}.softmax({d})", f"{{x}}.sort({d}).values", f"{{x}}.flip({d})",
                               f"{{x}}.roll(1, {d})", f"{{x}} + {{x}}.roll(1, {d})", f"{{x}} + {{x}}.flip({d})",
                               f"{{x}}.cummax({d}).values", f"{{x}} + {{x}}.narrow({d}, 0, 1)"))  # fmt: skip


@mixing
def across_batch(m: Sketch, x: Value) -> Value | None:
    x = m.arranged(x, 2)
    return m.derived(x, m.pick("({x} @ {x}.T).softmax(-1) @ {x}", "{x} @ ({x}.T @ {x})",
                               'torch.einsum("ai,bi,bj->aj", {x}, {x}, {x})',
                               "F.scaled_dot_product_attention({x}[None], {x}[None], {x}[None])[0]"))  # fmt: skip


@mixing
def wrong_axis(m: Sketch, x: Value) -> Value | None:
    """A layer told that the batch lies elsewhere."""
    x = m.arranged(x, 3)
    if m.coin():
        return m.derived(x, f"{m.module(f'nn.GRU({x.last}, {x.last}, batch_first=False)')}({{x}})[0]")
    layer = m.module(f"nn.MultiheadAttention({x.last}, 1, batch_first=False)")
    return m.derived(x, f"{layer}({{x}}, {{x}}, {{x}})[0]")
