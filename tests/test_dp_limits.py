"""Where private training must equal something known: plain training, the big batch, the oracle's clipped sum, Opacus."""

import collections
import copy
import math
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from private_runs import data, difference, mlp, private, train, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise.testing import oracle

OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"lr": 0.01},
    "AdamW": {"lr": 0.01},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "Adagrad": {},
    "Adadelta": {},
    "RMSprop": {},
    "Rprop": {},
    "ASGD": {},
    "Adafactor": {},
}


def losses(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_noise_and_bound_it_is_plain_training(name):
    """To rounding: sums of 40 samples in another order. Rprop goes by signs alone, where gradients are far from 0 here."""
    (x, y), plain = data().tensors, mlp().double()
    x = x.double()
    optimizer = getattr(torch.optim, name)(plain.parameters(), **OPTIMIZERS[name])
    for _ in range(10):
        optimizer.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        optimizer.step()
    model = mlp().double()
    inner = getattr(torch.optim, name)(model.parameters(), **OPTIMIZERS[name])
    model, optimizer, loader = private(model, inner, batch_size=40, dataset=TensorDataset(x, y))
    assert optimizer is inner and isinstance(optimizer, getattr(torch.optim, name))
    train(model, optimizer, loader, epochs=10)
    assert difference(weights(model), weights(plain)) < 1e-9
    assert optimizer.epsilon(delta=1e-5) == math.inf and optimizer.accountant.num_steps == 10


def test_gradients_lie_in_memory_as_their_parameters_do():
    """A fused optimizer reads both as they lie; the sum of a transposed use lies otherwise."""

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.v = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(3, 5).T)

        def forward(self, x):
            return x @ self.w + F.linear(x, self.v.T)

    ends = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = Turned()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
        train(*private(model, optimizer, max_grad_norm=1.0, noise_multiplier=1.0))
        assert all(p.grad.stride() == p.stride() for p in model.parameters())
        ends.append(weights(model))
    assert difference(*ends) < 1e-5


def test_every_optimizer_of_torch_is_tried_or_refused():
    known = {
        name
        for name in dir(torch.optim)
        if isinstance(getattr(torch.optim, name), type) and issubclass(getattr(torch.optim, name), torch.optim.Optimizer)
    }
    assert known - {"Optimizer", "LBFGS", "SparseAdam", "Muon"} <= set(OPTIMIZERS)


def test_muon_takes_matrices():
    model = nn.Sequential(nn.Linear(5, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))
    train(*private(model, torch.optim.Muon(model.parameters()), noise_multiplier=1.0, max_grad_norm=1.0))


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_optimizers_without_a_private_step_are_refused(name):
    model = mlp()
    with pytest.raises(sw.SamplewiseError, match=name):
        private(model, getattr(torch.optim, name)(model.parameters()))


def clipped_oracle(model, x, y, bounds, *, eps=None):
    """{name: sum_b w[b] G[b]} in float64; `bounds` is {prefix: bound}."""
    G = oracle(model, losses, x, y)
    out = {}
    for prefix, bound in bounds.items():
        names = [name for name in G if name.startswith(prefix)]
        norms = sum(G[name].flatten(1).square().sum(1) for name in names).sqrt()
        w = (bound / norms).clamp(max=1) if eps is None else bound / (norms + eps)
        out |= {name: torch.einsum("b,b...->...", w, G[name]) for name in names}
    return out


