"""Every case × every query against the oracle, in float64."""

import pytest
import torch
import torch.nn.functional as F
from cases import ALL, CASES, Case

from samplewise.factors.pairs import built
from samplewise.projections import Gaussian, Kronecker, Rademacher, SparseJL, hash_keys
from samplewise.testing import oracle, relative_errors, run_capture

TOLERANCE = 1e-9  # float64, sums of at most a few thousand terms


@pytest.fixture(scope="module")
def answers():
    """(captured gradients, oracle) of a case, computed once."""
    known = {}

    def of(case: Case):
        if case.name not in known:
            model, batch, loss_fn = case.build()
            grads = run_capture(model, loss_fn, *batch, **case.options)
            known[case.name] = grads, oracle(model, loss_fn, *batch, batch_dim=case.batch_dim)
        return known[case.name]

    return of


def rows(G):
    return G.reshape(len(G), -1)


def flat_norms(truth):
    return torch.cat([rows(G) for G in truth.values()], 1).norm(dim=1).real


def weighted(G, w):
    return torch.tensordot(w.to(G.dtype), G, dims=1)


def materialize(grads, truth, w):
    return {n: grads[n].materialize() for n in grads}, truth


def materialize_all(grads, truth, w):
    return grads.materialize(), truth


def norms(grads, truth, w):
    return {"": grads.norms()}, {"": flat_norms(truth)}


def parameter_norms(grads, truth, w):
    return {n: grads[n].norms() for n in grads}, {n: rows(G).norm(dim=1).real for n, G in truth.items()}


def weighted_sum(grads, truth, w):
    return grads.weighted_sum(w), {n: weighted(G, w) for n, G in truth.items()}


def weighted_sum_of_some(grads, truth, w):
    w = w * (torch.arange(len(w)) % 2)
    return grads.weighted_sum(w), {n: weighted(G, w) for n, G in truth.items()}


def clipped_sum(grads, truth, w):
    norms = flat_norms(truth)
    bound = norms.median().item() or 1.0
    return grads.clipped_sum(max_norm=bound), {n: weighted(G, (bound / norms).clamp(max=1)) for n, G in truth.items()}


def total(grads, truth, w):
    return grads.sum(), {n: G.sum(0) for n, G in truth.items()}


def dots(grads, truth, w):
    direction = {n: torch.randn_like(G[0]) for n, G in truth.items()}
    return {"": grads.dots(direction)}, {"": sum((rows(G) @ direction[n].conj().flatten()).real for n, G in truth.items())}


def layer(name):
    return name.rpartition(".")[0]


def layer_norms(grads, truth):
    sums = {layer(n): torch.zeros(grads.batch_size, dtype=torch.float64) for n in grads.parameters}
    for n, G in truth.items():
        sums[layer(n)] += real_rows(G).square().sum(1)
    return {name: total.sqrt() for name, total in sums.items()}


def group_norms(grads, truth, w):
    layers = {f"layer {name}": n for name, n in grads.norms(groups="layer").items()}
    expected = {f"layer {name}": n for name, n in layer_norms(grads, truth).items()}
    return {**layers, **grads.sq_norms(groups=["*"])}, {**expected, "*": flat_norms(truth).square()}


def clipped_by_layer(grads, truth, w):
    norms = layer_norms(grads, truth)
    bounds = {name: n.median().item() or 1.0 for name, n in norms.items()}
    clip = {name: (bounds[name] / n).clamp(max=1) for name, n in norms.items()}
    got = grads.clipped_sum(max_norm=bounds, groups="layer")
    return got, {n: weighted(G, clip[layer(n)]) for n, G in truth.items()}


def normalized_sum(grads, truth, w):
    return grads.normalized_sum(eps=0.1), {n: weighted(G, 1 / (flat_norms(truth) + 0.1)) for n, G in truth.items()}


def each_clipped_and_normalized(grads, truth, w):
    norms = {n: rows(G).norm(dim=1).real for n, G in truth.items()}
    return {
        **{f"{n} clipped": grads[n].clipped_sum(max_norm=0.5) for n in grads},
        **{f"{n} normalized": grads[n].normalized_sum() for n in grads},
    }, {
        **{f"{n} clipped": weighted(G, (0.5 / norms[n]).clamp(max=1)) for n, G in truth.items()},
        **{f"{n} normalized": weighted(G, 1 / (norms[n] + 0.01)) for n, G in truth.items()},
    }


def as_rows(truth):
    """All gradients of a sample as one real vector."""
    return torch.cat([real_rows(G) for G in truth.values()], 1)


def real_rows(G):
    return rows(torch.view_as_real(G) if G.is_complex() else G)


def gram(grads, truth, w):
    G = as_rows(truth)
    return {"": grads.gram(), **{n: grads[n].gram() for n in grads}}, {
        "": G @ G.T,
        **{n: real_rows(G) @ real_rows(G).T for n, G in truth.items()},
    }


def gram_by_building(grads, truth, w):
    return {n: built(grads._joined(n), grads._joined(n)) for n in grads}, {
        n: real_rows(G) @ real_rows(G).T for n, G in truth.items()
    }


def gram_with_others(grads, truth, w):
    """Some of the samples, in another order, stand for another capture."""
    some = torch.arange(len(w)).flip(0)[: max(1, len(w) - 1)]
    return {n: grads._joined(n).gram(grads._joined(n).select(some)) for n in grads}, {
        n: real_rows(G) @ real_rows(G[some]).T for n, G in truth.items()
    }


