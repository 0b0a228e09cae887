"""Running estimates: any division of the samples gives the numbers of all samples at once."""

import io
import math

import pytest
import torch
from torch import nn

import samplewise as sw
from samplewise.testing import oracle, relative_error, run_capture

TOLERANCE = 1e-9  # float64


class Sometimes(nn.Module):
    """`rare` is used where the caller says so."""

    def __init__(self):
        super().__init__()
        self.often, self.rare, self.is_rare = nn.Linear(5, 3), nn.Linear(5, 3), False

    def forward(self, x):
        return self.often(x) + (self.rare(x) if self.is_rare else 0)


def losses(model, x):
    return model(x).square().sum(1)


def flat(truth):
    return torch.cat([G.flatten(1) for G in truth.values()], 1)


SIZES = [4, 1, 3, 0, 2]


@pytest.fixture(scope="module")
def seen():
    """(captures of batches of several sizes, the gradients of all their samples)."""
    torch.manual_seed(0)
    model, grads, truths = Sometimes().double(), [], []
    for size in SIZES:
        x, model.is_rare = torch.randn(size, 5, dtype=torch.float64), size > 2
        grads.append(run_capture(model, losses, x))
        truths.append(oracle(model, losses, x) if size else {})
    none = {n: torch.zeros(p.shape, dtype=p.dtype) for n, p in model.named_parameters()}
    return grads, {n: torch.stack([truth[n][b] if n in truth else none[n]
                                   for truth, size in zip(truths, SIZES, strict=True) for b in range(size)])
                   for n in none}  # fmt: skip


DIVISIONS = {
    "one": [[0, 1, 2, 3, 4]],
    "another order": [[3, 1, 4, 2, 0]],
    "two processes": [[0, 3], [1, 2, 4]],
    "one without samples": [[], [0, 1, 2, 4], [3]],
    "five": [[0], [1], [2], [3], [4]],
}


def estimate(kind, grads, division):
    parts = []
    for batches in division:
        parts.append(kind())
        for i in batches:
            parts[-1].update(grads[i])
    whole = kind()
    for part in parts:
        saved = io.BytesIO()
        torch.save(part.state_dict(), saved)
        saved.seek(0)
        loaded = kind()
        loaded.load_state_dict(torch.load(saved))
        whole.merge(loaded)
    assert whole.num_samples == sum(SIZES)
    return whole


@pytest.mark.parametrize("name", DIVISIONS)
def test_moments(name, seen):
    grads, truth = seen
    moments = estimate(sw.RunningMoments, grads, DIVISIONS[name])
    for n, G in truth.items():
        assert relative_error(moments.mean()[n], G.mean(0)) < TOLERANCE
        assert relative_error(moments.second_moment()[n], G.square().sum(0)) < TOLERANCE
        assert relative_error(moments.fisher_diagonal()[n], G.square().mean(0)) < TOLERANCE
        assert relative_error(moments.variance()[n], G.var(0)) < TOLERANCE


@pytest.mark.parametrize("name", DIVISIONS)
def test_norms(name, seen):
    grads, truth = seen
    norms, expected = estimate(sw.RunningNorms, grads, DIVISIONS[name]), flat(truth).norm(dim=1)
    assert norms.mean() == pytest.approx(expected.mean().item(), rel=TOLERANCE)
    assert norms.std() == pytest.approx(expected.std().item(), rel=TOLERANCE)
    assert (norms.smallest, norms.largest) == pytest.approx((expected.min().item(), expected.max().item()), rel=TOLERANCE)


@pytest.mark.parametrize("name", DIVISIONS)
def test_noise_scale(name, seen):
    grads, truth = seen
    noise = estimate(sw.RunningNoiseScale, grads, DIVISIONS[name]).noise_scale()
    batches = flat(truth).split(SIZES)
    pairs = sum(((G @ G.T).sum() - G.square().sum()) for G in batches)
    sq_norm = (pairs / sum(n * (n - 1) for n in SIZES)).item()
    trace = flat(truth).square().sum(1).mean().item() - sq_norm
    assert (noise.sq_norm, noise.trace) == pytest.approx((sq_norm, trace), rel=TOLERANCE)
    assert noise.value == pytest.approx(trace / sq_norm, rel=TOLERANCE)


