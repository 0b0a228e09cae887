"""What other systems get wrong without a word, and what a hunt found here: right, or refused in words."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from cases import Fn, curved, frozen, ids
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import samplewise as sw
from samplewise import SamplewiseError, UnattributedError
from samplewise.testing import oracle, relative_error, run_capture

B = 4
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile's own
TOLERANCE = 1e-9  # float64, sums of at most a few thousand terms


def data(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def rows(model, *batch) -> Tensor:
    """One loss a sample."""
    out = curved(model(*batch))
    return out.flatten(1).sum(1) if out.ndim > 1 else out


def linear(i: int = 5, o: int = 3) -> nn.Linear:
    return nn.Linear(i, o)


def two(**more) -> dict:
    return {"a": linear(5, 5), "b": linear(5, 5), **more}


def flat(G: Tensor) -> Tensor:
    return G.reshape(len(G), -1)


def norms_of(truth: dict[str, Tensor]) -> Tensor:
    return torch.cat([flat(G) for G in truth.values()], 1).abs().norm(dim=1)


def assert_right(
    model: nn.Module, *batch, loss_fn=rows, tolerance: float = TOLERANCE, batch_dim: int = 0, **options
) -> None:
    """Gradients, norms and clipped sums are the oracle's, nothing is missing, `.grad` stays None."""
    truth = oracle(model, loss_fn, *batch, batch_dim=batch_dim)
    grads = run_capture(model, loss_fn, *batch, batch_dim=batch_dim, **options)
    assert {n for n, G in truth.items() if G.any()} <= set(grads)
    for name in grads:
        assert relative_error(grads[name].materialize(), truth[name]) < tolerance, name
    norms, bound = norms_of(truth), norms_of(truth).median().item() / 2
    assert relative_error(grads.norms(), norms) < tolerance
    for name, G in grads.clipped_sum(max_norm=bound).items():
        clipped = (bound / norms).clamp(max=1).to(G.dtype)
        assert relative_error(G, torch.tensordot(clipped, truth[name].to(G.dtype), 1)) < 10 * tolerance, name
    assert all(p.grad is None for p in model.parameters())


def refused(model: nn.Module, *batch, words: str, loss_fn=rows, kind=SamplewiseError, **options) -> None:
    """The error comes in the block or at the query, and no gradient is left anywhere."""
    with pytest.raises(kind, match=words):
        with sw.capture(model, **options) as grads:
            loss_fn(model, *batch).sum().backward()
        grads.norms()
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def right_or_refused(model: nn.Module, *batch, words: str, **options) -> None:
    try:
        assert_right(model, *batch, **options)
    except SamplewiseError:
        refused(model, *batch, words=words, **options)


def tied(model: nn.Module, name: str, source: str) -> nn.Module:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, model.get_parameter(source))
    return model


