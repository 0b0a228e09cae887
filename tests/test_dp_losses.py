"""Losses written in many ways: each is refused, or one sample more or less changes the clipped sum by at most the bound."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise.errors import SamplewiseError

N = 8
HOWS = ("loop", "in one", "compiled")
SLACK = 1e-3


@pytest.fixture(autouse=True)
def _traced_only(monkeypatch):
    """Compiled steps run the graph that was traced, without Inductor, which is not what is tried here."""
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    yield
    assert not _get_current_function_mode_stack()


def linear() -> nn.Module:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def clipped_sum(
    loss: Callable, batch: tuple[Tensor, ...], reduction: str, how: str, *, model: nn.Module | None = None, **arguments
) -> Tensor:
    """The clipped sum of the batch at bound 1, all parameters in one vector: what a step without noise moves them by."""
    model = linear() if model is None else model
    before = [p.detach().clone() for p in model.parameters()]
    options = {"loss_fn": loss, "compile": how == "compiled"} if how != "loop" else {}
    model, optimizer, loader = sw.dp.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        DataLoader(TensorDataset(*batch), batch_size=len(batch[0])),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        loss_reduction=reduction,
        **{"seed": 0, **options, **arguments},
    )
    for rows in loader:
        optimizer.zero_grad()
        if how == "loop":
            loss(model, *rows).backward()
            optimizer.step()
        else:
            optimizer.step_on(*rows)
    moved = [b - p.detach() for p, b in zip(model.parameters(), before, strict=True)]
    return torch.cat([m.flatten() for m in moved]) * (len(batch[0]) if reduction == "mean" else 1)


def batches(scale: float) -> list[tuple[Tensor, Tensor]]:
    """N samples alike, and one more of them or one that is unlike; gradients have norms of `scale`."""
    x, w = torch.tensor([[scale, 0.0]] * N), torch.ones(N)
    more = [(x[:1], w[:1]), (x[:1], torch.tensor([1e6])), (-x[:1], torch.tensor([0.0])), (1e4 * x[:1], -w[:1])]
    return [(x, w), *((torch.cat([x, a]), torch.cat([w, b])) for a, b in more)]


def sensitivity(loss: Callable, reduction: str, how: str, scales: tuple[float, ...] = (1.0, 0.9, 7.0)) -> float | None:
    """The largest change of the clipped sum by one sample; None if the loss is refused for one of each pair."""
    found: list[float] = []
    for scale in scales:
        sums = []
        for batch in batches(scale):
            try:
                sums.append(clipped_sum(loss, batch, reduction, how))
            except SamplewiseError:
                sums.append(None)
        found += [float((s - sums[0]).norm()) for s in sums[1:] if s is not None and sums[0] is not None]
    return max(found) if found else None


def per_sample(m: nn.Module, x: Tensor) -> Tensor:
    return m(x)[:, 0]


RIGHT = {
    ("mean", "mean"): lambda m, x, w: per_sample(m, x).mean(),
    ("mean", "sum / len"): lambda m, x, w: per_sample(m, x).sum() / len(x),
    ("mean", "sum / shape"): lambda m, x, w: per_sample(m, x).sum() / x.shape[0],
    ("mean", "sum * 1 / len"): lambda m, x, w: per_sample(m, x).sum() * (1 / len(x)),
    ("mean", "mean / steps"): lambda m, x, w: per_sample(m, x).mean() / 4,
    ("mean", "weights of their own"): lambda m, x, w: (per_sample(m, x) * w.sigmoid()).mean(),
    ("mean", "two terms"): lambda m, x, w: per_sample(m, x).mean() + 0.5 * (m(x) ** 2).sum(1).mean(),
    ("mean", "numel"): lambda m, x, w: m(x).sum() / m(x).numel(),
    ("mean", "torch's"): lambda m, x, w: F.mse_loss(m(x)[:, 0], w.sigmoid()),
    ("sum", "sum"): lambda m, x, w: per_sample(m, x).sum(),
    ("sum", "sum / 64"): lambda m, x, w: per_sample(m, x).sum() / 64,
    ("sum", "sum * 1 / 65"): lambda m, x, w: per_sample(m, x).sum() * (1 / 65),
    ("sum", "weights of their own"): lambda m, x, w: (per_sample(m, x) * w.sigmoid()).sum() * 2,
    ("sum", "one loss a sample"): lambda m, x, w: sum(per_sample(m, x).unbind()),
    ("sum", "nothing of another"): lambda m, x, w: per_sample(m, x).sum() + 0 * w.sum(),
}

WRONG = {
    ("mean", "sum"): lambda m, x, w: per_sample(m, x).sum(),
    ("mean", "sum / constant"): lambda m, x, w: per_sample(m, x).sum() / (N + 2),
    ("mean", "sum * constant"): lambda m, x, w: per_sample(m, x).sum() * (1 / (N + 2)),
    ("mean", "/ all weights"): lambda m, x, w: (per_sample(m, x) * w).sum() / w.sum(),
    ("mean", "/ all weights .item()"): lambda m, x, w: (per_sample(m, x) * w).sum() / w.sum().item(),
    ("mean", "/ float"): lambda m, x, w: per_sample(m, x).mean() / float(w.max()),
    ("mean", "if"): lambda m, x, w: per_sample(m, x).mean() * (2.0 if w.max() > 2 else 1.0),
    ("mean", "tolist"): lambda m, x, w: per_sample(m, x).mean() / sum(w.tolist()),
    ("mean", "* tensor of the size"): lambda m, x, w: per_sample(m, x).mean() * torch.tensor(float(len(x))),
    ("sum", "mean"): lambda m, x, w: per_sample(m, x).mean(),
    ("sum", "/ len"): lambda m, x, w: per_sample(m, x).sum() / len(x),
    ("sum", "* all weights"): lambda m, x, w: (per_sample(m, x) * w).sum() * N / w.sum(),
    ("sum", "samples / all weights"): lambda m, x, w: (per_sample(m, x) / (1 + w.sum())).sum(),
    ("sum", "sum / all weights"): lambda m, x, w: per_sample(m, x).sum() / (1 + w.sum()),
    ("sum", "/ all weights .item()"): lambda m, x, w: (per_sample(m, x) * w).sum() * N / w.sum().item(),
    ("sum", "expanded"): lambda m, x, w: per_sample(m, x).sum().expand(len(x)).sum(),
    ("sum", "broadcast"): lambda m, x, w: (per_sample(m, x).sum() + torch.zeros(len(x))).sum(),
    ("sum", "repeated"): lambda m, x, w: per_sample(m, x).sum(0, keepdim=True)[[0] * len(x)].sum(),
    ("sum", "alpha"): lambda m, x, w: torch.add(0 * w.sum(), per_sample(m, x).sum(), alpha=1 / len(x)),
}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(("reduction", "name"), RIGHT, ids=str)
def test_losses_that_are_right_are_taken(reduction, name, how):
    found = sensitivity(RIGHT[reduction, name], reduction, how, scales=(1.0,))
    assert found is not None
    assert found <= 1 + SLACK


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(("reduction", "name"), WRONG, ids=str)
def test_losses_whose_scale_is_up_to_others_are_refused(reduction, name, how):
    assert sensitivity(WRONG[reduction, name], reduction, how) is None


# --- numbers that follow the size of the batch, over several batches -------------------------------------------------


def run(loss: Callable, reduction: str, how: str = "loop", *, after: Callable | None = None, epochs: int = 3, **arguments):
    """Trains on draws of sizes of their own."""
    model = linear()
    options = {"loss_fn": loss, "compile": how == "compiled"} if how != "loop" else {}
    x, w = torch.randn(60, 2), torch.rand(60)
    model, optimizer, loader = sw.dp.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(TensorDataset(x, w), batch_size=8),
        **{"noise_multiplier": 1.0, "max_grad_norm": 1.0, "loss_reduction": reduction, "seed": 0, **options, **arguments},
    )
    sizes = []
    for _ in range(epochs):
        for rows in loader:
            optimizer.zero_grad()
            if how == "loop":
                value = loss(model, *rows)
                value.backward()
                if after is not None:
                    after(value)
                optimizer.step()
            else:
                optimizer.step_on(*rows)
            sizes.append(len(rows[0]))
    return sizes


FOLLOWING = {
    ("sum", "samples / len"): lambda m, x, w: (per_sample(m, x) / len(x)).sum(),
    ("sum", "2 sum / len"): lambda m, x, w: 2 * per_sample(m, x).sum() / len(x),
    ("sum", "sum / root"): lambda m, x, w: per_sample(m, x).sum() / len(x) ** 0.5,
    ("mean", "mean * len"): lambda m, x, w: per_sample(m, x).mean() * len(x) / 8,
    ("mean", "samples * len"): lambda m, x, w: (per_sample(m, x) * len(x)).mean(),
    ("mean", "sum / 8"): lambda m, x, w: per_sample(m, x).sum() / 8,
}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(("reduction", "name"), FOLLOWING, ids=str)
def test_numbers_that_follow_the_size_of_the_batch_are_refused_at_the_second_size(reduction, name, how):
    with pytest.raises(SamplewiseError, match=r"size of|expected size|taken out"):
        run(FOLLOWING[reduction, name], reduction, how)


BY_PLACE = {
    ("sum", "the first five"): lambda m, x, w: per_sample(m, x)[:5].sum(),
    ("sum", "the first counts more"): lambda m, x, w: per_sample(m, x).sum() + per_sample(m, x)[0],
    ("mean", "weights by place"): lambda m, x, w: (per_sample(m, x) * torch.arange(len(x))).mean(),
    ("mean", "a power of the size"): lambda m, x, w: (per_sample(m, x) * 1.1 ** len(x)).mean(),
    ("mean", "a tensor of the size"): lambda m, x, w: (per_sample(m, x) * torch.full((len(x),), 1.0 / len(x))).mean(),
    ("sum", "a number of one sample"): lambda m, x, w: (per_sample(m, x) / w[0].item()).sum(),
}


@pytest.mark.parametrize("how", ["in one", "compiled"])
@pytest.mark.parametrize(("reduction", "name"), BY_PLACE, ids=str)
def test_a_loss_that_can_be_run_again_is_tried_without_a_sample(reduction, name, how):
    with pytest.raises(SamplewiseError):
        run(BY_PLACE[reduction, name], reduction, how)


@pytest.mark.parametrize("how", HOWS)
def test_a_sum_over_the_expected_size_is_taken_when_a_draw_has_just_that(how):
    sizes = run(lambda m, x, w: per_sample(m, x).sum() / 8, "sum", how, epochs=6)
    assert 8 in sizes[1:]
    assert sizes[0] != 8


@pytest.mark.parametrize("how", HOWS)
def test_means_by_the_size_of_each_draw_are_taken(how):
    assert len(set(run(lambda m, x, w: per_sample(m, x).sum() / len(x) / 1, "mean", how))) > 3


def test_coefficients_that_change_with_time_are_taken():
    steps = iter(range(1, 1000))
    run(lambda m, x, w: (per_sample(m, x) * 0.9 ** next(steps)).mean() * 0.5, "mean")


# --- what else is read or given --------------------------------------------------------------------------------------


def test_losses_are_read_after_backward():
    seen: list[float] = []
    run(lambda m, x, w: per_sample(m, x).mean(), "mean", after=lambda loss: seen.append(loss.item()))
    assert seen
    with pytest.raises(SamplewiseError, match="after backward"):
        run(
            lambda m, x, w: seen.append(value.item()) or value if (value := per_sample(m, x).mean()) is not None else None,
            "mean",
        )


def test_what_torch_reads_in_its_own_checks_is_taken():
    def loss(m, x, w):
        each = -torch.distributions.Normal(m(x)[:, 0], 1.0).log_prob(w)
        return each.mean() + F.gaussian_nll_loss(m(x)[:, 0], w, torch.ones_like(w))

    run(loss, "mean")


@pytest.mark.parametrize("read", [bool, float, Tensor.item, Tensor.numpy, lambda t: 1.0 in t, lambda t: torch.equal(t, t)])
def test_every_way_to_read_a_number_is_seen(read):
    def loss(m, x, w):
        out = per_sample(m, x)
        read((w.sum() > 3).float())
        return out.mean()

    with pytest.raises(SamplewiseError, match="read into Python"):
        run(loss, "mean")


def test_a_mode_of_torch_in_between_hides_no_reading():
    def loss(m, x, w):
        out = per_sample(m, x)
        with torch.device("cpu"):
            return out.mean() / w.sum().item()

    with pytest.raises(SamplewiseError, match="read into Python"):
        run(loss, "mean")


def test_numbers_of_one_sample_may_be_read():
    def loss(m, x, w):
        out = m(x)
        return torch.stack([out[i, : int(w[i] >= 0)].sum() for i in range(len(w))]).mean()

    run(loss, "mean")


class SumOverSize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, losses):
        ctx.num = len(losses)
        return losses.sum()

    @staticmethod
    def backward(ctx, g):
        return (g / ctx.num).expand(ctx.num)


def hooked(m: nn.Module, x: Tensor, w: Tensor) -> Tensor:
    loss = per_sample(m, x).sum()
    loss.register_hook(lambda g: g / len(x))
    return loss


def by_function(m: nn.Module, x: Tensor, w: Tensor) -> Tensor:
    losses = per_sample(m, x)
    return SumOverSize.apply(losses)


def by_function_at_once(m: nn.Module, x: Tensor, w: Tensor) -> Tensor:
    return SumOverSize.apply(per_sample(m, x))  # apply is looked up before the model is called


sum_over_size = SumOverSize.apply


def by_function_of_before(m: nn.Module, x: Tensor, w: Tensor) -> Tensor:
    return sum_over_size(per_sample(m, x))


def picked(m: nn.Module, x: Tensor, w: Tensor) -> Tensor:
    losses = per_sample(m, x)
    return losses[(w == w.max()) > 0].sum()


@pytest.mark.parametrize("loss", [by_function, by_function_at_once, by_function_of_before, hooked, picked])
@pytest.mark.parametrize("how", ["loop", "in one"])
def test_what_marks_do_not_tell_is_refused_outside_of_the_model(loss, how):
    with pytest.raises(SamplewiseError, match=r"took part in the loss|taken out|combines gradients"):
        run(loss, "sum", how)


class AllAlike(torch.autograd.Function):
    """Gives every sample the mean of the gradients, which a look at the sizes of gradients does not find."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, g):
        return g.mean(0, keepdim=True).expand_as(g)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


