"""Graphs of compiled steps against the step op by op: every kind of use, and every size of the batch."""

import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, Case, Fn
from stepping import batch_of, both, error, fakes, mlp, norms, per_row, tensors
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

import samplewise as sw
from samplewise.compiled import compiler, steps
from samplewise.compiled.trace import Record, Trace
from samplewise.flow.memory import REMEMBERED
from samplewise.ops.linear import _outer_of
from samplewise.ops.pointwise import _spreading
from samplewise.samples import Layout
from samplewise.testing import assert_matches_oracle

pytestmark = pytest.mark.usefixtures("in_double")

REFUSED = set(
    """
    met-radial met-tensordot met-inner met-vecdot met-multi-dot met-solve met-outer met-take
    embedding-bag-offsets rnn-packed rnn-packed-jumbled lstm-packed lstm-packed-jumbled gru-packed gru-packed-jumbled
    routed-experts
    made-experts-sorted made-experts-added made-ragged
    """.split()
)
"""Steps whose course depends on values."""


def a_third() -> list[Case]:
    """The first case of every family of names, and every third after it."""
    seen: Counter[str] = Counter()
    chosen = []
    for c in CASES:
        family = c.name.partition("-")[0]
        if seen[family] % 3 == 0:
            chosen.append(c)
        seen[family] += 1
    return chosen


TRACED = CASES if os.environ.get("SAMPLEWISE_ALL") else a_third()
"""Tracing all takes minutes: `make test-all` does."""


def cold() -> None:
    Layout.along.cache_clear()
    REMEMBERED.clear()
    _outer_of.cache_clear()
    _spreading.cache_clear()


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in TRACED])
def test_a_graph_says_what_the_step_op_by_op_says(case: Case):
    cold()
    model, batch, loss_fn = case.build()
    options = {"batch_dim": case.batch_dim, **case.options}
    compiled, eager = both(model, loss_fn, **options)
    if case.name in REFUSED:
        with pytest.raises(sw.SamplewiseError):
            Trace(model, compiled.run, batch, Record())
    else:
        trace = Trace(model, compiled.run, batch, Record())
        with torch.no_grad():
            outputs = trace.graph(*tensors(batch))
        assert error(trace.result(outputs), eager(*batch)) < 1e-9
    assert fakes(model) == []
    if case.name in AFTERWARDS:
        assert_matches_oracle(model, loss_fn, *batch, **options)


AFTERWARDS = {c.name for c in CASES[::10] if not c.loss_fn}
"""Where the captured gradients after a trace are held against the oracle."""


def mean_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def sum_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="sum")


class CNN(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unflatten(1, (1, 2, 2)))


class Reader(nn.Module):
    """A recurrent classifier; reads [B, T] numbers."""

    def __init__(self, of: str = "LSTM"):
        super().__init__()
        self.rnn, self.head = getattr(nn, of)(1, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x[..., None])[0][:, -1])


SIZED = {
    "mlp-mean": (mlp, mean_loss, "mean"), "mlp-sum": (mlp, sum_loss, "sum"), "mlp-rows": (mlp, per_row, "sum"),
    "cnn": (CNN, per_row, "sum"), "cnn-mean": (CNN, mean_loss, "mean"), "gru": (lambda: Reader("GRU"), per_row, "sum"),
    "lstm": (Reader, per_row, "sum"),
}  # fmt: skip


@pytest.mark.parametrize("name", SIZED)
def test_one_graph_serves_all_sizes(name, uncompiled):
    make, loss_fn, reduction = SIZED[name]
    model = make()
    step, eager = both(model, loss_fn, loss_reduction=reduction)
    for size in [
        5,
        31,
        2,
        64,
        *range(3, 14),
        1,
        16,
        17,
        32,
        33,
        0 if "mlp" in name and reduction == "sum" else 1,
        63,
        64,
        2,
    ]:
        batch = batch_of(size)
        assert error(step(*batch), eager(*batch)) < 1e-9, size
    assert step.num_graphs == 3  # with the one for a batch of one


@pytest.mark.parametrize("of", ["LSTM", "GRU", "RNN"])
def test_a_graph_of_a_recurrent_layer_is_as_long_for_any_sequence(of):
    graphs = []
    for T in (3, 30):
        model = Reader(of)
        step = sw.per_sample_step(model, per_row, norms, compile=True, plan={"*": "direct"})
        batch = batch_of(width=T)
        graphs.append(Trace(model, step.run, batch, Record()).graph.graph.nodes)
    assert len(graphs[0]) == len(graphs[1])