def complex_of(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        p.data = torch.randn(p.shape, dtype=torch.complex128)
    return model


def z(*shape: int):
    return lambda: torch.randn(*shape, dtype=torch.complex128)


def running(norm):
    norm = norm.eval()
    norm.running_mean.uniform_(-1, 1)
    norm.running_var.uniform_(0.5, 2)
    return norm


def residual(s, x):
    h = s.b(F.relu(s.n(s.a(x)), inplace=True))
    h += x
    return F.relu(h, inplace=True)


# --- wrong, missing or refused elsewhere, right here -------------------------------------------------

RIGHT = {
    # wrong without a word in ExpandedWeights
    "padding_idx": (lambda: nn.Embedding(4, 3, padding_idx=1), ids(4, B, 9)),
    "padding_idx of shared positions": (
        lambda: Fn(lambda s, i: s.e(i) + s.p(torch.arange(6)), e=nn.Embedding(4, 3), p=nn.Embedding(6, 3, padding_idx=2)),
        ids(4, B, 6),
    ),
    "scale_grad_by_freq": (lambda: nn.Embedding(4, 3, scale_grad_by_freq=True), ids(4, B, 9)),
    "scale_grad_by_freq and padding_idx": (
        lambda: nn.Embedding(4, 3, scale_grad_by_freq=True, padding_idx=0), ids(4, B, 9),
    ),
    "instance norm in eval": (lambda: nn.InstanceNorm1d(3, affine=True).eval(), (B, 3, 5)),
    "instance norm with running statistics": (
        lambda: running(nn.InstanceNorm2d(3, affine=True, track_running_stats=True)), (B, 3, 4, 4),
    ),
    "instance norm of odd strides": (
        lambda: Fn(
            lambda s, x: F.instance_norm(torch.einsum("z,abc->zcab", s.w, s.l(x)).swapaxes(0, 2), weight=s.g, bias=s.b),
            l=linear(4, 3), w=(2,), g=(3,), b=(3,),
        ),
        (3, 1, 4),
    ),
    "complex linear": (lambda: complex_of(linear()), z(B, 6, 5)),
    "complex conv": (lambda: complex_of(nn.Conv1d(2, 3, 2)), z(B, 2, 6)),
    "complex arithmetic": (lambda: complex_of(Fn(lambda s, x: x * s.w + s.v, w=(5,), v=(6, 1))), z(B, 6, 5)),
    "complex weight conjugated": (lambda: complex_of(Fn(lambda s, x: x @ s.w.conj().T @ s.v.mH, w=(3, 5), v=(2, 3))), z(B, 5)),
    "real weight cast to complex": (lambda: Fn(lambda s, x: F.linear(x, s.w.to(x.dtype)), w=(3, 5)), z(B, 5)),
    "T == B": (lambda: nn.Sequential(linear(), nn.LayerNorm(3)), (B, B, 5)),
    "relative positions, K == B": (
        lambda: Fn(lambda s, x: x + s.p(torch.arange(B).view(-1, 1) - torch.arange(B) + B).permute(2, 0, 1), p=nn.Embedding(2 * B, 2)),
        (B, 2, B, B),
    ),
    "class embeddings, K == B": (
        lambda: Fn(lambda s, x: s.l(x) @ s.l(s.e.weight).T, l=linear(), e=nn.Embedding(B, 5)), (B, 5),
    ),
    "routed rows": (
        lambda: Fn(lambda s, x: torch.where(x.sum(1, keepdim=True) > 0, s.a(x), s.b(x)), **two()), (B, 5),
    ),
    "folded (B·T, D)": (
        lambda: Fn(lambda s, x: s.l(x.reshape(-1, 5)).view(len(x), -1, 3), l=linear()), (B, 6, 5),
    ),
    # missing or damaged in ExpandedWeights
    "checkpoint": (lambda: Fn(lambda s, x: s.b(checkpoint(s.a, s.b(x), use_reentrant=False)), **two()), (B, 5)),
    "checkpoint, reentrant": (lambda: Fn(lambda s, x: s.b(checkpoint(s.a, s.b(x), use_reentrant=True)), **two()), (B, 5)),
    "checkpoint of a derived weight": (
        lambda: Fn(lambda s, x: checkpoint(lambda h: h @ (s.w / s.w.norm()), s.l(x), use_reentrant=False), l=linear(), w=(3, 2)),
        (B, 5),
    ),
    "compiled submodule": (lambda: Fn(lambda s, x: s.b(s.a(x)), a=torch.compile(linear(5, 5), backend="eager"), b=linear()), (B, 5)),
    # refused though ordinary in ExpandedWeights
    "x + pos": (lambda: Fn(lambda s, x: x + s.w[:, : x.shape[1]], w=(1, 9, 5)), (B, 6, 5)),
    "x * gamma": (lambda: Fn(lambda s, x: x * s.w, w=(5,)), (B, 6, 5)),
    "x @ W": (lambda: Fn(lambda s, x: x @ s.w, w=(5, 3)), (B, 6, 5)),
    "einsum": (lambda: Fn(lambda s, x: torch.einsum("btd,dhe->bhte", x, s.w), w=(5, 2, 3)), (B, 6, 5)),
    "expand": (lambda: Fn(lambda s, x: torch.cat([s.w.expand(len(x), -1, -1), x], 1), w=(1, 1, 5)), (B, 6, 5)),
    "slicing, .T, .to": (lambda: Fn(lambda s, x: x @ s.w[:, :5].T.to(x.dtype), w=(3, 7)), (B, 6, 5)),
    ".to(x), .type_as(x)": (lambda: Fn(lambda s, x: F.linear(x, s.w.to(x), s.v.type_as(x)), w=(3, 5), v=(3,)), (B, 6, 5)),
    "x.to(w)": (lambda: Fn(lambda s, x: F.linear(x.to(s.w), s.w), w=(3, 5)), (B, 5)),
    "weight norm": (lambda: parametrizations.weight_norm(linear()), (B, 6, 5)),
    "LoRA": (lambda: Fn(lambda s, x: s.l(x) + x @ s.a @ s.b, l=frozen(linear(), "weight"), a=(5, 2), b=(2, 3)), (B, 6, 5)),
    "conv, then permute": (
        lambda: Fn(lambda s, x: s.l(s.c(x).permute(0, 2, 3, 1)), c=nn.Conv2d(3, 4, 3), l=linear(4, 2)), (B, 3, 6, 5),
    ),
    "transposed conv": (lambda: nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, groups=2), (B, 2, 4, 4)),
    "batch norm in eval": (lambda: running(nn.BatchNorm1d(5)), (B, 5)),
    # §4
    "channels_last": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.GELU(), nn.Conv2d(3, 2, 2)).to(memory_format=torch.channels_last),
        lambda: data(B, 2, 6, 6).to(memory_format=torch.channels_last),
    ),
    "permuted conv": (lambda: Fn(lambda s, x: s.c(x.permute(0, 3, 1, 2)), c=nn.Conv2d(3, 4, 3)), (B, 6, 5, 3)),
    "grouped conv": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), (B, 4, 5, 5)),
    "depthwise conv": (lambda: nn.Conv2d(4, 8, 3, groups=4), (B, 4, 5, 5)),
    **{
        f"padding_mode {mode}": (lambda mode=mode: nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode), (B, 2, 5, 6))
        for mode in ["circular", "reflect", "replicate"]
    },
    "EmbeddingBag with repeated ids": (lambda: nn.EmbeddingBag(3, 2, mode="sum"), ids(3, B, 9)),
    "EmbeddingBag max": (lambda: nn.EmbeddingBag(7, 2, mode="max"), ids(7, B, 5)),
    "weight also used functionally": (lambda: Fn(lambda s, x: s.l(x) + F.linear(x.tanh(), s.l.weight), l=linear()), (B, 6, 5)),
    "tied layers": (lambda: tied(Fn(lambda s, x: s.b(s.a(x).tanh()), **two()), "b.weight", "a.weight"), (B, 6, 5)),
    "tied embedding and head": (
        lambda: Fn(lambda s, i: F.linear(s.l(s.e(i)).tanh(), s.e.weight), e=nn.Embedding(7, 3), l=linear(3, 3)), ids(7, B, 5),
    ),
    "position ids [1, T]": (
        lambda: Fn(lambda s, i: s.e(i) + s.p(torch.arange(i.shape[1]).unsqueeze(0)), e=nn.Embedding(7, 3), p=nn.Embedding(9, 3)),
        ids(7, B, 5),
    ),
    "4-D linear": (linear, (B, 2, 3, 5)),
    "in-place ReLU and residual": (
        lambda: Fn(residual, a=nn.Conv1d(4, 4, 3, padding=1), n=nn.GroupNorm(2, 4), b=nn.Conv1d(4, 4, 1)), (B, 4, 6),
    ),
    "LayerNorm without bias": (lambda: nn.LayerNorm(5, bias=False), (B, 6, 5)),
    "unused parameter": (lambda: Fn(lambda s, x: s.a(x), **two()), (B, 5)),
    "LSTM": (lambda: Fn(lambda s, x: s.r(x)[0], r=nn.LSTM(5, 3, batch_first=True)), (B, 6, 5)),
    "MultiheadAttention, T == B": (
        lambda: Fn(lambda s, x: s.m(x, x, x)[0], m=nn.MultiheadAttention(4, 2, batch_first=True)), (B, B, 4),
    ),
    # whatever the module does with its parameters
    "metadata in forward": (
        lambda: Fn(lambda s, x: x.view(-1, *s.w.size()) * s.w * s.w.ndim + len(f"{s.w}") * isinstance(s.w, nn.Parameter), w=(6, 5)),
        (B, 6, 5),
    ),
    "one row of the batch at a time": (lambda: Fn(lambda s, x: torch.stack([s.l(row) for row in x]), l=linear()), (B, 5)),
    "recursion": (lambda: Fn(lambda s, x, d=2: s.a(x) if d == 0 else s(s.a(x).tanh(), d - 1), a=linear(5, 5)), (B, 5)),
    # changes in place
    "row of a weight zeroed": (lambda: Fn(lambda s, x: x @ zeroed(s.w), w=(5, 3)), (B, 5)),
    "row of a weight from another": (lambda: Fn(lambda s, x: x @ with_row(s.w, s.v), w=(5, 3), v=(3,)), (B, 5)),
    "sibling transposed in place": (lambda: Fn(lambda s, x: (s.a(x), (x * 1).t_())[0], a=linear()), (B, B + 1)),
    # layouts that look like others
    "view_as of another rank": (lambda: Fn(lambda s, x: s.l(x.view_as(torch.empty(2, 2, 5)[: len(x)])), l=linear()), (2, 10)),
    "numpy's axis=": (lambda: Fn(lambda s, x: s.l(torch.stack([x, 2 * x], axis=1)), l=linear()), (2, 5)),
    "square view (B, T) → (T, B)": (lambda: Fn(lambda s, x: s.l(x.transpose(0, 1)).transpose(0, 1), l=linear()), (B, B, 5)),
    "weight with a row a sample": (
        lambda: Fn(lambda s, x: torch.einsum("bti,bi->bti", x, s.w.repeat(len(x), 1)), w=(1, 5)), (B, 6, 5),
    ),
    "first rows of another layout": (
        lambda: Fn(lambda s, x: s.l(x.permute(1, 0, 2).reshape(-1, 5)).view(6, -1, 3).transpose(0, 1), l=linear()), (B, 6, 5),
    ),
}  # fmt: skip


