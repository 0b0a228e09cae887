"""The conditions that models are run under: each gives the oracle's numbers, or plain training's, or an error in words."""

import copy
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import Fn, curved
from functorch.compile import aot_function, nop
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import samplewise as sw
from samplewise import SamplesMixError, SamplewiseError, UnattributedError
from samplewise.factors.dense import Dense
from samplewise.factors.outer import Outer
from samplewise.ops.registry import RULES
from samplewise.testing import oracle, relative_error, run_capture

B, T, D = 4, 5, 6
TOLERANCE = 1e-9  # float64, sums of at most a few thousand terms


def data(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def rows(model, *batch) -> Tensor:
    """One loss a sample."""
    out = curved(model(*batch))
    return (out.flatten(1) * torch.arange(out[0].numel()).cos().to(out)).sum(1)


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.GELU(), nn.Linear(D, D))


def stack() -> nn.Module:
    """Two blocks and a head on [B, T, D]."""
    return nn.Sequential(block(), block(), nn.Linear(D, 3)).double()


def convnet(dtype: torch.dtype = torch.float64) -> nn.Module:
    layers = [nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(24, D), nn.LayerNorm(D)]
    return nn.Sequential(*layers, nn.Linear(D, 2)).to(dtype)


def recurrent(kind: type[nn.RNNBase]) -> nn.Module:
    return Fn(lambda s, x: s.r(x)[0], r=kind(D, 3, batch_first=True)).double()


RECURRENT = {kind.__name__: lambda kind=kind: recurrent(kind) for kind in (nn.LSTM, nn.GRU, nn.RNN)}


