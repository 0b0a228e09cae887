"""ε against dp-accounting called by hand and against Opacus, on a grid; and what is done with it."""

import math
from importlib import import_module

import dp_accounting as dp
import pytest
import torch
from dp_accounting import pld, rdp
from private_runs import private, train

import samplewise as sw
from samplewise.dp import Accountant, Steps, epsilon, noise_multiplier_for, noise_stds, sum_noise_multiplier

GRID = [(0.7, 0.01, 500), (1.0, 0.1, 40), (2.0, 0.05, 300), (5.0, 1.0, 10), (1.3, 0.001, 2000)]
DELTAS = (1e-5, 1e-7)


def by_hand(history, accountant):
    made = {"pld": pld.PLDAccountant, "rdp": rdp.RdpAccountant}[accountant]()
    for z, q, num in history:
        made.compose(dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(z)), num)
    return made


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("history", [*([Steps(*steps)] for steps in GRID), [Steps(*GRID[0]), Steps(*GRID[1])]])
def test_epsilon_is_that_of_dp_accounting(history, accountant):
    made = by_hand(history, accountant)
    for delta in DELTAS:
        assert epsilon(history, delta=delta, accountant=accountant) == pytest.approx(made.get_epsilon(delta), rel=1e-9)


@pytest.mark.filterwarnings("ignore:Optimal order is the largest alpha", "ignore:divide by zero")
@pytest.mark.parametrize("steps", GRID)
def test_epsilon_agrees_with_opacus(steps):
    """RDP differs by the orders that are tried, below 1 %; PRV gives its estimate plus an error of up to 0.01, ours is an upper
    bound by itself."""
    accountants = import_module("opacus.accountants")
    z, q, num = steps
    theirs = accountants.RDPAccountant()
    theirs.history = [(z, q, num)]
    assert epsilon([Steps(*steps)], delta=1e-5, accountant="rdp") == pytest.approx(theirs.get_epsilon(1e-5), rel=0.01)
    theirs = accountants.PRVAccountant()
    theirs.history = [(z, q, num)]
    assert epsilon([Steps(*steps)], delta=1e-5) == pytest.approx(theirs.get_epsilon(1e-5), abs=0.021)


def test_limits():
    assert epsilon([], delta=1e-5) == 0
    assert epsilon([Steps(1.0, 0.0, 100)], delta=1e-5) == 0
    assert epsilon([Steps(0.0, 0.1, 1)], delta=1e-5) == math.inf
    assert epsilon([Steps(0.0, 0.0, 1)], delta=1e-5) == 0
    once = epsilon([Steps(1.0, 0.1, 10)], delta=1e-5, accountant="rdp")
    assert once < epsilon([Steps(1.0, 0.1, 11)], delta=1e-5, accountant="rdp")
    assert once < epsilon([Steps(0.9, 0.1, 10)], delta=1e-5, accountant="rdp")
    assert once < epsilon([Steps(1.0, 0.2, 10)], delta=1e-5, accountant="rdp")
    for wrong in ({"delta": 0.0}, {"delta": 1.0}, {"delta": 1e-5, "accountant": "moments"}):
        with pytest.raises(ValueError):  # noqa: PT011
            epsilon([Steps(1.0, 0.1, 10)], **wrong)
    for steps in (Steps(-1.0, 0.1, 1), Steps(1.0, 1.1, 1), Steps(math.nan, 0.1, 1)):
        with pytest.raises(ValueError, match="noise multiplier"):
            Accountant([steps])


def test_a_gaussian_mechanism_alone_has_its_textbook_epsilon():
    """δ(ε) = Φ(1/(2z) - εz) - e^ε Φ(-1/(2z) - εz) (Balle and Wang, 2018), solved for ε."""
    z, delta = 2.0, 1e-5
    normal = torch.distributions.Normal(0.0, 1.0)

    def delta_of(eps):
        return float(normal.cdf(torch.tensor(0.5 / z - eps * z, dtype=torch.float64))) - math.exp(eps) * float(
            normal.cdf(torch.tensor(-0.5 / z - eps * z, dtype=torch.float64))
        )

    low, high = 0.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if delta_of(middle) < delta else (middle, high)
    assert epsilon([Steps(z, 1.0, 1)], delta=delta) == pytest.approx(high, rel=1e-3)


