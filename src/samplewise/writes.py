"""Which nodes of a graph write, and to what."""

from operator import getitem
from typing import Any

from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves


def written_by(node: Node) -> list[Node]:
    """The arguments that an op writes to."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = {spec.name: a for spec, a in zip(schema.arguments, node.args, strict=False)} | node.kwargs
    written = [given.get(spec.name) for spec in schema.arguments if spec.is_write]
    return [n for n in tree_leaves(written) if isinstance(n, Node)]


def written_in(graph: Graph) -> dict[Node, None]:
    """The nodes whose results are written to, by themselves or through views, in order."""
    return dict.fromkeys(root_of(t) for node in graph.nodes for t in written_by(node))


def root_of(node: Any) -> Node:
    """What the tensor is a view of."""
    while node.op == "call_function" and (node.target is getitem or is_view_op(node.target)):
        node = node.args[0]
    return node


def is_view_op(op: Any) -> bool:
    returns = op._schema.returns if isinstance(op, OpOverload) else ()
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
