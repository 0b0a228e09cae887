"""Doors through which samples could meet, or lose their marks, unseen: each is right, or refused, with and without verify."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import Fn
from functorch.compile import aot_function, nop
from test_silent_errors import B, assert_right, data, linear, refused, two
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import samplewise as sw
from samplewise import SamplewiseError
from samplewise.testing import oracle, relative_error

WORDS = "."  # refusals differ; that each is one of ours is what counts
LABELS = torch.tensor([3, 0, 0, 1])
TARGETS = LABELS.double()


def loss_refused(loss_fn, *, width: int = 4, **options) -> None:
    """A loss of the outputs of one layer, computed outside of the model."""
    model, x = linear(5, width).double(), data(B, 5)
    with pytest.raises(SamplewiseError), sw.capture(model, **options) as grads:
        loss_fn(grads, model(x), x).backward()
    assert all(p.grad is None for p in model.parameters())


def LABELS_OF(x):  # noqa: N802
    """Integers of the batch, made of integers."""
    return (x[:, 0] > 0).long() + 0


def ctc(z, targets, lengths):
    return F.ctc_loss(
        z.log_softmax(-1).expand(5, 4, 4), targets, torch.full((4,), 5), torch.as_tensor(lengths), reduction="sum"
    )


def overwritten(z, i):
    z[i] = 0
    return z


def added_to(z, i):
    z[i] += 1
    return z


def hooked(z: Tensor, hook) -> Tensor:
    z.register_hook(hook)
    return z


class MixingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g / g.norm()


@torch.library.custom_op("samplewise_tests::centre", mutates_args=())
def centre(x: Tensor) -> Tensor:
    return x - x.nan_to_num(neginf=0).mean(0)


centre.register_autograd(lambda ctx, g: g - g.mean(0))
FIRST = torch.tensor([True, False, False, False])

LOSSES = {
    "hook that normalises": lambda g, z, x: hooked(z, lambda g: g / g.norm()).square().sum(),
    "hook that centres in place": lambda g, z, x: hooked(z, lambda g: g.sub_(g.mean(0))).square().sum(),
    "hook that flips": lambda g, z, x: hooked(z, lambda g: g.flip(0)).square().sum(),
    "hook that leaves torch": lambda g, z, x: hooked(z, lambda g: torch.from_numpy(g.numpy() / (g.numpy() ** 2).sum())).square().sum(),
    "Function whose backward mixes": lambda g, z, x: MixingBackward.apply(z).square().sum(),
    "statistic copied": lambda g, z, x: (z - copy.deepcopy(z.detach().mean(0))).square().sum(),
    "statistic by DLPack": lambda g, z, x: (z - torch.from_dlpack(z.detach().mean(0))).square().sum(),
    "statistic as a subclass": lambda g, z, x: (z - z.detach().mean(0).as_subclass(Tensor)).square().sum(),
    "statistic as a parameter": lambda g, z, x: (z - nn.Parameter(z.detach().mean(0), requires_grad=False)).square().sum(),
    "statistic as Tensor": lambda g, z, x: (z - Tensor(z.detach().mean(0).float())).square().sum(),
    "sorted by msort": lambda g, z, x: (torch.msort(z) * torch.arange(16).view(4, 4)).square().sum(),
    "probed op with infinities": lambda g, z, x: centre(z.masked_fill(FIRST, -torch.inf))[:, 1:].square().sum(),
    "triplets of columns": lambda g, z, x: F.triplet_margin_loss(z.T, z.T + 1, z.T * 2, reduction="sum", margin=99.0),
    "margins of columns": lambda g, z, x: F.multi_margin_loss(z.T, torch.zeros(4).long(), reduction="sum"),
    "labels against all": lambda g, z, x: F.mse_loss(z[:, :1], TARGETS, reduction="sum"),
    "labels subtracted from all": lambda g, z, x: (z[:, :1] - TARGETS).square().sum(),
    "mean of mse by default": lambda g, z, x: F.mse_loss(z, torch.ones_like(z)),
    "mean and sum": lambda g, z, x: F.mse_loss(z, torch.ones_like(z)) + z.sum(),
    "mean of means": lambda g, z, x: z.mean(0).mean(),
    "mean by hand": lambda g, z, x: z.square().sum() / len(z),
    "kl_div batchmean": lambda g, z, x: F.kl_div(z, z.detach().exp(), reduction="batchmean"),
    "one row of all samples": lambda g, z, x: F.pairwise_distance(z[:, 0], TARGETS),
    "load balancing": lambda g, z, x: (z.mean(0) * F.one_hot(z.argmax(1), 4).double().mean(0)).sum(),
    "columns picked by all labels": lambda g, z, x: z[:, LABELS_OF(x)].square().sum(),
    "rows of others overwritten": lambda g, z, x: overwritten(z.clone(), LABELS_OF(x)).square().sum(),
    "rows of others added to": lambda g, z, x: added_to(z.clone(), LABELS_OF(x)).square().sum(),
    "histogram of the batch": lambda g, z, x: (z * torch.zeros_like(z).index_add(0, LABELS_OF(x), torch.ones_like(z))).sum(),
    "columns added up by all labels": lambda g, z, x: torch.zeros_like(z).index_add(1, LABELS_OF(x), z).square().sum(),
    "columns copied by all labels": lambda g, z, x: torch.zeros_like(z).index_copy(1, LABELS_OF(x), z).square().sum(),
    "targets of others": lambda g, z, x: ctc(z, 1 + LABELS_OF(x).flip(0)[:, None], [1] * 4),
    "targets of others in one vector": lambda g, z, x: ctc(z, 1 + LABELS_OF(x).repeat_interleave(2), [1, 3, 2, 2]),
    "lengths of others": lambda g, z, x: ctc(z, torch.ones(4, 2).long(), 1 + LABELS_OF(x).flip(0)),
    "gradient given that mixes": lambda g, z, x: _with_gradient(z, z.detach().softmax(0)),
}  # fmt: skip


class _with_gradient:  # noqa: N801
    def __init__(self, z, gradient):
        self.z, self.gradient = z, gradient

    def backward(self):
        self.z.backward(gradient=self.gradient)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", LOSSES)
def test_loss_is_refused(name):
    loss_refused(LOSSES[name])


def test_losses_summed_over_samples_are_not_one_a_sample():
    model = linear(5, B).double()
    with sw.capture(model) as grads, pytest.raises(SamplewiseError, match="summed over samples"):
        grads.backward(model(data(B, 5)).square().mean(0))


def test_gradient_penalty_of_a_linear_model_is_refused():
    model, x = linear(5, 1).double(), data(B, 5).requires_grad_()
    with sw.capture(model) as grads, pytest.raises(SamplewiseError, match="gradients of gradients"):
        z = model(x)
        (slope,) = torch.autograd.grad(z.sum(), x, create_graph=True)
        grads.backward(z.flatten() + slope.norm(dim=1))


def test_autograd_grad_of_a_captured_parameter_is_refused():
    model = linear(5, 1).double()
    with sw.capture(model), pytest.raises(SamplewiseError, match="autograd.grad"):
        torch.autograd.grad(model(data(B, 5)).sum(), model.weight, allow_unused=True)


def detached_then_changed(s, x):
    h = s.a(x)
    d = h.detach()
    d.sub_(d.mean(0))
    return s.b(h)


def data_replaced(s, x):
    h = s.a(x)
    h.data = h.data - h.data.mean(0)
    return s.b(h)


def mean_through_a_view(s, x):
    v = torch.zeros(5).double()
    torch.mean(x, 0, out=v[:])
    return s.b(x - v)


def mean_through_an_alias(s, x):
    v = torch.zeros(5).double()
    w = v.detach()
    v.add_(x.mean(0))
    return s.b(x - w)


def running_mean(s, x):
    s.mu.data.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return s.l(x - s.mu)


def bias_from_the_batch(s, x):
    s.l.bias.data.copy_(x.mean(0)[:3])
    return s.l(x)


def placed_elsewhere(s, x):
    h = s.l(x)
    out = torch.zeros(2, 3).double()
    v = out[0]
    v.copy_(h[-1])
    out[1] = v
    return torch.cat([h[:1] * out[0], h[1:]])


def overwritten_by_rank(s, i, x):
    h = s.l(x).clone()
    h[i == i.max()] = 0
    return h


def some_rows_written(s, x):
    out = torch.zeros(len(x), 5).double()
    out[0] = x[0]
    return s.l(out)


def unique_rows(s, ids, x):
    unique, inverse = torch.unique(ids, return_inverse=True)
    h = s.w[unique]
    return (h / h.norm())[inverse] * x


def state_of_another(s, x):
    return s.r(x, s.e(x[:, 0]).flip(0)[None])[0]


def hook_on_transposed(s, x):
    w = s.w.t()
    w.register_hook(lambda g: g * 2)
    return x @ w


MODELS = {
    "memory changed through detach": (lambda: Fn(detached_then_changed, **two()), lambda: (data(B, 5),)),
    "memory changed through data": (lambda: Fn(data_replaced, **two()), lambda: (data(B, 5),)),
    "table of the batch, rows of others": (lambda: Fn(lambda s, i, t: s.l(t[i]), l=linear()), lambda: (LABELS, data(B, 5))),
    "columns of others": (lambda: Fn(lambda s, i, t: s.l(t.index_select(0, i)), l=linear()), lambda: (LABELS, data(B, 5))),
    "mean through a view": (lambda: Fn(mean_through_a_view, **two()), lambda: (data(B, 5),)),
    "mean through an alias": (lambda: Fn(mean_through_an_alias, **two()), lambda: (data(B, 5),)),
    "running mean through data": (lambda: Fn(running_mean, l=linear(), mu=nn.Buffer(data(5))), lambda: (data(B, 5),)),
    "bias from the batch": (lambda: Fn(bias_from_the_batch, l=linear()), lambda: (data(B, 5),)),
    "placed beside where it was written": (lambda: Fn(placed_elsewhere, l=linear(5, 3)), lambda: (data(2, 5),)),
    "rows overwritten by rank": (lambda: Fn(overwritten_by_rank, l=linear()), lambda: (LABELS, data(B, 5))),
    "rows of which one is written": (lambda: Fn(some_rows_written, l=linear()), lambda: (data(B, 5),)),
    "rows combined where picked": (lambda: Fn(unique_rows, w=(7, 5)), lambda: (LABELS, data(B, 5))),
    "buffer read relative to the batch": (
        lambda: Fn(lambda s, i, x: s.l(s.tab[i - i.min()] + x), l=linear(), tab=nn.Buffer(data(20, 5))),
        lambda: (LABELS + 1, data(B, 5)),
    ),
    "scale of data": (lambda: Fn(lambda s, x: s.l(F.layer_norm(x, (4,), weight=x[:, 0])), l=linear(4, 3)), lambda: (data(B, 4),)),
    "state of another sample": (
        lambda: Fn(state_of_another, r=nn.GRU(5, 4, batch_first=True), e=linear(5, 4)), lambda: (data(B, 3, 5),)
    ),
    "hook on a transposed weight": (lambda: Fn(hook_on_transposed, w=(3, 5)), lambda: (data(B, 5),)),
    "vmap of a layer": (lambda: Fn(lambda s, x: torch.func.vmap(lambda r: s.l(r))(x), l=linear()), lambda: (data(B, 5),)),
    "jvp of data": (
        lambda: Fn(lambda s, x: s.l(torch.func.jvp(torch.tanh, (x,), (torch.ones_like(x),))[1]), l=linear()), lambda: (data(B, 5),)
    ),
    "hessian of data": (
        lambda: Fn(lambda s, x: s.l(torch.func.hessian(lambda a: a.tanh().sum())(x).sum((2, 3))), l=linear()),
        lambda: (data(B, 5),),
    ),
    "a traced layer": (lambda: Fn(lambda s, x: s.a(aot_function(s.b, nop)(x)), **two()), lambda: (data(B, 5),)),
    "grad of a layer": (
        lambda: Fn(lambda s, x: s.l(torch.func.grad(lambda r: s.l(r).square().sum())(x)), l=linear(5, 5)), lambda: (data(B, 5),)
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch.func's own
@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
@pytest.mark.parametrize("name", MODELS)
def test_model_is_refused(name, verify):
    make, batch = MODELS[name]
    refused(make().double(), *batch(), words=WORDS, verify=verify)


class ReturnsItsLoss(nn.Module):
    """As Hugging Face models do."""

    def __init__(self, scale, reduction: str):
        super().__init__()
        self.l, self.scale, self.reduction = linear(), scale, reduction

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self.l(x * self.scale(x)).square(), self.reduction)()


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_model_that_returns_its_loss_is_verified(reduction):
    wrong, right = (
        ReturnsItsLoss(scale, reduction).double() for scale in (lambda x: 1 / x.abs().max().item(), lambda x: 2.0)
    )
    x = data(B, 5)
    with pytest.raises(SamplewiseError, match="not that of the sample"), sw.capture(wrong, loss_reduction=reduction):
        wrong(x)
    with sw.capture(right, loss_reduction=reduction) as grads:
        right(x).backward()
    truth = oracle(right, lambda model, x: model(x)[None], x)
    assert relative_error(grads["l.weight"].materialize(), truth["l.weight"]) < 1e-9


@pytest.mark.parametrize("exclude", [["0.*"], ["1.weight"]])
def test_parameters_left_to_ordinary_autograd_get_their_gradient(exclude):
    model, x = nn.Sequential(linear(5, 4), linear(4, 3)).double(), data(B, 5)
    model(x).square().sum().backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with sw.capture(model, exclude=exclude) as grads:
        grads.backward(model(x).square().sum(1))
    for name, p in model.named_parameters():
        assert relative_error(grads[name].sum() if name in grads else p.grad, plain[name]) < 1e-12
        assert (p.grad is None) == (name in grads)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("exclude", ["weight_hh_l0", "bias_hh_l0"])
def test_recurrent_weights_left_to_ordinary_autograd_get_their_gradient(kind, exclude):
    model, x = kind(3, 4, batch_first=True).double(), data(B, 5, 3)
    model(x)[0].square().sum().backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with sw.capture(model, exclude=[exclude]) as grads:
        grads.backward(model(x)[0].square().sum((1, 2)))
    for name, p in model.named_parameters():
        assert relative_error(grads[name].sum() if name in grads else p.grad, plain[name]) < 1e-12


class ReturnsLossAndRows(nn.Module):
    """As Hugging Face models do when they are given labels."""

    def __init__(self):
        super().__init__()
        self.l = linear(5, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = self.l(x)
        return ((z - y) / z.abs().max().item()).square().sum(), z


def test_the_loss_beside_rows_is_verified():
    model = ReturnsLossAndRows().double()
    with pytest.raises(SamplewiseError, match="not that of the sample"), sw.capture(model):
        model(data(B, 5), data(B, 4))


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
@pytest.mark.parametrize("exclude", [["w"], ["A", "B"]])
def test_a_leaf_behind_a_derived_weight_that_is_not_captured_is_not_forgotten(exclude, verify):
    model = Fn(lambda s, x: F.linear(x, s.w + s.B @ s.A), w=(3, 5), A=(2, 5), B=(3, 2)).double()
    refused(model, data(B, 5), words="is not captured", exclude=exclude, verify=verify)


def one_hot_by_hand(s, y, x):
    return s.l(torch.zeros(len(y), 5).double().scatter_(1, y[:, None], 1.0) + x)


def block_masked(s, x, doc):
    q, k, v = s.qkv(x).chunk(3, -1)
    mask = doc[:, None] == doc[None]
    return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask[None])[0]


def cached(s, x):
    k = x.new_zeros(len(x), 7, 4)
    k[:, :6] = s.k(x)
    return F.scaled_dot_product_attention(s.q(x), k, k)


def padding_left_out(s, x, n):
    mask = torch.arange(x.shape[1]) < n[:, None]
    out = x.new_zeros(*x.shape[:2], 3)
    out[mask] = s.l(x[mask])
    return out


def slices_added(s, x):
    out = torch.zeros(len(x), x.shape[1], 3).double()
    for t in range(x.shape[1]):
        out[:, t] += s.l(x[:, t])
    return out


def padded_sequence(s, x, n):
    return nn.utils.rnn.pad_sequence([s.l(row[:k]) for row, k in zip(x, n.tolist(), strict=True)], batch_first=True)


def scattered(s, x, i):
    return x.new_zeros(len(x), 4, 3).scatter_add(1, i[:, :, None].expand(-1, -1, 3), s.l(x))


LENGTHS = torch.tensor([4, 6, 2, 1])


def filled_through_views(s, x):
    out = torch.zeros(len(x), x.shape[1], 5).double()
    for t in range(x.shape[1]):
        out[:, t, :3].add_(s.l(x[:, t]))
        out[:, t, 3:].copy_(x[:, t, :2])
    return s.k(out)


def sparse_constant(s, x):
    h = torch.zeros(len(x), 5).double()
    h[:, 1:] = x[:, 1:]
    return s.l(torch.sparse.mm(EYE, h.T).T)


def masked_by_lengths(s, x, lengths):
    """As Wav2Vec2 does: a 1 at each sample's last place, and all before it."""
    mask = x.new_zeros(x.shape[:2])
    mask[(torch.arange(len(x)), lengths - 1)] = 1
    x = x.clone()
    x[~mask.flip([-1]).cumsum(-1).flip([-1]).bool()] = 0
    return s.l(x)


