"""Every kernel against its reference: on the GPU where there is one, else in Triton's interpreter, in a process of its own."""

import doctest
import itertools
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import samplewise as sw
from samplewise.factors import patches
from samplewise.kernels import conv_gram_norm, conv_norm, depthwise, direct_norm, gram_norm, reference
from samplewise.kernels.backend import HAS_TRITON, IS_INTERPRETED, jit, tl
from samplewise.plan import ROUTES
from samplewise.testing import oracle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RUNS_KERNELS = HAS_TRITON and (DEVICE == "cuda" or IS_INTERPRETED)
runs_kernels = pytest.mark.skipif(not RUNS_KERNELS, reason="needs CUDA or TRITON_INTERPRET=1")

once = pytest.mark.skipif(IS_INTERPRETED, reason="has run in the process that started this one")

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
def test_kernels_in_the_interpreter(pytestconfig):
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    warnings = [f"-W{warning}" for warning in pytestconfig.getoption("pythonwarnings") or ()]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *warnings, str(Path(__file__))]
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


@runs_kernels
@pytest.mark.parametrize("columns", [(20, 9), (16, 150), (7, 33)])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_gram_norm_of_rows_that_are_padded(columns, num_splits):
    """Columns that are no multiple of 16 in rows that are aligned: what lies between the rows is not read."""
    a, g = (drawn(2, 19, 160)[..., :K] for K in columns)
    for t in (a, g):
        t._base[..., t.shape[-1] :] = float("nan")
    check_gram(a, g, gram_norm.Config(16, 32, num_splits, 4, 2))


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


