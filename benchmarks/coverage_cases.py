"""Further uses for coverage.py, which need more than a model and a batch: a loss, a precision, a refusal as the right outcome."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from cases import B, Case, Fn, Seq, curved, ids
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


@dataclass
class Use(Case):
    right: str = "gradients"
    """"gradients": the oracle's; "refusal": an error; "either" of the two."""
    reduction: str = "none"
    """What the loss function returns: "none" for one loss a sample, or their "sum" or "mean"."""
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-9  # float64, sums of at most a few thousand terms
    under: Callable[[], AbstractContextManager] = nullcontext
    """What forward and backward run in."""
    truth: Callable[[], nn.Module] | None = None
    """The model that the oracle runs, where a copy of the one captured does not do."""

    def build(self, make: Callable[[], nn.Module] | None = None) -> tuple[nn.Module, tuple, Callable[..., Tensor]]:
        model, batch, loss_fn = Case(
            self.name, make or self.make, self.batch, self.loss_fn, batch_dim=self.batch_dim
        ).build()
        if self.dtype == torch.float64:
            return model, batch, loss_fn
        cast = lambda t: t.to(self.dtype) if isinstance(t, Tensor) and t.dtype == torch.float64 else t
        return model.to(self.dtype), tuple(map(cast, batch)), loss_fn


USES: list[Use] = []


def use(name: str, make: Callable[[], nn.Module], *shapes: Any, **more: Any) -> None:
    USES.append(Use(name, make, lambda: tuple(s() if callable(s) else torch.randn(*s) for s in shapes), **more))


def rows(out: Tensor) -> Tensor:
    """One loss a sample."""
    return curved(out).flatten(1).sum(1)


def linear(i: int = 5, o: int = 3) -> nn.Linear:
    return nn.Linear(i, o)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def convnet() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(24, 2))


def two(**more: Any) -> dict[str, Any]:
    return {"a": linear(5, 5), "b": linear(5, 5), **more}


# --- precision: bfloat16 keeps 8 bits and a handful of ops round in turn, float16 11 bits, float32 24 bits ---
HALF = {"dtype": torch.float32, "tolerance": 0.1}


def bfloat16() -> AbstractContextManager:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def autocast_loss(model: nn.Module, x: Tensor) -> Tensor:
    with bfloat16():
        return rows(model(x)).float()


def autocast_part(s: Any, x: Tensor) -> Tensor:
    with bfloat16():
        h = s.a(x).tanh()
    return s.b(h.to(x.dtype))


for name, make, shape in [("mlp", mlp, (B, 5)), ("convnet", convnet, (B, 2, 8))]:
    use(f"autocast-backward-outside-{name}", make, shape, loss_fn=autocast_loss, **HALF)
    use(f"autocast-backward-inside-{name}", make, shape, under=bfloat16, **HALF)
use("autocast-part", lambda: Fn(autocast_part, **two()), (B, 5), **HALF)
for dtype, tolerance in [(torch.float32, 1e-4), (torch.bfloat16, 0.1), (torch.float16, 0.02)]:
    use(f"{str(dtype)[6:]}-mlp", mlp, (B, 5), dtype=dtype, tolerance=tolerance)

# --- losses ---
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 1, 0]]).bool()
CLASSES = torch.tensor([[0, 1, 2], [2, 1, 0], [1, 1, 1], [0, 0, 2]])
IGNORED = CLASSES.masked_fill(~MASK, -100)


def on_tokens(loss: Callable[[Tensor, Tensor], Tensor], targets: Tensor = CLASSES, **more: Any) -> dict[str, Any]:
    return {
        "loss_fn": lambda model, x, y: loss(model(x), y),
        "batch": lambda: (torch.randn(B, 3, 5), targets.clone()),
        **more,
    }


def on_rows(loss: Callable[[Tensor, Tensor], Tensor], targets: Tensor | None = None, **more: Any) -> dict[str, Any]:
    batch = lambda: (torch.randn(B, 5), CLASSES[:, 0].clone() if targets is None else targets.clone())
    return {"loss_fn": lambda model, x, y: loss(model(x), y), "batch": batch, **more}


