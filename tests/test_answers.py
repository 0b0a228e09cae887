"""What the queries promise beyond the case table: groups, two captures, scale, streams, small batches, bad samples, rounding."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from cases import BY_NAME, Fn
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

import samplewise as sw
from samplewise.errors import SamplewiseError
from samplewise.factors import base
from samplewise.ops import norm
from samplewise.testing import oracle, relative_error, relative_errors, run_capture

B = 4
TOLERANCE = 1e-9  # float64


def data(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def mlp():
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def losses(model, x):
    return model(x).square().flatten(1).sum(1)


def flat(truth):
    return torch.cat([G.flatten(1) for G in truth.values()], 1)


# --- groups ---


def test_groups_by_pattern_and_by_name():
    model, x = mlp(), data(B, 5)
    grads, truth = run_capture(model, losses, x), oracle(model, losses, x)
    weights, biases = ({n: G for n, G in truth.items() if kind in n} for kind in ("weight", "bias"))
    for groups in (["*.weight", "*"], {"*.weight": "*.weight", "*": ["0.bias", "2.bias"]}):
        norms = grads.norms(groups=groups)
        assert list(norms) == ["*.weight", "*"]
        assert relative_error(norms["*.weight"], flat(weights).norm(dim=1)) < TOLERANCE
        assert relative_error(norms["*"], flat(biases).norm(dim=1)) < TOLERANCE
    got = grads.normalized_sum(groups=["*.weight", "*"])["0.bias"]
    assert relative_error(got, ((1 / (norms["*"] + 0.01))[:, None] * truth["0.bias"]).sum(0)) < TOLERANCE


def test_one_group_of_all_is_flat_clipping():
    grads = run_capture(mlp(), losses, data(B, 5))
    for n, G in grads.clipped_sum(max_norm=0.5, groups="*").items():
        assert relative_error(G, grads.clipped_sum(max_norm=0.5)[n]) < TOLERANCE


def test_a_shared_parameter_is_in_the_group_of_any_of_its_names():
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)}).double()
    model["b"].weight = model["a"].weight
    grads = run_capture(model, lambda model, x: model["b"](model["a"](x)).sum(1), data(B, 3))
    assert relative_error(grads.norms(groups=["b.*"])["b.*"], grads.norms()) < TOLERANCE


@pytest.mark.parametrize(("groups", "why"), [
    (["0.*"], "no group has '2.weight', '2.bias'; a last group with the pattern"),
    (["*", "0.*"], "group '0.*' .* has no parameters: an earlier group has all"),
    ({"head": ["haed.*"], "rest": "*"}, "group 'head' .haed.*. has no parameters: no captured parameter is called so"),
])  # fmt: skip
def test_groups_that_do_not_divide_the_parameters_are_refused(groups, why):
    grads = run_capture(mlp(), losses, data(B, 5))
    with pytest.raises(ValueError, match=why):
        grads.norms(groups=groups)


def test_bounds_that_do_not_fit_the_groups_are_refused():
    grads = run_capture(mlp(), losses, data(B, 5))
    with pytest.raises(ValueError, match="max_norm has bounds for .'0'., but the groups are .'0', '2'."):
        grads.clipped_sum(max_norm={"0": 1.0}, groups="layer")
    with pytest.raises(ValueError, match="needs the groups"):
        grads.clipped_sum(max_norm={"0": 1.0})
    with pytest.raises(ValueError, match="max_norm must be positive, got 0"):
        grads.clipped_sum(max_norm={"0": 1.0, "2": 0}, groups="layer")


# --- two captures ---

TWO = {
    "mlp": (mlp, lambda n: data(n, 5)),
    "sequence": (lambda: nn.Linear(20, 30).double(), lambda n: data(n, 2, 20)),
    "conv": (lambda: nn.Conv2d(2, 3, 3).double(), lambda n: data(n, 2, 5, 5)),
    "embedding": (lambda: nn.Embedding(7, 3).double(), lambda n: torch.randint(7, (n, 5))),
    "tied": (BY_NAME["tied-embedding-head"].make, lambda n: torch.randint(7, (n, 5))),
    "experts": (lambda: Fn(lambda s, x: x @ s.w, w=(2, 5, 3)), lambda n: data(n, 2, 6, 5)),
}


@pytest.mark.parametrize("name", TWO)
def test_products_of_the_samples_of_two_captures(name):
    make, batch = TWO[name]
    model = make().double()
    x, y = batch(4), batch(3)
    a, b = run_capture(model, losses, x), run_capture(model, losses, y)
    G, H = flat(oracle(model, losses, x)), flat(oracle(model, losses, y))
    assert relative_error(a.gram(b), G @ H.T) < TOLERANCE
    assert relative_error(a.dots(b), G @ H.T) < TOLERANCE
    assert relative_error(a.cosines(b), F.normalize(G) @ F.normalize(H).T) < TOLERANCE
    assert relative_error(a.dots(b.sum()), G @ H.sum(0)) < TOLERANCE
    assert relative_error(a.cosines(b.sum()), F.normalize(G) @ F.normalize(H.sum(0), dim=0)) < TOLERANCE
    for n in a:
        assert relative_error(a[n].dots(b[n]), a[n].gram(b[n])) == 0
        assert relative_error(a[n].cosines(b[n].sum()), a[n].dots(b[n].sum()) / a[n].norms() / b[n].sum().norm()) < TOLERANCE


def test_captures_of_different_parameters_are_refused():
    model, x = mlp(), data(B, 5)
    with pytest.raises(ValueError, match="'0.bias', '0.weight'. are captured by one of the two only"):
        run_capture(model, losses, x).gram(run_capture(model, losses, x, params=["2.*"]))
    with pytest.raises(ValueError, match=r"'weight' is \(3, 5\), its other 'weight' \(3, 6\)"):
        run_capture(nn.Linear(5, 3).double(), losses, x)["weight"].gram(
            run_capture(nn.Linear(6, 3).double(), losses, data(B, 6))["weight"]
        )


def test_a_gradient_of_zero_has_no_angle():
    x = data(B, 5)
    x[1] = 0
    cosines = run_capture(nn.Linear(5, 3, bias=False).double(), losses, x).cosines()
    assert cosines[1].tolist() == [0.0] * B
    assert cosines.diagonal().tolist() == pytest.approx([1.0, 0.0, 1.0, 1.0])


def test_a_tied_table_is_not_built_to_be_compared():
    """V · D = 3e7 elements a sample: four samples of it would be 0.5 GB."""
    model = Fn(lambda s, i: F.linear(s.l(s.e(i)).tanh(), s.e.weight), e=nn.Embedding(100_000, 300), l=nn.Linear(300, 300))
    i = torch.randint(100_000, (B, 3))
    grads = run_capture(model, lambda model, i: model(i).logsumexp(-1).sum(1), i, verify=False)
    largest = []
    with LargestResult(largest):
        K = grads.gram()
    assert max(largest) < 4e7  # one table in all, for all samples
    assert relative_error(K.diagonal(), grads.sq_norms().double()) < 1e-5  # float32, summed in another order


def test_a_tied_table_is_not_built_beside_the_gradients_of_its_head():
    model = Fn(lambda s, i: F.linear(s.l(s.e(i)).tanh(), s.e.weight), e=nn.Embedding(50, 30), l=nn.Linear(30, 30)).double()
    i = torch.tensor([[1, 2, 1], [4, 4, 4], [0, 49, 7], [1, 2, 3]])
    loss_fn = lambda model, i: model(i).logsumexp(-1).sum(1)
    grads = run_capture(model, loss_fn, i, plan={"e.weight": "build"})
    largest = []
    with LargestResult(largest):
        norms = grads["e.weight"].norms()
    assert max(largest) < 4 * 50 * 30
    assert relative_error(norms, oracle(model, loss_fn, i)["e.weight"].flatten(1).norm(dim=1)) < 1e-9


class LargestResult(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes how many elements each op's result has."""

    def __init__(self, sizes):
        super().__init__()
        self.sizes = sizes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        is_new = isinstance(out, torch.Tensor) and not func.is_view
        self.sizes.append(out.numel() if is_new else 0)
        return out