@dataclass(frozen=True)
class Conv:
    """A convolution of C channels of H×W to O, its gradient not always as large as the image allows."""

    B: int = 2
    C: int = 3
    O: int = 4
    size: tuple[int, int] = (7, 6)
    kernel: tuple[int, int] = (3, 3)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    lost: int = 0

    def drawn(self, dtype: torch.dtype, memory_format: torch.memory_format = torch.contiguous_format) -> tuple:
        outs = [
            (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1 - self.lost
            for size, padding, dilation, kernel, stride in zip(
                self.size, self.padding, self.dilation, self.kernel, self.stride, strict=True
            )
        ]
        x, g = torch.randn(self.B, self.C, *self.size), torch.randn(self.B, self.O, *outs)
        x, g = (t.to(dtype).to(memory_format=memory_format) for t in (x, g))
        return x, g, self.kernel, self.stride, self.padding, self.dilation, self.groups


CONVS = {
    "plain": Conv(),
    "pointwise": Conv(kernel=(1, 1), padding=(0, 0), C=17, O=20),
    "strided and dilated": Conv(size=(11, 9), stride=(2, 3), dilation=(2, 1), padding=(2, 0)),
    "one dimension": Conv(size=(1, 20), kernel=(1, 5), padding=(0, 2)),
    "groups": Conv(C=6, O=9, groups=3),
    "depthwise": Conv(C=5, O=5, groups=5, B=1),
    "kernel with no square": Conv(kernel=(2, 5), padding=(0, 3), size=(4, 5)),
    "many channels": Conv(C=18, O=33, size=(5, 5)),
    "a gradient that does not cover": Conv(size=(9, 9), lost=1),
    "a gradient that reaches beyond": Conv(size=(5, 5), lost=-2),
}


@runs_kernels
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("conv", CONVS.values(), ids=CONVS)
def test_conv(conv, memory_format):
    arguments = conv.drawn(torch.float32, memory_format)
    expected = reference.conv_per_sample(*arguments)
    close(conv_norm.conv_per_sample(*arguments), expected, scale=expected.abs().max())
    close(conv_norm.conv_sq_norms(*arguments), reference.conv_sq_norms(*arguments))
    check_conv_gram(arguments, conv_gram_norm.config(arguments[1]))
    check_conv_gram(arguments, gram_norm.Config(16, 16, 1, 4, 2))


def check_conv_gram(arguments: tuple, cut: gram_norm.Config) -> None:
    (n, m), (expected_n, expected_m) = conv_gram_norm.launch(*arguments, cut), reference.conv_gram_sq_norms(*arguments)
    close(m, expected_m)
    close(n, expected_n, scale=expected_m)


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_conv_in_half(dtype):
    arguments = CONVS["many channels"].drawn(dtype)
    expected = reference.conv_per_sample(*arguments)
    assert conv_norm.conv_per_sample(*arguments).dtype == dtype
    rounding = torch.finfo(dtype).eps  # added in float32, rounded once
    torch.testing.assert_close(conv_norm.conv_per_sample(*arguments).float(), expected, rtol=rounding, atol=1e-4)
    close(conv_norm.conv_sq_norms(*arguments), reference.conv_sq_norms(*arguments))
    check_conv_gram(arguments, conv_gram_norm.config(arguments[1]))


@runs_kernels
def test_conv_however_it_is_cut():
    x, g, *geometry = CONVS["many channels"].drawn(torch.float32)
    x, g = x[:, :, ::2].flip(0).transpose(2, 3), g[:, :, :3].transpose(2, 3)
    for cut in (conv_norm.Config(16, 16, 16, 1, 4, 2), conv_norm.Config(32, 64, 16, 1, 4, 2)):
        close(conv_norm.launch(x, g, *geometry, cut), reference.conv_sq_norms(x, g, *geometry))
    for conv, num_splits in itertools.product(("groups", "strided and dilated", "many channels"), (2, 3, 5)):
        x, g, *geometry = CONVS[conv].drawn(torch.float32)
        expected, cut = reference.conv_per_sample(x, g, *geometry), conv_norm.Config(16, 16, 16, num_splits, 4, 2)
        close(conv_norm.launch(x, g, *geometry, cut), reference.conv_sq_norms(x, g, *geometry))
        close(conv_norm.launch(x, g, *geometry, cut, torch.empty_like(expected)), expected, scale=expected.abs().max())


DEPTHWISE = {
    "one channel": Conv(C=1, O=3),
    "no power of two": Conv(C=5, O=5, groups=5, B=1),
    "two outputs a channel": Conv(C=20, O=40, groups=20, kernel=(7, 7), padding=(3, 3), size=(9, 8)),
    "strided and dilated": Conv(C=4, O=4, groups=4, size=(11, 9), stride=(2, 3), dilation=(2, 1), padding=(2, 0)),
    "a long kernel": Conv(C=33, O=33, groups=33, size=(1, 80), kernel=(1, 70), padding=(0, 35)),
    "a gradient that does not cover": Conv(C=3, O=3, groups=3, size=(9, 9), lost=1),
    "a gradient that reaches beyond": Conv(C=3, O=3, groups=3, size=(5, 5), lost=-2),
}


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("conv", DEPTHWISE.values(), ids=DEPTHWISE)
def test_depthwise(conv, memory_format, dtype):
    *images, groups = conv.drawn(dtype, memory_format)
    assert groups == conv.C
    expected = reference.conv_per_sample(*images, groups)
    cuts = depthwise.config(images[1], images[2]), depthwise.Config(4, 8, 2, 3), depthwise.Config(32, 16, 4, 1)
    for cut in cuts:
        got = depthwise.launch(*images, cut)
        torch.testing.assert_close(got, expected, rtol=TOLERANCE, atol=TOLERANCE * expected.abs().max().item())
    assert torch.equal(depthwise.depthwise_per_sample(*images), depthwise.launch(*images, cuts[0]))


@runs_kernels
@pytest.mark.parametrize(("layer", "size"), [
    (nn.Conv2d(16, 4, 3, padding=1), (12, 11)), (nn.Conv2d(32, 6, (2, 3), stride=2, groups=2), (6, 7)),
    (nn.Conv1d(16, 3, 4, padding="same"), (140,)), (nn.ConvTranspose2d(3, 16, 3, stride=2), (4, 5)),
    (nn.Conv2d(3, 4, 3), (5, 5)), (nn.Conv3d(16, 2, 2), (3, 3, 3)), (nn.Conv2d(6, 12, 3, padding=1, groups=6), (5, 4)),
    (nn.Conv1d(8, 6, 3, groups=2, dilation=2), (9,)), (nn.ConvTranspose2d(4, 4, 3, groups=4), (4, 3)),
], ids=str)  # fmt: skip
def test_convolutions_by_every_route(layer, size, monkeypatch):
    """What the library makes of the kernels, against one backward a sample in float64."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    layer, x = layer.to(DEVICE), torch.randn(3, layer.in_channels, *size)
    square = lambda model, x: model(x).square().flatten(1).sum(1)
    truth = oracle(layer, square, x)["weight"]
    for route in ROUTES:
        with sw.capture(layer, params=["weight"], plan={"weight": route}, verify=False) as grads:
            square(layer, x).sum().backward()
        close(grads.norms().double(), truth.flatten(1).norm(dim=1))
        close(grads.materialize()["weight"].double(), truth, scale=truth.abs().max())


@runs_kernels
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_gradients_beyond_half_precision_have_norms(groups, route):
    """Entries of 100,000, which float16 does not have: norms are of what is added in float32, not of what is rounded."""
    layer, x = (
        nn.Conv2d(4, 4, 3, padding=1, groups=groups, bias=False).half().to(DEVICE),
        torch.randint(30, (2, 4, 9, 9)).half(),
    )
    large = lambda model, x: (model(x).float() * 100).flatten(1).sum(1)
    truth = oracle(layer, large, x)["weight"]
    assert truth.max() > torch.finfo(torch.float16).max
    with sw.capture(layer, plan={"weight": route}, verify=False) as grads:
        grads.backward(large(layer, x))
    norms = truth.flatten(1).norm(dim=1)
    torch.testing.assert_close(grads.norms().double(), norms, rtol=1e-5, atol=0)
    clipped = (truth / norms.view(-1, 1, 1, 1, 1)).sum(0)
    torch.testing.assert_close(grads.clipped_sum(max_norm=1.0)["weight"].double(), clipped, rtol=2e-3, atol=0)  # in float16


@runs_kernels
@pytest.mark.parametrize(("groups", "is_taken"), [(6, True), (3, False), (1, False)])
def test_depthwise_convolutions_take_their_kernel(groups, is_taken, monkeypatch):
    calls, kernel = [], patches.depthwise_per_sample
    monkeypatch.setattr(patches, "depthwise_per_sample", lambda *args: calls.append(args) or kernel(*args))
    layer = nn.Conv2d(6, 6, 3, groups=groups)
    with sw.capture(layer, verify=False) as grads:
        layer(torch.randn(2, 6, 5, 5)).sum().backward()
    grads.norms()
    assert bool(calls) == is_taken


@once
@pytest.mark.parametrize("conv", CONVS.values(), ids=CONVS)
def test_the_reference_of_conv_is_the_gradient(conv):
    """Autograd's own gradient of a weight, sample by sample."""
    x, g, kernel, stride, padding, dilation, groups = conv.drawn(torch.float64)
    if conv.lost:
        pytest.skip("no convolution has this gradient")
    for b in range(conv.B):
        weight = torch.zeros(conv.O, conv.C // groups, *kernel, dtype=torch.float64, requires_grad=True)
        y = F.conv2d(x[b : b + 1], weight, stride=stride, padding=padding, dilation=dilation, groups=groups)
        (gradient,) = torch.autograd.grad(y, weight, g[b : b + 1])
        got = reference.conv_per_sample(x, g, kernel, stride, padding, dilation, groups)[b]
        torch.testing.assert_close(got, gradient, rtol=1e-12, atol=1e-12)
        n, m = reference.conv_gram_sq_norms(x, g, kernel, stride, padding, dilation, groups)
        torch.testing.assert_close(n[b], gradient.square().sum(), rtol=1e-12, atol=1e-12)
        assert n[b] <= m[b] * (1 + 1e-12)


NORMS = {"gram": lambda a, g: gram_norm.gram_sq_norms(a, g)[0], "direct": direct_norm.direct_sq_norms}
FAR = {
    **NORMS,
    "gram in parts": lambda a, g: gram_norm.launch(a, g, gram_norm.Config(16, 16, 2, 4, 2))[0],
    "conv": lambda a, g: conv_norm.conv_sq_norms(a.mT.unsqueeze(2), g.mT.unsqueeze(2), [1, 1], [1, 1], [0, 0], [1, 1], 1),
    "conv Gram": lambda a, g: conv_gram_norm.conv_gram_sq_norms(
        a.mT.unsqueeze(2), g.mT.unsqueeze(2), [1, 1], [1, 1], [0, 0], [1, 1], 1
    )[0],
    "depthwise": lambda a, g: depthwise.depthwise_per_sample(
        a.mT.unsqueeze(2), g[..., :3].mT.unsqueeze(2), [1, 1], [1, 1], [0, 0], [1, 1]
    ),
}
"""What is asked of a whose entries lie far apart."""


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
@pytest.mark.parametrize("norms", FAR.values(), ids=FAR)
def test_offsets_past_two_to_the_31(norms):
    """Storage in which samples, positions and columns lie more than 2^31 elements apart, touched only where they lie."""
    storage = torch.empty(2**31 + 2**28, dtype=torch.bfloat16)
    for strides in (
        (2**30 + 64, 3, 1),
        (3, 2**31 // 17 + 16, 1),
        (54, 1, 2**30 + 8),
    ):  # each fits 31 bits, twice it does not
        a = storage.as_strided((3, 18, 3), strides)
        a.copy_(torch.randn(a.shape))
        g = drawn(3, 18, 4, dtype=torch.bfloat16)
        torch.testing.assert_close(norms(a, g), norms(a.contiguous(), g), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(0, 3, 2, 2), (2, 0, 3, 4), (2, 3, 0, 4), (2, 3, 4, 0)])
def test_nothing_gives_nothing(shape):
    B, T, I, O = shape
    a, g = drawn(B, T, I), drawn(B, T, O)
    for norms in NORMS.values():
        assert torch.equal(norms(a, g), torch.zeros(B))


@once
def test_nothing_here_is_imported_before_it_is_needed():
    """And without Triton the ops are there, with the reference's numbers."""
    code = """
import sys, samplewise, torch
assert not [name for name in sys.modules if name.startswith(("triton", "samplewise.kernels"))]
sys.modules["triton"] = None  # as if it were not installed
from samplewise.kernels import conv_gram_norm, conv_norm, depthwise, direct_norm, gram_norm
print(direct_norm.direct_sq_norms(torch.ones(1, 2, 3), torch.ones(1, 2, 4)).tolist())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[48.0]\n", done.stderr


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
    "conv": lambda: (conv_norm.conv_per_sample, CONVS["groups"].drawn(torch.float32)),
    "conv bf16": lambda: (conv_norm.conv_per_sample, CONVS["plain"].drawn(torch.bfloat16, torch.channels_last)),
    "conv Gram": lambda: (conv_gram_norm.conv_gram_sq_norms, CONVS["groups"].drawn(torch.bfloat16)),
    "conv norm": lambda: (conv_norm.conv_sq_norms, CONVS["plain"].drawn(torch.bfloat16)),
    "depthwise": lambda: (depthwise.depthwise_per_sample, CONVS["depthwise"].drawn(torch.bfloat16)[:-1]),
}


OPS = list(dict.fromkeys(call()[0] for call in CALLS.values()))


@pytest.mark.parametrize("op", OPS, ids=lambda op: op._name)
def test_examples(op):
    """pytest does not look into custom ops."""
    for example in doctest.DocTestFinder().find(op._init_fn, op._name, globs={"torch": torch, op._init_fn.__name__: op}):
        assert doctest.DocTestRunner().run(example).failed == 0


@once
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_graphs_take_the_ops(call):
    op, arguments = call()
    torch._dynamo.reset()  # else eight ops are too many for one lambda
    torch.library.opcheck(op, arguments)
    expected = op(*arguments)
    traced = make_fx(lambda *tensors: op(*tensors), tracing_mode="fake")(*arguments)
    compiled = torch.compile(lambda *tensors: op(*tensors), fullgraph=True, backend="aot_eager")
    assert [node for node in traced.graph.nodes if "samplewise" in str(node.target)]
    for got in (traced(*arguments), compiled(*arguments)):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
