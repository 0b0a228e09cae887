"""Ways around the guards of a private run: each is refused, or does not add to what a sample can change."""

import pytest
import torch
import torch.nn.functional as F
from private_runs import mlp, private
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.data import TensorDataset

from samplewise.errors import SamplewiseError

LABELS = TensorDataset(torch.randn(8, 5, generator=torch.Generator().manual_seed(0)), torch.eye(8)[4].long())
"""Of which one is 1: without that sample, a loss that looks for it gives all others something else."""


@pytest.fixture(autouse=True)
def _modes():
    yield
    assert not _get_current_function_mode_stack()


def each(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


def scaled_by_len(model, x, y):
    losses = each(model, x, y)
    return (losses * (0.01 if len(y[y == 1]) else 1.0)).sum()


def scaled_by_shape(model, x, y):
    losses = each(model, x, y)
    return losses.sum() / (1 + (y == 1).nonzero().shape[0])


def scaled_by_ones(model, x, y):
    losses = each(model, x, y)
    return losses.sum() / (1 + torch.ones_like(y[y == 1]).sum().item())


def item_of_moved(model, x, y):
    x, y = x.clone(), y.clone()  # as .to(device)
    losses = each(model, x, y)
    return losses.sum() / (1 + (y == 1).sum().item())


def counts_of_moved(model, x, y):
    x, y = x.clone(), y.clone()
    losses = each(model, x, y)
    return (losses / torch.bincount(y, minlength=3).clamp(min=1)[y]).sum()


def by_dlpack(model, x, y):
    import numpy as np

    losses = each(model, x, y)
    return losses.sum() / (1 + float(np.from_dlpack(y).sum()))


def sliced_by_the_largest(model, x, y):
    return model(x)[:, : 1 + y.max()].square().sum()


def as_many_columns_as_the_largest(model, x, y):
    return (model(x).square().sum(1) * (F.one_hot(y) >= 0).sum(1)).sum()


def as_many_rows_as_the_largest(model, x, y):
    return model(x).square().sum() * len(torch.arange(1 + y.max()))


def read_as_text(model, x, y):
    return model(x).square().sum() * (2.0 if "1" in f"{y}" else 1.0)


def target_written_later(model, x, y):
    target = F.one_hot(y, 3).float()
    losses = F.mse_loss(model(x), target, reduction="none").sum(1)
    target.data.copy_(target.data.mean(0).expand_as(target))  # autograd does not see it
    return losses.sum()


LOSSES = [
    target_written_later, scaled_by_len, scaled_by_shape, scaled_by_ones, item_of_moved, counts_of_moved, by_dlpack,
    sliced_by_the_largest, as_many_columns_as_the_largest, as_many_rows_as_the_largest, read_as_text,
]  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_numbers_made_of_labels_do_not_scale_a_loss(loss):
    model, optimizer, loader = private(dataset=LABELS, batch_size=8, loss_reduction="sum")
    x, y = next(batches := iter(loader))
    with pytest.raises(SamplewiseError):
        loss(model, x, y).backward()
    batches.close()
    assert optimizer.accountant.num_steps == 0


@pytest.mark.parametrize("compile", [False, True])
def test_numbers_read_do_not_scale_losses_of_samples_in_step_on(compile, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)

    def loss_fn(model, x, y):
        return each(model, x, y) * (0.01 if (y == 1).sum().item() else 1.0)

    _, optimizer, loader = private(dataset=LABELS, batch_size=8, loss_reduction="sum", loss_fn=loss_fn, compile=compile)
    batches = iter(loader)
    with pytest.raises(SamplewiseError):
        optimizer.step_on(*next(batches))


def test_signs_by_place_are_found_in_step_on():
    def loss_fn(model, x, y):
        return (each(model, x, y) * (-1.0) ** torch.arange(len(x))).sum()

    _, optimizer, loader = private(dataset=LABELS, batch_size=8, loss_reduction="sum", loss_fn=loss_fn)
    batches = iter(loader)
    with pytest.raises(SamplewiseError, match="taken out"):
        optimizer.step_on(*next(batches))


def chosen_by_mask(model, x, y):
    out = model(x)
    return F.cross_entropy(out[y == 0], y[y == 0], reduction="sum")


def counted_of_moved(model, x, y):
    x, y = x.clone(), y.clone()
    losses = each(model, x, y)
    _ = (losses.argmax() == y).float().mean()
    return losses.sum()


def distribution(model, x, y):
    x, y = x.clone(), y.clone()
    return -torch.distributions.Categorical(logits=model(x)).log_prob(y).sum()


def one_hot_of_so_many(model, x, y):
    targets = F.one_hot(y, 3)[:, : len(x)].to(x)
    return F.mse_loss(model(x), targets, reduction="none").mean(targets.ndim - 1).sum()


@pytest.mark.parametrize(
    "loss", [chosen_by_mask, counted_of_moved, distribution, one_hot_of_so_many], ids=lambda f: f.__name__
)
def test_labels_are_used_as_ever(loss):
    model, optimizer, loader = private(dataset=LABELS, batch_size=8, loss_reduction="sum")
    for x, y in loader:
        loss(model, x, y).backward()
        optimizer.step()
    assert optimizer.accountant.num_steps == 1


def test_a_constant_with_as_many_rows_as_a_later_batch_is_no_data():
    weight = torch.tensor([1.0, 2.0, 3.0])
    model, optimizer, loader = private(batch_size=3)
    sizes = set()
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y, weight=weight, reduction="none").mean().backward()
            optimizer.step()
            sizes.add(len(x))
    assert 3 in sizes and len(sizes) > 1


