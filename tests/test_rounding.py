"""Products of float32 that torch rounds to TF32 or bfloat16 by its settings: what agrees but for that is not refused."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import samplewise as sw
from samplewise.dp.alone import refuse_dependence
from samplewise.dp.clipping import COARSE_MARGIN, MARGIN, clipped
from samplewise.precision import rounded_kinds, scaled

SETTINGS = {"matmul": torch.backends.mkldnn.matmul, "conv": torch.backends.mkldnn.conv, "rnn": torch.backends.mkldnn.rnn}


@contextmanager
def set_to(setting, value):
    before = setting.fp32_precision
    setting.fp32_precision = value
    try:
        yield
    finally:
        setting.fp32_precision = before


@pytest.fixture(params=SETTINGS)
def kind(request):
    """Products of this kind may be rounded."""
    with set_to(SETTINGS[request.param], "bf16"):
        yield request.param


class Coarse(nn.Module):
    """A model whose outputs in a batch are 3 % off from those alone, as rounding makes them in deep networks."""

    def __init__(self, layer: nn.Module, factor: float = 1.03):
        super().__init__()
        self.layer, self.factor = layer, factor

    def forward(self, x):
        out = self.layer(x)
        out = out[0] if isinstance(out, tuple) else out
        return out.flatten(1) * (self.factor if len(x) > 1 else 1.0)


LAYERS = {
    "matmul": lambda: nn.Linear(4, 4),
    "conv": lambda: nn.Conv1d(4, 4, 2),
    "rnn": lambda: nn.RNN(4, 4, batch_first=True),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_only_what_the_model_does_is_let_off(kind, layer):
    model, x = Coarse(LAYERS[layer]()), torch.randn(3, 4, 4)
    capture = sw.capture(model, batch_size=3)
    if kind in (layer, "matmul"):  # any model may have products
        with capture as grads:
            model(x).sum().backward()
        assert grads.norms().shape == (3,)
        return
    with pytest.raises(sw.SamplewiseError, match="alone"), capture:
        model(x).sum().backward()


def test_a_frozen_convolution_behind_the_trained_layer_counts():
    model = Coarse(nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 4, 2).requires_grad_(False)))
    with set_to(SETTINGS["conv"], "tf32"), sw.capture(model, batch_size=3) as grads:
        model(torch.randn(3, 4, 4)).sum().backward()
    assert grads.norms().shape == (3,)


@pytest.mark.parametrize("layer", LAYERS)
def test_what_depends_on_the_batch_is_refused_all_the_same(kind, layer):
    model = Coarse(LAYERS[layer](), factor=3.0)
    with pytest.raises(sw.SamplewiseError, match="alone"), sw.capture(model, batch_size=3):
        model(torch.randn(3, 4, 4)).sum().backward()


def test_a_loss_that_turns_gradients_a_little_by_the_number_of_samples(kind):
    """Rounding turns gradients, and hardly changes their length: 3 % of it is still more than any."""
    model, turn = nn.Linear(2, 1), torch.tensor([[0.0, 0.03], [-0.03, 0.0]])
    turned = lambda model, x: model(x + x @ turn if len(x) > 2 else x).flatten()
    longer = lambda model, x: model(x).flatten() * (1.03 if len(x) > 2 else 1.0)
    given = (torch.randn(3, 2),), ["weight"], {}
    refuse_dependence(model, turned, *given)
    with pytest.raises(sw.SamplesMixError):
        refuse_dependence(model, longer, *given)
    with set_to(SETTINGS[kind], "ieee"), pytest.raises(sw.SamplesMixError):
        refuse_dependence(model, turned, *given)


def test_norms_are_taken_for_larger_where_products_are_rounded(kind):
    model, x = nn.Linear(4, 4, bias=False), torch.randn(3, 4)
    with sw.capture(model) as grads:
        model(x).sum().backward()
    norms = grads.norms()
    (total,) = clipped(grads, {"": float(norms.min()) / 2}).sums.values()
    bound = (float(norms.min()) / 2) / (1 + COARSE_MARGIN)
    expected = sum(bound / norm * G for norm, G in zip(norms, grads.materialize()["weight"], strict=True))
    assert torch.allclose(total, expected, rtol=MARGIN[torch.float32])


@pytest.mark.parametrize("layer", LAYERS)
def test_float64_is_never_rounded(kind, layer):
    model = Coarse(LAYERS[layer]()).double()
    with pytest.raises(sw.SamplewiseError, match="alone"), sw.capture(model, batch_size=3):
        model(torch.randn(3, 4, 4).double()).sum().backward()


def test_torchs_settings_of_both_kinds_are_read():
    """torch refuses to read `allow_tf32` once `fp32_precision` was set."""
    on = lambda device: [SimpleNamespace(device=torch.device(device))]
    assert rounded_kinds(on("cuda"), [torch.float32]) == {"conv", "rnn"}, "torch's default"
    with set_to(torch.backends.cuda.matmul, "tf32"), set_to(torch.backends.cudnn.conv, "ieee"):
        assert rounded_kinds(on("cuda"), [torch.complex64]) == {"matmul", "rnn"}
        for device, dtype in (("cpu", torch.float32), ("mps", torch.float32), ("cuda", torch.float64)):
            assert rounded_kinds(on(device), [dtype]) == set()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64])
def test_scaling_rounds_once(dtype):
    t = torch.randn(3, 4, 5).to(dtype)
    w = torch.rand(3, 1, 1, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    for each in (t, t.mT, t[:, ::2], t[:, :1].expand(3, 4, 5)):
        got = scaled(each, w)
        assert got.dtype == dtype
        assert torch.equal(got, (each * w).to(dtype))
        assert scaled(each, w.clone().requires_grad_()).requires_grad
