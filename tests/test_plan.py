"""Every route gives the same numbers; the plan keeps its budget and takes the quicker way."""

import random

import pytest
import torch
from cases import ALL, CASES, Case
from torch import nn
from torch.utils.checkpoint import checkpoint

import samplewise as sw
from samplewise.errors import SamplewiseError
from samplewise.factors import outer
from samplewise.factors.outer import Outer
from samplewise.plan import ROUTES, Choice, Rates, Use, choose, costs, measured_rates, num_bytes
from samplewise.testing import oracle, relative_error, relative_errors, run_capture

TOLERANCE = 1e-9  # float64, sums of at most a few thousand terms
RATES = Rates(small=1e11, large=2e11, memory=1e10)


def answers_match(case: Case, **options) -> None:
    model, batch, loss_fn = case.build()
    truth = oracle(model, loss_fn, *batch, batch_dim=case.batch_dim)
    grads = run_capture(model, loss_fn, *batch, **case.options, verify=False, **options)
    norms = torch.cat([G.reshape(len(G), -1) for G in truth.values()], 1).norm(dim=1).real
    assert relative_error(grads.norms(), norms) < TOLERANCE
    bound = norms.median().item() or 1.0
    w = (bound / norms).clamp(max=1)
    clipped = {name: torch.tensordot(w.to(G.dtype), G, dims=1) for name, G in truth.items()}
    assert max(relative_errors(grads.clipped_sum(max_norm=bound), clipped).values()) < TOLERANCE
    assert max(relative_errors(grads.materialize(), truth).values()) < TOLERANCE


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("case", ALL)
def test_every_route_gives_the_oracles_numbers(case, route, monkeypatch):
    monkeypatch.setattr(outer, "TILE", 2)  # so that Gram matrices of few positions have several tiles too
    answers_match(case, plan={"*": route})


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES[::7]])
def test_random_budgets_give_the_same_numbers(case):
    rng = random.Random(case.name)
    for _ in range(10):
        answers_match(case, memory=round(2 ** rng.uniform(3, 22)))


def test_tiles_of_the_gram_matrix_add_up():
    a, g = torch.randn(2, 1100, 1, 40), torch.randn(2, 1100, 1, 50)
    factor = Outer(a.double(), g.double(), sizes=(50, 40), order=(0, 1), shape=(50, 40))
    assert torch.allclose(factor.sq_norms("gram"), factor.sq_norms("direct"), rtol=1e-12)


@pytest.mark.parametrize("T", [8, 1100])
def test_norms_that_cancel_are_exact_by_tiles_too(T):
    """Positions come in pairs of opposite sign but for the last, so that all but one thousandth cancels."""
    a, g = torch.randn(3, T, 1, 8), torch.randn(3, T, 1, 8)
    a[:, 1::2], g[:, 1::2] = a[:, ::2], -g[:, ::2]
    g[:, -1] *= 1 + 1e-4
    factor = Outer(a, g, sizes=(8, 8), order=(0, 1), shape=(8, 8))
    exact = Outer(a.double(), g.double(), sizes=(8, 8), order=(0, 1), shape=(8, 8)).sq_norms("direct")
    assert torch.allclose(factor.sq_norms("gram").double(), exact, rtol=1e-2)


def use(B=16, T=128, I=256, O=256, **more) -> Use:
    return Use(B, T, 1, I, O, 4, 4, B * T * (I + O) * 4, **more)


def test_few_positions_take_the_gram_and_many_are_built():
    routes = [choose(use(T=T), RATES).route for T in (1, 16, 128, 1024, 4096)]
    assert routes == ["gram", "gram", "build", "build", "build"]


def test_nothing_larger_than_the_factor_is_kept_without_spare_memory():
    for T in (1, 8, 64, 512):
        for O in (16, 256, 4096):
            chosen = choose(use(T=T, O=O), RATES)
            assert chosen.costs[chosen.route].held <= chosen.use.held


