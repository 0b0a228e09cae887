"""The case table: small models, each with one batch, that exercise one op or pattern."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


def curved(out: Tensor) -> Tensor:
    """What a loss sums: curved, so that every sample's output gradient differs and depends on the forward values.

    Not of sums and squares alone, which are the same for whatever a last layer norm gives.
    """
    return out.abs().square() if out.is_complex() else out.sin() + 0.3 * out.square()


@dataclass
class Case:
    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple]
    loss_fn: Callable[..., Tensor] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    batch_dim: int = 0
    sums_to_grad: bool = True
    """False where plain training itself couples samples (scale_grad_by_freq counts over the batch)."""

    def build(self) -> tuple[nn.Module, tuple, Callable[..., Tensor]]:
        torch.manual_seed(0)
        model = self.make().double()
        batch = tuple(t.double() if isinstance(t, Tensor) and t.dtype == torch.float32 else t for t in self.batch())
        dim = self.batch_dim

        def loss_fn(model: nn.Module, *args: Any) -> Tensor:
            out = curved(model(*args))
            return out.movedim(dim, 0).flatten(1).sum(1) if out.ndim > 1 else out

        return model, batch, self.loss_fn or loss_fn


CASES: list[Case] = []


def case(name: str, make: Callable[[], nn.Module], *shapes: Any, **options: Any) -> None:
    """Adds a case; a shape stands for a random normal tensor, a callable for what it returns."""

    def batch() -> tuple:
        return tuple(s() if callable(s) else torch.randn(*s) for s in shapes)

    CASES.append(Case(name, make, batch, **options))


class Fn(nn.Module):
    """A model from parameters (or modules) by name and a forward function over them."""

    def __init__(self, forward: Callable, **parts: Any):
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            part = nn.Parameter(torch.randn(part)) if isinstance(part, tuple) else part
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self, *args, **kwargs)


def ids(high: int, *shape: int, dtype: torch.dtype = torch.long) -> Callable[[], Tensor]:
    return lambda: torch.randint(high, shape, dtype=dtype)


def frozen(module: nn.Module, *names: str) -> nn.Module:
    for name, p in module.named_parameters():
        if name in names:
            p.requires_grad_(False)
    return module


B = 4

# --- linear and products ---
for shape in [(B, 5), (B, 3, 5), (B, 2, 3, 5), (B, 2, 3, 2, 5)]:
    case(f"linear-{len(shape)}d", lambda: nn.Linear(5, 3), shape)
case("linear-no-bias", lambda: nn.Linear(5, 3, bias=False), (B, 5))
case("linear-frozen-weight", lambda: frozen(nn.Linear(5, 3), "weight"), (B, 2, 5))
case("linear-frozen-bias", lambda: frozen(nn.Linear(5, 3), "bias"), (B, 2, 5))
case("linear-one-sample", lambda: nn.Linear(5, 3), (1, 5))
case("linear-long", lambda: nn.Linear(2, 3), (B, 40, 2))
case("linear-short", lambda: nn.Linear(20, 30), (B, 2, 20))
case("linear-batch-second", lambda: nn.Linear(5, 3), (7, B, 5), batch_dim=1, options={"batch_dim": 1})
case("linear-batch-second-T-is-B", lambda: nn.Linear(5, 3), (B, B, 5), batch_dim=1, options={"batch_dim": 1})
case("linear-noncontiguous", lambda: Fn(lambda s, x: s.l(x.transpose(1, 2)), l=nn.Linear(5, 3)), (B, 5, 6))
case("linear-keyword", lambda: Fn(lambda s, x: F.linear(input=x, weight=s.w, bias=s.b), w=(3, 5), b=(3,)), (B, 5))
case("mlp", lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)), (B, 5))
case("folded-BT", lambda: Fn(lambda s, x: s.l(x.flatten(0, 1)).unflatten(0, x.shape[:2]), l=nn.Linear(5, 3)), (B, 6, 5))
case("folded-TB", lambda: Fn(lambda s, x: s.l(x.transpose(0, 1).reshape(-1, 5)).view(6, B, 3).transpose(0, 1)
     if x.shape[0] == B else s.l(x), l=nn.Linear(5, 3)), (B, 6, 5))  # fmt: skip
case("matmul", lambda: Fn(lambda s, x: x @ s.w, w=(5, 3)), (B, 5))
case("matmul-3d", lambda: Fn(lambda s, x: torch.matmul(x, s.w), w=(5, 3)), (B, 6, 5))
case("matmul-left", lambda: Fn(lambda s, x: s.w @ x, w=(3, 5)), (B, 5, 6))
case("matmul-transposed", lambda: Fn(lambda s, x: x @ s.w.T, w=(3, 5)), (B, 5))
case("matmul-t", lambda: Fn(lambda s, x: x.matmul(s.w.t()), w=(3, 5)), (B, 6, 5))
case("matmul-vector", lambda: Fn(lambda s, x: x @ s.w, w=(5,)), (B, 5))
case("matmul-heads", lambda: Fn(lambda s, x: x @ s.w, w=(2, 5, 3)), (B, 2, 6, 5))
case("matmul-broadcast-heads", lambda: Fn(lambda s, x: x @ s.w, w=(2, 5, 3)), (B, 1, 6, 5))
case("matmul-broadcast-weight", lambda: Fn(lambda s, x: x @ s.w, w=(1, 5, 3)), (B, 6, 5))
case("mm", lambda: Fn(lambda s, x: torch.mm(x, s.w), w=(5, 3)), (B, 5))
case("mm-method-left", lambda: Fn(lambda s, x: s.w.mm(x.t()).t(), w=(3, 5)), (B, 5))
case("mv", lambda: Fn(lambda s, x: torch.mv(x, s.w), w=(5,)), (B, 5))
case("addmm", lambda: Fn(lambda s, x: torch.addmm(s.b, x, s.w), w=(5, 3), b=(3,)), (B, 5))
case("addmm-scaled", lambda: Fn(lambda s, x: torch.addmm(s.b, x, s.w, beta=0.5, alpha=2), w=(5, 3), b=(3,)), (B, 5))
case("addmm-folded", lambda: Fn(lambda s, x: torch.addmm(s.b, x.view(-1, 5), s.w).view(x.shape[0], -1, 3),
     w=(5, 3), b=(3,)), (B, 6, 5))  # fmt: skip
case("addmm-data-input", lambda: Fn(lambda s, x: torch.addmm(x[:, :3], x, s.w), w=(5, 3)), (B, 5))
case("bmm-shared", lambda: Fn(lambda s, x: torch.bmm(x.transpose(0, 1), s.w).transpose(0, 1), w=(2, 5, 3)), (B, 2, 5))
case("bmm-expanded", lambda: Fn(lambda s, x: torch.bmm(x, s.w.expand(x.shape[0], -1, -1)), w=(5, 3)), (B, 6, 5))
case("baddbmm", lambda: Fn(lambda s, x: torch.baddbmm(s.b, x.transpose(0, 1), s.w).transpose(0, 1),
     w=(2, 5, 3), b=(2, 1, 3)), (B, 2, 5))  # fmt: skip
case("einsum", lambda: Fn(lambda s, x: torch.einsum("bti,oi->bto", x, s.w), w=(3, 5)), (B, 6, 5))
case("einsum-ellipsis", lambda: Fn(lambda s, x: torch.einsum("...i,oi->...o", x, s.w), w=(3, 5)), (B, 6, 5))
case("einsum-implicit", lambda: Fn(lambda s, x: torch.einsum("bi,io", x, s.w), w=(5, 3)), (B, 5))
case("einsum-heads", lambda: Fn(lambda s, x: torch.einsum("btd,dhe->bhte", x, s.w), w=(5, 2, 3)), (B, 6, 5))
case("einsum-grouped", lambda: Fn(lambda s, x: torch.einsum("bhtd,hde->bthe", x, s.w), w=(2, 5, 3)), (B, 2, 6, 5))
case("einsum-weight-first", lambda: Fn(lambda s, x: torch.einsum("oi,bi->bo", s.w, x), w=(3, 5)), (B, 5))
case("einsum-summed-letter", lambda: Fn(lambda s, x: torch.einsum("bti,oi->bo", x, s.w), w=(3, 5)), (B, 6, 5))
case("einsum-elementwise", lambda: Fn(lambda s, x: torch.einsum("bti,i->bti", x, s.w), w=(5,)), (B, 6, 5))
case("einsum-three", lambda: Fn(lambda s, x: torch.einsum("bi,ij,jo->bo", x, s.u, s.v), u=(5, 2), v=(2, 3)), (B, 5))
case("linear-sliced", lambda: Fn(lambda s, x: F.linear(x, s.w[:2]), w=(3, 5)), (B, 5))
case("linear-cast", lambda: Fn(lambda s, x: F.linear(x, s.w.to(x.dtype)), w=(3, 5)), (B, 5))
case("linear-viewed", lambda: Fn(lambda s, x: F.linear(x, s.w.view(3, -1)), w=(3, 5, 1, 1)), (B, 5))
case("linear-normed", lambda: Fn(lambda s, x: F.linear(x, s.g * s.v / s.v.norm(dim=1, keepdim=True)), g=(3, 1), v=(3, 5)),
     (B, 6, 5))  # fmt: skip
case("lora-merged", lambda: Fn(lambda s, x: F.linear(x, s.b @ s.a), b=(3, 2), a=(2, 5)), (B, 5))

# --- convolutions ---
case("conv1d", lambda: nn.Conv1d(3, 4, 3), (B, 3, 9))
case("conv2d", lambda: nn.Conv2d(3, 4, 3), (B, 3, 7, 6))
case("conv3d", lambda: nn.Conv3d(2, 3, 2), (B, 2, 4, 5, 3))
case("conv1d-stride", lambda: nn.Conv1d(3, 4, 3, stride=2, padding=1, dilation=2), (B, 3, 12))
case("conv2d-stride-margin", lambda: nn.Conv2d(2, 4, 2, stride=3), (B, 2, 9, 10))
case("conv2d-dilation", lambda: nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(2, 1), dilation=(1, 2)), (B, 2, 8, 7))
case("conv2d-groups", lambda: nn.Conv2d(4, 6, 3, groups=2), (B, 4, 6, 6))
case("conv2d-depthwise", lambda: nn.Conv2d(4, 4, 3, groups=4, padding=1), (B, 4, 6, 6))
case("conv2d-depthwise-multiplier", lambda: nn.Conv2d(3, 6, 3, groups=3), (B, 3, 6, 6))
case("conv3d-groups", lambda: nn.Conv3d(2, 4, 2, groups=2, stride=2, padding=1), (B, 2, 4, 5, 3))
for padding in ["same", "valid"]:
    case(
        f"conv2d-{padding}", lambda padding=padding: nn.Conv2d(2, 3, (4, 3), padding=padding, dilation=(1, 2)), (B, 2, 8, 7)
    )
    case(f"conv1d-{padding}", lambda padding=padding: nn.Conv1d(2, 3, 4, padding=padding), (B, 2, 9))
for mode in ["circular", "reflect", "replicate"]:
    case(f"conv2d-{mode}", lambda mode=mode: nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode), (B, 2, 5, 6))
    case(f"conv2d-same-{mode}", lambda mode=mode: nn.Conv2d(2, 3, (4, 3), padding="same", padding_mode=mode), (B, 2, 7, 6))
    case(f"conv1d-{mode}", lambda mode=mode: nn.Conv1d(2, 3, 3, padding=2, padding_mode=mode), (B, 2, 7))
case("conv2d-no-bias", lambda: nn.Conv2d(3, 4, 3, bias=False), (B, 3, 6, 6))
case("conv2d-frozen-weight", lambda: frozen(nn.Conv2d(3, 4, 3), "weight"), (B, 3, 6, 6))
case(
    "conv2d-channels-last", lambda: nn.Conv2d(3, 4, 3), lambda: torch.randn(B, 3, 6, 6).to(memory_format=torch.channels_last)
)
case("conv2d-permuted", lambda: Fn(lambda s, x: s.c(x.permute(0, 3, 1, 2)), c=nn.Conv2d(3, 4, 3)), (B, 6, 5, 3))
case("conv2d-then-permute", lambda: Fn(lambda s, x: s.l(s.c(x).permute(0, 2, 3, 1)), c=nn.Conv2d(3, 4, 3), l=nn.Linear(4, 2)),
     (B, 3, 6, 5))  # fmt: skip
for size in [1, 31, 32, 33]:
    case(f"conv2d-batch-{size}", lambda: nn.Conv2d(2, 3, 3), (size, 2, 5, 5))
case("conv2d-twice", lambda: Fn(lambda s, x: s.c(s.c(x)), c=nn.Conv2d(2, 2, 3, padding=1)), (B, 2, 5, 5))
case("conv2d-twice-other-size", lambda: Fn(lambda s, x: s.c(F.avg_pool2d(s.c(x), 2)), c=nn.Conv2d(2, 2, 3)), (B, 2, 8, 8))
case(
    "conv2d-inplace-relu", lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(inplace=True), nn.Conv2d(3, 2, 3)), (B, 2, 7, 7)
)
case("conv2d-frames", lambda: Fn(lambda s, x: s.c(x.flatten(0, 1)).unflatten(0, x.shape[:2]), c=nn.Conv2d(2, 3, 3)),
     (B, 3, 2, 5, 5))  # fmt: skip
case(
    "conv2d-weight-derived",
    lambda: Fn(lambda s, x: F.conv2d(x, s.v / s.v.norm(), s.b), v=(3, 2, 3, 3), b=(3,)),
    (B, 2, 5, 5),
)
case("conv1d-keyword", lambda: Fn(lambda s, x: F.conv1d(x, weight=s.w, padding=1, groups=2), w=(4, 1, 3)), (B, 2, 6))

case("conv-transpose1d", lambda: nn.ConvTranspose1d(3, 4, 3, stride=2, padding=1, output_padding=1), (B, 3, 6))
case("conv-transpose2d", lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, dilation=2), (B, 4, 4, 5))
case("conv-transpose2d-output-padding", lambda: nn.ConvTranspose2d(2, 3, 3, dilation=3, output_padding=2), (B, 2, 4, 5))
case("conv-transpose3d", lambda: nn.ConvTranspose3d(2, 3, 2, stride=(1, 2, 1), bias=False), (B, 2, 3, 2, 3))
case("conv-transpose-depthwise", lambda: nn.ConvTranspose2d(3, 3, 3, groups=3), (B, 3, 4, 5))

# --- embeddings ---
case("embedding", lambda: nn.Embedding(7, 3), ids(7, B, 5))
case("embedding-repeated", lambda: nn.Embedding(7, 3), ids(2, B, 6))
case("embedding-padding", lambda: nn.Embedding(4, 3, padding_idx=1), ids(4, B, 8))
case("embedding-padding-negative", lambda: nn.Embedding(4, 3, padding_idx=-1), ids(4, B, 8))
case("embedding-max-norm", lambda: nn.Embedding(7, 3, max_norm=0.5), ids(7, B, 5))
case("embedding-by-freq", lambda: nn.Embedding(4, 3, scale_grad_by_freq=True), ids(4, B, 8), sums_to_grad=False)
case("embedding-sparse", lambda: nn.Embedding(7, 3, sparse=True), ids(7, B, 5))
case("embedding-int32", lambda: nn.Embedding(7, 3), ids(7, B, 5, dtype=torch.int32))
case("embedding-1d", lambda: nn.Embedding(7, 3), ids(7, B))
case("embedding-3d", lambda: nn.Embedding(7, 3), ids(7, B, 2, 3))
case("embedding-batch-second", lambda: nn.Embedding(7, 3), ids(7, B, B), batch_dim=1, options={"batch_dim": 1})
POSITIONS = {
    "1d": lambda s, x: s.e(x) + s.p(torch.arange(x.shape[1])),
    "shared": lambda s, x: s.e(x) + s.p(torch.arange(x.shape[1]).unsqueeze(0)),
    "expanded": lambda s, x: s.e(x) + s.p(torch.arange(x.shape[1]).expand(x.shape)),
    "sliced": lambda s, x: s.e(x) + s.p.weight[: x.shape[1]],
    "token-types": lambda s, x: s.e(x) + s.p(torch.zeros_like(x)),
}
for name, forward in POSITIONS.items():
    for T in [5, B]:
        case(
            f"positions-{name}-T{T}",
            lambda forward=forward: Fn(forward, e=nn.Embedding(7, 3), p=nn.Embedding(6, 3)),
            ids(7, B, T),
        )
case("relative-positions", lambda: Fn(lambda s, x: x + s.p(torch.arange(B).view(-1, 1) - torch.arange(B) + B).permute(2, 0, 1),
     p=nn.Embedding(2 * B, 2)), (B, 2, B, B))  # fmt: skip
case(
    "class-embeddings", lambda: Fn(lambda s, x: s.l(x) @ s.l(s.e.weight).T, l=nn.Linear(5, 3), e=nn.Embedding(B, 5)), (B, 5)
)
case(
    "shared-buffer", lambda: Fn(lambda s, x: s.l(x) + s.l(torch.ones(B, 5, dtype=x.dtype)).sum(0), l=nn.Linear(5, 3)), (B, 5)
)
case(
    "embedding-frozen-then-linear",
    lambda: nn.Sequential(frozen(nn.Embedding(7, 5), "weight"), nn.Linear(5, 3)),
    ids(7, B, 4),
)

for mode in ["sum", "mean", "max"]:
    case(f"embedding-bag-{mode}", lambda mode=mode: nn.EmbeddingBag(5, 3, mode=mode), ids(5, B, 6))
    case(f"embedding-bag-{mode}-padding", lambda mode=mode: nn.EmbeddingBag(4, 3, mode=mode, padding_idx=1), ids(4, B, 6))
    if mode != "max" and torch.__version__ >= "2.15":  # 2.11's own backward on the CPU divides by the counts of other ids
        by_freq = {"mode": mode, "scale_grad_by_freq": True}
        case(f"embedding-bag-{mode}-by-freq", lambda k=by_freq: nn.EmbeddingBag(5, 3, **k), ids(5, B, 6), sums_to_grad=False)
case("embedding-bag-weights", lambda: nn.EmbeddingBag(5, 3, mode="sum"), ids(5, B, 6), lambda: None,
     lambda: torch.randn(B, 6))  # fmt: skip
case("picked-rows", lambda: Fn(lambda s, i: s.w[i], w=(5, 2, 3)), ids(5, B, 6))
case("picked-rows-select", lambda: Fn(lambda s, i: s.w.index_select(0, i), w=(5, 2)), ids(5, B))
case("picked-and-dense", lambda: Fn(lambda s, i: F.linear(s.w[i], s.w), w=(5, 2)), ids(5, B, 6))
case(
    "experts-by-row",
    lambda: Fn(lambda s, x, i: torch.bmm(x.unsqueeze(1), s.w[i]).squeeze(1), w=(4, 5, 3)),
    (B, 5),
    ids(4, B),
)

# --- norms ---
case("rms-norm", lambda: nn.RMSNorm(5), (B, 6, 5))
case("rms-norm-inside", lambda: nn.Sequential(nn.Linear(4, 5), nn.RMSNorm(5, eps=1e-6), nn.Linear(5, 2)), (B, 6, 4))
case("layer-norm", lambda: nn.LayerNorm(5), (B, 5))
case("layer-norm-3d", lambda: nn.LayerNorm(5), (B, 6, 5))
case("layer-norm-several", lambda: nn.LayerNorm([6, 5]), (B, 3, 6, 5))
case("layer-norm-no-bias", lambda: nn.LayerNorm(5, bias=False), (B, 6, 5))
case("layer-norm-no-affine", lambda: nn.Sequential(nn.LayerNorm(5, elementwise_affine=False), nn.Linear(5, 2)), (B, 6, 5))
case("layer-norm-frozen-weight", lambda: frozen(nn.LayerNorm(5), "weight"), (B, 6, 5))
case("layer-norm-frozen-bias", lambda: frozen(nn.LayerNorm(5), "bias"), (B, 6, 5))
case("layer-norm-inside", lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 2)), (B, 6, 4))
case("layer-norm-batch-second", lambda: nn.LayerNorm(5), (B, B, 5), batch_dim=1, options={"batch_dim": 1})
case("group-norm", lambda: nn.GroupNorm(2, 4), (B, 4, 5, 5))
case("group-norm-2d", lambda: nn.GroupNorm(2, 4), (B, 4))
case("group-norm-one-group", lambda: nn.GroupNorm(1, 4), (B, 4, 6))
case("group-norm-no-affine", lambda: nn.Sequential(nn.GroupNorm(2, 4, affine=False), nn.Conv1d(4, 2, 1)), (B, 4, 6))
case("group-norm-frozen-weight", lambda: frozen(nn.GroupNorm(2, 4), "weight"), (B, 4, 5, 5))
case("group-norm-frozen-bias", lambda: frozen(nn.GroupNorm(2, 4), "bias"), (B, 4, 5, 5))
case("group-norm-weight-alone", lambda: Fn(lambda s, x: F.group_norm(x, 2, s.w), w=(4,)), (B, 4, 5))
if torch.__version__ >= "2.12":  # before, torch's own backward fails ("tensor does not have a device") or ends the process
    case("group-norm-bias-alone", lambda: Fn(lambda s, x: F.group_norm(x, 2, bias=s.b), b=(4,)), (B, 4, 5))
    case(
        "group-norm-channels-last",
        lambda: nn.GroupNorm(2, 4),
        lambda: torch.randn(B, 4, 5, 5).to(memory_format=torch.channels_last),
    )
case("group-norm-inside", lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(True), nn.Conv2d(4, 2, 3)),
     (B, 2, 7, 7))  # fmt: skip
case("instance-norm-1d", lambda: nn.InstanceNorm1d(3, affine=True), (B, 3, 6))
case("instance-norm-2d", lambda: nn.InstanceNorm2d(3, affine=True), (B, 3, 5, 5))
case("instance-norm-3d", lambda: nn.InstanceNorm3d(3, affine=True), (B, 3, 3, 4, 2))
case("instance-norm-frozen-weight", lambda: frozen(nn.InstanceNorm2d(3, affine=True), "weight"), (B, 3, 5, 5))
case("instance-norm-frozen-bias", lambda: frozen(nn.InstanceNorm2d(3, affine=True), "bias"), (B, 3, 5, 5))
case("instance-norm-no-affine", lambda: nn.Sequential(nn.InstanceNorm2d(3), nn.Conv2d(3, 2, 1)), (B, 3, 5, 5))
case("instance-norm-eval", lambda: nn.InstanceNorm2d(3, affine=True).eval(), (B, 3, 5, 5))
case("instance-norm-running-train", lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), (B, 3, 5, 5))


def _running_eval() -> nn.Module:
    norm = nn.InstanceNorm2d(3, affine=True, track_running_stats=True).eval()
    norm.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]
    norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    return norm


case("instance-norm-running-eval", _running_eval, (B, 3, 5, 5))
case("instance-norm-running-eval-inside", lambda: nn.Sequential(nn.Conv2d(2, 3, 1), _running_eval(), nn.Conv2d(3, 2, 1)),
     (B, 2, 5, 5))  # fmt: skip


def _batch_norm_eval() -> nn.Module:
    norm = nn.BatchNorm2d(3).eval()
    norm.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]
    norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    return norm


case("batch-norm-eval", _batch_norm_eval, (B, 3, 5, 5))
case(
    "batch-norm-eval-inside", lambda: nn.Sequential(nn.Conv2d(2, 3, 1), _batch_norm_eval(), nn.Conv2d(3, 2, 1)), (B, 2, 5, 5)
)
case("prelu", lambda: nn.PReLU(), (B, 6, 5))
case("prelu-channels", lambda: nn.PReLU(6), (B, 6, 5))
case("bilinear", lambda: nn.Bilinear(5, 3, 4), (B, 5), (B, 3))
case("bilinear-3d", lambda: nn.Bilinear(5, 3, 4), (B, 6, 5), (B, 6, 3))
case("bilinear-frozen", lambda: frozen(nn.Bilinear(5, 3, 4), "weight"), (B, 5), (B, 3))

# --- parameters used directly ---


def _write(x: Tensor, w: Tensor) -> Tensor:
    x = x * 2
    x[:, 1:3] = w
    return x


DIRECT: dict[str, tuple[Callable, dict[str, tuple]]] = {
    "add": (lambda s, x: x + s.w, {"w": (6, 5)}),
    "add-vector": (lambda s, x: x + s.w, {"w": (5,)}),
    "add-one": (lambda s, x: x + s.w, {"w": (1, 1, 5)}),
    "add-column": (lambda s, x: x + s.w, {"w": (6, 1)}),
    "add-scalar": (lambda s, x: x + s.w, {"w": ()}),
    "add-left": (lambda s, x: s.w + x, {"w": (5,)}),
    "add-in-place": (lambda s, x: (x * 1).add_(s.w), {"w": (5,)}),
    "add-alpha": (lambda s, x: torch.add(x, s.w, alpha=3), {"w": (5,)}),
    "sub": (lambda s, x: x - s.w, {"w": (5,)}),
    "rsub": (lambda s, x: s.w - x, {"w": (5,)}),
    "mul": (lambda s, x: x * s.w, {"w": (5,)}),
    "mul-in-place": (lambda s, x: (x * 1).mul_(s.w), {"w": (6, 1)}),
    "mul-scalar": (lambda s, x: x * s.w.exp(), {"w": ()}),
    "div": (lambda s, x: x / s.w, {"w": (5,)}),
    "rdiv": (lambda s, x: s.w / (2 + x.square()), {"w": (5,)}),
    "pow": (lambda s, x: x.abs().add(1).pow(s.w), {"w": (5,)}),
    "where": (lambda s, x: torch.where(x > 0, x, s.w), {"w": (5,)}),
    "where-left": (lambda s, x: torch.where(x > 0, s.w, x), {"w": (6, 5)}),
    "maximum": (lambda s, x: torch.maximum(x, s.w), {"w": (5,)}),
    "lerp": (lambda s, x: torch.lerp(x, s.w, 0.3), {"w": (5,)}),
    "addcmul": (lambda s, x: torch.addcmul(x, s.w, s.v, value=0.5), {"w": (5,), "v": (6, 5)}),
    "two-weights": (lambda s, x: torch.addcmul(s.v, x, s.w), {"w": (5,), "v": (5,)}),
    "masked-fill": (lambda s, x: x.masked_fill(x > 0, s.w), {"w": ()}),
    "cls-expand-cat": (lambda s, x: torch.cat([s.w.expand(x.shape[0], -1, -1), x], 1), {"w": (1, 1, 5)}),
    "cls-repeat-cat": (lambda s, x: torch.cat([s.w.repeat(x.shape[0], 1, 1), x], 1), {"w": (1, 1, 5)}),
    "cls-expand-as": (lambda s, x: torch.cat([s.w.expand_as(x), x], 2), {"w": (6, 5)}),
    "stack": (lambda s, x: torch.stack([x, s.w.expand_as(x)], 1), {"w": (5,)}),
    "written": (lambda s, x: _write(x, s.w), {"w": (5,)}),
    "written-slice": (lambda s, x: _write(x, s.w[:, :1]), {"w": (2, 5)}),
    "pos-slice": (lambda s, x: x + s.w[:, :6], {"w": (1, 9, 5)}),
    "pos-transposed": (lambda s, x: x + s.w.T, {"w": (5, 6)}),
    "weight-meets-self": (lambda s, x: x * s.w + x.square() * s.w + s.w, {"w": (5,)}),
    "temperature": (lambda s, x: F.softmax(x / s.w.exp(), -1), {"w": (1,)}),
    "metadata": (lambda s, x: x.view(-1, *s.w.shape) + s.w.to(x.dtype) * s.w.ndim / s.w.size(0), {"w": (6, 5)}),
}  # fmt: skip
for name, (forward, shapes) in DIRECT.items():
    case(f"direct-{name}", lambda forward=forward, shapes=shapes: Fn(forward, **shapes), (B, 6, 5))
case("direct-T-is-B", lambda: Fn(lambda s, x: x + s.w, w=(B, 5)), (B, B, 5))
case("direct-batch-second", lambda: Fn(lambda s, x: x * s.w, w=(B, 1, 5)), (B, B, 5), batch_dim=1, options={"batch_dim": 1})


# --- recurrent ---
class Seq(nn.Module):
    """A recurrent module's outputs beside its last states, so that both carry gradient."""

    def __init__(self, rnn: nn.Module, **given: Any):
        super().__init__()
        self.rnn = rnn
        for name, shape in given.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor) -> Tensor:
        batch_first = self.rnn.batch_first
        size = x.shape[0] if batch_first else x.shape[1]
        names = [n for n in ("h", "c") if hasattr(self, n)]
        states = [getattr(self, n).expand(-1, size, -1).contiguous() for n in names]
        y, ends = self.rnn(x, *([] if not states else [states[0] if len(states) == 1 else tuple(states)]))
        ends = ends if isinstance(ends, tuple) else (ends,)
        both = [y if batch_first else y.transpose(0, 1)] + [e.transpose(0, 1) for e in ends]
        out = torch.cat([t.flatten(1) for t in both], 1)
        return out if batch_first else out.transpose(0, 1)


