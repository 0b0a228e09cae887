"""Losses drawn at random from what people write: each is refused, or keeps to the bound."""

import random

import pytest
import torch
from test_dp_losses import batches, clipped_sum, per_sample
from torch import nn

from samplewise.dp.losses import Scales
from samplewise.errors import SamplewiseError

OF_LABELS = [
    "w", "w.sigmoid()", "(w > 0).float()", "(w - w.mean())", "(w / w.sum())", "(w / (1 + w.max()))", "w.softmax(0)", "w.cumsum(0)",
    "w.flip(0)", "w.clamp(0, 2)", "(w * w)", "(w == w.max())", "w.sort().values", "(w / w.norm())",
]  # fmt: skip
OF_SAMPLES = [
    "l",
    "({V} * {W})",
    "({V} / (1 + {W}.abs()))",
    "({V} * {c})",
    "({V} + 0.1 * {V})",
    "({V}.abs() + {V})",
    "torch.where({W} > 0, {V}, 0 * {V})",
    "({V} / len(x))",
    "{V}.square()",
    "({V} / {V}.detach().abs().mean())",
    "{V}.float()",
    "({V} - {V}.mean())",
]
OF_ALL = [
    "{V}.sum()",
    "{V}.mean()",
    "{V}.sum() / len(x)",
    "({V} * {W}).sum() / {W}.sum()",
    "{V}.sum() / {c}",
    "{V}.max()",
    "{V}.logsumexp(0)",
    "({S}) * {c}",
    "({S}) / {c}",
    "({S}) + ({S})",
    "({S}) - {c} * ({S})",
    "({S}) / {W}.sum()",
    "({S}) * {W}.mean().item()",
    "({S}) * ({S})",
    "torch.stack([{S}, {S}]).sum()",
    "torch.stack([{S}, {S}]).mean()",
    "({S}) / float({W}.abs().sum() + 1)",
    "({S}).detach() * ({S})",
    "({S}) * len(x)",
    "({S}) + 0 * {W}.sum()",
    "sum({V}.unbind()) / {c}",
    "({V} @ {W})",
    "torch.dot({V}, {W}) / len(x)",
    "{V}[{W} > 0].sum()",
    "{V}[{W} > 0].mean()",
    "{V}.nansum()",
    "torch.lerp({S}, {S}, 0.5)",
    "torch.add({S}, {S}, alpha={c})",
    "({S}) / torch.tensor({c})",
    "({S}).sqrt()",
    "{V}.topk(3).values.sum()",
    "torch.cat([{V}, {V}]).mean()",
    "{V}.view(-1, 1).mean(0).sum()",
    "{V}.unsqueeze(1).expand(-1, 3).mean()",
    "{V}.var()",
    "({S}) / ({S}).item()",
]


def drawn(rng: random.Random, kind: str = "S", depth: int = 3) -> str:
    """An expression of the losses l [B], the labels w [B] and the batch x."""
    if kind == "c":
        return rng.choice(["0.5", "2", "8", "9", "64", "(1 / 9)"])
    options = {"S": OF_ALL, "V": OF_SAMPLES, "W": OF_LABELS}[kind]
    if depth <= 0:
        options = options[:3] if kind == "S" else options[:1]
    likely = {"S": 2, "V": 4, "W": 3}[kind]  # among which are the right ones
    text = rng.choice(options[:likely] if rng.random() < 0.5 else options)
    for name in ("S", "V", "W", "c"):
        while "{" + name + "}" in text:
            text = text.replace("{" + name + "}", drawn(rng, name, depth - 1), 1)
    return text


def tilted() -> nn.Module:
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, 0.5)
    return model


def outcome(text: str, reduction: str, how: str, monkeypatch) -> float | None:
    """How much one sample changes the clipped sum; None if one run over both batches is refused."""
    code = compile(text, "<loss>", "eval")

    def loss(m: nn.Module, x, w):
        return eval(code, {"torch": torch}, {"l": per_sample(m, x), "w": w, "x": x})

    found = []
    for scale in (0.9, 7.0):
        first, *others = batches(scale)
        for other in others:
            shared = Scales()
            monkeypatch.setattr("samplewise.dp.session.Scales", lambda shared=shared: shared)
            try:
                sums = [clipped_sum(loss, batch, reduction, how, model=tilted()) for batch in (first, other)]
            except (SamplewiseError, RuntimeError):
                continue
            found.append(float((sums[1] - sums[0]).norm()))
    return max(found) if found else None


@pytest.mark.parametrize("how", ["loop", "in one"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_drawn_losses_are_refused_or_within_the_bound(reduction, how, monkeypatch):
    rng, taken, wrong = random.Random(f"{reduction} {how}"), 0, []
    for _ in range(60):
        text = drawn(rng)
        found = outcome(text, reduction, how, monkeypatch)
        taken += found is not None
        if found is not None and not found <= 1 + 1e-3:
            wrong.append((round(found, 3), text))
    assert not wrong
    assert taken >= 5, "a test of refusals alone would show nothing"
