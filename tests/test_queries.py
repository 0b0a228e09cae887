"""Every case × every query against the oracle, in float64."""

import pytest
import torch
from cases import ALL, CASES, Case

from samplewise.testing import oracle, relative_error, run_capture

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


QUERIES = [
    materialize, materialize_all, norms, parameter_norms, weighted_sum, weighted_sum_of_some, clipped_sum, total, dots,
]  # fmt: skip


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("case", ALL)
def test_query_matches_oracle(case, query, answers):
    grads, truth = answers(case)
    torch.manual_seed(1)
    w = torch.randn(grads.batch_size, dtype=torch.float64)
    got, expected = query(grads, truth, w)
    assert got.keys() == expected.keys()
    for name in expected:
        assert relative_error(got[name], expected[name]) < TOLERANCE, name


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES if c.sums_to_grad])
def test_samples_sum_to_grad(case, answers):
    grads, _ = answers(case)
    model, batch, loss_fn = case.build()
    loss_fn(model, *batch).sum().backward()
    for name, p in model.named_parameters():
        if p.grad is not None:
            plain = p.grad.to_dense() if p.grad.is_sparse else p.grad
            assert relative_error(grads[name].sum(), plain) < TOLERANCE, name


@pytest.mark.parametrize("case", ALL)
def test_leaves_nothing_behind(case):
    model, batch, loss_fn = case.build()
    before = {n: (id(p), p.grad, set(vars(p))) for n, p in model.named_parameters()}
    attributes = {n: sorted(vars(m)) for n, m in model.named_modules()}
    run_capture(model, loss_fn, *batch, **case.options)
    assert {n: (id(p), p.grad, set(vars(p))) for n, p in model.named_parameters()} == before
    assert {n: sorted(vars(m)) for n, m in model.named_modules()} == attributes
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
