"""The compiled step against the step op by op: the same numbers, whatever changes in between, or an error."""

import functools
import os
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import CASES, Case, Fn
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import samplewise as sw
from samplewise.compiled import MAX_FAMILIES
from samplewise.flow.memory import REMEMBERED
from samplewise.ops.linear import _outer_of
from samplewise.ops.pointwise import _spreading
from samplewise.samples import Layout
from samplewise.testing import assert_matches_oracle, relative_error
from samplewise.trace import Record, Trace

B = 5


@pytest.fixture
def uncompiled(monkeypatch):
    """Graphs run as they were traced: what the compiler makes of them is its own matter, and takes seconds."""
    monkeypatch.setattr(torch, "compile", lambda graph, **_: graph)


@pytest.fixture(autouse=True)
def _in_double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def tensors(value: Any) -> list[Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, Tensor)]


def error(got: Any, want: Any) -> float:
    """The largest relative error of two results; inf if they are not made alike."""
    got, want = tensors(got), tensors(want)
    if [t.shape for t in got] != [t.shape for t in want]:
        return float("inf")
    real = [torch.view_as_real(t) if t.is_complex() else t for t in got + want]
    return max(map(relative_error, real[: len(got)], real[len(got) :]), default=0.0)


def per_row(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def norms(grads: Any) -> Tensor:
    return grads.norms()


def questions(grads: Any) -> tuple:
    return grads.norms(), grads.clipped_sum(max_norm=0.1), grads.sum()


def batch_of(size: int = B, width: int = 4, classes: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(size, width), torch.randint(classes, (size,))


def mlp(width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 6), nn.Tanh(), nn.Linear(6, 3))


def both(model: nn.Module, loss_fn: Any = per_row, query: Any = questions, **options: Any) -> tuple[Any, Any]:
    """The compiled step and the one op by op."""
    return (
        sw.per_sample_step(model, loss_fn, query, compile=True, **options),
        sw.per_sample_step(model, loss_fn, query, **options),
    )


# --- the case table ---------------------------------------------------------------------------------------------------

REFUSED = set(
    """
    met-radial met-tensordot met-inner met-vecdot met-multi-dot met-solve met-grid-sample met-outer met-take
    embedding-bag-offsets rnn-packed rnn-packed-jumbled lstm-packed lstm-packed-jumbled gru-packed gru-packed-jumbled
    attention-latents routed-experts graph-messages
    made-segments made-experts-sorted made-experts-added made-ragged made-last-by-index made-turned-around made-guided
    """.split()
)
"""Steps whose course depends on values."""


def cold() -> None:
    Layout.along.cache_clear()
    REMEMBERED.clear()
    _outer_of.cache_clear()
    _spreading.cache_clear()


def fakes(model: nn.Module) -> list[str]:
    """Where a tensor without values was left behind."""
    found = [name for name, t in [*model.named_parameters(), *model.named_buffers()] if isinstance(t, FakeTensor)]
    found += [f"{name}.grad" for name, p in model.named_parameters() if isinstance(p.grad, FakeTensor)]
    found += [f"{n}.{k}" for n, m in model.named_modules() for k, v in vars(m).items() if any(map(is_fake, tree_leaves(v)))]
    marks = [mark for mark in tree_leaves([known.mark for known in REMEMBERED.values()]) if isinstance(mark, Layout)]
    return found + [str(mark) for mark in marks if isinstance(mark.ids, FakeTensor)]


def is_fake(value: Any) -> bool:
    return isinstance(value, FakeTensor)


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES])
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


# --- sizes ------------------------------------------------------------------------------------------------------------


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
    for size in [*range(2, 14), 4, 1, 16, 17, 31, 32, 33, 0 if "mlp" in name and reduction == "sum" else 1, 63, 64, 2]:
        batch = batch_of(size)
        assert error(step(*batch), eager(*batch)) < 1e-9, size
    assert step.num_graphs == 3  # with the one for a batch of one


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


# --- what changes between steps ---------------------------------------------------------------------------------------

GLOBAL = 0.1
SETTINGS = types.ModuleType("settings")


class Config:
    norm = 0.1


class Slotted:
    __slots__ = ("norm",)

    def __init__(self) -> None:
        self.norm = 0.1

    def __call__(self, grads: Any) -> Any:
        return grads.clipped_sum(max_norm=self.norm)

    def ask(self, grads: Any) -> Any:
        return self(grads)