@pytest.mark.parametrize(("target", "q", "num"), [(0.5, 0.01, 200), (3.0, 0.05, 600), (20.0, 0.1, 50)])
def test_the_search_meets_its_target_from_below(target, q, num):
    z = noise_multiplier_for(target_epsilon=target, target_delta=1e-5, sample_rate=q, steps=num, accountant="rdp")
    assert 0.97 * target < epsilon([Steps(z, q, num)], delta=1e-5, accountant="rdp") <= target


@pytest.mark.filterwarnings("ignore:Optimal order is the largest alpha")
def test_the_searchs_noise_is_opacus():
    search = import_module("opacus.accountants.utils")
    theirs = search.get_noise_multiplier(
        target_epsilon=3.0, target_delta=1e-5, sample_rate=0.05, steps=600, accountant="rdp", epsilon_tolerance=0.001
    )
    ours = noise_multiplier_for(target_epsilon=3.0, target_delta=1e-5, sample_rate=0.05, steps=600, accountant="rdp")
    assert ours == pytest.approx(theirs, rel=0.01)


def test_targets_that_cannot_be_had_are_refused():
    for target in (0.0, -1.0, math.inf):
        with pytest.raises(ValueError, match="target_epsilon"):
            noise_multiplier_for(target_epsilon=target, target_delta=1e-5, sample_rate=0.1, steps=1)


def test_a_run_is_accounted_at_the_rate_of_its_loader():
    model, optimizer, loader = private(max_grad_norm=1.0, noise_multiplier=1.5, batch_size=7)
    train(model, optimizer, loader, epochs=2)
    assert optimizer.accountant.history == [(1.5, 7 / 40, 12)] and len(loader) == 6
    made = by_hand([(1.5, 7 / 40, 12)], "pld")
    assert optimizer.epsilon(delta=1e-5) == pytest.approx(made.get_epsilon(1e-5), rel=1e-9)


# --- noise -----------------------------------------------------------------------------------------------------------


def chi_square_limits(num, alarms):
    """Between which the mean square of so many standard normal numbers lies but with this probability (Wilson-Hilferty)."""
    z = float(torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(1 - alarms / 2, dtype=torch.float64)))
    spread = math.sqrt(2 / (9 * num))
    return [(1 - 2 / (9 * num) + sign * z * spread) ** 3 for sign in (-1, 1)]


@pytest.mark.parametrize("secure", [False, True])
def test_noise_of_each_group_has_its_variance(secure):
    """Two tests of false-alarm rate 1e-6 each a group; seeds come from the operating system."""
    bounds = {"a": 0.5, "b": 2.0}
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(200, 100), "b": torch.nn.Linear(100, 100)})
    model.forward = lambda x: model["b"](model["a"](x))
    rows = torch.utils.data.TensorDataset(torch.zeros(8, 200))
    model, optimizer, loader = sw.dp.make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.0), torch.utils.data.DataLoader(rows, batch_size=8),
        noise_multiplier=1.5, max_grad_norm=bounds, groups={"a": "a.*", "b": "b.*"}, secure=secure,
    )  # fmt: skip
    for (x,) in loader:
        (model(x) * 0).mean().backward()
        optimizer.step()
    stds = noise_stds(bounds, 1.5)
    for group, std in stds.items():
        assert std == 1.5 * bounds[group] * math.sqrt(2)
        noise = model[group].weight.grad * 8 / std
        low, high = chi_square_limits(noise.numel(), 1e-6)
        assert low < float(noise.square().mean()) < high
        assert abs(float(noise.mean())) < 4.9 / math.sqrt(noise.numel())
    # what all groups together cost is the noise multiplier: 1/z² = sum (C_g / std_g)²
    assert sum((bounds[g] / stds[g]) ** 2 for g in bounds) == pytest.approx(1.5**-2)


def test_a_wrong_variance_would_be_seen():
    low, high = chi_square_limits(10_000, 1e-6)
    assert 0.93 < low < 1 < high < 1.08