for kind in [nn.RNN, nn.LSTM, nn.GRU]:
    name = kind.__name__.lower()
    case(name, lambda kind=kind: Seq(kind(3, 4, batch_first=True)), (B, 6, 3))
    case(f"{name}-batch-second", lambda kind=kind: Seq(kind(3, 4)), (6, B, 3), batch_dim=1, options={"batch_dim": 1})
    case(f"{name}-T-is-B", lambda kind=kind: Seq(kind(3, 4)), (B, B, 3), batch_dim=1, options={"batch_dim": 1})
    case(f"{name}-deep", lambda kind=kind: Seq(kind(3, 4, num_layers=2, bidirectional=True, batch_first=True)), (B, 5, 3))
    case(f"{name}-no-bias", lambda kind=kind: Seq(kind(3, 4, bias=False, batch_first=True)), (B, 5, 3))
    case(f"{name}-learned-state", lambda kind=kind: Seq(kind(3, 4, num_layers=2, batch_first=True), h=(2, 1, 4),
         **({"c": (2, 1, 4)} if kind is nn.LSTM else {})), (B, 5, 3))  # fmt: skip
    case(f"{name}-long", lambda kind=kind: Seq(kind(2, 2, batch_first=True)), (B, 30, 2))
    case(f"{name}-inside", lambda kind=kind: nn.Sequential(nn.Linear(2, 3), Seq(kind(3, 4, batch_first=True))), (B, 5, 2))
    case(
        f"{name}-frozen",
        lambda kind=kind: Seq(frozen(kind(3, 4, batch_first=True), "weight_hh_l0", "bias_ih_l0")),
        (B, 5, 3),
    )
    case(
        f"{name}-frozen-recurrence",
        lambda kind=kind: Seq(frozen(kind(3, 4, batch_first=True), "weight_hh_l0", "bias_hh_l0")),
        (B, 5, 3),
    )
    case(
        f"{name}-given-state",
        lambda kind=kind: Fn(
            lambda s, x: s.r(x, (s.h(x[:, 0])[None], s.c(x[:, 1])[None]) if isinstance(s.r, nn.LSTM) else s.h(x[:, 0])[None])[0],
            r=kind(3, 4, batch_first=True), h=nn.Linear(3, 4), **({"c": nn.Linear(3, 4)} if kind is nn.LSTM else {}),
        ),
        (B, 5, 3),
    )  # fmt: skip