def zeroed(w: Tensor) -> Tensor:
    w = w.clone()
    w[0] = 0
    w[1].zero_()
    return w


def with_row(w: Tensor, row: Tensor) -> Tensor:
    w = w * 1
    w[0] = row
    return w


def batch_of(spec) -> Tensor:
    return spec() if callable(spec) else data(*spec)


def built(model: nn.Module) -> nn.Module:
    return model if any(p.is_complex() for p in model.parameters()) else model.double()


@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    make, batch = RIGHT[name]
    assert_right(built(make()), batch_of(batch))


@pytest.mark.parametrize(
    "make", [linear, lambda: nn.LayerNorm(5), lambda: nn.MultiheadAttention(5, 1)], ids=["linear", "norm", "mha"]
)
def test_batch_second_with_as_many_positions(make):
    model = make().double()

    def loss_fn(model, x):
        out = model(x, x, x)[0] if isinstance(model, nn.MultiheadAttention) else model(x)
        return (out + 0.3 * out.square()).sum((0, 2))

    assert_right(model, data(B, B, 5), loss_fn=loss_fn, batch_dim=1)


def test_shared_buffer_with_a_row_a_sample():
    model = Fn(lambda s, x: s.l(x) + s.l(s.bank).sum(0), l=linear()).double()
    model.register_buffer("bank", data(B, 5))
    assert_right(model, data(B, 5))


def test_parameter_reached_through_a_closure():
    scale, x = nn.Parameter(data(5)), data(B, 5)
    model = Fn(lambda s, x: s.l(x * scale), l=linear()).double()
    model.scale = scale
    truth = torch.stack([torch.autograd.grad(rows(model, row).sum(), scale)[0] for row in x.split(1)])
    assert relative_error(run_capture(model, rows, x)["scale"].materialize(), truth) < TOLERANCE


def test_keyword_calls():
    model = Fn(lambda s, x, *, y: F.linear(input=s.a(input=x), weight=s.b.weight, bias=s.b.bias) + y, **two()).double()
    assert_right(model, data(B, 5), data(B, 5), loss_fn=lambda model, x, y: rows(lambda: model(x=x, y=y)))


def test_submodule_under_two_names_is_left_whole():
    model = Fn(lambda s, x: s.b(s.a(x).tanh()), a=linear(5, 5)).double()
    model.b = model.a
    assert_right(model, data(B, 5))
    assert model.b is model.a
    assert isinstance(model.a.weight, nn.Parameter) and len(list(model.parameters())) == 2


def test_hooks_on_modules_run_and_change_nothing():
    model, seen = nn.Sequential(linear(5, 5), nn.Tanh(), linear()).double(), []
    model[0].register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    model[0].register_forward_hook(lambda m, args, out: out * 2)
    model[2].register_full_backward_hook(lambda m, gx, gy: seen.append(gy[0].shape))
    model[2].register_full_backward_pre_hook(lambda m, gy: None)
    truth, x = None, data(B, 5)
    truth = oracle(model, rows, x)
    grads = run_capture(model, rows, x)
    assert (B, 3) in seen
    for name, G in truth.items():
        assert relative_error(grads[name].materialize(), G) < TOLERANCE


# --- samples that mix, and uses that are not seen -----------------------------------------------------


def written(change):
    """A forward that changes a copy of its input in place before the layer."""

    def forward(s, x):
        y = x * 1
        change(y, x)
        return s.l(y)

    return forward


def out_into_a_view(s, x):
    buffer = torch.zeros(len(x), 5, dtype=x.dtype)
    torch.sub(x, x.mean(0), out=buffer[:])
    return s.l(buffer) + s.k(x)


MIX = "mix|sum over samples|samples"
UNSEEN = "ordinary gradient|not seen|not known|does not know|cannot follow"
REFUSED = {
    "batch norm": (lambda: nn.Sequential(linear(), nn.BatchNorm1d(3)), MIX),
    "batch norm without affine": (lambda: nn.Sequential(linear(), nn.BatchNorm1d(3, affine=False), linear(3, 2)), MIX),
    "batch norm of images": (lambda: Fn(lambda s, x: s.n(s.c(x[:, None, None])), c=nn.Conv2d(1, 2, 1), n=nn.BatchNorm2d(2)), MIX),
    "x - x.mean(0)": (lambda: Fn(lambda s, x: s.l(x - x.mean(0)), l=linear()), MIX),
    "x -= x.mean(0)": (lambda: Fn(written(lambda y, x: y.sub_(y.mean(0))), l=linear()), MIX),
    "a column minus its mean": (lambda: Fn(written(lambda y, x: y[:, 0].sub_(y[:, 0].mean())), l=linear()), f"{MIX}|{UNSEEN}"),
    "written column": (lambda: Fn(written(lambda y, x: y.__setitem__((..., 0), x.mean())), l=linear()), f"{MIX}|{UNSEEN}"),
    "alias changed": (lambda: Fn(written(lambda y, x: y.view(-1, 5).sub_(y.mean(0))), l=linear()), f"{MIX}|{UNSEEN}"),
    "out= into a view": (lambda: Fn(out_into_a_view, l=linear(), k=linear()), f"{MIX}|{UNSEEN}"),
    "softmax over the batch": (lambda: Fn(lambda s, x: s.l(x.softmax(0)), l=linear()), MIX),
    "softmax over the batch by axis=": (lambda: Fn(lambda s, x: s.l(x.softmax(axis=0)), l=linear()), MIX),
    "rolled as one long row": (lambda: Fn(lambda s, x: s.l(x.roll(1)), l=linear()), f"{MIX}|{UNSEEN}"),
    "neighbours added": (lambda: Fn(lambda s, x: s.l(x) * s.l(x.flip(1, 0)), l=linear()), MIX),
    "attention over the batch": (lambda: Fn(lambda s, x: (s.a(x) @ s.b(x).T).softmax(-1) @ s.a(x), **two()), MIX),
    "batch as features": (lambda: Fn(lambda s, x: s.l(x.T), l=linear(B, 3)), MIX),
    "data written into a derived weight": (lambda: Fn(lambda s, x: multiplied(s.w.repeat(len(x), 1), x) * x, w=(5,)), UNSEEN),
}  # fmt: skip