# --- scale, chunks, small batches, bad samples, rounding ---


@pytest.mark.parametrize("limit", [1, 200, 1 << 20])
def test_group_norms_a_few_images_at_a_time(limit, monkeypatch):
    monkeypatch.setattr(norm, "CHUNK_BYTES", {"cpu": limit, "cuda": limit})
    model, x = nn.GroupNorm(2, 4).double(), data(5, 4, 3)
    loss_fn = lambda model, x: model(x).sin().sum((1, 2))
    grads = run_capture(model, loss_fn, x)
    assert max(relative_errors(grads.materialize(), oracle(model, loss_fn, x)).values()) < 1e-9


def everything(grads):
    """The answer to every question that is not a gradient's size, as tensors."""
    noise = grads.noise_scale()
    return {
        "norms": grads.norms(), "sq_norms": grads.sq_norms(), **grads.norms(groups="layer"),
        "gram": grads.gram(), "cosines": grads.cosines(), "dots": grads.dots(grads.sum()), "project": grads.project(dim=16),
        "kronecker": grads.project(sw.Kronecker(2, 2)), "noise": torch.tensor([noise.value, noise.trace, noise.sq_norm]),
        **{f"{what} {n}": G for what in ("materialize", "sum", "second_moment", "variance", "fisher_diagonal", "normalized_sum")
           for n, G in getattr(grads, what)().items()},
        **{f"clipped {n}": G for n, G in grads.clipped_sum(max_norm=0.3, groups="layer").items()},
        **{f"streamed {n}": G for n, G in grads.stream(keep=True)},
        **{f"of some {n}": grads[n].of_samples([1, 0]) for n in grads},
    }  # fmt: skip


