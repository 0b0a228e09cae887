"""Which nodes of a graph write, and to what."""

from operator import getitem
from typing import Any

from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

GIVEN = "what the graph is given"
"""One memory for all of it: an attribute has a node each time that it is read, and tensors of the batch may share theirs."""


def written_by(node: Node) -> list[Node]:
    """The arguments that an op writes to."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = _arguments(node)
    written = [given.get(spec.name) for spec in schema.arguments if spec.is_write]
    return [n for n in tree_leaves(written) if isinstance(n, Node)]


def written_in(graph: Graph) -> dict[Node, None]:
    """The nodes whose results are written to, by themselves or through views, in order."""
    return dict.fromkeys(root_of(t) for node in graph.nodes for t in written_by(node))


def last_writes(graph: Graph) -> dict[Any, int]:
    """{memory that is written to: the place in the graph of the last op that does}."""
    return {memory_of(t): place for place, node in enumerate(graph.nodes) for t in written_by(node)}


def memory_of(node: Node) -> Any:
    """What two nodes have in common that may lie in the same memory."""
    root = root_of(node)
    return root if root.op == "call_function" else GIVEN


def root_of(node: Any) -> Node:
    """What the tensor is a view of, or was written to as."""
    while node.op == "call_function":
        op, index = (node.args[0], node.args[1]) if node.target is getitem else (node, 0)
        node = _aliased(op, index)
        if node is None:
            return op
    return node


def is_view_op(op: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in _returns(op))


def _aliased(node: Any, index: int) -> Any:
    """The argument that is an op's result, or that one of its results, as a view or after writing to it; None if that is new."""
    returns = _returns(node.target)
    alias = returns[index if len(returns) > 1 else 0].alias_info if returns else None
    if alias is None:
        return None
    given = _arguments(node)
    specs = [spec for spec in node.target._schema.arguments if spec.alias_info is not None]
    names = alias.before_set or specs[0].alias_info.before_set  # a list's has none
    return next(given[spec.name] for spec in specs if names & spec.alias_info.before_set)


def _returns(op: Any) -> Any:
    return op._schema.returns if isinstance(op, OpOverload) else ()


def _arguments(node: Any) -> dict[str, Any]:
    """The arguments of an op by their names."""
    return {spec.name: a for spec, a in zip(node.target._schema.arguments, node.args, strict=False)} | node.kwargs
