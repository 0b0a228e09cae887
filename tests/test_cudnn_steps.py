"""Recurrent layers by cuDNN's ops, with kernels for the CPU in their place: what is handed over, and that a graph holds them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samplewise as sw
from samplewise.ops import cudnn, recurrent
from samplewise.ops.steps import back, in_place
from samplewise.testing import assert_matches_oracle, relative_error

KINDS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN, "relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k)}


def taken(kind: str, gates: Tensor, weights: list[Tensor], states: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """What the steps on the CPU give and keep, with gates in which the input has its share already."""
    (T, B, _), first = gates.shape, [state[0] for state in states]
    results = in_place(kind, [B] * T, False, gates.flatten(0, 1).clone(), weights[1], weights[3], first)
    (y, *kept), ends = results[: -len(first)], results[-len(first) :]
    return [y.view(T, B, -1), *(end.unsqueeze(0) for end in ends)], kept or [y]


@cudnn.cudnn_steps.register_kernel("cpu")
def steps(kind: str, sizes: list[int], gates: Tensor, weights: list[Tensor], states: list[Tensor]) -> list[Tensor]:
    identity, _, nothing, _ = weights
    assert torch.equal(identity, torch.eye(gates.shape[-1])) and not nothing.any()
    (y, *ends), _ = taken(kind, gates, weights, states)
    ends += [gates.new_empty(0)] * (2 - len(ends))
    return [y.clone(), *ends, torch.full([7], 3, dtype=torch.uint8), torch.cat([w.flatten() for w in weights])]


@cudnn.cudnn_steps_backward.register_kernel("cpu")
def steps_backward(
    kind: str, sizes: list[int], gates: Tensor, y: Tensor, grads: list[Tensor], reserve: Tensor, packed: Tensor,
    weights: list[Tensor], states: list[Tensor],
) -> list[Tensor]:  # fmt: skip
    assert reserve.tolist() == [3] * 7
    assert torch.equal(packed, torch.cat([w.flatten() for w in weights]))
    _, kept = taken(kind, gates, weights, states)
    (T, B, _), num_ends = gates.shape, len(grads) - 1
    results = back(kind, [B] * T, False, grads[0].flatten(0, 1), weights[1], kept, [end[0] for end in grads[1:]])
    g, ends = results[0], results[-num_ends:]
    return [g.reshape(gates.shape).clone(), *(end.unsqueeze(0) for end in ends)]


class Reader(nn.Module):
    def __init__(self, make, **options):
        super().__init__()
        self.rnn = make(3, 4, batch_first=True, **options)
        self.head = nn.Linear(4 * (2 if options.get("bidirectional") else 1), 3)

    def forward(self, x: Tensor) -> Tensor:
        y, last = self.rnn(x)
        return self.head(y).mean(1) + (last[0] if isinstance(last, tuple) else last)[0, :, :3]


def per_row(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


@pytest.fixture(autouse=True)
def _on_cudnn(monkeypatch):
    monkeypatch.setattr(cudnn, "takes", lambda gates: True)
    monkeypatch.setattr(recurrent, "takes_steps", lambda gates: False)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_recurrence_is_left_to_torch(kind):
    model = Reader(KINDS[kind])
    model.rnn.weight_hh_l0.requires_grad_(False)
    model.rnn.bias_hh_l0.requires_grad_(False)
    assert_matches_oracle(model, per_row, torch.randn(5, 6, 3), torch.randint(3, (5,)))


OPTIONS = [{}, {"num_layers": 2}, {"bidirectional": True, "bias": False}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_matches_the_oracle(kind, options):
    batch = torch.randn(5, 6, 3), torch.randint(3, (5,))
    assert_matches_oracle(Reader(KINDS[kind], **options), per_row, *batch)


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_holds_the_ops(kind, monkeypatch):
    sizes = (4,) if kind == "relu" else (4, 7, 5)
    if kind != "relu":  # one goes through the compiler itself
        monkeypatch.setattr(torch, "compile", lambda graph, **_: graph)
    model, query = Reader(KINDS[kind]), lambda grads: (grads.norms(), grads.clipped_sum(max_norm=0.1))
    step = sw.per_sample_step(model, per_row, query, compile=True)
    eager = sw.per_sample_step(model, per_row, query)
    for size in sizes:
        batch = torch.randn(size, 6, 3), torch.randint(3, (size,))
        got, want = step(*batch).answer, eager(*batch).answer
        assert relative_error(got[0], want[0]) < 1e-9
        assert all(relative_error(got[1][name], want[1][name]) < 1e-9 for name in want[1])
    assert step.num_graphs == min(2, len(sizes))
