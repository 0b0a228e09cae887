"""Where images lie in a compiled step, and how group norms are taken back, changes no number."""

import copy

import pytest
import torch
import torch.nn.functional as F
from stepping import both, error
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import samplewise as sw
from samplewise.compiled.channels_last import CONV_GRADIENT, LAID, lay_images
from samplewise.compiled.group_norms import group_norm_gradient, take_one_pass
from samplewise.testing import relative_error

pytestmark = pytest.mark.filterwarnings("ignore:`torch._prims_common.check` is deprecated")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKWARD = torch.ops.aten.convolution_backward
GEOMETRY = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)


class Images(nn.Module):
    """Strides, groups, a transposed convolution, images in place, images that are views of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(10, 4 * 36)
        self.stem, self.norm = nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding="same", groups=8, bias=False)
        self.plain_norm, self.grouped = nn.GroupNorm(8, 8, affine=False), nn.Conv2d(8, 8, 1, groups=2)
        self.up, self.head = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Linear(144, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu_(self.norm(self.stem(self.rows(x).view(-1, 4, 6, 6))))
        x = F.relu(x + self.plain_norm(self.depthwise(x)), inplace=True)
        return self.head(self.up(self.grouped(x) + x).flatten(1))


@pytest.fixture(autouse=True)
def _float32_is_not_rounded():
    with torch.backends.cudnn.flags(allow_tf32=False), torch.device(DEVICE):
        yield


def ask(grads: sw.Grads) -> tuple:
    return grads.norms(), grads.clipped_sum(max_norm=0.1), grads.materialize()


@pytest.mark.parametrize("size", [1, 4, 7])
def test_images_in_a_compiled_step(size):
    model, x, y = Images(), torch.randn(size, 10), torch.randint(3, (size,))
    loss = lambda model, x, y: F.cross_entropy(model(x), y, reduction="none")
    compiled, _ = both(model, loss, ask)
    truth = sw.per_sample_step(copy.deepcopy(model).double(), loss, ask)
    assert error(compiled(x, y), truth(x.double(), y)) < 1e-4
    compiled(torch.randn(size + 1, 10), torch.zeros(size + 1, dtype=torch.long))  # and by the graph for all sizes
    assert error(compiled(2 * x, y), truth(2 * x.double(), y)) < 1e-4
    assert compiled.num_graphs == 2 and not compiled.num_op_by_op


def test_a_model_that_lies_channels_last_itself():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv2d(8, 3, 4), nn.Flatten())
    model = model.to(memory_format=torch.channels_last)
    x, y = torch.randn(4, 3, 6, 6).to(memory_format=torch.channels_last), torch.randint(3, (4,))
    loss = lambda model, x, y: F.cross_entropy(model(x), y, reduction="none")
    compiled, _ = both(model, loss, ask)
    truth = sw.per_sample_step(copy.deepcopy(model).double(), loss, ask)
    assert error(compiled(x, y), truth(x.double(), y)) < 1e-4


def test_a_transposed_convolution_of_images_of_width_1():
    """oneDNN leaves a part of the images' gradient unwritten where images lie channels last."""
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ConvTranspose2d(3, 1, 2, stride=(1, 3)), nn.Flatten())
    x, loss, norms = torch.randn(3, 3, 8, 1), lambda model, x: model(x).square().sum(1), lambda grads: grads.norms()
    truth = sw.per_sample_step(copy.deepcopy(model).double(), loss, norms)(x.double())
    compiled = sw.per_sample_step(model, loss, norms, compile=True)
    for _ in range(3):
        sizes = (24, 64, 72, 80, 96, 128)
        _ = [torch.full((num,), 1e20) for num in sizes]  # what the next tensors of these sizes find in their memory
        assert error(compiled(x).answer, truth.answer) < 1e-4