def own_tokens(z: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(z.transpose(1, 2), y, reduction="none")
    return losses.sum(1) / (y >= 0).sum(1)


def flat(z: Tensor, y: Tensor, **more: Any) -> Tensor:
    return F.cross_entropy(z.flatten(0, 1), y.flatten(), **more)


REAL = torch.linspace(0, 1, 3 * B).view(B, 3).double()
LOSSES = {
    "rows": on_rows(lambda z, y: F.cross_entropy(z, y, reduction="none")),
    "sum": on_rows(lambda z, y: F.cross_entropy(z, y, reduction="sum"), reduction="sum"),
    "mean": on_rows(F.cross_entropy, reduction="mean"),
    "label-smoothing": on_rows(lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1), reduction="mean"),
    "nll-sum": on_rows(lambda z, y: F.nll_loss(z.log_softmax(1), y, reduction="sum"), reduction="sum"),
    "multi-margin": on_rows(F.multi_margin_loss, reduction="mean"),
    "gathered": on_rows(lambda z, y: z.gather(1, y[:, None]).square().sum(), reduction="sum"),
    "mse-mean": on_rows(F.mse_loss, REAL, reduction="mean"),
    "huber-sum": on_rows(lambda z, y: F.huber_loss(z, y, reduction="sum"), REAL, reduction="sum"),
    "bce-mean": on_rows(F.binary_cross_entropy_with_logits, REAL, reduction="mean"),
    "kl-batchmean": on_rows(lambda z, y: F.kl_div(z.log_softmax(1), y, reduction="batchmean"), REAL, reduction="mean"),
    "two-terms": on_rows(lambda z, y: F.cross_entropy(z, y) + 0.1 * z.square().mean(), reduction="mean"),
    "python-sum": on_rows(lambda z, y: sum(F.cross_entropy(a, b) for a, b in zip(z, y, strict=True)), reduction="sum"),
    "tokens-mean": on_tokens(flat, reduction="mean"),
    "tokens-own-mean": on_tokens(own_tokens, IGNORED),
    "tokens-ignored-sum": on_tokens(lambda z, y: flat(z, y, reduction="sum"), IGNORED, reduction="sum"),
    "tokens-ignored-mean": on_tokens(flat, IGNORED, reduction="mean", right="either"),
    "class-weights-sum": on_rows(lambda z, y: F.cross_entropy(z, y, REAL[1].to(z), reduction="sum"), reduction="sum"),
    "class-weights-mean": on_rows(lambda z, y: F.cross_entropy(z, y, REAL[1].to(z)), reduction="mean", right="either"),
    "selected-mean": on_tokens(lambda z, y: F.cross_entropy(z[y >= 0], y[y >= 0]), IGNORED, reduction="mean", right="either"),
    "selected-sum": on_tokens(lambda z, y: F.cross_entropy(z[y >= 0], y[y >= 0], reduction="sum"), IGNORED, reduction="sum"),
}  # fmt: skip
for name, more in LOSSES.items():
    USES.append(Use(f"loss-{name}", linear, **more))
penalised = lambda: Fn(lambda s, x: (s.l(x), s.l.weight.square().sum()), l=linear())
use("loss-penalty-a-sample", penalised, (B, 5), loss_fn=lambda m, x: (lambda y, p: rows(y) + p)(*m(x)))
use("loss-weight-decay", penalised, (B, 5), loss_fn=lambda m, x: (lambda y, p: rows(y).sum() + p)(*m(x)), reduction="sum",
    right="either")  # fmt: skip
use("loss-ctc", lambda: Fn(lambda s, x: s.l(x).log_softmax(-1).transpose(0, 1), l=linear()), (B, 6, 5), lambda: CLASSES[:, :2] % 2 + 1,
    loss_fn=lambda m, x, y: F.ctc_loss(m(x), y, [6] * len(x), [2] * len(x), reduction="none"))  # fmt: skip