all_alike, doubled = AllAlike.apply, Doubled.apply

UNSEEN = {
    "at once": lambda m, x, w: (AllAlike.apply(m(x)) * w[:, None]).sum(),
    "looked up before": lambda m, x, w: (all_alike(m(x)) * w[:, None]).sum(),
    "between two calls of the model": lambda m, x, w: (m[1](all_alike(m[0](x))) * w[:, None]).sum(),
    "before a call, used after it": lambda m, x, w: (all_alike(m(x)) * m(x).detach() * w[:, None]).sum(),
    "backward starts from it": lambda m, x, w: all_alike((m(x) * w[:, None]).sum()),
    "each sample alone": lambda m, x, w: doubled(m(x)).sum(),
}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("loss", UNSEEN.values(), ids=UNSEEN)
def test_a_function_whose_apply_was_looked_up_before_is_refused(loss, how):
    x, w = torch.randn(N, 2), torch.randn(N)
    text = "apply was looked up before" if how == "loop" else "apply was looked up before|taken out|combines gradients"
    with pytest.raises(SamplewiseError, match=text):
        clipped_sum(loss, (x, w), "sum", how, model=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))


class EndsInFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1, bias=False)

    def forward(self, x):
        return doubled(self.linear(x))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        return g @ weight, g.T @ x


