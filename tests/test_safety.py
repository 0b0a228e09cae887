"""What autograd protects users from stays protected, and what cannot be attributed is refused."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from cases import Fn
from torch import nn

import samplewise as sw
from samplewise import SamplesMixError, SamplewiseError, UnattributedError
from samplewise.testing import assert_matches_oracle, oracle, relative_error, run_capture

MLP = lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def rows(model, x):
    return model(x).square().sum(1)


def data(*shape):
    return torch.randn(*shape, dtype=torch.float64)


# --- in place ---


def test_input_changed_before_backward_raises():
    model, x = MLP(), data(4, 3)
    with sw.capture(model) as grads, pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses = rows(model, x)
        x.add_(1)
        grads.backward(losses)


def test_weight_changed_before_backward_raises():
    model, x = MLP(), data(4, 3)
    with sw.capture(model) as grads, pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses = rows(model, x)
        with torch.no_grad():
            model[2].weight.mul_(2)
        grads.backward(losses)


@pytest.mark.parametrize("change", [lambda x: x.add_(1), lambda x: x.zero_(), lambda x: x.copy_(x + 1)])
def test_input_changed_after_backward_raises_at_the_query(change):
    model, x = MLP(), data(4, 3)
    grads = run_capture(model, rows, x)
    change(x)
    with pytest.raises(SamplewiseError, match=r"'0.weight' was changed in place after backward"):
        grads.norms()


def test_gradient_changed_by_an_upstream_function_raises():
    class Rude(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, g):
            return g.mul_(2)

    model = Fn(lambda s, x: Rude.apply(s.a(x)) + s.b(x), a=nn.Linear(3, 2), b=nn.Linear(3, 2)).double()
    grads = run_capture(model, rows, data(4, 3), verify=False)
    with pytest.raises(SamplewiseError, match="'b.weight' was changed in place"):
        grads["b.weight"].norms()


def test_derived_weight_changed_in_place_between_uses():
    def forward(s, x):
        w = s.w * 2
        first = x @ w
        w = w.mul_(3)
        return first + x @ w

    assert_matches_oracle(Fn(forward, w=(3, 2)).double(), rows, data(4, 3))


# --- backward ---


def test_second_backward_raises():
    model, x = Fn(lambda s, x: x + s.w, w=(3,)).double(), data(4, 3)
    with sw.capture(model) as grads:
        loss = rows(model, x).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert relative_error(grads["w"].materialize(), oracle(model, rows, x)["w"]) < 1e-12


def test_second_backward_with_retain_graph_adds_up_like_grad():
    model, x = MLP(), data(4, 3)
    with sw.capture(model) as grads:
        loss = rows(model, x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for name, G in oracle(model, rows, x).items():
        assert relative_error(grads[name].materialize(), 2 * G) < 1e-12
        assert relative_error(grads[name].norms(), 2 * G.flatten(1).norm(dim=1)) < 1e-12


def test_autograd_grad_for_the_input_fills_nothing():
    model, x = MLP(), data(4, 3).requires_grad_()
    with sw.capture(model) as grads:
        losses = rows(model, x)
        (gx,) = torch.autograd.grad(losses.sum(), x, retain_graph=True)
        assert len(grads) == 0
        losses.sum().backward(inputs=[x], retain_graph=True)
        assert len(grads) == 0
        grads.backward(losses)
    assert len(grads) == 4
    plain = x.detach().clone().requires_grad_()
    rows(model, plain).sum().backward()
    torch.testing.assert_close(gx, plain.grad)


def test_create_graph_is_refused():
    model, x = MLP(), data(4, 3)
    with sw.capture(model), pytest.raises(UnattributedError, match="create_graph"):
        rows(model, x).sum().backward(create_graph=True)


def test_backward_after_the_block_is_refused():
    model, x = MLP(), data(4, 3)
    with sw.capture(model):
        loss = rows(model, x).sum()
    with pytest.raises(UnattributedError, match="after the capture block had ended"):
        loss.backward()


@pytest.mark.parametrize("how", ["tensor", "autograd", "grads"])
def test_all_ways_to_call_backward(how):
    model, x = MLP(), data(4, 3)
    with sw.capture(model) as grads:
        losses = rows(model, x)
        if how == "tensor":
            losses.sum().backward()
        elif how == "autograd":
            torch.autograd.backward(losses, torch.ones_like(losses))
        else:
            grads.backward(losses)
    for name, G in oracle(model, rows, x).items():
        assert relative_error(grads[name].materialize(), G) < 1e-12


def test_mean_reduction_is_undone():
    model, x = MLP(), data(4, 3)
    with sw.capture(model, loss_reduction="mean") as grads:
        rows(model, x).mean().backward()
    truth = oracle(model, rows, x)
    for name, G in truth.items():
        assert relative_error(grads[name].materialize(), G) < 1e-12
        assert relative_error(grads[name].sum(), G.sum(0)) < 1e-12
    assert relative_error(grads.norms(), torch.cat([G.flatten(1) for G in truth.values()], 1).norm(dim=1)) < 1e-12
    some = torch.tensor([0.0, 1.0, 2.0, 0.0])
    for name, G in grads.weighted_sum(some).items():
        assert relative_error(G, torch.tensordot(some.double(), truth[name], 1)) < 1e-12


# --- what is kept and what is freed ---


def test_saved_tensor_hooks_see_what_is_kept():
    model, x = MLP(), data(4, 3)
    packed = []

    def pack(t):
        packed.append(t.data_ptr())
        return t

    with sw.capture(model) as grads, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        grads.backward(rows(model, x))
    assert x.data_ptr() in packed


def test_offloaded_activations_give_the_same_numbers():
    model, x = MLP(), data(4, 3)
    with sw.capture(model) as grads, torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        grads.backward(rows(model, x))
    for name, G in oracle(model, rows, x).items():
        assert relative_error(grads[name].materialize(), G) < 1e-12


def test_activations_are_freed():
    model = Fn(lambda s, x: s.b(s.a(x).exp().tanh()), a=nn.Linear(3, 4), b=nn.Linear(4, 2)).double()
    run_capture(model, rows, data(4, 3))  # verified
    gc.collect()
    gc.disable()  # nothing may wait for a search for cycles
    try:
        seen = []
        model.a.register_forward_hook(lambda m, args, out: seen.append(weakref.ref(out)))
        grads = run_capture(model, rows, data(4, 3))
        assert seen[0]() is None  # a.weight keeps a's input and its output's gradient, not its output
        x = data(4, 3)
        alive = weakref.ref(x)
        grads = run_capture(model, rows, x)
        grads.clipped_sum(max_norm=1.0)
        del x, grads
        assert alive() is None
    finally:
        gc.enable()


def test_excluded_parameters_are_left_to_autograd():
    model, x = MLP(), data(4, 3)
    with sw.capture(model, exclude=["0.*"]) as grads:
        grads.backward(rows(model, x))
    assert sorted(grads) == ["2.bias", "2.weight"]
    assert model[0].weight.grad is not None
    assert model[2].weight.grad is None


def test_params_chooses():
    model, x = MLP(), data(4, 3)
    with sw.capture(model, params=["*.bias"]) as grads:
        grads.backward(rows(model, x))
    assert sorted(grads) == ["0.bias", "2.bias"]
    with pytest.raises(ValueError, match="no trainable parameter is called 'nonsense'"):
        sw.capture(model, params=["nonsense"])


# --- the module afterwards ---


class Boom(RuntimeError):
    pass


def _boom(*_):
    raise Boom


@pytest.mark.parametrize("where", ["forward", "backward", "block"])
def test_nothing_is_left_when_something_raises(where):
    model, x = MLP(), data(4, 3)
    hook = model[1].register_forward_hook(lambda m, args, out: _boom() if where == "forward" else None)
    state = {n: (id(p), dict(vars(p))) for n, p in model.named_parameters()}
    with pytest.raises(Boom), sw.capture(model) as grads:
        out = rows(model, x)
        if where == "backward":
            out.register_hook(_boom)
        if where == "block":
            _boom()
        grads.backward(out)
    hook.remove()
    assert {n: (id(p), dict(vars(p))) for n, p in model.named_parameters()} == state
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    rows(model, x).sum().backward()  # and ordinary training goes on
    assert all(p.grad is not None for p in model.parameters())


def test_submodule_under_two_names():
    model = Fn(lambda s, x: s.b(s.a(x)), a=nn.Linear(3, 3)).double()
    model.b = model.a
    x = data(4, 3)
    grads = run_capture(model, rows, x)
    assert model.a is model.b
    assert relative_error(grads["a.weight"].materialize(), oracle(model, rows, x)["a.weight"]) < 1e-12
    assert relative_error(grads["b.weight"].materialize(), grads["a.weight"].materialize()) == 0


def test_parameters_behave_as_parameters_inside():
    seen = {}

    def forward(s, x):
        seen["isinstance"] = isinstance(s.w, nn.Parameter)
        seen["size"] = tuple(s.w.size()), s.w.ndim, s.w.shape[0], s.w.requires_grad, s.w.is_leaf, s.w.dtype, len(s.w)
        seen["print"] = f"{s.w}" and repr(s.w)
        seen["list"] = [name for name, _ in s.named_parameters()]
        return x @ s.w.T.to(x.dtype)[:, :1] + s.w[0, 0].item()

    assert_matches_oracle(Fn(forward, w=(2, 3)).double(), rows, data(4, 3))
    assert seen["isinstance"]
    assert seen["size"] == ((2, 3), 2, 2, True, True, torch.float64, 2)
    assert seen["print"].startswith("Parameter containing")


def test_optimizer_may_step_after_the_query():
    model, x = MLP(), data(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        grads = run_capture(model, rows, x)
        for name, G in grads.clipped_sum(max_norm=1.0).items():
            model.get_parameter(name).grad = G
        optimizer.step()
        optimizer.zero_grad()


# --- refusals ---

REFUSED = {
    "batch norm": (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)), "batch_norm", SamplesMixError),
    "batch norm without affine": (
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2)), "batch_norm mixed the samples",
        SamplesMixError,
    ),
    "centred by the batch": (Fn(lambda s, x: s.l(x - x.mean(0)), l=nn.Linear(3, 2)), "mean mixed the samples", SamplesMixError),
    "cumulative": (Fn(lambda s, x: s.l(x.cumsum(0)), l=nn.Linear(3, 2)), "cumsum mixed the samples", SamplesMixError),
    "softmax over batch": (Fn(lambda s, x: s.l(x.softmax(0)), l=nn.Linear(3, 2)), "softmax mixed", SamplesMixError),
    "batch as features": (Fn(lambda s, x: s.l(x.T), l=nn.Linear(4, 2)), "linear", SamplesMixError),
    "unknown op": (Fn(lambda s, x: s.l(torch.cdist(x, x)), l=nn.Linear(4, 2)), "does not know where its samples lie",
                   UnattributedError),
    "shuffled": (Fn(lambda s, x: s.l(x) + s.l(x.flip(0)), l=nn.Linear(3, 2)), "mixes samples", SamplesMixError),
    "no data": (Fn(lambda s, x: s.l(torch.ones_like(x).tolist() and torch.ones(4, 3).double()), l=nn.Linear(3, 2)),
                "ordinary gradient reached", UnattributedError),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name):
    model, words, kind = REFUSED[name]
    model = model.double()
    x = data(4, 3)
    with sw.capture(model), pytest.raises(kind, match=words):
        rows(model, x).sum().backward()
    assert all(p.grad is None for p in model.parameters())


def _stale_view(s, x):
    whole = x.clone()
    part = whole[:, :2]
    whole.copy_(x.flip(0))  # the samples of `part` change with it
    return s.l(part)


def _stale_base(s, x):
    whole = x.clone()
    whole[:, :2].copy_(x[:, :2].flip(0))
    return s.l(whole[:, :2])


@pytest.mark.parametrize("forward", [_stale_view, _stale_base])
def test_other_samples_written_into_shared_memory_are_refused(forward):
    model = Fn(forward, l=nn.Linear(2, 2)).double()
    with sw.capture(model, verify=False), pytest.raises(SamplewiseError, match="a write into memory|mixed the samples"):
        model(data(4, 3))


LOSSES = {
    "contrastive": (lambda z, y: F.cross_entropy(z @ z.T, torch.arange(4)), "mixes samples"),
    "normalised by the batch": (lambda z, y: (z / z.sum()).square().sum(), "mixes samples"),
    "root of the sum": (lambda z, y: z.square().sum().sqrt(), "mixes samples"),
    "variance": (lambda z, y: z.var(0).sum(), "mixes samples"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_refuses_losses_that_mix(name):
    loss_fn, words = LOSSES[name]
    model, x = MLP(), data(4, 3)
    with sw.capture(model), pytest.raises(SamplesMixError, match=words):
        loss_fn(model(x), torch.zeros(4, dtype=torch.long)).backward()


MEANS = {
    "ignored targets": lambda z, y: F.cross_entropy(z, torch.tensor([0, -100, 1, 1])),
    "class weights": lambda z, y: F.cross_entropy(z, torch.tensor([0, 0, 1, 1]), weight=torch.tensor([1.0, 2.0]).double()),
    "divided by a count": lambda z, y: (z.square().sum(1) * y).sum() / y.sum(),
}


@pytest.mark.parametrize("name", MEANS)
def test_refuses_uneven_means(name):
    def forward(s, x, y):
        return MEANS[name](s.l(x), y)

    model, x, y = Fn(forward, l=nn.Linear(3, 2)).double(), data(4, 3), torch.tensor([1.0, 0.0, 1.0, 1.0]).double()
    options = {"loss_reduction": "mean", "verify": False}  # the targets stand in the model, which cannot be run alone
    with sw.capture(model, **options), pytest.raises(SamplesMixError, match="does not weigh all samples alike"):
        model(x, y).backward()


def test_even_means_are_fine():
    model, x, y = MLP(), data(4, 3), torch.tensor([0, 1, 1, 0])
    with sw.capture(model, loss_reduction="mean") as grads:
        (0.5 * F.cross_entropy(model(x), y) + F.mse_loss(model(x), torch.zeros(4, 2).double())).backward()

    def loss_fn(model, x, y):
        return 0.5 * F.cross_entropy(model(x), y, reduction="none") + model(x).square().mean(1)

    for name, G in oracle(model, loss_fn, x, y).items():
        assert relative_error(grads[name].materialize(), G) < 1e-12


def test_weight_decay_in_the_loss_is_refused():
    model, x = MLP(), data(4, 3)
    with sw.capture(model), pytest.raises(SamplesMixError, match="weight decay"):
        (rows(model, x).sum() + model[0].weight.square().sum()).backward()


def test_two_batches_in_one_capture_are_refused():
    model = MLP()
    with sw.capture(model), pytest.raises(UnattributedError, match="One capture holds one batch"):
        model(data(4, 3))
        model(data(5, 3))


def test_inconsistent_inputs_are_refused_unless_told():
    model = Fn(lambda s, x, bank: s.l(x) @ bank.T, l=nn.Linear(3, 2)).double()
    x, bank = data(4, 3), data(6, 2)
    with sw.capture(model), pytest.raises(UnattributedError, match=r"sizes \[4, 6\]"):
        model(x, bank)
    with sw.capture(model, batch_size=4) as grads:
        grads.backward(rows(lambda x: model(x, bank), x))
    assert grads.batch_size == 4


def test_a_capture_is_entered_once():
    grads = run_capture(MLP(), rows, data(4, 3))
    with pytest.raises(SamplewiseError, match="entered once"):
        grads.__enter__()


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_gradients_are_not_copied(copied):
    """A copy of what refers to a batch's memory would free it twice."""
    model = MLP()
    with sw.capture(model) as grads:
        rows(model, data(4, 3)).sum().backward()
        with pytest.raises(SamplewiseError, match="Keep what they answer"):
            copied(grads)
    model.grads = grads
    with pytest.raises(SamplewiseError, match="Keep what they answer"):
        copied(model)