case("rnn-relu", lambda: Seq(nn.RNN(3, 4, nonlinearity="relu", batch_first=True)), (B, 6, 3))
case("lstm-proj", lambda: Seq(nn.LSTM(3, 4, proj_size=2, batch_first=True)), (B, 6, 3))
case("lstm-cell", lambda: Fn(lambda s, x: s.c(x, (x[:, :4], x[:, 1:5]))[0], c=nn.LSTMCell(5, 4)), (B, 5))
case("lstm-cell-twice", lambda: Fn(lambda s, x: sum(s.c(x, s.c(x))), c=nn.LSTMCell(5, 4)), (B, 5))
case("gru-cell", lambda: Fn(lambda s, x: s.c(x, x[:, :4]), c=nn.GRUCell(5, 4)), (B, 5))
case(
    "rnn-cell", lambda: Fn(lambda s, x: s.c(x, s.d(x)), c=nn.RNNCell(5, 4), d=nn.RNNCell(5, 4, nonlinearity="relu")), (B, 5)
)

# --- several uses of one parameter ---
case("same-module-twice", lambda: Fn(lambda s, x: s.l(s.l(x).relu()), l=nn.Linear(5, 5)), (B, 5))
case("same-module-twice-3d", lambda: Fn(lambda s, x: s.l(s.l(x).relu()), l=nn.Linear(5, 5)), (B, 6, 5))
case("linear-on-2d-and-3d", lambda: Fn(lambda s, x: s.l(x) + s.l(x.mean(1)).unsqueeze(1), l=nn.Linear(5, 3)), (B, 6, 5))
case("tied-transposed", lambda: Fn(lambda s, x: F.linear(F.linear(x, s.w).tanh(), s.w.t()), w=(3, 5)), (B, 6, 5))


