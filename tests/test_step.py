"""The compiled step on values that need care, what it refuses, and what goes through the compiler itself."""

import os
import random
import secrets
import string
import types
from os import urandom
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import Fn
from stepping import B, batch_of, both, error, fakes, mlp, norms, outcome, tensors, with_dropout
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

import samplewise as sw

pytestmark = pytest.mark.usefixtures("in_double")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_sample_that_is_not_finite_is_left_out(value, uncompiled):
    step, eager = both(mlp(), query=lambda grads: grads.clipped_sum(max_norm=0.1))
    step(*batch_of())
    x, y = batch_of()
    x[2, 1] = value
    got, want = step(x, y).answer, eager(x, y).answer
    assert all(torch.isfinite(g).all() for g in got.values())
    assert error(got, want) < 1e-9


def test_a_batch_of_one_row_in_memory_that_is_not_finite(uncompiled):
    x, y = torch.tensor([[1.0, float("nan"), 2.0, 3.0]]).expand(B, 4), batch_of()[1]
    step, eager = both(mlp(), query=norms)
    assert step(x, y).answer.isnan().all()
    assert eager(x, y).answer.isnan().all()
    assert x._version == 0


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
    assert not isinstance(outcome(lambda: eager(*batch)), Exception)
    with pytest.raises(sw.SamplewiseError, match="Doubled meets a parameter and is somebody's own.*compile=False"):
        step(*batch)
    assert fakes(model) == []


SCALE = [1.0]


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * SCALE[0]


@torch.compile(backend="eager")
def scaled_gelu(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(x @ w) * SCALE[0]


def compiled_in_place() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), Scaled(6, 3))
    model.compile(backend="eager")
    return model


COMPILED = {
    "part": lambda: nn.Sequential(nn.Linear(4, 6), torch.compile(Scaled(6, 3), backend="eager")),
    "whole": lambda: torch.compile(nn.Sequential(nn.Linear(4, 6), Scaled(6, 3)), backend="eager"),
    "in-place": compiled_in_place,
    "function": lambda: Fn(lambda s, x: scaled_gelu(x, s.w), w=(4, 3)),
}


@pytest.mark.parametrize("name", COMPILED)
def test_what_is_compiled_already(name, request):
    """It is traced as what it was compiled from, and what that reads is seen to change."""
    model = COMPILED[name]()
    request.getfixturevalue("uncompiled")
    step, eager = both(model)
    for size, scale in ((4, 1.0), (6, 1.0), (9, 1.0), (9, 2.0), (4, 2.0)):
        SCALE[0], batch = scale, batch_of(size)
        with torch.no_grad():
            model(batch[0])  # used by itself in between
        assert error(step(*batch), eager(*batch)) < 1e-9
    assert (step.num_graphs, step.num_op_by_op) == (4, 0)


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


# what once was wrong without an error


def assert_same_after(first: tuple, second: tuple, model: nn.Module, loss_fn: Any) -> None:
    step, eager = both(model, loss_fn)
    assert error(step(*first), eager(*first)) < 1e-9
    assert error(step(*second), eager(*second)) < 1e-9


@pytest.mark.parametrize(("before", "after"), [(1, True), (1, 1.0), (0.0, -0.0)])
def test_numbers_that_are_equal_and_not_the_same(before, after, uncompiled):
    def loss_fn(model: nn.Module, x: Tensor, number: Any) -> Tensor:
        return model(x).sum(1) * (2 if repr(number) == repr(after) else 1)

    x, _ = batch_of()
    assert_same_after((x, before), (x, after), mlp(), loss_fn)


def test_a_batch_that_holds_one_tensor_twice(uncompiled):
    x, other = torch.randn(B, 4), torch.randn(B, 4)
    assert_same_after((x, x), (x, other), nn.Linear(4, 4), lambda m, x, y: (m(x) - y).square().sum(1))


