"""Convolutions of a compiled step whose images lie channels last, which is how GPUs and oneDNN take them, in backward too."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from samplewise.compiled.placing import LAID, LAST, tell_the_compiler
from samplewise.compiled.writes import last_writes, memory_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@torch.library.custom_op("samplewise::conv_gradient", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def conv_gradient(
    g_BOHW: Tensor,
    x_BCHW: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    of_weight: bool,
) -> Tensor:
    """The gradient of a convolution's weight, or of its images, channels last in memory.

    Torch's own op is given its tensors with the strides that they had in the trace, channels first, by compilers up to torch 2.11:
    copies, and convolutions that take three times as long (208 µs in place of 58 for 256 images of 64 to 64 channels of 32×32, H200,
    bfloat16).
    """
    g_BOHW = g_BOHW.contiguous(memory_format=LAST)
    if of_weight:  # of the other the shape is read, and where it lies
        x_BCHW = x_BCHW.contiguous(memory_format=LAST)
    else:
        weight = weight.contiguous(memory_format=LAST)
        if x_BCHW.is_cpu:  # oneDNN leaves memory unwritten where such a gradient is channels last and one pixel wide
            x_BCHW = x_BCHW.new_empty(x_BCHW.shape)
    wanted = [not of_weight, of_weight, False]
    gradients = torch.ops.aten.convolution_backward(
        g_BOHW, x_BCHW, weight, None, stride, padding, dilation, transposed, output_padding, groups, wanted
    )
    return gradients[int(of_weight)].contiguous(memory_format=LAST)


@conv_gradient.register_fake
def _(g_BOHW, x_BCHW, weight, stride, padding, dilation, transposed, output_padding, groups, of_weight):
    return torch.empty_like(weight if of_weight else x_BCHW, memory_format=LAST)


CONV, CONV_GRADIENT = torch.ops.aten.convolution.default, torch.ops.samplewise.conv_gradient.default


def lay_images(graph: GraphModule) -> bool:
    """Whether the compiler should lay images channels last, as it finds itself; then gradients of convolutions have them so too."""
    from torch._inductor.graph import GraphLowering  # imports Triton

    if not GraphLowering.decide_layout_opt(graph, is_inference=True):
        return False
    tell_the_compiler()
    for node in list(graph.graph.nodes):
        if node.target is torch.ops.aten.convolution_backward.default:
            _replace(graph.graph, node)
    _lay(graph.graph)
    graph.recompile()
    return True


def _replace(graph: Graph, node: Node) -> None:
    """Takes `conv_gradient` where one gradient is wanted, of the weight or of the images."""
    args: Any = node.args
    g, x, weight, _, *geometry, (of_x, of_weight, of_bias) = args
    results = list(node.users)
    if of_x == of_weight or of_bias or not all(_is_image(n) for n in (g, x, weight, *results)):
        return
    with graph.inserting_before(node):
        gradient = graph.call_function(CONV_GRADIENT, (g, x, weight, *geometry, of_weight))
    for result in results:
        with graph.inserting_before(node):
            traced = _laid(graph, gradient, result)
        result.replace_all_uses_with(traced)
        graph.erase_node(result)
    graph.erase_node(node)


def _lay(graph: Graph) -> None:
    """Lays the images that convolutions read, where nothing is written to them later."""
    order = {node: k for k, node in enumerate(graph.nodes)}
    written = last_writes(graph)
    for node in list(graph.nodes):
        images: Any = node.args[:2] if node.target is CONV_GRADIENT else node.args[:1] if node.target is CONV else ()
        for image in images:
            if image.target is LAID or not _is_image(image) or written.get(memory_of(image), -1) > order[image]:
                continue
            with graph.inserting_after(image):
                copy = _laid(graph, image, image)
            order[copy] = order[image]
            image.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)


def _laid(graph: Graph, image: Node, traced: Node) -> Node:
    node = graph.call_function(LAID, (image, not traced.meta["val"].is_contiguous()))
    node.meta = dict(traced.meta)
    return node


def _is_image(node: Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.ndim != 4 or value.dtype not in DTYPES:
        return False
    return value.is_contiguous() or value.is_contiguous(memory_format=LAST)
