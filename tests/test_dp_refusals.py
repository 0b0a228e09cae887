"""Each way in which privacy would be void without an error, tried: it raises, or the numbers show that it is not void."""

import copy
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from private_runs import data, difference, mlp, private, train, weights
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, WeightedRandomSampler

import samplewise as sw
from samplewise.dp.clipping import clip_weights
from samplewise.errors import SamplesMixError, SamplewiseError, UnattributedError
from samplewise.testing import oracle


@pytest.fixture(autouse=True)
def _nothing_stays_open():
    yield
    assert not _get_current_function_mode_stack()


class Loop:
    """A private run held at its first batch."""

    def __init__(self, **arguments):
        self.model, self.optimizer, self.loader = private(
            **{"max_grad_norm": 1.0, "noise_multiplier": 1.0, "batch_size": 40, **arguments}
        )
        self.batches = iter(self.loader)
        self.x, self.y = next(self.batches)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.batches.close()

    def backward(self):
        F.cross_entropy(self.model(self.x), self.y).backward()


# --- the loader ------------------------------------------------------------------------------------------------------


class Endless(IterableDataset):
    def __iter__(self):
        return iter(data())


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        (DataLoader(data(), batch_size=4, sampler=WeightedRandomSampler([1.0] * 40, 40)), "WeightedRandomSampler"),
        (DataLoader(data(), sampler=torch.utils.data.RandomSampler(data(), replacement=True)), "RandomSampler"),
        (DataLoader(data(), sampler=torch.utils.data.SubsetRandomSampler(range(5))), "SubsetRandomSampler"),
        (DataLoader(data(), batch_sampler=[[0, 1], [0, 2]]), "batch sampler of its own"),
        (DataLoader(Endless(), batch_size=4), "IterableDataset"),
    ],
)
def test_loaders_that_do_not_poisson_sample_are_refused(loader, text):
    with pytest.raises(SamplewiseError, match=text):
        private(loader=loader)


def test_what_is_no_loader_is_refused():
    with pytest.raises(TypeError, match="DataLoader"):
        private(loader=[(torch.ones(2, 5), torch.zeros(2).long())])


def test_shuffle_and_drop_last_are_replaced_by_poisson_sampling():
    _, _, loader = private(loader=DataLoader(data(), batch_size=7, shuffle=True, drop_last=True), seed=None)
    assert loader.sample_rate == 7 / 40
    sizes = [len(x) for _ in range(5) for x, _ in loader]
    assert len(set(sizes)) > 3, "draws have sizes of their own"


def test_draws_have_the_rate_that_is_accounted():
    """10,000 draws of 50 units at 0.03: each unit's count is Binomial(10000, 0.03), mean 300, sd 17. The largest of 50 is
    beyond five sd with probability 3e-5."""
    counts = torch.zeros(50)
    rng = sw.dp.noise.generator()
    for _ in range(10_000):
        counts[sw.dp.poisson_sample(50, 0.03, generator=rng)] += 1
    assert float((counts - 300).abs().max()) < 5 * 17.1
    # and together they are as many as independent draws are: variance of a size 50 · 0.03 · 0.97
    sizes = torch.tensor([float(len(sw.dp.poisson_sample(50, 0.03, generator=rng))) for _ in range(4000)])
    assert abs(float(sizes.var()) / (50 * 0.03 * 0.97) - 1) < 0.12  # sd of it 2.3 %, five sd


def test_a_rate_below_what_float32_resolves_is_kept():
    """At 1e-10, 5e7 chances draw 0.005 units; numbers of 24 bits are 0, and so below any rate, in three of them."""
    rng = sw.dp.noise.generator(0)
    assert sum(len(sw.dp.poisson_sample(10_000_000, 1e-10, generator=rng)) for _ in range(5)) == 0