use(
    "loss-adaptive-softmax",
    lambda: nn.AdaptiveLogSoftmaxWithLoss(16, 9, [2, 5]),
    (8, 16),
    ids(9, 8),
    loss_fn=lambda m, x, y: -m(x, y)[0],
)
use("loss-adaptive-softmax-no-features", lambda: nn.AdaptiveLogSoftmaxWithLoss(5, 9, [2, 5]), (8, 5), ids(9, 8),
    loss_fn=lambda m, x, y: -m(x, y)[0])  # fmt: skip
use("loss-siamese", lambda: linear(5, 5), (B, 5), (B, 5), loss_fn=lambda m, x, y: (m(x) - m(y)).square().sum(1))

# --- how the model is called, and what it is wrapped in ---


@dataclass
class Answer:
    logits: Tensor


def hooked(model: nn.Module) -> nn.Module:
    model.register_forward_hook(lambda m, args, out: 2 * out)
    return model


def backward_hooked(model: nn.Module) -> nn.Module:
    model.register_full_backward_hook(lambda m, gx, gy: None)
    return model


def compiled_in_place(model: nn.Module, part: nn.Module) -> nn.Module:
    part.compile(backend="aot_eager")
    return model


def closed_over() -> nn.Module:
    scale = nn.Parameter(torch.randn(5, dtype=torch.float64))
    model = Fn(lambda s, x: s.l(x * scale), l=linear())
    model.scale = scale
    return model


def closed_over_truth() -> nn.Module:
    scale = nn.Parameter(torch.randn(5, dtype=torch.float64))
    model = Fn(lambda s, x: s.l(x * s.scale), l=linear())
    model.scale = scale
    return model


def scripted_part() -> nn.Module:
    return nn.Sequential(linear(5, 5), torch.jit.script(linear()))


def pruned() -> nn.Module:
    layer = linear()
    prune.l1_unstructured(layer, "weight", amount=0.4)
    return layer


def pruned_truth() -> nn.Module:
    layer: Any = pruned()
    mask, parts = layer.weight_mask.double(), dict(layer.named_parameters())
    return Fn(lambda s, x: F.linear(x, s.weight_orig * mask, s.bias), **parts)


def normed_truth() -> nn.Module:
    layer: Any = torch.nn.utils.weight_norm(linear())
    parts = dict(layer.named_parameters())
    return Fn(lambda s, x: F.linear(x, s.weight_g * F.normalize(s.weight_v, dim=1), s.bias), **parts)


use(
    "call-keywords",
    lambda: Fn(lambda s, x, *, y: s.a(x) + s.b(y), **two()),
    (B, 5),
    (B, 5),
    loss_fn=lambda m, x, y: rows(m(x=x, y=y)),
)
use("call-keyword-layers", lambda: Fn(lambda s, x: s.b(input=s.a(input=x)), **two()), (B, 5))
use(
    "call-dict",
    lambda: Fn(lambda s, d: {"out": s.a(d["x"])}, a=linear()),
    (B, 5),
    loss_fn=lambda m, x: rows(m({"x": x})["out"]),
)
use("call-dataclass", lambda: Fn(lambda s, x: Answer(s.a(x)), a=linear()), (B, 5), loss_fn=lambda m, x: rows(m(x).logits))
use(
    "call-two-outputs", lambda: Fn(lambda s, x: (s.a(x), s.b(x)), **two()), (B, 5), loss_fn=lambda m, x: sum(map(rows, m(x)))
)
use(
    "call-list",
    lambda: Fn(lambda s, xs: sum(s.a(x) for x in xs), a=linear()),
    (B, 5),
    (B, 5),
    loss_fn=lambda m, *xs: rows(m(list(xs))),
)
use(
    "call-optional",
    lambda: Fn(lambda s, x, mask=None: s.a(x) if mask is None else s.a(x) * mask, a=linear()),
    (B, 5),
    lambda: None,
)
use("call-python-number", lambda: Fn(lambda s, x, k: s.a(x) ** k, a=linear()), (B, 5), lambda: 2)
use("forward-hook", lambda: nn.Sequential(hooked(linear(5, 5)), linear()), (B, 5))
use("backward-hook", lambda: nn.Sequential(backward_hooked(linear(5, 5)), linear()), (B, 5))
use("data-parallel", lambda: nn.DataParallel(mlp()), (B, 5))
use("closure", closed_over, (B, 5), truth=closed_over_truth)
for backend in ("eager", "aot_eager"):
    compiled = lambda backend=backend: torch.compile(linear(5, 5), backend=backend)
    use(f"compiled-part-{backend}", lambda of=compiled: Fn(lambda s, x: s.b(s.a(x)), **two(a=of())), (B, 5))