@pytest.mark.parametrize("name", ["mlp", "conv2d-twice", "tied-embedding-head", "lora-merged", "matmul-broadcast-heads"])
def test_a_mean_loss_gives_the_same_answers(name):
    model, batch, loss_fn = BY_NAME[name].build()
    expected = everything(run_capture(model, loss_fn, *batch))
    with sw.capture(model, loss_reduction="mean") as grads:
        loss_fn(model, *batch).mean().backward()
    for what, answer in everything(grads).items():
        assert relative_error(answer, expected[what]) < (1e-6 if what == "noise" else TOLERANCE), what


@pytest.mark.parametrize("size", [1, 30, 500])
@pytest.mark.parametrize(
    "name",
    ["linear-long", "linear-short", "conv2d-twice", "conv2d-groups", "tied-embedding-head", "lora-merged", "matmul-heads"],
)
def test_chunk_size_does_not_matter(name, size, monkeypatch):
    model, batch, loss_fn = BY_NAME[name].build()
    grads = run_capture(model, loss_fn, *batch)
    expected = everything(grads)
    monkeypatch.setattr(base, "CHUNK_ELEMENTS", size)
    for what, answer in everything(grads).items():
        assert relative_error(answer, expected[what]) < (1e-6 if what == "noise" else TOLERANCE), what


def test_batch_of_none():
    model = nn.ModuleDict({"e": nn.Embedding(7, 4), "c": nn.Conv1d(4, 3, 2), "l": nn.Linear(3, 2)}).double()
    loss_fn = lambda model, i: model["l"](model["c"](model["e"](i).mT).mT).sum((1, 2))
    grads, some = (
        run_capture(model, loss_fn, torch.zeros(0, 5).long()),
        run_capture(model, loss_fn, torch.zeros(2, 5).long()),
    )
    assert grads.gram().shape == grads.cosines().shape == (0, 0)
    assert grads.gram(some).shape == (0, 2)
    assert some.gram(grads).shape == (2, 0)
    assert grads.project(dim=3).shape == (0, 3)
    assert grads.project(sw.Kronecker(2, 2)).shape == (0, some.project(sw.Kronecker(2, 2)).shape[1])
    assert all(not G.any() for G in grads.second_moment().values())
    assert all(not G.any() for G in grads.normalized_sum().values())
    assert [n for n, _ in grads.stream(keep=True)] == list(grads)
    assert not list(grads.stream(samples=2, keep=True))
    with pytest.raises(ValueError, match="the batch has 0"):
        grads.fisher_diagonal()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("shape", [(B, 5), (B, 2, 5), (B, 40, 5)], ids=["one position", "few positions", "many positions"])