@pytest.mark.filterwarnings("ignore:`torch._prims_common.check` is deprecated")
@pytest.mark.parametrize("of", ["LSTM", "GRU", "RNN"])
def test_compiled_recurrent_layers(of):
    step, eager = both(Reader(of))
    for size in (4, 7, 1):
        batch = batch_of(size)
        assert error(step(*batch), eager(*batch)) < 1e-9, size
    assert step.num_graphs == 3


@pytest.mark.parametrize("of", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_under_autocast(of, uncompiled):
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return per_row(model, x, y)

    step, eager = both(Reader(of).float(), loss_fn, norms)
    x, y = batch_of()
    batch = x.float(), y
    assert error(step(*batch), eager(*batch)) < 0.02  # bfloat16 has 8 bits, and rounds elsewhere there


@pytest.mark.parametrize("first", [2, 3, 4, 6, 8])
def test_sizes_that_meet_other_sizes_of_the_model(first, uncompiled):
    """Numbers of a graph that happen to equal B: widths 4, 6 and 3, length 4."""
    model = Fn(lambda s, x: s.h(s.l(x[..., None]).tanh().flatten(1)), l=nn.Linear(1, 6), h=nn.Linear(24, 3))
    step, eager = both(model)
    for size in (first, 3, 4, 6, 8, 24, 12, 5):
        batch = batch_of(size)
        assert error(step(*batch), eager(*batch)) < 1e-9, size


def test_compiled_for_all_sizes():
    model = mlp()
    step, eager = both(model)
    for size in (4, 7, 2, 1, 9, 16):
        batch = batch_of(size)
        assert error(step(*batch), eager(*batch)) < 1e-9, size
    assert step.num_graphs == 3


def test_an_op_that_torch_compiles_for_known_sizes_alone():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(3, 1, 3), nn.Flatten())
    step, eager = both(model, lambda model, x: model(x).square().sum(1))
    for size in (4, 7, 4, 2):
        x = torch.randn(size, 2, 5, 5)
        assert error(step(x), eager(x)) < 1e-6, size
    assert not step.num_op_by_op


@pytest.mark.parametrize("error", [AssertionError("stride 1==36"), TorchDynamoException("no such op\nand more")], ids=repr)
def test_what_torch_does_not_compile_is_refused_by_name(error, monkeypatch):
    """As replicate padding, of whose gradient torch 2.15 does not know the strides: its own `torch.compile` fails as well."""

    def fail(*_):
        raise error

    monkeypatch.setattr(torch, "compile", lambda *_, **__: fail)
    step, _ = both(mlp())
    for _ in range(2):
        with pytest.raises(sw.SamplewiseError, match=rf"{str(error).splitlines()[0]}\). Take it op by op: .*compile=False"):
            step(*batch_of())


def test_a_step_that_fails_leaves_buffers_as_they_were(monkeypatch):
    """Also where it fails when all of it has run: taken again, size by size, it would have written twice."""

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.count = nn.Linear(4, 3), nn.Buffer(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return self.inner(x)

    def failing(run):
        def fail(*tensors):
            run(*tensors)
            raise AssertionError("stride 1==36")

        return fail

    model = Counted()
    step = sw.per_sample_step(model, per_row, lambda grads: grads["inner.bias"].norms(), compile=True)
    step(*batch_of(4))
    assert model.count == 1
    for module in (compiler, steps):  # torch before 2.12 runs a graph that writes as it is
        monkeypatch.setattr(module, "as_written", failing)
    with pytest.raises(sw.SamplewiseError, match="stride 1==36"):
        step(*batch_of(7))
    assert model.count == 1


def test_code_for_the_cpu_has_no_vectors():
    """Those of torch write past the end of sums: `WITHOUT_VECTORS`."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    step, _ = both(mlp(width=40))
    with config.patch(fx_graph_cache=False):
        _, codes = run_and_get_code(step, *batch_of(9, width=40))
    assert codes and not any("Vectorized" in code for code in codes)


OF_ONE_CACHE = """
import torch, samplewise as sw
from torch import nn

torch.manual_seed(0)
model, x = nn.Sequential(nn.Linear(37, 50), nn.Tanh(), nn.Linear(50, 20)), torch.randn(9, 37)
steps = [sw.per_sample_step(model, lambda m, x: m(x).square().sum(1), lambda g: g.norms(), compile=c) for c in (True, False)]
torch.testing.assert_close(*(step(x).answer for step in steps))
"""


def test_processors_that_share_the_compilers_cache(tmp_path):
    """Vectors of each width that this processor has, one process after the other; the last has none."""
    narrower = ["avx2"] if torch.backends.cpu.get_cpu_capability() == "AVX512" else []
    for capability in (*narrower, None, "default"):
        surroundings = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        if capability is not None:
            surroundings["ATEN_CPU_CAPABILITY"] = capability
        subprocess.run([sys.executable, "-c", OF_ONE_CACHE], env=surroundings, check=True)