def test_a_step_with_data_of_another_loader_is_refused():
    model, optimizer, _ = private(max_grad_norm=1.0, noise_multiplier=1.0)
    x, y = next(iter(DataLoader(data(), batch_size=4)))
    F.cross_entropy(model(x), y).backward()
    before = weights(model)
    with pytest.raises(SamplewiseError, match="without a batch of the private loader"):
        optimizer.step()
    assert difference(before, weights(model)) == 0


def test_a_batch_of_another_size_is_refused():
    with Loop() as run, pytest.raises(UnattributedError, match="the batch has 40 rows"):
        run.model(run.x[:20])


def test_one_loader_feeds_one_optimizer():
    _, optimizer, loader = private()
    with pytest.raises(SamplewiseError, match="another private optimizer"):
        private(loader=loader)
    assert optimizer is not None


def test_two_iterations_at_once_are_refused():
    _, _optimizer, loader = private()
    first, second = iter(loader), iter(loader)
    next(first), next(second)
    with pytest.raises(SamplewiseError, match="older iteration"):
        next(first)
    second.close()


def test_an_iteration_left_by_break_leaves_nothing_open():
    model, optimizer, loader = private(max_grad_norm=1.0, noise_multiplier=1.0)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        break
    assert not _get_current_function_mode_stack() and optimizer.accountant.num_steps == 0
    assert len(train(model, optimizer, loader)) == 4, "the next iteration is an epoch of its own"
    assert optimizer.accountant.num_steps == 4


# --- the step --------------------------------------------------------------------------------------------------------


def test_closures_are_refused():
    with Loop() as run, pytest.raises(SamplewiseError, match="takes no closure"):
        run.optimizer.step(lambda: 0.0)


def test_a_step_without_backward_is_refused():
    with Loop() as run, pytest.raises(SamplewiseError, match="without gradients of the batch"):
        run.optimizer.step()


def test_two_steps_for_one_batch_are_refused():
    with Loop() as run:
        run.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        with pytest.raises(SamplewiseError, match="without a batch"):
            run.optimizer.step()
        assert run.optimizer.accountant.num_steps == 1


def test_a_second_forward_on_other_data_is_refused():
    with Loop() as run:
        run.backward()
        with pytest.raises(UnattributedError, match="after a backward"):
            F.cross_entropy(run.model(torch.ones(40, 5)), run.y).backward()


def test_two_backwards_of_one_batch_are_clipped_as_one():
    """Each alone would let a sample count for twice the bound."""
    with Loop(max_grad_norm=1e-3, noise_multiplier=0.0) as run:
        run.backward()
        F.cross_entropy(run.model(run.x + 0.1), run.y).backward()
        run.optimizer.step()
        moved = torch.cat([p.grad.flatten() for p in run.model.parameters()])
    G = oracle(mlp(), lambda m, x, y: sum(F.cross_entropy(m(v), y, reduction="none") for v in (x, x + 0.1)), run.x, run.y)
    norms = sum(g.flatten(1).square().sum(1) for g in G.values()).sqrt()
    true = torch.cat([torch.einsum("b,b...->...", 1e-3 / norms, g).flatten() for g in G.values()]) / 40
    assert float((moved - true).norm() / true.norm()) < 2e-4


def test_skipped_steps_are_refused():
    model, optimizer, loader = private(max_grad_norm=1.0, noise_multiplier=1.0)
    with pytest.raises(SamplewiseError, match="without optimizer.step"):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
    assert optimizer.accountant.num_steps == 0


def test_a_draw_that_is_not_completed_is_refused():
    model, optimizer, loader = private(max_grad_norm=1.0, noise_multiplier=1.0, max_physical_batch_size=3)
    with pytest.raises(SamplewiseError, match="was not stepped on"):
        for k, (x, y) in enumerate(loader):
            if k > 0:
                continue
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert optimizer.accountant.num_steps == 0


