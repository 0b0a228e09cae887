"""What is remembered of one call must not be used for another that only looks like it."""

import gc
import threading

import pytest
import torch
import torch.nn.functional as F
from cases import Fn
from torch import nn

import samplewise as sw
from samplewise.errors import SamplesMixError, SamplewiseError
from samplewise.factors.base import Hasty, mended
from samplewise.factors.dense import Dense
from samplewise.factors.outer import Outer
from samplewise.factors.together import small
from samplewise.flow import memory
from samplewise.flow.memory import REMEMBERED, key_of
from samplewise.marks import Marks
from samplewise.samples import Layout, one_each
from samplewise.testing import oracle, relative_error, run_capture
from samplewise.verification.first_use import _flags

B, D = 4, 5


def rows(model, *inputs):
    return model(*inputs).flatten(1).pow(2).sum(1)


def assert_right(model, *inputs, **options):
    grads = run_capture(model, rows, *inputs, verify=False, **options)
    truth = oracle(model, rows, *inputs)
    assert set(grads) == set(truth)
    for name, G in truth.items():
        assert relative_error(grads[name].materialize(), G) < 1e-9, name


def twice(model, *inputs, **options):
    """Also when every call has been seen before."""
    for _ in range(2):
        assert_right(model, *inputs, **options)


def test_one_tensor_twice_and_two_tensors():
    """A rule that kept one tensor for both sides must not be taken for one that kept two."""
    weight = nn.Parameter(torch.randn(3, D, D).double())
    x, y = torch.randn(B, D).double(), torch.randn(B, D).double()
    for both in (lambda s, x, y: F.bilinear(x, x, s.w), lambda s, x, y: F.bilinear(x, y, s.w)) * 2:
        assert_right(Fn(both, w=weight), x, y)


@pytest.mark.parametrize("first", ["weight", "bias"])
def test_frozen_parameters_of_the_same_shapes(first):
    model, x = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)).double(), torch.randn(B, D).double()
    for name in (first, "bias", "weight", first):
        for layer in (model[0], model[2]):
            layer.weight.requires_grad_(name == "weight")
            layer.bias.requires_grad_(name == "bias")
        assert_right(model, x)
    model.requires_grad_(True)
    assert_right(model, x)


def test_numbers_that_are_equal_and_not_the_same():
    model = Fn(lambda s, x: torch.addmm(s.b, x, s.w, beta=s.beta, alpha=s.alpha), b=nn.Parameter(torch.randn(3).double()))
    model.w = nn.Parameter(torch.randn(D, 3).double())
    x = torch.randn(B, D).double()
    for model.beta, model.alpha in [(1, 1), (2, 1), (1, 3.0), (1.0, 1.0), (0.5, 2), (1, 1)]:
        assert_right(model, x)
    assert key_of(torch.add, (1,), {}, id) != key_of(torch.add, (True,), {}, id) != key_of(torch.add, (1.0,), {}, id)


def test_parameters_that_come_go_and_are_tied_between_captures():
    model, x = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)).double(), torch.randn(B, D).double()
    twice(model, x)
    model.append(nn.Linear(D, D).double())
    twice(model, x)
    model[3].weight = model[0].weight
    twice(model, x)
    model[0].bias = None
    twice(model, x)
    model[2].weight = nn.Parameter(torch.randn(D, D).double())
    twice(model, x)
    del model[3]
    twice(model, x)


def test_a_constant_does_not_speak_for_a_tensor_from_outside():
    """A buffer [B] beside outputs [B, 1] is the model's own affair; labels of that shape are a mistake."""
    model = Fn(lambda s, x: s.l(x), l=nn.Linear(D, 1)).double()
    model.register_buffer("c", torch.randn(B).double())
    x, labels = torch.randn(B, D).double(), torch.randn(B).double()
    for _ in range(2):
        with sw.capture(model, verify=False):
            _ = model(x) - model.c
    with sw.capture(model, verify=False), pytest.raises(SamplesMixError, match="broadcasts"):
        _ = model(x) - labels