def assert_right(grads: sw.Grads, truth: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    """Gradients, norms and clipped sums are the oracle's, and nothing is missing."""
    assert set(grads) == set(truth)
    for name, G in truth.items():
        assert relative_error(grads[name].materialize(), G) < tolerance, name
    norms = torch.cat([G.flatten(1) for G in truth.values()], 1).abs().norm(dim=1)
    bound = norms.median().item()
    assert relative_error(grads.norms(), norms) < tolerance
    for name, S in grads.clipped_sum(max_norm=bound).items():
        w = (bound / norms).clamp(max=1).to(truth[name].dtype)
        assert relative_error(S, torch.tensordot(w, truth[name], 1)) < 10 * tolerance, name


def assert_sums_to_grad(grads: sw.Grads, model: nn.Module, tolerance: float = TOLERANCE) -> None:
    for name, S in grads.sum().items():
        assert relative_error(S, model.get_parameter(name).grad) < tolerance, name


# --- precision ---------------------------------------------------------------------------------------------------------------

# the unit roundoff is 4e-3 for bfloat16 and 5e-4 for float16; some ten ops round in turn, and norms divide by what they round
ROUNDED = {torch.bfloat16: 0.15, torch.float16: 0.02, torch.float32: 1e-4, torch.float64: TOLERANCE}


@pytest.mark.parametrize("inside", [True, False], ids=["backward-inside", "backward-outside"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, inside):
    model, x = convnet(torch.float32), data(B, 2, 8, dtype=torch.float32)
    with sw.capture(model) as grads:
        with torch.autocast("cpu", dtype=dtype):
            losses = rows(model, x).float()
            if inside:
                grads.backward(losses)
        if not inside:
            grads.backward(losses)
    assert all(G.dtype == torch.float32 for G in grads.materialize().values())
    assert_right(grads, oracle(model, rows, x), tolerance=ROUNDED[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_backward_gives_the_grad_of_plain_training(dtype):
    model, x = stack().float(), data(B, T, D, dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        with sw.capture(model) as grads:
            grads.backward(rows(model, x))
        rows(model, x).sum().backward()
    # the same roundings in the same ops, but for sums, which are taken in float32 here and in half precision there
    assert_sums_to_grad(grads, model, tolerance=ROUNDED[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_inside_the_model(dtype):
    def forward(s, x):
        with torch.autocast("cpu", dtype=dtype):
            h = s.net(x)
        return s.head(h.float())

    model, x = Fn(forward, net=stack().float(), head=nn.Linear(3, 3)), data(B, T, D, dtype=torch.float32)
    grads = run_capture(model, rows, x)
    rows(model, x).sum().backward()
    assert_sums_to_grad(grads, model, tolerance=ROUNDED[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_in_other_dtypes_and_autocast(kind, dtype):
    model, x = RECURRENT[kind]().to(dtype), data(B, T, D).to(dtype)
    assert_right(run_capture(model, rows, x), oracle(model, rows, x), tolerance=ROUNDED[dtype])
    model, x = model.float(), x.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain_dtype = model(x).dtype
    with torch.autocast("cpu", dtype=torch.bfloat16), sw.capture(model) as grads:
        out = model(x)
        assert out.dtype == plain_dtype
        grads.backward(out.float().square().sum((1, 2)))
    truth = oracle(model, lambda model, x: model(x).square().sum((1, 2)), x)
    assert_right(grads, truth, tolerance=ROUNDED[torch.bfloat16])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("make", [convnet, lambda dtype: stack().to(dtype)], ids=["convnet", "stack"])
def test_dtypes(make, dtype):
    model = make(dtype)
    x = data(B, 2, 8) if isinstance(model[0], nn.Conv1d) else data(B, T, D)
    x = x.to(dtype)
    grads = run_capture(model, rows, x)
    assert all(G.dtype == dtype for G in grads.materialize().values())
    assert grads.norms().dtype == torch.promote_types(dtype, torch.float32)
    assert_right(grads, oracle(model, rows, x), tolerance=ROUNDED[dtype])


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_models(dtype):
    model = Fn(lambda s, x: s.b(torch.tanh(s.a(x)) * s.w), a=nn.Linear(3, 4), w=(4,), b=nn.Linear(4, 2)).to(dtype)
    x = data(B, 5, 3, dtype=dtype)
    grads = run_capture(model, rows, x)
    assert_right(grads, oracle(model, rows, x), tolerance=1e-4 if dtype == torch.complex64 else TOLERANCE)


def test_real_weights_on_complex_data():
    def forward(s, x):
        spectrum = torch.fft.rfft(s.a(x), dim=-1) * torch.complex(s.re, s.im)
        return torch.fft.irfft(spectrum, n=D, dim=-1)

    model = Fn(forward, a=nn.Linear(D, D), re=(D // 2 + 1,), im=(D // 2 + 1,)).double()
    x = data(B, T, D)
    assert_right(run_capture(model, rows, x), oracle(model, rows, x))


def test_layers_of_several_dtypes():
    model = Fn(lambda s, x: s.b(s.a(x).double()), a=nn.Linear(3, 4), b=nn.Linear(4, 2).double())
    x = data(B, 3, dtype=torch.float32)
    grads, truth = run_capture(model, rows, x), oracle(model, rows, x)
    assert {name: G.dtype for name, G in grads.materialize().items()} == {n: p.dtype for n, p in model.named_parameters()}
    assert_right(grads, truth, tolerance=1e-4)  # as its float32 layer


# --- checkpointing -----------------------------------------------------------------------------------------------------------


def checkpointed_layer(s, x, **how):
    h = s.net[0](x)
    h = checkpoint(s.net[1][0], h, **how)
    return s.net[2](checkpoint(s.net[1][1], h, **how))


def checkpointed_block(s, x, **how):
    return s.net[2](checkpoint(s.net[1], s.net[0](x), **how))


def checkpointed_model(s, x, **how):
    return checkpoint(s.net, x.requires_grad_(how["use_reentrant"]), **how)


def checkpointed_function(s, x, **how):
    return checkpoint(lambda h: s.net[2](s.net[1](h).tanh() * s.scale.exp()), s.net[0](x), **how)


def checkpointed_in_a_checkpoint(s, x, **how):
    return s.net[2](checkpoint(lambda h: checkpoint(s.net[1], h, **how).tanh(), s.net[0](x), **how))


PLACES = {
    "layer": checkpointed_layer, "block": checkpointed_block, "model": checkpointed_model, "function": checkpointed_function,
}  # fmt: skip


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("place", PLACES)
def test_checkpointing(place, reentrant):
    model = Fn(lambda s, x: PLACES[place](s, x, use_reentrant=reentrant), net=stack(), scale=(1,)).double()
    if place != "function":
        model.scale.requires_grad_(False)
    x = data(B, T, D)
    assert_right(run_capture(model, rows, x), oracle(model, rows, x))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_a_checkpoint_in_a_checkpoint(reentrant):
    model = Fn(lambda s, x: checkpointed_in_a_checkpoint(s, x, use_reentrant=reentrant), net=stack()).double()
    x = data(B, T, D)
    assert_right(run_capture(model, rows, x), oracle(model, rows, x))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointing_of_an_op_without_a_rule(reentrant):
    def forward(s, x):
        product = lambda h: torch.einsum("...i,ij,jo->...o", h, s.u, s.v).tanh()
        return s.head(checkpoint(product, s.body(x), use_reentrant=reentrant))

    model = Fn(forward, body=nn.Linear(D, D), u=(D, 2), v=(2, D), head=nn.Linear(D, 3)).double()
    x = data(B, T, D)
    assert_right(run_capture(model, rows, x), oracle(model, rows, x))


def test_checkpointing_with_dropout_draws_the_same_masks():
    net = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5), nn.Linear(D, D))
    model = Fn(lambda s, x: checkpoint(s.net, x, use_reentrant=False), net=net).double()
    x = data(B, D)
    torch.manual_seed(1)
    grads = run_capture(model, rows, x)
    torch.manual_seed(1)
    rows(model, x).sum().backward()
    assert_sums_to_grad(grads, model)


# --- compiled and scripted parts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("part", ["submodule", "model"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile looks at it
def test_compiled_parts_are_right_or_refused(backend, part):
    torch.compiler.reset()
    model, x = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 3)).double(), data(B, T, D)
    truth = oracle(model, rows, x)
    if part == "submodule":
        model[1] = torch.compile(model[1], backend=backend)
    else:
        model = torch.compile(model, backend=backend)
    try:
        grads = run_capture(model, rows, x)
    except SamplewiseError as error:
        assert "compiled" in str(error)  # noqa: PT017
        assert all(p.grad is None for p in model.parameters())
    else:
        assert {name.replace("_orig_mod.", "") for name in grads} == set(truth)
        for name in grads:
            assert relative_error(grads[name].materialize(), truth[name.replace("_orig_mod.", "")]) < TOLERANCE, name


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@pytest.mark.parametrize("how", ["script", "trace"])
def test_scripted_parts_are_refused(how):
    part = nn.Linear(D, D).double()
    part = torch.jit.script(part) if how == "script" else torch.jit.trace(part, data(B, D))
    with pytest.raises(
        SamplewiseError, match=r"submodule '1' is a ScriptModule.*Capture the module that it was scripted from"
    ):
        sw.capture(nn.Sequential(nn.Linear(D, D), part))


def clamped(t: Tensor, most: float) -> Tensor:
    return (t / most).tanh() * most


def scaled_gelu(bias: Tensor, t: Tensor) -> Tensor:
    return F.gelu(t + bias) * 2


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_scripted_functions_are_seen():
    """Of data alone, as x-transformers has them, and with a parameter, as Megatron does."""
    clamp, gelu = torch.jit.script(clamped), torch.jit.script(scaled_gelu)
    net = Fn(lambda s, x: s.k(gelu(s.bias, clamp(s.l(x), 2.0))), l=nn.Linear(D, 3), k=nn.Linear(3, 2), bias=(3,)).double()
    x, call = data(B, D), torch.jit.ScriptFunction.__call__
    assert_right(run_capture(net, rows, x), oracle(net, rows, x))
    assert torch.jit.ScriptFunction.__call__ is call


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_traced_functions_are_refused():
    """Their Python may do something else than what was traced."""
    clamp = torch.jit.trace(lambda t: t.tanh() * 2, torch.ones(B, 3).double())
    net = Fn(lambda s, x: s.k(clamp(s.l(x))), l=nn.Linear(D, 3), k=nn.Linear(3, 2)).double()
    with pytest.raises(UnattributedError, match="code that was not seen"):
        run_capture(net, rows, data(B, D))


# --- regions without gradients, dropout ---------------------------------------------------------------------------------------


def test_regions_without_gradients():
    def forward(s, x):
        with torch.no_grad():
            target = s.a(x).tanh()
        return s.b(s.a(x)) - target + s.b(x.detach())

    model = Fn(forward, a=nn.Linear(D, D), b=nn.Linear(D, D)).double()
    x = data(B, D)
    assert_right(run_capture(model, rows, x), oracle(model, rows, x))


@pytest.mark.parametrize("view", [lambda w: w.unsqueeze(0), lambda w: w.view(1, -1), lambda w: w[:], lambda w: w.squeeze(0)])
def test_a_view_of_a_parameter_under_no_grad_is_a_constant(view):
    """torch lets it need a gradient, as a leaf of its own: the parameter gets none."""

    def forward(s, x):
        with torch.no_grad():
            v = view(s.w)
        return s.b(s.a(x) * v + v.expand(len(x), D))

    model = Fn(forward, a=nn.Linear(D, D), b=nn.Linear(D, 2), w=nn.Parameter(torch.randn(D))).double()
    x = data(B, D)
    grads = run_capture(model, rows, x, verify=False)
    assert set(grads) == {"a.weight", "a.bias", "b.weight", "b.bias"}
    assert_right(grads, oracle(model, rows, x))


def test_a_buffer_with_time_first_is_filled_step_by_step():
    def forward(s, x):
        out = x.new_zeros(T, len(x), D)
        for t in range(T):
            out[t] = s.a(x[:, t])
        return s.b(out).tanh().sum(0)

    model, x = Fn(forward, a=nn.Linear(D, D), b=nn.Linear(D, 2)).double(), data(B, T, D)
    assert_right(run_capture(model, rows, x, verify=False), oracle(model, rows, x))


def test_frozen_encoder_under_no_grad():
    def forward(s, x):
        with torch.no_grad():
            h = s.encoder(x)
        return s.head(h)

    model = Fn(forward, encoder=block(), head=nn.Linear(D, 3)).double()
    x = data(B, D)
    grads = run_capture(model, rows, x)
    assert set(grads) == {"head.weight", "head.bias"}
    assert_right(grads, oracle(model, rows, x))


def test_evaluation_inside_the_block_is_not_the_batch():
    model, x, other = stack(), data(B, T, D), data(B + 3, T, D)
    with sw.capture(model) as grads:
        with torch.no_grad():
            model(other)
        grads.backward(rows(model, x))
    assert_right(grads, oracle(model, rows, x))


class Masked(nn.Module):
    """Dropout whose masks are given, a row a sample."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * mask / 0.5


def test_dropout_by_given_masks_matches_the_oracle():
    model = Fn(lambda s, x, m: s.b(s.drop(s.a(x), m)), a=nn.Linear(D, D), b=nn.Linear(D, 3), drop=Masked()).double()
    x, mask = data(B, D), (torch.rand(B, D) < 0.5).double()
    assert_right(run_capture(model, rows, x, mask), oracle(model, rows, x, mask))


DROPPED = {
    "dropout": lambda: nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5), nn.Linear(D, 3)),
    "alpha dropout": lambda: nn.Sequential(nn.Linear(D, D), nn.AlphaDropout(0.5), nn.Linear(D, 3)),
    "channels": lambda: nn.Sequential(nn.Conv1d(T, 4, 3), nn.Dropout1d(0.5), nn.Flatten(), nn.Linear(16, 3)),
    "in place": lambda: nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5, inplace=True), nn.Linear(D, 3)),
    "attention": lambda: nn.TransformerEncoderLayer(D, 2, 8, dropout=0.3, batch_first=True),
    "lstm": lambda: Fn(lambda s, x: s.l(x)[0], l=nn.LSTM(D, 4, num_layers=2, dropout=0.5, batch_first=True)),
    "of a weight": lambda: Fn(lambda s, x: F.linear(x, F.dropout(s.w, 0.5, s.training)), w=(3, D)),
    "noise": lambda: Fn(lambda s, x: s.b(s.a(x) + torch.randn_like(x)), a=nn.Linear(D, D), b=nn.Linear(D, 3)),
}


@pytest.mark.parametrize("name", DROPPED)
def test_dropout_in_training_draws_what_plain_training_draws(name):
    """Verification draws nothing from the user's random state, so the masks are those of the same seed."""
    model, x = DROPPED[name]().double().train(), data(B, T, D)
    torch.manual_seed(1)
    grads = run_capture(model, rows, x)
    torch.manual_seed(1)
    rows(model, x).sum().backward()
    assert_sums_to_grad(grads, model)


@pytest.mark.parametrize("name", ["dropout", "channels", "lstm"])
def test_dropout_gives_each_sample_the_gradient_of_its_own_mask(name):
    """G[b] by plain backward of the losses of the whole batch one after another, with the same masks."""
    model, x = DROPPED[name]().double().train(), data(B, T, D)
    torch.manual_seed(1)
    grads = run_capture(model, rows, x)
    torch.manual_seed(1)
    losses = rows(model, x)
    parameters = dict(model.named_parameters())
    truth = [torch.autograd.grad(loss, list(parameters.values()), retain_graph=True) for loss in losses]
    assert_right(grads, {name: torch.stack([G[k] for G in truth]) for k, name in enumerate(parameters)})


# --- how backward is called --------------------------------------------------------------------------------------------------


def test_accumulation_over_captures_equals_the_big_batch():
    model, x = stack(), data(3 * B, T, D)
    whole = run_capture(model, rows, x)
    parts = [run_capture(model, rows, part) for part in x.split(B)]
    assert relative_error(torch.cat([part.norms() for part in parts]), whole.norms()) < TOLERANCE
    bound = whole.norms().median().item()
    for name, S in whole.clipped_sum(max_norm=bound).items():
        assert relative_error(sum(part.clipped_sum(max_norm=bound)[name] for part in parts), S) < TOLERANCE
        G = torch.cat([part[name].materialize() for part in parts])
        assert relative_error(G, whole[name].materialize()) < TOLERANCE


def test_unequal_micro_batches_equal_the_big_batch():
    model, x = stack(), data(7, T, D)
    parts = [run_capture(model, rows, part) for part in x.split([1, 4, 2])]
    assert relative_error(torch.cat([part.norms() for part in parts]), run_capture(model, rows, x).norms()) < TOLERANCE


def test_autograd_grad_of_some_parameters():
    """`torch.autograd.grad` for captured parameters asks ordinary autograd, which has no gradient for them, and says so."""
    model, x = stack(), data(B, T, D)
    with sw.capture(model) as grads:
        losses = rows(model, x)
        with pytest.raises(RuntimeError):
            torch.autograd.grad(losses.sum(), [model[0][0].weight], retain_graph=True)
        grads.backward(losses)
    assert_right(grads, oracle(model, rows, x))


def test_autograd_grad_of_inputs_is_plain_and_fills_nothing():
    model, x = stack(), data(B, T, D).requires_grad_()
    plain = torch.autograd.grad(rows(model, x).sum(), x)[0]
    with sw.capture(model) as grads:
        losses = rows(model, x)
        assert relative_error(torch.autograd.grad(losses.sum(), x, retain_graph=True)[0], plain) < TOLERANCE
        assert len(grads) == 0
        grads.backward(losses)
    assert_right(grads, oracle(model, rows, x.detach()))


def test_backward_for_some_inputs():
    """backward(inputs=) fills what it names, and for captured parameters nothing else."""
    model, x = stack(), data(B, T, D).requires_grad_()
    with sw.capture(model) as grads:
        losses = rows(model, x)
        losses.sum().backward(inputs=[x], retain_graph=True)
        assert len(grads) == 0
        assert all(p.grad is None for p in model.parameters())
        plain = x.grad.clone()
        grads.backward(losses)
    assert_right(grads, oracle(model, rows, x.detach()))
    (expected,) = torch.autograd.grad(rows(model, x).sum(), x)
    assert relative_error(plain, expected) < TOLERANCE


def test_backward_for_a_captured_parameter_is_right_or_refused():
    model, x = stack(), data(B, T, D)
    with sw.capture(model) as grads:
        losses = rows(model, x)
        try:
            losses.sum().backward(inputs=[model[2].weight])
        except RuntimeError:
            return
    assert set(grads) <= {"2.weight"}
    if len(grads):
        assert relative_error(grads["2.weight"].materialize(), oracle(model, rows, x)["2.weight"]) < TOLERANCE


@pytest.mark.parametrize("make", [stack, *RECURRENT.values()], ids=["stack", *RECURRENT])
def test_gradient_penalty_is_refused(make):
    model, x = make(), data(B, T, D).requires_grad_()
    with sw.capture(model), pytest.raises(SamplewiseError, match="create_graph|not seen"):
        losses = rows(model, x)
        (g,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
        (losses + g.flatten(1).norm(dim=1)).sum().backward()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("kind", RECURRENT)
def test_second_backward_through_a_recurrent_layer_is_refused(kind):
    model, x = RECURRENT[kind](), data(B, T, D)
    with sw.capture(model) as grads:
        losses = rows(model, x)
        grads.backward(losses)
        with pytest.raises(RuntimeError, match="second time"):
            losses.sum().backward()
    assert_right(grads, oracle(model, rows, x))


@pytest.mark.parametrize("what", ["output", "weight"])
@pytest.mark.parametrize("kind", RECURRENT)
def test_what_recurrent_layers_keep_is_not_changed_in_place(kind, what):
    model, x = RECURRENT[kind](), data(B, T, D)
    with sw.capture(model) as grads, pytest.raises(RuntimeError, match="inplace operation|changed in place"):
        y = model(x)
        with torch.no_grad():
            (y if what == "output" else model.r.weight_hh_l0).mul_(2)
        grads.backward(y.sum((1, 2)))


def test_hessian_vector_product_is_refused():
    model, x = stack(), data(B, T, D)
    with sw.capture(model), pytest.raises(RuntimeError):
        loss = rows(model, x).sum()
        first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum(g.square().sum() for g in first).backward()
    assert all(p.grad is None for p in model.parameters())


# --- weights that change while they are used ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 4, 5])
@pytest.mark.parametrize("training", [True, False])
def test_spectral_norm(size, training):
    """The power iteration writes into buffers, with as many entries as the batch may have samples."""
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 3))).double().train(training)
    x, plain = data(size, 4), copy.deepcopy(model)
    grads = run_capture(model, rows, x)
    rows(plain, x).sum().backward()
    assert_sums_to_grad(grads, plain)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True))
    if not training:
        assert_right(grads, oracle(model, rows, x))


# --- hooks -------------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_that_look_change_nothing():
    model, x, seen = stack(), data(B, T, D), []
    for module in model.modules():
        module.register_forward_pre_hook(lambda m, args: seen.append("pre"))
        module.register_forward_hook(lambda m, args, out: seen.append("forward"))
        module.register_full_backward_pre_hook(lambda m, g: seen.append("backward pre"))
        module.register_full_backward_hook(lambda m, gi, go: seen.append("backward"))
    assert_right(run_capture(model, rows, x), oracle(model, rows, x))
    assert set(seen) == {"pre", "forward", "backward pre", "backward"}


HOOKS = {
    "forward": lambda m: m.register_forward_hook(lambda m, args, out: out * 2),
    "forward pre": lambda m: m.register_forward_pre_hook(lambda m, args: (args[0] * 2,)),
    "full backward": lambda m: m.register_full_backward_hook(lambda m, gi, go: tuple(g * 2 for g in gi)),
    "full backward pre": lambda m: m.register_full_backward_pre_hook(lambda m, go: tuple(g * 2 for g in go)),
    "on a tensor": lambda m: m.register_forward_hook(lambda m, args, out: out.register_hook(lambda g: g * 2) and None),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_that_change_something_change_the_numbers(name):
    model, x = stack(), data(B, T, D)
    before = oracle(model, rows, x)
    HOOKS[name](model[1])
    truth = oracle(model, rows, x)
    assert any(relative_error(before[n], G) > 0.1 for n, G in truth.items())
    assert_right(run_capture(model, rows, x), truth)


def test_hooks_on_parameters_are_refused_or_right():
    """Such a hook changes the ordinary gradient, of which there is none here; it must not be dropped in silence."""
    model, x = stack(), data(B, T, D)
    model[0][0].weight.register_hook(lambda g: g * 2)
    try:
        grads = run_capture(model, rows, x)
    except SamplewiseError as error:
        assert "0.0.weight" in str(error)  # noqa: PT017
        return
    rows(model, x).sum().backward()
    assert_sums_to_grad(grads, model)


# --- batches of one and none -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [stack, convnet], ids=["stack", "convnet"])
def test_batch_of_one(make):
    model = make()
    x = data(1, T, D) if make is stack else data(1, 2, 8)
    assert_right(run_capture(model, rows, x), oracle(model, rows, x))


@pytest.mark.parametrize("make", [stack, convnet], ids=["stack", "convnet"])
def test_batch_of_none(make):
    model = make()
    x = data(0, T, D) if make is stack else data(0, 2, 8)
    with sw.capture(model) as grads:
        grads.backward(model(x).flatten(1).sum(1))
    assert grads.norms().shape == (0,)
    assert {name: G.shape for name, G in grads.materialize().items()} == {
        name: (0, *p.shape) for name, p in model.named_parameters()
    }
    for name, S in grads.clipped_sum(max_norm=1.0).items():
        assert torch.equal(S, torch.zeros_like(model.get_parameter(name)))


# --- threads -----------------------------------------------------------------------------------------------------------------


def in_threads(*jobs) -> list:
    """What the jobs return (or raise), each run in a thread of its own, all at once."""
    start, found = threading.Barrier(len(jobs)), [None] * len(jobs)

    def run(k, job):
        start.wait()
        try:
            found[k] = job()
        except Exception as error:
            found[k] = error

    threads = [threading.Thread(target=run, args=(k, job)) for k, job in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("shared", [True, False], ids=["same-model", "different-models"])
def test_captures_in_threads_do_not_see_each_other(shared):
    first = stack()
    models = [first, first, first] if shared else [stack(), convnet(), stack()]
    batches = [[data(size, *((2, 8) if isinstance(m[0], nn.Conv1d) else (T, D))) for size in (3 + k, 5, 2)]
               for k, m in enumerate(models)]  # fmt: skip
    truths = [[oracle(m, rows, x) for x in xs] for m, xs in zip(models, batches, strict=True)]

    def job(m, xs):
        return lambda: [run_capture(m, rows, x) for _ in range(4) for x in xs]

    found = in_threads(*(job(m, xs) for m, xs in zip(models, batches, strict=True)))
    for several, truth in zip(found, truths, strict=True):
        assert isinstance(several, list), several
        for k, grads in enumerate(several):
            assert_right(grads, truth[k % 3])
    assert all(p.grad is None for m in models for p in m.parameters())
    assert not any(h for m in models for part in m.modules() for h in (part._forward_hooks, part._forward_pre_hooks))


def test_plain_training_in_another_thread_is_right_or_refused():
    """Another thread trains the same model: neither side may get a wrong number."""
    model, x = stack(), data(B, T, D)
    truth = oracle(model, rows, x)
    plain = [G.sum(0) for G in truth.values()]

    def train():
        return [torch.autograd.grad(rows(model, x).sum(), list(model.parameters())) for _ in range(10)]

    captured, trained = in_threads(lambda: [run_capture(model, rows, x) for _ in range(10)], train)
    if isinstance(captured, list):
        for grads in captured:
            assert_right(grads, truth)
    else:
        assert isinstance(captured, SamplewiseError), captured
    if isinstance(trained, list):
        for gradient in trained:
            assert all(relative_error(g, t) < TOLERANCE for g, t in zip(gradient, plain, strict=True))
    else:
        assert isinstance(trained, SamplewiseError), trained


# --- verification leaves everything as it was --------------------------------------------------------------------------------


class Moody(nn.Module):
    """Has all that a check could disturb: buffers, counters, dropout, a part in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(D, D), nn.Linear(D, 3)
        self.norm, self.drop = nn.BatchNorm1d(D), nn.Dropout(0.5)
        self.norm.eval()
        self.register_buffer("calls", torch.zeros(()))
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        return self.head(self.drop(self.norm(self.body(x)) + torch.rand(()) + random.random() + np.random.rand()))


def surroundings(model: nn.Module, x: Tensor) -> dict:
    return {
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "buffers": {name: value.tolist() for name, value in model.named_buffers()},
        "count": model.count,
        "training": [m.training for m in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()],
        "parameters": [(name, id(p), p._version, p.requires_grad, set(vars(p))) for name, p in model.named_parameters()],
        "gradients": [None if p.grad is None else p.grad.tolist() for p in model.parameters()],
        "input": (x.tolist(), x._version, x.requires_grad, x.grad, dict(vars(x))),
        "modules": [(name, id(m), sorted(vars(m))) for name, m in model.named_modules()],
    }


@pytest.mark.parametrize("with_grad", [True, False])
def test_verify_leaves_everything_as_it_was(with_grad):
    model, x = Moody().double(), data(B, D)
    if with_grad:
        rows(model, x).sum().backward()
        x.requires_grad_()
    model.head.register_forward_hook(lambda m, args, out: None)
    before = surroundings(model, x)
    assert sw.verify(model, x).is_right
    assert surroundings(model, x) == before


def test_verify_leaves_everything_as_it_was_when_it_raises():
    model, x = Moody().double(), data(B, D)
    model.norm.train()
    rows(model, x).sum().backward()
    before = surroundings(model, x)
    with pytest.raises(SamplewiseError):
        sw.verify(model, x)
    assert surroundings(model, x) == before


def test_verify_leaves_everything_as_it_was_when_the_model_raises():
    model, x = Moody().double(), data(B, D)
    model.drop.register_forward_hook(lambda m, args, out: out[:, :2])
    before = surroundings(model, x)
    with pytest.raises(RuntimeError):
        sw.verify(model, x)
    assert surroundings(model, x) == before


def test_a_verified_step_leaves_what_a_plain_step_leaves():
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    model, x = Moody().double(), data(B, D)
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    grads = run_capture(model, rows, x)
    after = surroundings(model, x)
    plain = Moody().double()
    plain.load_state_dict({**model.state_dict(), "calls": torch.zeros(())})
    torch.set_rng_state(state[0]), random.setstate(state[1]), np.random.set_state(state[2])
    rows(plain, x).sum().backward()
    expected = surroundings(plain, x)
    for what in ("torch", "python", "numpy", "buffers", "count", "training"):
        assert after[what] == expected[what], what
    assert_sums_to_grad(grads, plain)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        return self.layer(x)


def with_bound_forward(counting: Counting) -> nn.Module:
    counting.forward = MethodType(Counting.forward, counting)
    return counting


def with_wrapped_forward(counting: Counting) -> nn.Module:
    old = counting.forward
    counting.forward = lambda x: old(x) * 2
    return counting


def in_a_list(counting: Counting) -> nn.Module:
    model = Fn(lambda s, x: s.parts[0](x), c=counting)
    model.parts = [counting]
    return model


@pytest.mark.parametrize("wrap", [with_bound_forward, with_wrapped_forward, in_a_list])
def test_verify_leaves_modules_that_are_reached_in_odd_ways(wrap):
    counting = Counting()
    model = wrap(counting).double()
    assert sw.verify(model, data(B, D)).is_right
    assert (counting.count, counting.calls.item()) == (0, 0)


@torch.no_grad()
def halve(p: Tensor) -> None:
    p *= 0.5


@torch.no_grad()
def halve_by_data(p: Tensor) -> None:
    p.data.mul_(0.5)


@torch.no_grad()
def put_half(p: Tensor) -> None:
    p.data = p.data / 2


@torch.no_grad()
def halve_a_row(p: Tensor) -> None:
    p[0] = p[0] / 2


@torch.no_grad()
def halve_into(p: Tensor) -> None:
    torch.mul(p, 0.5, out=p)


@torch.no_grad()
def halve_each(p: Tensor) -> None:
    torch._foreach_mul_([p], 0.5)


def halve_by_numpy(p: Tensor) -> None:
    p.detach().numpy()[:] *= 0.5


WRITES = [halve, halve_by_data, put_half, halve_a_row, halve_into, halve_each, halve_by_numpy]


def writing(write: Callable[[Tensor], None], kind: str) -> nn.Module:
    """A model whose forward writes to a weight, before it is used or among uses of a layer that keeps its weights in a list."""
    if kind == "recurrent":
        return Fn(
            lambda s, x: (write(s.a.weight_hh_l0), s.b(s.a(x)[0]).sum(1))[1],
            a=nn.GRU(D, 4, batch_first=True),
            b=nn.Linear(4, 2),
        )
    forward = lambda s, x: (write(s.b.weight), s.b(s.a(x).tanh()))[1]
    return Fn(forward, a=nn.Linear(D, 4), b=nn.Linear(4, 2))


@pytest.mark.parametrize("kind", ["linear", "recurrent"])
@pytest.mark.parametrize("write", WRITES)
def test_a_verified_forward_that_writes_to_parameters_writes_once(write, kind):
    model, x = writing(write, kind).double(), data(B, 3, D) if kind == "recurrent" else data(B, D)
    plain = copy.deepcopy(model)
    assert sw.verify(model, x).is_right
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
    grads = run_capture(model, rows, x)
    rows(plain, x).sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
    assert_sums_to_grad(grads, plain)


def test_a_forward_that_writes_to_parameters_and_mixes_samples_is_caught():
    def forward(s, x):
        halve(s.a.weight)
        return s.a(x - torch.from_numpy(x.detach().numpy().mean(0)))

    model, x = Fn(forward, a=nn.Linear(D, 3)).double(), data(B, D)
    before = model.a.weight.detach().clone()
    assert not sw.verify(model, x).is_right
    assert torch.equal(model.a.weight, before)


def test_a_forward_that_writes_to_parameters_by_another_way_to_them_is_not_run_to_be_verified():
    model, x = writing(halve, "linear").double(), data(B, D)
    old = model.forward
    model.forward = lambda x: old(x)
    before = model.b.weight.detach().clone()
    with pytest.raises(SamplewiseError, match="verify=False"):
        sw.verify(model, x)
    assert torch.equal(model.b.weight, before)


LAZY_WAYS: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "capture": lambda model, x: run_capture(model, rows, x),
    "verify": sw.verify,
    "step": lambda model, x: sw.per_sample_step(model, rows, lambda grads: grads.norms())(x),
    "compiled": lambda model, x: sw.per_sample_step(model, rows, lambda grads: grads.norms(), compile=True)(x),
}


@pytest.mark.parametrize("way", LAZY_WAYS)
def test_lazy_modules_are_refused_until_they_have_run(way):
    model, x = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(2)).double(), data(B, D)
    with pytest.raises(SamplewiseError, match="lazy"):
        LAZY_WAYS[way](model, x)
    model(x)
    LAZY_WAYS[way](model, x)


# --- what verification catches -----------------------------------------------------------------------------------------------

MIXING = {
    "batch norm": lambda: nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, 3)),
    "batch norm without affine": lambda: nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D, affine=False), nn.Linear(D, 3)),
    "batch norm first": lambda: nn.Sequential(nn.BatchNorm1d(D, affine=False), nn.Linear(D, 3)),
    "batch norm last": lambda: nn.Sequential(nn.Linear(D, 3), nn.BatchNorm1d(3, affine=False)),
    "batch norm without statistics": lambda: nn.Sequential(
        nn.Linear(D, D), nn.BatchNorm1d(D, track_running_stats=False), nn.Linear(D, 3)
    ).eval(),
}


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("name", MIXING)
def test_batch_norm_in_training_is_refused_by_name(name, verify):
    model, x = MIXING[name]().double(), data(B, D)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(SamplewiseError, match="batch_norm|BatchNorm"), sw.capture(model, verify=verify) as grads:
        grads.backward(rows(model, x))
    assert all(p.grad is None for p in model.parameters())
    if verify:  # nothing was run but the check
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_batch_norm_in_eval_is_right():
    model, x = MIXING["batch norm"]().double(), data(B, D)
    model(data(20, D))
    model.eval()
    assert_right(run_capture(model, rows, x), oracle(model, rows, x))


def through_numpy(s, x):
    h = x.numpy()
    return s.l(torch.from_numpy(h - h.mean(0)))


LEAVES_TORCH = {
    "largest of the batch": lambda s, x: s.l(x / x.abs().max().item()),
    "largest after a weight": lambda s, x: s.k(s.l(x) / s.l(x).abs().max().item()),
    "numpy": through_numpy,
    "tolist": lambda s, x: s.l(x - torch.tensor(x.tolist(), dtype=x.dtype).mean(0)),
    "branch": lambda s, x: s.l(x) if float(x.sum()) > 0 else s.k(x),
    "batch size": lambda s, x: s.l(x) / len(x),
}


@pytest.mark.parametrize("name", LEAVES_TORCH)
def test_statistics_that_leave_torch_are_caught(name):
    model = Fn(LEAVES_TORCH[name], l=nn.Linear(D, D), k=nn.Linear(D, D)).double()
    x = data(B, D)
    x[0] = x[0].abs()  # sample 0 alone goes another way than the batch
    x[1:] = -10 * x[1:].abs()
    with sw.capture(model), pytest.raises(SamplewiseError, match="verify=False|not known|mixed"):
        rows(model, x).sum().backward()
    assert all(p.grad is None for p in model.parameters())


def test_verify_false_turns_the_check_off():
    model = Fn(lambda s, x: s.l(x / x.abs().max().item()), l=nn.Linear(D, D)).double()
    x = data(B, D)
    grads = run_capture(model, rows, x, verify=False)
    scaled = nn.Linear(D, D).double()
    scaled.load_state_dict(model.l.state_dict())
    truth = oracle(scaled, rows, x / x.abs().max())
    assert_right(grads, {f"l.{name}": G for name, G in truth.items()})


def off_by_ten_percent(meeting, x, weight, bias=None):
    rows = meeting.rows(x, features=1)
    meeting.use(weight, lambda g, x: Outer.of_rows(rows(x), 1.1 * rows(g)), keep=(x,))
    meeting.use(bias, lambda g: Dense.of_sum(rows(g)))
    return F.linear(x, meeting.plain(weight), meeting.plain(bias))


def samples_swapped(meeting, x, weight, bias=None):
    rows = meeting.rows(x, features=1)
    meeting.use(weight, lambda g, x: Outer.of_rows(rows(x).flip(0), rows(g).flip(0)), keep=(x,))
    meeting.use(bias, lambda g: Dense.of_sum(rows(g)))
    return F.linear(x, meeting.plain(weight), meeting.plain(bias))


@pytest.mark.parametrize("wrong", [off_by_ten_percent, samples_swapped])
def test_verify_catches_a_wrong_rule(monkeypatch, wrong):
    monkeypatch.setitem(RULES, F.linear, wrong)
    model, x = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 3)).double(), data(B, D)
    result = sw.verify(model, x)
    assert {row.parameter: row.is_right for row in result.rows} == {
        "0.weight": False, "0.bias": True, "2.weight": False, "2.bias": True,
    }  # fmt: skip
    assert result.outputs_agree
    assert str(result).count(" wrong") == 2
    with sw.capture(model), pytest.raises(SamplewiseError, match=r"gradient of parameter '0.weight' \(used by linear\)"):
        model(x)


def test_verify_measures_rounding():
    """In bfloat16 the sum over positions rounds differently in the batch and alone: an error of 0 would show nothing."""
    model, x = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, 3)).bfloat16(), data(B, 40, D).bfloat16()
    errors = [row.error for row in sw.verify(model, x).rows]
    assert 0 < max(errors) < 0.1


@dataclass
class Answer:
    logits: Tensor


class Box:
    def __init__(self, logits: Tensor):
        self.logits = logits


@pytest.mark.parametrize("kind", [Answer, Box, lambda logits: {"logits": logits}, lambda logits: [(logits, None)]])
def test_outputs_in_objects_are_checked(kind):
    """Or it is said in words that they cannot be."""
    model = Fn(lambda s, x: kind(s.l(x / x.abs().max().item())), l=nn.Linear(D, D)).double()
    with sw.capture(model), pytest.raises(SamplewiseError, match="verify=False"):
        model(data(B, D))


def test_verify_says_what_to_do():
    model = Fn(lambda s, x: s.l(x / x.abs().max().item()), l=nn.Linear(D, D)).double()
    with sw.capture(model), pytest.raises(SamplesMixError) as caught:
        model(data(B, D))
    words = str(caught.value)
    assert "another output alone than in its batch" in words
    assert "l.weight" in words
    assert "DIFFER" in words
    assert "capture(model, verify=False)" in words


TRIMMED = {
    "positions": lambda s, ids, lengths: s.head(s.embed(ids[:, : int(lengths.max())])),
    "channels first": lambda s, ids, lengths: s.head(s.embed(ids[:, : int(lengths.max())])).transpose(1, 2),
    "pooled": lambda s, ids, lengths: s.head(s.embed(ids[:, : int(lengths.max())])).relu().amax(1)[:, None],
}


@pytest.mark.parametrize("name", ["positions", "channels first"])
def test_models_that_trim_to_the_longest_sample(name):
    """A sample alone is shorter than in its batch; what lies beyond its length has no part in the loss."""

    def loss_fn(model, ids, lengths):
        out = model(ids, lengths)
        losses = out.square().sum(1 if name == "channels first" else 2)
        return (losses * (torch.arange(losses.shape[1]) < lengths[:, None])).sum(1)

    model = Fn(TRIMMED[name], embed=nn.Embedding(20, 4), head=nn.Linear(4, 3)).double()
    ids, lengths = torch.randint(20, (3, 9)), torch.tensor([4, 7, 2])
    # channels first, what a sample has alone is not the first part of what it has in the batch, and the check says so
    verify = name != "channels first"
    if not verify:
        with sw.capture(model), pytest.raises(SamplesMixError, match="verify=False"):
            model(ids, lengths)
    assert_right(run_capture(model, loss_fn, ids, lengths, verify=verify), oracle(model, loss_fn, ids, lengths))


def test_padding_that_reaches_the_output_is_caught():
    """Pooling over the padding makes a sample depend on the longest of its batch."""
    model = Fn(TRIMMED["pooled"], embed=nn.Embedding(20, 4), head=nn.Linear(4, 3)).double()
    ids, lengths = torch.randint(20, (3, 9)), torch.tensor([4, 7, 2])
    with sw.capture(model), pytest.raises(SamplesMixError, match="another output alone"):
        model(ids, lengths)


# --- when verification runs --------------------------------------------------------------------------------------------------


def counted(model: nn.Module) -> list[int]:
    """Sizes of the batches that the last layer of the model sees, from now on."""
    sizes: list[int] = []
    model[-1].register_forward_hook(lambda m, args, out: sizes.append(len(out)))
    return sizes


def test_verify_runs_once_per_kind_of_call():
    model, x = stack(), data(B, T, D)
    sizes = counted(model)
    run_capture(model, rows, x)
    assert sizes == [B, 1, 1, B]  # the check: the batch and two samples alone; then the call itself
    for again in (data(B, T, D), data(B + 5, T, D), data(B + 5, T + 3, D)):  # sizes alone make no new kind
        sizes.clear()
        run_capture(model, rows, again)
        assert sizes == [len(again)]
    sizes.clear()
    run_capture(model.eval(), rows, x)  # another mode does
    assert len(sizes) == 4
    sizes.clear()
    run_capture(model, rows, data(B, D))  # another rank does
    assert len(sizes) == 4
    sizes.clear()
    run_capture(model, rows, x, params=["0.*"])  # other parameters do
    assert len(sizes) == 4


def test_verify_runs_again_where_backward_has_got_hooks():
    model, x = stack(), data(B, T, D)
    run_capture(model, rows, x)
    model[0].register_full_backward_pre_hook(lambda module, gradients: (gradients[0] / gradients[0].norm(),))
    with pytest.raises(SamplesMixError):
        run_capture(model, rows, x)


def test_no_captured_parameter_takes_part():
    model = Fn(lambda s, x: x * s.w, w=nn.Parameter(torch.ones(D)), v=nn.Parameter(torch.ones(D)))
    with sw.capture(model, params=["v"]) as grads:
        grads.backward(model(data(B, D)).sum(1))
    assert not len(grads)
    with pytest.raises(SamplewiseError, match="no gradient was captured"):
        grads.norms()


def test_verify_knows_inputs_that_need_a_gradient():
    """Forces, saliency: forward asks for the gradient of its input, which in a submodule may be changed in place."""

    def forces(s, x):
        energy = s.a(x).tanh().sum()
        return s.b(torch.autograd.grad(energy, x, retain_graph=True)[0].detach()) + s.a(x)

    model = Fn(forces, a=nn.Linear(D, D), b=nn.Linear(D, D)).double()
    losses = lambda model, x: rows(model, x.clone().requires_grad_())
    x = data(B, D)
    truth, found = oracle(model, losses, x), run_capture(model, losses, x).materialize()
    assert found.keys() == truth.keys()
    assert all(relative_error(found[name], truth[name]) < TOLERANCE for name in truth)
    model = nn.ModuleDict({"a": nn.Linear(D, D), "b": nn.Sequential(nn.ReLU(inplace=True), nn.Linear(D, 3))}).double()
    run_capture(model, lambda model, x: model["b"](model["a"](x)).square().sum(1), x)


def derivatives(s, x):
    """Several gradients of the same values at once."""
    x = x.detach().requires_grad_()
    y = x.tanh()
    (g,) = torch.autograd.grad(y, x, torch.stack([torch.ones_like(y)] * 3), is_grads_batched=True)
    return s.a(x) + s.b(g.sum(0))


DIFFERENTIATED = {
    "batched gradients": derivatives,
    "autograd.functional": lambda s, x: s.a(torch.autograd.functional.jvp(torch.tanh, x, torch.ones_like(x))[1]) + s.b(x),
    "traced": lambda s, x: s.a(aot_function(torch.tanh, nop)(s.b(x))),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # aot_function's own
@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_data_differentiated_and_traced_in_forward(name, verify):
    model, x = Fn(DIFFERENTIATED[name], a=nn.Linear(D, D), b=nn.Linear(D, D)).double(), data(B, D)
    truth, found = oracle(model, rows, x), run_capture(model, rows, x, verify=verify).materialize()
    assert found.keys() == truth.keys()
    assert all(relative_error(found[name], truth[name]) < TOLERANCE for name in truth)


def test_graph_modules_are_verified():
    """Those of torch.fx make a class for each instance, which a copy must have too."""
    model, x = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 3))).double(), data(B, D)
    truth, found = oracle(model, rows, x), run_capture(model, rows, x).materialize()
    assert all(relative_error(found[name], truth[name]) < TOLERANCE for name in truth)
    assert sw.verify(model, x).is_right


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:FutureWarning")  # torch's own, as it makes its rules for duals
def test_dual_parameters_are_refused():
    def dual(s, x):
        with torch.autograd.forward_ad.dual_level():
            w = torch.autograd.forward_ad.make_dual(s.w, torch.ones_like(s.w))
            return x * torch.autograd.forward_ad.unpack_dual(x * w).tangent

    with (
        sw.capture(Fn(dual, w=nn.Parameter(torch.rand(D))), verify=False) as grads,
        pytest.raises(UnattributedError, match="make_dual"),
    ):
        grads.backward(rows(grads.model, data(B, D)))


def test_verify_is_not_remembered_if_it_failed():
    model = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, 3)).double()
    for _ in range(2):
        with sw.capture(model), pytest.raises(SamplesMixError):
            model(data(B, D))


def test_verify_is_not_run_without_gradients_or_when_off_or_for_one_sample():
    model, x = stack(), data(B, T, D)
    sizes = counted(model)
    with sw.capture(model), torch.no_grad():
        model(x)
    run_capture(model, rows, x, verify=False)
    run_capture(model, rows, x[:1])
    assert sizes == [B, B, 1]


def test_models_that_cannot_be_copied_are_verified_all_the_same():
    """A module may hold what deepcopy refuses: a lock, a tensor with a graph."""
    model = Fn(lambda s, x: keep(s, s.l(x)), l=nn.Linear(D, 3)).double()
    model.lock = threading.Lock()

    def keep(s, out):
        s.last = out
        return out

    x = data(B, D)
    truth = {f"l.{name}": G for name, G in oracle(model.l, rows, x).items()}
    for size in (x, x[:, None].squeeze(1)):
        assert_right(run_capture(model, rows, size), truth)
    model.eval()  # a new kind of call, now that the module holds an output
    assert_right(run_capture(model, rows, x), truth)


# --- the table ---------------------------------------------------------------------------------------------------------------


def test_the_table_of_verify():
    model = Fn(
        lambda s, x: torch.einsum("bti,ij,jo->bto", s.l(x), s.u, s.v) * s.w, l=nn.Linear(D, D), u=(D, 2), v=(2, 3), w=(3,)
    )
    result = sw.verify(model.double(), data(B, T, D))
    assert isinstance(result, sw.Verification)
    assert result.is_right
    assert result.outputs_agree
    assert result.output_error < 1e-12
    assert result.samples == (0, B - 1)
    table = {row.parameter: row for row in result.rows}
    assert set(table) == {"l.weight", "l.bias", "u", "v", "w"}
    assert (table["l.weight"].ops, table["l.weight"].how) == ("linear", "rule")
    assert (table["w"].ops, table["w"].how) == ("mul", "elementwise")
    assert (table["u"].ops, table["u"].how) == ("einsum", "generic")
    assert all(row.is_right and row.error < 1e-12 for row in result.rows)
    assert all(str(B) in row.layout for row in result.rows)
    lines = str(result).splitlines()
    assert lines[0].split() == ["parameter", "op", "by", "samples", "error"]
    assert [line.split()[0] for line in lines[1:-1]] == list(table)
    assert lines[-1].startswith("outputs of samples [0, 3] alone and in the batch agree")


def test_the_table_of_verify_shows_outputs_that_differ():
    model = Fn(lambda s, x: s.l(x / x.abs().max().item()), l=nn.Linear(D, 3)).double()
    result = sw.verify(model, data(B, D))
    assert not result.is_right
    assert not result.outputs_agree
    assert "DIFFER" in str(result)


def test_verify_takes_keywords_and_dimensions():
    model = Fn(lambda s, x, *, scale: s.l(x) * scale, l=nn.Linear(D, 3)).double()
    assert sw.verify(model, data(T, B, D), scale=data(1, B, 1), batch_dim=1).samples == (0, B - 1)
    assert sw.verify(model, data(B, D), scale=data(7, 1)[:1], batch_size=B).is_right


def test_verify_raises_where_samples_cannot_be_told_apart():
    with pytest.raises(UnattributedError, match=r"sizes \[4, 6\]"):
        sw.verify(Fn(lambda s, x, y: s.l(x), l=nn.Linear(D, 3)).double(), data(B, D), data(6, 2))
    with pytest.raises(SamplesMixError, match="mean mixed the samples"):
        sw.verify(Fn(lambda s, x: s.l(x - x.mean(0)), l=nn.Linear(D, 3)).double(), data(B, D))


class Frozen(dict):
    """A dict that cannot be changed, as the configs of diffusers."""

    def update(self, *args, **kwargs):
        raise TypeError("this is frozen")


class Configured(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.config, self.seen, self.by_name, self.kinds = (
            nn.Linear(3, 2),
            Frozen(scale=2.0),
            [0],
            {"calls": 0},
            set(),
        )

    def forward(self, x):
        self.seen.append(len(x))
        self.by_name["calls"] += 1
        self.kinds.add(x.dtype)
        return self.layer(x) * self.config["scale"]


def test_containers_among_attributes():
    """Those that cannot be changed are left alone, others hold what the model's own run has put there, whatever was checked."""
    net, x = Configured().double(), torch.randn(4, 3).double()
    frozen, seen = net.config, net.seen
    truth = oracle(net, rows, x)
    grads = run_capture(net, rows, x)
    assert_right(grads, truth)
    assert net.config is frozen and dict(frozen) == {"scale": 2.0}
    assert net.seen is seen and seen == [0, 4] and net.by_name == {"calls": 1} and net.kinds == {torch.float64}


def test_containers_of_a_model_that_reaches_itself():
    """Its twin, which is what runs when it is verified, puts things into the model's own."""
    net = Configured().double()
    net.forward = MethodType(lambda _, x: Configured.forward(net, x), net)
    run_capture(net, rows, torch.randn(4, 3).double())
    assert (net.seen, net.by_name, net.kinds) == ([0, 4], {"calls": 1}, {torch.float64})