def test_noise_is_new_each_step_and_each_run():
    seen = []
    for _ in range(2):
        model, optimizer, loader = private(
            torch.nn.Linear(5, 3), max_grad_norm=1.0, noise_multiplier=1.0, batch_size=20, seed=None
        )
        for x, _y in loader:
            optimizer.zero_grad()
            (model(x) * 0).mean().backward()
            optimizer.step()
            seen.append(model.weight.grad.clone())
    assert len({tuple(noise.flatten().tolist()) for noise in seen}) == 4


def test_unseeded_generators_have_the_whole_state_of_the_operating_system():
    """torch takes 32 bits of a seed: two seeds that agree in them are one."""
    a, b = (torch.Generator().manual_seed(seed) for seed in (1, 1 + (1 << 32)))
    assert torch.equal(torch.rand(4, generator=a), torch.rand(4, generator=b))
    states = [sw.dp.noise.generator().get_state() for _ in range(2)]
    words = [s[24 : 24 + 8 * 624].view(624, 8)[:, :4] for s in states]
    assert float((words[0] == words[1]).float().mean()) < 0.02  # bytes agree by chance in one of 256
    numbers = torch.rand(100_000, generator=sw.dp.noise.generator())
    assert abs(float(numbers.mean()) - 0.5) < 0.006  # six sd


def test_secure_noise_lies_on_a_grid_that_does_not_depend_on_the_sum():
    noise = sw.dp.Noise(secure=True)
    total = torch.randn(1000, dtype=torch.float64) * 1e-3
    grid = 2.0**-20
    noisy = noise.added(total, 1.0)
    assert torch.equal((noisy / grid).round() * grid, noisy)
    assert noise.state_dict() == {}


def test_complex_numbers_get_noise_in_both_parts():
    noisy = sw.dp.Noise(0).added(torch.zeros(20_000, dtype=torch.complex64), 2.0)
    for part in (noisy.real, noisy.imag):
        low, high = chi_square_limits(20_000, 1e-6)
        assert low < float((part / 2).square().mean()) < high


# --- adaptive --------------------------------------------------------------------------------------------------------


def test_sum_and_count_together_cost_the_noise_multiplier():
    for z, count in ((1.0, 2.0), (0.5, 0.3), (3.0, 50.0)):
        z_sum = sum_noise_multiplier(z, count)
        assert z_sum > z and 1 / z_sum**2 + 1 / (2 * count) ** 2 == pytest.approx(1 / z**2)


@pytest.mark.parametrize("start", [0.01, 100.0])
def test_an_adaptive_bound_finds_the_median(start):
    """Norms of a linear loss are those of the rows; the bound comes from far to near their median."""
    x = torch.nn.functional.normalize(torch.randn(400, 5)) * torch.linspace(1, 3, 400).unsqueeze(1)
    rows = torch.utils.data.TensorDataset(x)
    model = torch.nn.Linear(5, 1, bias=False)
    model, optimizer, loader = private(
        model, torch.optim.SGD(model.parameters(), lr=0.0), dataset=rows, batch_size=200, clipping="adaptive",
        max_grad_norm=start, noise_multiplier=0.5,
    )  # fmt: skip
    for _ in range(60):
        for (xb,) in loader:
            optimizer.zero_grad()
            model(xb).mean().backward()
            optimizer.step()
    assert optimizer.max_grad_norm == pytest.approx(2.0, rel=0.15)
    assert optimizer.accountant.history == [(0.5, 0.5, 120)]


def test_adaptive_noise_on_the_sum_is_larger():
    """1/z_sum² = 1/z² - 1/(2 count)²: with count noise 1 and z = 1, z_sum = 1.1547."""
    model, optimizer, loader = private(
        torch.nn.Linear(100, 100), dataset=torch.utils.data.TensorDataset(torch.zeros(8, 100)), batch_size=8,
        clipping=sw.dp.Adaptive(count_noise=1.0), max_grad_norm=1.0, noise_multiplier=1.0, seed=None,
    )  # fmt: skip
    for (x,) in loader:
        (model(x) * 0).mean().backward()
        optimizer.step()
    low, high = chi_square_limits(10_000, 1e-6)
    assert low < float((model.weight.grad * 8 / 1.1547).square().mean()) < high