class Asker:
    def __call__(self, grads: Any) -> Any:
        return grads.clipped_sum(max_norm=GLOBAL)


def by_global(grads: Any) -> Any:
    return grads.clipped_sum(max_norm=GLOBAL)


def halve_global() -> None:
    global GLOBAL
    GLOBAL = 0.05


def clip(grads: Any, norm: float = 0.1) -> Any:
    return grads.clipped_sum(max_norm=norm)


def _changes_of_query() -> dict[str, Callable[[], tuple[Any, Callable]]]:
    """{name: () → (query, what changes it)}."""

    def of(holder: Any, read: Callable, change: Callable) -> Callable:
        return lambda: (lambda h: (lambda grads: clip(grads, read(h)), lambda: change(h)))(holder())

    def nested() -> Any:
        top = Config()
        inner = top
        for _ in range(8):
            inner.next = inner = Config()
        return top

    def innermost(c: Any) -> Any:
        while hasattr(c, "next"):
            c = c.next
        return c

    def cell() -> tuple:
        norm = 0.1

        def change() -> None:
            nonlocal norm
            norm = 0.05

        return lambda grads: clip(grads, norm), change

    def with_attribute() -> tuple:
        def query(grads: Any) -> Any:
            return clip(grads, query.norm)

        query.norm = 0.1
        return query, lambda: setattr(query, "norm", 0.05)

    def with_default(name: str, value: Any) -> Callable:
        def make() -> tuple:
            def by_position(grads: Any, norm: float = 0.1) -> Any:
                return clip(grads, norm)

            def by_keyword(grads: Any, *, norm: float = 0.1) -> Any:
                return clip(grads, norm)

            query = by_position if name == "__defaults__" else by_keyword
            return query, lambda: setattr(query, name, value)

        return make

    def new_code() -> tuple:
        def query(grads: Any) -> Any:
            return clip(grads, 0.1)

        def other(grads: Any) -> Any:
            return clip(grads, 0.05)

        return query, lambda: setattr(query, "__code__", other.__code__)

    def bound(name: str) -> Callable:
        def make() -> tuple:
            asker = Slotted()
            return getattr(asker, name) if name else asker, lambda: setattr(asker, "norm", 0.05)

        return make

    def partly(*, of_config: bool) -> Callable:
        def make() -> tuple:
            config = Config()
            if of_config:
                query = functools.partial(lambda c, grads: clip(grads, c.norm), config)
                return query, lambda: setattr(config, "norm", 0.05)
            query = functools.partial(clip, norm=0.1)
            return query, lambda: query.keywords.update(norm=0.05)

        return make

    def by_module() -> tuple:
        SETTINGS.norm = 0.1
        return lambda grads: clip(grads, SETTINGS.norm), lambda: setattr(SETTINGS, "norm", 0.05)

    def reordered(d: dict) -> None:
        d["a"] = d.pop("a")

    def put(key: Any) -> Callable:
        return lambda container: container.__setitem__(key, 0.05)

    def replaced(s: set) -> None:
        s.clear()
        s.add(0.05)

    return {
        "closure": cell,
        "list": of(lambda: [0.1], lambda c: c[0], put(0)),
        "nested": of(lambda: {"a": [{"b": 0.1}]}, lambda c: c["a"][0]["b"], lambda c: put("b")(c["a"][0])),
        "dict-order": of(lambda: {"a": 0.1, "b": 0.05}, lambda c: next(iter(c.values())), reordered),
        "set": of(lambda: {0.1}, max, replaced),
        "deque": of(lambda: deque([0.1]), lambda c: c[0], put(0)),
        "array": of(lambda: np.array([0.1]), lambda c: float(c[0]), put(0)),
        "object": of(Config, lambda c: c.norm, lambda c: setattr(c, "norm", 0.05)),
        "namespace": of(lambda: types.SimpleNamespace(norm=0.1), lambda c: c.norm, lambda c: setattr(c, "norm", 0.05)),
        "getattr": of(Config, lambda c: getattr(c, "norm"), lambda c: setattr(c, "norm", 0.05)),  # noqa: B009
        "vars": of(lambda: types.SimpleNamespace(n=0.1), lambda c: next(iter(vars(c).values())), lambda c: setattr(c, "n", 0.05)),
        "slots": of(Slotted, lambda c: c.norm, lambda c: setattr(c, "norm", 0.05)),
        "deep": of(nested, lambda c: innermost(c).norm, lambda c: setattr(innermost(c), "norm", 0.05)),
        "class": of(lambda: type("Own", (Config,), {"norm": 0.1}), lambda c: c.norm, lambda c: setattr(c, "norm", 0.05)),
        "class-of-object": of(
            lambda: type("Own", (Config,), {"norm": 0.1})(), lambda c: c.norm, lambda c: setattr(type(c), "norm", 0.05)
        ),
        "global": lambda: (lambda grads: clip(grads, GLOBAL), halve_global),
        "global-of-helper": lambda: (lambda grads: by_global(grads), halve_global),
        "global-of-callable": lambda: (Asker(), halve_global),
        "module": by_module,
        "environment": lambda: (
            lambda grads: clip(grads, float(os.environ.get("NORM", "0.1"))), lambda: os.environ.update(NORM="0.05")
        ),
        "partial": partly(of_config=False),
        "partial-of-object": partly(of_config=True),
        "callable": bound(""),
        "method": bound("ask"),
        "attribute": with_attribute,
        "defaults": with_default("__defaults__", (0.05,)),
        "keyword-defaults": with_default("__kwdefaults__", {"norm": 0.05}),
        "code": new_code,
    }  # fmt: skip


