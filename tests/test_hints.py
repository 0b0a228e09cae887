"""What the compiler is told of a graph changes where and how long results lie in memory, and no number."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import samplewise as sw
from samplewise.compiled import hints

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
        first = much_else(h.exp() @ w)
        h.mul_(2.0)
        return first, h @ w

    tensors = drawn((WIDE, WIDE), (WIDE, WIDE))
    graph, num_kept = hinted(run, *tensors)
    assert num_kept == 0
    torch.testing.assert_close(graph(*tensors), run(*tensors))


def num_of(graph: GraphModule, name: str) -> int:
    return sum(name in str(node.target) for node in graph.graph.nodes)


def masked(ids: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """Layers, each with a mask of its own."""
    for _ in range(3):
        mask = torch.where(ids.unsqueeze(1) >= torch.arange(len(ids)), 0.0, -torch.inf)
        x = (x @ w + mask).softmax(-1)
    return x


def test_a_mask_is_computed_once():
    tensors = [torch.arange(6), *drawn((6, 6), (6, 6))]
    graph, _ = hinted(masked, *tensors)
    assert (num_of(traced(masked, *tensors), "where"), num_of(graph, "where")) == (3, 1)
    torch.testing.assert_close(graph(*tensors), masked(*tensors))


def test_what_only_looks_alike_is_not_merged():
    def run(ids, x):
        drawn = [torch.rand(6).sum() for _ in range(2)]
        return (
            drawn[0] * x, drawn[1] * x,
            (ids * 1 / 1) * x, (ids * 1.0 / 2) * x, torch.full((6,), 1) / x, torch.full((6,), 1.0) / x, torch.full((6,), True) / x,
            torch.full((6,), 0.0) / x.abs(), 1 / (torch.full((6,), -0.0) * x.abs()),
        )  # fmt: skip

    tensors = [torch.arange(6), *drawn((6,))]
    graph, _ = hinted(run, *tensors)
    torch.manual_seed(3)
    mine = graph(*tensors)
    torch.manual_seed(3)
    torch.testing.assert_close(mine, run(*tensors))
    assert not torch.equal(mine[0], mine[1])


WRITES = {
    "itself": lambda z, ids: z.add_(ids),
    "an element": lambda z, ids: z.__setitem__(0, 5.0),
    "rows": lambda z, ids: z.__setitem__(ids[:2], 5.0),
    "a view": lambda z, ids: z.view(2, 3)[0].copy_(torch.ones(3)),
    "a part of a split": lambda z, ids: z.split(3)[0].add_(5.0),
    "a part of all": lambda z, ids: z.unbind(0)[1].fill_(3.0),
    "one of a list": lambda z, ids: torch._foreach_add_([z], 5.0),
    "out=": lambda z, ids: torch.add(ids, 1.5, out=z),
    "scattered": lambda z, ids: z.scatter_add_(0, ids, torch.ones(6)),
    "a view of a result in place": lambda z, ids: z.add_(1.0).view(2, 3).mul_(2.0),
}


def gelu_back(h: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """What the layer below gets, and the gradient of its bias."""
    back = torch.ops.aten.gelu_backward(g, h)
    return back.view(-1, WIDE) @ w, back.sum(1)


def test_what_a_product_reads_is_added_up_as_it_is_stored():
    tensors = drawn((2, WIDE, WIDE), (2, WIDE, WIDE), (WIDE, WIDE))
    graph, num_kept = hinted(gelu_back, *tensors)
    assert num_kept == 1
    torch.testing.assert_close(graph(*tensors), gelu_back(*tensors))
    torch.testing.assert_close(torch.compile(graph, fullgraph=True)(*tensors), gelu_back(*tensors), rtol=1e-4, atol=1e-4)
    back = torch.ops.aten.gelu_backward
    assert hinted(lambda h, g, w: back(g, h).view(-1, WIDE) @ w, *tensors)[1] == 0
    assert hinted(lambda h, g, w: back(g, h).sum(1), *tensors)[1] == 0


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_to_in_between_is_not_merged(name):
    def run(ids, x):
        z = torch.zeros(6)
        before = z + 1
        WRITES[name](z, ids)
        return before * x, (z + 1) * x

    tensors = [torch.arange(6), *drawn((6,))]
    torch.testing.assert_close(hinted(run, *tensors)[0](*tensors), run(*tensors))


@torch.library.custom_op("test_hints::noise", mutates_args=())
def noise(ids: Tensor) -> Tensor:
    return torch.rand(ids.shape)


@noise.register_fake
def _(ids: Tensor) -> Tensor:
    return torch.empty(ids.shape)


def test_ops_of_others_are_not_merged():
    """One that draws need not say so."""
    graph, _ = hinted(lambda ids, x: (noise(ids) * x, noise(ids) * x), torch.arange(6), torch.ones(6))
    assert not torch.equal(*graph(torch.arange(6), torch.ones(6)))


def test_results_of_the_step_stay_two():
    graph, _ = hinted(lambda ids: (ids + 1, ids + 1, (ids + 1).view(2, 3)), torch.arange(6))
    one, two, three = graph(torch.arange(6))
    assert len({t.data_ptr() for t in (one, two, three)}) == 3


def test_what_a_checkpoint_computes_again_is_computed_again():
    def run(x, w):
        w.requires_grad_()
        out = checkpoint(lambda x: (x @ w).sin().sin(), x, use_reentrant=False)
        return torch.autograd.grad(out.sum(), w)

    tensors = drawn((3, 4), (4, 4))
    assert num_of(hinted(run, *tensors)[0], "sin") == num_of(traced(run, *tensors), "sin") == 3


def test_gradients_are_built_as_backward_passes():
    """Put off until norms are asked for, they would keep every activation and every gradient of one till then."""
    config = LlamaConfig(
        vocab_size=17, hidden_size=64, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=12, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    loss_fn = lambda model, ids: model(ids).logits.square().sum((1, 2))
    query = lambda grads: grads.clipped_sum(max_norm=1.0)
    step = sw.per_sample_step(LlamaForCausalLM(config), loss_fn, query, compile=True, plan={"*": "build"}, verify=False)
    uncached = torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False)
    with uncached[0], uncached[1]:
        _, (code,) = run_and_get_code(step, torch.randint(17, (4, 12)))
    products = re.findall(r"extern_kernels\.(b?mm)\(", code)
    assert products.count("bmm") == 8  # 7 layers and the head
    assert "bmm" in products[:10], products
