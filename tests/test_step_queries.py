"""Every question asked in a compiled step: the same answer as op by op."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from stepping import both, error, per_row
from torch import Tensor, nn

import samplewise as sw

pytestmark = pytest.mark.usefixtures("in_double")


class Words(nn.Module):
    """A table that is looked up, with padding, and multiplied with; and one whose words come twice in a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.kinds = nn.Embedding(13, 6, padding_idx=0), nn.Embedding(3, 6)
        self.inner, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, ids_BT: Tensor) -> Tensor:
        h = self.norm(self.words(ids_BT) + self.kinds(ids_BT % 3))
        return F.linear(self.inner(h).tanh(), self.words.weight)


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))


def loss_of_words(model: Callable, ids_BT: Tensor) -> Tensor:
    return F.cross_entropy(model(ids_BT).flatten(0, 1), ids_BT.flatten(), reduction="none").view(ids_BT.shape).sum(1)


MODELS: dict[str, tuple] = {
    "words": (Words, lambda B: (torch.randint(13, (B, 5)),), loss_of_words),
    "images": (images, lambda B: (torch.randn(B, 2, 6, 6), torch.randint(3, (B,))), per_row),
}
QUERIES: dict[str, Callable] = {
    "gram": lambda grads: grads.gram(),
    "gram of each": lambda grads: {name: grads[name].gram() for name in grads},
    "cosines": lambda grads: grads.cosines(),
    "dots": lambda grads: grads.dots(grads.sum()),
    "dots with the sum": lambda grads: grads.dots_with_sum(),
    "second moment": lambda grads: grads.second_moment(),
    "variance": lambda grads: grads.variance(),
    "signs": lambda grads: grads.project(dim=8),
    "normal": lambda grads: grads.project(sw.Gaussian(8)),
    "sparse": lambda grads: grads.project(sw.SparseJL(8)),
    "Kronecker": lambda grads: grads.project(sw.Kronecker(3, 3)),
    "normalized": lambda grads: grads.normalized_sum(),
    "clipped by layers": lambda grads: grads.clipped_sum(max_norm=0.1, groups="layer"),
}


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("of", MODELS)
def test_query_in_a_graph(of, query, uncompiled):
    torch.manual_seed(0)
    make, batch, loss_fn = MODELS[of]
    step, eager = both(make(), loss_fn, QUERIES[query])
    for size in (4, 4, 7, 5):
        tensors = batch(size)
        assert error(step(*tensors).answer, eager(*tensors).answer) < 1e-10
    assert step.num_op_by_op == 0


def test_inner_products_as_the_compiler_makes_them():
    torch.manual_seed(0)
    make, batch, loss_fn = MODELS["words"]
    step, eager = both(make(), loss_fn, lambda grads: (grads.gram(), grads.project(dim=8), grads.project(sw.Gaussian(3))))
    for size in (4, 6, 4):
        assert error(step(*batch(size)).answer, eager(*batch(size)).answer) > 1e-3, "another batch, another answer"
        tensors = batch(size)
        assert error(step(*tensors).answer, eager(*tensors).answer) < 1e-10
    assert step.num_graphs == 2 and step.num_op_by_op == 0


@pytest.mark.parametrize("num_rows", [13, 7, 3])
@pytest.mark.parametrize("query", ["gram", "gram of each", "signs", "sparse"])
def test_rows_of_a_table_a_few_at_a_time(query, num_rows, uncompiled, monkeypatch):
    """20 looked up of 13, some of them several times: 13 of those are not all rows, and those alike are to be told apart."""
    make, batch, _ = MODELS["words"]
    monkeypatch.setattr("samplewise.factors.base.CHUNK_ELEMENTS", num_rows * 6 * (4 + 4))
    for model in (make(), nn.Sequential(nn.Embedding(13, 6), nn.Linear(6, 13))):
        step, eager = both(model, loss_of_words, QUERIES[query])
        tensors = batch(4)
        assert error(step(*tensors).answer, eager(*tensors).answer) < 1e-10