def _tied_modules() -> nn.Module:
    model = Fn(lambda s, x: s.b(s.a(x).tanh()), a=nn.Linear(5, 5), b=nn.Linear(5, 5))
    model.b.weight = model.a.weight
    return model


case("tied-modules", _tied_modules, (B, 6, 5))
case("tied-embedding-head", lambda: Fn(lambda s, x: F.linear(s.l(s.e(x)).tanh(), s.e.weight), e=nn.Embedding(7, 3), l=nn.Linear(3, 3)),
     ids(7, B, 5))  # fmt: skip
case("tied-embedding-long", lambda: Fn(lambda s, x: F.linear(s.l(s.e(x)).tanh(), s.e.weight), e=nn.Embedding(3, 2), l=nn.Linear(2, 2)),
     ids(3, B, 20))  # fmt: skip
case("weight-and-arithmetic", lambda: Fn(lambda s, x: F.linear(x, s.w) * s.w.sum(1) + s.w.mean(), w=(3, 5)), (B, 6, 5))

# --- complex numbers ---
COMPLEX = torch.complex128


def _complex(module: nn.Module) -> nn.Module:
    for p in module.parameters():
        p.data = torch.randn(p.shape, dtype=COMPLEX)
    module.double = lambda: module  # type: ignore[method-assign]  (the table's cast would drop the imaginary parts)
    return module


def _z(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape, dtype=COMPLEX)


case("complex-linear", lambda: _complex(nn.Linear(5, 3)), _z(B, 5))
case("complex-linear-3d", lambda: _complex(nn.Linear(2, 3)), _z(B, 9, 2))
case("complex-linear-short", lambda: _complex(nn.Linear(9, 8)), _z(B, 2, 9))
case("complex-conv2d", lambda: _complex(nn.Conv2d(2, 3, 3)), _z(B, 2, 5, 5))
case("complex-mul", lambda: _complex(Fn(lambda s, x: x * s.w + s.b, w=(5,), b=(5,))), _z(B, 6, 5))
case("complex-einsum", lambda: _complex(Fn(lambda s, x: torch.einsum("bti,io->bto", x, s.w), w=(5, 3))), _z(B, 6, 5))
case("complex-twice", lambda: _complex(Fn(lambda s, x: s.l(s.l(x)), l=nn.Linear(4, 4))), _z(B, 3, 4))

# --- weights computed from parameters ---
MASK = torch.tensor([[1.0, 1, 0, 0, 1], [0, 1, 1, 1, 0], [1, 0, 1, 0, 1]])


def _mask(x: Tensor) -> Tensor:
    return MASK.to(x)


DERIVED: dict[str, tuple[Callable, dict[str, tuple]]] = {
    "masked": (lambda s, x: F.linear(x, s.w * _mask(x)), {"w": (3, 5)}),
    "straight-through": (lambda s, x: F.linear(x, s.w + (s.w.sign() - s.w).detach()), {"w": (3, 5)}),
    "fake-quantized": (lambda s, x: F.linear(x, torch.fake_quantize_per_tensor_affine(s.w, 0.1, 0, -9, 9)), {"w": (3, 5)}),
    "generated": (lambda s, x: F.linear(x, (s.g @ s.z).view(3, 5)), {"g": (15, 2), "z": (2,)}),
    "standardized": (lambda s, x: F.linear(x, (s.w - s.w.mean(1, True)) / s.w.std(1, keepdim=True)), {"w": (3, 5)}),
    "lora-added": (lambda s, x: F.linear(x, s.w + s.b @ s.a, s.c), {"w": (3, 5), "b": (3, 2), "a": (2, 5), "c": (3,)}),
    "dora": (lambda s, x: F.linear(x, s.m * F.normalize(s.w + s.b @ s.a, dim=1)),
             {"m": (3, 1), "w": (3, 5), "b": (3, 2), "a": (2, 5)}),
    "cosine-classes": (lambda s, x: F.normalize(x, dim=-1) @ F.normalize(s.w, dim=-1).T, {"w": (3, 5)}),
    "triangular": (lambda s, x: x @ s.w.tril(), {"w": (5, 5)}),
    "diagonal": (lambda s, x: x @ torch.diag(s.w), {"w": (5,)}),
    "block-diagonal": (lambda s, x: x @ torch.block_diag(s.u, s.v), {"u": (2, 3), "v": (3, 1)}),
    "orthogonal-exp": (lambda s, x: x @ torch.matrix_exp(s.w - s.w.T), {"w": (5, 5)}),
    "cayley": (lambda s, x: x @ torch.linalg.solve(torch.eye(5).to(s.w) + s.w - s.w.T, torch.eye(5).to(s.w) - s.w + s.w.T),
               {"w": (5, 5)}),
    "positive": (lambda s, x: F.linear(x, F.softplus(s.w)), {"w": (3, 5)}),
    "mixture-of-bases": (lambda s, x: F.linear(x, torch.einsum("k,koi->oi", s.a.softmax(0), s.w)), {"a": (2,), "w": (2, 3, 5)}),
    "concatenated": (lambda s, x: F.linear(x, torch.cat([s.u, s.v])), {"u": (2, 5), "v": (1, 5)}),
    "stacked": (lambda s, x: F.linear(x, torch.stack([s.u, s.v])), {"u": (5,), "v": (5,)}),
    "split": (lambda s, x: sum(F.linear(x, w) for w in s.w.chunk(2)), {"w": (6, 5)}),
    "unbound": (lambda s, x: F.linear(F.linear(x, s.w.unbind()[0]), s.w.unbind()[1]), {"w": (2, 5, 5)}),
    "flipped": (lambda s, x: F.linear(x, s.w.flip(1).roll(1, 0)), {"w": (3, 5)}),
    "symmetric": (lambda s, x: x @ (s.w + s.w.mT), {"w": (5, 5)}),
    "negated": (lambda s, x: F.linear(x, -s.w, bias=-s.b), {"w": (3, 5), "b": (3,)}),
    "rows-picked": (lambda s, x: F.linear(x, s.w[[2, 0, 0]]), {"w": (3, 5)}),
    "columns-picked": (lambda s, x: F.linear(x, s.w.index_select(1, torch.arange(5))), {"w": (3, 7)}),
    "kernel-from-table": (lambda s, x: F.conv1d(x, s.w.gather(2, torch.arange(3).expand(2, 6, 3))), {"w": (2, 6, 4)}),
    "blur-expanded": (lambda s, x: F.conv1d(x, s.w.expand(6, 1, 3), groups=6), {"w": (1, 1, 3)}),
}  # fmt: skip
for name, (forward, shapes) in DERIVED.items():
    case(f"derived-{name}", lambda forward=forward, shapes=shapes: Fn(forward, **shapes), (B, 6, 5))