def seen_function_of_weights(m: nn.Module, x: Tensor, w: Tensor) -> Tensor:
    out = m(x)
    return (out + Product.apply(x, m.linear.weight)).sum()


def seen_function(m: nn.Module, x: Tensor, w: Tensor) -> Tensor:
    out = m(x)
    return Doubled.apply(out).sum()


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("loss", [seen_function, lambda m, x, w: (m(x) * w[:, None]).sum() + m(x).sum()])
def test_functions_in_the_model_and_in_sight_are_taken(loss, how):
    found = clipped_sum(loss, (torch.randn(N, 2), torch.randn(N)), "sum", how, model=EndsInFunction())
    assert 0 < float(found.norm()) <= N


@pytest.mark.parametrize("how", ["loop", "in one"])
def test_a_function_of_data_and_weights_in_sight_is_taken(how):
    batch = torch.randn(N, 2), torch.randn(N)
    found = clipped_sum(seen_function_of_weights, batch, "sum", how, model=EndsInFunction())
    assert 0 < float(found.norm()) <= N


class Backward:
    """What a loop calls backward on."""

    def __init__(self, start: Callable):
        self.backward = start


@pytest.mark.parametrize(
    ("start", "text"),
    [
        (lambda m, x, w: per_sample(m, x).backward(torch.ones(len(x)) / len(x)), "given a gradient"),
        (lambda m, x, w: per_sample(m, x).mean().backward(torch.tensor(1 / len(x))), "given a gradient"),
        (lambda m, x, w: per_sample(m, x)[0].backward(), "losses of samples alone"),
    ],
)
def test_other_starts_of_backward_are_refused(start, text):
    with pytest.raises(SamplewiseError, match=text):
        run(lambda m, x, w: Backward(lambda: start(m, x, w)), "mean")


def test_a_second_backward_is_checked_like_the_first():
    def start(m, x, w):
        losses = per_sample(m, x)
        losses.mean().backward(retain_graph=True)
        ((losses * w).sum() / w.sum()).backward()

    with pytest.raises(SamplewiseError, match="weigh all samples alike"):
        run(lambda m, x, w: Backward(lambda: start(m, x, w)), "mean")