def test_masks_of_the_same_shape_and_other_values():
    """Attention within leading samples is known by shapes; behind a mask, each mask is looked at."""
    model = Fn(lambda s, x: F.scaled_dot_product_attention(s.l(x), s.l(x), s.l(x), attn_mask=s.mask), l=nn.Linear(D, D))
    model, x = model.double(), torch.randn(1, 2 * B, D).double()
    ids = torch.arange(B).repeat_interleave(2)
    options = {"sample_ids": ids, "batch_dim": 1, "verify": False}
    apart = ids.unsqueeze(0) == ids.unsqueeze(1)
    for _ in range(2):
        model.mask = apart
        with sw.capture(model, **options) as grads:
            grads.backward(model(x).pow(2).sum(2).squeeze(0))
        model.mask = torch.ones_like(apart)
        with sw.capture(model, **options) as grads, pytest.raises(SamplesMixError, match="scaled_dot_product_attention"):
            grads.backward(model(x).pow(2).sum(2).squeeze(0))


def test_means_of_losses_over_other_targets():
    """Whether a mean weighs samples alike is in the targets, some of which do not count."""
    model, x = nn.Linear(D, 3).double(), torch.randn(B, D).double()
    all_count, some_count = torch.tensor([0, 1, 2, 0]), torch.tensor([0, 1, -100, 0])
    for reduction in ("sum", "mean"):
        for _ in range(2):
            with sw.capture(model, loss_reduction=reduction) as grads:
                F.cross_entropy(model(x), all_count, reduction=reduction).backward()
            truth = oracle(model, lambda m, x, y: F.cross_entropy(m(x), y, reduction="none"), x, all_count)
            assert relative_error(grads["weight"].materialize(), truth["weight"]) < 1e-9
    with sw.capture(model, loss_reduction="mean"), pytest.raises(SamplesMixError, match="alike"):
        F.cross_entropy(model(x), some_count).backward()


WRITES = {
    "in place": lambda buffer, x: buffer.copy_(x),
    "out=": lambda buffer, x: torch.add(x, x, out=buffer),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_one_every_time(name):
    """A view made before the write holds samples after it, the second time too."""

    def forward(s, x):
        buffer = torch.zeros(B, D).double()
        view = buffer.view(-1)
        WRITES[name](buffer, x)
        return s.l(view.view(B, D)) * x

    model, x = Fn(forward, l=nn.Linear(D, D)).double(), torch.randn(B, D).double()
    for _ in range(3):
        with sw.capture(model, verify=False) as grads, pytest.raises(SamplewiseError):
            grads.backward(rows(model, x))


def test_sizes_of_the_batch_in_turns():
    model = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, 3)).double()
    for num in (3, 4, 3, 1, 4, 0, 3):
        if num:
            assert_right(model, torch.randn(num, D).double())
        assert_right(model, torch.randn(max(num, 1), 2, D).double())


def test_layers_alike_are_one_to_the_memory():
    """Every entry beyond those of one layer would drive out others in deep models."""
    REMEMBERED.clear()
    of_depth = []
    for depth in (2, 8):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Tanh()) for _ in range(depth)])
        run_capture(model, rows, torch.randn(B, 3, D), verify=False)
        of_depth.append(len(REMEMBERED))
    assert of_depth[0] == of_depth[1]


def test_sizes_that_come_again_are_known():
    """Poisson sampling draws dozens of sizes."""
    model, sizes = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, 3)), range(2, 150)
    nums = []
    for _ in range(2):
        for size in sizes:
            run_capture(model, rows, torch.randn(size, 2, D), verify=False)
        nums.append(len(REMEMBERED))
    assert nums[0] == nums[1] > len(sizes)


@pytest.mark.parametrize(("bound", "most"), [("MAX_REMEMBERED", 8), ("MAX_BYTES", 100_000)])
def test_what_is_remembered_is_bounded(bound, most, monkeypatch):
    """Rows folded to (B·T) have ids as long as they are."""
    monkeypatch.setattr(memory, bound, most)
    REMEMBERED.clear()
    model, nums, num_bytes = nn.Linear(D, 3), [], []
    for T in range(500, 540):
        x = torch.randn(B, T, D)
        with sw.capture(model, verify=False) as grads:
            y = model(grads.mark(x).flatten(0, 1)).reshape(B, T, 3)
            grads.backward(y.sum((1, 2)))
        nums.append(len(REMEMBERED))
        num_bytes.append(REMEMBERED.num_bytes)
    assert max(nums if bound == "MAX_REMEMBERED" else num_bytes) <= 2 * most
    assert min(num_bytes) > 0