@pytest.mark.parametrize("loop", ["skips", "prefetches"])
def test_loops_that_are_behind_their_batches_are_refused(loop):
    """One that prefetches would take the last batch of a draw for the first of the next: a sample may be in both."""
    model, optimizer, loader = private(max_grad_norm=1.0, noise_multiplier=1.0)
    batches = iter(loader)
    x, y = next(batches)
    if loop == "skips":
        x, y = next(batches)
    else:
        next(batches)
    with pytest.raises(SamplewiseError, match="ahead of their steps"):
        F.cross_entropy(model(x), y).backward()
    with pytest.raises(SamplewiseError, match="ahead of their steps"):
        optimizer.step()
    batches.close()
    train(model, optimizer, loader)


def test_a_loop_that_only_looks_is_fine():
    model, _optimizer, loader = private()
    with torch.no_grad():
        assert sum(len(model(x)) for x, _ in loader) > 0


def test_less_noise_than_planned_is_stopped_at_the_target():
    model, optimizer, loader = private(
        target_epsilon=2.0, target_delta=1e-5, epochs=50, max_grad_norm=1.0, accountant="rdp", batch_size=20
    )
    optimizer.noise_multiplier /= 8
    with pytest.raises(SamplewiseError, match="above the target 2.0"):
        train(model, optimizer, loader, epochs=50)
    assert optimizer.accountant.num_steps < 50 and optimizer.epsilon(delta=1e-5, accountant="rdp") <= 2.0


def test_gradients_that_were_not_zeroed_are_refused():
    model, optimizer, loader = private(max_grad_norm=1.0, noise_multiplier=1.0)
    with pytest.raises(SamplewiseError, match="zero_grad"):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


@pytest.mark.parametrize("where", ["before", "inside"])
def test_a_loss_beside_the_private_model_is_refused(where):
    with Loop() as run:
        penalty = sum(p.square().sum() for p in run.model.parameters())
        if where == "before":
            penalty.backward()
            run.backward()
            with pytest.raises(SamplewiseError, match="did not pass clipping"):
                run.optimizer.step()
        else:
            with pytest.raises(SamplewiseError):
                (F.cross_entropy(run.model(run.x), run.y) + sum(p.square().sum() for p in run.model.parameters())).backward()


