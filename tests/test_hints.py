"""What the compiler is told of a graph changes where results lie, and no number."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import samplewise.hints as hints

WIDE = 512
"""Tensors of 512×512 are a megabyte in float32, which is large enough to be thought about."""


def traced(run, *tensors: Tensor) -> GraphModule:
    return make_fx(run, tracing_mode="fake")(*tensors)


def hinted(run, *tensors: Tensor) -> tuple[GraphModule, int]:
    """The graph with its hints, and how many results are kept."""
    graph = traced(run, *tensors)
    before = str(graph.graph)
    told = hints.hinted(graph)
    told.graph.lint()
    assert str(graph.graph) == before  # it is compared with others later
    return told, sum("kept" in str(node.target) for node in told.graph.nodes)


def adapted(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """A layer with LoRA and its gelu, in forward and, after much else, in backward."""
    h = x @ w + x @ a @ b * 2.0
    y = F.gelu(h) @ w
    return y, torch.ops.aten.gelu_backward(much_else(y), h) @ w


def much_else(y: Tensor) -> Tensor:
    for _ in range(hints.FAR // 2):
        y = y.sin().mean(1, keepdim=True) + y
    return y


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape) / shape[0] ** 0.5 for shape in shapes]


LORA = ((WIDE, WIDE), (WIDE, WIDE), (WIDE, 8), (8, WIDE))


def test_a_sum_read_late_is_kept_in_place_of_its_terms():
    tensors = drawn(*LORA)
    graph, num_kept = hinted(adapted, *tensors)
    assert num_kept == 1
    torch.testing.assert_close(graph(*tensors), adapted(*tensors))


def test_the_compiler_keeps_it():
    tensors = drawn(*LORA)
    graph, _ = hinted(adapted, *tensors)
    compiled = torch.compile(graph.forward, fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(*tensors), adapted(*tensors), rtol=1e-4, atol=1e-4)


def test_what_takes_more_than_its_terms_is_not_kept():
    def run(x, w):
        z = (x @ w).float()  # twice the bytes of what it is computed from
        first = z.exp().sum()
        return first, (z * much_else(z).sum()).sum()

    assert hinted(run, *(t.bfloat16() for t in drawn((2 * WIDE, WIDE), (WIDE, WIDE))))[1] == 0


def test_a_sum_whose_terms_are_needed_anyway_is_not_kept():
    def run(x, w):
        a, b = x @ w, x.mT @ w
        h = a + b
        first = h.exp() @ w
        return first, h * much_else(first) @ w, a @ b

    assert hinted(run, *drawn((WIDE, WIDE), (WIDE, WIDE)))[1] == 0


def test_what_is_read_at_once_is_not_kept():
    def run(x, w):
        h = x @ w + x.mT @ w
        return h.sin().sum(), (h * 2.0).sum(1), much_else(x)

    assert hinted(run, *drawn((WIDE, WIDE), (WIDE, WIDE)))[1] == 0


def test_what_is_written_to_is_not_kept():
    def run(x, w):
        h = x @ w + x.mT @ w
        first = h.exp() @ w
        h.mul_(2.0)
        return much_else(first), h @ w

    tensors = drawn((WIDE, WIDE), (WIDE, WIDE))
    graph, num_kept = hinted(run, *tensors)
    assert num_kept == 0
    torch.testing.assert_close(graph(*tensors), run(*tensors))


def convolved(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.relu_(x * 1.5)
    y = F.conv2d(x, w, padding=1)
    y = y.view(2, -1, 3, 10).view(y.shape)  # as of an image that lies as it did
    gradients = torch.ops.aten.convolution_backward(
        g, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
    )
    return y, gradients[0], gradients[1]


def turned(monkeypatch, run, *tensors: Tensor) -> tuple[GraphModule, int]:
    """The graph with its images turned as on a GPU, and how many are."""
    monkeypatch.setattr(hints, "_is_suited", lambda image: image.ndim == 4 and image.shape[1] >= 16)
    graph, _ = hinted(run, *tensors)
    return graph, sum(node.kwargs.get("memory_format") is torch.channels_last for node in graph.graph.nodes)


def test_each_image_is_turned_once(monkeypatch):
    tensors = drawn((2, 16, 6, 5), (20, 16, 3, 3), (2, 20, 6, 5))
    graph, num_turned = turned(monkeypatch, convolved, *tensors)
    assert num_turned == 2  # x for both ops, and g
    torch.testing.assert_close(graph(*tensors), convolved(*tensors), check_stride=True)


def test_images_of_few_channels_and_of_one_dimension_stay(monkeypatch):
    few = drawn((2, 3, 6, 5), (20, 3, 3, 3), (2, 20, 6, 5))
    assert turned(monkeypatch, convolved, *few)[1] == 0
    assert turned(monkeypatch, lambda x, w: F.conv1d(x, w), *drawn((2, 16, 9), (20, 16, 3)))[1] == 0


def test_an_image_written_to_later_stays(monkeypatch):
    def run(x, w):
        x = x * 1.5
        y = F.conv2d(x, w)
        x.mul_(2.0)
        return y, F.conv2d(x, w)

    tensors = drawn((2, 16, 6, 5), (20, 16, 3, 3))
    graph, _ = turned(monkeypatch, run, *tensors)
    torch.testing.assert_close(graph(*tensors), run(*tensors))


def test_a_gpu_alone_has_its_images_turned():
    assert not hints._is_suited(torch.zeros(2, 16, 3, 3, dtype=torch.bfloat16))
