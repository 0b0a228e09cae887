"""Buffers that take in data in ways that are not seen as ops: refused before a step is released."""

import pytest
import torch
from private_runs import private
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.overrides import _get_current_function_mode_stack

from samplewise.errors import SamplewiseError


@pytest.fixture(autouse=True)
def _traced_only(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    yield
    assert not _get_current_function_mode_stack()


class Keeps(nn.Module):
    """Leaves something of its input in a buffer."""

    def __init__(self, keep):
        super().__init__()
        self.linear, self.keep = nn.Linear(5, 3), keep
        self.register_buffer("m", torch.zeros(5))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("limit", torch.full((3,), float("-inf")))
        self.register_buffer("unset", torch.full((3,), float("nan")))

    def forward(self, x):
        if len(x):
            self.keep(self, x)
        self.calls += 1
        return self.linear(x)


def by_attribute(module, x):
    module.m = x.detach().mean(0)


KEEPS = {
    "data": lambda module, x: module.m.data.copy_(x.data.mean(0)),
    "item": lambda module, x: module.m.__setitem__(0, x[0, 0].item()),
    "fill": lambda module, x: module.m.fill_(x.detach().mean().item()),
    "numpy": lambda module, x: module.m.numpy().__setitem__(0, x.detach().numpy().max()),
    "attribute": by_attribute,
}


def take(model, how, x, y, optimizer):
    optimizer.zero_grad()
    if how == "loop":
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    else:
        optimizer.step_on(x, y)


@pytest.mark.parametrize("how", ["loop", "in one", "compiled"])
@pytest.mark.parametrize("name", KEEPS)
def test_buffers_that_take_in_data_are_refused(name, how):
    options = {"loss_fn": lambda m, x, y: nn.functional.cross_entropy(m(x), y)} if how != "loop" else {}
    model, optimizer, loader = private(
        Keeps(KEEPS[name]), max_grad_norm=1.0, noise_multiplier=1.0, compile=how == "compiled", **options
    )
    with pytest.raises(SamplewiseError):
        for x, y in loader:
            take(model, how, x, y, optimizer)
    assert optimizer.accountant.num_steps == 0, "nothing was released"


@pytest.mark.parametrize("how", ["loop", "in one"])
def test_a_look_without_gradients_leaves_nothing_behind(how):
    """The model is called under no_grad on a batch, which opens no capture."""
    looks = [True]
    keep = lambda module, x: module.m.copy_(x.mean(0)) if looks[0] and not torch.is_grad_enabled() else None
    options = {"loss_fn": lambda m, x, y: nn.functional.cross_entropy(m(x), y)} if how != "loop" else {}
    model, optimizer, loader = private(Keeps(keep), max_grad_norm=1.0, noise_multiplier=1.0, **options)
    with pytest.raises(SamplewiseError, match="buffer 'm' changed"):
        for x, y in loader:
            with torch.no_grad():
                model(x)
            take(model, how, x, y, optimizer)
    assert optimizer.accountant.num_steps == 0


@pytest.mark.parametrize("how", ["loop", "in one"])
def test_counters_and_buffers_of_weights_alone_are_taken(how):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.keeps = Keeps(lambda module, x: None)
            self.new = parametrizations.spectral_norm(nn.Linear(3, 3))
            self.old = old_spectral_norm(nn.Linear(3, 3))
            self.old.weight_orig.requires_grad_(False)

        def forward(self, x):
            return self.new(self.keeps(x))

    model = Normed()
    before = model.new.parametrizations.weight[0]._u.clone()
    options = {"loss_fn": lambda m, x, y: nn.functional.cross_entropy(m(x), y)} if how != "loop" else {}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, optimizer, loader = private(model, optimizer, max_grad_norm=1.0, noise_multiplier=1.0, **options)
    for x, y in loader:
        take(model, how, x, y, optimizer)
        model.keeps.m.add_(1.0)  # after the step it is not of a batch
    assert optimizer.accountant.num_steps == 4
    assert not torch.equal(before, model.new.parametrizations.weight[0]._u)
    assert int(model.keeps.calls) > 0