def cosines(grads, truth, w):
    direction = {n: torch.randn_like(G[0]) for n, G in truth.items()}
    G, d = F.normalize(as_rows(truth)), F.normalize(as_rows({n: t[None] for n, t in direction.items()}))
    return {"": grads.cosines(), "direction": grads.cosines(direction)}, {"": G @ G.T, "direction": G @ d[0]}


def second_moment(grads, truth, w):
    got = {**grads.second_moment(), **{f"{n} mean": G for n, G in grads.fisher_diagonal().items()}}
    squares = {n: G.abs().square() for n, G in truth.items()}
    return got, {**{n: G.sum(0) for n, G in squares.items()}, **{f"{n} mean": G.mean(0) for n, G in squares.items()}}


def variance(grads, truth, w):
    if len(w) < 2:
        return {}, {}
    got, sizes = grads.variance(), {n: G.abs().square().max() + 1e-300 for n, G in truth.items()}
    # relative to the squares, as samples may be alike
    return tuple({n: torch.cat([V[n].flatten() / sizes[n], torch.ones(1)]) for n in V}
                 for V in (got, {n: G.var(0) for n, G in truth.items()}))  # fmt: skip


def noise_scale(grads, truth, w):
    if len(w) < 3:
        return {}, {}
    noise = grads.noise_scale()
    trace, sq_norm = noise_of(as_rows(truth))
    return {"": torch.tensor([noise.trace, noise.sq_norm], dtype=torch.float64)}, {"": torch.stack([trace, sq_norm])}


def noise_of(G):
    """tr of the covariance, and |mean|² less what the noise of the mean adds."""
    trace = G.var(0).sum()
    return trace, G.mean(0).square().sum() - trace / len(G)


PROJECTORS = [Rademacher(70, seed=3), Gaussian(6, seed=3), SparseJL(12, seed=3, num_nonzeros=3)]


def matrix_of(projector, name, G):
    """The projection of the whole gradient, [elements, K]."""
    G = torch.view_as_real(G[0]) if G.is_complex() else G[0]
    if isinstance(projector, Kronecker):
        sides = [("out", G.shape[0] if G.ndim else 1), ("in", G[0].numel() if G.ndim else 1)]
        matrices = [(projector.side(name, side, size, G.device), torch.eye(size)) for side, size in sides]
        return torch.kron(*((eye if matrix is None else matrix).double() for matrix, eye in matrices))
    elements, keys = torch.arange(G.numel()), hash_keys(projector.seed, name)
    if not isinstance(projector, SparseJL):
        return projector.entries(elements, keys).double()
    columns, signs = projector.nonzeros(elements, keys)
    return torch.zeros(G.numel(), projector.dim).scatter_(1, columns, signs / projector.num_nonzeros**0.5).double()


def projected(grads, truth, w):
    return {str(p): grads.project(p) for p in PROJECTORS}, {
        str(p): sum(real_rows(G) @ matrix_of(p, n, G) for n, G in truth.items()) for p in PROJECTORS
    }


def projected_from_two_sides(grads, truth, w):
    p = Kronecker(2, 3, seed=5)
    return {n: grads[n].project(p) for n in grads}, {n: real_rows(G) @ matrix_of(p, n, G) for n, G in truth.items()}


def streamed(grads, truth, w):
    runs = list(grads.stream(samples=3, keep=True))
    joined = {f"{n} by samples": torch.cat([block[n] for _, block in runs]) for n in truth}
    return {**dict(grads.stream(keep=True)), **joined}, {**truth, **{f"{n} by samples": G for n, G in truth.items()}}


QUERIES = [
    materialize, materialize_all, norms, parameter_norms, weighted_sum, weighted_sum_of_some, clipped_sum, total, dots,
    group_norms, clipped_by_layer, normalized_sum, each_clipped_and_normalized, gram, gram_by_building, gram_with_others, cosines,
    second_moment, variance, noise_scale, projected, projected_from_two_sides, streamed,
]  # fmt: skip


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("case", ALL)
def test_query_matches_oracle(case, query, answers):
    grads, truth = answers(case)
    torch.manual_seed(1)
    w = torch.randn(grads.batch_size, dtype=torch.float64)
    got, expected = query(grads, truth, w)
    assert got.keys() == expected.keys()
    for name, error in relative_errors(got, expected).items():
        assert error < TOLERANCE, name


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES if c.sums_to_grad])
def test_samples_sum_to_grad(case, answers):
    grads, _ = answers(case)
    model, batch, loss_fn = case.build()
    loss_fn(model, *batch).sum().backward()
    plain = {n: p.grad.to_dense() if p.grad.is_sparse else p.grad for n, p in model.named_parameters() if p.grad is not None}
    for name, error in relative_errors(grads.sum(), plain).items():
        assert error < TOLERANCE, name


@pytest.mark.parametrize("case", ALL)
def test_leaves_nothing_behind(case):
    model, batch, loss_fn = case.build()
    before = {n: (id(p), p.grad, set(vars(p))) for n, p in model.named_parameters()}
    attributes = {n: sorted(vars(m)) for n, m in model.named_modules()}
    run_capture(model, loss_fn, *batch, **case.options)
    assert {n: (id(p), p.grad, set(vars(p))) for n, p in model.named_parameters()} == before
    assert {n: sorted(vars(m)) for n, m in model.named_modules()} == attributes
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