# --- more ways for data to meet a parameter ---


def _blend(s: Any, x: Tensor) -> Tensor:
    return torch.lerp(x, x.flip(-1), s.w.sigmoid())


def _scattered(s: Any, x: Tensor) -> Tensor:
    return x.index_add(1, torch.tensor([0, 2]), s.w.expand(len(x), -1, -1))


MET: dict[str, tuple[Callable, dict[str, tuple]]] = {
    "lerp-weight": (_blend, {"w": (5,)}),
    "addcdiv": (lambda s, x: torch.addcdiv(x, s.w, s.v.abs() + 1), {"w": (5,), "v": (6, 5)}),
    "minimum": (lambda s, x: torch.minimum(x, s.w), {"w": (6, 1)}),
    "clamp": (lambda s, x: torch.clamp(x, min=-s.w.abs(), max=s.v.abs()), {"w": (5,), "v": (5,)}),
    "logaddexp": (lambda s, x: torch.logaddexp(x, s.w), {"w": (5,)}),
    "atan2": (lambda s, x: torch.atan2(x, s.w), {"w": (5,)}),
    "hypot": (lambda s, x: torch.hypot(x, s.w), {"w": (5,)}),
    "swish": (lambda s, x: x * torch.sigmoid(s.w * x), {"w": ()}),
    "snake": (lambda s, x: x + torch.sin(s.w * x).square() / s.w, {"w": (6, 1)}),
    "gate": (lambda s, x: x + s.w.tanh() * x.flip(-1), {"w": (1,)}),
    "thresholds": (lambda s, x: torch.sigmoid(x.unsqueeze(-1) - s.w.cumsum(0)), {"w": (3,)}),
    "radial": (lambda s, x: torch.exp(-s.b.exp() * torch.cdist(x, s.w).square()), {"w": (3, 5), "b": (3,)}),
    "prototypes": (lambda s, x: F.cosine_similarity(x.unsqueeze(-2), s.w, dim=-1), {"w": (3, 5)}),
    "tensordot": (lambda s, x: torch.tensordot(x, s.w, dims=([2], [1])), {"w": (3, 5)}),
    "inner": (lambda s, x: torch.inner(x, s.w), {"w": (3, 5)}),
    "vecdot": (lambda s, x: torch.linalg.vecdot(x, s.w), {"w": (5,)}),
    "multi-dot": (lambda s, x: torch.linalg.multi_dot([x.flatten(1), s.u, s.v]), {"u": (30, 4), "v": (4, 2)}),
    "einsum-bilinear": (lambda s, x: torch.einsum("bti,oij,btj->bto", x, s.w, x), {"w": (3, 5, 5)}),
    "einsum-list": (lambda s, x: torch.einsum(x, [0, 1, 2], s.w, [3, 2], [0, 1, 3]), {"w": (3, 5)}),
    "solve": (lambda s, x: torch.linalg.solve(s.w + 5 * torch.eye(6).to(x), x), {"w": (6, 6)}),
    "index-add": (_scattered, {"w": (2, 5)}),
    "prompt": (lambda s, x: torch.cat([s.w.unsqueeze(0).expand(len(x), -1, -1), x], 1).cumsum(1), {"w": (2, 5)}),
    "padded": (lambda s, x: F.pad(x, (0, 0, 1, 0)) + F.pad(s.w, (0, 0, 0, 6)), {"w": (1, 5)}),
    "fourier": (lambda s, x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * torch.view_as_complex(s.w), n=6, dim=1), {"w": (4, 5, 2)}),
    "attention-bias": (lambda s, x: F.scaled_dot_product_attention(x, x, x, attn_mask=s.w), {"w": (6, 6)}),
    "learned-queries": (lambda s, x: F.scaled_dot_product_attention(s.w.expand(len(x), -1, -1), x, x), {"w": (2, 5)}),
    "learned-keys": (lambda s, x: (x @ s.k.T).softmax(-1) @ s.v, {"k": (7, 5), "v": (7, 3)}),
    "scalar-mix": (lambda s, x: sum(w * h for w, h in zip(s.w.softmax(0), (x, x.sin(), x.exp()), strict=True)), {"w": (3,)}),
    "slopes": (lambda s, x: (x @ x.mT - s.w.exp() * (torch.arange(6) - torch.arange(6)[:, None]).abs()).softmax(-1), {"w": ()}),
    "decay-scan": (lambda s, x: torch.stack([(x[:, : t + 1] * s.w.sigmoid() ** torch.arange(t, -1, -1)[:, None]).sum(1)
                                             for t in range(6)], 1), {"w": (5,)}),
    "grid-sample": (lambda s, x: F.grid_sample(x[:, None], F.affine_grid(s.w.expand(len(x), 2, 3), [len(x), 1, 4, 4],
                                                                         align_corners=False), align_corners=False), {"w": (2, 3)}),
    "resized-positions": (lambda s, x: x + F.interpolate(s.w, size=6, mode="linear").mT, {"w": (1, 5, 4)}),
    "rms-by-hand": (lambda s, x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + s.w), {"w": (5,)}),
    "modulated": (lambda s, x: F.layer_norm(x, (5,)) * (1 + s.g) + s.b, {"g": (5,), "b": (5,)}),
    "task-weights": (lambda s, x: (-s.w).exp() * x.square().mean((1, 2), keepdim=True) + s.w, {"w": (1, 1, 2)}),
    "scale-by-own-mean": (lambda s, x: x * (s.w * x.mean((1, 2))[:, None])[:, None], {"w": (5,)}),
    "splines": (lambda s, x: torch.einsum("btik,oik->bto", torch.stack([x, x.square(), x.sin()], -1), s.w), {"w": (3, 5, 3)}),
}  # fmt: skip
for name, (forward, shapes) in MET.items():
    case(f"met-{name}", lambda forward=forward, shapes=shapes: Fn(forward, **shapes), (B, 6, 5))
case("met-outer", lambda: Fn(lambda s, x: torch.outer(x, s.w), w=(5,)), (B,))
case("met-gather", lambda: Fn(lambda s, i: s.w.expand(len(i), -1).gather(1, i), w=(7,)), ids(7, B, 3))
case("met-take", lambda: Fn(lambda s, i: torch.take(s.w, i), w=(7, 2)), ids(14, B, 3))
case("met-one-hot", lambda: Fn(lambda s, i: F.one_hot(i, 7).to(s.w) @ s.w, w=(7, 3)), ids(7, B, 5))
case("met-two-indices", lambda: Fn(lambda s, i, j: s.w[i, j], w=(7, 5, 2)), ids(7, B, 3), ids(5, B, 3))
case(
    "parameter-list",
    lambda: Fn(lambda s, x: sum(x @ w for w in s.ws), ws=nn.ParameterList(torch.randn(5, 3) for _ in "ab")),
    (B, 5),
)
case("parameter-dict", lambda: Fn(lambda s, x: x * s.ws["g"] + s.ws["b"], ws=nn.ParameterDict({k: torch.randn(5) for k in "gb"})),
     (B, 6, 5))  # fmt: skip

# --- another size equals the batch size ---
SQUARE: dict[str, tuple[Callable, dict[str, Any], tuple]] = {
    "all": (lambda s, x: s.l(x), {"l": nn.Linear(B, B)}, (B, B, B)),
    "weight": (lambda s, x: x @ s.w, {"w": (B, B)}, (B, B)),
    "heads": (lambda s, x: x @ s.w, {"w": (B, 5, 3)}, (B, B, 6, 5)),
    "einsum": (lambda s, x: torch.einsum("bti,tio->bto", x, s.w), {"w": (B, 5, 3)}, (B, B, 5)),
    "channels": (lambda s, x: s.c(x), {"c": nn.Conv1d(B, B, 3)}, (B, B, 7)),
    "scores": (lambda s, x: F.scaled_dot_product_attention(x, x, x, attn_mask=s.w), {"w": (B, B)}, (B, B, 5)),
    "transposed": (lambda s, x: s.l(x.transpose(1, 2)).transpose(1, 2), {"l": nn.Linear(B, B)}, (B, B, 5)),
    "prompt": (lambda s, x: torch.cat([s.w.expand(len(x), -1, -1), x], 1), {"w": (B, 5)}, (B, 6, 5)),
}
for name, (forward, parts, shape) in SQUARE.items():
    case(f"square-{name}", lambda forward=forward, parts=parts: Fn(forward, **copy.deepcopy(parts)), shape)
WINDOW = torch.arange(B)[:, None] - torch.arange(B) + B - 1
case("square-window", lambda: Fn(lambda s, x: (x @ x.mT + s.w[WINDOW.flatten()].view(B, B, 2).permute(2, 0, 1)).softmax(-1),
     w=(2 * B - 1, 2)), (B, 2, B, 5))  # fmt: skip

# --- more layers ---
for mode in ["circular", "reflect", "replicate"]:
    case(f"conv3d-{mode}", lambda mode=mode: nn.Conv3d(2, 3, 2, padding=1, padding_mode=mode), (B, 2, 3, 4, 3))
