"""Layers alike asked side by side, and calls alike keyed in one place: the same answers as one by one."""

import pytest
import torch
import torch.nn.functional as F
from cases import Fn
from torch import nn

import samplewise as sw
from samplewise.errors import SamplesMixError, UnattributedError
from samplewise.factors import stacked
from samplewise.factors.base import mended
from samplewise.factors.outer import Outer
from samplewise.flow.memory import key_of
from samplewise.intercept import Intercept
from samplewise.marking import Look
from samplewise.ops.registry import RULES
from samplewise.plan import Rates
from samplewise.testing import oracle, relative_error, run_capture

B, T, D = 4, 6, 5
RATES = Rates(small=1e9, large=1e9, memory=1e10)


def rows(model, *inputs):
    return model(*inputs).flatten(1).pow(2).sum(1)


def assert_right(model, *inputs, **options):
    grads = run_capture(model, rows, *inputs, verify=False, **options)
    truth = oracle(model, rows, *inputs)
    norms = torch.cat([G.reshape(len(G), -1) for G in truth.values()], 1).norm(dim=1)
    assert relative_error(grads.norms(), norms) < 1e-9
    for name, total in grads.clipped_sum(max_norm=1.0).items():
        assert relative_error(total, torch.tensordot((1 / norms).clamp(max=1), truth[name], dims=1)) < 1e-9, name


class Turned(nn.Module):
    """x @ w + b, as in GPT-2."""

    def __init__(self, i, o):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(i, o)), nn.Parameter(torch.randn(o))

    def forward(self, x):
        return torch.addmm(self.b, x.reshape(-1, x.shape[-1]), self.w).view(*x.shape[:-1], -1)


@pytest.mark.parametrize("limit", [None, 2000, 1])  # one stack, several, none
@pytest.mark.parametrize("route", ["gram", "direct", "build"])
@pytest.mark.parametrize("layer", [nn.Linear, Turned])
def test_layers_alike_give_what_each_gives(layer, route, limit, monkeypatch):
    if limit is not None:
        monkeypatch.setattr(stacked, "CHUNK_BYTES", dict.fromkeys(["cpu", "cuda"], limit * stacked.SHARE))
    layers = [module for _ in range(5) for module in (layer(D, D), nn.Tanh())]
    model, x = nn.Sequential(*layers, layer(D, 3)).double(), torch.randn(B, T, D).double()
    for plan in ({"*": route}, {"*": route, "0.*": "direct"}):
        assert_right(model, x, plan=dict(reversed(plan.items())), rates=RATES)


