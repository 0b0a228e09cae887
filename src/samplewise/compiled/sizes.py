"""One graph for every size of a batch, out of graphs for a few."""

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from samplewise.errors import SamplewiseError


class NotAlikeError(SamplewiseError):
    """Two graphs of one step differ by more than the size of the batch."""


@dataclass(frozen=True)
class Of:
    """A number that follows the size of the batch: factor · B^power + offset.

    >>> Of(256).at(4), Of(2.0, power=-1).at(4)
    (1024, 0.5)
    """

    factor: float
    power: int = 1
    offset: int = 0

    def at(self, size: int) -> float:
        return self.factor * size**self.power + self.offset


Template = list[tuple[Any, Any]]
"""The arguments of each node of a graph, with `Of` in the place of numbers that follow the size of the batch."""


def template(first: GraphModule, second: GraphModule, sizes: tuple[int, int]) -> Template:
    """What two graphs of one step for batches of two sizes have in common; raises if that is not all but sizes."""
    pairs = _pairs(first.graph, second.graph)
    return [(_common(one, (one.args, two.args), sizes), _common(one, (one.kwargs, two.kwargs), sizes)) for one, two in pairs]


def check(form: Template, first: GraphModule, other: GraphModule, size: int) -> None:
    """Raises if the graph of a third size is not what the template says."""
    for (args, kwargs), (one, node) in zip(form, _pairs(first.graph, other.graph), strict=True):
        for said, seen in zip(_leaves((args, kwargs)), _leaves((node.args, node.kwargs)), strict=True):
            said = said.at(size) if isinstance(said, Of) else said
            close = isinstance(said, float) and isinstance(seen, float) and math.isclose(said, seen, rel_tol=1e-14)
            if not isinstance(said, Node) and said != seen and not close:
                raise _not_alike(one)


def of_any_size(form: Template, graph: GraphModule, rows: tuple[int, int]) -> GraphModule:
    """The graph with the size of the batch read from its inputs: dimension rows[1] of the placeholder rows[0]."""
    out, known = Graph(), {}
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    size: Any = None

    def number(of: Of) -> Any:
        if of not in known:
            power = size if of.power == 1 else out.call_function(operator.pow, (size, of.power))
            product = power if of.factor == 1 else out.call_function(operator.mul, (power, of.factor))
            known[of] = product if of.offset == 0 else out.call_function(operator.add, (product, of.offset))
        return known[of]

    def filled(value: Any) -> Any:
        if isinstance(value, Of):
            return number(value)
        if isinstance(value, Node):
            return twins[value]
        if isinstance(value, list | tuple):
            return type(value)(map(filled, value))
        if isinstance(value, dict):
            return {key: filled(v) for key, v in value.items()}
        return value

    twins: dict[Node, Node] = {}
    for node, (args, kwargs) in zip(graph.graph.nodes, form, strict=True):
        if node.op != "placeholder" and size is None:
            size = out.call_function(torch.ops.aten.sym_size.int, (twins[placeholders[rows[0]]], rows[1]))
        twins[node] = out.create_node(node.op, node.target, filled(args), filled(kwargs), node.name)
        twins[node].meta = dict(node.meta)
    return GraphModule(graph, out)


def _pairs(first: Graph, second: Graph) -> Iterator[tuple[Node, Node]]:
    """Nodes that correspond, each of the second graph known by the one of the first."""
    if len(first.nodes) != len(second.nodes):
        raise NotAlikeError(f"{len(first.nodes)} and {len(second.nodes)} ops")
    twins: dict[Node, Node] = {}
    for one, two in zip(first.nodes, second.nodes, strict=True):
        same_place = one.op == "get_attr" and (_attribute(one) is _attribute(two) or _are_same_literal(one, two))
        if one.op != two.op or (one.target != two.target and not same_place and one.op != "placeholder"):
            raise _not_alike(one)
        if one.op == "get_attr" and not same_place:
            raise _not_alike(one)
        others = zip(_leaves((one.args, one.kwargs)), _leaves((two.args, two.kwargs)), strict=False)
        if any(twins.get(a) is not b for a, b in others if isinstance(a, Node)):
            raise _not_alike(one)
        twins[one] = two
        yield one, two


def _common(node: Node, both: tuple[Any, Any], sizes: tuple[int, int]) -> Any:
    one, two = both
    if isinstance(one, Node):
        return one
    if type(one) is not type(two):
        raise _not_alike(node)
    if isinstance(one, list | tuple):
        if len(one) != len(two):
            raise _not_alike(node)
        return type(one)(_common(node, pair, sizes) for pair in zip(one, two, strict=True))
    if isinstance(one, dict):
        if one.keys() != two.keys():
            raise _not_alike(node)
        return {key: _common(node, (one[key], two[key]), sizes) for key in one}
    return one if one == two else _following(node, both, sizes)


def _following(node: Node, numbers: tuple[Any, Any], sizes: tuple[int, int]) -> Of:
    """How a number follows the size of the batch."""
    (one, two), (small, large) = numbers, sizes
    if isinstance(one, int) and not isinstance(one, bool):
        for power in (1, 2):
            if one % small**power == 0 and one * large**power == two * small**power:
                return Of(one // small**power, power)
        if (two - one) % (large - small) == 0:
            factor = (two - one) // (large - small)
            return Of(factor, offset=one - factor * small)
    if isinstance(one, float):
        for power in (1, -1, 2, -2):
            of = Of(one / float(small) ** power, power)
            if math.isclose(of.at(large), two, rel_tol=1e-14):
                return of
    raise _not_alike(node)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for v in value:
            yield from _leaves(v)
    elif isinstance(value, dict):
        for v in value.values():
            yield from _leaves(v)
    else:
        yield value


def _attribute(node: Node) -> Any:
    return operator.attrgetter(str(node.target))(node.graph.owning_module)


def _are_same_literal(one: Node, two: Node) -> bool:
    """Whether both are what `torch.tensor([...])` wrote into the graph, and equal."""
    a, b = _attribute(one), _attribute(two)
    literal = all(user.target is torch.ops.aten.lift_fresh_copy.default for node in (one, two) for user in node.users)
    return literal and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device) and bool(torch.equal(a, b))


def _not_alike(node: Node) -> NotAlikeError:
    return NotAlikeError(f"{node.format_node()}")