def test_spare_memory_is_spent_where_it_saves_time():
    narrow = use(T=200, I=512, O=512)
    assert choose(narrow, RATES).route == "gram"
    assert choose(narrow, Rates(1e11, 2e11, 1e12), spare=narrow.built).route == "build"


def test_costs_grow_no_faster_than_the_better_route():
    """From T to 2T the chosen route's predicted time at most doubles, once T is past where the Gram route wins."""
    seconds = {T: min(cost.seconds for cost in costs(use(T=T), RATES).values()) for T in (256, 512, 1024, 2048, 4096)}
    assert all(seconds[2 * T] <= 2.1 * seconds[T] for T in (256, 512, 1024, 2048))


def test_other_lengths_get_another_plan():
    model = nn.Linear(16, 16, bias=False)
    routes = []
    for T in (2, 64):
        x = torch.randn(3, T, 16)
        grads = run_capture(model, lambda model, x: model(x).square().sum((1, 2)), x, rates=RATES)
        grads.norms()
        routes.append(grads.plan().splitlines()[1].split()[4])
    assert routes == ["gram", "build"]


@pytest.mark.parametrize("memory", [1e6, 1e12])
def test_a_step_plans_by_the_rates_that_it_is_given(memory):
    plans, model, x = [], nn.Linear(16, 16, bias=False), torch.randn(3, 64, 16)
    rates, loss = Rates(small=1e9, large=1e9, memory=memory), lambda model, x: model(x).square().sum((1, 2))
    sw.per_sample_step(model, loss, lambda grads: plans.append(grads.plan()), rates=rates)(x)
    assert plans == [run_capture(model, loss, x, rates=rates).plan()]
    assert plans != [run_capture(model, loss, x).plan()]


def test_the_plan_prints_what_it_weighed():
    model = nn.Linear(16, 8)
    x = torch.randn(3, 64, 16)
    grads = run_capture(model, lambda model, x: model(x).square().sum((1, 2)), x, plan={"weight": "direct"})
    header, row = grads.plan().splitlines()
    assert header.split()[:5] == ["parameter", "B", "T", "weight", "route"]
    assert row.split()[:5] == ["weight", "3", "64", "8x16", "direct*"]


def test_pins_and_budgets_are_checked():
    with pytest.raises(ValueError, match="names no route; there are gram, direct, build"):
        sw.capture(nn.Linear(2, 2), plan={"*": "ghost"})
    with pytest.raises(ValueError, match='memory is like "4GiB"'):
        sw.capture(nn.Linear(2, 2), memory="lots")
    assert num_bytes("2KB", "cpu") == 2000
    assert 0 < num_bytes(0.5, "cpu") < num_bytes(0.9, "cpu")


def test_rates_are_measured_once():
    rates = measured_rates("cpu")
    assert rates is measured_rates("cpu")
    assert min(rates.small, rates.large, rates.memory) > 1e7
    assert isinstance(choose(use(), rates), Choice)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": 1},
        {"stride": 2, "padding": 2},
        {"dilation": 2},
        {"groups": 2, "padding": "same"},
        {"groups": 16},
    ],
    ids=str,
)
@pytest.mark.parametrize("rows_per_sample", [1, 2])
def test_samples_as_groups_of_one_convolution(options, rows_per_sample):
    """In float32 on the CPU the gradients of all samples come from one convolution."""
    model = nn.Conv2d(16, 32, 3, **options)
    x = torch.randn(3 * rows_per_sample, 16, 24, 24)
    ids = torch.arange(3).repeat_interleave(rows_per_sample)
    with sw.capture(model, sample_ids=ids, plan={"*": "build"}) as grads:
        grads.backward(model(x).square().mean((1, 2, 3)))
    model = model.double()
    with sw.capture(model, sample_ids=ids, plan={"*": "direct"}) as exact:
        exact.backward(model(x.double()).square().mean((1, 2, 3)))
    assert relative_error(grads["weight"].materialize(), exact["weight"].materialize()) < 1e-5  # float32
    assert relative_error(grads.norms(), exact.norms()) < 1e-5