# --- marks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [False, True])
def test_marks_of_the_dead_are_swept_out(at_once):
    marks, living = Marks(at_once=at_once), [torch.zeros(1) for _ in range(100)]
    for t in living:
        marks.set(t, "living")
    for _ in range(20_000):
        marks.set(torch.zeros(1), "dead")
    assert len(marks.entries) <= (102 if at_once else 4097)
    assert [marks.get(t) for t in living] == ["living"] * 100
    assert sum(marks.get(torch.zeros(1)) is not None for _ in range(1000)) == 0  # though ids come again


def test_a_derived_weight_that_died_lets_its_graph_go():
    model, x = nn.Linear(D, D), torch.randn(B, D)
    with sw.capture(model) as grads:
        for _ in range(5):
            model(x)
            _ = model.weight * torch.ones(D, D)
        del _
        gc.collect()
        assert not grads.weights._derived.tensors() and not grads.weights._derived.entries


# --- calls of modules ------------------------------------------------------------------------------------------------


def test_parts_called_after_the_whole_and_after_an_error():
    def parts(s, x):
        if s.fails:
            raise ZeroDivisionError
        return s.b(s.a(x))

    model, x = Fn(parts, a=nn.Linear(D, D), b=nn.Linear(D, D)).double(), torch.randn(B, D).double()
    model.fails = True
    with sw.capture(model, verify=False) as grads:
        with pytest.raises(ZeroDivisionError):
            model(x)
        model.fails = False
        grads.backward((model.b(model.a(x)) + model(x)).pow(2).sum(1))
    whole = oracle(model, lambda m, x: (2 * m(x)).pow(2).sum(1), x)
    assert all(relative_error(grads[n].materialize(), G) < 1e-9 for n, G in whole.items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any(m._forward_hooks_always_called or m._forward_pre_hooks_with_kwargs for m in model.modules())


def test_hooks_are_gone_after_an_interrupt():
    """Of which modules tell nobody, so that the call seems to go on."""

    def interrupted(s, x):
        raise KeyboardInterrupt

    model = Fn(interrupted, a=nn.Linear(D, D))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), sw.capture(model, verify=False):
            model(torch.randn(B, D))
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_hooks_of_two_threads_on_one_model():
    """One runs its forward, without hooks inside, while the other opens, runs and closes its own block."""
    inside, go_on = threading.Event(), threading.Event()

    def waiting(s, x):
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            go_on.wait(10)
        return s.b(s.a(x))

    model, x = Fn(waiting, a=nn.Linear(D, D), b=nn.Linear(D, D)).double(), torch.randn(B, D).double()
    truth = oracle(model, rows, x)
    got = {}

    def other():
        got["other"] = run_capture(model, rows, x, verify=False).materialize()

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(10)
    with sw.capture(model, verify=False) as grads:
        got["parts"] = grads
        grads.backward(model.b(model.a(x)).pow(2).sum(1))
        go_on.set()
        thread.join()
        assert model.a._forward_pre_hooks  # still watched here
    got["parts"] = grads.materialize()
    for G in got.values():
        assert all(relative_error(G[name], G_true) < 1e-9 for name, G_true in truth.items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# --- many parameters at once -----------------------------------------------------------------------------------------


def test_small_gradients_together():
    G = {"a": torch.randn(B, 3), "b": torch.randn(B), "c": torch.randn(B, 2, 2).half(), "z": torch.randn(B, 2).cfloat()}
    G["large"], G["w"] = torch.randn(B, 1 << 15), torch.randn(B, 2).cfloat()
    groups, others = small({name: Dense(t) for name, t in G.items()})
    assert sorted(others) == ["large"] and len(groups) == 2
    truth = sum(
        t.abs().float().square().flatten(1).sum(1) if t.ndim > 1 else t.square() for n, t in G.items() if n != "large"
    )
    torch.testing.assert_close(sum(group.sq_norms() for group in groups), truth)
    w, keep = torch.randn(2), torch.tensor([3, 1])
    wide = {name: torch.cfloat if t.is_complex() else torch.float32 for name, t in G.items()}
    half = {name: torch.cfloat if t.is_complex() else torch.bfloat16 for name, t in G.items()}
    for dtypes in (wide, half, wide | {"b": torch.bfloat16}):
        for name, total in {name: t for group in groups for name, t in group.weighted_sums(w, keep, dtypes).items()}.items():
            expected = torch.tensordot(w.to(wide[name]), G[name][keep].to(wide[name]), dims=1)
            torch.testing.assert_close(total, expected.to(dtypes[name]))
            assert total.untyped_storage().nbytes() == total.nbytes  # nothing hangs on it


def test_a_sample_that_is_not_finite_stays_alone():
    model = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, 3)).double()
    x = torch.randn(B, D).double()
    x[1] = torch.nan
    grads = run_capture(model, rows, x, verify=False)
    norms = grads.norms()
    assert norms.isfinite().tolist() == [True, False, True, True]
    without = run_capture(model, rows, x[[0, 2, 3]], verify=False).clipped_sum(max_norm=0.5)
    for name, total in grads.clipped_sum(max_norm=0.5).items():
        torch.testing.assert_close(total, without[name])


