"""Weights computed in half precision: no sum is rounded before noise is added to it."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import samplewise as sw
from samplewise.testing import oracle

N = 2048
"""Above which bfloat16 has one number in sixteen, so that a rounded sum moves by 16 when a sample of 1 joins."""


class Scaled(nn.Module):
    """x times something made of the weight."""

    def __init__(self, make, dtype):
        super().__init__()
        self.weight, self.make = nn.Parameter(torch.zeros(4, dtype=dtype)), make

    def forward(self, x: Tensor) -> Tensor:
        return x.float() * self.make(self.weight)


class Mixes(nn.Module):
    """Through half precision and beside it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.weight.bfloat16()).float() + x * self.weight


MODELS = {
    "Gemma's norm": lambda: Scaled(lambda w: 1.0 + w.float(), torch.bfloat16),
    "all in bfloat16": lambda: Scaled(lambda w: (1.0 + w).float(), torch.bfloat16),
    "half in the middle": lambda: Scaled(lambda w: (1.0 + w.bfloat16()).float(), torch.float32),
    "float16 in the middle": lambda: Scaled(lambda w: (1.0 + (2 * w).half()).float() / 2, torch.float32),
    "two ways": Mixes,
}


def clipped_sum(model: nn.Module, num: int, how: str) -> Tensor:
    x = torch.zeros(num, 4)
    x[:, 0] = 1

    def query(grads):
        return sw.dp.clipped(grads, {"": 1.0}).sums

    step = sw.per_sample_step(model, lambda m, x: m(x)[:, 0], query, compile=how == "compiled", verify=False)
    return step(x).answer["weight"]


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("name", MODELS)
def test_one_sample_more_changes_the_sum_by_the_bound(name, how, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    sums = [clipped_sum(MODELS[name](), num, how) for num in range(N + 30, N + 40)]
    assert all(total.dtype == torch.float32 for total in sums)
    changes = [float((b - a).norm()) for a, b in pairwise(sums)]
    assert max(changes) <= 1 + 1e-3
    assert min(changes) > 0.98, "each counts"


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_samples(name):
    model, x = MODELS[name](), torch.randn(5, 4)
    with sw.capture(model) as grads:
        model(x).square().sum().backward()
    truth = oracle(model, lambda m, x: m(x).square().sum(-1), x)["weight"]
    torch.testing.assert_close(grads["weight"].materialize().double(), truth.double(), rtol=2e-2, atol=2e-2)


def test_such_a_model_trains_privately():
    model = nn.Sequential(nn.Linear(4, 4).bfloat16(), MODELS["Gemma's norm"]())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(60, 4).bfloat16())
    loader = torch.utils.data.DataLoader(data, batch_size=10)
    model, optimizer, loader = sw.dp.make_private(model, optimizer, loader, noise_multiplier=1.0, max_grad_norm=1.0)
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().sum(1).mean().backward()
        optimizer.step()
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in model.parameters())