CHANGES_OF_QUERY = _changes_of_query()


@pytest.mark.parametrize("name", CHANGES_OF_QUERY)
def test_a_change_of_what_the_query_reads_is_seen(name, uncompiled, monkeypatch):
    monkeypatch.setitem(globals(), "GLOBAL", 0.1)
    monkeypatch.setattr(Config, "norm", 0.1)
    monkeypatch.delenv("NORM", raising=False)
    query, change = CHANGES_OF_QUERY[name]()
    assert_change_is_seen(mlp(), per_row, query, change)


def assert_change_is_seen(model: nn.Module, loss_fn: Any, query: Any, change: Callable, **options: Any) -> None:
    batch = batch_of()
    step, eager = both(model, loss_fn, query, **options)
    before = eager(*batch)
    assert error(step(*batch), before) < 1e-9
    change()
    after = eager(*batch)
    assert error(after, before) > 1e-6, "the change changes nothing"
    assert error(step(*batch), after) < 1e-9
    graphs = step.num_graphs
    assert error(step(*batch), after) < 1e-9
    assert step.num_graphs == graphs


class Scaled(nn.Linear):
    """A layer that reads numbers from wherever code can."""

    of_class = 1.0

    def __init__(self, read: Callable[["Scaled"], Any]):
        super().__init__(4, 3)
        self.read, self.own, self.parts = read, 1.0, {"a": [1.0]}
        self.register_buffer("buffer", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.read(self)

    @property
    def by_property(self) -> float:
        return GLOBAL

    def by_method(self) -> float:
        return GLOBAL


CHANGES_OF_FORWARD = {
    "attribute": (lambda m: m.own, lambda m: setattr(m, "own", 2.0)),
    "inside": (lambda m: m.parts["a"][0], lambda m: m.parts["a"].__setitem__(0, 2.0)),
    "class": (lambda m: m.of_class, lambda m: setattr(Scaled, "of_class", 2.0)),
    "global": (lambda m: GLOBAL, lambda m: halve_global()),
    "property": (lambda m: m.by_property, lambda m: halve_global()),
    "method": (lambda m: m.by_method(), lambda m: halve_global()),
    "buffer": (lambda m: m.buffer, lambda m: m.buffer.mul_(2.0)),
    "buffer-replaced": (lambda m: m.buffer, lambda m: setattr(m, "buffer", torch.full((3,), 2.0))),
    "forward-of-class": (
        lambda m: 1.0,
        lambda m: setattr(Scaled, "forward", lambda s, x: F.linear(x, s.weight, s.bias) * 2),
    ),
    "forward-of-object": (lambda m: 1.0, lambda m: setattr(m, "forward", lambda x: F.linear(x, m.weight, m.bias) * 2)),
}


@pytest.mark.parametrize("name", CHANGES_OF_FORWARD)
def test_a_change_of_what_forward_reads_is_seen(name, uncompiled, monkeypatch):
    monkeypatch.setitem(globals(), "GLOBAL", 0.1)
    monkeypatch.setattr(Scaled, "of_class", 1.0)
    monkeypatch.setattr(Scaled, "forward", Scaled.forward)
    read, change = CHANGES_OF_FORWARD[name]
    model = Scaled(read)
    assert_change_is_seen(model, per_row, norms, lambda: change(model))


def with_dropout(p: float) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(p), nn.Linear(6, 3))


