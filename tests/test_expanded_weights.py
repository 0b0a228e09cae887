"""The drop-in for torch's private API: same answers, same refusals, and torch's own rule files on this engine."""

import importlib.util
import re
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cases import ALL, BY_NAME, Case, Fn, curved
from torch import nn
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads as torchs

import samplewise.expanded_weights as ew
from samplewise import SamplewiseError, call_for_per_sample_grads
from samplewise.ops.foreign import FOREIGN
from samplewise.testing import oracle, relative_error


@pytest.mark.parametrize("case", ALL)
def test_fills_grad_sample(case: Case):
    model, batch, _ = case.build()
    batch_first = case.batch_dim == 0
    out = call_for_per_sample_grads(model, batch_first=batch_first)(*batch)
    curved(out).sum().backward()
    _, _, loss_fn = case.build()
    truth = oracle(model, loss_fn, *batch, batch_dim=case.batch_dim)
    for name, p in model.named_parameters():
        assert p.grad is None
        if p.requires_grad and name in truth:
            assert relative_error(p.grad_sample, truth[name]) < 1e-9, name


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_agrees_with_torch(reduction):
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, 3)).double()
    x = torch.randn(5, 2, 5, 5, dtype=torch.float64)
    results = []
    for call in (call_for_per_sample_grads, torchs):
        getattr(call(model, loss_reduction=reduction)(x).square().sum(1), reduction)().backward()
        results.append([p.grad_sample for p in model.parameters()])
        for p in model.parameters():
            p.grad_sample = None
    for ours, theirs in zip(*results, strict=True):
        assert relative_error(ours, theirs) < 1e-12


def test_unused_parameter_gets_none():
    model = Fn(lambda s, x: s.a(x), a=nn.Linear(2, 2), b=nn.Linear(2, 2))
    call_for_per_sample_grads(model)(torch.randn(3, 2)).sum().backward()
    assert model.a.weight.grad_sample.shape == (3, 2, 2)
    assert model.b.weight.grad_sample is None


def test_frozen_parameter_is_untouched():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    call_for_per_sample_grads(model)(torch.randn(3, 2)).sum().backward()
    assert not hasattr(model.bias, "grad_sample")


REFUSED_AT_ONCE = {
    "reduction": (lambda call: call(nn.Linear(2, 2), loss_reduction="max"), "loss_reduction"),
    "no module": (lambda call: call(torch.relu), "nn.Module"),
    "size no int": (lambda call: call(nn.Linear(2, 2), batch_size=2.0), "batch_size|Batch size"),
    "size zero": (lambda call: call(nn.Linear(2, 2), batch_size=0), "positive"),
    "inconsistent": (lambda call: call(nn.Bilinear(2, 2, 2))(torch.ones(3, 2), torch.ones(4, 2)), "batch size"),
    "no tensor": (lambda call: call(Fn(lambda s, x: s.l(torch.ones(3, 2)), l=nn.Linear(2, 2)))(3), "tensor"),
    "size differs": (lambda call: call(nn.Linear(2, 2), batch_size=4)(torch.ones(3, 2)), "4"),
}


@pytest.mark.parametrize("call", [call_for_per_sample_grads, torchs], ids=["ours", "torch"])
@pytest.mark.parametrize("name", REFUSED_AT_ONCE)
def test_refuses_what_torch_refuses(name, call):
    attempt, words = REFUSED_AT_ONCE[name]
    with pytest.raises(RuntimeError, match=words):
        attempt(call)


