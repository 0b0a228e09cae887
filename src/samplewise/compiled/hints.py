"""What the compiler does not see for itself in a step's graph: results that are alike, or better kept than computed again."""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from samplewise.compiled.group_norms import take_one_pass
from samplewise.compiled.placing import KEPT, tell_the_compiler
from samplewise.compiled.writes import is_view_op, last_writes, memory_of

LARGE = 1 << 20
"""Bytes; smaller results are not worth a thought."""
FAR = 100
"""Ops of the graph from which on a result is read late: forward and backward of a layer lie so far apart, but for the last one's."""


def hinted(graph: GraphModule) -> GraphModule:
    """The graph with the same results, as the compiler should see it."""
    copy = Graph()
    copy.output(copy.graph_copy(graph.graph, {}))
    tell_the_compiler()
    take_one_pass(copy)
    merge_masks(copy)
    keep_sums(copy)
    keep_stored(copy)
    return GraphModule(graph, copy)


def keep_sums(graph: Graph) -> None:
    """Marks results of elementwise ops that are read early and late to be `kept` where that frees more memory than it takes.

    The compiler fuses elementwise ops into whatever reads them, so that x + y, read in forward and again in backward, leaves both
    x and y in memory in between. In a layer with LoRA these are what the frozen weight gives and what the adapter adds: 4 GiB of
    21 for a Llama of 1B parameters at B4 T2048. A sum that takes more than its terms (the logits in float32) is not kept.
    """
    order = {node: k for k, node in enumerate(graph.nodes)}
    written = last_writes(graph)
    for node in list(graph.nodes):
        if not _is_elementwise(node) or _num_bytes(node) < LARGE or memory_of(node) in written:
            continue
        uses = _uses(node, order)
        if max(uses) - min(uses) < FAR:
            continue
        freed = sum(_num_bytes(t) for t in _sources(node) if max(_uses(t, order, but=node)) < max(uses))
        if freed >= 1.5 * _num_bytes(node):
            order[_keep(graph, node)] = order[node]


def keep_stored(graph: Graph) -> None:
    """Marks results of elementwise ops to be `kept` that lie in memory anyway, for a product or a kernel, and that a sum reads too.

    The compiler would compute them once more for the sum, from all that they are computed from. Kept, they are added up as they are
    stored: the gradient of gelu for that of a bias, 2.2 GB of 15.8 that elementwise ops and sums of a ViT-B/16 move (B64, bfloat16).
    """
    written = last_writes(graph)
    for node in list(graph.nodes):
        if not _is_elementwise(node) or _num_bytes(node) < LARGE or memory_of(node) in written:
            continue
        readers = {n.target for n in _readers(node)}
        if torch.ops.aten.sum.dim_IntList in readers and any(map(_reads_memory, readers)):
            _keep(graph, node)


def merge_masks(graph: Graph) -> None:
    """Lets what follows from integers and constants alone be computed once: Hugging Face's models make the same mask in every layer.

    Each would be kept for backward, 0.5 GiB for a Llama of 1B parameters at B4 T2048. What follows from parameters, or from data that
    are no integers, is left alone: a checkpoint computes it again in order not to keep it.
    """
    written = last_writes(graph)
    first: dict[Any, Node] = {}
    known: set[Node] = set()
    for node in list(graph.nodes):
        if memory_of(node) in written or not known.issuperset(node.all_input_nodes):
            continue
        if node.op == "placeholder" and _is_of_integers(node):
            known.add(node)
        elif node.op == "call_function" and _is_pure(node.target):
            same = first.setdefault((node.target, _comparable(node.args), _comparable(node.kwargs)), node)
            if same is not node and not _is_given(node):
                node.replace_all_uses_with(same)
                graph.erase_node(node)
            else:
                known.add(node)


def _keep(graph: Graph, node: Node) -> Node:
    with graph.inserting_after(node):
        copy = graph.call_function(KEPT, (node,))
    copy.meta = dict(node.meta)
    node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
    return copy


# --- graphs ---------------------------------------------------------------------------------------------------------------------


def _num_bytes(node: Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _is_elementwise(node: Node) -> bool:
    """Whether the compiler may fuse the op into whatever reads its result."""
    return node.op == "call_function" and _kind(node.target) == "elementwise"


def _is_view(node: Node) -> bool:
    return node.op == "call_function" and _kind(node.target) == "view"


@cache
def _kind(op: Any) -> str:
    schema = getattr(op, "_schema", None)
    if schema is None or schema.is_mutable:
        return "other"
    if is_view_op(op):
        return "view"
    return "elementwise" if torch.Tag.pointwise in op.tags or op is torch.ops.aten._to_copy.default else "other"


def _is_of_integers(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex()


@cache
def _is_pure(op: Any) -> bool:
    """Whether the op gives the same for the same, and writes to nothing; of others' ops nobody knows."""
    if not isinstance(op, OpOverload) or op.namespace != "aten":
        return False
    return not op._schema.is_mutable and torch.Tag.nondeterministic_seeded not in op.tags


def _is_given(node: Node) -> bool:
    """Whether the result, or a view of it, is one of the graph's."""
    return any(user.op == "output" or (_is_view(user) and _is_given(user)) for user in node.users)


def _comparable(value: Any) -> Any:
    """An argument as what is equal only if it is the same: 1, True and 1.0 are not, nor are 0.0 and -0.0."""
    if isinstance(value, dict):
        return tuple((k, _comparable(v)) for k, v in sorted(value.items()))
    if isinstance(value, list | tuple):
        return tuple(map(_comparable, value))
    return (type(value), repr(value)) if isinstance(value, int | float | complex) else value


def _readers(node: Node) -> set[Node]:
    """What reads the result, by itself or through views."""
    return set().union(*(_readers(user) if _is_view(user) else {user} for user in node.users))


PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default)


def _reads_memory(op: Any) -> bool:
    return op in PRODUCTS or getattr(op, "namespace", "") == "samplewise"


def _sources(node: Node) -> set[Node]:
    """The results in memory that an elementwise op is computed from."""
    return _reached(node, lambda n: n.all_input_nodes, {node})


def _uses(node: Node, order: dict[Node, int], but: Node | None = None) -> list[int]:
    """When a result is read, by itself or through what is fused into its readers; `but` and its readers do not count."""
    if node.op != "call_function":  # parameters and the batch stay
        return [len(order)]
    return [order[node], *(order[user] for user in _reached(node, lambda n: n.users, {node, but}))]


def _reached(node: Node, step: Callable[[Node], Iterable[Node]], seen: set[Node | None]) -> set[Node]:
    """The first nodes that are neither elementwise nor views on all ways from here that pass none of `seen`."""
    found, to_look_at = set(), [node]
    while to_look_at:
        for n in step(to_look_at.pop()):
            if n in seen:
                continue
            seen.add(n)
            if _is_elementwise(n) or _is_view(n):
                to_look_at.append(n)
            else:
                found.add(n)
    return found