def trained(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    F.cross_entropy(model(torch.ones(2, 4)), torch.tensor([0, 1])).backward()
    optimizer.step()
    optimizer.zero_grad()


def put_data(model: Any, width: int = 6) -> None:
    for p, shape in zip(model.parameters(), [(width, 4), (width,), (3, width), (3,)], strict=True):
        p.data = torch.randn(shape)


def weight_normed(model: Any) -> None:
    parametrizations.weight_norm(model[0])
    nn.init.ones_(model[0].parametrizations.weight.original0)


CHANGES_OF_MODEL: dict[str, tuple[Callable, Callable]] = {
    "eval": (lambda: with_dropout(1 - 1e-12), lambda m: m.eval()),
    "train": (lambda: with_dropout(1.0).eval(), lambda m: m.train()),
    "dropout": (lambda: with_dropout(0.0), lambda m: setattr(m[1], "p", 1.0)),
    "freeze": (mlp, lambda m: m[0].requires_grad_(False)),
    "unfreeze": (
        lambda: nn.Sequential(nn.Linear(4, 6).requires_grad_(False), nn.Linear(6, 3)),
        lambda m: m.requires_grad_(),
    ),
    "parameter": (mlp, lambda m: setattr(m[0], "weight", nn.Parameter(torch.randn(6, 4)))),
    "tied": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3)),
        lambda m: setattr(m[2], "weight", m[0].weight),
    ),
    "data": (mlp, put_data),
    "data-of-another-shape": (mlp, lambda m: put_data(m, 7)),
    "data-of-another-stride": (mlp, lambda m: setattr(m[0].weight, "data", torch.randn(4, 6).t())),
    "load": (mlp, lambda m: m.load_state_dict(mlp().state_dict()) and None),
    "load-assign": (mlp, lambda m: m.load_state_dict(mlp().state_dict(), assign=True) and None),
    "optimizer": (mlp, trained),
    "hook": (mlp, lambda m: m[0].register_forward_hook(lambda module, args, out: out * 2)),
    "hook-before": (mlp, lambda m: m[2].register_forward_pre_hook(lambda module, args: (args[0] * 2,))),
    "submodule": (mlp, lambda m: m.__setitem__(1, nn.ReLU())),
    "appended": (mlp, lambda m: m.append(nn.Tanh())),
    "parametrized": (mlp, weight_normed),
    "activation": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.LeakyReLU(0.1), nn.Linear(6, 3)),
        lambda m: setattr(m[1], "negative_slope", 0.9),
    ),
}


@pytest.mark.parametrize("name", CHANGES_OF_MODEL)
def test_a_change_of_the_model_is_seen(name, uncompiled):
    make, change = CHANGES_OF_MODEL[name]
    model = make()
    assert_change_is_seen(model, per_row, norms, lambda: change(model))


def test_a_hook_of_all_modules_is_seen(uncompiled):
    handles = []

    def change() -> None:
        hook = lambda module, args, out: out * 1.5
        handles.append(nn.modules.module.register_module_forward_hook(hook))

    try:
        assert_change_is_seen(mlp(), per_row, norms, change)
    finally:
        handles[0].remove()


def test_autocast_and_default_dtype_are_seen(uncompiled):
    model, batch = mlp().float(), (torch.randn(B, 4, dtype=torch.float32), torch.randint(3, (B,)))
    step, eager = both(model)
    outside = step(*batch)
    with torch.autocast("cpu", torch.bfloat16):
        inside, want = step(*batch), eager(*batch)
    assert error(inside, want) < 1e-2
    assert error(inside, outside) > 1e-5
    assert error(step(*batch), eager(*batch)) < 1e-5
    assert step.num_graphs == 2


def test_tensors_that_a_function_closes_over_are_read_anew(uncompiled):
    weight = torch.ones(3)
    loss_fn = lambda m, x, y: F.cross_entropy(m(x), y, weight=weight, reduction="none")
    assert_change_is_seen(mlp(), loss_fn, norms, lambda: weight.copy_(torch.tensor([1.0, 2.0, 3.0])))