def test_a_grad_scaler_is_refused():
    """It skips steps where it sees inf, which is a look at the data, and scales by what it saw; it finds no gradients to look at."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with Loop() as run:
        with pytest.raises(SamplewiseError, match="GradScaler"):
            scaler.scale(F.cross_entropy(run.model(run.x), run.y)).backward()
        before = weights(run.model)
        with pytest.raises(AssertionError, match="No inf checks"):
            scaler.step(run.optimizer)
        assert difference(before, weights(run.model)) == 0


def test_zero_grad_between_forward_and_backward_is_fine():
    with Loop() as run:
        loss = F.cross_entropy(run.model(run.x), run.y)
        run.optimizer.zero_grad(set_to_none=False)
        loss.backward()
        run.optimizer.step()
        assert run.optimizer.accountant.num_steps == 1


# --- the model -------------------------------------------------------------------------------------------------------


def test_parameters_that_are_not_in_the_model_are_refused():
    model = mlp()
    with pytest.raises(SamplewiseError, match="not in the model"):
        private(model, torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(2))], lr=0.1))


def test_parameters_added_later_are_refused():
    with Loop() as run:
        extra = nn.Parameter(torch.ones(3))
        with pytest.raises(SamplewiseError, match="added to a private optimizer"):
            run.optimizer.add_param_group({"params": [extra]})
        run.optimizer.param_groups[0]["params"].append(extra)
        run.backward()
        with pytest.raises(SamplewiseError, match="had not at make_private"):
            run.optimizer.step()


def test_parameters_replaced_later_are_refused():
    with Loop() as run:
        run.model[2] = nn.Linear(8, 3)
        run.backward()
        with pytest.raises(SamplewiseError, match=r"'2\.bias' of the optimizer is not in the model any more"):
            run.optimizer.step()


def test_parameters_outside_of_the_optimizer_stay_as_they_are_and_do_not_count():
    model = mlp()
    model, optimizer, loader = private(
        model, torch.optim.SGD(model[2].parameters(), lr=0.5), batch_size=40, max_grad_norm=0.1
    )
    before = weights(model)
    train(model, optimizer, loader)
    moved = {name: before[name] - p for name, p in weights(model).items()}
    assert float(moved["0.weight"].abs().max()) == 0 and float(moved["2.weight"].abs().max()) > 0


def test_freezing_between_draws_is_fine_and_within_one_refused():
    model, optimizer, loader = private(max_grad_norm=1.0, noise_multiplier=1.0)
    for k, (x, y) in enumerate(loader):
        model[0].requires_grad_(k % 2 == 1)
        before = weights(model)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        assert (difference({"w": before["0.weight"]}, {"w": model[0].weight.detach()}) > 0) == (k % 2 == 1)
    with Loop() as run:
        run.backward()
        run.model[0].requires_grad_(False)
        with pytest.raises(SamplewiseError, match="frozen or unfrozen"):
            run.optimizer.step()


def test_a_parameter_that_takes_no_part_gets_noise():
    """Otherwise it would show that no sample used it."""

    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, x):
            return self.a(x)

    model = Routed()
    train(*private(model, max_grad_norm=1.0, noise_multiplier=1.0, batch_size=40))
    assert float(model.b.weight.grad.std()) == pytest.approx(1 / 40, rel=0.8)


def test_batch_norm_is_refused_and_fixed():
    model = nn.Sequential(nn.Linear(5, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))
    with pytest.raises(SamplewiseError, match=r"1 \(BatchNorm1d\) mixes the samples.*\n.*fix\(model\)"):
        private(model)
    stale = torch.optim.SGD(model.parameters(), lr=0.1)
    assert [(c.name, c.before, c.after) for c in sw.dp.fix(model)] == [("1", "BatchNorm1d", "GroupNorm")]
    with pytest.raises(SamplewiseError, match="after the optimizer was made"):
        private(model, stale)
    train(*private(model, max_grad_norm=1.0, noise_multiplier=1.0))


def test_fix_keeps_scale_and_shift_and_reaches_every_place():
    norm = nn.BatchNorm2d(6)
    nn.init.uniform_(norm.weight)
    inner = nn.Sequential(norm, nn.InstanceNorm2d(6, track_running_stats=True, affine=True))
    model = nn.ModuleDict({"a": inner, "b": norm})
    changes = sw.dp.fix(model)
    assert {c.name for c in changes} >= {"a.0", "a.1"} and sw.dp.validate(model) == []
    assert model["a"][0] is model["b"] and torch.equal(model["b"].weight, norm.weight)
    assert model["a"][1].running_mean is None
    assert sw.dp.validate(nn.Sequential(nn.BatchNorm1d(3).eval())) == []
    assert [p.kind for p in sw.dp.validate(nn.Sequential(nn.LazyLinear(3)))] == ["LazyLinear"]
    assert [p.can_be_fixed for p in sw.dp.validate(nn.BatchNorm1d(3))] == [False]


class Learns(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.lin, self.how = nn.Linear(5, 3), how
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        with torch.no_grad():
            if self.how == "in place":
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            elif self.how == "assigned":
                self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.lin(x)


@pytest.mark.parametrize("how", ["in place", "assigned"])
def test_a_buffer_that_learns_from_data_is_refused(how):
    with Loop(model=Learns(how)) as run:
        run.backward()
        with pytest.raises(SamplewiseError, match="buffer 'mean' took in values of the batch"):
            run.optimizer.step()


def test_a_buffer_that_only_counts_is_fine():
    with Loop(model=Learns("")) as run:
        run.backward()
        run.optimizer.step()


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y: (out @ out.T).logsumexp(1).mean(),
        lambda out, y: F.cross_entropy(out - out.mean(0), y),
        lambda out, y: F.cross_entropy(out, y) ** 2,
        lambda out, y: F.cross_entropy(out, y, reduction="none").topk(10).values.mean(),
        lambda out, y: F.cross_entropy(out, y, reduction="sum"),
        lambda out, y: (lambda each: each[each > each.median()].mean())(F.cross_entropy(out, y, reduction="none")),
        lambda out, y: F.cross_entropy(out, y, reduction="sum") / (y != 1).sum(),
        lambda out, y: F.cross_entropy(out, y.flip(0)),
        lambda out, y: F.cross_entropy(out, y, ignore_index=1),
    ],
    ids="contrastive centred squared hardest sum above-median counted flipped ignored".split(),
)
def test_losses_that_mix_samples_or_are_not_a_mean_are_refused(loss):
    with Loop() as run, pytest.raises(SamplewiseError):
        loss(run.model(run.x), run.y).backward()


def test_class_weights_go_sample_by_sample():
    """torch's weighted mean divides by the weights of all samples; weighted losses that are averaged do not."""
    weight = torch.tensor([1.0, 2.0, 3.0])
    with Loop() as run, pytest.raises(SamplesMixError):
        F.cross_entropy(run.model(run.x), run.y, weight=weight).backward()
    with Loop() as run:
        F.cross_entropy(run.model(run.x), run.y, weight=weight, reduction="none").mean().backward()
        run.optimizer.step()