def test_doubtful_norms_of_several_parameters_in_one_look():
    exact = {0: torch.tensor([1.0, 2.0, 3.0]), 2: torch.tensor([4.0, 5.0, 6.0])}
    asked = []

    def of(i):
        return lambda samples: asked.append((i, samples.tolist())) or exact[i][samples]

    nan = torch.full((3,), torch.nan)
    hasty = [
        Hasty.of_terms(torch.tensor([9.0, 0.0, 0.0]), torch.ones(3), of(0)),
        Hasty(torch.tensor([7.0, 7.0, 7.0])),
        Hasty.of_terms(torch.tensor([0.0, 9.0, 9.0]), torch.ones(3), of(2)),
        Hasty.of_terms(nan, torch.ones(3), of(2)),
    ]
    first, second, third, fourth = mended(hasty)
    assert first.tolist() == [9, 2, 3] and second.tolist() == [7, 7, 7] and third.tolist() == [4, 9, 9]
    assert fourth.tolist() == [4, 5, 6], "terms overflow where their sum need not"
    assert asked == [(0, [1, 2]), (2, [0]), (2, [0, 1, 2])]
    assert mended([]) == [] and mended([Hasty(nan)])[0] is nan


def test_layouts_that_are_equal_are_one_object_per_kind():
    ids = torch.tensor([[0], [1]])
    first = one_each(Layout(ids, 2))
    assert one_each(Layout(ids.clone(), 2)) is first
    others = [Layout(ids, 3), Layout(ids.T.contiguous(), 2), Layout(ids.flip(0), 2), Layout(ids, 2, discrete=True)]
    assert len({id(one_each(layout)) for layout in (first, *others)}) == 5


@pytest.mark.parametrize("keep", ["gradients", "norms", "graph"])
def test_questions_inside_the_block_are_told_to_no_mode_and_answered_the_same(keep):
    model, x = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)).double(), torch.randn(B, D).double()
    with sw.capture(model, keep=keep, verify=False) as grads:
        grads.backward(rows(model, x))
        with Told() as told:
            inside = grads.norms()
        clipped = grads.clipped_sum(max_norm=1.0) if keep != "norms" else {}
    assert told.calls == []
    truth = oracle(model, rows, x)
    norms = torch.cat([G.flatten(1) for G in truth.values()], 1).norm(dim=1)
    assert relative_error(inside, norms) < 1e-9
    for name, total in clipped.items():
        assert relative_error(total, torch.tensordot((1 / norms).clamp(max=1), truth[name], dims=1)) < 1e-9


