"""What changes between compiled steps is seen: what the query and the forward read, the model, and what torch is told."""

import copy
import functools
import itertools
import math
import operator
import os
import random
import sys
import types
from array import array
from collections import UserDict, UserList, deque
from collections.abc import Callable
from contextvars import ContextVar
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from stepping import B, batch_of, both, error, mlp, norms, per_row, with_dropout
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import samplewise as sw
from samplewise.compiled.steps import MAX_FAMILIES

pytestmark = pytest.mark.usefixtures("in_double")

GLOBAL = 0.1
SETTINGS = types.ModuleType("settings_of_steps")


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

    def matched(c: Any) -> float:
        match c:
            case types.SimpleNamespace(norm=norm):
                return norm
        return 1.0

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

    def imported() -> tuple:
        def query(grads: Any) -> Any:
            from settings_of_steps import norm  # type: ignore[import-not-found]

            return clip(grads, norm)

        return query, lambda: setattr(SETTINGS, "norm", 0.05)

    def scheduled() -> tuple:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return lambda grads: clip(grads, schedule.get_last_lr()[0]), lambda: [optimizer.step(), schedule.step()]

    def inherited() -> tuple:
        class Own(Config):
            pass

        own = Own()
        return lambda grads: clip(grads, own.norm), lambda: setattr(Own, "norm", 0.05)

    def with_norm(kind: type, *args: Any) -> Callable:
        def make() -> Any:
            made = type("Own", (kind,), {})(*args)
            made.norm = 0.1
            return made

        return make

    def put_norm(c: Any) -> None:
        c.norm = 0.05

    def by_gradient() -> tuple:
        w = nn.Parameter(torch.zeros(()))
        w.grad = torch.tensor(1.0)
        return lambda grads: grads.norms() * w.grad, lambda: setattr(w, "grad", torch.tensor(2.0))

    class Mode(Enum):
        ON = 1

        @property
        def norm(self) -> float:
            return GLOBAL

    class Pair(NamedTuple):
        first: float

        @property
        def norm(self) -> float:
            return self.first * GLOBAL

    return {
        "imported": imported,
        "scheduler": scheduled,
        "inherited": inherited,
        "gradient": by_gradient,
        "attribute-of-dict": of(with_norm(dict), lambda c: c.norm, put_norm),
        "attribute-of-list": of(with_norm(list), lambda c: c.norm, put_norm),
        "attribute-of-tensor": of(with_norm(nn.Parameter, torch.zeros(1)), lambda c: c.norm, put_norm),
        "python-module": of(lambda: {"a": SETTINGS}, lambda c: c["a"].norm, lambda c: put_norm(c["a"])),
        "enum": of(lambda: Mode.ON, lambda c: c.norm, lambda c: halve_global()),
        "tuple": of(lambda: Pair(1.0), lambda c: c.norm, lambda c: halve_global()),
        "object-in-set": of(lambda: {Config()}, lambda c: max(c, key=id).norm, lambda c: setattr(max(c, key=id), "norm", 0.05)),
        "python-array": of(lambda: array("d", [0.1]), lambda c: c[0], put(0)),
        "context": of(lambda: ContextVar("norm", default=0.1), lambda c: c.get(), lambda c: c.set(0.05)),
        "closure": cell,
        "list": of(lambda: [0.1], lambda c: c[0], put(0)),
        "nested": of(lambda: {"a": [{"b": 0.1}]}, lambda c: c["a"][0]["b"], lambda c: put("b")(c["a"][0])),
        "dict-order": of(lambda: {"a": 0.1, "b": 0.05}, lambda c: next(iter(c.values())), reordered),
        "dict-key": of(lambda: {"a": 0.1}, lambda c: c.get("a", 0.05), lambda c: c.update(b=c.pop("a"))),
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
        "environment-asked": lambda: (
            lambda grads: clip(grads, float(os.getenv("NORM", "0.1"))), lambda: os.environ.update(NORM="0.05")
        ),
        "list-of-users": of(lambda: UserList([0.1]), lambda c: c[0], put(0)),
        "dict-of-users": of(lambda: UserDict(a=0.1), lambda c: c["a"], put("a")),
        "pattern": of(lambda: types.SimpleNamespace(norm=0.1), matched, lambda c: setattr(c, "norm", 0.05)),
        "builtin-method": of(lambda: {"a": 0.1}.get, lambda c: c("a"), lambda c: put("a")(c.__self__)),
        "method-wrapper": of(lambda: [0.1].__len__, lambda c: 0.1 / c(), lambda c: c.__self__.append(0.1)),
        "attribute-getter": of(
            lambda: (Config(), operator.attrgetter("norm")), lambda c: c[1](c[0]), lambda c: setattr(c[0], "norm", 0.05)
        ),
        "evaluated": of(lambda: types.SimpleNamespace(norm=0.1), lambda c: eval("c.norm"), lambda c: setattr(c, "norm", 0.05)),
        "sign-of-zero": of(
            lambda: types.SimpleNamespace(n=0.0), lambda c: 0.1 + 0.05 * math.copysign(1, c.n), lambda c: setattr(c, "n", -0.0)
        ),
        "end-of-range": of(
            lambda: types.SimpleNamespace(n=range(0, 3, 2)), lambda c: 0.1 * c.n.stop, lambda c: setattr(c, "n", range(0, 4, 2))
        ),
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
    monkeypatch.setitem(sys.modules, "settings_of_steps", SETTINGS)
    monkeypatch.setattr(SETTINGS, "norm", 0.1, raising=False)
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
    "class": (mlp, lambda m: setattr(m[1], "__class__", nn.Sigmoid)),
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


class Counting(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x)


def test_a_buffer_is_written_once_a_step():
    """Also in the first step, which is run op by op before it is compiled, where a second size comes, and where values need care."""
    model = Counting()
    clipped = lambda grads: grads.clipped_sum(max_norm=1.0)
    step = sw.per_sample_step(model, lambda model, x: model(x).square().sum(1), clipped, compile=True)
    for k, size in enumerate((4, 4, 5, 5, 4, 6)):
        x = torch.randn(size, 3)
        x[0, 0] = float("inf") if k in (1, 4) else 0.0
        step(x)
        assert model.calls.item() == k + 1
    assert step.num_op_by_op == 2


def test_a_global_that_is_called_as_a_method_is_not_read(uncompiled, monkeypatch):
    """norms = step(x).answer, in a notebook whose query is lambda grads: grads.norms()."""
    monkeypatch.delitem(globals(), "norms")
    step = sw.per_sample_step(mlp(), per_row, lambda grads: grads.norms(), compile=True)
    for _ in range(MAX_FAMILIES + 2):
        monkeypatch.setitem(globals(), "norms", step(*batch_of()).answer)
    assert step.num_graphs == 1


def through_out(m: Any) -> None:
    torch.add(m.count * 1, 1, out=m.count)


WRITES: dict[str, Callable[[Any], Any]] = {
    "in-place": lambda m: m.count.add_(1),
    "data": lambda m: m.count.data.add_(1),
    "view": lambda m: m.count.view(2, 2)[0].add_(1),
    "chunk": lambda m: m.count.chunk(2)[0].add_(1),
    "unbind": lambda m: m.count.unbind(0)[1].add_(1),
    "out": through_out,
    "foreach": lambda m: torch._foreach_add_([m.count], 1),
    "plain": lambda m: m.plain.add_(1),
}


@pytest.mark.parametrize("name", WRITES)
def test_all_ways_to_write_write_once_a_step(name, uncompiled):
    """Where a step is checked, compiled, taken again op by op or compiled anew."""

    class Writing(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.register_buffer("count", torch.zeros(4))
            self.plain = torch.zeros(4)

        def forward(self, x: Tensor) -> Tensor:
            WRITES[name](self)
            return super().forward(x)

    models = Writing(), Writing()
    clipped = lambda grads: grads.clipped_sum(max_norm=1.0)
    step = sw.per_sample_step(models[0], per_row, clipped, compile=True)
    for k, size in enumerate((4, 4, 6, 4, 7, 1, 4)):
        x, y = batch_of(size)
        x[0, 0] = float("inf") if k in (1, 5) else 0.0
        models[0].train(k != 3)
        step(x, y)
        models[1](x)
        assert torch.equal(models[0].count, models[1].count)
        assert torch.equal(models[0].plain, models[1].plain)
    assert step.num_op_by_op == 2


HALVES: dict[str, Callable[[Tensor], Any]] = {
    "in-place": lambda p: p.mul_(0.5),
    "data": lambda p: p.data.mul_(0.5),
    "out": lambda p: torch.mul(p, 0.5, out=p),
    "foreach": lambda p: torch._foreach_mul_([p], 0.5),
}


@pytest.mark.parametrize("name", HALVES)
def test_parameters_are_written_once_a_step(name, uncompiled):
    class Writing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                HALVES[name](self.weight)
            return super().forward(x)

    model = nn.Sequential(Writing(4, 5), nn.Tanh(), nn.Linear(5, 3))
    other = copy.deepcopy(model)
    step = sw.per_sample_step(model, per_row, norms, compile=True)
    op_by_op = sw.per_sample_step(other, per_row, norms)
    for k, size in enumerate((4, 4, 6, 4, 7, 1, 4)):
        batch = batch_of(size)
        batch[0][0, 0] = float("inf") if k in (1, 5) else 0.0
        for m in (model, other):
            m.train(k != 3)
        torch.testing.assert_close(step(*batch).answer, op_by_op(*batch).answer, equal_nan=True)
        assert torch.equal(model[0].weight, other[0].weight)


def test_a_step_that_puts_something_else_in_the_place_of_a_parameter_leaves_it_when_it_is_refused(uncompiled):
    class Putting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data = self.weight.data * 0.5
            return super().forward(x)

    model = Putting(4, 3)
    before = model.weight.detach().clone()
    with pytest.raises(sw.SamplewiseError, match="compile=False"):
        sw.per_sample_step(model, per_row, norms, compile=True)(*batch_of())
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("what", ["scale", "weight", "plain"])
def test_what_the_first_step_makes_once_and_for_all_stays(what, verify, uncompiled):
    """A flag beside a tensor that is set by the first batch: the first run is the step, with what it has drawn."""

    class Lazy(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.register_buffer("scale", torch.ones(3, 4))
            self.plain, self.is_made = torch.ones(3, 4), False

        def forward(self, x: Tensor) -> Tensor:
            if not self.is_made:
                with torch.no_grad():
                    getattr(self, what).mul_(0.5)
                self.is_made = True
            return F.dropout(x, 0.5) @ (self.weight * self.scale * self.plain).T

    model = Lazy()
    other = copy.deepcopy(model)
    step = sw.per_sample_step(model, per_row, norms, compile=True, verify=verify)
    op_by_op = sw.per_sample_step(other, per_row, norms, verify=verify)
    for k, size in enumerate((4, 4, 6, 4)):
        batch, state = batch_of(size), torch.get_rng_state()
        got, after = step(*batch).answer, torch.get_rng_state()
        torch.set_rng_state(state)
        want = op_by_op(*batch).answer
        assert torch.equal(getattr(model, what), getattr(other, what))
        if k == 0:
            torch.testing.assert_close(got, want)
            assert torch.equal(after, torch.get_rng_state())
    assert step.num_op_by_op == 1 and step.why_op_by_op == "the first step makes what later ones read"


def test_a_first_step_that_goes_another_way_is_taken_that_way(uncompiled):
    class Starting(nn.Linear):
        has_run = False

        def forward(self, x: Tensor) -> Tensor:
            scale, self.has_run = (1.0 if self.has_run else 0.1), True
            with torch.no_grad():
                self.weight *= 0.5
            return super().forward(x) * scale

    model = Starting(4, 3)
    other = copy.deepcopy(model)
    step, op_by_op = both(model)[0], both(other)[1]
    for size in (4, 4, 6):
        batch = batch_of(size)
        assert error(step(*batch).answer, op_by_op(*batch).answer) < 1e-9
        assert torch.equal(model.weight, other.weight)


@pytest.mark.parametrize(
    "draw",
    [
        itertools.count(1).__next__,
        random.Random(0).random,
        np.random.default_rng(0).random,
        np.random.RandomState(0).rand,
        (k for k in range(1, 99)).__next__,
        itertools.cycle([1.0, 2.0, 3.0]).__next__,
        iter([1.0, 2.0, 3.0, 4.0]).__next__,
        map(float, [1, 2, 3, 4]).__next__,
        iter({1.0: 1, 2.0: 2, 3.0: 3}).__next__,
        itertools.chain([1.0, 2.0], iter([3.0, 4.0])).__next__,
    ],
    ids=["count", "random", "numpy", "numpy-state", "generator", "cycle", "list", "map", "dict", "chain"],
)
def test_what_moves_on_with_each_step_is_refused(draw, uncompiled):
    source = draw.__self__
    name = draw.__name__
    step, _ = both(mlp(), lambda m, x, y: per_row(m, x, y) * getattr(source, name)())
    with pytest.raises(sw.SamplewiseError, match="the step changes 'source'"):
        step(*batch_of())


def test_tensors_with_the_negative_bit_are_refused(uncompiled):
    """Memory that is read with the other sign lies like any other, and torch's compiler reads it without."""
    step, _ = both(nn.Linear(4, 1), lambda m, x: m(x).squeeze(1).exp(), norms)
    model, x = step.model, torch.rand(B, 4)
    step(x)
    with pytest.raises(sw.SamplewiseError, match="negative bit"):
        step(torch._neg_view(x))
    model.weight.data = torch._neg_view(model.weight.detach().clone())
    with pytest.raises(sw.SamplewiseError, match="negative bit"):
        step(x)


def test_other_parameters_get_no_gradient(uncompiled):
    model = mlp()
    first, *others = dict(model.named_parameters())
    step, op_by_op = both(model, query=norms, params=[first])
    others = [p for name, p in model.named_parameters() if name != first]
    for grad in (None, 1.0):
        for p in others:
            p.grad = None if grad is None else torch.full_like(p, grad)
        batch = batch_of()
        answer = step(*batch).answer
        assert all(p.grad is None if grad is None else bool((p.grad == grad).all()) for p in others)
        assert error(answer, op_by_op(*batch).answer) < 1e-9


@pytest.mark.parametrize("how", ["train and eval", "p"])
def test_a_step_that_is_launched_for_nothing_draws_nothing(how):
    """What the step's code reads is looked at while the last graph runs already."""
    model = with_dropout(0.5)
    step, _ = both(model, query=norms)
    for _ in range(2):
        step(*batch_of())
    if how == "p":
        model[1].p = 0.0
    else:
        model.eval()
    batch = batch_of()
    state = torch.get_rng_state()
    step(*batch)
    assert torch.equal(torch.get_rng_state(), state)


def test_attributes_that_a_library_reads_in_a_property():
    prior = torch.distributions.Normal(torch.tensor(2.0), torch.tensor(1.0))
    step, eager = both(nn.Linear(4, 3), lambda model, x, y: (model(x) - prior.mean).square().sum(1) / prior.variance, norms)
    batch = batch_of()
    for name in ("loc", "scale"):
        assert error(step(*batch).answer, eager(*batch).answer) < 1e-10
        setattr(prior, name, torch.tensor(5.0))
        assert error(step(*batch).answer, eager(*batch).answer) < 1e-10


def test_methods_that_a_methodcaller_calls():
    class Scale:
        by = 2.0

        def scaled(self, losses, *, power):
            return losses * self.by**power

    scale = Scale()
    call = operator.methodcaller("scaled", torch.ones(()), power=2)
    step, eager = both(nn.Linear(4, 3), lambda model, x, y: per_row(model, x, y) * call(scale), norms)
    batch = batch_of()
    for by in (2.0, 3.0):
        scale.by = by
        assert error(step(*batch).answer, eager(*batch).answer) < 1e-10