def multiplied(h: Tensor, x: Tensor) -> Tensor:
    h.mul_(x)
    return h


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    make, words = REFUSED[name]
    refused(make().double(), data(B, 5), words=words)


ROW = torch.ones(1, 5, dtype=torch.float64)
EITHER = {
    "null row, added to all": lambda: Fn(lambda s, x: joined(s.l(torch.cat([x, ROW])), torch.add), l=linear(5, 5)),
    "learned row, multiplied with all": lambda: Fn(lambda s, x: joined(s.l(torch.cat([x, s.n])), torch.mul), l=linear(5, 5), n=(1, 5)),
    "null row and a shift": lambda: Fn(lambda s, x: joined(torch.cat([x, ROW]) + s.p, torch.mul), p=(5,)),
}  # fmt: skip


def joined(h: Tensor, op) -> Tensor:
    return op(h[:-1], h[-1:])


@pytest.mark.parametrize("name", EITHER)
def test_right_or_refused(name):
    right_or_refused(EITHER[name]().double(), data(B, 5), words=f"{MIX}|{UNSEEN}|sample")


def test_batch_norm_on_data_that_was_not_passed_is_refused():
    model = Fn(lambda s, mask: s.n(s.l(s.held)) * mask, l=linear(), n=nn.BatchNorm1d(3)).double()
    model.held = data(B, 5)
    refused(model, torch.ones(B, 3).double(), words="not known to hold samples|mix|samples")


def test_method_that_transposes_first_does_not_take_time_for_samples():
    model, x = Fn(lambda s, x: x, l=linear()).double(), data(B, 6, 5)
    model.step = lambda x: model.l(x.transpose(0, 1)).square().sum()
    with pytest.raises(SamplewiseError, match="batch_size|mark"), sw.capture(model):
        model.step(x).backward()


# --- ops that nobody described ------------------------------------------------------------------------------------------------


@torch.library.custom_op("samplewise_tests::scaled_by_the_largest", mutates_args=())
def scaled_by_the_largest(x: Tensor) -> Tensor:
    return x / x.abs().max()


@torch.library.custom_op("samplewise_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


scaled_by_the_largest.register_autograd(
    lambda ctx, g: g / ctx.largest, setup_context=lambda ctx, inputs, output: setattr(ctx, "largest", inputs[0].abs().max())
)
doubled.register_autograd(lambda ctx, g: 2 * g)


@pytest.mark.parametrize("largest", range(8))
def test_custom_op_that_scales_by_the_largest_is_refused(largest):
    model, x = Fn(lambda s, x: s.l(scaled_by_the_largest(x)), l=linear(9 + largest)).double(), data(8, 9 + largest)
    x[largest] *= 10
    refused(model, x, words=f"{MIX}|{UNSEEN}")


def test_custom_op_that_keeps_samples_apart_is_right():
    assert_right(Fn(lambda s, x: s.b(doubled(s.a(x))), **two()).double(), data(B, 5))


def test_what_an_op_does_to_one_batch_is_not_believed_of_another():
    model = Fn(lambda s, x: s.l(x.renorm(2, 1, 10.0)), l=linear()).double()
    assert_right(model, 0.1 * data(B, 5))  # no column is longer than 10: renorm keeps samples apart
    refused(model, 100 * data(B, 5), words=f"{MIX}|{UNSEEN}")


def test_a_batch_of_equal_rows_teaches_nothing():
    model = Fn(lambda s, x: torch.cdist(x, s.w), w=(3, 5)).double()
    right_or_refused(model, torch.ones(B, 5).double(), words=f"{MIX}|{UNSEEN}")
    assert_right(model, data(B, 5))


LEAVES = {
    "float": lambda x: x / float(x.abs().max()),
    "item": lambda x: x - x.mean().item(),
    "tolist": lambda x: x - torch.tensor(x.mean(0).tolist(), dtype=x.dtype),
    "numpy": lambda x: x - torch.from_numpy(x.detach().numpy().mean(0)),
    ".data": lambda x: centred_by_data(x * 1),
    "if": lambda x: x if x.sum() > x[0].sum() * len(x) else 2 * x,
}


def centred_by_data(x: Tensor) -> Tensor:
    x.data.sub_(x.data.mean(0))
    return x


@pytest.mark.parametrize("name", LEAVES)
def test_statistics_of_the_batch_that_leave_torch_are_refused(name):
    model, x = Fn(lambda s, x: s.l(LEAVES[name](x)), l=linear()).double(), data(B, 5)
    x[0] -= 1  # so that the branch of "if" differs from that of one sample alone
    refused(model, x, words=f"{MIX}|{UNSEEN}|alone")


# --- losses -----------------------------------------------------------------------------------------------------------------


class ContrastiveInNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        a = z.detach().numpy()
        return torch.tensor((a @ a.T).sum())

    @staticmethod
    def backward(ctx, g):
        (z,) = ctx.saved_tensors
        return 2 * g * z.sum(0).expand_as(z)


ONE = torch.ones((), dtype=torch.float64)
COLUMNS = torch.stack([torch.arange(B), torch.arange(B).roll(1), torch.arange(B)], 1)
"""Where elements [B, 3] go: the first column to its own rows, the second to those of others."""
MIXING_LOSSES = {
    "contrastive": lambda z: F.cross_entropy(z @ z.T, torch.arange(B), reduction="sum"),
    "cdist": lambda z: torch.cdist(z, z).sum(),
    "pdist": lambda z: torch.pdist(z).sum(),
    "cosine similarity of pairs": lambda z: F.cosine_similarity(z[:, None], z[None], dim=-1).sum(),
    "tensordot": lambda z: torch.tensordot(z, z, dims=([1], [1])).square().sum(),
    "inner": lambda z: torch.inner(z, z).square().sum(),
    "covariance": lambda z: torch.cov(z.T).sum(),
    "matrix norm": lambda z: torch.linalg.matrix_norm(z),
    "singular values": lambda z: torch.linalg.svdvals(z).sum(),
    "distance of halves": lambda z: torch.dist(z[:2], z[2:]),
    "dot of halves": lambda z: torch.dot(z[:2].flatten(), z[2:].flatten()),
    "quantile": lambda z: z.quantile(0.5, dim=0).sum(),
    "variance": lambda z: z.var(0).sum(),
    "maximum": lambda z: z.max(),
    "logsumexp": lambda z: z.logsumexp((0, 1)),
    "root of the sum": lambda z: z.square().sum().sqrt(),
    "normalised by the batch": lambda z: (z / z.sum()).square().sum(),
    "constant over the sum": lambda z: ONE / z.square().sum(),
    "constant divided by sums": lambda z: torch.div(torch.ones(3).double(), z.square().sum(0)).sum(),
    "softmax by axis=": lambda z: z.softmax(axis=0).square().sum(),
    "cumulative by axis=": lambda z: z.cumsum(axis=0).square().sum(),
    "triplets from the batch": lambda z: F.triplet_margin_loss(z, z.flip(0), z.roll(1, 0), reduction="sum"),
    "ranking of neighbours": lambda z: F.margin_ranking_loss(z[:, 0], z[:, 1].flip(0), torch.ones(B).double(), margin=9.0),
    "target of another sample": lambda z: F.mse_loss(z, z.flip(0)),
    "divergence from another sample": lambda z: F.kl_div(z.log_softmax(1), z.flip(0).softmax(1), reduction="sum"),
    "classes of another sample": lambda z: F.cross_entropy(z, z.flip(0).softmax(1), reduction="sum"),
    "each sample by each": lambda z: F.conv1d(z[:, None], z[:, None, :2]).square().sum(),
    "flipped both ways": lambda z: (z * z.flip(1, 0)).sum(),
    "rolled as one long row": lambda z: (z * z.roll(1)).sum(),
    "by code that is not seen": ContrastiveInNumpy.apply,
    "hinge of the mean": lambda z: F.relu(z.mean()),
    "columns scattered to other samples": lambda z: torch.zeros_like(z).scatter_add(0, COLUMNS, z).sum(1).square().sum(),
    "rows scattered to one": lambda z: torch.zeros_like(z).scatter_add(0, torch.zeros_like(COLUMNS), z).square().sum(),
    "balanced by norms of gradients": lambda z: (z * gradient(z.sin().sum(), z).norm()).sum(),
    "balanced by .grad": lambda z: (z * backpropagated(z).norm()).sum(),
    "by gradients of what mixes": lambda z: (z * gradient(z.sum().square(), z)).sum(),
    "by gradients of a constant": lambda z: (z * gradient((z * (one := torch.ones(()).double().requires_grad_())).sum(), one)).sum(),
    "product of sums": lambda z: z.sum() * z.mean(),
    "einsum over pairs": lambda z: torch.einsum("bi,ci->", z, z),
}  # fmt: skip


def gradient(total, of):
    return torch.autograd.grad(total, of, retain_graph=True)[0]


def backpropagated(z):
    z.retain_grad()
    z.sin().sum().backward(inputs=[z], retain_graph=True)
    return z.grad


@pytest.mark.parametrize("name", MIXING_LOSSES)
def test_losses_that_mix_samples_are_refused(name):
    model = nn.Sequential(linear(5, 4), nn.Tanh(), linear(4, 3)).double()
    refused(model, data(B, 5), words="mix|not known", loss_fn=lambda model, x: MIXING_LOSSES[name](model(x)))


MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 1, 0]]).bool()
CLASSES = torch.tensor([[0, 1, 2], [2, 1, 0], [1, 1, 1], [0, 0, 2]])