@pytest.mark.parametrize(
    ("options", "bounds", "eps"),
    [
        ({"max_grad_norm": 0.3}, {"": 0.3}, None),
        ({"max_grad_norm": 0.3, "clipping": "per_layer"}, {"0": 0.3 / 2**0.5, "2": 0.3 / 2**0.5}, None),
        ({"max_grad_norm": {"a": 0.1, "b": 0.4}, "groups": {"a": "0.*", "b": "*"}}, {"0": 0.1, "2": 0.4}, None),
        ({"max_grad_norm": 0.3, "clipping": "automatic"}, {"": 0.3}, 0.01),
        ({"max_grad_norm": 0.3, "clipping": sw.dp.Automatic(eps=1.0), "groups": "layer"}, {"0": 0.3 / 2**0.5, "2": 0.3 / 2**0.5}, 1.0),
        ({"max_grad_norm": 0.3, "clipping": "adaptive"}, {"": 0.3}, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("max_rows", [None, 7])
def test_a_step_is_the_oracles_clipped_sum(options, bounds, eps, max_rows):
    """Accumulated or not. The margin by which norms are taken for larger, 1e-4 in float32, is what may be lost."""
    model = mlp()
    truth = clipped_oracle(model, *data().tensors, bounds, eps=eps)
    before = weights(model)
    model, optimizer, loader = private(model, batch_size=40, max_physical_batch_size=max_rows, **options)
    sizes = train(model, optimizer, loader)
    assert sizes == ([40] if max_rows is None else [7, 7, 7, 7, 7, 5])
    for name, total in truth.items():
        moved = (before[name] - weights(model)[name]).double() / 0.5 * 40
        assert float((moved - total).abs().max()) < 2e-4 * float(total.abs().max())
        assert float(moved.norm()) <= float(total.norm()) * (1 + 1e-6)


def test_micro_batches_move_parameters_once_a_draw():
    model, optimizer, loader = private(batch_size=40, max_physical_batch_size=16, max_grad_norm=1.0, noise_multiplier=1.0)
    before, seen = weights(model), []
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        seen.append((len(x), optimizer.stepped, difference(before, weights(model)) > 0))
    assert seen == [(16, False, False), (16, False, False), (8, True, True)]
    assert optimizer.accountant.num_steps == 1
    with pytest.raises(TypeError, match="no length"):
        len(loader)


def test_sum_losses_are_not_divided():
    by_mean, by_sum = (private(mlp(), batch_size=40, max_grad_norm=0.1, loss_reduction=r) for r in ("mean", "sum"))
    train(*by_mean)
    model, optimizer, loader = by_sum
    for group in optimizer.param_groups:
        group["lr"] /= 40
    for x, y in loader:
        F.cross_entropy(model(x), y, reduction="sum").backward()
        optimizer.step()
    assert difference(weights(by_mean[0]), weights(model)) < 1e-6


def test_tied_frozen_and_lora_weights():
    """Tied weights are clipped once over all their uses; frozen ones get no gradient and no noise."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(6, 4)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.A, self.B = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(4, 2))
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.emb.weight

        def forward(self, ids):
            h = self.emb(ids)
            return self.head(self.frozen(h) + F.linear(h, self.B @ self.A))

    torch.manual_seed(0)
    model, ids = Tied(), torch.randint(6, (12, 3))
    rows = TensorDataset(ids, torch.roll(ids, 1, 1))
    G = oracle(model, lambda m, x, y: F.cross_entropy(m(x).mT, y, reduction="none").mean(1), *rows.tensors)
    norms = sum(g.flatten(1).square().sum(1) for g in G.values()).sqrt()
    w = (0.2 / norms).clamp(max=1)
    before = weights(model)
    model, optimizer, loader = private(
        model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0), dataset=rows, batch_size=12,
        max_grad_norm=0.2,
    )  # fmt: skip
    for x, y in loader:
        F.cross_entropy(model(x).mT, y).backward()
        optimizer.step()
    for name, g in G.items():
        moved = (before[name] - weights(model)[name]).double() * 12
        true = torch.einsum("b,b...->...", w, g)
        assert float((moved - true).abs().max()) < 2e-4 * float(true.abs().max()), name
    assert torch.equal(before["frozen.weight"], model.frozen.weight) and model.frozen.weight.grad is None


def test_rows_of_one_user_are_one_sample():
    """The gradient of a user is the sum over the rows, clipped once; the loader draws users."""
    x, y = data(12).tensors
    users = torch.tensor([3, 3, 3, 0, 0, 9, 9, 9, 9, 5, 5, 5])
    model = mlp()
    G = oracle(model, losses, x, y)
    found, of = users.unique(return_inverse=True)
    G = {name: g.new_zeros(len(found), *g.shape[1:]).index_add_(0, of, g) for name, g in G.items()}
    norms = sum(g.flatten(1).square().sum(1) for g in G.values()).sqrt()
    w, before = (0.5 / norms).clamp(max=1), weights(model)
    model, optimizer, loader = private(
        model, dataset=TensorDataset(x, y), batch_size=4, sample_ids=users, loss_reduction="sum", max_grad_norm=0.5,
        max_physical_batch_size=5,
    )  # fmt: skip
    assert loader.sample_rate == 1 and optimizer.expected_batch_size == 4
    sizes = []
    for xb, yb in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(xb), yb, reduction="sum").backward()
        optimizer.step()
        sizes.append(len(xb))
    assert sorted(sizes) == [3, 4, 5] and optimizer.accountant.num_steps == 1
    for name, g in G.items():
        moved = (before[name] - weights(model)[name]).double() / 0.5
        true = torch.einsum("b,b...->...", w, g)
        assert float((moved - true).abs().max()) < 2e-4 * float(true.abs().max()), name


def test_a_mean_over_users_of_unequal_numbers_of_rows_is_refused():
    model, _optimizer, loader = private(batch_size=40, sample_ids=[0] * 10 + list(range(1, 31)), max_grad_norm=1.0)
    batches = iter(loader)
    x, y = next(batches)
    with pytest.raises(sw.SamplesMixError, match="does not weigh all samples alike"):
        F.cross_entropy(model(x), y).backward()
    batches.close()


class Augmented(torch.utils.data.Dataset):
    """Another view of the row each time it is fetched."""

    def __init__(self):
        self.rows, self.fetched = data(12), []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, k):
        x, y = self.rows[k]
        self.fetched.append(k)
        return x + 0.1 * self.fetched.count(k), y


def test_views_of_one_sample_count_once():
    model, before = mlp(), weights(mlp())
    dataset = Augmented()
    model, optimizer, loader = private(model, dataset=dataset, batch_size=12, views=3, max_grad_norm=0.5)
    ((x, y),) = list(loader)
    assert x.shape == (36, 5) and sorted(dataset.fetched) == sorted(list(range(12)) * 3)
    G = oracle(model, losses, x, y)
    G = {name: g.reshape(12, 3, *g.shape[1:]).mean(1) for name, g in G.items()}
    norms = sum(g.flatten(1).square().sum(1) for g in G.values()).sqrt()
    w = (0.5 / norms).clamp(max=1)
    dataset.fetched.clear()
    train(model, optimizer, loader)
    for name, g in G.items():
        moved = (before[name] - weights(model)[name]).double() / 0.5 * 12
        true = torch.einsum("b,b...->...", w, g)
        assert float((moved - true).abs().max()) < 2e-4 * float(true.abs().max()), name


def test_opacus_optimizer_over_our_grad_sample_gives_the_same_update():
    """Opacus clips to C / (n + 1e-6), we to C / (1.0001 n)."""
    opacus = import_module("opacus.optimizers")
    x, y = data().tensors
    theirs = mlp()
    dp = opacus.DPOptimizer(
        torch.optim.SGD(theirs.parameters(), lr=0.5), noise_multiplier=0.0, max_grad_norm=0.3, expected_batch_size=40
    )
    sw.call_for_per_sample_grads(theirs)(x)  # the names are there
    for _ in range(3):
        dp.zero_grad()
        out = sw.call_for_per_sample_grads(theirs, loss_reduction="mean")(x)
        F.cross_entropy(out, y).backward()
        dp.step()
    model, optimizer, loader = private(batch_size=40, max_grad_norm=0.3)
    train(model, optimizer, loader, epochs=3)
    assert difference(weights(model), weights(theirs)) < 1e-4 * difference(weights(model), weights(mlp()))


def test_opacus_noise_has_our_size():
    """The same clipping and noise multiplier give the same standard deviation of a gradient of pure noise."""
    opacus = import_module("opacus.optimizers")
    theirs, ours = nn.Linear(200, 100), nn.Linear(200, 100)
    dp = opacus.DPOptimizer(
        torch.optim.SGD(theirs.parameters(), lr=0.0), noise_multiplier=2.0, max_grad_norm=0.7, expected_batch_size=10
    )
    for p in theirs.parameters():
        p.grad_sample = torch.zeros(4, *p.shape)
    dp.step()
    model, optimizer, loader = private(
        ours, dataset=TensorDataset(torch.zeros(10, 200), torch.zeros(10).long()), noise_multiplier=2.0, max_grad_norm=0.7,
        batch_size=10,
    )  # fmt: skip
    for x, _ in loader:
        (model(x) * 0).mean().backward()
        optimizer.step()
    # 20,000 elements: a standard deviation is known to 0.5 %; 3 % is six of them
    assert math.isclose(float(ours.weight.grad.std()), float(theirs.weight.grad.std()), rel_tol=0.03)


def test_half_precision_sums_are_rounded_after_the_noise():
    """The sum of 4,096 samples of 1/64 each is 64: in bfloat16 another 1/64 would vanish, or count for 0.5."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    x = torch.ones(4096, 1, dtype=torch.bfloat16)
    with sw.capture(model, verify=False) as grads:
        grads.backward(model(x).squeeze(1) / 64)
    total = sw.dp.clipped(grads, {"": 1.0}).sums["weight"]
    assert total.dtype == torch.float32 and float(total) == 64.0
    with sw.capture(model, verify=False) as grads:
        grads.backward(model(x[:4095]).squeeze(1) / 64)
    assert float(total - sw.dp.clipped(grads, {"": 1.0}).sums["weight"]) == pytest.approx(1 / 64)


def test_a_derived_weight_in_half_precision_is_summed_sample_by_sample():
    class Merged(nn.Module):
        def __init__(self):
            super().__init__()
            self.A = nn.Parameter(torch.randn(2, 4, dtype=torch.bfloat16))
            self.B = nn.Parameter(torch.randn(3, 2, dtype=torch.bfloat16))

        def forward(self, x):
            return F.linear(x, self.B @ self.A)

    model = Merged()
    with sw.capture(model, verify=False) as grads:
        grads.backward(model(torch.randn(5, 4, dtype=torch.bfloat16)).sum(1))
    sums = sw.dp.clipped(grads, {"": 1e6}).sums
    for name, G in grads.materialize().items():
        assert sums[name].dtype == torch.float32
        torch.testing.assert_close(sums[name], G.float().sum(0), rtol=1e-6, atol=1e-6)


def test_autocast_trains():
    model, optimizer, loader = private(max_grad_norm=1.0, noise_multiplier=1.0)
    for x, y in loader:
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(p.dtype == torch.float32 and bool(p.isfinite().all()) for p in model.parameters())


def test_schedulers_before_and_after(recwarn):
    for before in (True, False):
        model = mlp()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        if before:
            scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
        model, optimizer, loader = private(model, inner, max_grad_norm=1.0, noise_multiplier=1.0)
        if not before:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        start = weights(model)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.5**4 and optimizer.accountant.num_steps == 4
        assert difference(start, weights(model)) > 0
    assert not recwarn.list


def test_model_and_state_dict_stay_as_they_were():
    model = mlp()
    keys, kind = list(model.state_dict()), type(model)
    inner = torch.optim.Adam(model.parameters())
    same, optimizer, _ = private(model, inner)
    assert same is model and type(model) is kind and list(model.state_dict()) == keys and optimizer is inner
    assert type(optimizer).__name__ == "PrivateAdam"
    twin = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(twin(torch.ones(2, 5)), model(torch.ones(2, 5)))


def test_a_compiled_model_trains():
    model = mlp()
    compiled = torch.compile(model, backend="eager")
    _, optimizer, loader = private(
        compiled, torch.optim.SGD(compiled.parameters(), lr=0.5), batch_size=40, max_grad_norm=0.3
    )
    train(compiled, optimizer, loader)
    other, optimizer, loader = private(batch_size=40, max_grad_norm=0.3)
    train(other, optimizer, loader)
    assert difference(weights(model), weights(other)) < 1e-6


def test_a_default_device_does_not_reach_draws_and_noise():
    """What is drawn is drawn on the CPU whatever torch.set_default_device says; "meta" has no values, so that it would show."""
    rows = [(x, y) for x, y in data(20)]
    with torch.device("meta"):
        loader = sw.dp.PoissonLoader(rows, sample_rate=0.5, steps=2, sample_ids=[k // 2 for k in range(20)], views=2, seed=0)
        drawn = [loader.draw(0, k).tolist() for k in range(2)]
        assert drawn == [loader.draw(0, k).tolist() for k in range(2)] and drawn[0] != drawn[1]
        assert all(part.device.type == "cpu" for part in (loader.units.ids, sw.dp.noise.secure_normal(3)))
        assert abs(sw.dp.Noise(0).number(1.0, 1e-6) - 1) < 1e-4
        assert abs(sw.dp.Noise(secure=True).number(1.0, 1e-6) - 1) < 1e-4
        assert [part.num_rows for part in parts_of(loader)] == [2 * 2 * len(units) for units in drawn]


def parts_of(loader):
    """What the loader would tell of its batches, without fetching rows."""
    seen = collections.deque()
    sampler = []

    class Fetches:
        def __init__(self, dataset, batch_sampler, **_):
            sampler.extend(batch_sampler)

        def __iter__(self):
            return iter(())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("samplewise.dp.loader.DataLoader", Fetches)
        list(loader._batches(0, seen))
    return list(seen)


def test_workers_and_a_loader_of_dicts():
    rows = [{"x": torch.randn(5), "y": torch.tensor(k % 3), "name": str(k)} for k in range(30)]
    model = mlp()
    model, optimizer, loader = private(
        model, loader=DataLoader(rows, batch_size=6, num_workers=2), max_physical_batch_size=4, max_grad_norm=1.0,
        noise_multiplier=1.0,
    )  # fmt: skip
    sizes = []
    for batch in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(batch["x"]), batch["y"]).backward()
        optimizer.step()
        sizes.append(len(batch["name"]))
    assert max(sizes) <= 4 and optimizer.accountant.num_steps == 5


@pytest.mark.parametrize("of_users", [False, True])
def test_empty_draws_take_a_step_of_noise(of_users):
    model, optimizer, loader = private(
        loader=DataLoader(data(60 if of_users else 30), batch_size=1), max_grad_norm=1.0, noise_multiplier=1.0,
        sample_ids=[k // 2 for k in range(60)] if of_users else None,
    )  # fmt: skip
    before, empty = weights(model), 0
    for x, y in loader:
        optimizer.zero_grad()
        assert x.shape[1:] == (5,) and y.dtype == torch.long
        if len(x) == 0 and empty == 0:
            empty += 1
            optimizer.step()  # a model that cannot run on 0 rows may be left out
        else:
            empty += len(x) == 0
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        assert difference(before, weights(model)) > 0 and all(p.grad is not None for p in model.parameters())
        before = weights(model)
    assert empty > 3 and optimizer.accountant.num_steps == 30