def test_a_course_that_depends_on_the_size(uncompiled):
    model = Fn(lambda s, x: s.l(x) * (2 if len(x) > 50 else 1), l=nn.Linear(4, 3))
    step, eager = both(model)
    for size in (16, 20, 30, 64, 64, 70, 25):
        batch = batch_of(size)
        assert error(step(*batch), eager(*batch)) < 1e-9, size
    assert step.num_graphs == 4


def test_sizes_beyond_the_limit_are_taken_op_by_op(uncompiled):
    model = Fn(lambda s, x: s.l(x) * (1 + len(x) ** 3 % 7), l=nn.Linear(4, 3))
    step, eager = both(model, verify=False)
    for size in range(2, 9):
        batch = batch_of(size)
        assert error(step(*batch), eager(*batch)) < 1e-9, size
    assert (step.num_graphs, step.num_op_by_op) == (4, 3)
    assert "no graph serves all" in step.why_op_by_op


DRAWS = {
    "python": lambda: random.random(),
    "numpy": lambda: np.random.rand(),
    "the system": lambda: random.SystemRandom().random(),
    "secrets": lambda: secrets.randbelow(100),
    "bytes": lambda: os.urandom(1)[0],
    "bytes by a name of one's own": lambda: urandom(1)[0],
    "bytes of the kernel": lambda: os.getrandom(1)[0],
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_of_python_are_refused(name, uncompiled):
    draw, system = DRAWS[name], (os.urandom, os.getrandom, urandom, random._urandom)
    model = Fn(lambda s, x: s.l(x) * draw(), l=nn.Linear(4, 3))
    step, _ = both(model, verify=False)
    with pytest.raises(sw.SamplewiseError, match="Draw them with torch"):
        step(*batch_of())
    assert (os.urandom, os.getrandom, urandom, random._urandom) == system


class Formatter(string.Formatter):
    """An object of a library's class, with attributes that methods of that class name."""

    def __init__(self):
        self.format = self.check_unused_args = 2.0


def test_code_that_reads_attributes_without_naming_them(uncompiled):
    """As einops does; beside a generator that has no state to be compared."""
    model = Fn(lambda s, x: s.l(x) * vars(s.by_name)["format"], l=nn.Linear(4, 3))
    model.by_name, model.generator = Formatter(), random.SystemRandom()
    step, eager = both(model)
    batch = batch_of()
    assert error(step(*batch), eager(*batch)) < 1e-9
    model.by_name.format = 3.0
    assert error(step(*batch), eager(*batch)) < 1e-9


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["coo", "csr", "nested", "jagged"])
def test_batches_whose_sizes_depend_on_values_are_refused(kind, uncompiled):
    x = torch.eye(4, 3).double()
    batch = {
        "coo": lambda: x.to_sparse(),
        "csr": lambda: x.to_sparse_csr(),
        "nested": lambda: torch.nested.nested_tensor([x, x]),
        "jagged": lambda: torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged),
    }[kind]()
    step = sw.per_sample_step(
        nn.Linear(3, 2).double(), lambda model, x: model(x).sum(1), lambda grads: grads.norms(), compile=True
    )
    with pytest.raises(sw.SamplewiseError, match="was given a (sparse|nested) tensor"):
        step(batch)


def test_an_object_in_the_batch_is_refused(uncompiled):
    step, _ = both(nn.Linear(4, 3), lambda m, x, config: m(x).sum(1) * config.scale)
    with pytest.raises(sw.SamplewiseError, match="SimpleNamespace, and would not see it change"):
        step(torch.randn(B, 4), types.SimpleNamespace(scale=2.0))


