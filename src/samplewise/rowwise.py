"""Whether the gradient of a tensor that nobody marked lies row by row as the samples do.

It does where each row reaches the samples of that row alone: where the tensor is met element by element on its way to data, as the
perturbations of adversarial training are. A table may have as many rows, but is looked up by labels, and there samples mix in its
gradient. Autograd's graph tells one from the other; which of its nodes gave data is written on the nodes themselves.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from samplewise.flow.names import ELEMENTWISE
from samplewise.samples import Layout, same_ids


class _Known(NamedTuple):
    """Where the samples of a node's result lie, and from which node on what happens to that result is followed."""

    layout: Layout
    since: int


def know(t: Tensor, layout: Layout) -> None:
    """`t` holds samples, and from now on each op on it is followed."""
    if t.grad_fn is not None:
        _notes(t.grad_fn)[_Known] = _Known(layout, torch.autograd._get_sequence_nr())


def reaches_own_rows(t: Tensor, outputs: Iterable[Tensor], layout: Layout) -> bool:
    """Whether all that `outputs` have of `t` came through data that lies by `layout`, and element by element until there."""
    users = _users([get_gradient_edge(output) for output in outputs if output.requires_grad])
    todo, seen = list(users[_key(get_gradient_edge(t))]), set()
    while todo:
        node = todo.pop()
        if node is None or not _is_elementwise(node) or torch.Size(node._input_metadata[0].shape) != t.shape:  # type: ignore[attr-defined]
            return False
        if node in seen:
            continue
        seen.add(node)
        known, following = _notes(node).get(_Known), users[(node, 0)]
        if known is None:
            todo += following
        elif not same_ids(known.layout, layout) or any(n is not None and n._sequence_nr() < known.since for n in following):
            return False
    return bool(seen)


def _users(edges: list[GradientEdge]) -> dict[tuple[Node, int], list[Node | None]]:
    """Which nodes used each result in the graph of these; None stands for having been asked for."""
    users: dict[tuple[Node, int], list[Node | None]] = defaultdict(list)
    for edge in edges:
        users[_key(edge)].append(None)
    todo = [edge.node for edge in edges]
    seen = set(todo)
    while todo:
        node = todo.pop()
        for used, place in node.next_functions:
            if used is not None:
                users[(used, place)].append(node)
                if used not in seen:
                    seen.add(used)
                    todo.append(used)
    return users


def _key(edge: GradientEdge) -> tuple[Node, int]:
    return edge.node, edge.output_nr


def _notes(node: Node) -> dict:
    return node.metadata  # type: ignore[return-value]  # a property, although it is declared a method


def _is_elementwise(node: Node) -> bool:
    """Whether the node is that of one of torch's own elementwise ops: LeakyReluBackward0."""
    name = re.fullmatch(r"(\w+)Backward\d+", node.name())
    return name is not None and re.sub(r"(?<!^)(?=[A-Z])", "_", name[1]).lower() in ELEMENTWISE | {"to_copy"}