def test_inner_products_that_cancel_are_taken_op_by_op(uncompiled):
    """Two positions with opposite gradients leave the rounding of large products behind."""
    model, x = nn.Linear(64, 64, bias=False).float(), torch.randn(4, 1, 64).float()
    losses = lambda model, x: (model(x)[:, 0] - model(x)[:, 1]).sum(1) + 1e-5 * model(x[:, 0]).square().sum(1)
    step, eager = both(model, losses, lambda grads: grads.gram())
    for apart in (1.0, 0.0):
        pair = torch.cat([x, x + apart * torch.randn(4, 1, 64).float()], 1)
        assert error(step(pair).answer, eager(pair).answer) < 1e-4
        assert step.num_op_by_op == (apart == 0.0)


def test_noise_scales_are_numbers_and_refused_in_a_graph():
    compiled, _ = both(nn.Linear(3, 2), lambda model, x: model(x).sum(1), lambda grads: grads.noise_scale())
    with pytest.raises(sw.SamplewiseError, match="depends on values.*compile=False"):
        compiled(torch.randn(4, 3))


@pytest.mark.parametrize(
    "query",
    [
        lambda grads: grads,
        lambda grads: grads.stream(),
        lambda grads: (G.sum(0) for G in grads.materialize().values()),
        lambda grads: {"sums": grads.sum().values()},
        lambda grads: [set(grads)],
    ],
    ids="grads stream generator values set".split(),
)
def test_what_would_be_that_of_the_trace_for_good_is_no_answer(query, uncompiled):
    step, _ = both(nn.Linear(4, 3), query=query)
    with pytest.raises(sw.SamplewiseError, match=r"cannot give a \w+: .*dict\(grads.stream\(\)\)"):
        step(torch.randn(5, 4), torch.randint(3, (5,)))


def test_answers_may_hold_slices_shapes_and_enums(uncompiled):
    step, eager = both(nn.Linear(4, 3), query=lambda grads: list(grads.stream(samples=2)))
    batch = torch.randn(5, 4), torch.randint(3, (5,))
    assert [run for run, _ in step(*batch).answer] == [run for run, _ in eager(*batch).answer]


class Directed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g, self.v = nn.Parameter(torch.ones(3, 1)), nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.g * self.v / self.v.norm(dim=1, keepdim=True))


def batch_refilled(model: nn.Module, other: sw.Grads, x: Tensor) -> None:
    x.normal_()


def handed_out(model: nn.Module, other: sw.Grads, x: Tensor) -> None:
    list(other.stream())


def optimized(model: nn.Module, other: sw.Grads, x: Tensor) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)


@pytest.mark.parametrize("query", ["gram", "cosines", "of one"])
@pytest.mark.parametrize("change", [batch_refilled, handed_out, optimized])
def test_another_capture_is_what_it_was_or_refused(change, query, uncompiled):
    """A graph has its tensors as they are."""
    model = Directed() if change is optimized else nn.Linear(4, 3)
    x, y = torch.randn(4, 4), torch.randint(3, (4,))
    other = sw.per_sample(model, per_row)(x, y)
    asked = {
        "gram": lambda grads: grads.gram(other),
        "cosines": lambda grads: grads.cosines(other),
        "of one": lambda grads: [grads[name].gram(other[name]) for name in grads],
    }[query]
    step, eager = both(model, query=asked)
    batch = torch.randn(5, 4), torch.randint(3, (5,))
    for _ in range(2):
        assert error(step(*batch).answer, eager(*batch).answer) < 1e-10
    change(model, other, x)
    for run in (step, eager):
        with pytest.raises(sw.SamplewiseError, match="changed in place|were freed"):
            run(*batch)


def test_another_capture_of_weights_that_train(uncompiled):
    """What it holds does not follow the weights, unless they are computed from others."""
    model, x, y = nn.Linear(4, 3), torch.randn(4, 4), torch.randint(3, (4,))
    other = sw.per_sample(model, per_row)(x, y)
    step, eager = both(model, query=lambda grads: grads.gram(other))
    for _ in range(3):
        batch = torch.randn(5, 4), torch.randint(3, (5,))
        assert error(step(*batch).answer, eager(*batch).answer) < 1e-10
        optimized(model, other, x)


def test_a_number_before_the_batch(uncompiled):
    """A first tensor without samples says nothing of their number."""
    step, eager = both(nn.Linear(4, 3), lambda model, t, x, y: per_row(model, x, y) / t, lambda grads: grads.norms())
    for size in (4, 7, 5, 9):
        batch = torch.tensor(2.0), torch.randn(size, 4), torch.randint(3, (size,))
        assert error(step(*batch).answer, eager(*batch).answer) < 1e-10
    assert step.num_graphs == 2