def test_a_draw_begun_in_an_older_iteration_is_not_added_to_a_newer_one():
    def moved(*, begins_twice: bool) -> torch.Tensor:
        model, optimizer, loader = private(
            dataset=LABELS, batch_size=8, max_physical_batch_size=4, max_grad_norm=0.1, loss_reduction="sum"
        )

        def step(x, y):
            optimizer.zero_grad()
            each(model, x, y).sum().backward()
            optimizer.step()

        older = iter(loader)
        if begins_twice:
            step(*next(older))
        for batch in loader:
            step(*batch)
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    assert torch.equal(moved(begins_twice=True), moved(begins_twice=False))


def test_the_last_batch_of_an_epoch_is_not_left_out_either():
    model, optimizer, loader = private(dataset=LABELS, batch_size=8)
    with pytest.raises(SamplewiseError, match="last batch"):
        for x, y in loader:
            loss = each(model, x, y).mean()
            if loss.detach() > 0:  # a look at the data
                continue
            loss.backward()
            optimizer.step()


def test_an_epoch_that_is_only_looked_at_may_end():
    model, _, loader = private(dataset=LABELS, batch_size=8)
    for x, _ in loader:
        with torch.no_grad():
            model(x)


def test_parameters_have_one_account():
    model = nn.Sequential(mlp(), nn.Identity())
    first = private(model[0])
    with pytest.raises(SamplewiseError, match="another optimizer"):
        private(model)
    assert first[1].accountant.num_steps == 0


class Centred(nn.Module):
    """Keeps a moving mean of its outputs where none looks for one: in a frozen parameter."""

    def __init__(self, through_data: bool):
        super().__init__()
        self.linear, self.centre = nn.Linear(5, 3), nn.Parameter(torch.zeros(3), requires_grad=False)
        self.through_data = through_data

    def forward(self, x):
        out = self.linear(x)
        with torch.no_grad():
            centre = self.centre.data if self.through_data else self.centre
            centre.mul_(0.9).add_(out.mean(0))
        return out


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("how", ["loop", "in one"])
def test_frozen_parameters_take_in_no_data(through_data, how):
    model = Centred(through_data)
    options = {} if how == "loop" else {"loss_fn": lambda model, x, y: F.cross_entropy(model(x), y)}
    model, optimizer, loader = private(model, torch.optim.SGD(model.linear.parameters(), lr=0.1), **options)
    for x, y in loader:
        with pytest.raises(SamplewiseError, match="'centre' took in"):
            if how == "loop":
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            else:
                optimizer.step_on(x, y)
        return