@pytest.mark.parametrize("call", [call_for_per_sample_grads, torchs], ids=["ours", "torch"])
def test_refuses_uncleared_grad_sample(call):
    model = nn.Linear(2, 2)
    call(model)(torch.ones(3, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="grad_sample"):
        call(model)


def test_two_calls_of_one_function_need_clearing():
    model = nn.Linear(2, 2)
    function = call_for_per_sample_grads(model)
    function(torch.ones(3, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="grad_sample of parameter 'weight'"):
        function(torch.ones(3, 2))


def test_two_calls_in_one_backward_raise():
    model = nn.Linear(2, 2)
    function = call_for_per_sample_grads(model)
    both = function(torch.ones(3, 2)).sum() + function(torch.ones(3, 2)).sum()
    with pytest.raises(SamplewiseError, match="another call"):
        both.backward()


def test_second_backward_of_one_call_adds_up_like_grad():
    model = nn.Linear(2, 2).double()
    loss = call_for_per_sample_grads(model)(torch.ones(3, 2, dtype=torch.float64)).square().sum()
    loss.backward(retain_graph=True)
    once = model.weight.grad_sample.clone()
    loss.backward()
    torch.testing.assert_close(model.weight.grad_sample, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_use_that_is_not_seen_raises_before_backward():
    def forward(s, x):
        with torch._C.DisableTorchFunction():
            return x @ s.w

    model = Fn(forward, w=(2, 2))
    with pytest.raises(SamplewiseError, match="ordinary gradient reached captured parameter 'w'"):
        call_for_per_sample_grads(model)(torch.ones(3, 2))


# --- torch's own rule files ---

FILES = ["linear", "conv", "embedding", "layer_norm", "group_norm", "instance_norm"]


@pytest.fixture
def registry():
    """The registry of foreign rules, emptied again afterwards."""
    assert not FOREIGN
    yield FOREIGN
    FOREIGN.clear()


@pytest.fixture
def torch_rules(monkeypatch, registry):
    """The installed torch's rule files, their two imports of machinery redirected to samplewise.expanded_weights."""
    folder = Path(importlib.util.find_spec("torch.nn.utils._expanded_weights").origin).parent
    package = types.ModuleType("redirected")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "redirected", package)
    for name in ["expanded_weights_impl", "expanded_weights_utils"]:
        monkeypatch.setitem(sys.modules, f"redirected.{name}", ew)
    for name in ["conv_utils", *(f"{f}_expanded_weights" for f in FILES)]:
        source = (folder / f"{name}.py").read_text()
        module = types.ModuleType(f"redirected.{name}")
        module.__package__ = "redirected"
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(source, name, "exec"), vars(module))
    return registry


# what torch's own rules get right, on the ops that they know
TORCH_CASES = [
    "linear-2d", "linear-3d", "linear-batch-second", "mlp", "conv1d", "conv2d", "conv3d", "conv2d-groups", "conv2d-same",
    "conv2d-batch-33", "embedding", "layer-norm-3d", "layer-norm-several", "group-norm", "instance-norm-2d",
    "group-norm-inside", "same-module-twice",
]  # fmt: skip


@pytest.mark.parametrize("name", TORCH_CASES)
def test_torchs_rule_files_run_here(name, torch_rules, monkeypatch):
    assert len(torch_rules) == 8
    ran = []
    for rule in set(torch_rules.values()):
        original = rule.backward
        counted = staticmethod(lambda ctx, *g, original=original, rule=rule: (ran.append(rule), original(ctx, *g))[1])
        monkeypatch.setattr(rule, "backward", counted)
    case = BY_NAME[name]
    model, batch, loss_fn = case.build()
    function = call_for_per_sample_grads(model, batch_first=case.batch_dim == 0)
    loss_fn(function, *batch).sum().backward()
    assert ran
    truth = oracle(model, loss_fn, *batch, batch_dim=case.batch_dim)
    for parameter, G in truth.items():
        assert relative_error(model.get_parameter(parameter).grad_sample, G) < 1e-9, parameter


def test_a_rule_of_the_users_own(registry):
    @ew.implements_per_sample_grads(F.linear)
    class Tenfold(torch.autograd.Function):
        @staticmethod
        def forward(ctx, kwarg_names, func, *values):
            args, kwargs = ew.standard_kwargs(kwarg_names, values)
            ctx.args = args
            return ew.forward_helper(func, args, kwargs)

        @staticmethod
        def backward(ctx, g):
            x, weight, bias = ctx.args
            ew.set_grad_sample_if_exists(weight, lambda _: 10 * torch.einsum("bo,bi->boi", g, x))
            ew.set_grad_sample_if_exists(bias, lambda _: ew.sum_over_all_but_batch_and_last_n(g, 1))
            return None, None, g @ ew.unpack_expanded_weight_or_tensor(weight), None, None

    model, x = nn.Linear(2, 3), torch.randn(4, 2)
    call_for_per_sample_grads(model, loss_reduction="mean")(x).sum(1).mean().backward()
    torch.testing.assert_close(model.weight.grad_sample, 10 * x.unsqueeze(1).expand(4, 3, 2))
    torch.testing.assert_close(model.bias.grad_sample, torch.ones(4, 3))


def test_expanded_weight_by_hand_keeps_torchs_contract():
    weight = nn.Parameter(torch.ones(2))
    expanded = ew.ExpandedWeight(weight, 3, "mean")
    ew.set_grad_sample_if_exists(expanded, lambda w: torch.ones(3, 2))
    assert weight.grad_sample.tolist() == [[3.0, 3.0]] * 3
    with pytest.raises(RuntimeError, match="made of a tensor"):
        ew.ExpandedWeight(3, 3, "sum")
    with pytest.raises(RuntimeError, match="requires a gradient"):
        ew.ExpandedWeight(torch.ones(2), 3, "sum")
    with pytest.raises(RuntimeError, match="batch of 5"):
        ew.forward_helper(F.linear, (torch.ones(5, 2), ew.ExpandedWeight(nn.Parameter(torch.ones(2, 2)), 3, "sum")), {})


def test_extension_names_are_those_of_torch():
    from torch.nn.utils._expanded_weights import expanded_weights_impl, expanded_weights_utils

    for name in set(ew.__all__) - {"call_for_per_sample_grads"}:
        assert hasattr(expanded_weights_impl, name) or hasattr(expanded_weights_utils, name), name
    files = Path(expanded_weights_impl.__file__).parent.glob("*_expanded_weights.py")
    for file in files:
        for block in re.findall(r"from \.expanded_weights_\w+ import (?:\(([^)]*)\)|(.*))", file.read_text()):
            for name in re.findall(r"\w+", "".join(block)):
                assert hasattr(ew, name), name