def test_questions_without_gradients_raise():
    with sw.capture(MLP()) as grads:
        pass
    with pytest.raises(SamplewiseError, match="no gradient was captured"):
        grads.norms()
    with pytest.raises(KeyError, match="took no part"):
        grads["0.weight"]


def test_marked_data_reaches_parameters_without_a_module_call():
    model, x = MLP(), data(4, 3)
    with sw.capture(model) as grads:
        grads.mark(x)
        out = F.linear(x, model[0].weight, model[0].bias).tanh()
        grads.backward(F.linear(out, model[2].weight, model[2].bias).square().sum(1))
    for name, G in oracle(model, rows, x).items():
        assert relative_error(grads[name].materialize(), G) < 1e-12


def test_parts_of_the_model_called_on_their_own():
    model, x = MLP(), data(4, 3)
    with sw.capture(model) as grads:
        grads.backward(model[2](model[1](model[0](x))).square().sum(1))
    for name, G in oracle(model, rows, x).items():
        assert relative_error(grads[name].materialize(), G) < 1e-12


# --- numbers ---


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_sample_does_not_spoil_the_others(bad):
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(27, 4)).double()
    x = data(4, 2, 5, 5)
    good = run_capture(model, lambda m, x: m(x).square().sum(1), x[[0, 1, 3]])
    x[2, 0, 0, 0] = bad
    grads = run_capture(model, lambda m, x: m(x).square().sum(1), x)
    norms = grads.norms()
    assert not norms[2].isfinite()
    assert relative_error(norms[[0, 1, 3]], good.norms()) < 1e-12
    for name, G in grads.clipped_sum(max_norm=0.5).items():
        assert relative_error(G, good.clipped_sum(max_norm=0.5)[name]) < 1e-12
    for name, G in grads.weighted_sum(torch.tensor([1.0, 2.0, 0.0, 3.0])).items():
        assert relative_error(G, good.weighted_sum(torch.tensor([1.0, 2.0, 3.0]))[name]) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_accumulates_in_float32(dtype):
    model = nn.Linear(64, 64).to(dtype)
    x = torch.randn(3, 300, 64).to(dtype)
    with sw.capture(model) as grads:
        grads.backward((model(x).float() * 1e-2).square().sum((1, 2)))
    truth = oracle(model, lambda m, x: (m(x) * 1e-2).square().sum((1, 2)), x)
    norms = grads["weight"].norms()
    assert norms.dtype == torch.float32
    # the output and its gradient are rounded to 8 bits (bfloat16) once each; sums of 300 terms add nothing to that
    assert relative_error(norms, truth["weight"].flatten(1).norm(dim=1)) < 1e-2
    assert grads.sum()["weight"].dtype == dtype


@pytest.mark.parametrize("B", [0, 1])
def test_batches_of_none_and_one(B):
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(9, 4), nn.LayerNorm(4)).double()
    x = data(B, 2, 4)
    grads = run_capture(model, rows, x)
    assert grads.norms().shape == (B,)
    for name, G in grads.materialize().items():
        assert G.shape == (B, *model.get_parameter(name).shape)
    for name, G in grads.clipped_sum(max_norm=1.0).items():
        assert G.shape == model.get_parameter(name).shape
        assert G.isfinite().all()
    if B:
        for name, G in oracle(model, rows, x).items():
            assert relative_error(grads[name].materialize(), G) < 1e-12
