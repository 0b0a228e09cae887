"""A model being drawn: its source grows line by line, with the shape of every value known."""

import random
from dataclasses import dataclass

Dim = tuple[str | int, ...]
"""The factors of a dimension, slowest first; "B" stands for the batch, so ("B", 3) is a fold of [B, 3] into rows."""

MOST_ELEMENTS = 400
"""The largest value of one sample, so that an example takes milliseconds."""


def is_plain(dim: Dim) -> bool:
    """Whether no samples lie along this dimension."""
    return "B" not in dim


def length(dim: Dim) -> str:
    """The size of a dimension as source: the batch size is known when the model runs."""
    return " * ".join(map(str, dim))


@dataclass(frozen=True)
class Value:
    """A variable of the forward."""

    name: str
    dims: tuple[Dim, ...]
    order: str = ""
    """The variable that holds the order of its rows, where they are not in that of the batch."""

    def __str__(self) -> str:
        return self.name

    @property
    def ndim(self) -> int:
        return len(self.dims)

    @property
    def axis(self) -> int:
        """The dimension with the samples."""
        return next(d for d, dim in enumerate(self.dims) if not is_plain(dim))

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes, with 1 in place of rows: the shape of a weight for this value."""
        return tuple(dim[0] if is_plain(dim) else 1 for dim in self.dims)  # type: ignore[misc]

    @property
    def lengths(self) -> str:
        return ", ".join(map(length, self.dims))

    @property
    def last(self) -> int:
        return self.shape[-1]

    @property
    def is_plain_last(self) -> bool:
        return is_plain(self.dims[-1])

    def with_dim(self, d: int, *dims: int | Dim) -> tuple[Dim, ...]:
        """The dims with these in place of dimension d."""
        spelt = tuple((new,) if isinstance(new, int) else new for new in dims)
        return self.dims[:d] + spelt + self.dims[d + 1 :] if d != -1 else self.dims[:-1] + spelt


class Sketch:
    """The source of a model, and what the next line may use."""

    def __init__(self, rng: random.Random, *, batch_size: int, batch_dim: int, dtype: str):
        self.rng, self.batch_size, self.batch_dim, self.dtype = rng, batch_size, batch_dim, dtype
        self.init: list[str] = []
        self.body: list[str] = []
        self.values: list[Value] = []
        self.ops: list[str] = []
        self.pool: list[tuple[str, tuple[int, ...]]] = []
        """Parameters drawn so far, which later weights may be tied to."""
        self.layers: list[tuple[str, int, int]] = []
        """Linear layers drawn so far, which may be called again."""
        self.op = ""
        self.count = 0
        self.is_complex = dtype.startswith("torch.complex")
        self.needs_ids = False
        self.num_ids = self.size()

    # --- drawing -----------------------------------------------------------------------------------------------------

    def coin(self, p: float = 0.5) -> bool:
        return self.rng.random() < p

    def pick(self, *choices):
        return self.rng.choice(choices)

    def size(self) -> int:
        """A small size that often is the batch size, so that a confusion of dimensions shows."""
        return self.batch_size if self.coin(0.35) else self.rng.randint(1, 4)

    def split(self, n: int) -> int:
        """A divisor of n."""
        return self.pick(*(k for k in range(1, n + 1) if n % k == 0))

    # --- writing -----------------------------------------------------------------------------------------------------

    def name(self) -> str:
        self.count += 1
        return f"{self.op}_{self.count}"

    def line(self, line: str) -> None:
        self.body.append(line)

    def emit(self, source: str, dims: tuple[Dim, ...], *, order: str = "") -> Value:
        value = Value(self.name(), dims, order)
        self.line(f"{value} = {source}")
        return value

    def derived(self, x: Value, source: str, dims: tuple[Dim, ...] | None = None) -> Value:
        """A value made from x with its rows in the same order; `{x}` in the source stands for x."""
        return self.emit(source.replace("{x}", str(x)), x.dims if dims is None else dims, order=x.order)

    def constant(self, source: str) -> str:
        name = self.name()
        self.init.append(f"self.register_buffer({name!r}, {source})")
        return f"self.{name}"

    def parameter(self, *shape: int, dtype: str = "D") -> str:
        name = self.name()
        frozen = ", requires_grad=False" if self.coin(0.08) else ""
        self.init.append(f"self.{name} = nn.Parameter(torch.randn({shape}, dtype={dtype}){frozen})")
        if not frozen and dtype == "D":
            self.pool.append((f"self.{name}", shape))
        return f"self.{name}"

    def module(self, source: str) -> str:
        name = self.name()
        frozen = ".requires_grad_(False)" if self.coin(0.05) else ""
        self.init.append(f"self.{name} = {source[:-1]}, dtype=D){frozen}")
        return f"self.{name}"

    # --- shapes ------------------------------------------------------------------------------------------------------

    def arranged(self, x: Value, ndim: int, *, row: int = 0) -> Value:
        """x with `ndim` dimensions and its rows along dimension `row`."""
        if x.axis != 0:
            x = self.derived(x, f"{{x}}.movedim({x.axis}, 0)", (x.dims[x.axis], *x.dims[: x.axis], *x.dims[x.axis + 1 :]))
        while x.ndim < ndim:
            d = self.rng.randint(1, x.ndim)
            x = self.derived(x, f"{{x}}.unsqueeze({d})", (*x.dims[:d], (1,), *x.dims[d:]))
        while x.ndim > ndim:
            if ndim == 1:
                x = self.derived(x, "{x}.select(-1, 0)", x.dims[:-1])
            else:
                *_, m, n = x.shape
                x = self.derived(x, "{x}.flatten(-2)", (*x.dims[:-2], (m * n,)))
        if row != 0:
            x = self.derived(x, f"{{x}}.movedim(0, {row})", (*x.dims[1 : row + 1], x.dims[0], *x.dims[row + 1 :]))
        return x

    def plain_last(self, x: Value) -> Value:
        """x with features along its last dimension."""
        if x.is_plain_last:
            return x
        if x.ndim == 1:
            return self.derived(x, "{x}.unsqueeze(-1)", (*x.dims, (1,)))
        return self.derived(x, "{x}.transpose(0, -1)", (x.dims[-1], *x.dims[1:-1], x.dims[0]))

    def plain_dim(self, x: Value) -> int | None:
        """A dimension without samples."""
        plain = [d for d, dim in enumerate(x.dims) if is_plain(dim)]
        return self.rng.choice(plain) if plain else None

    def partner(self, x: Value) -> Value:
        """Another value of the same dims, an earlier one if there is one."""
        others = [v for v in self.values if v.dims == x.dims and v.order == x.order and v.name != x.name]
        return (
            self.rng.choice(others) if others and self.coin(0.8) else self.derived(x, self.pick("{x}.tanh()", "{x} * 0.5"))
        )

    def in_order(self, x: Value) -> Value:
        """x with its rows in the order of the batch again."""
        if not x.order:
            return x
        form = self.pick("index", "select", "setitem", "index_copy")
        d, undo = x.axis, f"torch.argsort({x.order})"
        if form == "setitem" and d == 0:
            y = self.emit(f"torch.zeros_like({x})", x.dims)
            self.line(f"{y}[{x.order}] = {x}")
            return y
        if form == "index_copy":
            return self.emit(f"torch.zeros_like({x}).index_copy({d}, {x.order}, {x})", x.dims)
        if form == "index":
            return self.emit(f"{x}[{':, ' * d}{undo}]", x.dims)
        return self.emit(f"{x}.index_select({d}, {undo})", x.dims)

    def unfolded(self, x: Value) -> Value:
        """x with the batch as a dimension of its own."""
        x = self.in_order(x)
        d = x.axis
        if len(x.dims[d]) > 1:
            sizes = ", ".join(map(str, x.dims[d]))
            x = self.derived(x, f"{{x}}.unflatten({d}, ({sizes}))", x.with_dim(d, *((f,) for f in x.dims[d])))
        return x

    def source(self, out: str, loss: str, inputs: list[str]) -> str:
        pad = "\n        "
        args = ", ".join(inputs)
        return (
            f"D = {self.dtype}\n\n\nclass Model(nn.Module):\n    def __init__(self):\n        super().__init__(){pad}"
            + pad.join(self.init)
            + f"\n\n    def forward(self, {args}):{pad}B = {inputs[0]}.shape[{self.batch_dim}]{pad}"
            + pad.join(self.body)
            + f"{pad}return {out}\n\n\ndef loss(model, {args}):\n    out = model({args})\n    return {loss}\n"
        )
