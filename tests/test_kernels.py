"""Every kernel against its reference: on the GPU where there is one, else in Triton's interpreter, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from samplewise.kernels import direct_norm, gram_norm, reference
from samplewise.kernels.backend import HAS_TRITON, IS_INTERPRETED, jit, tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RUNS_KERNELS = HAS_TRITON and (DEVICE == "cuda" or IS_INTERPRETED)
runs_kernels = pytest.mark.skipif(not RUNS_KERNELS, reason="needs CUDA or TRITON_INTERPRET=1")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

TOLERANCE = 2e-5
"""Kernel and reference both multiply what is given exactly or to float32's digits (2^-22 in three parts of tf32) and add in
float32, in different orders: some hundred roundings of 6e-8, few of which go the same way."""

SHAPES = [(1, 1, 1, 1), (2, 1, 3, 5), (1, 17, 3, 40), (3, 33, 20, 7), (2, 70, 48, 65), (2, 130, 16, 33)]
"""(B, T, I, O)"""


@pytest.fixture(autouse=True)
def _empty_is_nan(monkeypatch):
    """Memory that a kernel should have written and did not shows as NaN."""
    torch.set_default_device(DEVICE)
    new_empty = Tensor.new_empty

    def filled(self: Tensor, *size, **kwargs) -> Tensor:
        out = new_empty(self, *size, **kwargs)
        return out.fill_(torch.nan) if out.is_floating_point() else out

    monkeypatch.setattr(Tensor, "new_empty", filled)
    yield
    torch.set_default_device("cpu")


@pytest.mark.skipif(RUNS_KERNELS or not HAS_TRITON, reason="the kernels run in this process, or Triton is not installed")
def test_kernels_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(Path(__file__))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" in done.stdout  # this test
    assert " passed" in done.stdout


def drawn(*shape: int, dtype: torch.dtype = torch.float32, strides: str = "plain") -> Tensor:
    """Standard normal [B, T, K] in one of the layouts that come up."""
    B, T, K = shape
    if strides == "sequence first":
        return torch.randn(T, B, K).to(dtype).transpose(0, 1)
    if strides == "positions last":
        return torch.randn(B, K, T).to(dtype).mT
    if strides == "cut":
        return torch.randn(B, T + 2, 2 * K + 3).to(dtype)[:, 1:-1, 1 : 2 * K + 1 : 2]
    if strides == "expanded":
        return torch.randn(1, T, K).to(dtype).expand(B, T, K)
    return torch.randn(B, T, K).to(dtype)


LAYOUTS = ("sequence first", "positions last", "cut", "expanded")


def close(got: Tensor, expected: Tensor, scale: Tensor | None = None) -> None:
    """Each entry within the tolerance of its own size, or of the size of the terms it sums."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    error = (got.double() - expected.double()).abs() / (expected if scale is None else scale).double().abs().clamp(min=1e-30)
    assert error.numel() == 0 or error.max() < TOLERANCE, error.max()


def check_gram(a: Tensor, g: Tensor, cut: gram_norm.Config | None = None) -> None:
    n, m = gram_norm.gram_sq_norms(a, g) if cut is None else gram_norm.launch(a, g, cut)
    expected_n, expected_m = reference.gram_sq_norms(a, g)
    close(m, expected_m)
    close(n, expected_n, scale=expected_m)


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gram_norm(shape, dtype):
    B, T, I, O = shape
    check_gram(drawn(B, T, I, dtype=dtype), drawn(B, T, O, dtype=dtype))


@runs_kernels
@pytest.mark.parametrize("num_splits", [1, 2, 5])
@pytest.mark.parametrize("block_t", [16, 32])
def test_gram_norm_however_it_is_cut(block_t, num_splits):
    a, g = drawn(2, 50, 20), drawn(2, 50, 150)
    check_gram(a, g, gram_norm.Config(block_t, 16, num_splits, 4, 2))


@runs_kernels
@pytest.mark.parametrize("strides", LAYOUTS)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_gram_norm_of_strided(strides, num_splits):
    a, g = drawn(2, 19, 20, strides=strides), drawn(2, 19, 9, strides=strides)
    check_gram(a, g, gram_norm.Config(16, 16, num_splits, 4, 2))
    check_gram(a, drawn(2, 19, 9, dtype=torch.bfloat16), gram_norm.Config(16, 16, num_splits, 4, 2))


@jit
def _write_pairs(start, out_ptr, NUM: tl.constexpr):
    at = tl.arange(0, NUM)
    i, j = gram_norm.pair_of_tiles(start + at)
    tl.store(out_ptr + at, i)
    tl.store(out_ptr + NUM + at, j)