use("compiled-in-place", lambda: (lambda m: compiled_in_place(m, m[0]))(mlp()), (B, 5), truth=mlp)
use(
    "compiled-activation",
    lambda: Fn(lambda s, x: s.b(torch.compile(lambda h: h.tanh() * 2, backend="aot_eager")(s.a(x))), **two()),
    (B, 5),
)
use("scripted-part", scripted_part, (B, 5), truth=lambda: nn.Sequential(linear(5, 5), linear()))
use("weight-norm-by-hook", lambda: torch.nn.utils.weight_norm(linear()), (B, 5), truth=normed_truth)
use("spectral-norm", lambda: parametrizations.spectral_norm(linear()), (B, 6, 5))
use(
    "spectral-norm-conv",
    lambda: nn.Sequential(parametrizations.spectral_norm(nn.Conv1d(2, 3, 3)), nn.ReLU(), nn.Conv1d(3, 2, 1)),
    (B, 2, 7),
)
use("pruned", pruned, (B, 5), truth=pruned_truth)
use("functional-call-inside", lambda: Fn(lambda s, x: torch.func.functional_call(s.l, {"weight": s.l.weight * s.g}, (x,)), l=linear(),
    g=(3, 1)), (B, 5))  # fmt: skip
use("vmap-inside", lambda: Fn(lambda s, x: torch.vmap(lambda w: x @ w, out_dims=1)(s.w), w=(2, 5, 3)), (B, 5))
use("rnn-by-hand", lambda: Fn(lambda s, x: unrolled(s, x), u=(3, 4), w=(4, 4), b=(4,)), (B, 5, 3))
use(
    "gru-zero-state",
    lambda: Fn(lambda s, x: s.r(x, x.new_zeros(1, len(x), 4))[0], r=nn.GRU(3, 4, batch_first=True)),
    (B, 5, 3),
)
use("padding-trimmed", lambda: Fn(lambda s, i, n: pooled(s, i, n), e=nn.Embedding(9, 4), l=nn.Linear(4, 3)), ids(9, B, 7),
    lambda: torch.tensor([4, 6, 2, 1]))  # fmt: skip
use(
    "padding-left-out",
    lambda: Fn(lambda s, x, n: placed(s, x, n), l=linear()),
    (B, 7, 5),
    lambda: torch.tensor([4, 6, 2, 1]),
)


def unrolled(s: Any, x: Tensor) -> Tensor:
    h = x.new_zeros(len(x), 4)
    for row in x.unbind(1):
        h = torch.tanh(row @ s.u + h @ s.w + s.b)
    return h


def pooled(s: Any, i: Tensor, n: Tensor) -> Tensor:
    """Cut to the longest sample, then averaged over each sample's own positions."""
    i = i[:, : int(n.max())]
    mask = (torch.arange(i.shape[1]) < n[:, None]).to(s.l.weight)
    return s.l((s.e(i) * mask[:, :, None]).sum(1) / n[:, None])


def placed(s: Any, x: Tensor, n: Tensor) -> Tensor:
    """The layer sees real positions alone, in one long row."""
    mask = torch.arange(x.shape[1]) < n[:, None]
    out = x.new_zeros(*x.shape[:2], 3)
    out[mask] = s.l(x[mask])
    return out


# --- tensors made in forward ---


