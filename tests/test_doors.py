"""Doors through which samples could meet, or lose their marks, unseen: each is right, or refused, with and without verify."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import Fn
from test_silent_errors import B, assert_right, data, linear, refused, two
from torch import Tensor, nn

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
    "grad of a layer": (
        lambda: Fn(lambda s, x: s.l(torch.func.grad(lambda r: s.l(r).square().sum())(x)), l=linear(5, 5)), lambda: (data(B, 5),)
    ),
}  # fmt: skip


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


ORDINARY = {
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
    "rows picked by a mask": (
        lambda: Fn(lambda s, x: s.l(torch.where(x > 0, x, 0.0)[:, [0, 2]]), l=linear(2, 3)), lambda: (data(B, 5),)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_use_is_right(name):
    make, batch = ORDINARY[name]
    assert_right(make().double(), *batch())


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


def test_buffers_of_the_caller_are_read_until_the_last_query():
    """What torch cannot see changing is the caller's to keep; a change that it sees is refused."""
    buffer = np.ones((B, 5))
    model = linear(5, 4).double()
    with sw.capture(model) as grads:
        grads.backward(model(x := torch.from_numpy(buffer)).square().sum(1))
    x.zero_()
    with pytest.raises(SamplewiseError, match="changed in place"):
        grads.norms()
