"""Parameters, and values computed from parameters alone: what a gradient is asked for."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from samplewise.errors import UnattributedError
from samplewise.factors.base import Factor
from samplewise.factors.pullback import Pullback
from samplewise.factors.rows import Rows
from samplewise.marks import Marks

Pull = Callable[[Factor], Factor]


@dataclass(slots=True)
class Weight:
    """A value that depends on parameters and not on the batch.

    `roots` are the parameters. `pull` turns a factor of the value into one of its only root where the value is the root
    in another arrangement (transposed, reshaped, cast); None where ordinary autograd must pull it back.
    """

    roots: frozenset[str]
    pull: Pull | None
    node: Any
    """Where the value stood in the graph; once it is changed in place, this no longer describes it."""
    is_picked: bool = False
    """Its rows were picked by integers that were made across samples: how many and which may depend on all of them."""
    is_data: bool = False
    """Not a weight after all: it depends on the batch through code that was not seen."""


class Weights:
    """Which tensors are weights: the captured parameters, and what is derived from them."""

    def __init__(self, parameters: dict[str, Tensor], anchor_node: Any):
        self.parameters, self._anchor_node = parameters, anchor_node
        self._itself = {id(p): [(name, _as_it_is)] for name, p in parameters.items()}
        """The targets of each parameter."""
        self._derived: Marks[Weight] = Marks(at_once=True)  # they hold a part of the graph
        self.nodes = _accumulation_nodes(parameters)
        """Where ordinary gradients of each parameter would be accumulated."""

    @cached_property
    def _name_of_node(self) -> dict[Any, str]:
        return {node: name for name, node in self.nodes.items()}

    def is_parameter(self, t: Tensor) -> bool:
        """Whether `t` is a captured parameter itself, as it was."""
        return id(t) in self._itself and t.requires_grad and t.grad_fn is None

    def of_parameter(self, t: Tensor) -> Weight:
        """The weight that a captured parameter is."""
        ((name, pull),) = self._itself[id(t)]
        return Weight(frozenset([name]), pull, None)

    def targets_of_parameter(self, t: Tensor) -> list[tuple[str, Pull]]:
        """The `targets` of a captured parameter that is as it was."""
        return self._itself[id(t)]

    def get(self, t: Tensor) -> Weight | None:
        """The weight that `t` is, or None; `t` carries no mark of the batch."""
        if not t.requires_grad:
            return None
        weight = self.of_parameter(t) if id(t) in self._itself else self._derived.get(t)
        if weight is None or weight.node is not t.grad_fn:
            behind = _nodes_behind(t)
            roots = frozenset(name for node, name in self._name_of_node.items() if node in behind)
            weight = Weight(roots, None, t.grad_fn, is_data=self._anchor_node in behind)
            self._derived.set(t, weight)
        return weight if weight.roots or weight.is_data else None

    def is_known(self, t: Tensor) -> bool:
        """Whether `t` is a parameter or was derived in sight."""
        return id(t) in self._itself or self._derived.get(t) is not None

    def derive(
        self,
        t: Tensor,
        sources: list[tuple[Tensor, Weight]],
        name: str,
        *,
        is_picked: bool = False,
        rows: Tensor | None = None,
    ) -> None:
        """Records that `t` was computed by the op from these weights alone; `rows` if it is just these rows of its weight."""
        if not needs_gradient(t):
            return
        roots = frozenset().union(*(weight.roots for _, weight in sources))
        pull = None
        if len(sources) == 1 and sources[0][1].pull is not None:
            pull = _pull_rows(rows, *sources[0]) if rows is not None else _pull_through(name, *sources[0], t)
        self._derived.set(t, Weight(roots, pull, t.grad_fn, is_picked))

    def targets(self, t: Tensor) -> list[tuple[str, Pull]]:
        """For each parameter behind `t`: its name, and how a factor of `t` becomes one of the parameter."""
        weight = self.get(t)
        assert weight is not None
        if weight.pull is not None:
            return [(name, weight.pull) for name in weight.roots]
        nodes = _nodes_behind(t)
        self._refuse_other_leaves(t, weight, nodes)
        edge, dtype, uncounted = get_gradient_edge(t), t.dtype, _uncounted(nodes)
        return [(name, _pullback(edge, self.parameters[name], dtype, uncounted)) for name in sorted(weight.roots)]

    def _refuse_other_leaves(self, t: Tensor, weight: Weight, nodes: set[Any]) -> None:
        """A leaf that is not captured would lose its ordinary gradient where a captured one is taken."""
        for node in nodes:
            leaf = getattr(node, "variable", None)
            if leaf is not None and node not in self._name_of_node:
                raise UnattributedError(
                    f"a value {tuple(t.shape)} is computed from captured {sorted(weight.roots)} and from a tensor "
                    f"{tuple(leaf.shape)} that needs a gradient too but is not captured, which would not get it. Capture both, "
                    "or let it need none: requires_grad_(False)."
                )

    def reached_from(self, *tensors: Tensor) -> frozenset[str]:
        """The captured parameters that ordinary autograd would reach from these tensors."""
        behind = set().union(*(_nodes_behind(t) for t in tensors if t.requires_grad))
        return frozenset(name for node, name in self._name_of_node.items() if node in behind)

    def is_data(self, t: Tensor) -> bool:
        """Whether an unmarked tensor depends on the batch through code that was not seen."""
        weight = self.get(t)
        return weight is not None and weight.is_data


def needs_gradient(t: Tensor) -> bool:
    """Whether backward goes through a result: a view of a parameter taken under `no_grad` says so, and is a leaf of its own."""
    return t.requires_grad and t.grad_fn is not None


def _accumulation_nodes(parameters: dict[str, Tensor]) -> dict[str, Any]:
    """The node of `get_gradient_edge(p)` of each, in half of its time: 148 of them in 0.27 ms (Xeon)."""
    with torch.enable_grad():
        return {name: _node(p) for name, p in parameters.items()}


def _node(t: Tensor) -> Any:
    return t.view_as(t).grad_fn.next_functions[0][0] if t.grad_fn is None else t.grad_fn  # type: ignore[union-attr]


def _as_it_is(factor: Factor) -> Factor:
    return factor


def _nodes_behind(t: Tensor) -> set[Any]:
    """All nodes of the graph that a backward from `t` would walk."""
    if t.is_leaf and t._is_view():  # made of a leaf without grad: no graph
        return set()
    seen: set[Any] = set()
    stack: list[Any] = [get_gradient_edge(t).node]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack += [following for following, _ in node.next_functions]
    return seen


def _uncounted(nodes: set[Any]) -> tuple[Tensor, ...]:
    """The leaves of which a graph has values under a version of their own, as `torch.kron` has: a change of them goes unnoticed."""
    leaves: dict[int, Tensor] = {}
    for node in nodes:
        if node.name() == "UnsafeViewBackward0":
            while len(node.next_functions) == 1 and node.next_functions[0][0] is not None:
                node = node.next_functions[0][0]
            if hasattr(node, "variable"):
                leaves[id(node.variable)] = node.variable
    return tuple(leaves.values())


def _pullback(edge: GradientEdge, parameter: Tensor, dtype: torch.dtype, uncounted: tuple[Tensor, ...]) -> Pull:
    leaf = get_gradient_edge(parameter)  # model.float() gives the parameter another one
    return lambda factor: Pullback(factor, edge, parameter, leaf, dtype, uncounted)


SAME = set("to float double half bfloat16 contiguous clone type alias".split())
RESHAPED = set("view reshape flatten unflatten ravel squeeze unsqueeze view_as reshape_as".split())
PERMUTED = set("t T mT transpose permute swapaxes swapdims movedim moveaxis".split())


def _pull_through(name: str, source: Tensor, weight: Weight, t: Tensor) -> Pull | None:
    """The pull of `t`, which is `source` in another arrangement; None if the op does more than arrange."""
    pull = weight.pull
    assert pull is not None
    shape, derived = tuple(source.shape), tuple(t.shape)
    if name in SAME and shape == derived and source.is_complex() == t.is_complex():
        return pull
    if name in RESHAPED:
        return lambda factor: pull(factor.arranged(derived, tuple(range(len(derived))), shape))
    if name in PERMUTED and t._is_view() and not source.is_complex():
        order = _order(source, t)
        if order is not None:
            return lambda factor: pull(factor.arranged(derived, order, shape))
    return None


def looked_up(name: str, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """The ids of the rows that an embedding gives as they are, for ids that are the same for all samples."""
    if name != "embedding" or kwargs or not (len(args) > 1 and isinstance(args[1], Tensor)):
        return None
    padding, by_frequency, *_ = (*args[2:4], *(-1, False)[len(args) - 2 :])
    return args[1] if padding == -1 and not by_frequency and isinstance(args[0], Tensor) and args[0].ndim == 2 else None


def _pull_rows(ids: Tensor, source: Tensor, weight: Weight) -> Pull:
    """The pull of rows of `source`: its gradient has those of the rows, in their places."""
    pull, (num_rows, D) = weight.pull, source.shape
    assert pull is not None
    ids = ids.detach().clone()  # it may be changed before the gradients are asked for

    def pulled(factor: Factor) -> Factor:
        B = factor.num_samples
        return pull(Rows(ids.flatten().expand(B, -1), factor.materialize().reshape(B, ids.numel(), D), num_rows=num_rows))

    return pulled


def _order(source: Tensor, t: Tensor) -> tuple[int, ...] | None:
    """For each dimension of `source` the dimension of its permuted view `t` that it became."""
    left = list(zip(source.shape, source.stride(), strict=True))
    right = list(zip(t.shape, t.stride(), strict=True))
    if len(set(left)) != len(left) or sorted(left) != sorted(right):
        return None
    return tuple(right.index(pair) for pair in left)
