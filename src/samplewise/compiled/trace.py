"""A step written down as one graph, through the same interception and rules as the step that runs op by op."""

import os
import random
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from samplewise.compiled.batches import refuse_opaque
from samplewise.compiled.draws import Draws
from samplewise.compiled.writes import root_of, written_in
from samplewise.constants import Constants
from samplewise.errors import SamplewiseError
from samplewise.still import attributes_put_back
from samplewise.tracing import collecting, is_tracing


@dataclass
class Record:
    """What a step that was taken tells about itself, and in `routes` what it is told."""

    routes: dict[str, str] = field(default_factory=dict)
    """{parameter: the route that its norms take}."""
    batch_size: int | None = None


Run = Callable[..., Any]
"""run(batch, record, verify=...) takes the step op by op."""

OF_VALUES = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
"""What tensors without values raise when they are asked for one."""


class Trace:
    """`graph(*tensors of the batch)` gives the tensors of the result, and behind them the doubt if there can be one.

    Parameters and buffers are read from the model whenever the graph runs. Only shapes, dtypes and what Python saw are
    written down, never the values of the batch: a step that needs those is refused.
    """

    graph: GraphModule
    has_doubt: bool
    others: list[tuple[Any, list[tuple[Tensor, int]]]]
    """The captures besides the step's own that it asks, and the versions of what the graph reads of them as it is."""
    _values: list[Any]
    _spec: TreeSpec

    def __init__(self, model: nn.Module, run: Run, batch: tuple, record: Record):
        self.record = Record(record.routes)
        leaves, spec = tree_flatten(batch)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def flat_run(*tensors: Tensor) -> list[Tensor]:
            filled = list(leaves)
            for i, t in zip(places, tensors, strict=True):
                filled[i] = t
            with collecting() as doubts, unread, Constants(), Draws(), Unlisted():
                result = run(tree_unflatten(filled, spec), self.record, verify=False)
                self.others = [(other, other.versions()) for other in doubts.others]
            values, self._spec = tree_flatten(result)
            refuse_opaque(values)
            self._values = [NotImplemented if isinstance(v, Tensor) else v for v in values]
            flag = doubts.any()
            self.has_doubt = flag is not None
            return [v for v in values if isinstance(v, Tensor)] + ([] if flag is None else [flag])

        drawn, unread, system = _drawn(), Unread(), SystemRandomness()
        try:
            with attributes_put_back(model), compiled_parts_seen(), torch.random.fork_rng(devices=[]), system:
                traced = make_fx(flat_run, tracing_mode="fake", _allow_non_fake_inputs=True)
                self.graph = traced(*[leaves[i].detach() for i in places])  # a tensor that comes twice is two
        except SamplewiseError:
            raise
        except Exception as error:  # whatever code does with tensors that have no values
            of_values = isinstance(error, OF_VALUES) or "SymInt" in str(error)  # a size that only values tell
            why = (
                "what the model, the loss or the query does depends on values, of the batch or drawn at random"
                if of_values
                else "its code cannot be traced"
            )
            raise SamplewiseError(
                f"the step cannot be compiled: {why} ({type(error).__name__}: {_first_line(error)}). "
                "Take it op by op: per_sample_step(..., compile=False)."
            ) from error
        if _drawn() != drawn or system.was_read:
            raise SamplewiseError(
                "the step cannot be compiled: its code draws random numbers of Python, NumPy or the operating system, and would get "
                "the same in every step. Draw them with torch, or take the step op by op: per_sample_step(..., compile=False)."
            )
        _clean(self.graph.graph)
        unread.check(self.graph.graph)
        self.graph.recompile()

    @cached_property
    def draws(self) -> bool:
        """Whether the graph draws random numbers."""
        return any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in self.graph.graph.nodes)

    def check_others(self) -> None:
        """Raises if what the graph reads of other captures has changed or gone."""
        for other, versions in self.others:
            other.check(versions)

    @cached_property
    def _written(self) -> list[Node]:
        """What the graph changes and did not make."""
        return [node for node in written_in(self.graph.graph) if node.op != "call_function"]

    @property
    def writes(self) -> bool:
        """Whether the graph changes something that it did not make: a buffer, the batch."""
        return bool(self._written)

    def written(self, tensors: list[Tensor]) -> list[Tensor]:
        """What the graph changes, where it is run on these."""
        given = dict(zip((n for n in self.graph.graph.nodes if n.op == "placeholder"), tensors, strict=True))
        return [given[n] if n in given else attrgetter(str(n.target))(self.graph) for n in self._written]

    def gives_as(self, other: "Trace") -> bool:
        """Whether the results of both are made alike, and what in them is no tensor is the same."""
        return self._spec == other._spec and [repr(v) for v in self._values] == [repr(v) for v in other._values]

    def result(self, outputs: list[Tensor]) -> Any:
        """The step's result from what the graph gave."""
        tensors = iter(outputs)
        return tree_unflatten([next(tensors) if v is NotImplemented else v for v in self._values], self._spec)