def test_hooks_on_steps_see_noisy_gradients_once():
    seen = []
    model, optimizer, loader = private(max_grad_norm=1.0, noise_multiplier=1.0, max_physical_batch_size=4)
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: seen.append(model[0].weight.grad is not None))
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, loader)
    assert seen == [True] * 4


def test_a_model_is_private_once():
    model, _optimizer, _ = private()
    with pytest.raises(SamplewiseError, match="already by another optimizer"):
        private(model)


def test_an_error_in_forward_leaves_nothing_open():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(5, 3)

        def forward(self, x):
            self.lin(x)
            raise KeyError("mine")

    with Loop(model=Fails()) as run:
        with pytest.raises(KeyError, match="mine"):
            run.model(run.x)
        assert not _get_current_function_mode_stack()


def test_evaluation_between_forward_and_step_is_plain():
    with Loop(batch_size=40) as run:
        with torch.no_grad():
            run.model.eval()
            first = run.model(torch.ones(7, 5))
            run.model.train()
        loss = F.cross_entropy(run.model(run.x), run.y)
        with torch.no_grad():
            assert torch.equal(run.model(torch.ones(7, 5)), first)
        loss.backward()
        with torch.no_grad():
            assert torch.equal(run.model(torch.ones(7, 5)), first)
        run.optimizer.step()
        assert run.optimizer.accountant.num_steps == 1
    x = torch.ones(2, 5, requires_grad=True)
    run.model(x).sum().backward()
    assert x.grad is not None, "outside of a batch the model is an ordinary one"


def test_a_part_of_the_model_called_by_itself_is_seen():
    with Loop() as run:
        hidden = run.model[0](run.x).tanh()
        F.cross_entropy(run.model[2](hidden), run.y).backward()
        run.optimizer.step()


def test_copies_and_pickles_of_the_model_are_ordinary_models():
    with Loop() as run:
        for twin in (copy.deepcopy(run.model), pickle.loads(pickle.dumps(run.model))):
            F.cross_entropy(twin(run.x), run.y).backward()
            assert twin[0].weight.grad is not None and not _get_current_function_mode_stack()
        with pytest.raises(SamplewiseError, match="not copied"):
            copy.deepcopy(run.optimizer)
        with pytest.raises(SamplewiseError, match="state_dict"):
            pickle.dumps(run.optimizer)


def test_blocks_that_change_functions_must_hold_the_whole_step():
    with Loop() as run:
        with torch.device("cpu"):
            run.backward()
            run.optimizer.step()
        assert run.optimizer.accountant.num_steps == 1
    with Loop() as run:
        run.backward()
        with torch.device("cpu"):
            run.optimizer.step()
        assert run.optimizer.accountant.num_steps == 1 and not _get_current_function_mode_stack()