case("conv2d-1x1", lambda: nn.Conv2d(3, 4, 1), (B, 3, 5, 5))
case("conv2d-whole-image", lambda: nn.Conv2d(3, 4, 5), (B, 3, 5, 5))
case("conv1d-causal", lambda: Fn(lambda s, x: s.c(F.pad(x, (4, 0))), c=nn.Conv1d(2, 3, 3, dilation=2)), (B, 2, 7))
case("conv2d-separable", lambda: nn.Sequential(nn.Conv2d(3, 3, 3, groups=3), nn.Conv2d(3, 4, 1, bias=False)), (B, 3, 6, 6))
case("conv2d-unfolded", lambda: Fn(lambda s, x: s.l(F.unfold(x, 3).mT), l=nn.Linear(18, 3)), (B, 2, 5, 5))
case("conv2d-up-and-down", lambda: nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Upsample(scale_factor=2),
     nn.Conv2d(4, 8, 1), nn.PixelShuffle(2)), (B, 2, 6, 6))  # fmt: skip
case("conv-transpose1d-groups", lambda: nn.ConvTranspose1d(4, 4, 2, groups=2, dilation=2), (B, 4, 5))
case("conv-transpose3d-padding", lambda: nn.ConvTranspose3d(2, 2, 3, padding=1, stride=2), (B, 2, 2, 3, 2))
case(
    "conv-tied-transposed",
    lambda: Fn(lambda s, x: F.conv_transpose2d(F.conv2d(x, s.w).tanh(), s.w), w=(3, 2, 3, 3)),
    (B, 2, 5, 5),
)
case(
    "squeeze-excite",
    lambda: Fn(lambda s, x: x * s.l(x.mean((2, 3))).sigmoid()[:, :, None, None], l=nn.Linear(4, 4)),
    (B, 4, 5, 5),
)
case(
    "channel-norm", lambda: Fn(lambda s, x: s.n(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), n=nn.LayerNorm(4)), (B, 4, 5, 5)
)
case("layer-norm-T-is-B", lambda: nn.LayerNorm([B, 5]), (B, B, 5))
case("group-norm-C-is-B", lambda: nn.GroupNorm(2, B), (B, B, B))
case("batch-norm-eval-1d", lambda: nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3).eval()), (B, 5))
case("batch-norm-eval-3d", lambda: nn.BatchNorm3d(3).eval(), (B, 3, 2, 2, 2))
case(
    "batch-norm-eval-frozen",
    lambda: nn.Sequential(nn.Conv1d(2, 3, 1), frozen(nn.BatchNorm1d(3).eval(), "weight", "bias")),
    (B, 2, 5),
)
case("batch-norm-eval-no-affine", lambda: nn.Sequential(nn.BatchNorm1d(5, affine=False).eval(), nn.Linear(5, 3)), (B, 5))
case("prelu-channels-2d", lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.PReLU(4)), (B, 2, 5, 5))
case("bilinear-no-bias", lambda: nn.Bilinear(3, 3, 2, bias=False), (B, 3), (B, 3))
case("embedding-functional", lambda: Fn(lambda s, i: F.embedding(i, s.w, padding_idx=0), w=(7, 3)), ids(7, B, 5))
case("embedding-one-sample", lambda: nn.Embedding(7, 3), ids(7, 1, 5))
case(
    "embedding-then-conv",
    lambda: Fn(lambda s, i: s.c(s.e(i).mT).amax(2), e=nn.Embedding(7, 3), c=nn.Conv1d(3, 4, 2)),
    ids(7, B, 6),
)
case("embedding-bag-offsets", lambda: Fn(lambda s, i: s.e(i.flatten(), torch.arange(0, i.numel(), i.shape[1])),
     e=nn.EmbeddingBag(5, 3, mode="sum")), ids(5, B, 6))  # fmt: skip
case("embedding-bag-learned-weights", lambda: Fn(lambda s, i: s.e(i, per_sample_weights=s.a[i]), a=(5,),
     e=nn.EmbeddingBag(5, 3, mode="sum")), ids(5, B, 6))  # fmt: skip

# --- more recurrence ---


def _packed(kind: type[nn.RNNBase], *, is_sorted: bool) -> nn.Module:
    def forward(s: Any, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=is_sorted)
        return pad_packed_sequence(s.rnn(packed)[0], batch_first=True, total_length=x.shape[1])[0]

    return Fn(forward, rnn=kind(3, 4, batch_first=True))


def _unrolled(s: Any, x: Tensor) -> Tensor:
    state, outs = None, []
    for row in x.unbind(1):
        state = s.cell(row, state)
        outs.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(outs, 1)


def _translate(s: Any, x: Tensor) -> Tensor:
    _, state = s.encoder(x)
    return s.decoder(x[:, :3].flip(1), state)[0]


for kind in [nn.RNN, nn.LSTM, nn.GRU]:
    name = kind.__name__.lower()
    case(f"{name}-packed", lambda kind=kind: _packed(kind, is_sorted=True), (B, 6, 3), lambda: torch.tensor([6, 4, 4, 1]))
    case(
        f"{name}-packed-jumbled",
        lambda kind=kind: _packed(kind, is_sorted=False),
        (B, 6, 3),
        lambda: torch.tensor([4, 1, 6, 4]),
    )
    case(f"{name}-last-state", lambda kind=kind: Fn(lambda s, x: s.head(s.rnn(x)[0][:, -1]), rnn=kind(3, 4, batch_first=True),
         head=nn.Linear(4, 2)), (B, 6, 3))  # fmt: skip
for cell in [nn.RNNCell, nn.LSTMCell, nn.GRUCell]:
    case(f"{cell.__name__.lower()}-unrolled", lambda cell=cell: Fn(_unrolled, cell=cell(3, 4)), (B, 5, 3))
    case(f"{cell.__name__.lower()}-no-bias", lambda cell=cell: Fn(_unrolled, cell=cell(3, 4, bias=False)), (B, 2, 3))
case("lstm-translate", lambda: Fn(_translate, encoder=nn.LSTM(3, 4, batch_first=True), decoder=nn.LSTM(3, 4, batch_first=True)),
     (B, 6, 3))  # fmt: skip
case(
    "lstm-proj-deep", lambda: Seq(nn.LSTM(3, 4, num_layers=2, bidirectional=True, proj_size=2, batch_first=True)), (B, 5, 3)
)
case("lstm-one-sample", lambda: Seq(nn.LSTM(3, 4, batch_first=True)), (1, 5, 3))

# --- attention ---


def _mha(batch_dim: int = 0, **options: Any) -> nn.Module:
    return nn.MultiheadAttention(8, 2, batch_first=batch_dim == 0, **options)


def _self_attention(**call: Any) -> Callable:
    return lambda s, x: s.m(x, x, x, **call)[0]


def _causal(s: Any, x: Tensor) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
    return s.m(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]


def _gqa(s: Any, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x).unflatten(-1, (4, 2)).transpose(1, 2).split([2, 1, 1], 1)
    return s.out(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2))


def _windows(s: Any, x: Tensor) -> Tensor:
    folded = x.unflatten(1, (2, 3)).flatten(0, 1)  # two windows a sample, as Swin has them
    return s.m(folded, folded, folded)[0].unflatten(0, (-1, 2)).flatten(1, 2)


def _vit(s: Any, x: Tensor) -> Tensor:
    h = s.patch(x).flatten(2).mT
    h = torch.cat([s.cls.expand(len(x), -1, -1), h], 1) + s.pos
    return s.head(s.block(h)[:, 0])


for dim in (0, 1):
    where = {"batch_dim": dim, "options": {"batch_dim": dim}}
    tail = "-batch-second" if dim else ""
    shape = (B, 6, 8) if dim == 0 else (6, B, 8)
    case(f"mha{tail}", lambda dim=dim: Fn(_self_attention(), m=_mha(batch_dim=dim)), shape, **where)
    case(f"mha-T-is-B{tail}", lambda dim=dim: Fn(_self_attention(), m=_mha(batch_dim=dim)), (B, B, 8), **where)
    for training in (True, False):
        mode = "train" if training else "eval"
        case(f"encoder-layer-{mode}{tail}", lambda dim=dim, training=training: nn.TransformerEncoderLayer(
            8, 2, 12, dropout=0.0, batch_first=dim == 0).train(training), shape, **where)  # fmt: skip
        case(f"decoder-layer-{mode}{tail}", lambda dim=dim, training=training: nn.TransformerDecoderLayer(
            8, 2, 12, dropout=0.0, batch_first=dim == 0).train(training), shape, shape, **where)  # fmt: skip
case("mha-causal", lambda: Fn(_causal, m=_mha()), (B, 5, 8))
case("mha-no-bias", lambda: Fn(_self_attention(need_weights=False), m=_mha(bias=False)), (B, 5, 8))
case("mha-bias-kv", lambda: Fn(_self_attention(), m=_mha(add_bias_kv=True, add_zero_attn=True)), (B, 5, 8))
case("mha-cross", lambda: Fn(lambda s, x, y: s.m(x, y, y)[0], m=_mha(kdim=3, vdim=3)), (B, 5, 8), (B, 6, 3))
case("mha-padding", lambda: Fn(lambda s, x, n: s.m(x, x, x, key_padding_mask=torch.arange(5) >= n[:, None])[0], m=_mha()), (B, 5, 8),
     lambda: torch.tensor([5, 2, 3, 1]))  # fmt: skip
case("mha-weights", lambda: Fn(lambda s, x: torch.cat([t.flatten(1) for t in s.m(x, x, x, average_attn_weights=False)], 1),
     m=_mha()), (B, 5, 8))  # fmt: skip
case("encoder-norm-first", lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, norm_first=True, activation="gelu",
     batch_first=True), (B, 5, 8))  # fmt: skip
