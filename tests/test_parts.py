"""Steps that give gradients of every sample: what of their graph is recorded, and what is made after the recording."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from stepping import batch_of, both, error, mlp, per_row
from torch import Tensor, nn

import samplewise as sw
from samplewise.compiled import parts, replay, steps
from samplewise.compiled.parts import Parts, gives_little, num_bytes, parted, results_of
from samplewise.compiled.trace import Record, Trace
from samplewise.testing import oracle

pytestmark = pytest.mark.usefixtures("in_double")
PRODUCTS = (
    torch.ops.aten.bmm.default,
    torch.ops.aten.mm.default,
    torch.ops.aten.mul.Tensor,
    torch.ops.aten.convolution.default,
)


@pytest.fixture(autouse=True)
def _little_may_be_held_twice(monkeypatch):
    monkeypatch.setattr(parts, "SMALL_BYTES", 1000)


class Tied(nn.Module):
    """Scattered rows and a product, added up; positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(30, 16), nn.Parameter(torch.randn(5, 16))
        self.inner = nn.Linear(16, 16)

    def forward(self, ids_BT: Tensor) -> Tensor:
        h = self.words(ids_BT) + self.places
        h = h + self.inner(h).relu_()
        return F.linear(h, self.words.weight)


class Images(nn.Module):
    """Convolutions whose gradients are built from patches and with samples as groups, changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(inplace=True), nn.Conv2d(6, 20, 3, stride=2, groups=2),
            nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(0.3), nn.Linear(80, 3),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def words(B: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randint(30, (B, 5)), torch.randint(30, (B, 5))


def images(B: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(B, 2, 6, 6), torch.randint(3, (B,))


def mean_of_words(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)


CASES = {
    "mlp": (lambda: mlp(40), lambda B=4: batch_of(B, width=40), per_row),
    "tied": (Tied, words, mean_of_words),
    "images": (Images, images, per_row),
}
QUERIES = {
    "gradients": lambda grads: grads.materialize(),
    "one of them": lambda grads: grads.materialize()[sorted(grads)[0]],
    "gradients and norms": lambda grads: (grads.materialize(), grads.norms(), grads.sum()),
    "scaled in place": lambda grads: {name: G.mul_(2) for name, G in grads.materialize().items()},
}


def traced(model: nn.Module, loss_fn, query, batch) -> Trace:
    step = sw.per_sample_step(model, loss_fn, query, compile=True, verify=False)
    return Trace(model, step.run, batch, Record())


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("case", CASES)
def test_both_parts_give_what_the_whole_gives(case, query):
    torch.manual_seed(0)
    make, batch, loss_fn = CASES[case]
    model, tensors = make(), batch()
    graph = traced(model, loss_fn, QUERIES[query], tensors).graph
    two = parted(graph, [])
    if two is None:
        assert gives_little(graph, []) or query in ("one of them", "gradients and norms", "scaled in place")
        return
    torch.manual_seed(1)
    want = graph(*tensors)
    torch.manual_seed(1)
    got = two.joined(two.early(*tensors), two.late, tensors)
    assert [t.shape for t in got] == [t.shape for t in want]
    assert error(got, want) < 1e-12
    assert any(two.is_late) and sum(n.target in PRODUCTS for n in two.late.graph.nodes) <= 2 * two.is_late.count(True)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_parted(case, monkeypatch):
    """And nothing as large as they are is left to be held twice."""
    monkeypatch.setattr(parts, "SMALL_BYTES", 10_000)
    make, batch, loss_fn = CASES[case]
    graph = traced(make(), loss_fn, QUERIES["gradients"], batch(16)).graph
    two = parted(graph, [])
    assert isinstance(two, Parts)
    given = sum(map(num_bytes, results_of(graph)))
    assert sum(map(num_bytes, results_of(two.early)[: two.num_small])) <= parts.SMALL_BYTES
    assert sum(map(num_bytes, results_of(two.early)[two.num_small :])) < given


def test_what_takes_more_to_keep_than_it_gives_stays_whole():
    """Long sequences: a and g are larger than their product."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    long = torch.randn(16, 300, 4), torch.randn(16, 300, 4)
    losses = lambda model, x, y: (model(x) - y).square().sum((1, 2))
    assert parted(traced(model, losses, QUERIES["gradients"], long).graph, []) is None


def graph_of(step, *tensors: Tensor):
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(step, tracing_mode="fake")(*tensors)


def test_what_is_written_to_later_cannot_wait():
    def writes(a, g, x):
        h = a * 2
        G = h.unsqueeze(2) * g.unsqueeze(1)
        h.add_(x)
        return [G, h.sum()]

    def writes_before(a, g, x):
        h = a * 2
        h.add_(x)
        return [h.unsqueeze(2) * g.unsqueeze(1), h.sum()]

    tensors = torch.randn(20, 9), torch.randn(20, 7), torch.randn(20, 9)
    assert parted(graph_of(writes, *tensors), []) is None
    two = parted(graph_of(writes_before, *tensors), [])
    assert two is not None
    assert error(two.joined(two.early(*tensors), two.late, tensors), writes_before(*tensors)) < 1e-12