@pytest.mark.parametrize("case", ALL)
def test_norms_taken_as_backward_passes_are_the_oracles(case):
    model, batch, loss_fn = case.build()
    truth = oracle(model, loss_fn, *batch, batch_dim=case.batch_dim)
    grads = run_capture(model, loss_fn, *batch, **case.options, verify=False, keep="norms")
    norms = {name: G.reshape(len(G), -1).norm(dim=1).real for name, G in truth.items()}
    assert max(relative_errors({name: grads[name].norms() for name in truth}, norms).values()) < TOLERANCE


def test_nothing_but_norms_is_kept_if_so_asked():
    model = nn.Linear(16, 8)
    grads = run_capture(model, lambda model, x: model(x).sum((1, 2)), torch.randn(3, 64, 16), keep="norms")
    assert sum(t.numel() for use in grads._factors.values() for factor in use for t in factor.tensors()) == 6
    with pytest.raises(SamplewiseError, match="norms are all that was kept"):
        grads.clipped_sum(max_norm=1.0)
    with pytest.raises(ValueError, match='keep is "gradients", "norms" or "graph"'):
        sw.capture(model, keep="sums")


def test_a_second_backward_after_norms_were_taken_is_refused():
    model = nn.Linear(16, 8)
    with sw.capture(model, keep="norms") as grads:
        losses = model(torch.randn(3, 16)).sum(1)
        losses.sum().backward(retain_graph=True)
        with pytest.raises(SamplewiseError, match="norms do not add up"):
            losses.sum().backward()
    assert grads.norms().shape == (3,)


@pytest.mark.parametrize("case", ALL)
def test_a_second_backward_gives_the_oracles_sums(case):
    model, batch, loss_fn = case.build()
    truth = oracle(model, loss_fn, *batch, batch_dim=case.batch_dim)
    norms = torch.stack([G.reshape(len(G), -1).norm(dim=1).real for G in truth.values()]).norm(dim=0)
    bound = norms.median().item() or 1.0
    w = (bound / norms).clamp(max=1)
    with sw.capture(model, **case.options, verify=False, keep="graph") as grads:
        grads.backward(loss_fn(model, *batch))
        clipped, total = grads.clipped_sum(max_norm=bound), grads.sum()
    right = {name: torch.tensordot(w.to(G.dtype), G, dims=1) for name, G in truth.items()}
    assert max(relative_errors(clipped, right).values()) < TOLERANCE
    assert max(relative_errors(total, {name: G.sum(0) for name, G in truth.items()}).values()) < TOLERANCE


def test_a_second_backward_leaves_out_what_is_not_finite():
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double(), torch.randn(3, 4, dtype=torch.float64)
    x[1, 0] = torch.nan
    with sw.capture(model, keep="graph") as grads:
        grads.backward(model(x).squeeze(1))
        clipped = grads.clipped_sum(max_norm=0.1)
    finite = run_capture(model, lambda model, x: model(x).squeeze(1), x[[0, 2]]).clipped_sum(max_norm=0.1)
    for name, G in finite.items():
        assert relative_error(clipped[name], G) < TOLERANCE
    with pytest.raises(SamplewiseError, match="inside the block"):
        grads.clipped_sum(max_norm=0.1)
    assert all(p.grad is None for p in model.parameters())


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x):
        x = self.body(x).tanh()
        return self.a(x), self.b(x)


def test_second_backwards_begin_at_all_losses():
    model, x = TwoHeads().double(), torch.randn(3, 4, dtype=torch.float64)
    model.body.requires_grad_(False)
    answers = []
    for keep in ("gradients", "graph"):
        with sw.capture(model, keep=keep) as grads:
            for y in model(x):
                grads.backward(y.square().sum(1))
            answers.append(grads.clipped_sum(max_norm=0.1))
    assert max(relative_errors(answers[1], answers[0]).values()) < TOLERANCE