@runs_kernels
@pytest.mark.parametrize("row", [0, 100, 4096, 20_000])
def test_pairs_of_tiles_are_all_there(row):
    """The square root that numbers them is in float32, and its argument has more digits from row 2,048 on."""
    start, num = row * (row + 1) // 2, 1 << 16
    got = torch.full((2, num), -1, dtype=torch.int32)
    _write_pairs[(1,)](start, got, NUM=num)
    i, j = got.long()
    assert (i >= 0).all() and (i <= j).all()
    assert torch.equal(j * (j + 1) // 2 + i, start + torch.arange(num))


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_direct_norm(shape, dtype):
    B, T, I, O = shape
    a, g = drawn(B, T, I, dtype=dtype), drawn(B, T, O, dtype=dtype)
    close(direct_norm.direct_sq_norms(a, g), reference.direct_sq_norms(a, g))


@runs_kernels
@pytest.mark.parametrize("strides", LAYOUTS)
def test_direct_norm_of_strided(strides):
    a, g = drawn(2, 19, 20, strides=strides), drawn(2, 19, 70, strides=strides)
    for cut in (direct_norm.config(a, g), direct_norm.Config(16, 16, 16, 4, 2)):
        close(direct_norm.launch(a, g, cut), reference.direct_sq_norms(a, g))


NORMS = {"gram": lambda a, g: gram_norm.gram_sq_norms(a, g)[0], "direct": direct_norm.direct_sq_norms}


@runs_kernels
@pytest.mark.parametrize("norms", NORMS.values(), ids=NORMS)
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, in the interpreter
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_sample_stays_alone(norms, bad):
    a, g = drawn(3, 20, 5), drawn(3, 20, 6)
    expected = norms(a, g)
    a[1, 3, 2] = bad
    got = norms(a, g)
    assert not got[1].isfinite()
    assert torch.equal(got[[0, 2]], expected[[0, 2]])


@runs_kernels
@pytest.mark.parametrize("norms", NORMS.values(), ids=NORMS)
def test_offsets_past_two_to_the_31(norms):
    """Storage in which samples, positions and columns lie more than 2^31 elements apart, touched only where they lie."""
    storage = torch.empty(2**31 + 100, dtype=torch.bfloat16)
    for strides in ((2**31 - 60, 3, 1), (3, 2**31 // 17, 1), (54, 1, 2**30)):
        a = storage.as_strided((2, 18, 3), strides)
        a.copy_(torch.randn(a.shape))
        g = drawn(2, 18, 4, dtype=torch.bfloat16)
        torch.testing.assert_close(norms(a, g), norms(a.contiguous(), g), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(0, 3, 2, 2), (2, 0, 3, 4), (2, 3, 0, 4), (2, 3, 4, 0)])
def test_nothing_gives_nothing(shape):
    B, T, I, O = shape
    a, g = drawn(B, T, I), drawn(B, T, O)
    for norms in NORMS.values():
        assert torch.equal(norms(a, g), torch.zeros(B))


def test_the_cpu_has_the_reference():
    a, g = drawn(2, 5, 3, dtype=torch.float64), drawn(2, 5, 4, dtype=torch.float64)
    for got, expected in zip(gram_norm.gram_sq_norms(a, g), reference.gram_sq_norms(a, g), strict=True):
        assert torch.equal(got, expected)
    assert torch.equal(direct_norm.direct_sq_norms(a, g), reference.direct_sq_norms(a, g))


@pytest.mark.parametrize("norms", NORMS.values(), ids=NORMS)
def test_sides_that_do_not_fit_are_refused(norms):
    with pytest.raises(ValueError, match=r"a \(2, 5, 3\) on .* and g \(2, 4, 3\) .* must be \[B, T, I\] and \[B, T, O\]"):
        norms(drawn(2, 5, 3), drawn(2, 4, 3))


CALLS = {
    "gram": lambda: (gram_norm.gram_sq_norms, (drawn(2, 5, 3), drawn(2, 5, 4))),
    "gram bf16": lambda: (gram_norm.gram_sq_norms, (drawn(2, 5, 3).bfloat16(), drawn(2, 5, 4).bfloat16())),
    "direct": lambda: (direct_norm.direct_sq_norms, (drawn(2, 5, 3), drawn(2, 5, 4))),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_graphs_take_the_ops(call):
    op, arguments = call()
    torch.library.opcheck(op, arguments)
    expected = op(*arguments)
    traced = make_fx(lambda *tensors: op(*tensors), tracing_mode="fake")(*arguments)
    compiled = torch.compile(lambda *tensors: op(*tensors), fullgraph=True, backend="aot_eager")
    for got in (traced(*arguments), compiled(*arguments)):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
