"""A step's graph in two where it gives gradients of every sample: what comes before them, which can be recorded, and they themselves.

A recording gives its results in memory of its own, so that each is held twice: by the recording, and by who asked for it. Sums are
small. Gradients of every sample are not, and are made after the recording, in new memory, of the a and g that it leaves.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from samplewise.compiled.writes import last_writes, memory_of, written_by

Run = Callable[..., list[Tensor]]
SMALL_BYTES = 1 << 25
"""What a recording may give twice in any case."""
ABSOLUTE = {
    torch.ops.aten.as_strided.default,
    torch.ops.aten.as_strided_copy.default,
    torch.ops.aten.as_strided_scatter.default,
}
"""Ops that count from where the memory of a tensor begins, which is elsewhere once a view of it has been kept."""


@dataclass(frozen=True)
class Parts:
    """`early` takes the batch and gives small results, then what `late` takes besides the batch; `late` gives the large results."""

    early: GraphModule
    late: GraphModule
    is_late: list[bool]
    """Which of the results, in order, are large."""

    @property
    def num_small(self) -> int:
        return self.is_late.count(False)

    def joined(self, early: list[Tensor], run_late: Run, batch: Iterable[Tensor]) -> list[Tensor]:
        """All results, from what `early` gave; none of the large ones in memory of that.

        A view of what is kept would be, and what torch's compiler takes for no op at all (x * 1.0, x + 0): those are copied.
        """
        kept = early[self.num_small :]
        places = {place_of(t) for t in kept}
        large = (t.clone() if place_of(t) in places else t for t in run_late(*batch, *kept))
        small = iter(early)
        return [next(large) if late else next(small) for late in self.is_late]


def gives_little(graph: GraphModule, state: Iterable[Tensor]) -> bool:
    """Whether results are as large as parameters (sums) and not as gradients of every sample."""
    return sum(map(num_bytes, results_of(graph))) <= _most(state)


def parted(graph: GraphModule, state: Iterable[Tensor]) -> Parts | None:
    """The graph in two; None if the second part would have more to be kept for it than it gives."""
    nodes, results = list(graph.graph.nodes), results_of(graph)
    large = _large(results, _most(state))
    late: set[Node] = set()
    for node in reversed(nodes):
        if node.op == "call_function" and _is_late(node, large, late):
            late.add(node)
    order = {node: k for k, node in enumerate(nodes)}
    kept = [n for n in nodes if n.op == "call_function" and n not in late and any(user in late for user in n.users)]
    is_late = [node in late for node in results]
    if not late or not _can_wait(graph.graph, late, kept, order):
        return None
    if sum(map(num_bytes, {memory_of(n): n for n in kept}.values())) > sum(num_bytes(n) for n in results if n in late):
        return None
    if sum(num_bytes(n) for n in results if n not in late) > _most(state):
        return None
    given = [n for n in nodes if n.op == "placeholder"]
    early = _graph(nodes, lambda n: n not in late, given, [*(n for n in results if n not in late), *kept])
    after = _graph(nodes, late.__contains__, [*given, *kept], [n for n in results if n in late])
    return Parts(GraphModule(graph, early), GraphModule(graph, after), is_late)


def place_of(t: Tensor) -> int:
    """Where its memory begins, whatever part of it the tensor is."""
    return t.untyped_storage().data_ptr()


def results_of(graph: GraphModule) -> list[Node]:
    (out,) = graph.graph.find_nodes(op="output")
    return list(out.args[0])  # type: ignore[arg-type]


def num_bytes(node: Node) -> int:
    value = node.meta.get("val")
    return value.nbytes if isinstance(value, Tensor) else 0


def _most(state: Iterable[Tensor]) -> int:
    """Bytes that a recording may give: each result is held twice."""
    return max(2 * sum(t.nbytes for t in state), SMALL_BYTES)


def _large(results: list[Node], most: int) -> set[Node]:
    """The largest results, without which the others are within bounds."""
    left = sum(map(num_bytes, results))
    large: set[Node] = set()
    for node in sorted(results, key=num_bytes, reverse=True):
        if left <= most:
            break
        large.add(node)
        left -= num_bytes(node)
    return large


def _is_late(node: Node, large: set[Node], late: set[Node]) -> bool:
    """Whether a node can be computed late, and is no smaller than what it is computed from or what is computed from it.

    So a product that gives gradients is late, and all that follows, but not what makes its two sides; of those casts, views, patches.
    """
    sources = [n for n in node.all_input_nodes if n.op == "call_function"]
    if node.target in ABSOLUTE or not node.users or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return False
    if not all(isinstance(n.meta.get("val"), Tensor) for n in (node, *sources)):
        return False
    if not all(user in late or (user.op == "output" and node in large) for user in node.users):
        return False
    if node in large or (len(sources) == 1 and num_bytes(node) >= num_bytes(sources[0])):
        return True
    return node.meta["val"].numel() >= min(user.meta["val"].numel() for user in node.users)


def _can_wait(graph: Graph, late: set[Node], kept: list[Node], order: dict[Node, int]) -> bool:
    """Whether late ops write only to what they make themselves, and nothing writes to what they read once they would have read it."""
    made = {memory_of(n) for n in late} - {memory_of(n) for n in order if n not in late}
    written = last_writes(graph)
    read = lambda n: min(order[user] for user in n.users if user in late)
    return all(memory_of(t) in made for n in late for t in written_by(n)) and all(
        written.get(memory_of(n), -1) < read(n) for n in kept
    )


def _graph(nodes: list[Node], is_in: Callable[[Node], bool], given: list[Node], results: list[Node]) -> Graph:
    """The nodes that are in it, from what it is given to its results."""
    graph, twins = Graph(), {}
    for node in given:
        twins[node] = graph.placeholder(node.name)
        twins[node].meta = dict(node.meta)
    for node in nodes:
        if node.op == "get_attr" or (node.op == "call_function" and is_in(node)):
            twins[node] = graph.node_copy(node, twins.__getitem__)
    graph.output([twins[n] for n in results])
    graph.eliminate_dead_code()
    return graph