case("encoder-of-two", lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, bias=False, batch_first=True),
     2, norm=nn.LayerNorm(8), enable_nested_tensor=False), (B, 5, 8))  # fmt: skip
case("attention-grouped-queries", lambda: Fn(_gqa, qkv=nn.Linear(8, 8, bias=False), out=nn.Linear(4, 8)), (B, 5, 8))
case("attention-windows", lambda: Fn(_windows, m=_mha()), (B, 6, 8))
case("attention-latents", lambda: Fn(lambda s, x: s.m(s.q.expand(len(x), -1, -1), x, x)[0], q=(3, 8), m=_mha()), (B, 6, 8))
case("vision-transformer", lambda: Fn(_vit, patch=nn.Conv2d(2, 8, 3, stride=3), cls=(1, 1, 8), pos=(1, 5, 8), head=nn.Linear(8, 3),
     block=nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)), (B, 2, 6, 6))  # fmt: skip

# --- parametrizations, adapters, frozen parts ---


class Squared(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.square()


def _parametrized(module: nn.Module, name: str) -> nn.Module:
    parametrize.register_parametrization(module, name, Squared())
    return module


class Adapted(nn.Module):
    """A frozen layer and a low-rank path beside it."""

    def __init__(self, layer: nn.Module, down: nn.Module, up: nn.Module):
        super().__init__()
        self.layer, self.down, self.up = layer.requires_grad_(False), down, up

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 2.0 * self.up(self.down(x))


def _only_biases(module: nn.Module) -> nn.Module:
    return frozen(module, *(name for name, _ in module.named_parameters() if not name.endswith("bias")))


def _without_grad(s: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = s.body(x)
    return s.head(h)


case("weight-norm", lambda: parametrizations.weight_norm(nn.Linear(5, 3)), (B, 6, 5))
case("weight-norm-conv", lambda: parametrizations.weight_norm(nn.Conv1d(2, 3, 3)), (B, 2, 7))
case("spectral-norm-eval", lambda: parametrizations.spectral_norm(nn.Conv2d(2, 3, 3)).eval(), (B, 2, 5, 5))
case("orthogonal", lambda: parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map="cayley"), (B, 4))
case("parametrized-weight", lambda: _parametrized(nn.Linear(5, 3), "weight"), (B, 6, 5))
case("parametrized-bias", lambda: _parametrized(nn.Conv1d(2, 3, 3), "bias"), (B, 2, 7))
case("lora", lambda: Adapted(nn.Linear(5, 3), nn.Linear(5, 2, bias=False), nn.Linear(2, 3, bias=False)), (B, 6, 5))
case(
    "lora-conv",
    lambda: Adapted(nn.Conv1d(2, 3, 3), nn.Conv1d(2, 1, 3, bias=False), nn.Conv1d(1, 3, 1, bias=False)),
    (B, 2, 7),
)
case("lora-embedding", lambda: Adapted(nn.Embedding(7, 5), nn.Embedding(7, 2), nn.Linear(2, 5, bias=False)), ids(7, B, 4))
case("only-biases", lambda: _only_biases(nn.Sequential(nn.Conv1d(2, 3, 3), nn.GroupNorm(1, 3), nn.Linear(5, 2))), (B, 2, 7))
case("body-frozen", lambda: nn.Sequential(nn.Linear(5, 4).requires_grad_(False), nn.Tanh(), nn.Linear(4, 3)), (B, 5))
case("body-in-the-middle-frozen", lambda: nn.Sequential(nn.Linear(5, 4), nn.Conv1d(6, 6, 1).requires_grad_(False), nn.Linear(4, 3)),
     (B, 6, 5))  # fmt: skip
case("body-without-grad", lambda: Fn(_without_grad, body=nn.Linear(5, 4), head=nn.Linear(4, 3)), (B, 5))
case("branch-detached", lambda: Fn(lambda s, x: s.a(x) + s.b(s.a(x).detach()), a=nn.Linear(5, 3), b=nn.Linear(3, 3)), (B, 5))

# --- shapes of whole models ---


def _residual(s: Any, x: Tensor) -> Tensor:
    h = s.b(F.relu(s.n(s.a(x)), inplace=True))
    h += x
    return F.relu(h, inplace=True)


def _routed(s: Any, x: Tensor) -> Tensor:
    out, gates = torch.zeros_like(x), s.gate(x).softmax(-1)
    best = gates.argmax(-1)
    for k, expert in enumerate(s.experts):
        rows = best == k
        out[rows] = expert(x[rows]) * gates[rows][:, k : k + 1]
    return out


def _coupling(s: Any, x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    scale, shift = s.net(a).chunk(2, -1)
    return torch.cat([a, b * scale.tanh().exp() + shift], -1)


def _under_two_names() -> nn.Module:
    model = Fn(lambda s, x: s.b(s.a(x).tanh()), a=nn.Linear(5, 5))
    model.b = model.a
    return model


EDGES = torch.tensor([[0, 1, 2, 2, 5], [1, 0, 3, 4, 4]])


def _messages(s: Any, x: Tensor) -> Tensor:
    source, target = EDGES.to(x.device)
    return s.own(x) + torch.zeros_like(x).index_add(1, target, s.other(x[:, source]))


LAYERS = nn.ModuleList
case(
    "residual-in-place",
    lambda: Fn(_residual, a=nn.Conv1d(4, 4, 3, padding=1), n=nn.GroupNorm(2, 4), b=nn.Conv1d(4, 4, 1)),
    (B, 4, 6),
)
case("routed-experts", lambda: Fn(_routed, gate=nn.Linear(4, 2), experts=LAYERS(nn.Linear(4, 4) for _ in "ab")), (8, 4))
case("soft-experts", lambda: Fn(lambda s, x: torch.einsum("bk,bko->bo", s.gate(x).softmax(-1), torch.einsum("bi,kio->bko", x, s.w)),
     gate=nn.Linear(5, 2), w=(2, 5, 3)), (B, 5))  # fmt: skip
case("hypernetwork", lambda: Fn(lambda s, x, z: torch.bmm(s.g(z).view(-1, 3, 5), x.unsqueeze(2)).squeeze(2), g=nn.Linear(2, 15)),
     (B, 5), (B, 2))  # fmt: skip
case("film", lambda: Fn(lambda s, x, z: s.c(x) * s.g(z)[:, :, None] + s.b(z)[:, :, None], c=nn.Conv1d(2, 3, 3), g=nn.Linear(2, 3),
     b=nn.Linear(2, 3)), (B, 2, 7), (B, 2))  # fmt: skip
case("flow-coupling", lambda: Fn(_coupling, net=nn.Linear(3, 6)), (B, 6))
case("graph-messages", lambda: Fn(_messages, own=nn.Linear(3, 3), other=nn.Linear(3, 3)), (B, 6, 3))
case("graph-adjacency", lambda: Fn(lambda s, x: torch.eye(6).to(x).roll(1, 0) @ s.l(x), l=nn.Linear(3, 2)), (B, 6, 3))
case("set-pooling", lambda: Fn(lambda s, x: s.b(s.a(x).relu().sum(1)), a=nn.Linear(3, 4), b=nn.Linear(4, 2)), (B, 6, 3))
case("row-at-a-time", lambda: Fn(lambda s, x: torch.stack([s.l(row) for row in x]), l=nn.Linear(5, 3)), (B, 5))
case(
    "position-at-a-time",
    lambda: Fn(lambda s, x: torch.stack([s.l(x[:, t]) for t in range(3)], 1), l=nn.Linear(5, 3)),
    (B, 3, 5),
)
case("shared-layers", lambda: Fn(lambda s, x: s.n(s.l(s.n(s.l(x)))), l=nn.Linear(5, 5), n=nn.LayerNorm(5)), (B, 6, 5))
case("two-towers", lambda: Fn(lambda s, x, y: (s.l(x) * s.l(y)).sum(-1), l=nn.Linear(5, 3)), (B, 5), (B, 5))
case("under-two-names", _under_two_names, (B, 5))
case("unused-layer", lambda: Fn(lambda s, x: s.a(x), a=nn.Linear(5, 3), b=nn.Linear(5, 3)), (B, 5))
case(
    "metadata-in-forward",
    lambda: Fn(lambda s, x: F.linear(x.view(-1, s.w.size(1)), s.w) * len(s.w) / s.w.numel(), w=(3, 5)),
    (B, 5),
)

# --- tensors made in forward ---
LENGTHS = lambda: torch.tensor([4, 6, 2, 1])


def _filled(s: Any, x: Tensor) -> Tensor:
    out = torch.empty(len(x), x.shape[1], 3, dtype=x.dtype)
    for t in range(x.shape[1]):
        out[:, t] = s.l(x[:, t])
    return out


def _added_up(s: Any, x: Tensor) -> Tensor:
    total = x.new_zeros(len(x), 3)
    for t in range(x.shape[1]):
        total += s.l(x[:, t])
    return total


def _from_zeros(s: Any, x: Tensor) -> Tensor:
    h = torch.zeros(len(x), 4, dtype=x.dtype)
    for row in x.unbind(1):
        h = s.cell(row, h)
    return h


def _fed_back(s: Any, x: Tensor) -> Tensor:
    y, outs = torch.zeros(len(x), 3, dtype=x.dtype), []
    for row in x.unbind(1):
        y = s.l(torch.cat([row, y], -1))
        outs.append(y)
    return torch.stack(outs, 1)


def _segments(s: Any, x: Tensor) -> Tensor:
    rows = torch.arange(len(x)).repeat_interleave(x.shape[1])
    return x.new_zeros(len(x), 3).index_add(0, rows, s.l(x.flatten(0, 1)))


def _scattered(how: str) -> Callable[[Any, Tensor], Tensor]:
    """Messages [E, D] along the edges of a graph a sample, added up at the nodes that they go to, and nodes at their graphs."""

    def forward(s: Any, x: Tensor) -> Tensor:
        (B, N, _), rows = x.shape, torch.arange(x.shape[0] * x.shape[1])
        to = rows.view(B, N).roll(1, 1).flatten().repeat(2)
        h = s.l(x.flatten(0, 1))
        h = scatter(h.new_zeros(h.shape), to, h[rows.repeat(2)] * torch.arange(1, N + 1).repeat(2 * B)[:, None])
        return scatter(h.new_zeros(B, 3), rows // N, s.m(h.tanh()))

    def scatter(out: Tensor, index: Tensor, values: Tensor) -> Tensor:
        index = index[:, None].expand_as(values)
        if how == "in place":
            return out.scatter_add_(0, index, values)
        if how == "turned":
            return out.mT.scatter_add(1, index.mT, values.mT).mT
        return (
            out.scatter_add(0, index, values)
            if how == "sum"
            else out.scatter_reduce(0, index, values, how, include_self=False)
        )

    return forward


def _masked(s: Any, x: Tensor) -> Tensor:
    mask = torch.ones(len(x), 6, 6, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(s.q(x), s.k(x), x, attn_mask=mask)


def _sorted_experts(s: Any, x: Tensor) -> Tensor:
    h = x.flatten(0, 1)
    best = s.gate(h).argmax(-1)
    order, sizes = best.argsort(), torch.bincount(best, minlength=2).tolist()
    y = torch.cat([expert(part) for expert, part in zip(s.experts, h[order].split(sizes), strict=True)])
    return torch.empty_like(y).index_copy(0, order, y).view_as(x)


def _added_experts(s: Any, x: Tensor) -> Tensor:
    h = x.flatten(0, 1)
    gates, out = s.gate(h).softmax(-1), torch.zeros_like(h)
    for k, expert in enumerate(s.experts):
        (rows,) = torch.where(gates.argmax(-1) == k)
        out.index_add_(0, rows, expert(h[rows]) * gates[rows, k, None])
    return out.view_as(x)


def _top_experts(s: Any, x: Tensor) -> Tensor:
    gates, picked = s.gate(x).topk(2, -1)
    return torch.einsum("bk,bi,bkio->bo", gates.softmax(-1), x, s.w[picked])


def _state_space(s: Any, x: Tensor) -> Tensor:
    h, outs = x.new_zeros(len(x), 5, 2), []
    for row in x.unbind(1):
        step = F.softplus(s.step(row))
        h = h * torch.exp(-step[..., None] * s.a.exp()) + (step * row)[..., None] * s.b(row)[:, None]
        outs.append((h * s.c(row)[:, None]).sum(-1) + s.d * row)
    return torch.stack(outs, 1)


def _rotated(s: Any, x: Tensor) -> Tensor:
    (a, b), angle = s.l(x).chunk(2, -1), torch.arange(6).to(x)[:, None]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def _averaged(s: Any, i: Tensor, n: Tensor) -> Tensor:
    mask = torch.arange(i.shape[1]) < n[:, None]
    return s.l(s.e(i).masked_fill(~mask.unsqueeze(-1), 0.0).sum(1) / n[:, None])


def _guided(s: Any, x: Tensor) -> Tensor:
    z = x.detach().clone().requires_grad_()
    (g,) = torch.autograd.grad(s.l(z).tanh().sum(), z)
    return s.l(x - 0.1 * g)


def _pair(i: int = 5, o: int = 5) -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(i, o), nn.Linear(i, o)])


L53 = {"l": nn.Linear(5, 3)}
MADE: dict[str, tuple[Callable, dict[str, Any], tuple]] = {
    "filled": (_filled, L53, ((B, 6, 5),)),
    "added-up": (_added_up, L53, ((B, 6, 5),)),
    "cell-from-zeros": (_from_zeros, {"cell": nn.GRUCell(3, 4)}, ((B, 5, 3),)),
    "fed-back": (_fed_back, {"l": nn.Linear(8, 3)}, ((B, 6, 5),)),
    "start-token": (lambda s, x: torch.cat([s.e(torch.full((len(x), 1), 2)), x], 1), {"e": nn.Embedding(7, 5)}, ((B, 6, 5),)),
    "zeros-like": (lambda s, x: s.l(x) + s.l(torch.zeros_like(x)), L53, ((B, 5),)),
    "shifted": (lambda s, x: s.l(torch.cat([x.new_zeros(len(x), 1, 5), x[:, :-1]], 1)), L53, ((B, 6, 5),)),
    "index-added": (lambda s, x: torch.zeros(len(x), 4, 3).to(x).index_add(1, torch.tensor([0, 1, 1, 3, 0, 2]), s.l(x)),
                    L53, ((B, 6, 5),)),
    "segments": (_segments, L53, ((B, 6, 5),)),
    **{f"scattered-{how}": (_scattered(how), {"l": nn.Linear(5, 3), "m": nn.Linear(3, 3)}, ((B, 6, 5),))
       for how in ("sum", "in place", "turned", "mean", "amax")},
    "mask": (_masked, {"q": nn.Linear(5, 5), "k": nn.Linear(5, 5, bias=False)}, ((B, 6, 5),)),
    "positions-counted": (lambda s, i: s.e(i) + s.p((i != 0).cumsum(1)),
                          {"e": nn.Embedding(7, 3), "p": nn.Embedding(9, 3)}, (ids(7, B, 5),)),
    "experts-sorted": (_sorted_experts, {"gate": nn.Linear(5, 2), "experts": _pair()}, ((B, 6, 5),)),
    "experts-added": (_added_experts, {"gate": nn.Linear(5, 2), "experts": _pair()}, ((B, 6, 5),)),
    "experts-top": (_top_experts, {"gate": nn.Linear(5, 4), "w": (4, 5, 3)}, ((B, 5),)),
    "state-space": (_state_space,
                    {"a": (5, 2), "step": nn.Linear(5, 5), "b": nn.Linear(5, 2), "c": nn.Linear(5, 2), "d": (5,)}, ((B, 6, 5),)),
    "rotated": (_rotated, {"l": nn.Linear(5, 4)}, ((B, 6, 5),)),
    "ragged": (lambda s, x, n: torch.stack([s.l(row[:k]).sum(0) for row, k in zip(x, n.tolist(), strict=True)]),
               L53, ((B, 6, 5), LENGTHS)),
    "averaged": (_averaged, {"e": nn.Embedding(9, 4), "l": nn.Linear(4, 3)}, (ids(9, B, 6), LENGTHS)),
    "last-by-index": (lambda s, x, n: s.r(x)[0][torch.arange(len(x)), n - 1],
                      {"r": nn.GRU(3, 4, batch_first=True)}, ((B, 6, 3), LENGTHS)),
    "last-by-gather": (lambda s, x, n: s.r(x)[0].gather(1, (n - 1)[:, None, None].expand(-1, 1, 4)),
                       {"r": nn.RNN(3, 4, batch_first=True)}, ((B, 6, 3), LENGTHS)),
    "state-from-data": (lambda s, x: s.r(x, s.i(x.mean(1)).unsqueeze(0))[0],
                        {"r": nn.GRU(3, 4, batch_first=True), "i": nn.Linear(3, 4)}, ((B, 5, 3),)),
    "beams": (lambda s, x: s.k(s.l(x).repeat_interleave(3, 0)).view(len(x), 3, -1), {**L53, "k": nn.Linear(3, 2)}, ((B, 5),)),
    "beams-repeated": (lambda s, x: s.k(s.l(x).repeat(3, 1)).view(3, len(x), -1).transpose(0, 1),
                       {**L53, "k": nn.Linear(3, 2)}, ((B, 5),)),
    "two-views": (lambda s, x: torch.sub(*s.l(torch.cat([x, x + 1])).chunk(2)), L53, ((B, 5),)),
    "turned-around": (lambda s, x: s.l(x[torch.arange(len(x)).flip(0)]).flip(0), L53, ((B, 5),)),
    "guided": (_guided, {"l": nn.Linear(5, 5)}, ((B, 5),)),
    "complex-parts": (lambda s, x: torch.view_as_real(torch.complex(x, x.flip(1)) @ torch.complex(s.re, s.im)),
                      {"re": (5, 2), "im": (5, 2)}, ((B, 6, 5),)),
    "times": (lambda s, t: torch.cat([(t[:, None] * s.f).sin(), (t[:, None] * s.f).cos()], 1), {"f": (4,)}, ((B,),)),
    "weight-alone": (lambda s, x: s.w.expand(len(x), -1) + 0 * x, {"w": (5,)}, ((B, 5),)),
    "penalty": (lambda s, x: s.l(x) + s.l.weight.square().sum(), L53, ((B, 5),)),
    "similarity": (lambda s, x, y: (F.normalize(s.a(x), dim=-1) * F.normalize(s.b(y), dim=-1)).sum(-1) * s.t.exp(),
                   {"a": nn.Linear(5, 3), "b": nn.Linear(4, 3), "t": ()}, ((B, 5), (B, 4))),
    "skip-and-resize": (lambda s, x: s.o(torch.cat([x, F.interpolate(s.d(x), scale_factor=2, mode="bilinear")], 1)),
                        {"d": nn.Conv2d(2, 3, 3, stride=2, padding=1), "o": nn.Conv2d(5, 1, 1)}, ((B, 2, 4, 4),)),
}  # fmt: skip
for name, (forward, parts, shapes) in MADE.items():
    case(f"made-{name}", lambda forward=forward, parts=parts: Fn(forward, **copy.deepcopy(parts)), *shapes)
case("convnet-pooled", lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
     nn.Linear(4, 3)), (B, 2, 4, 4))  # fmt: skip
case("dropout-eval", lambda: nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5).eval(), nn.Linear(5, 3)), (B, 5))

BY_NAME = {c.name: c for c in CASES}
assert len(BY_NAME) == len(CASES)
ALL = [pytest.param(c, id=c.name) for c in CASES]