def test_a_compiled_step_runs_the_gradients_that_were_put_in_its_graph():
    with torch.device("cpu"):  # where no CUDA graph hides what runs
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 3, 4), nn.Flatten())
        x = torch.randn(4, 3, 6, 6)
    step = sw.per_sample_step(model, lambda model, x: model(x).square().sum(1), lambda grads: grads.norms(), compile=True)
    step(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(x)
    assert "samplewise::conv_gradient" in {event.name for event in profile.events()}


# --- graphs ---------------------------------------------------------------------------------------------------------------------


def traced(run, *tensors: Tensor) -> GraphModule:
    graph = make_fx(run, tracing_mode="fake")(*tensors)
    graph.graph.eliminate_dead_code()
    return graph


def test_gradients_of_convolutions_take_images_as_they_are_laid():
    def run(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = x.sin()
        g = torch.ops.aten.convolution(h, weight, None, *GEOMETRY).cos()
        (of_h, _, _), (_, of_weight, _) = (
            BACKWARD(g, h, weight, None, *GEOMETRY, [not which, which, False]) for which in (False, True)
        )
        return of_h.view(2, -1), of_weight

    tensors = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3)
    graph = traced(run, *tensors)
    assert lay_images(graph)
    graph.graph.lint()
    nodes = list(graph.graph.nodes)
    gradients = [node for node in nodes if node.target is CONV_GRADIENT]
    assert len(gradients) == 2 and not any(node.target is BACKWARD.default for node in nodes)
    assert all(image.target is LAID for node in gradients for image in node.args[:2])
    torch.testing.assert_close(graph(*tensors), run(*tensors))
    torch.testing.assert_close(torch.compile(graph, fullgraph=True)(*tensors), run(*tensors))


def test_an_image_that_is_written_to_later_is_left_where_it_lies():
    def run(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = x.sin()
        seen = h.relu_()
        y = torch.ops.aten.convolution(seen, weight, None, *GEOMETRY)
        seen.add_(1)
        return y, h * 2

    tensors = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3)
    graph = traced(run, *tensors)
    assert lay_images(graph) and not any(node.target is LAID for node in graph.graph.nodes)
    torch.testing.assert_close(torch.compile(graph, fullgraph=True)(*tensors), run(*tensors))


def test_a_graph_without_convolutions_is_left_alone():
    assert not lay_images(traced(lambda x: x.sin(), torch.randn(2, 3, 5, 5)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("shape", "num_groups"), [((3, 8, 5, 5), 4), ((2, 6, 7), 1), ((4, 6), 3), ((2, 6, 2, 3, 4), 6)])
@pytest.mark.parametrize("has_weight", [True, False])
def test_the_gradient_of_a_group_norm(shape, num_groups, has_weight, dtype):
    (N, C), num_positions = shape[:2], torch.Size(shape[2:]).numel()
    x, g, weight = torch.randn(shape) + 3, torch.randn(shape), torch.randn(C) if has_weight else None
    _, mean, rstd = torch.native_group_norm(x, weight, None, N, C, num_positions, num_groups, 1e-5)
    given = [t if t is None else t.to(dtype) for t in (g, x, mean, rstd, weight)]
    in_double = [t if t is None else t.double() for t in given]
    sizes = (N, C, num_positions, num_groups)
    wanted, _, _ = torch.ops.aten.native_group_norm_backward(*in_double, *sizes, [True, False, False])
    got = group_norm_gradient(*given)
    assert got.dtype == dtype and relative_error(got.double(), wanted) < (1e-10 if dtype == torch.float64 else 0.01)


def test_a_group_norm_whose_weight_is_asked_for_is_left_to_torch():
    def run(g: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        _, mean, rstd = torch.native_group_norm(x, weight, None, 2, 4, 9, 2, 1e-5)
        return torch.ops.aten.native_group_norm_backward(g, x, mean, rstd, weight, 2, 4, 9, 2, [True, True, False])[:2]

    graph = traced(run, torch.randn(2, 4, 3, 3), torch.randn(2, 4, 3, 3), torch.randn(4))
    before = str(graph.graph)
    take_one_pass(graph.graph)
    assert str(graph.graph) == before
