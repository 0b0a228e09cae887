"""Projections: entries that are the same everywhere, and inner products that are kept in expectation."""

import subprocess
import sys

import pytest
import torch
from cases import BY_NAME
from test_queries import matrix_of
from torch import nn

import samplewise as sw
from samplewise.factors import base
from samplewise.projections import hash_keys, hashes, projector_of, quantiles
from samplewise.testing import relative_error, run_capture

PROJECTORS = [
    sw.Rademacher(64, seed=1), sw.Gaussian(64, seed=1), sw.SparseJL(64, seed=1), sw.SparseJL(64, seed=1, num_nonzeros=1),
    sw.Kronecker(4, 4, seed=1),
]  # fmt: skip
ALL = [pytest.param(p, id=type(p).__name__ + str(i)) for i, p in enumerate(PROJECTORS)]


def test_hashes_are_what_integers_give():
    def reference(element, word, keys, mask=(1 << 64) - 1):
        x = ((element << 20) + word) ^ (keys[0] & mask)
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = (x + keys[1]) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    keys, elements = hash_keys(7, "a.weight"), torch.tensor([0, 1, 5, 10**9, 2**40])
    got = hashes(elements, keys, num_words=3)
    for i, element in enumerate(elements.tolist()):
        for word in range(3):
            assert got[i, word].item() & ((1 << 64) - 1) == reference(element, word, keys)


def test_entries_are_frozen():
    """A store of projections outlives a version of the library."""
    keys, elements = hash_keys(0, "head.weight"), torch.tensor([0, 12345])
    assert hashes(elements, keys, num_words=1).flatten().tolist() == FROZEN["hashes"]
    assert (sw.Gaussian(4).entries(elements, keys) * 8192).flatten().tolist() == FROZEN["gaussian"]
    assert sw.SparseJL(64).nonzeros(elements, keys)[0].flatten().tolist() == FROZEN["sparse"]
    assert quantiles().double().square().mean().item() == pytest.approx(1, abs=1e-6)


FROZEN = {
    "hashes": [-1008485607581590946, -2868446515120164489],
    "gaussian": [4298, -1347, 1461, -563, 2069, -5299, 2520, -1639],
    "sparse": [15, 29, 42, 58, 11, 16, 46, 53],
}


CHUNKED = ["mlp", "conv2d-twice", "embedding", "tied-embedding-head", "matmul-heads", "conv2d-groups", "lora-merged"]


@pytest.mark.parametrize("projector", ALL)
@pytest.mark.parametrize("name", CHUNKED)
def test_chunk_size_does_not_matter(name, projector, monkeypatch):
    model, batch, loss_fn = BY_NAME[name].build()
    grads = run_capture(model, loss_fn, *batch)
    whole = grads.project(projector)
    for size in (1, 50, 1000):
        monkeypatch.setattr(base, "CHUNK_ELEMENTS", size)
        assert relative_error(grads.project(projector), whole) < 1e-12


@pytest.mark.parametrize("projector", ALL)
def test_a_subset_of_parameters_is_projected_as_within_the_whole(projector):
    model, x = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double(), torch.randn(4, 5, dtype=torch.float64)
    loss_fn = lambda model, x: model(x).square().sum(1)
    whole = run_capture(model, loss_fn, x)
    parts = [run_capture(model, loss_fn, x, params=[n]).project(projector) for n in whole]
    together = torch.cat(parts, 1) if projector.side_by_side else sum(parts)
    assert relative_error(together, whole.project(projector)) < 1e-12
    assert relative_error(whole["2.weight"].project(projector), parts[2]) < 1e-12


def test_parameters_without_a_gradient_keep_their_columns():
    model = nn.ModuleDict({"a": nn.Linear(5, 3), "b": nn.Linear(5, 3)})
    grads = run_capture(model, lambda model, x: model["b"](x).sum(1), torch.randn(4, 5))
    p = grads.project(sw.Kronecker(2, 2))
    assert p.shape == (4, 2 * (2 * 2 + 2))
    assert not p[:, :6].any()
    assert p[:, 6:].all()


SCRIPT = """
import torch, samplewise as sw
torch.manual_seed(99)
model = torch.nn.Linear(3, 2).double()
grads = sw.per_sample(model, lambda model, x: model(x).sum(1))(torch.arange(12.0).double().view(4, 3))
print([grads.project(p).tolist() for p in (sw.Rademacher(8, 5), sw.Gaussian(8, 5), sw.SparseJL(8, 5), sw.Kronecker(1, 2, 5))])
"""


def test_another_process_gives_the_same_numbers(capsys):
    exec(SCRIPT, {})
    here = capsys.readouterr().out
    there = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert there.stdout == here


@pytest.mark.parametrize("make", [
    lambda seed: sw.Rademacher(32, seed), lambda seed: sw.Gaussian(32, seed), lambda seed: sw.SparseJL(32, seed),
    lambda seed: sw.SparseJL(32, seed, num_nonzeros=1), lambda seed: sw.Kronecker(4, 4, seed),
], ids=["rademacher", "gaussian", "sparse", "count sketch", "kronecker"])  # fmt: skip
def test_inner_products_are_kept_in_expectation(make):
    """Over 400 seeds the mean of <Px, Py> is within 4.5 standard errors of <x, y>: false alarm below 1e-5 a product."""
    x = torch.randn(3, 6, 20, dtype=torch.float64)
    x[1] = x[0] + 0.1 * x[1]
    x[2, :, 1:] = 0  # few large entries, where bad signs or buckets show
    truth = x.flatten(1) @ x.flatten(1).T
    grams = []
    for seed in range(400):
        p = x.flatten(1) @ matrix_of(make(seed), "w", x)
        grams.append(p @ p.T)
    grams = torch.stack(grams)
    error = (grams.mean(0) - truth).abs() / (grams.std(0) / 400**0.5)
    assert error.max() < 4.5
    # the spread that the theory gives for 32 numbers of a dense projection, sqrt((|x|²|y|² + <x,y>²) / 32), at most 3 times
    sq = truth.diagonal()
    assert (grams.std(0) < 3 * ((sq[:, None] * sq + truth.square()) / 32).sqrt()).all()


def test_signs_and_normals_look_independent():
    """Means, variances and products of neighbouring elements, columns, names and seeds: 4.5 standard errors, 1e-5 each."""
    elements = torch.arange(2000)
    for entries in (
        lambda k: sw.Rademacher(64).entries(elements, k) * 8,
        lambda k: sw.Gaussian(64).entries(elements, k) * 8,
    ):
        E, other_name, other_seed = (entries(hash_keys(*key)).double() for key in [(0, "a"), (0, "b"), (1, "a")])
        pairs = {
            "mean": E, "elements": E[1:] * E[:-1], "columns": E[:, 1:] * E[:, :-1], "words": E[:, 32:] * E[:, :32],
            "names": E * other_name, "seeds": E * other_seed, "squares": E.square() - 1,
        }  # fmt: skip
        for what, product in pairs.items():
            spread = 2**0.5 if what == "squares" else 1.0
            assert abs(product.mean()) < 4.5 * spread / product.numel() ** 0.5, what


def test_what_is_refused():
    with pytest.raises(ValueError, match="multiple of num_nonzeros, got 10 and 4"):
        sw.SparseJL(10)
    with pytest.raises(ValueError, match="one dimension or more, got 0"):
        sw.Gaussian(0)
    for arguments in [(None, None, 0), (sw.Gaussian(3), 4, 0)]:
        with pytest.raises(TypeError, match="takes a projector"):
            projector_of(*arguments)