def compiled_parts_seen() -> AbstractContextManager[None]:
    """Inside, parts of a model that are compiled already are traced as what they were compiled from."""
    return torch._dynamo.config.patch(error_on_nested_fx_trace=False)  # type: ignore[attr-defined]


def _drawn() -> tuple:
    """Where the generators of Python and NumPy stand."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else [str(part) for part in numpy.random.get_state()]


class SystemRandomness:
    """Hears whether code of this thread asks the operating system for random bytes (secrets, uuid, SystemRandom), by whatever name."""

    def __init__(self) -> None:
        self.was_read = False

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        heard = {id(draw): self._heard(draw) for draw in (os.urandom, getattr(os, "getrandom", None)) if draw is not None}
        spaces = [
            space for module in list(sys.modules.values()) if isinstance(space := getattr(module, "__dict__", None), dict)
        ]
        self._before = [
            (space, name, value) for space in spaces for name, value in list(space.items()) if id(value) in heard
        ]
        for space, name, value in self._before:
            space[name] = heard[id(value)]

    def __exit__(self, *_: Any) -> None:
        for space, name, value in self._before:
            space[name] = value

    def _heard(self, draw: Callable[..., bytes]) -> Callable[..., bytes]:
        def read(*args: Any, **kwargs: Any) -> bytes:
            self.was_read = self.was_read or threading.get_ident() == self._thread
            return draw(*args, **kwargs)

        return read


class Unread(TorchDispatchMode):
    """Refuses that Python reads the value of a tensor outside of the batch: the number would stand in the graph for good."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[Tensor] = []
        """Whose values code has asked for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if _gives_number(func):
            self.read += [t for t in tree_leaves(args) if isinstance(t, Tensor)][:1]
            _refuse_reading(args)
        return func(*args, **(kwargs or {}))

    def check(self, graph: Graph) -> None:
        """Raises if there are tensors with no number of which the graph calculates: code caught an error, and went on without."""
        used = {root_of(node.args[0]) for node in graph.nodes if _gives_number(node.target) and node.users}
        if len(used) < len({t.untyped_storage()._cdata for t in self.read}):
            raise _reads(self.read[-1])


def _gives_number(func: Any) -> bool:
    return torch.Tag.data_dependent_output in getattr(func, "tags", ())


class Unlisted(TorchFunctionMode):
    """The same for what reads a number without an op that is seen: `tolist`, text, and a tensor as an index of a list."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is Tensor.__index__ and is_tracing():
            raise _reads(args[0])
        if func in (Tensor.tolist, Tensor.__repr__) and is_tracing():
            _refuse_reading(args)
        return func(*args, **(kwargs or {}))


def _refuse_reading(args: tuple) -> None:
    read = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
    if read and not any(isinstance(t, FakeTensor) for t in read):
        raise _reads(read[0])


def _reads(t: Tensor) -> SamplewiseError:
    return SamplewiseError(
        f"the step cannot be compiled: its code reads the value of a tensor {tuple(t.shape)} (.item(), .tolist(), float(), str(), "
        "if, an index), and a later value would not be seen. Calculate with the tensor itself, keep the number as a Python number, or "
        "take the step op by op: per_sample_step(..., compile=False)."
    )


def _clean(graph: Graph) -> None:
    """Takes out what only autograd needed: aliases, views as what they are already, and results that nobody reads."""
    for node in graph.nodes:
        if node.target in (torch.ops.aten.alias.default, torch.ops.aten.detach.default) or _is_same_view(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _is_same_view(node: Any) -> bool:
    """Whether a view has the shape of what it views."""
    if node.target not in (torch.ops.aten.view.default, torch.ops.aten.expand.default, torch.ops.aten._unsafe_view.default):
        return False
    source, out = (n.meta.get("val") for n in (node.args[0], node))
    return isinstance(source, Tensor) and isinstance(out, Tensor) and source.shape == out.shape


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