def test_what_nobody_reads_is_not_looked_at(uncompiled):
    """A trainer that counts its steps is not compiled anew in each."""

    class Trainer:
        def __init__(self) -> None:
            self.count, self.history, self.norm = 0, [], 0.1

        def query(self, grads: Any) -> Any:
            return clip(grads, self.norm)

    trainer = Trainer()
    step, eager = both(mlp(), per_row, trainer.query)
    for _ in range(2 * MAX_FAMILIES):
        batch = batch_of()
        assert error(step(*batch), eager(*batch)) < 1e-9
        trainer.count += 1
        trainer.history.append(trainer.count)
    assert step.num_graphs == 1


def test_a_counter_in_forward_ends_in_an_error_that_names_it(uncompiled):
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * self.calls

    step, _ = both(Counting(4, 3))
    with pytest.raises(sw.SamplewiseError, match="calls"):
        for _ in range(3 * MAX_FAMILIES):
            step(*batch_of())


# --- values that need care --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_sample_that_is_not_finite_is_left_out(value, uncompiled):
    step, eager = both(mlp(), query=lambda grads: grads.clipped_sum(max_norm=0.1))
    step(*batch_of())
    x, y = batch_of()
    x[2, 1] = value
    got, want = step(x, y).answer, eager(x, y).answer
    assert all(torch.isfinite(g).all() for g in got.values())
    assert error(got, want) < 1e-9


@pytest.mark.parametrize("length", [2, 40])
def test_positions_that_cancel(length, uncompiled):
    model = Fn(lambda s, x: s.l(x).sum((1, 2)), l=nn.Linear(3, 2, bias=False))
    for sign in (1.0, -1.0):
        x = torch.randn(B, 1, 3).repeat(1, length, 1)
        x[:, ::2] *= sign
        step, eager = both(model, lambda m, x: m(x), query=norms)
        step(torch.randn(B, length, 3))
        got, want = step(x).answer, eager(x).answer
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_ignored_targets_that_make_a_mean_uneven(uncompiled):
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-1)

    x, y = torch.randn(B, 6, 4), torch.randint(3, (B, 6))
    uneven = y.clone()
    uneven[0, 2:] = -1
    step, eager = both(mlp(), loss_fn, loss_reduction="mean")
    for batch in ((x, y), (x, uneven), (x, y)):
        want = outcome(lambda batch=batch: eager(*batch))
        got = outcome(lambda batch=batch: step(*batch))
        if isinstance(want, Exception):
            assert isinstance(got, sw.SamplewiseError)
        elif not isinstance(got, sw.SamplewiseError):
            assert error(got, want) < 1e-9