def test_a_block_left_between_forward_and_step_is_refused():
    with Loop() as run:
        with torch.device("cpu"):
            run.backward()
        try:
            with pytest.raises(SamplewiseError, match="was left between"):
                run.optimizer.step()
        finally:
            torch.overrides._pop_mode()  # the block's own, which left ours in place of itself


def test_a_step_in_another_thread_is_refused():
    raised = []
    with Loop() as run:
        run.backward()

        def step():
            try:
                run.optimizer.step()
            except Exception as error:
                raised.append(error)

        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        assert isinstance(raised[0], SamplewiseError)
        run.optimizer.step()


def test_several_models_train_side_by_side():
    runs = [private(max_grad_norm=1.0, noise_multiplier=1.0) for _ in range(2)]
    for (x, y), (x2, y2) in zip(runs[0][2], runs[1][2], strict=True):
        for (model, optimizer, _), xb, yb in zip(runs, (x, x2), (y, y2), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()
    assert [optimizer.accountant.num_steps for _, optimizer, _ in runs] == [4, 4]


# --- bounds, noise and targets ---------------------------------------------------------------------------------------


def test_a_bound_changed_between_batches_of_one_draw_is_refused():
    model, optimizer, loader = private(batch_size=40, max_physical_batch_size=16, max_grad_norm=1.0, noise_multiplier=1.0)
    batches = iter(loader)
    x, y = next(batches)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    with pytest.raises(SamplewiseError, match="between batches of one draw"):
        optimizer.max_grad_norm = 10.0
    batches.close()
    optimizer.max_grad_norm = 10.0


def test_noise_follows_a_bound_that_is_scheduled():
    """The noise on a gradient is z · C / batch whatever C is at that step; 163 elements, so 40 % is seven sd."""
    model, optimizer, loader = private(nn.Linear(5, 30), max_grad_norm=1.0, noise_multiplier=2.0, batch_size=40)
    for bound in (0.01, 1.0, 100.0):
        optimizer.max_grad_norm = bound
        for x, _ in loader:
            optimizer.zero_grad()
            (model(x) * 0).mean().backward()
            optimizer.step()
        assert float(model.weight.grad.std()) == pytest.approx(2 * bound / 40, rel=0.4)
    assert optimizer.accountant.history == [(2.0, 1.0, 3)]


def test_scheduled_noise_is_accounted_step_by_step():
    model, optimizer, loader = private(max_grad_norm=1.0, noise_multiplier=2.0, batch_size=10)
    for k, (x, y) in enumerate(loader):
        optimizer.noise_multiplier = 1.0 + (k >= 2)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert optimizer.accountant.history == [(1.0, 0.25, 2), (2.0, 0.25, 2)]


@pytest.mark.parametrize(
    "arguments",
    [
        {"noise_multiplier": -1.0, "max_grad_norm": 1.0},
        {"noise_multiplier": float("nan"), "max_grad_norm": 1.0},
        {"noise_multiplier": 1.0},
        {"max_grad_norm": 0.0},
        {"max_grad_norm": -1.0},
        {"max_grad_norm": float("nan")},
        {"max_grad_norm": {"a": 1.0}},
        {"max_grad_norm": {"a": 1.0}, "groups": {"b": "*"}},
        {"max_grad_norm": 1.0, "clipping": "soft"},
        {"max_grad_norm": 1.0, "clipping": "adaptive", "groups": "layer"},
        {"max_grad_norm": 1.0, "clipping": sw.dp.Adaptive(count_noise=0.4), "noise_multiplier": 1.0},
        {"max_grad_norm": 1.0, "noise_multiplier": None},
        {"max_grad_norm": 1.0, "noise_multiplier": 1.0, "epochs": 3},
        {"max_grad_norm": 1.0, "secure": True, "seed": 1},
        {"max_grad_norm": 1.0, "loss_reduction": "max"},
        {"max_grad_norm": 1.0, "sample_ids": [0] * 40, "max_physical_batch_size": 8},
        {"max_grad_norm": 1.0, "sample_ids": [0] * 3},
    ],
)
def test_arguments_that_cannot_be_had_are_refused(arguments):
    with pytest.raises(ValueError):  # noqa: PT011 (each has its own text)
        private(**arguments)


def test_unknown_arguments_are_refused():
    with pytest.raises(TypeError, match="exclude"):
        private(exclude=["0.weight"])


def test_steps_beyond_the_target_are_refused():
    model, optimizer, loader = private(
        target_epsilon=2.0, target_delta=1e-5, epochs=2, max_grad_norm=1.0, accountant="rdp", batch_size=20
    )
    train(model, optimizer, loader, epochs=2)
    assert 1.8 < optimizer.epsilon(delta=1e-5, accountant="rdp") <= 2.0
    before = weights(model)
    with pytest.raises(SamplewiseError, match="above the target 2.0"):
        train(model, optimizer, loader)
    assert difference(before, weights(model)) == 0


def test_a_subset_is_the_way_to_train_on_a_part():
    _, _, loader = private(loader=DataLoader(Subset(data(), range(20)), batch_size=5))
    assert loader.sample_rate == 0.25


def test_a_sample_is_drawn_once_a_batch():
    rows = TensorDataset(torch.arange(40))
    loader = sw.dp.PoissonLoader(rows, sample_rate=0.9, steps=50)
    assert all(len(x.unique()) == len(x) for (x,) in loader)


def test_a_mixing_model_is_refused_by_the_check_of_a_first_call():
    class Mixes(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(5, 3)

        def forward(self, x):
            return self.lin(x) - x.sum(0)[:3].numpy().sum()

    with Loop(model=Mixes()) as run, pytest.raises(SamplesMixError):
        run.backward()


def test_the_check_of_models_cannot_be_turned_off():
    with pytest.raises(TypeError, match="verify"):
        private(verify=False)


# --- forwards that write to parameters -------------------------------------------------------------------------------


class Decaying(nn.Linear):
    """Writes to its own weight when it is called."""

    def forward(self, input):
        with torch.no_grad():
            self.weight *= 0.5
        return super().forward(input)


@pytest.mark.parametrize("how", ["loop", "step_on"])
def test_a_forward_that_writes_to_parameters_writes_once(how):
    """The checks of the first batch run it again, and put back what it has written."""
    model = nn.Sequential(Decaying(5, 3))
    before = model[0].weight.detach().clone()
    loss_fn = lambda model, x, y: F.cross_entropy(model(x), y)
    model, optimizer, loader = sw.dp.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        DataLoader(TensorDataset(torch.randn(8, 5), torch.randint(3, (8,))), batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **({"loss_fn": loss_fn} if how == "step_on" else {}),
    )
    for x, y in loader:
        optimizer.zero_grad()
        if how == "loop":
            loss_fn(model, x, y).backward()
            optimizer.step()
        else:
            optimizer.step_on(x, y)
    assert torch.equal(model[0].weight, before * 0.5)


def test_what_forward_raises_is_what_is_raised():
    """The hook that hears of it goes, and torch would stumble over that."""
    fails = []

    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(5, 3)

        def forward(self, x):
            if fails:
                raise ValueError("a mistake in forward")
            return self.inner(x)

    model, optimizer, loader = private(Failing())
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        if step == 1:
            fails.append(step)
            with pytest.raises(ValueError, match="a mistake in forward"):
                model(x)
            break
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert not _get_current_function_mode_stack()
    assert not model._forward_hooks


def test_bounds_that_are_no_bounds_bound_nothing():
    norms = torch.tensor([0.0, 1.0, 5.0])
    for bound in (torch.nan, -1.0, 0.0):
        assert clip_weights(norms, torch.tensor(bound)).isnan().all()
    assert clip_weights(torch.tensor([1e-40]), 1e-42).isfinite().all()
    assert (clip_weights(torch.tensor([60000.0], dtype=torch.float16), 6.0, margin=0.1) > 0).all()