def test_a_bad_sample_does_not_spoil_the_others(shape, bad):
    model, x, others = mlp(), data(*shape), [0, 1, 3]
    good = run_capture(model, losses, x[others])
    x[2].view(-1)[0] = bad
    grads = run_capture(model, losses, x)
    for query in (lambda g: g.gram(), lambda g: g.cosines()):
        assert relative_error(query(grads)[others][:, others], query(good)) < TOLERANCE
        assert not query(grads)[2, 2].isfinite()
    for query in (lambda g: g.project(dim=8), lambda g: g.project(sw.SparseJL(8)), lambda g: g.project(sw.Kronecker(2, 2)),
                  lambda g: g.dots(good.sum())):  # fmt: skip
        assert relative_error(query(grads)[others], query(good)) < TOLERANCE
    for n in good:
        assert relative_error(grads.normalized_sum()[n], good.normalized_sum()[n]) < TOLERANCE
        clipped = [g.clipped_sum(max_norm=0.5, groups="layer")[n] for g in (grads, good)]
        assert relative_error(*clipped) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_accumulates_in_float32(dtype):
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Conv1d(30, 4, 3)).to(dtype), torch.randn(3, 30, 64).to(dtype)
    with sw.capture(model) as grads:
        grads.backward((model(x).float() * 1e-2).square().sum((1, 2)))
    G = {n: grads._joined(n).materialize_wide().double() for n in grads}  # what the factors hold, built without rounding
    flat_G = flat(G)
    close = 1e-5  # float32, sums of 4096 terms
    assert relative_error(grads.gram(), flat_G @ flat_G.T) < close
    for n in grads:
        assert grads.second_moment()[n].dtype == grads.variance()[n].dtype == torch.float32
        assert relative_error(grads.second_moment()[n], G[n].square().sum(0)) < close
        assert relative_error(grads.variance()[n], G[n].var(0)) < close
    assert relative_error(grads.project(dim=8), grads.project(dim=8).double()) < close
    trace = flat_G.var(0).sum().item()
    assert grads.noise_scale().trace == pytest.approx(trace, rel=1e-4)


def test_products_of_positions_that_cancel():
    model, start = nn.Linear(200, 300, bias=False), torch.randn(B, 1, 200)
    x = torch.cat([start, start + 1e-4 * torch.randn(B, 1, 200)], 1)

    def loss_fn(model, x):
        y = model(x)
        return (y[:, 0] - y[:, 1]).sum(1)

    G = flat(oracle(model, loss_fn, x))
    # rounding of the inputs themselves: 1e-7 of |a| = 14 against a difference of 1e-4 · 14
    assert relative_error(run_capture(model, loss_fn, x).cosines(), F.normalize(G) @ F.normalize(G).T) < 1e-2


def test_questions_inside_the_block():
    model, x = mlp(), data(B, 5)
    with sw.capture(model) as grads:
        grads.backward(losses(model, x))
        inside = everything(grads)
    for what, answer in everything(grads).items():
        assert relative_error(inside[what], answer) == 0, what


# --- streams ---


def test_a_stream_frees_what_it_has_handed_out():
    model, x = mlp(), data(B, 5)
    grads, truth = run_capture(model, losses, x), oracle(model, losses, x)
    held = {n: weakref.ref(grads._joined(n).tensors()[-1]) for n in grads}
    seen = []
    for name, G in grads.stream():
        gc.collect()
        assert [held[n]() is None for n in seen] == [True] * len(seen)
        assert relative_error(G, truth[name]) < TOLERANCE
        seen.append(name)
        del G
    assert seen == list(truth)
    with pytest.raises(SamplewiseError, match="gradients of '0.weight' were freed when a stream had handed them out"):
        grads["0.weight"].norms()
    with pytest.raises(SamplewiseError, match=r"stream\(keep=True\)"):
        grads.norms()


def test_a_stream_of_samples():
    model, x = mlp(), data(5, 5)
    grads, truth = run_capture(model, losses, x), oracle(model, losses, x)
    runs = []
    for samples, block in grads.stream(samples=2):
        runs.append((samples.start, samples.stop))
        for n, G in truth.items():
            assert relative_error(block[n], G[samples]) < TOLERANCE
    assert runs == [(0, 2), (2, 4), (4, 5)]
    with pytest.raises(SamplewiseError, match="were freed"):
        grads.norms()
    grads = run_capture(model, losses, x)
    parts = [G for _, G in grads["2.weight"].stream(samples=3)]
    assert relative_error(torch.cat(parts), truth["2.weight"]) < TOLERANCE
    with pytest.raises(ValueError, match="one sample or more, got 0"):
        list(grads.stream(samples=0))


def test_the_functional_form():
    model, x, y = mlp(), data(B, 5), torch.randint(3, (B,))
    loss_fn = lambda model, x, y: F.cross_entropy(model(x), y, reduction="none")
    grads = sw.per_sample(model, loss_fn, params=["2.*"])(x, y)
    assert list(grads) == ["2.weight", "2.bias"]
    assert relative_error(grads["2.bias"].materialize(), oracle(model, loss_fn, x, y)["2.bias"]) < TOLERANCE