class Exact(nn.Module):
    """A layer behind a product that is never taken in half precision, as that of rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("turn", torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = x @ self.turn
        return self.layer(x).float()


def test_autocast_is_not_applied_to_a_graph_again():
    model, x = Exact().float(), 100 * torch.randn(B, 4, dtype=torch.float32)
    step, eager = both(model, lambda m, x: m(x).sum(1), norms)
    with torch.autocast("cpu", torch.bfloat16):
        assert error(step(x).loss, eager(x).loss) < 1e-6  # 0.5 % off where the product was rounded


CONSTANTS = {
    "add": lambda s, c: c.add_(s.k),
    "view": lambda s, c: c[1:].add_(s.k[1:]),
    "item": lambda s, c: c.__setitem__(2, s.k[2]),
    "out": lambda s, c: torch.mul(s.k, 1, out=c),
    "foreach": lambda s, c: torch._foreach_add_([c], [s.k]),
    "data": lambda s, c: setattr(c, "data", s.k * 1),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_that_was_written_into_is_none(name, uncompiled):
    def forward(s: Any, x: Tensor) -> Tensor:
        c = torch.zeros(3)
        CONSTANTS[name](s, c)
        return s.l(x) * (2 if c[2] > 1.5 else 5)

    model = Fn(forward, l=nn.Linear(4, 3))
    model.register_buffer("k", torch.ones(3))
    with pytest.raises(sw.SamplewiseError, match="compile=False"):
        both(model, verify=False)[0](*batch_of())


def test_constants_decide_as_they_are(uncompiled):
    """Rows looked up by arange, in order and not: a step of a sample that gets another's row is refused."""
    own = Fn(lambda s, x: s.l(x)[torch.arange(len(x)), 1:].sum(1), l=nn.Linear(4, 3))
    step, eager = both(own, lambda m, x: m(x))
    for size in (4, 7, 12):
        x = torch.randn(size, 4)
        assert error(step(x), eager(x)) < 1e-9
    assert step.num_graphs == 2
    turned = Fn(lambda s, x: s.l(x + x[torch.arange(len(x)).flip(0)]), l=nn.Linear(4, 3))
    with pytest.raises(sw.SamplesMixError):
        both(turned, verify=False)[0](*batch_of())


# random numbers


def homogeneous(drop: Any) -> nn.Module:
    """A model whose loss is linear in each weight: <w, gradient of w> is the loss, if forward and backward drop the same."""
    return Fn(
        lambda s, x: checkpoint(lambda v: s.o(drop(s.i(v))), x, use_reentrant=False).squeeze(1),
        i=nn.Linear(4, 20, bias=False), o=nn.Linear(20, 1, bias=False),
    )  # fmt: skip


def test_a_checkpoint_drops_in_backward_what_it_dropped_in_forward(uncompiled):
    model = homogeneous(lambda h: F.dropout(F.dropout(h, 0.3) * torch.rand_like(h), 0.5))
    step, _ = both(model, lambda m, x: m(x), lambda grads: grads.materialize())
    for size in (3, 3, 4, 6, 1):
        loss, answer = step(torch.randn(size, 4))
        for name, w in model.named_parameters():
            assert error((answer[name] * w).sum((1, 2)), loss) < 1e-9
    assert len({step(torch.ones(2, 4)).loss[0].item() for _ in range(5)}) == 5


def test_a_compiled_checkpoint_drops_the_same():
    model = homogeneous(lambda h: F.dropout(h, 0.5))
    step, _ = both(model, lambda m, x: m(x), lambda grads: grads.materialize())
    loss, answer = step(torch.randn(3, 4))
    assert error((answer["i.weight"] * model.i.weight).sum((1, 2)), loss) < 1e-9


def test_the_first_step_draws_as_later_ones(uncompiled):
    """It is run op by op before it is compiled, and by the graph: a run that is resumed would draw more than one that was not."""
    step, eager = both(with_dropout(0.5))
    for size in (3, 3, 5, 6):
        batch, drawn = batch_of(size), []
        for each in (step, eager):
            torch.manual_seed(size)
            drawn.append(each(*batch))
        assert error(*drawn) < 1e-9, size


def test_a_step_that_draws_nothing_leaves_the_generator_as_it_is(uncompiled):
    step, _ = both(mlp())
    batches = [batch_of(size) for size in (3, 3, 5, 6)]
    before = torch.get_rng_state()
    for batch in batches:
        step(*batch)
    assert torch.equal(torch.get_rng_state(), before)