def cached(s: Any, x: Tensor) -> Tensor:
    """Keys written into a longer cache, as in decoding."""
    k = x.new_zeros(len(x), 7, 4)
    k[:, : x.shape[1]] = s.k(x)
    return F.scaled_dot_product_attention(s.q(x), k, k)


def added_in_slices(s: Any, x: Tensor) -> Tensor:
    out = torch.zeros(len(x), x.shape[1], 3, dtype=x.dtype)
    for t in range(x.shape[1]):
        out[:, t] += s.l(x[:, t])
    return out


def modulated(s: Any, x: Tensor, z: Tensor) -> Tensor:
    """StyleGAN's convolution: a kernel for each sample, the batch held in groups."""
    w = s.w * s.style(z)[:, None, :, None]
    w = (w * torch.rsqrt(w.square().sum((2, 3), keepdim=True))).flatten(0, 1)
    return F.conv1d(x.reshape(1, -1, x.shape[-1]), w, groups=len(x)).view(len(x), 3, -1)


def mixed_kernels(s: Any, x: Tensor) -> Tensor:
    """Dynamic convolution: each sample mixes a few kernels."""
    w = torch.einsum("bk,koij->boij", s.gate(x.mean(2)).softmax(-1), s.w)
    return F.conv1d(x.reshape(1, -1, x.shape[-1]), w.flatten(0, 1), groups=len(x)).view(len(x), 3, -1)


def quantized(s: Any, x: Tensor) -> Tensor:
    z = s.l(x)
    q = s.codes[torch.cdist(z.flatten(0, 1), s.codes).argmin(-1)].view_as(z)
    return z + (q - z).detach() + (q - z.detach()).square()


def jagged(s: Any, x: Tensor, n: Tensor) -> Tensor:
    offsets = torch.cat([n.new_zeros(1), n.cumsum(0)])
    nested = torch.nested.nested_tensor_from_jagged(x[torch.arange(x.shape[1]) < n[:, None]], offsets)
    return s.l(nested).values()


def force(s: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(s.l(x).tanh().sum(), x, create_graph=True)[0]


LENGTHS = lambda: torch.tensor([4, 6, 2, 1])
use("made-cache", lambda: Fn(cached, q=linear(5, 4), k=linear(5, 4)), (B, 6, 5))
use("made-slices-added", lambda: Fn(added_in_slices, l=linear()), (B, 6, 5))
use("made-ones", lambda: Fn(lambda s, x: s.l(x) + s.l(x.new_ones(len(x), 5)), l=linear()), (B, 5))
use("made-scattered", lambda: Fn(lambda s, x, i: x.new_zeros(len(x), 4, 3).scatter_add(1, i[:, :, None].expand(-1, -1, 3), s.l(x)),
    l=linear()), (B, 6, 5), ids(4, B, 6))  # fmt: skip
use("made-padded-sequence", lambda: Fn(lambda s, x, n: pad_sequence([s.l(row[:k]) for row, k in zip(x, n.tolist(), strict=True)],
    batch_first=True), l=linear()), (B, 6, 5), LENGTHS)  # fmt: skip
use("made-kernels", lambda: Fn(modulated, w=(3, 2, 3), style=linear(4, 2)), (B, 2, 7), (B, 4))
use("made-kernels-mixed", lambda: Fn(mixed_kernels, w=(2, 3, 2, 3), gate=linear(2, 2)), (B, 2, 7))
use("made-codes", lambda: Fn(quantized, l=linear(), codes=(4, 3)), (B, 6, 5))
use("made-jagged", lambda: Fn(jagged, l=linear()), (B, 6, 5), LENGTHS,
    loss_fn=lambda m, x, n: torch.stack([part.square().sum() for part in m(x, n).split(n.tolist())]))  # fmt: skip
use("made-force", lambda: Fn(force, l=linear(5, 5)), (B, 5))

# --- checkpoints ---


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.LayerNorm(5))


