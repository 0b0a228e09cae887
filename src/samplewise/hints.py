"""What the compiler does not see for itself in a step's graph: which results are cheaper to keep, and how images should lie."""

import operator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

LARGE = 1 << 20
"""Bytes; smaller results are not worth a thought."""
FAR = 100
"""Ops of the graph from which on a result is read late: forward and backward of a layer lie so far apart, but for the last one's."""
CONVOLUTION, BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default


def hinted(graph: GraphModule) -> GraphModule:
    """The graph with the same results, as the compiler should see it."""
    copy = Graph()
    copy.output(copy.graph_copy(graph.graph, {}))
    keep_sums(copy)
    channels_together(copy)
    return GraphModule(graph, copy)


@torch.library.custom_op("samplewise::kept", mutates_args=())
def kept(t: Tensor) -> Tensor:
    """A copy of t. Compiled it is t itself, which is then in memory: later uses read it and do not compute it again."""
    return t.clone()


@kept.register_fake
def _(t: Tensor) -> Tensor:
    return torch.empty_like(t)


@cache
def tell_the_compiler() -> None:
    """Teaches Inductor what `kept` means."""
    from torch._inductor.lowering import register_lowering  # imports Triton

    @register_lowering(torch.ops.samplewise.kept.default, type_promotion_kind=None)
    def _(t):
        t.realize()
        return t


def keep_sums(graph: Graph) -> None:
    """Marks results of elementwise ops that are read early and late to be `kept` where that frees more memory than it takes.

    The compiler fuses elementwise ops into whatever reads them, so that x + y, read in forward and again in backward, leaves both
    x and y in memory in between. In a layer with LoRA these are what the frozen weight gives and what the adapter adds: 4 GiB of
    21 for a Llama of 1B parameters at B4 T2048. A sum that takes more than its terms (the logits in float32) is not kept.
    """
    order = {node: k for k, node in enumerate(graph.nodes)}
    writes = _last_writes(graph, order)
    for node in list(graph.nodes):
        if not _is_elementwise(node) or _num_bytes(node) < LARGE or writes.get(_memory_of(node), -1) >= 0:
            continue
        uses = _uses(node, order)
        if max(uses) - min(uses) < FAR:
            continue
        freed = sum(_num_bytes(t) for t in _sources(node) if max(_uses(t, order, but=node)) < max(uses))
        if freed >= 1.5 * _num_bytes(node):
            with graph.inserting_after(node):
                copy = graph.call_function(torch.ops.samplewise.kept.default, (node,))
            copy.meta, order[copy] = dict(node.meta), order[node]
            node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
            tell_the_compiler()


def channels_together(graph: Graph) -> None:
    """Gives convolutions in half precision on a GPU, and the norms of their gradients, images whose channels lie side by side.

    Tensor cores want them so. The compiler does it for forward alone, and holds backward to the strides of the trace: images then
    lie in memory twice, and cuDNN turns them around for itself, in 1.1 of the 7.1 ms of a ResNet-18 (B256, 32×32, H200). Copies
    that turn a tensor are part of the kernel that writes it or of those that read it.
    """
    order = {node: k for k, node in enumerate(graph.nodes)}
    writes = _last_writes(graph, order)
    turned: dict[Node, Node] = {}
    for node in list(graph.nodes):
        images = _images(node)
        if not images or any(writes.get(_memory_of(image), -1) > order[image] for image in images):
            continue
        for image in images:
            if image not in turned:
                turned[image] = _copied(image, torch.channels_last)
        node.args = tuple(turned[a] if a in images else a for a in node.args)
        for result in [user for user in node.users if user.target is operator.getitem] or [node]:
            if isinstance(result.meta.get("val"), Tensor) and not _is_ours(node):  # whose results lie as they did
                copy = _copied(result, torch.contiguous_format)
                result.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)


def _images(node: Node) -> list[Any]:
    """The arguments of a convolution, of its backward or of its norms that are images to be turned."""
    if not _is_ours(node) and node.target not in (CONVOLUTION, BACKWARD):
        return []
    images: list[Any] = list(node.args[: 1 if node.target is CONVOLUTION else 2])
    met = [*images, node] if node.target is CONVOLUTION else images
    values = [n.meta.get("val") for n in met]
    return images if all(isinstance(t, Tensor) and _is_suited(t) for t in values) else []


def _is_ours(node: Node) -> bool:
    return str(node.target).startswith("samplewise.conv_")


def _is_suited(image: Tensor) -> bool:
    is_half_on_gpu = image.is_cuda and image.element_size() == 2
    return is_half_on_gpu and image.ndim == 4 and image.shape[1] >= 16 and image.is_contiguous()


def _copied(node: Node, memory_format: torch.memory_format) -> Node:
    """A copy of the node's result that lies otherwise, put in behind it."""
    with node.graph.inserting_after(node):
        copy = node.graph.call_function(torch.ops.aten.clone.default, (node,), {"memory_format": memory_format})
    copy.meta["val"] = node.meta["val"].clone(memory_format=memory_format)
    return copy


# --- graphs ---------------------------------------------------------------------------------------------------------------------


def _num_bytes(node: Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _is_elementwise(node: Node) -> bool:
    """Whether the compiler may fuse the op into whatever reads its result."""
    return node.op == "call_function" and _kind(node.target) == "elementwise"


def _is_in_place(node: Node) -> bool:
    return node.op == "call_function" and _kind(node.target) == "in place"


def _is_view(node: Node) -> bool:
    return node.op == "call_function" and _kind(node.target) == "view"


@cache
def _kind(op: Any) -> str:
    schema = getattr(op, "_schema", None)
    if schema is None:
        return "other"
    if schema.is_mutable:
        return "in place"
    if any(r.alias_info is not None for r in schema.returns):
        return "view"
    return "elementwise" if torch.Tag.pointwise in op.tags or op is torch.ops.aten._to_copy.default else "other"


def _memory_of(node: Node) -> Node:
    """The node whose result this is a view of, or is written to."""
    while (_is_view(node) or _is_in_place(node)) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _last_writes(graph: Graph, order: dict[Node, int]) -> dict[Node, int]:
    """{node: when what it gave is last written to}."""
    return {_memory_of(node): order[node] for node in graph.nodes if _is_in_place(node)}


def _sources(node: Node) -> set[Node]:
    """The results in memory that an elementwise op is computed from."""
    found, seen, to_look_at = set(), {node}, [node]
    while to_look_at:
        reads = to_look_at.pop()
        for t in reads.all_input_nodes:
            if t in seen:
                continue
            seen.add(t)
            if _is_elementwise(t) or _is_view(t):
                to_look_at.append(t)
            else:
                found.add(t)
    return found


def _uses(node: Node, order: dict[Node, int], but: Node | None = None) -> list[int]:
    """When a result is read, by itself or through what is fused into its readers; `but` and its readers do not count."""
    if node.op != "call_function":  # parameters and the batch stay
        return [len(order)]
    uses, seen, to_look_at = [order[node]], {node, but}, [node]
    while to_look_at:
        for user in to_look_at.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if _is_elementwise(user) or _is_view(user):
                to_look_at.append(user)
            else:
                uses.append(order[user])
    return uses