def given(G):
    """A capture whose per-sample gradients are the rows of G."""
    model = nn.Linear(G.shape[1], 1, bias=False).to(G.dtype)
    return run_capture(model, lambda model, x: model(x).squeeze(1), G)


def leave_one_out(estimate, num):
    """The jackknife's standard error, written out."""
    values = torch.tensor([estimate([i for i in range(num) if i != b]) for b in range(num)], dtype=torch.float64)
    return math.sqrt((num - 1) / num * (values - values.mean()).square().sum().item())


def test_the_standard_error_is_the_jackknifes():
    G = torch.randn(6, 4, dtype=torch.float64) + 1
    truth = leave_one_out(lambda keep: given(G[keep]).noise_scale().value, 6)
    assert given(G).noise_scale().standard_error == pytest.approx(truth, rel=1e-9)
    assert given(G)["weight"].noise_scale().standard_error == pytest.approx(truth, rel=1e-9)

    def over_batches(keep):
        running = sw.RunningNoiseScale()
        for i in keep:
            running.update(given(G[2 * i : 2 * i + 2]))
        return running.noise_scale()

    truth = leave_one_out(lambda keep: over_batches(keep).value, 3)
    assert over_batches(range(3)).standard_error == pytest.approx(truth, rel=1e-9)


def test_a_noise_scale_that_is_known():
    """Gradients 1 + N(0, 4) in 50 dimensions: tr(Σ) / |G|² = 200 / 50."""
    errors, claimed = [], []
    for _ in range(200):
        noise = given(1 + 2 * torch.randn(64, 50, dtype=torch.float64)).noise_scale()
        errors.append(noise.value - 4)
        claimed.append(noise.standard_error)
    errors, claimed = torch.tensor(errors), torch.tensor(claimed)
    # false alarm below 1e-4 for each: 200 draws know their mean to 1/14 and their spread to 1/20 of the spread
    assert abs(errors.mean()) < 4 * errors.std() / 200**0.5 + 0.01  # a ratio of unbiased estimates has a bias of order 1/64
    assert 0.8 < claimed.mean() / errors.std() < 1.25


@pytest.mark.parametrize("num", [0, 1, 2])
def test_too_few_samples(num):
    grads = given(torch.randn(num, 3))
    moments, noise, norms = sw.RunningMoments(), sw.RunningNoiseScale(), sw.RunningNorms()
    for running in (moments, noise, norms):
        running.update(grads)
        assert running.num_samples == num
    if num == 2:
        assert math.isnan(grads.noise_scale().standard_error)
        assert math.isnan(noise.noise_scale().standard_error)
        return
    for ask in (moments.variance, noise.noise_scale, grads.variance, grads.noise_scale):
        with pytest.raises(ValueError, match="samples"):
            ask()
    assert math.isnan(norms.std())


def test_samples_that_are_not_finite_are_left_out_and_counted():
    G = torch.randn(5, 3, dtype=torch.float64)
    good = G[[0, 1, 3, 4]]
    G[2, 0] = float("nan")
    moments, noise, norms = sw.RunningMoments(), sw.RunningNoiseScale(), sw.RunningNorms()
    for running in (moments, noise, norms):
        running.update(given(G))
        assert (running.num_samples, running.num_left_out) == (4, 1)
    assert relative_error(moments.variance()["weight"][0], good.var(0)) < TOLERANCE
    assert noise.noise_scale().value == pytest.approx(given(good).noise_scale().value)
    assert norms.mean() == pytest.approx(good.norm(dim=1).mean().item())


def test_a_small_spread_about_a_large_mean_is_not_lost():
    """In float32 the squares of 1e4 + N(0, 1) know nothing of the 1."""
    G = 1e4 + torch.randn(400, 3)
    moments = sw.RunningMoments()
    for batch in G.split(7):
        moments.update(given(batch))
    truth = G.double().var(0)
    # the running mean is rounded to 1e4 · 6e-8 = 6e-4, which adds its square; 1e-3 is rounding over 58 batches
    assert relative_error(moments.variance()["weight"][0], truth) < 1e-3
    assert relative_error(given(G).variance()["weight"][0], truth) < 1e-3