def token_means(model, x, y, mask):
    losses = F.cross_entropy(model(x).transpose(1, 2), y, reduction="none")
    return (losses * mask).sum(1) / mask.sum(1)


UNEVEN = {
    "ignore_index": lambda z: F.cross_entropy(z.flatten(0, 1), CLASSES.masked_fill(~MASK, -100).flatten()),
    "ignore_index, 4-D": lambda z: F.cross_entropy(z.transpose(1, 2), CLASSES.masked_fill(~MASK, -100)),
    "label smoothing": lambda z: F.cross_entropy(z[MASK], CLASSES[MASK], label_smoothing=0.1),
    "masked rows": lambda z: F.cross_entropy(z[MASK], CLASSES[MASK]),
    "masked nll": lambda z: F.nll_loss(z.log_softmax(-1)[MASK], CLASSES[MASK]),
    "masked probabilities": lambda z: F.cross_entropy(z[MASK], F.one_hot(CLASSES, 3).double()[MASK]),
    "masked squares": lambda z: F.mse_loss(z[MASK], torch.zeros(7, 3).double()),
    "masked batchmean": lambda z: F.kl_div(
        z[MASK].log_softmax(-1), torch.full((7, 3), 1 / 3).double(), reduction="batchmean"
    ),
    "masked mean": lambda z: z[MASK].mean(),
    "class weights": lambda z: F.cross_entropy(z.transpose(1, 2), CLASSES, weight=torch.tensor([1.0, 2.0, 3.0]).double()),
    "half of the batch": lambda z: z[:2].mean(),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_means_over_unequal_samples_are_refused(name):
    words = "does not weigh all samples alike"
    refused(linear().double(), data(B, 3, 5), words=words, loss_fn=lambda m, x: UNEVEN[name](m(x)), loss_reduction="mean")


def test_token_means_as_losses():
    assert_right(linear().double(), data(B, 3, 5), CLASSES, MASK, loss_fn=token_means)


LOSSES = {
    "gather (DQN)": lambda z, y: z.gather(1, y[:, None]).square().sum(),
    "cross entropy": lambda z, y: F.cross_entropy(z, y, reduction="sum"),
    "nll": lambda z, y: F.nll_loss(z.log_softmax(1), y, reduction="sum"),
    "a python sum": lambda z, y: sum(F.cross_entropy(z[i], y[i]) for i in range(len(z))),
    "cosine": lambda z, y: F.cosine_embedding_loss(z, z.detach().flip(1), torch.ones(len(z)).double(), reduction="sum"),
    "multi margin": lambda z, y: F.multi_margin_loss(z, y, reduction="sum"),
    "stack": lambda z, y: torch.stack([z.square().sum(), F.cross_entropy(z, y, reduction="sum")]).sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_ordinary_losses_are_right(name):
    model, x, y = linear().double(), data(B, 5), torch.tensor([0, 2, 1, 1])
    with sw.capture(model) as grads:
        LOSSES[name](model(x), y).backward()
    truth = oracle(model, lambda model, x, y: LOSSES[name](model(x), y).reshape(1), x, y)
    for n, G in truth.items():
        assert relative_error(grads[n].materialize(), G) < TOLERANCE


# --- autograd's own safety ----------------------------------------------------------------------------------------------------

MODELS = {
    "linear": (linear, (B, 5)),
    "conv": (lambda: nn.Conv1d(2, 3, 2), (B, 2, 5)),
    "layer norm": (lambda: nn.LayerNorm(5), (B, 5)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (B, 4, 3)),
    "instance norm": (lambda: nn.InstanceNorm1d(4, affine=True), (B, 4, 3)),
    "embedding": (lambda: nn.Embedding(5, 3), ids(5, B, 4)),
    "arithmetic": (lambda: Fn(lambda s, x: x * s.w, w=(5,)), (B, 5)),
    "any op": (lambda: Fn(lambda s, x: torch.einsum("bi,ij,jo->bo", x, s.u, s.v), u=(5, 2), v=(2, 3)), (B, 5)),
}


@pytest.mark.parametrize("name", MODELS)
def test_input_changed_before_backward_raises(name):
    make, batch = MODELS[name]
    model, x = make().double(), batch_of(batch)
    with sw.capture(model) as grads, pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses = rows(model, x)
        x.zero_()
        grads.backward(losses)


@pytest.mark.parametrize("name", ["linear", "conv", "embedding"])
def test_input_changed_after_backward_raises_at_the_query(name):
    make, batch = MODELS[name]
    model, x = make().double(), batch_of(batch)
    grads = run_capture(model, rows, x, plan={"*": "direct"})  # a gradient that is built does not read x again
    x.zero_()
    with pytest.raises(SamplewiseError, match="changed in place after backward"):
        grads.norms()


DERIVED = {
    "quotient": lambda: Fn(lambda s, x: F.linear(x, s.w / s.w.norm()), w=(3, 5)),
    "product": lambda: Fn(lambda s, x: F.linear(x, s.v @ s.w), v=(3, 2), w=(2, 5)),
    "power": lambda: Fn(lambda s, x: x * s.w**2, w=(5,)),
    "conv": lambda: Fn(lambda s, x: F.conv1d(x[:, None], s.w / s.w.norm()), w=(2, 1, 3)),
}


@pytest.mark.parametrize("name", DERIVED)
@pytest.mark.parametrize("when", ["before backward", "before the query"])
def test_weight_behind_a_derived_one_changed_in_place_raises(name, when):
    model, x = DERIVED[name]().double(), data(B, 5)
    with pytest.raises(RuntimeError, match="in ?place"):
        with sw.capture(model) as grads:
            losses = rows(model, x)
            if when == "before backward":
                with torch.no_grad():
                    model.w.mul_(2)
            grads.backward(losses)
        if when == "before the query":
            with torch.no_grad():
                model.w.mul_(2)
        grads.norms()


def test_weight_behind_a_kronecker_product_changed_in_place_raises():
    """torch keeps its factors under versions of their own, so that it does not notice; changed before backward, nobody does."""
    model, x = Fn(lambda s, x: F.linear(x, torch.kron(s.w.T, s.v)), w=(1, 3), v=(1, 5)).double(), data(B, 5)
    for name in ("w", "v"):
        with sw.capture(model) as grads:
            grads.backward(rows(model, x))
        grads.norms()
        with torch.no_grad():
            getattr(model, name).mul_(2)
        for asked in ("w", "v"):
            with pytest.raises(SamplewiseError, match="in place"):
                grads[asked].norms()


def test_weight_changed_before_backward_raises():
    model, x = nn.Sequential(linear(5, 4), nn.Tanh(), linear(4, 3)).double(), data(B, 5)
    with sw.capture(model) as grads, pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses = rows(model, x)
        with torch.no_grad():
            model[2].weight.mul_(2)
        grads.backward(losses)


@pytest.mark.parametrize("name", MODELS)
def test_second_backward_raises(name):
    make, batch = MODELS[name]
    model = make().double()
    with sw.capture(model):
        loss = rows(model, batch_of(batch)).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_queries_of_a_model_that_has_changed_its_dtype_since():
    """They are of the numbers that backward was run on, and come like the parameters."""
    model, x = parametrizations.weight_norm(linear()).double(), data(B, 5)
    truth, grads = oracle(model, rows, x), run_capture(model, rows, x)
    model.float()
    norms = norms_of(truth)
    assert relative_error(grads.norms(), norms) < 1e-6
    for name, G in grads.clipped_sum(max_norm=1.0).items():
        assert G.dtype == torch.float32
        assert relative_error(G.double(), torch.tensordot((1 / norms).clamp(max=1), truth[name], 1)) < 1e-6


def test_gradient_of_the_input_alone_fills_nothing():
    model, x = nn.Sequential(linear(5, 4), nn.Tanh(), linear(4, 3)).double(), data(B, 5).requires_grad_()
    with sw.capture(model) as grads:
        (gx,) = torch.autograd.grad(rows(model, x).sum(), x)
    assert gx.shape == x.shape and len(grads) == 0
    with pytest.raises(SamplewiseError, match="no gradient was captured"):
        grads.norms()


PERTURBATIONS = {
    "like the batch": lambda x: torch.zeros_like(x, requires_grad=True),
    "of its shape": lambda x: torch.zeros(x.shape, dtype=x.dtype, requires_grad=True),
    "made of it": lambda x: (x.detach().clone() * 0).requires_grad_(),
    "a parameter": lambda x: nn.Parameter(torch.zeros_like(x)),
}


def perturbed(make, normalised):
    """Adversarial training: two steps of each sample's own perturbation, then the loss there."""

    def losses(model, x):
        delta = make(x)
        for _ in range(2):
            (g,) = torch.autograd.grad(rows(model, x + delta).mean(), delta)
            delta = (delta.detach() + 0.1 * (g / g.norm() if normalised else g.sign())).requires_grad_()
        return rows(model, x + delta.detach())

    return losses


@pytest.mark.parametrize("name", PERTURBATIONS)
def test_perturbations_of_each_sample(name):
    model = nn.Sequential(linear(5, 4), nn.Tanh(), linear(4, 3)).double()
    for x in (data(B, 5), data(1, 5)):
        assert_right(model, x, loss_fn=perturbed(PERTURBATIONS[name], normalised=False))
    with sw.capture(model) as grads, pytest.raises(SamplewiseError, match="mix"):
        grads.backward(perturbed(PERTURBATIONS[name], normalised=True)(model, data(B, 5)))


LABELS = torch.tensor([2, 0, 1, 3])

TABLES = {
    "looked up by labels": lambda f, x, table: f(x + table[LABELS]),
    "upside down": lambda f, x, table: f(x + table.flip(0)),
    "both ways": lambda f, x, table: f(x + table + table.flip(0)),
    "a product of all rows": lambda f, x, table: f(x @ table.T @ table),
    "by its mean": lambda f, x, table: f(x + table - table.mean(0)),
    "turned": lambda f, x, table: f(x + table.T),
    "turned to the batch": lambda f, x, table: f((x.T + table).T),
    "beside the model": lambda f, x, table: f(x + table) + table.flip(0).square().sum(1),
}


@pytest.mark.parametrize("is_marked", [False, True], ids=["outside", "marked"])
@pytest.mark.parametrize("name", TABLES)
def test_gradient_of_a_table_with_a_row_a_sample_is_not_of_the_samples(name, is_marked):
    """It lies row by row where the table is met so, and nowhere else; whether the batch is marked yet or not."""
    model, x = nn.Sequential(linear(B, 4), nn.Tanh(), linear(4, 3)).double(), data(B, B)
    table = data(B, B).requires_grad_()
    with sw.capture(model) as grads, pytest.raises(SamplewiseError, match="mix|mark|belongs to no sample"):
        if is_marked:
            grads.mark(x)
        (g,) = torch.autograd.grad(TABLES[name](lambda x: rows(model, x), x, table).sum(), table)
        grads.backward(rows(model, x + g))
        grads.norms()


def test_gradient_of_what_was_turned_before_the_model_saw_it():
    model, x = linear(5, 3).double(), data(B, 5)
    delta = torch.zeros_like(x, requires_grad=True)
    u = x + delta
    v = u.flip(0)
    with sw.capture(model) as grads, pytest.raises(UnattributedError, match=r"grads\.mark"):
        (g,) = torch.autograd.grad((rows(model, u) + rows(model, v)).sum(), delta)
        grads.backward(rows(model, x + g))


PERTURBED = {
    "clamped": lambda x, delta: (x + delta).clamp(-1, 1),
    "scaled": lambda x, delta: x + 0.1 * delta.tanh(),
    "in place": lambda x, delta: (x + delta).clamp_(-1, 1),
    "twice": lambda x, delta: torch.where(x > 0, x + delta, x * delta),
}


@pytest.mark.parametrize("is_marked", [False, True], ids=["outside", "marked"])
@pytest.mark.parametrize("name", PERTURBED)
def test_perturbations_met_element_by_element(name, is_marked):
    model = nn.Sequential(linear(5, 4), nn.Tanh(), linear(4, 3)).double()

    def losses(model, x):
        delta = torch.full_like(x, 0.1).requires_grad_()
        (g,) = torch.autograd.grad(rows(model, PERTURBED[name](x, delta)).sum(), delta)
        return rows(model, x + g.tanh())

    x = data(B, 5)
    if is_marked:
        truth = oracle(model, losses, x)
        with sw.capture(model) as grads:
            grads.backward(losses(model, grads.mark(x)))
        assert relative_error(grads.norms(), norms_of(truth)) < TOLERANCE
    else:
        assert_right(model, x, loss_fn=losses)


def test_gradients_of_gradients_are_refused():
    model, x = linear().double(), data(B, 5).requires_grad_()
    with sw.capture(model), pytest.raises(SamplewiseError, match="create_graph|not seen"):
        losses = rows(model, x)
        (gx,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
        (losses + gx.square().sum(1)).sum().backward()


@pytest.mark.parametrize("sizes", [(4, 4), (4, 5)])
def test_two_micro_batches_in_one_capture_are_refused(sizes):
    model = linear().double()
    with sw.capture(model), pytest.raises(UnattributedError, match="One capture holds one batch"):
        for size in sizes:
            rows(model, data(size, 5)).sum().backward()


def test_two_forwards_of_one_batch_are_right():
    model = linear(5, 5).double()
    assert_right(model, data(B, 5), data(B, 5), loss_fn=lambda model, x, y: (model(x) - model(y)).square().sum(1))


@pytest.mark.parametrize("order", [("whole", "part"), ("part", "whole"), ("whole", "whole")])
def test_nested_captures_of_one_parameter_are_refused(order):
    model, x = nn.Sequential(linear(5, 4), linear(4, 3)).double(), data(B, 5)
    of = {"whole": model, "part": model[1]}
    with pytest.raises(SamplewiseError, match="capture"), sw.capture(of[order[0]]), sw.capture(of[order[1]]):
        rows(model, x).sum().backward()


def test_nested_captures_of_different_parameters_are_right():
    model, x = nn.Sequential(linear(5, 4), linear(4, 3)).double(), data(B, 5)
    with sw.capture(model, params=["0.*"]) as first, sw.capture(model, params=["1.*"]) as second:
        rows(model, x).sum().backward()
    truth = oracle(model, rows, x)
    for name, G in truth.items():
        assert relative_error((first if name in first else second)[name].materialize(), G) < TOLERANCE


def test_two_threads_do_not_see_each_other():
    model, found, start = nn.Sequential(linear(5, 4), nn.Tanh(), linear(4, 3)).double(), {}, threading.Barrier(2)

    def run(size):
        x = data(size, 5)
        start.wait()
        try:
            for _ in range(5):
                grads = run_capture(model, rows, x)
            found[size] = relative_error(grads.norms(), norms_of(oracle(model, rows, x)))
        except Exception as error:
            found[size] = error

    threads = [threading.Thread(target=run, args=(size,)) for size in (3, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {size: isinstance(error, float) and error < TOLERANCE for size, error in found.items()} == {3: True, 6: True}, (
        found
    )


class Boom(RuntimeError):
    pass


def boom(*_):
    raise Boom


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_nothing_is_left_when_forward_or_backward_raises(where):
    model = nn.Sequential(linear(5, 4), parametrizations.weight_norm(linear(4, 3))).double()
    before = {n: (id(p), dict(vars(p))) for n, p in model.named_parameters()}
    with pytest.raises(Boom), sw.capture(model) as grads:
        losses = rows(model, data(B, 5))
        boom() if where == "forward" else losses.register_hook(boom)
        grads.backward(losses)
    assert {n: (id(p), dict(vars(p))) for n, p in model.named_parameters()} == before
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    rows(model, data(B + 1, 5)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


# --- numbers --------------------------------------------------------------------------------------------------------------------

ISOLATED = {
    "linear": (linear, (B, 6, 5)),
    "linear by Gram": (lambda: linear(5, 30), (B, 2, 5)),
    "conv": (lambda: nn.Conv1d(6, 2, 2), (B, 6, 5)),
    "norms": (lambda: nn.Sequential(nn.GroupNorm(2, 6), nn.InstanceNorm1d(6, affine=True), nn.LayerNorm(5)), (B, 6, 5)),
    "arithmetic": (lambda: Fn(lambda s, x: x * s.w + s.v, w=(5,), v=(6, 1)), (B, 6, 5)),
    "derived": (lambda: parametrizations.weight_norm(linear()), (B, 6, 5)),
    "tied": (lambda: Fn(lambda s, x: s.l(s.l(x).tanh()), l=linear(5, 5)), (B, 6, 5)),
    "folded (T·B, D)": (
        lambda: Fn(lambda s, x: s.l(x.transpose(0, 1).reshape(-1, 5)).view(6, -1, 3).transpose(0, 1), l=linear()), (B, 6, 5),
    ),
    "any op": (lambda: Fn(lambda s, x: torch.einsum("bi,ij,jo->bo", x, s.u, s.v), u=(5, 2), v=(2, 3)), (B, 5)),
    "broadcast product": (lambda: Fn(lambda s, x: x @ s.w, w=(2, 5, 3)), (B, 1, 6, 5)),
}  # fmt: skip


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ISOLATED)
def test_a_bad_sample_does_not_spoil_the_others(name, bad):
    make, shape = ISOLATED[name]
    model, x = make().double(), data(*shape)
    others = [0, 1, 3]
    good = run_capture(model, rows, x[others])
    x[2].view(-1)[0] = bad
    grads = run_capture(copy.deepcopy(model), rows, x)  # a copy, so that this is a first use
    assert not grads.norms()[2].isfinite()
    assert relative_error(grads.norms()[others], good.norms()) < TOLERANCE
    w = torch.tensor([1.0, 2.0, 0.0, 3.0])
    for name in good:
        assert relative_error(grads[name].materialize()[others], good[name].materialize()) < TOLERANCE
        assert relative_error(grads.weighted_sum(w)[name], good.weighted_sum(w[others])[name]) < TOLERANCE
        assert relative_error(grads.clipped_sum(max_norm=0.5)[name], good.clipped_sum(max_norm=0.5)[name]) < TOLERANCE


def test_a_bad_sample_beside_a_weight_with_a_row_a_sample_is_refused():
    model, x = Fn(lambda s, x: torch.einsum("bti,bi->bti", x, s.w.repeat(len(x), 1)), w=(1, 5)).double(), data(B, 6, 5)
    x[2, 0, 0] = float("nan")
    with pytest.raises(SamplewiseError, match="Leave out samples that are not finite"):
        run_capture(model, rows, x)


BOUNDED = ["channels_last", "permuted conv", "grouped conv", "depthwise conv", "padding_mode circular", "tied layers",
           "tied embedding and head", "EmbeddingBag with repeated ids", "weight also used functionally", "LSTM"]  # fmt: skip


@pytest.mark.parametrize("name", BOUNDED)
def test_no_clipped_contribution_is_above_the_bound(name):
    make, batch = RIGHT[name]
    model, x = make().float(), batch_of(batch)
    x = x.float() if x.is_floating_point() else x
    grads = run_capture(model, rows, x)
    norms = grads.norms()
    bound = norms.min().item() / 3
    for b in range(B):
        alone = grads.weighted_sum(torch.zeros(B).index_fill(0, torch.tensor(b), bound / norms[b].item()))
        size = sum(G.double().square().sum() for G in alone.values()).sqrt().item()
        assert size == pytest.approx(bound, rel=1e-4)  # float32


@pytest.mark.parametrize("name", MODELS)
def test_batch_of_one(name):
    make, batch = MODELS[name]
    assert_right(make().double(), batch_of(batch)[:1])


@pytest.mark.parametrize("name", [name for name in MODELS if name != "instance norm"])  # torch itself refuses an empty one
def test_batch_of_none(name):
    make, batch = MODELS[name]
    model, x = make().double(), batch_of(batch)[:0]
    grads = run_capture(model, rows, x)
    assert grads.norms().shape == (0,)
    for name, p in model.named_parameters():
        assert grads[name].materialize().shape == (0, *p.shape)
        assert torch.equal(grads.clipped_sum(max_norm=1.0)[name], torch.zeros_like(p))


HALF = {
    "weight": (lambda: nn.Linear(4, 3), lambda T: torch.ones(2, T, 4), "weight", lambda T: T * 12**0.5),
    "bias": (lambda: nn.Linear(4, 3), lambda T: torch.ones(2, T, 4), "bias", lambda T: T * 3**0.5),
    "conv bias": (lambda: nn.Conv1d(1, 3, 1), lambda T: torch.ones(2, 1, T), "bias", lambda T: T * 3**0.5),
    "norm shift": (lambda: nn.LayerNorm(4), lambda T: torch.ones(2, T, 4), "bias", lambda T: T * 4**0.5),
    "arithmetic": (lambda: Fn(lambda s, x: x + s.w, w=(4,)), lambda T: torch.ones(2, T, 4), "w", lambda T: T * 4**0.5),
    "embedding": (lambda: nn.Embedding(3, 4), lambda T: torch.zeros(2, T, dtype=torch.long), "weight", lambda T: T * 4**0.5),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", HALF)
def test_norms_of_many_small_entries_do_not_saturate(name, dtype):
    make, batch, parameter, truth = HALF[name]
    T = 70_000  # above float16's largest number, and far above where bfloat16 stops counting
    model, x = make().to(dtype), batch(T)
    with sw.capture(model) as grads:
        model(x.to(dtype) if x.is_floating_point() else x).float().sum().backward()
    # every entry of every gradient is a count of T ones, exact in float32
    assert grads[parameter].norms().tolist() == pytest.approx([truth(T)] * 2, rel=1e-5)


@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(1, 1, bias=False), lambda: nn.Conv1d(1, 1, 1, bias=False)], ids=["linear", "conv"]
)
def test_small_coefficients_do_not_underflow_in_half_precision(make):
    model, x = make().half(), torch.full((2, 1, 1), 1000.0).half()
    with sw.capture(model) as grads:
        (model(x).float() * 1e-3).sum().backward()
    # 1e-6 · 1e-3 is below float16, 1e-6 · 1e-3 · 1000 is not; float16 keeps five bits of 2e-6
    assert grads.weighted_sum(torch.full((2,), 1e-6))["weight"].item() == pytest.approx(2e-6, rel=0.05)


def test_norms_of_positions_that_cancel():
    model, base = nn.Linear(200, 300, bias=False), torch.randn(B, 1, 200)
    x = torch.cat([base, base + 1e-4 * torch.randn(B, 1, 200)], 1)

    def loss_fn(model, x):
        y = model(x)
        return (y[:, 0] - y[:, 1]).sum(1)

    norms = run_capture(model, loss_fn, x).norms()
    assert norms.isfinite().all()
    # rounding of the inputs themselves: 1e-7 of |a| = 14 against a difference of 1e-4 · 14
    assert relative_error(norms, norms_of(oracle(model, loss_fn, x))) < 1e-2


def test_norms_of_tied_uses_that_cancel():
    c = torch.randn(64)

    def forward(s, i):
        looked_up = (s.e(i) * c.to(s.e.weight)).sum(-1)
        scored = F.linear(c.to(s.e.weight) + 0 * i.unsqueeze(-1), s.e.weight)
        return looked_up - (1 + 1e-3) * (scored * F.one_hot(i, 50)).sum(-1)

    model, i = Fn(forward, e=nn.Embedding(50, 64)), torch.randint(50, (B, 3))
    loss_fn = lambda model, i: model(i).sum(1)
    assert relative_error(run_capture(model, loss_fn, i).norms(), norms_of(oracle(model, loss_fn, i))) < 1e-2


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
def test_autocast(inside):
    model = nn.Sequential(
        nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(24, 6), nn.LayerNorm(6), nn.Linear(6, 2)
    )
    x = torch.randn(B, 2, 8)
    with sw.capture(model) as grads:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = rows(model, x).float()
            if inside:
                grads.backward(losses)
        if not inside:
            grads.backward(losses)
    for name, G in oracle(model, rows, x).items():
        assert grads[name].materialize().dtype == torch.float32
        assert relative_error(grads[name].materialize(), G) < 0.1  # bfloat16 has 8 bits, five layers round in turn