TOKENS = torch.arange(B)
EYE = torch.eye(5).double().to_sparse()
ORDINARY = {
    "filled through views": (lambda: Fn(filled_through_views, l=linear(), k=linear()), lambda: (data(B, 6, 5),)),
    "row expanded to the batch": (
        lambda: Fn(lambda s, x: s.e(TOKENS.unsqueeze(0).expand(len(x), -1)).sum(1) * x, e=nn.Embedding(9, 5)), lambda: (data(B, 5),)
    ),
    "sparse constant": (lambda: Fn(sparse_constant, l=linear()), lambda: (data(B, 5),)),
    "cache": (lambda: Fn(cached, k=linear(5, 4), q=linear(5, 4)), lambda: (data(B, 6, 5),)),
    "ones made in forward": (lambda: Fn(lambda s, x: s.l(x) + s.l(x.new_ones(len(x), 5)), l=linear()), lambda: (data(B, 5),)),
    "slices added": (lambda: Fn(slices_added, l=linear()), lambda: (data(B, 6, 5),)),
    "scattered": (lambda: Fn(scattered, l=linear()), lambda: (data(B, 6, 5), torch.randint(4, (B, 6)))),
    "distances of folded rows": (
        lambda: Fn(lambda s, x: torch.cdist(s.l(x).flatten(0, 1), s.codes).view(len(x), 6, 7), l=linear(), codes=(7, 3)),
        lambda: (data(B, 6, 5),),
    ),
    "complex scales": (
        lambda: Fn(lambda s, x: torch.addmm(s.b + 0j, x + 0j, s.w + 0j, alpha=2 + 3j, beta=1 + 2j).abs(), b=(3,), w=(5, 3)),
        lambda: (data(B, 5),),
    ),
    "class picked from a buffer": (
        lambda: Fn(lambda s, i: s.l(s.tab.index_select(0, i)), l=linear(), tab=nn.Buffer(data(9, 5))), lambda: (LABELS,)
    ),
    "scalar picked from a buffer": (
        lambda: Fn(lambda s, i: s.l(s.tab.index_select(0, i)[:, None].expand(-1, 5)), l=linear(), tab=nn.Buffer(data(4))),
        lambda: (LABELS,),
    ),
    "cells picked from a buffer": (
        lambda: Fn(lambda s, i, x: s.l(s.tab[i, i] + x), l=linear(), tab=nn.Buffer(data(4, 4, 5))), lambda: (LABELS, data(B, 5))
    ),
    "one-hot by hand": (lambda: Fn(one_hot_by_hand, l=linear()), lambda: (LABELS, data(B, 5))),
    "state made in forward": (
        lambda: Fn(lambda s, x: torch.tanh(x @ s.u + x.new_zeros(len(x), 4) @ s.w), u=(5, 4), w=(4, 4)), lambda: (data(B, 5),)
    ),
    "one order for all along features": (
        lambda: Fn(lambda s, x: s.l(torch.take_along_dim(x, torch.tensor([[3, 1, 0, 2, 4]]), 1)), l=linear()), lambda: (data(B, 5),)
    ),
    "likeness to prototypes": (
        lambda: Fn(lambda s, x: F.cosine_similarity(s.l(x), s.codes.unsqueeze(1), dim=-1).T, l=linear(), codes=nn.Buffer(data(B, 3))),
        lambda: (data(B, 5),),
    ),
    "mask made of lengths": (lambda: Fn(masked_by_lengths, l=linear()), lambda: (data(B, 6, 5), LENGTHS)),
    "rows picked by a mask": (
        lambda: Fn(lambda s, x: s.l(torch.where(x > 0, x, 0.0)[:, [0, 2]]), l=linear(2, 3)), lambda: (data(B, 5),)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_use_is_right(name):
    make, batch = ORDINARY[name]
    assert_right(make().double(), *batch())


OVER_DIMENSIONS = {
    "last and first": lambda s, x: torch.tensordot(x, s.w, 1),
    "two": lambda s, x: torch.tensordot(x[:, 0, :, None] * x[:, 1, None], s.v),
    "given": lambda s, x: torch.tensordot(x, s.w, ([-1], [0])),
    "weight first": lambda s, x: torch.tensordot(s.w, x, ([0], [2])).movedim(1, 0),
    "none": lambda s, x: torch.tensordot(x, s.c, 0),
    "size 1": lambda s, x: torch.tensordot(x, s.c[None], 1),
    "of a constant": lambda s, x: torch.tensordot(x * s.w[:, 0], torch.ones(5, 2).double(), dims=1),
    "inner": lambda s, x: torch.inner(x, s.w.T),
    "inner, weight first": lambda s, x: torch.inner(s.w.T, x).movedim(1, 0),
    "inner of a constant": lambda s, x: (x * s.w[:, 0]).inner(torch.ones(2, 5).double()),
}


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("name", OVER_DIMENSIONS)
def test_products_over_dimensions(name, verify):
    assert_right(Fn(OVER_DIMENSIONS[name], w=(5, 3), v=(5, 5, 3), c=(4,)).double(), data(B, 2, 5), verify=verify)


def test_inner_products_of_samples_with_each_other_are_refused():
    refused(
        Fn(lambda s, x: torch.inner(s.l(x), s.l(x)), l=linear()).double(), data(B, 5), words="inner", kind=sw.SamplesMixError
    )


BY_NAME = {
    "transpose": lambda x: torch.transpose(input=x, dim0=1, dim1=2),
    "permute": lambda x: torch.permute(input=x, dims=(0, 2, 1)),
    "movedim": lambda x: torch.movedim(input=x, source=1, destination=2),
    "chunk": lambda x: torch.chunk(input=x, chunks=2, dim=1)[1],
    "unbind": lambda x: torch.unbind(input=x, dim=1)[2],
    "narrow": lambda x: torch.narrow(input=x, dim=1, start=1, length=2),
    "index_select": lambda x: torch.index_select(input=x, dim=1, index=torch.tensor([2, 0])),
    "gather": lambda x: torch.gather(input=x, dim=1, index=torch.tensor([[[2], [0]]]).expand(len(x), 2, 5)),
    "roll": lambda x: torch.roll(input=x, shifts=1, dims=1),
    "tile": lambda x: torch.tile(input=x, dims=(1, 2, 1)),
    "repeat_interleave": lambda x: torch.repeat_interleave(input=x, repeats=2, dim=1),
    "conv1d": lambda x: F.conv1d(input=x, weight=torch.ones(2, 6, 3).double()),
    "pixel_shuffle": lambda x: F.pixel_shuffle(input=x[:, :4, :, None], upscale_factor=2),
    "index_add": lambda x: torch.index_add(input=torch.zeros_like(x), dim=1, index=torch.arange(6), source=x),
    "bilinear": lambda x: F.bilinear(input1=x, input2=x, weight=torch.ones(2, 5, 5).double()),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_arguments_by_name(name):
    """As peft calls convolutions."""
    assert_right(Fn(lambda s, x: BY_NAME[name](s.l(x)), l=linear(5, 5)).double(), data(B, 6, 5), verify=False)


WINDOWS = {
    "of rows": lambda h: h.as_strided((len(h), 2, 4, 3), (18, 6, 3, 1)),
    "by name, and offset": lambda h: torch.as_strided(input=h, size=(len(h), 5, 6), stride=(18, 3, 1), storage_offset=0),
    "of rows that lie apart": lambda h: h.transpose(0, 1).contiguous().transpose(0, 1).as_strided(
        (len(h), 2, 4, 3), (3, 2 * 3 * len(h), 3 * len(h), 1)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_in_memory(name):
    """As Longformer cuts its sequences."""
    assert_right(Fn(lambda s, x: WINDOWS[name](s.l(x)), l=linear()).double(), data(B, 6, 5))


@pytest.mark.parametrize(
    "window",
    [
        lambda h: torch.cat([h, h])[: len(h)].as_strided((len(h), 4, 4, 3), (18, 6, 3, 1)),  # on into the next row
        lambda h: h.as_strided((len(h), 6, 3), (9, 3, 1)),  # rows that begin elsewhere
        lambda h: h.as_strided((len(h) - 1, 6, 3), (18, 3, 1), 18),  # rows of others
        lambda h: h.transpose(0, 1).contiguous().transpose(0, 1).as_strided((len(h), 6, 3), (18, 3, 1)),
    ],
    ids=["beyond", "elsewhere", "of others", "of another order"],
)
def test_windows_across_samples_are_refused(window):
    model = Fn(lambda s, x: s.k(window(s.l(x))), l=linear(), k=linear(3, 2)).double()
    refused(model, data(B, 6, 5), words="as_strided", verify=False)


PLACES = torch.tensor([[0, 1, 1, 2, 3], [0, 2, 3, 1, 1]])
OVER_SPARSE = {
    "product": lambda s, x: x @ s.w,
    "mm": lambda s, x: torch.mm(x, s.w),
    "sparse.mm": lambda s, x: torch.sparse.mm(x, s.w),
    "addmm": lambda s, x: torch.addmm(s.b, x, s.w, alpha=2, beta=3),
    "sparse.addmm": lambda s, x: torch.sparse.addmm(s.b.expand(len(x), -1), x, s.w, alpha=2, beta=3),
    "linear": lambda s, x: F.linear(x, s.w.T, s.b),
    "written out": lambda s, x: x.to_dense() @ s.w,
}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=["coo", "csr"])
@pytest.mark.parametrize("name", OVER_SPARSE)
def test_sparse_batches(name, layout):
    """Bags of words."""
    x = data(B, 5) * (torch.rand(B, 5) > 0.5)
    forward = OVER_SPARSE[name]
    model = Fn(lambda s, x: s.l(forward(s, x).tanh()), w=(5, 3), b=(3,), l=nn.Linear(3, 2))
    assert_right(model.double(), x.to_sparse(layout=layout))


def sparse_weight(s):
    return torch.sparse_coo_tensor(PLACES, s.v, (4, 4))


SPARSE_WEIGHTS = {
    "sparse.mm": lambda s, x: torch.sparse.mm(sparse_weight(s), s.l(x).T).T,
    "coalesced": lambda s, x: torch.sparse.mm(sparse_weight(s).coalesce(), s.l(x).T).T,
    "product": lambda s, x: (sparse_weight(s) @ s.l(x).T).T,
    "sparse.addmm": lambda s, x: torch.sparse.addmm(s.b[:, None].expand(-1, len(x)), sparse_weight(s), s.l(x).T).T,
    "compressed": lambda s, x: torch.sparse.mm(
        torch.sparse_csr_tensor(torch.tensor([0, 1, 3, 4, 5]), PLACES[1], s.v, (4, 4)), s.l(x).T
    ).T,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("name", SPARSE_WEIGHTS)
def test_sparse_weights(name):
    """A matrix of few entries, which are the parameter: peft's FRoD."""
    assert_right(Fn(SPARSE_WEIGHTS[name], v=(5,), b=(4,), l=linear(5, 4)).double(), data(B, 5))


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_other_reductions_of_sparse_batches_are_refused():
    forward = lambda s, x: torch.sparse.mm(x.to_sparse_csr(), s.w, "mean")
    refused(Fn(forward, w=(5, 3)).double(), data(B, 5), words="sparse_mm uses parameter 'w'")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_batches_are_refused(layout):
    nested = torch.nested.nested_tensor([data(n, 5) for n in (2, 3, 3)], layout=layout)
    model = linear().double()
    with pytest.raises(sw.UnattributedError, match="was given a nested tensor"), sw.capture(model):
        model(nested)
    step = sw.per_sample_step(
        model, lambda model, x: model(x).to_padded_tensor(0.0).sum((1, 2)), lambda grads: grads.norms()
    )
    with pytest.raises(sw.UnattributedError, match="was given a nested tensor"):
        step(nested)


def trimmed(model, x, n):
    """The losses of each sample's own steps."""
    return torch.stack([z[:k].square().sum() for z, k in zip(model(x, n), n.tolist(), strict=True)])


@pytest.mark.parametrize("forward", [padding_left_out, padded_sequence])
def test_padding_made_in_forward(forward):
    assert_right(Fn(forward, l=linear()).double(), data(B, 6, 5), LENGTHS, loss_fn=trimmed)


def ctc_losses(model, x, y):
    z = model(x).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(z, y, [z.shape[0]] * len(x), [2] * len(x), reduction="none")


def test_ctc_loss():
    labels = torch.tensor([[1, 2], [2, 1], [2, 2], [1, 1]])
    assert_right(linear(5, 3).double(), data(B, 6, 5), labels, loss_fn=ctc_losses)


@torch.library.custom_op("samplewise_tests::counted", mutates_args={"count"})
def counted(x: Tensor, count: Tensor) -> Tensor:
    count.add_(1)
    return x * 2


@pytest.mark.parametrize("lengths", [[2, 2, 2, 2], [1, 3, 2, 2]])
def test_ctc_loss_of_targets_in_one_vector(lengths):
    model, x, targets = linear(5, 3).double(), data(B, 6, 5), torch.tensor([1, 2, 2, 1, 2, 2, 1, 1])
    truth = [
        F.ctc_loss(model(x).log_softmax(-1).transpose(0, 1), targets, [6] * B, lengths, reduction="none")[b]
        for b in range(B)
    ]
    want = [torch.autograd.grad(one, model.weight)[0] for one in truth]
    with sw.capture(model) as grads:
        z = model(x).log_softmax(-1).transpose(0, 1)
        grads.backward(F.ctc_loss(z, targets, [6] * B, lengths, reduction="none"))
    assert torch.allclose(grads.materialize()["weight"], torch.stack(want))


def test_places_that_several_samples_pick_in_one_row_are_refused():
    def forward(s, x, i):
        mask = x.new_zeros(2, 5)
        mask[(torch.arange(len(x)) % 2, i)] = 1
        return s.l(x * mask[0])

    model = Fn(forward, l=linear()).double()
    with sw.capture(model, verify=False), pytest.raises(SamplewiseError):
        model(data(B, 5), LABELS).sum().backward()


def test_what_an_index_picks_is_written_where_it_is_to_be():
    """And not the numbers of the samples."""
    model, x, out = nn.Embedding(9, 3).double(), torch.tensor([[5], [6], [7], [8]]), torch.zeros(B, 1, dtype=torch.long)
    with sw.capture(model, verify=False) as grads:
        grads.mark(x)
        torch.index_select(x, 0, torch.tensor([1, 0, 3, 2]), out=out)
        model(out).square().sum().backward()
    assert out.flatten().tolist() == [6, 5, 8, 7]
    assert grads.materialize()["weight"].abs().sum(2).nonzero().tolist() == [[0, 5], [1, 6], [2, 7], [3, 8]]


def test_ops_are_not_tried_out_on_what_they_change():
    model = Fn(lambda s, x: s.l(counted(x, s.count)), l=linear(), count=nn.Buffer(torch.zeros(())))
    with pytest.raises(SamplewiseError), sw.capture(model, verify=False):
        model(torch.randn(B, 5))
    assert model.count == 1


def test_an_integer_that_picks_a_branch_is_a_kind_of_call():
    model = Fn(lambda s, x, k: s.l(x / x.abs().max().item() if k else x), l=linear())
    with sw.capture(model):
        model(torch.randn(B, 5), 0)
    with pytest.raises(SamplewiseError, match="influence"), sw.capture(model):
        model(torch.randn(B, 5), 1)


def test_rows_picked_by_a_mask_are_not_remembered_from_another():
    model, loss_fn = Fn(lambda s, x, k: s.l(x[k]), l=linear()).double(), lambda m, x, k: m(x, k).square().sum()[None]
    for mask in ([[1, 1, 1, 0], [1, 0, 0, 0]], [[1, 0, 0, 0], [1, 1, 1, 0]]):
        x, mask = data(2, 4, 5), torch.tensor(mask).bool()
        with sw.capture(model) as grads:
            model(x, mask).square().sum().backward()
        for name, G in oracle(model, loss_fn, x, mask).items():
            assert relative_error(grads[name].materialize(), G) < 1e-9


def test_an_optimizers_step_inside_the_block():
    model, x = nn.Linear(5, B), torch.randn(B, 5)
    optimizer = torch.optim.Adam(model.parameters())
    with sw.capture(model) as grads:
        grads.backward(model(x).square().sum(1))
        for name, p in model.named_parameters():
            p.grad = grads[name].sum()
        optimizer.step()


def test_drop_in_refuses_checkpoints_in_words():
    model = Fn(lambda s, x: checkpoint(s.b, s.a(x), use_reentrant=False), **two()).double()
    with pytest.raises(SamplewiseError, match="inside a checkpoint"):
        sw.call_for_per_sample_grads(model)(data(B, 5))


def test_block_mask_made_of_document_ids():
    model, lengths = Fn(block_masked, qkv=linear(5, 15)).double(), [2, 3, 1]
    doc = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    x = data(6, 5)
    with sw.capture(model, sample_ids=doc) as grads:
        model(x, doc).square().sum().backward()
    for b, part in enumerate(x.split(lengths)):
        model.zero_grad()
        model(part, torch.zeros(len(part))).square().sum().backward()
        assert relative_error(grads["qkv.weight"].of_samples([b])[0], model.qkv.weight.grad) < 1e-9


class Carrier:
    def __init__(self):
        self.seen = []


def test_verification_leaves_objects_among_the_arguments_alone():
    model = Fn(lambda s, x, carrier: carrier.seen.append(x) or s.l(x), l=linear()).double()
    carrier = Carrier()
    with sw.capture(model) as grads:
        grads.backward(model(data(B, 5), carrier).square().sum(1))
    assert len(carrier.seen) == 1


def test_hooks_that_keep_samples_apart_run():
    model, x = nn.Sequential(linear(5, 4), linear(4, 3)).double(), data(B, 5)
    with sw.capture(model) as grads:
        h = model[0](x)
        h.register_hook(lambda g: g * 2)
        h.register_hook(lambda g: g / g.norm(dim=1, keepdim=True))
        grads.backward(model[1](h).square().sum(1))
    for b in range(B):
        model.zero_grad()
        h = model[0](x[b : b + 1])
        h.register_hook(lambda g: g * 2)
        h.register_hook(lambda g: g / g.norm(dim=1, keepdim=True))
        model[1](h).square().sum().backward()
        assert relative_error(grads["0.weight"].of_samples([b])[0], model[0].weight.grad) < 1e-9


def test_a_hook_that_waits_for_an_ordinary_gradient_is_refused():
    model = linear()
    model.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(SamplewiseError, match="gradient hook"):
        sw.capture(model)


def test_buffers_of_the_caller_are_read_until_the_last_query():
    """What torch cannot see changing is the caller's to keep; a change that it sees is refused."""
    buffer = np.ones((B, 5))
    model = linear(5, 4).double()
    with sw.capture(model) as grads:
        grads.backward(model(x := torch.from_numpy(buffer)).square().sum(1))
    x.zero_()
    with pytest.raises(SamplewiseError, match="changed in place"):
        grads.norms()