def test_random_numbers_are_drawn_where_they_were():
    def drawn(a, g):
        return [(a + torch.rand_like(a)).unsqueeze(2) * g.unsqueeze(1), a.sum() + torch.rand(())]

    tensors = torch.randn(20, 9), torch.randn(20, 7)
    graph = graph_of(drawn, *tensors)
    two = parted(graph, [])
    assert two is not None and not any("rand" in str(n.target) for n in two.late.graph.nodes if n.op == "call_function")
    torch.manual_seed(0)
    want = graph(*tensors)
    torch.manual_seed(0)
    assert error(two.joined(two.early(*tensors), two.late, tensors), want) == 0


class OneMemory:
    """A recording as far as its memory goes: each step writes its results where those of the step before were."""

    def __init__(self, compiled, tensors):
        self.compiled, self.inputs, self.outputs = compiled, [t.clone() for t in tensors], None

    def is_valid(self) -> bool:
        return True

    def __call__(self, tensors, num_given=None):
        outputs = self.compiled(*tensors)
        self.outputs = self.outputs or [torch.empty_like(t) for t in outputs]
        for mine, new in zip(self.outputs, outputs, strict=True):
            mine.copy_(new)
        return [t.clone() for t in self.outputs[:num_given]] + self.outputs[len(outputs[:num_given]) :]


@pytest.fixture
def recorded(monkeypatch):
    """Steps are recorded, as far as the CPU can tell."""
    monkeypatch.setattr(steps, "can_be_recorded", lambda graph, tensors: True)
    monkeypatch.setattr(replay.Recorder, "_record", lambda self, compiled, tensors, state: OneMemory(compiled, tensors))
    monkeypatch.setattr(replay.Recorder, "_turn_of", lambda self, tensors: nullcontext())


@pytest.mark.parametrize("case", CASES)
def test_results_are_not_in_the_memory_of_the_recording(case, recorded):
    make, batch, loss_fn = CASES[case]
    model = make().eval()
    step = sw.per_sample_step(model, loss_fn, QUERIES["gradients"], compile=True)
    batches = [batch(7) for _ in range(4)]
    answers = [step(*b).answer for b in batches]
    assert step.num_graphs == 1 and step.num_recordings == 1 and step.num_op_by_op == 0
    batches += [batch(size) for size in (5, 7, 5)]  # the last of an epoch has a graph for all sizes, the others keep theirs
    answers += [step(*b).answer for b in batches[4:]]
    assert step.num_graphs == 2 and step.num_recordings == 1 and step.num_op_by_op == 0
    for b, answer in zip(batches, answers, strict=True):
        truth = oracle(model, loss_fn, *b)
        assert error(answer, {name: truth[name] for name in answer}) < 1e-10


KEPT_AND_GIVEN = {
    "views": lambda grads: [(G.flatten(1), G.square().sum()) for G in grads.materialize().values()],
    "no ops to the compiler": lambda grads: [(G * 1.0, G.mean(0)) for G in grads.materialize().values()],
}


@pytest.mark.parametrize("query", KEPT_AND_GIVEN)
def test_gradients_that_are_read_before_they_are_given(query, recorded):
    """They are among what the recording leaves, so that a view of them is in its memory."""
    step, eager = both(mlp(40), per_row, KEPT_AND_GIVEN[query])
    batches = [batch_of(7, width=40) for _ in range(4)]
    answers = [step(*b).answer for b in batches]
    assert step.num_recordings == 1
    for b, answer in zip(batches, answers, strict=True):
        assert error(answer, eager(*b).answer) < 1e-10


def test_places_in_memory_are_not_counted_from_a_view():
    def counted(x):
        h = x * 2
        view = h.split(3, 1)[1]
        return [view.as_strided((8, 2), (9, 1), 4).unsqueeze(2) * torch.ones(100), h.sum()]

    x = torch.randn(8, 9)
    two = parted(graph_of(counted, x), [])
    assert two is not None
    record = OneMemory(two.early, [x])
    record.outputs = [t.clone() for t in two.early(x)]  # each in memory of its own
    assert error(two.joined(record([x], two.num_small), two.late, [x]), counted(x)) < 1e-12


def test_a_recording_may_give_nothing_to_copy():
    recording = replay.Recording.__new__(replay.Recording)
    recording._inputs, recording._outputs = [torch.zeros(3)], [torch.ones(2)]
    recording._graph = SimpleNamespace(replay=lambda: None)
    assert recording((torch.ones(3),), 0)[0] is recording._outputs[0]