def outcome(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except sw.SamplewiseError as refusal:
        return refusal


def test_a_weight_of_zero(uncompiled):
    weight = torch.ones(B)
    step, eager = both(mlp(), query=lambda grads: grads.weighted_sum(weight))
    batch = batch_of()
    batch[0][1] = float("inf")
    for value in (1.0, 0.0, 2.0):
        weight[1] = value
        got, want = step(*batch), eager(*batch)
        finite = all(torch.isfinite(t).all() for t in tensors(want.answer))
        assert finite == all(torch.isfinite(t).all() for t in tensors(got.answer))
        if finite:
            assert error(got.answer, want.answer) < 1e-9


# --- refused ----------------------------------------------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)


OF_VALUES = {
    "item": lambda s, x: s.l(x) * x.sum().item(),
    "if": lambda s, x: s.l(x) * 2 if x.sum() > 0 else s.l(x),
    "item-of-buffer": lambda s, x: s.l(x) * s.k.item(),
    "if-on-buffer": lambda s, x: s.l(x) * 2 if s.k > 0 else s.l(x),
    "float-of-parameter": lambda s, x: s.l(x) * float(s.p),
    "list-of-buffer": lambda s, x: s.l(x) * s.k.tolist(),
    "equal": lambda s, x: s.l(x) * 2 if torch.equal(s.k, s.k * 1) else s.l(x),
    "nonzero": lambda s, x: s.l(x[:, s.ones.nonzero()[:, 0]]),
    "index": lambda s, x: s.l(x) * [1.0, 2.0][s.k.long()],
    "lengths": lambda s, x: s.l(x) * x.argmax(1).tolist()[0],
    "numpy": lambda s, x: s.l(x) * float(s.k.numpy()),
}


@pytest.mark.parametrize("name", OF_VALUES)
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True")
def test_what_depends_on_values_is_refused_or_read_anew(name, uncompiled):
    model = Fn(OF_VALUES[name], l=nn.Linear(4, 3), p=())
    model.register_buffer("k", torch.tensor(1.0))
    model.register_buffer("ones", torch.ones(4))
    step, eager = both(model, verify=False)
    got = outcome(lambda: step(*batch_of()))
    assert fakes(model) == []
    if isinstance(got, Exception):
        assert "compile=False" in str(got)
    else:
        model.k.zero_()
        batch = batch_of()
        assert error(step(*batch), eager(*batch)) < 1e-9
    assert isinstance(got, Exception) == (name not in READ_ANEW)


READ_ANEW = {"lengths"}
"""Numbers that a graph can read as it runs, and calculate with."""


def test_a_batch_that_needs_a_gradient_is_refused(uncompiled):
    step, _ = both(mlp())
    x, y = batch_of()
    with pytest.raises(sw.SamplewiseError, match="compile=False"):
        step(x.requires_grad_(), y)


def test_a_leaf_outside_of_the_model(uncompiled):
    """A learnable temperature gets its gradient as op by op, or the step is refused."""
    temperature = torch.tensor(2.0, requires_grad=True)
    loss_fn = lambda m, x, y: F.cross_entropy(m(x) / temperature, y, reduction="none")
    step, eager = both(mlp(), loss_fn)
    batch = batch_of()
    wanted = outcome(lambda: eager(*batch))
    grad, temperature.grad = temperature.grad, None
    got = outcome(lambda: step(*batch))
    assert not isinstance(temperature.grad, FakeTensor)
    if isinstance(got, Exception) or isinstance(wanted, Exception):
        assert isinstance(got, sw.SamplewiseError)
    else:
        temperature.grad = None
        step(*batch)
        assert grad is None or error(temperature.grad, grad) < 1e-9


def test_a_function_of_ones_own_with_a_parameter(uncompiled):
    model = Fn(lambda s, x: s.l(Doubled.apply(x, s.w)), l=nn.Linear(4, 3), w=(4,))
    step, eager = both(model)
    batch = batch_of()
    want, got = outcome(lambda: eager(*batch)), outcome(lambda: step(*batch))
    assert isinstance(got, sw.SamplewiseError) or error(got, want) < 1e-9
    assert fakes(model) == []


# --- models -----------------------------------------------------------------------------------------------------------


def test_dropout_draws_anew_in_every_step(uncompiled):
    model, batch = with_dropout(0.5), batch_of()
    step, eager = both(model, query=lambda grads: grads.sum()["2.bias"])
    draws = torch.stack([step(*batch).answer for _ in range(200)])
    others = torch.stack([eager(*batch).answer for _ in range(200)])
    assert draws.std(0).min() > 0
    spread = (draws.var(0) / 200 + others.var(0) / 200).sqrt()
    assert ((draws.mean(0) - others.mean(0)).abs() < 5 * spread).all()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant, uncompiled):
    model = Fn(
        lambda s, x: s.h(checkpoint(s.l, s.i(x), use_reentrant=reentrant).tanh()),
        i=nn.Linear(4, 4), l=nn.Linear(4, 6), h=nn.Linear(6, 3),
    )  # fmt: skip
    step, eager = both(model)
    batch = batch_of()
    want = eager(*batch)
    if reentrant:
        with pytest.raises(sw.SamplewiseError, match="use_reentrant=False, or take the step op by op"):
            step(*batch)
    else:
        assert error(step(*batch), want) < 1e-9


def test_compiled_dropout_and_autocast():
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)).float()
    step, _ = both(model, query=norms)
    batch = (torch.randn(B, 4, dtype=torch.float32), torch.randint(3, (B,)))
    with torch.autocast("cpu", torch.bfloat16):
        assert error(step(*batch).answer, step(*batch).answer) > 0


def test_compiled_hook_of_all_modules():
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 1.5)
    try:
        step, eager = both(nn.Linear(4, 3), query=norms)
        batch = batch_of()
        assert error(step(*batch), eager(*batch)) < 1e-9
    finally:
        handle.remove()