# --- found by an independent review: options and questions against each other ---


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.table(ids))


def test_a_direction_has_a_tied_parameter_once():
    """A state dict has it under both names."""
    model, ids = Tied().double(), torch.randint(7, (B, 4))
    grads, G = run_capture(model, losses, ids), flat(oracle(model, losses, ids))
    w = model.table.weight.detach().flatten()
    assert relative_error(grads.dots(model.state_dict()), G @ w) < TOLERANCE
    assert relative_error(grads.cosines(model.state_dict()), F.cosine_similarity(G, w[None])) < TOLERANCE
    with pytest.raises(ValueError, match=r"another tensor for 'head.weight' than for 'table.weight'"):
        grads.dots({"table.weight": model.table.weight, "head.weight": model.head.weight + 1})
    with pytest.raises(ValueError, match=r"'head.weight' is \(7, 3\), its direction \(3,\)"):
        grads.dots({"head.weight": torch.ones(3)})


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
def test_a_direction_may_be_of_integers(dtype):
    model, x = nn.Linear(3, 1, bias=False), torch.randn(B, 3)
    grads = run_capture(model, lambda model, x: model(x).squeeze(1), x)
    d = torch.tensor([[100, 20, 120]]).to(dtype) * (1000 if dtype == torch.int32 else 1)
    for got in (grads.cosines({"weight": d}), grads["weight"].cosines(d)):
        assert relative_error(got, F.cosine_similarity(x, d.float())) < 1e-6  # float32


def test_a_direction_of_parameters_that_took_no_part_is_zero():
    model, x = mlp(), data(B, 5)
    grads = run_capture(model, lambda model, x: model[0](x).square().sum(1), x)
    for direction in ({}, {"2.bias": torch.ones(3)}):
        assert torch.equal(grads.dots(direction), torch.zeros(B, dtype=torch.float64))


@pytest.mark.parametrize("w", [[1.0, 2.0, 3.0, 4.0], [1.0, 0.0, 0.0, 4.0], [0.0] * 4])
def test_weights_get_the_gradient_of_all_samples(w):
    """Learning to weigh samples begins at 0."""
    model, x = mlp(), data(B, 5)
    grads, G = run_capture(model, losses, x), flat(oracle(model, losses, x))
    w = torch.tensor(w, dtype=torch.float64, requires_grad=True)
    sum(t.sum() for t in grads.weighted_sum(w).values()).backward()
    assert relative_error(w.grad, G.sum(1)) < TOLERANCE


def test_weights_are_real_and_not_rounded():
    model, x = mlp(), data(B, 5)
    G = flat(oracle(model, losses, x))
    with sw.capture(model, loss_reduction="mean") as grads:
        losses(model, x).mean().backward()
    with pytest.raises(ValueError, match="weights of samples are real"):
        grads.weighted_sum(torch.full((B,), 1j))
    for w in (torch.tensor([2**24 + 1, 2**24 + 3, 5, 7]), torch.tensor([0.1, 0.2, 0.3, 0.4])):
        got = torch.cat([t.flatten() for t in grads.weighted_sum(w).values()])
        assert relative_error(got, w.double() @ G) < TOLERANCE
        got = torch.cat([grads[name].weighted_sum(w).flatten() for name in grads])
        assert relative_error(got, w.double() @ G) < TOLERANCE


def test_terms_that_overflow_are_taken_directly():
    """Two positions that nearly cancel: the product of their lengths leaves float32, what is left of them does not."""
    model = nn.Linear(2, 2, bias=False)
    x = torch.tensor([[[1e10, 1.0], [-1e10, 1.0]], [[1.0, 2.0], [3.0, 4.0]]])
    each = lambda model, x: (model(x) * torch.tensor([1e10, 1.0])).sum((1, 2))
    norms = {route: run_capture(model, each, x, plan={"*": route}, verify=False).norms() for route in ("gram", "direct")}
    assert norms["gram"].isfinite().all()
    assert relative_error(norms["gram"], norms["direct"]) < 1e-6


def test_a_projection_of_real_parts_of_a_complex_weight_has_its_width():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 4, dtype=torch.complex128))

        def forward(self, x):
            return x @ self.w.real.T + (x @ self.w.imag.T) ** 2

    model = Parts()
    grads = run_capture(model, lambda model, x: model(x).sum((1, 2)), data(B, 5, 4))
    for k in (2, 3, 6):
        projector = sw.Kronecker(2, k)
        assert grads.project(projector).shape == (B, projector.width(model.w))