def seeded_again(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.randn(4, 4)


SEEDS = {
    "generator": lambda x: torch.randn(4, 4, generator=torch.Generator().manual_seed(0)),
    "seed": lambda x: torch.manual_seed(0) and torch.randn(4, 4),
    "fork": seeded_again,
}


@pytest.mark.parametrize("name", SEEDS)
def test_seeds_that_the_code_sets_are_refused(name, uncompiled):
    step, _ = both(Fn(lambda s, x: s.l(x @ SEEDS[name](x)), l=nn.Linear(4, 3)))
    torch.manual_seed(0)
    with pytest.raises(
        sw.SamplewiseError, match=r"randn draws from a torch.Generator of its own, or from a seed .* in a buffer"
    ):
        step(*batch_of())


def test_numbers_that_code_draws_twice_are_refused(uncompiled):
    """Two networks under one mask: whether their inputs are the same is not to be seen."""

    def forward(s: Any, x: Tensor) -> Tensor:
        state = torch.get_rng_state()
        y = F.dropout(s.i(x), 0.5)
        torch.set_rng_state(state)
        return s.o(y + F.dropout(2 * s.i(x), 0.5))

    step, _ = both(Fn(forward, i=nn.Linear(4, 20), o=nn.Linear(20, 3)))
    with pytest.raises(sw.SamplewiseError, match="draws numbers that were drawn before.*compile=False"):
        step(*batch_of())


def test_a_checkpointed_attention_with_dropout(uncompiled):
    """Its op gives several values, some of which are no tensors."""
    attend = lambda s, v: F.scaled_dot_product_attention(*s.i(v).chunk(3, -1), dropout_p=0.5)
    model = Fn(
        lambda s, x: checkpoint(lambda v: s.o(attend(s, v)).sum((1, 2)), x, use_reentrant=False),
        i=nn.Linear(4, 12, bias=False), o=nn.Linear(4, 1, bias=False),
    )  # fmt: skip
    step, _ = both(model, lambda m, x: m(x), lambda grads: grads.materialize())
    loss, answer = step(torch.randn(3, 5, 4))
    assert error((answer["o.weight"] * model.o.weight).sum((1, 2)), loss) < 1e-9


def read_or_not(x: Tensor) -> float:
    try:
        return 2.0 if x.sum().item() > -1e9 else 1.0
    except Exception:
        return 1.0


READ_IN_SECRET = {
    "caught": lambda s, x: s.l(x) * read_or_not(x),
    "caught-of-a-buffer": lambda s, x: s.l(x) * read_or_not(s.l.b),
    "text": lambda s, x: s.l(x) * (2.0 if "1" in str(s.l.b) else 1.0),
}


@pytest.mark.parametrize("name", READ_IN_SECRET)
def test_values_that_are_read_in_secret_are_refused(name, uncompiled):
    layer = nn.Linear(4, 3)
    layer.register_buffer("b", torch.ones(1))
    step, eager = both(Fn(READ_IN_SECRET[name], l=layer))
    batch = batch_of()
    eager(*batch)
    with pytest.raises(sw.SamplewiseError, match="its code reads the value of a tensor"):
        step(*batch)


def test_numbers_in_the_result_follow_the_size(uncompiled):
    step, eager = both(mlp(), query=lambda grads: {"norms": grads.norms(), "size": grads.batch_size})
    for size in (4, 6, 7, 5, 4, 8, 9, 1):
        batch = batch_of(size)
        got, want = step(*batch), eager(*batch)
        assert got.answer["size"] == size
        assert error(got, want) < 1e-9


@pytest.mark.parametrize("sizes", [(5, 7, 6, 9), (4, 6, 5, 9), (4, 5, 6, 7)])
def test_a_course_that_depends_on_the_parity_of_the_size(sizes, uncompiled):
    step, eager = both(Fn(lambda s, x: s.l(x) * (2.0 if len(x) % 2 else 1.0), l=nn.Linear(4, 3)), verify=False)
    for size in sizes:
        batch = batch_of(size)
        assert error(step(*batch), eager(*batch)) < 1e-9
