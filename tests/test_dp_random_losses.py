"""Losses that draw random numbers: those that can be held still are tried without a sample, others say why they cannot be."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_dp_losses import N, clipped_sum, per_sample
from torch import Tensor, nn

from samplewise.errors import SamplesMixError, SamplewiseError

GENERATOR, PYTHON, NUMPY = torch.Generator().manual_seed(0), random.Random(0), np.random.default_rng(0)
DROPOUT = nn.Dropout(0.5)

STILL = {
    "dropout": lambda m, x: F.dropout(m(x), 0.5).sum(),
    "a module": lambda m, x: DROPOUT(m(x)).sum(),
    "a mask": lambda m, x: (per_sample(m, x) * (torch.rand(len(x)) > 0.3)).sum(),
    "noise on the input": lambda m, x: m(x + 0.1 * torch.randn_like(x)).sum(),
    "a generator of torch": lambda m, x: m(x + torch.randn(x.shape, generator=GENERATOR)).sum(),
    "masked tokens": lambda m, x: m(torch.where(torch.rand(x.shape) < 0.15, 0.0, x)).sum(),
    "steps of a diffusion": lambda m, x: (per_sample(m, x) * torch.linspace(0, 1, 9)[torch.randint(9, (len(x),))]).sum(),
    "counts": lambda m, x: (per_sample(m, x) * torch.poisson(torch.full((len(x),), 3.0))).sum(),
    "tosses": lambda m, x: (per_sample(m, x) * torch.binomial(torch.full((len(x),), 9.0), torch.tensor(0.5))).sum(),
    "a distribution": lambda m, x: (per_sample(m, x) * torch.distributions.Normal(0.0, 1.0).sample((len(x),))).sum(),
    "crops by rows": lambda m, x: m(torch.stack([row.roll(int(torch.randint(2, (1,)))) for row in x])).sum(),
    "Python's, one for all": lambda m, x: m(x * (1 + random.random())).sum(),
    "NumPy's, one for all": lambda m, x: m(x * (1 + np.random.rand())).sum(),
}


def rows_times(draw):
    return lambda m, x: torch.stack([loss * draw() for loss in per_sample(m, x)]).sum()


MOVING = {
    "Python's by rows": rows_times(random.random),
    "rows darkened": lambda m, x: m(torch.stack([row / 2 if random.random() < 0.5 else row for row in x])).sum(),
    "a Random": rows_times(PYTHON.random),
    "a Random, one for all": lambda m, x: m(x * (1 + PYTHON.random())).sum(),
    "NumPy's by rows": rows_times(lambda: float(np.random.rand())),
    "a generator of NumPy": lambda m, x: (per_sample(m, x) * torch.from_numpy(NUMPY.random(len(x))).float()).sum(),
    "a gamma distribution": lambda m, x: (per_sample(m, x) * torch.distributions.Gamma(2.0, 1.0).sample((len(x),))).sum(),
}


def step_on(loss) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 2, generator=generator).cumsum(0)
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    return clipped_sum(lambda m, x: loss(m, x), (x,), "sum", "in one", model=model)


@pytest.mark.parametrize("loss", STILL.values(), ids=STILL)
def test_random_numbers_that_are_held_still_do_not_disturb(loss):
    step_on(loss)


@pytest.mark.parametrize("loss", MOVING.values(), ids=MOVING)
def test_random_numbers_that_cannot_be_held_still_are_told(loss):
    with pytest.raises(SamplewiseError, match=r"run again.*draws random numbers.*torch\.rand.*backward and step") as caught:
        step_on(loss)
    assert not isinstance(caught.value, SamplesMixError)


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, x: (F.dropout(m(x), 0.5)[:, 0] * torch.arange(len(x))).sum(),
        lambda m, x: (per_sample(m, x) * random.random() * torch.arange(len(x))).sum(),
    ],
)
def test_samples_that_depend_on_their_place_are_found_beside_random_numbers(loss):
    with pytest.raises(SamplewiseError, match="sample 0 is taken out|draws random numbers"):
        step_on(loss)


def test_what_is_not_random_is_not_called_so():
    with pytest.raises(SamplesMixError, match="sample 0 is taken out"):
        step_on(lambda m, x: (per_sample(m, x) * torch.arange(len(x))).sum())