def test_stacks_stay_within_what_a_query_may_build():
    factors = {str(k): Outer.of_rows(torch.randn(B, T, D), torch.randn(B, T, 3)) for k in range(15)}
    each = sum(t.nbytes for t in factors["0"].tensors())
    for limit in (each, stacked.SHARE * each, 15 * stacked.SHARE * each // 16, 100 * each):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stacked, "CHUNK_BYTES", dict.fromkeys(["cpu", "cuda"], limit))
            found, others = stacked.stacks(factors, dict.fromkeys(factors))
        sizes = [len(stack._factors) for stack in found]
        assert sum(sizes) + len(others) == 15
        assert all(size * each <= limit for size in sizes)
        assert bool(found) == (limit >= stacked.SHARE * each)


def test_a_sample_that_cancels_in_one_layer_of_a_stack_is_taken_exactly():
    torch.manual_seed(0)
    a, g = torch.randn(3, B, 1, D).expand(3, B, 2, D).contiguous(), torch.randn(3, B, 2, D)
    g[1, 2, 1] = -g[1, 2, 0] * (1 - 1e-4)
    factors = {str(k): Outer.of_rows(a[k], g[k]) for k in range(3)}
    (stack,), _ = stacked.stacks(factors, dict.fromkeys(factors, "gram"))
    hasty = stack.hasty_sq_norms("gram")
    assert hasty.is_doubtful is not None
    assert hasty.is_doubtful.nonzero().flatten().tolist() == [1 * B + 2]
    with sw.capture(nn.Linear(1, 1)) as grads:
        pass
    truth = torch.einsum("lbto,lbti->lboi", g.double(), a.double()).pow(2).sum((2, 3))
    norms = sum(grads._planner.sq_norms_of_all(factors))
    assert relative_error(norms.double(), truth.sum(0)) < 1e-6
    exactly = mended([hasty])[0].reshape(3, B)
    assert relative_error(exactly[1, 2].double(), truth[1, 2]) < 1e-2  # g[1] + g[0] is 1e-4 of them, in float32


def test_uses_in_half_precision_are_stacked_and_summed_in_float32():
    torch.manual_seed(0)
    a, g, w = torch.randn(B, 40, 32).bfloat16(), torch.randn(B, 40, 48).bfloat16(), torch.rand(B)
    truth = torch.einsum("bto,bti,b->oi", g.double(), a.double(), w.double())
    for factor, expected in ((Outer.of_rows(a, g), truth), (Outer.of_rows(g, a), truth.T)):
        assert factor.is_simple
        total = factor.weighted_sum(w)
        assert total.dtype == torch.float32
        assert relative_error(total.double(), expected) < 1e-2  # w is rounded into a or g on the CPU in float32
        assert relative_error(factor.weighted_sum(w.double()).double(), expected) < 1e-6


CALLS = [
    lambda x, w, c: (torch.Tensor.view, (x, B, -1), {}),
    lambda x, w, c: (torch.Tensor.view, (x, (B, -1)), {}),
    lambda x, w, c: (torch.Tensor.view, (x, torch.Size([B, D])), {}),
    lambda x, w, c: (torch.Tensor.sum, (x, [1]), {"keepdim": True}),
    lambda x, w, c: (torch.Tensor.sum, (x, (1, True)), {"dtype": torch.float64}),
    lambda x, w, c: (torch.add, (x, 1.0), {"alpha": 2}),
    lambda x, w, c: (torch.add, (x, True), {}),
    lambda x, w, c: (torch.add, (x, x), {}),
    lambda x, w, c: (torch.mul, (x, c), {}),
    lambda x, w, c: (F.linear, (x, w, None), {}),
    lambda x, w, c: (torch.cat, ([x, c], 1), {}),
    lambda x, w, c: (torch.Tensor.__getitem__, (x, (slice(None), None, slice(1, 3))), {}),
]


@pytest.mark.parametrize("call", CALLS)
def test_both_ways_to_a_key_give_the_same(call):
    """What one remembers the other must find, and nothing else."""
    model = nn.Linear(D, D)
    model.register_buffer("c", torch.randn(B, D))
    with sw.capture(model) as grads:
        x = grads.mark(torch.randn(B, D))
        mode = grads._intercept
        assert isinstance(mode, Intercept)
        func, args, kwargs = call(x, model.weight, model.c)
        with torch._C.DisableTorchFunction():
            key = mode.alike._key(func, args, kwargs)
            assert key == key_of(func, args, kwargs, Look(mode.marking))
            assert key is not None
            assert list(map(type, key)) == list(map(type, key_of(func, args, kwargs, Look(mode.marking))))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("function", [F.relu, F.silu, lambda x, inplace: F.dropout(x, 0.0, True, inplace)])
def test_functions_taken_for_their_op(function, inplace):
    """With and without `inplace`, in turns."""
    model = Fn(lambda s, x: s.b(function(s.a(x), inplace=s.inplace)), a=nn.Linear(D, D), b=nn.Linear(D, D)).double()
    x = torch.randn(B, T, D).double()
    for model.inplace in (inplace, not inplace, inplace, not inplace):
        assert_right(model, x)


def test_data_written_into_a_constant_by_such_a_function_is_known():
    """relu in place on a constant that data was written into: what was remembered of constants does not speak for it."""
    model, x = Fn(lambda s, x: s.l(_filled(x)), l=nn.Linear(D, D)).double(), torch.randn(B, D).double()
    for _ in range(3):
        assert_right(model, x)


def _filled(x):
    out = x.new_zeros(x.shape)
    out[:, 1:] = x[:, 1:]
    return F.relu(out, inplace=True)


@pytest.mark.parametrize("sizes", [2, [1, 4], (1, 4)])
def test_splits_by_sizes(sizes):
    model = Fn(lambda s, x: torch.cat(s.l(x).split(s.sizes, -1)[::-1], -1) * s.l(x), l=nn.Linear(D, D)).double()
    for model.sizes in (sizes, 3, sizes):
        assert_right(model, torch.randn(B, D).double())


def test_what_was_refused_is_refused_again():
    """A flow that was found before the refusal must not make the next call one without weights."""
    model = Fn(lambda s, x: F.linear(x.sum(0, keepdim=True).expand(B, D), s.l.weight), l=nn.Linear(D, D, bias=False))
    x = torch.randn(B, D)
    for _ in range(3):
        with sw.capture(model, verify=False), pytest.raises(SamplesMixError):
            model(x)
    mixing = Fn(lambda s, x: torch.baddbmm(s.b, x, x.flip(0)), b=nn.Parameter(torch.randn(B, D, D)))
    for _ in range(3):
        with sw.capture(mixing, verify=False), pytest.raises(SamplesMixError):
            mixing(torch.randn(B, D, D))


def test_a_batch_of_one_that_lies_across_both_leading_dimensions():
    model = Fn(lambda s, x: s.a(x.transpose(0, 1)).transpose(0, 1), a=nn.Linear(D, D)).double()
    assert_right(model, torch.randn(1, T, D).double())


def test_the_dtype_of_a_use_is_that_of_this_call():
    """Autocast is not in the key: the same call gives another dtype under it."""
    model, x = nn.Sequential(nn.Linear(D, D), nn.Linear(D, 3)), torch.randn(B, T, D)
    for half in (False, True, False, True):
        with sw.capture(model, verify=False) as grads, torch.autocast("cpu", torch.bfloat16, enabled=half):
            grads.backward(rows(model, x).float())
        dtypes = {note.dtype for notes in grads.notes.values() for note in notes}
        assert dtypes == {torch.bfloat16 if half else torch.float32}


def test_patterns_match_a_tied_parameter_by_any_of_its_names():
    model = Fn(lambda s, x: s.b(s.a(x)), a=nn.Linear(D, D), b=nn.Linear(D, D))
    model.b.weight = model.a.weight
    every = {"a.weight", "a.bias", "b.bias"}
    assert set(sw.capture(model).parameters) == every
    assert set(sw.capture(model, params=["b.*"]).parameters) == {"a.weight", "b.bias"}
    assert set(sw.capture(model, exclude=["b.weight"]).parameters) == {"a.bias", "b.bias"}
    assert sw.capture(model)._aliases == {**{name: name for name in every}, "b.weight": "a.weight"}
    assert list(sw.capture(model).parameters) == [name for name, _ in model.named_parameters()]


def _into_constant(s, x):
    filled = torch.zeros(x.shape, dtype=x.dtype)
    filled += s.a(x)
    return s.b(filled)


def _twice(s, x):
    y = s.a(x)
    y += y.tanh()
    return s.b(y)


def _through_a_view(s, x):
    y = s.a(x) + 0
    y[:, :2].mul_(2.0)
    y.mT[3:].add_(x.mT[:2])
    return s.b(y)


def _with_a_weight(s, x):
    y = s.a(x) * 1
    y += s.w
    y.mul_(s.w)
    return s.b(y)


IN_PLACE = [
    lambda s, x: s.b(s.a(x).relu_()),
    lambda s, x: s.b(s.a(x).mul_(s.c).add_(x, alpha=3).clamp_(-1.0, 1.0)),
    lambda s, x: s.b(torch.nn.init.zeros_(s.a(x) * 1).add_(x * 2).requires_grad_()) + s.a(x),
    _into_constant,
    _twice,
    _through_a_view,
    _with_a_weight,
]


@pytest.mark.parametrize("function", IN_PLACE)
def test_ops_in_place(function):
    torch.manual_seed(0)
    model = Fn(function, a=nn.Linear(D, D), b=nn.Linear(D, D), w=nn.Parameter(torch.randn(D))).double()
    model.register_buffer("c", torch.randn(D).double())
    for _ in range(3):
        assert_right(model, torch.randn(B, D).double())


def test_an_op_in_place_that_mixes_samples_is_refused_each_time():
    model, x = Fn(lambda s, x: s.b(s.a(x).add_(x.flip(0))), a=nn.Linear(D, D), b=nn.Linear(D, D)), torch.randn(B, D)
    for _ in range(3):
        with pytest.raises(SamplesMixError):
            run_capture(model, rows, x, verify=False)


def test_ops_in_place_need_not_be_understood_again(monkeypatch):
    model = Fn(lambda s, x: s.b(F.relu(s.a(x).mul_(2.0), inplace=True)), a=nn.Linear(D, D), b=nn.Linear(D, D)).double()
    model.a.register_forward_hook(lambda module, args, y: y.add_(1.0))
    assert_right(model, torch.randn(B, D).double())
    assert_right(model, torch.randn(B, D).double())
    names, understood = [], Intercept._understood

    def noted(self, kind, *rest):
        names.append(kind.name)
        return understood(self, kind, *rest)

    monkeypatch.setattr(Intercept, "_understood", noted)
    assert_right(model, torch.randn(B, D).double())
    assert names
    assert not {"relu", "mul", "add"} & set(names)


SPREAD = [
    lambda s, x: s.a * x + s.b,
    lambda s, x: x * s.a * s.a,
    lambda s, x: torch.add(x, s.a, alpha=2) / s.b,
    lambda s, x: torch.sub(input=x, other=s.a).pow(2),
    lambda s, x: torch.where(x > 0, s.a, x) * s.b,
    lambda s, x: torch.addcmul(x, s.a, s.a, value=3) - s.b,
    lambda s, x: torch.addcmul(s.a, x, s.b),
    lambda s, x: x.clamp(min=s.a, max=s.b + 3),
    lambda s, x: torch.lerp(s.a, x, 0.3).maximum(s.b),
    lambda s, x: (x.transpose(0, 1) * s.b[:, None] * s.a.sum()).transpose(0, 1) + s.b * s.c,
    lambda s, x: x * s.scalar + (s.b > x),
    lambda s, x: torch.cat([s.a.expand_as(x) * x, x], 1) * s.b[0],
]
"""Weights [T, D], [D] and [] taken element by element with data."""


@pytest.mark.parametrize("function", SPREAD)
@pytest.mark.parametrize("shape", [(T, D), (D,), (1, D)])
def test_weights_met_element_by_element(function, shape):
    torch.manual_seed(0)
    a, b = nn.Parameter(torch.rand(shape) + 0.5), nn.Parameter(torch.rand(T, D) + 1)
    model = Fn(function, a=a, b=b, scalar=nn.Parameter(torch.tensor(0.7))).double()
    model.register_buffer("c", torch.rand(D).double())
    for _ in range(3):
        assert_right(model, torch.randn(B, T, D).double())


def test_weights_met_element_by_element_need_not_be_understood_again(monkeypatch):
    model = Fn(
        lambda s, x: s.w * torch.add(s.l(x) * s.w, s.b),
        l=nn.Linear(D, D),
        w=nn.Parameter(torch.rand(D)),
        b=nn.Parameter(torch.rand(T, D)),
    )
    assert_right(model.double(), torch.randn(B, T, D).double())
    names, understood = [], Intercept._understood

    def noted(self, kind, *rest):
        names.append(kind.name)
        return understood(self, kind, *rest)

    monkeypatch.setattr(Intercept, "_understood", noted)
    assert_right(model, torch.randn(B, T, D).double())
    assert names
    assert not {"mul", "add"} & set(names)


def test_a_rule_that_comes_later_is_asked(monkeypatch):
    model, asked = Fn(lambda s, x: x * s.w, w=nn.Parameter(torch.rand(D))).double(), []

    def own(meeting, *args, **kwargs):
        asked.append(meeting.name)
        return NotImplemented

    for _ in range(2):
        assert_right(model, torch.randn(B, T, D).double())
    monkeypatch.setitem(RULES, torch.Tensor.mul, own)
    assert_right(model, torch.randn(B, T, D).double())
    assert asked == ["mul"]


def test_an_expanded_parameter_has_all_its_elements():
    """Its memory repeats, but its gradient does not: unlike that of a value which code has expanded."""
    repeated = torch.rand(1, D, dtype=torch.float64).expand(T, D)
    for w in (repeated, repeated.contiguous(), repeated):
        assert_right(Fn(lambda s, x: x * s.w, w=nn.Parameter(w)), torch.randn(B, T, D).double())


class Masked(torch.autograd.Function):
    """w expanded; backward gives each place another weight."""

    @staticmethod
    def forward(ctx, w, mask):
        ctx.save_for_backward(mask)
        return w.expand(len(mask), -1)

    @staticmethod
    def backward(ctx, g):
        return (g * ctx.saved_tensors[0]).sum(0, keepdim=True), None


def _hooked(s, x):
    expanded = s.w.expand(T, D)
    expanded.register_hook(lambda g: g * s.mask)
    return x * expanded


REPEATED = {
    "view of memory that repeats": lambda s, x: x + s.r[:T],
    "turned": lambda s, x: x + s.r.T[:, :T].T,
    "expanded memory that repeats": lambda s, x: x + s.r.expand(2, -1, -1)[1, 1 : T + 1],
    "token of memory that repeats": lambda s, x: torch.cat(
        [s.r[:1].expand(len(x), 1, D), s.r[:2].expand(len(x), 2, D), x], 1
    ),
    "hooked": _hooked,
    "by a Function": lambda s, x: x * Masked.apply(s.w, s.mask),
    "expanded once more": lambda s, x: x * Masked.apply(s.w, s.mask).expand(len(x), T, D),
    "expanded": lambda s, x: x * s.w.expand(T, D)[None].expand(len(x), T, D).transpose(0, 1).transpose(0, 1),
}


@pytest.mark.parametrize("name", REPEATED)
@pytest.mark.parametrize("num_samples", [1, B])
def test_places_of_a_weight_that_share_memory(name, num_samples):
    repeating = torch.rand(1, D, dtype=torch.float64).expand(T + 2, D)
    model = Fn(REPEATED[name], w=nn.Parameter(torch.rand(1, D).double()), r=nn.Parameter(repeating))
    model.register_buffer("mask", torch.arange(1.0, T + 1).double()[:, None])
    for _ in range(2):
        x = torch.randn(num_samples, T, D).double()
        grads = run_capture(model, rows, x, verify=False)
        model.zero_grad()
        rows(model, x).sum().backward()
        for name_of in grads:
            assert relative_error(grads[name_of].sum(), dict(model.named_parameters())[name_of].grad) < 1e-9
        model.zero_grad()


@pytest.mark.parametrize("write", [torch.Tensor.add_, torch.Tensor.copy_, torch.Tensor.__iadd__])
def test_data_written_into_a_constant_that_an_older_view_shows_is_refused_each_time(write):
    def through_the_view(s, x):
        filled = torch.zeros(B, D)
        view = filled[:, :]
        write(filled, x)
        return s.b(view * s.a(x))

    model, x = Fn(through_the_view, a=nn.Linear(D, D), b=nn.Linear(D, D)), torch.randn(B, D)
    for _ in range(3):
        with pytest.raises(UnattributedError, match="memory that it shares"):
            run_capture(model, rows, x, verify=False)


@pytest.mark.parametrize(
    "write", [F.relu, F.silu, lambda t, inplace: F.dropout(t, 0.5, True, inplace), lambda t, inplace: t.mul_(3.0)]
)
def test_a_sum_over_samples_changed_in_place_is_refused_through_a_view_of_it(write):
    model, x = Fn(lambda s, x: s.b(s.a(x)), a=nn.Linear(D, D), b=nn.Linear(D, D)), torch.randn(B, D)
    for _ in range(3):
        with sw.capture(model) as grads, pytest.raises(UnattributedError, match="memory that it shares"):
            total = rows(model, x).sum()
            view = total.view(())
            write(total, inplace=True)
            view.backward()
        assert not len(grads)


def test_a_mask_turned_around_writes_into_nothing():
    def masked(s, x):
        s.mask = ~(x > 0)
        return s.b(s.a(x).masked_fill(s.mask, 0.0))

    model = Fn(masked, a=nn.Linear(D, D), b=nn.Linear(D, D)).double()
    assert_right(model, torch.randn(B, D).double())
    with sw.capture(model, verify=False) as grads:
        model(torch.randn(B, D).double())
        assert not grads._intercept.marking.written