class Told(torch.overrides.TorchFunctionMode):
    """Notes the calls that a mode is told of."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


def test_an_input_changed_between_two_uses_of_a_parameter_is_noticed():
    """The second use must not be taken for news of the first."""
    model, x, z = nn.Linear(D, D).double(), torch.randn(B, D).double(), torch.randn(B, D).double()
    with sw.capture(model, verify=False) as grads:
        first, second = rows(model, x), rows(model, z)
        grads.backward(first)
        x.add_(1)
        grads.backward(second)
    with pytest.raises(SamplewiseError, match="changed in place"):
        grads["weight"].sq_norms()


def test_uses_of_one_shape_in_other_dtypes_are_weighed_by_their_own():
    a, g = torch.randn(B, 2, D), torch.randn(B, 2, 3)
    uses = [Outer.of_rows(a.to(dtype), g.to(dtype)).use() for dtype in (torch.float32, torch.float64, torch.bfloat16)]
    assert [use.itemsize for use in uses] == [4, 8, 2]
    assert [use.kept for use in uses] == [4, 8, 4]
    assert [use.held for use in uses] == [B * 2 * (D + 3) * size for size in (4, 8, 2)]
    assert Outer.of_rows(a.transpose(1, 2), torch.randn(B, D, 3)).use() != uses[0]


def test_a_flag_of_one_module_is_not_one_of_the_next():
    """Calls that were verified are known by the flags of the modules, each by its own."""
    seen = set()
    for place in (0, 1):
        modules = [nn.Linear(D, D), nn.Linear(D, D)]
        of_one = [flag for flag in _flags(modules[:1]) if not isinstance(flag, type)]
        for k, flag in enumerate(of_one):  # as if the two had three times the flags of one
            setattr(modules[place], f"flag_{k}", flag)
        seen.add(_flags(modules))
    modules = [nn.Linear(D, D).eval(), nn.Linear(D, D)]
    assert len(seen | {_flags(modules), _flags(modules[::-1]), _flags(modules[:1])}) == 5


def test_a_call_that_is_refused_as_it_begins_ends():
    """The next call is of the outermost module again, and all of its parts are watched."""
    model, x = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D)).double(), torch.randn(B, D).double()
    with sw.capture(model, verify=False, batch_size=B) as grads:
        with pytest.raises(SamplewiseError, match="rows"):
            model(x[:2])
        assert not grads.is_inside
        grads.backward(model[1](model[0](x)).pow(2).sum(1))
    truth = oracle(model, rows, x)
    assert all(relative_error(grads[n].materialize(), G) < 1e-9 for n, G in truth.items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Hides(nn.Sequential):
    """Says that its second part has no parameters."""

    def named_parameters(self, *args, **kwargs):
        return ((name, p) for name, p in super().named_parameters(*args, **kwargs) if not name.startswith("1."))


class Renames(nn.Sequential):
    def named_parameters(self, *args, **kwargs):
        return ((f"inner.{name}", p) for name, p in super().named_parameters(*args, **kwargs))


class Shut(nn.Sequential):
    """Does not say that it has parts."""

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        yield prefix, self


@pytest.mark.parametrize(
    "make",
    [
        lambda: Hides(nn.Linear(D, D), nn.Linear(D, D)),
        lambda: Renames(nn.Linear(D, D), nn.Linear(D, D)),
        lambda: nn.Sequential(nn.Linear(D, D), Shut(nn.Linear(D, D))),
    ],
    ids=["hides", "renames", "shut"],
)
def test_parameters_are_those_that_the_model_names(make):
    """A model that has its own words for what it holds is believed, and what it hides has an ordinary gradient."""
    model, x = make().double(), torch.randn(B, D).double()
    with sw.capture(model, verify=False) as grads:
        grads.backward(rows(model, x))
    truth = oracle(model, rows, x)
    assert list(grads) == [name for name, _ in model.named_parameters()]
    assert all(relative_error(grads[n].materialize(), G) < 1e-9 for n, G in truth.items())
    assert relative_error(grads.norms(), torch.cat([G.flatten(1) for G in truth.values()], 1).norm(dim=1)) < 1e-9
    named = {id(p) for _, p in model.named_parameters()}
    assert all(
        (p.grad is None) == (id(p) in named) for m in model.modules() for p in m._parameters.values() if p is not None
    )


def test_an_error_of_the_model_comes_out_as_it_is():
    """Also where the model was given a hook of its own during the call that fails."""
    model, x = Fn(lambda s, x: _fails() if x.shape[1] != D else x @ s.w, w=(D, D)).double(), torch.randn(B, D).double()
    with sw.capture(model, verify=False) as grads:
        model.register_forward_pre_hook(lambda m, args: _hooked(m))
        with pytest.raises(ZeroDivisionError):
            model(x[:, :1])
        grads.backward(rows(model, x))
    assert relative_error(grads["w"].materialize(), oracle(model, rows, x)["w"]) < 1e-9


def _fails():
    raise ZeroDivisionError


def _hooked(module):
    module.register_forward_hook(lambda m, args, out: None)