for how in (True, False):
    name = "checkpoint-reentrant" if how else "checkpoint"
    use(name, lambda how=how: Fn(lambda s, x: s.b(checkpoint(s.c, s.a(x), use_reentrant=how)), **two(c=block())), (B, 6, 5))
    use(f"{name}-sequential", lambda how=how: Fn(lambda s, x: checkpoint_sequential(s.c, 2, s.a(x), use_reentrant=how), a=linear(5, 5),
        c=nn.Sequential(block(), block())), (B, 5))  # fmt: skip
use("checkpoint-of-a-function", lambda: Fn(lambda s, x: checkpoint(lambda h: (h @ s.w).tanh() * s.g, x, use_reentrant=False), w=(5, 3),
    g=(3,)), (B, 5))  # fmt: skip
use("checkpoint-in-a-checkpoint", lambda: Fn(lambda s, x: checkpoint(lambda h: checkpoint(s.b, h, use_reentrant=False).tanh(), s.a(x),
    use_reentrant=False), **two()), (B, 5))  # fmt: skip

# --- ops of one's own ---


class Reversal(torch.autograd.Function):
    """The identity, with its gradient negated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


class Times(torch.autograd.Function):
    """x·w of data and a parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)


class TimesForFunc(Times):
    """The same in the form that torch.func asks for."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)


@torch.library.custom_op("samplewise_benchmarks::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


@torch.library.custom_op("samplewise_benchmarks::product", mutates_args=())
def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


doubled.register_autograd(lambda ctx, g: 2 * g)
product.register_autograd(
    lambda ctx, g: (g @ ctx.saved_tensors[1].T, ctx.saved_tensors[0].T @ g),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
use("function-of-data", lambda: Fn(lambda s, x: s.b(Reversal.apply(s.a(x))), **two()), (B, 5))
use("function-of-a-parameter", lambda: Fn(lambda s, x: Times.apply(s.l(x), s.w), l=linear(), w=(3,)), (B, 5))
use("function-of-a-parameter-for-func", lambda: Fn(lambda s, x: TimesForFunc.apply(s.l(x), s.w), l=linear(), w=(3,)), (B, 5))
use("custom-op-of-data", lambda: Fn(lambda s, x: s.b(doubled(s.a(x))), **two()), (B, 5))
use("custom-op-of-a-parameter", lambda: Fn(lambda s, x: product(s.l(x), s.w), l=linear(), w=(3, 2)), (B, 5))

# --- batches of none and of one ---
EMPTY = {
    "linear": (linear, (0, 5)),
    "mlp-3d": (mlp, (0, 6, 5)),
    "conv": (lambda: nn.Conv2d(2, 3, 3), (0, 2, 5, 5)),
    "embedding": (lambda: nn.Embedding(7, 3), ids(7, 0, 5)),
    "norm": (lambda: nn.LayerNorm(5), (0, 6, 5)),
    "direct": (lambda: Fn(lambda s, x: x * s.w, w=(5,)), (0, 6, 5)),
}  # fmt: skip
for name, (make, shape) in EMPTY.items():
    use(f"empty-{name}", make, shape)
use("one-sample-encoder", lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True), (1, 5, 8))
use("one-sample-class-token", lambda: Fn(lambda s, x: torch.cat([s.w.expand(len(x), -1, -1), x], 1), w=(1, 1, 5)), (1, 6, 5))
use("one-sample-one-position", lambda: Seq(nn.GRU(3, 4, batch_first=True)), (1, 1, 3))

# --- samples that mix ---
MIXING: dict[str, tuple[Callable[[], nn.Module], tuple]] = {
    "batch-norm": (lambda: nn.Sequential(linear(), nn.BatchNorm1d(3)), (B, 5)),
    "batch-norm-2d": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU()), (B, 2, 5, 5)),
    "batch-norm-3d": (lambda: nn.Sequential(nn.Conv3d(2, 3, 2), nn.BatchNorm3d(3)), (B, 2, 3, 3, 3)),
    "batch-norm-no-affine": (lambda: nn.Sequential(linear(), nn.BatchNorm1d(3, affine=False), linear(3, 2)), (B, 5)),
    "batch-norm-no-statistics": (
        lambda: nn.Sequential(linear(), nn.BatchNorm1d(3, track_running_stats=False), linear(3, 2)).eval(), (B, 5),
    ),
    "centred": (lambda: Fn(lambda s, x: s.l(x - x.mean(0)), l=linear()), (B, 5)),
    "centred-inside": (lambda: Fn(lambda s, x: s.b((h := s.a(x)) - h.mean(0, keepdim=True)), **two()), (B, 5)),
    "scaled-by-the-largest": (lambda: Fn(lambda s, x: s.l(x / x.abs().max().item()), l=linear()), (B, 5)),
    "softmax-over-batch": (lambda: Fn(lambda s, x: s.l(x).softmax(0), l=linear()), (B, 5)),
    "attention-over-batch": (lambda: Fn(lambda s, x: (s.a(x) @ s.b(x).T).softmax(-1) @ x, **two()), (B, 5)),
    "attention-along-the-wrong-dimension": (lambda: Fn(lambda s, x: s.m(x, x, x)[0], m=nn.MultiheadAttention(4, 2)), (B, 6, 4)),
    "recurrence-along-the-wrong-dimension": (lambda: Fn(lambda s, x: s.r(x)[0], r=nn.LSTM(3, 4)), (B, 6, 3)),
    "spread-as-a-feature": (lambda: Fn(lambda s, x: s.l(torch.cat([x, x.std(0).mean().expand(len(x), 1)], 1)), l=linear(6)), (B, 5)),
    "neighbours": (lambda: Fn(lambda s, x: s.a(x) + s.b(x.roll(1, 0)), **two()), (B, 5)),
}  # fmt: skip
for name, (make, shape) in MIXING.items():
    use(f"mixing-{name}", make, shape, right="refusal")
for name, loss in {
    "contrastive": lambda z: F.cross_entropy(z @ z.T, torch.arange(len(z)), reduction="sum"),
    "variance": lambda z: z.var(0).sum(),
    "root-of-the-sum": lambda z: z.square().sum().sqrt(),
}.items():
    use(f"mixing-loss-{name}", mlp, (B, 5), loss_fn=lambda m, x, loss=loss: loss(m(x)), reduction="sum", right="refusal")

# --- what plain autograd refuses ---


def in_forward(change: Callable[[Any, Tensor, Tensor], Any], of: Callable[[Any, Tensor], Tensor]) -> Callable:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = of(s, x)
        with torch.no_grad():
            change(s, x, y)
        return y

    return forward


def second_backward(model: nn.Module, x: Tensor) -> Tensor:
    losses = rows(model(x))
    losses.sum().backward()
    return losses


NO: dict[str, tuple[Callable[[], nn.Module], tuple]] = {
    "input": (lambda: Fn(in_forward(lambda s, x, y: x.zero_(), lambda s, x: s.l(x)), l=linear()), (B, 5)),
    "input-of-conv": (lambda: Fn(in_forward(lambda s, x, y: x.mul_(2), lambda s, x: s.c(x)), c=nn.Conv1d(2, 3, 3)), (B, 2, 7)),
    "input-of-norm": (lambda: Fn(in_forward(lambda s, x, y: x.mul_(2), lambda s, x: s.n(x)), n=nn.LayerNorm(5)), (B, 6, 5)),
    "weight": (lambda: Fn(in_forward(lambda s, x, y: s.b.weight.mul_(2), lambda s, x: s.b(s.a(x))), **two()), (B, 5)),
    "result": (lambda: Fn(in_forward(lambda s, x, y: y.mul_(2), lambda s, x: s.l(x).exp()), l=linear()), (B, 5)),
}  # fmt: skip
for name, (make, shape) in NO.items():
    use(f"changed-{name}", make, shape, right="refusal")
use("second-backward-linear", linear, (B, 5), loss_fn=second_backward, right="refusal")
use("second-backward-conv", convnet, (B, 2, 8), loss_fn=second_backward, right="refusal")