def test_all_backwards_must_be_known_to_be_run_again():
    model, x = TwoHeads(), torch.randn(3, 4)
    with sw.capture(model, keep="graph", exclude=["body.*"]) as grads:
        a, b = model(x)
        a.square().sum().backward(retain_graph=True)
        grads.backward(b.square().sum(1))
        assert grads.norms().shape == (3,)
        with pytest.raises(SamplewiseError, match="which every backward must be"):
            grads.clipped_sum(max_norm=0.1)


def test_second_backwards_end_at_the_uses():
    """What is not captured has its gradient from the first, and trains on it."""
    model, other = TwoHeads(), nn.Linear(4, 4)
    x = torch.randn(3, 4, requires_grad=True)
    with sw.capture(model, keep="graph", exclude=["body.*"]) as grads:
        h = other(x)
        h.retain_grad()
        grads.backward(model(grads.mark(h))[0].square().sum(1))
        leaves = [x, h, other.weight, model.body.weight]
        before = [t.grad.clone() for t in leaves]
        grads.clipped_sum(max_norm=0.1)
        grads.sum()
    assert all(torch.equal(t.grad, g) for t, g in zip(leaves, before, strict=True))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_second_backwards_through_checkpoints(reentrant, whole):
    """A reentrant one hides its uses from a backward that asks for some leaves alone."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(3, 4, requires_grad=True)
    forward = model.forward
    model.forward = lambda x: (
        checkpoint(forward, x, use_reentrant=reentrant)
        if whole
        else model[2](checkpoint(model[:2], x, use_reentrant=reentrant))
    )
    with sw.capture(model, keep="graph") as grads:
        grads.backward(model(x).square().sum(1))
        if reentrant:
            with pytest.raises(SamplewiseError, match="reentrant checkpoint"):
                grads.clipped_sum(max_norm=0.1)
            return
        clipped, total = grads.clipped_sum(max_norm=0.1), grads.sum()
    right = run_capture(model, lambda model, x: model(x).square().sum(1), x)
    assert max(relative_errors(clipped, right.clipped_sum(max_norm=0.1)).values()) < 1e-5
    assert max(relative_errors(total, right.sum()).values()) < 1e-5


def test_second_backwards_where_gradients_are_off():
    model, x = TwoHeads(), torch.randn(3, 4)
    with sw.capture(model, keep="graph") as grads:
        grads.backward(model(x)[0].square().sum(1))
        with torch.no_grad():  # where optimizers work
            clipped = grads.clipped_sum(max_norm=0.1)
        assert torch.equal(clipped["a.weight"], grads.clipped_sum(max_norm=0.1)["a.weight"])
        with pytest.raises(SamplewiseError, match=r"w\.detach"):
            grads.weighted_sum(torch.ones(3, requires_grad=True))


@pytest.mark.parametrize("ids", [[1, 0], [0, 0, 2], [2, 0, 1]])
@pytest.mark.parametrize("by_sample", [False, True], ids=["a loss a row", "a loss a sample"])
def test_a_second_backward_gives_every_loss_the_weight_of_its_sample(ids, by_sample):
    """With as many rows as samples, the number of losses does not tell whether they come by row or by sample."""
    model = nn.Linear(4, 1, bias=False).double()
    x, sample_ids = torch.randn(len(ids), 4, dtype=torch.float64), torch.tensor(ids)
    w = torch.tensor([10.0, 1.0, 3.0], dtype=torch.float64)[: max(ids) + 1]
    with sw.capture(model, sample_ids=sample_ids, keep="graph") as grads:
        losses = model(x).squeeze(1)
        if by_sample:
            losses = torch.zeros(len(w), dtype=torch.float64).index_add(0, sample_ids, losses)
        grads.backward(losses)
        torch.testing.assert_close(grads.weighted_sum(w)["weight"], (w[sample_ids] @ x).unsqueeze(0))
