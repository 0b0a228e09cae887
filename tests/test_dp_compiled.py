"""Private steps taken in one, compiled or not, are those of the loop."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise.errors import SamplewiseError


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def private(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)).double()
    x, y = torch.randn(60, 6, dtype=torch.float64), torch.randint(3, (60,))
    if options.pop("spoilt", False):
        x[7] = torch.nan
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    loader = DataLoader(TensorDataset(x, y), batch_size=12)
    settings = {"noise_multiplier": 0.7, "max_grad_norm": 0.3, "seed": 3, **options}
    return sw.dp.make_private(model, optimizer, loader, **settings)


def trained(*, in_one: bool, **options) -> tuple[dict[str, Tensor], float]:
    if in_one:
        options["loss_fn"] = loss_fn
    model, optimizer, loader = private(**options)
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            if in_one:
                optimizer.step_on(x, y)
            else:
                loss_fn(model, x, y).backward()
                optimizer.step()
    return model.state_dict(), optimizer.epsilon(1e-5, accountant="rdp")


@pytest.mark.parametrize("compile", [True, False])
def test_losses_of_each_sample_in_batches_of_many_sizes(compile):
    """How samples lie in a batch of a new size is found out outside of the model, where what is read counts as read by code."""

    def weights(reduction: str, **options) -> dict[str, Tensor]:
        loss = lambda model, x, y: F.cross_entropy(model(x), y, reduction=reduction)
        model, optimizer, loader = private(loss_fn=loss, **options)
        sizes = set()
        for x, y in loader:
            optimizer.zero_grad()
            optimizer.step_on(x, y)
            sizes.add(len(x))
        assert len(sizes) > 2
        return model.state_dict()

    expected = weights("mean")
    for name, w in weights("none", compile=compile).items():
        assert torch.allclose(w, expected[name], rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clipping": "per_layer"},
        {"clipping": "automatic"},
        {"clipping": "adaptive"},
        {"max_physical_batch_size": 5},
        {"spoilt": True},
    ],
    ids=str,
)
def test_step_in_one_is_the_loops(options):
    weights, epsilon = trained(in_one=True, **options)
    expected, same = trained(in_one=False, **options)
    assert epsilon == same
    for name in expected:
        torch.testing.assert_close(weights[name], expected[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", [{}, {"clipping": "adaptive"}, {"spoilt": True}], ids=str)
def test_compiled_step_is_the_loops(options):
    """Draws of all sizes, a bound that moves, a sample that is not finite."""
    weights, epsilon = trained(in_one=True, compile=True, **options)
    expected, same = trained(in_one=False, **options)
    assert epsilon == same
    for name in expected:
        torch.testing.assert_close(weights[name], expected[name], rtol=1e-7, atol=1e-7)


def test_what_step_on_refuses():
    with pytest.raises(ValueError, match="needs loss_fn="):
        private(compile=True)
    _, optimizer, loader = private()
    x, y = next(it := iter(loader))
    with pytest.raises(SamplewiseError, match="step_on\\(\\) needs the loss"):
        optimizer.step_on(x, y)
    it.close()
    _, optimizer, loader = private(loss_fn=loss_fn)
    with pytest.raises(SamplewiseError, match="without a batch of the private loader"):
        optimizer.step_on(x, y)
    for x, y in loader:
        if len(x) > 1:
            with pytest.raises(SamplewiseError, match="Give it that batch, whole"):
                optimizer.step_on(x[1:], y[1:])
            break
    _, optimizer, loader = private(loss_fn=loss_fn, views=2)
    for x, y in loader:
        with pytest.raises(SamplewiseError, match="one row a sample"):
            optimizer.step_on(x, y)
        break


MIXING = {
    "weighted mean": lambda model, x, y: (F.cross_entropy(model(x), y, reduction="none") * y).sum() / y.sum(),
    "masked mean": lambda model, x, y: (F.cross_entropy(model(x), y, reduction="none") * (y > 0)).sum() / (y > 0).sum(),
    "centred": lambda model, x, y: (F.cross_entropy(model(x), y, reduction="none") * (y - y.double().mean())).mean(),
}


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", MIXING)
def test_losses_that_let_samples_weigh_on_others_are_refused(name, compile):
    _, optimizer, loader = private(loss_fn=MIXING[name], compile=compile)
    for x, y in loader:
        if len(x) > 1:
            with pytest.raises(SamplewiseError):
                optimizer.step_on(x, y)
            break


def test_positions_of_a_sample_are_clipped_together():
    """A loss_fn that gives the model [B·T, ...]: one sample more changes the sum by at most the bound."""
    model = nn.Linear(2, 1, bias=False).double()
    x = torch.ones(40, 50, 2, dtype=torch.float64)
    loader = DataLoader(TensorDataset(x), batch_size=40)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = {"noise_multiplier": 0.0, "max_grad_norm": 1.0, "seed": 0, "loss_reduction": "sum"}
    model, optimizer, loader = sw.dp.make_private(
        model, optimizer, loader, loss_fn=lambda model, x: model(x.flatten(0, 1)).sum(), **settings
    )
    before = model.weight.detach().clone()
    for (xb,) in loader:
        optimizer.step_on(xb)
        assert (model.weight - before).norm().item() <= len(xb) * (1 + 1e-9)
        break


def test_what_the_account_rests_on_cannot_be_changed_behind_it():
    bounds = {"0": 0.3, "2": 0.3, "3": 0.3}
    _, optimizer, loader = private(max_grad_norm=bounds, groups="layer")
    bounds["0"] = 1e-3
    assert optimizer.max_grad_norm["0"] == 0.3
    with pytest.raises(TypeError):
        optimizer.max_grad_norm["0"] = 1e-3
    with pytest.raises(AttributeError):
        loader.sample_rate = 0.01
    with pytest.raises(ValueError, match="squares vanish"):
        private(max_grad_norm=1e-26)