def test_what_a_running_estimate_gives_is_not_its_state():
    moments, x = sw.RunningMoments(), data(B, 5)
    moments.update(run_capture(mlp(), losses, x))
    right = {name: t.clone() for name, t in moments.mean().items()}
    state = moments.state_dict()
    other = sw.RunningMoments()
    other.load_state_dict(state)
    for given in (moments.mean(), state["means"], state["deviations"]):
        for t in given.values():
            t.zero_()
    for estimate in (moments, other):
        assert all(torch.equal(t, right[name]) for name, t in estimate.mean().items())


def test_samples_may_be_named_by_a_list():
    grads = run_capture(mlp(), losses, data(B, 5))
    assert grads["0.weight"].of_samples([]).shape == (0, 6, 5)
    assert torch.equal(grads["0.weight"].of_samples([2, 1]), grads.materialize()["0.weight"][[2, 1]])


def test_where_gradients_are_off_is_said():
    model, x = mlp(), data(B, 5)
    with torch.inference_mode(), pytest.raises(SamplewiseError, match="inference_mode"):
        sw.capture(model)
    with torch.no_grad(), sw.capture(model) as grads, pytest.raises(SamplewiseError, match="need no gradient: .*no_grad"):
        grads.backward(losses(model, x))
    with pytest.raises(ValueError, match="batch_dim counts dimensions from the first"):
        sw.capture(model, batch_dim=-1)


def test_one_sample_beside_rows_of_something_else():
    """Which of the two is the batch is not clear; behind it, a lone 1 is broadcast."""

    class Nearest(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(5, 5)

        def forward(self, x, others):
            return self.inner(x) @ others.T if len(others) > 1 else self.inner(x) * others

    model = Nearest().double()
    with pytest.raises(SamplewiseError, match=r"sizes \[1, 3\] along dimension 0, so the batch size is not clear"):
        sw.per_sample(model, lambda *args: args[0](*args[1:]).sum(1))(data(1, 5), data(3, 5))
    grads = sw.per_sample(model, lambda *args: args[0](*args[1:]).sum(1))(data(3, 5), data(1, 5))
    assert grads.norms().shape == (3,)


def test_verification_of_what_has_no_gradient_or_no_samples():
    model = nn.Linear(5, 3).requires_grad_(False)
    assert sw.verify(model, torch.randn(B, 5)).is_right
    with pytest.raises(ValueError, match="without samples"):
        sw.verify(nn.Linear(5, 3), torch.randn(0, 5))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("more", [{}, {"bidirectional": True}, {"num_layers": 2}], ids=str)
def test_recurrent_layers_take_no_samples_too(kind, more):
    """Poisson sampling may draw none."""
    model = kind(3, 4, batch_first=True, **more)
    with sw.capture(model) as grads:
        grads.backward(model(torch.randn(0, 5, 3))[0].sum((1, 2)))
    assert grads.norms().shape == (0,)
    assert {n: t.shape for n, t in grads.clipped_sum(max_norm=1.0).items()} == {
        n: p.shape for n, p in model.named_parameters()
    }


@pytest.mark.parametrize("more", [{}, {"bidirectional": True}, {"num_layers": 2}], ids=str)
@pytest.mark.parametrize("lengths", [(5, 4, 3, 2), (2, 5, 3, 4)])
def test_packed_sequences_of_an_lstm_that_projects(lengths, more):
    """Its first states are zeros, as many as the sequences, packed outside of the block, say."""
    model = nn.LSTM(5, 4, proj_size=2, **more).double()
    sequences = [data(length, 5) for length in lengths]
    with sw.capture(model) as grads:
        y, _ = model(pack_sequence(sequences, enforce_sorted=lengths[0] == 5))
        grads.backward(pad_packed_sequence(y)[0].square().sum((0, 2)))
    for b, sequence in enumerate(sequences):
        alone = oracle(model, lambda model, x: model(x.transpose(0, 1))[0].square().sum((0, 2)), sequence[None])
        assert all(relative_error(grads[name].materialize()[b], G[0]) < TOLERANCE for name, G in alone.items())


def test_tied_weights_take_no_samples_too():
    grads = run_capture(Tied(), losses, torch.zeros(0, 1, dtype=torch.long), verify=False)
    assert grads.norms().shape == (0,) and grads.gram().shape == (0, 0)
