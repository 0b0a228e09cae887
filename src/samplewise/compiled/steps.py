"""Compiled steps: one graph for each kind of batch and state of the model that is met, whatever the batch's size."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from samplewise.choice import refuse_lazy
from samplewise.compiled import sizes
from samplewise.compiled.batches import has_rows, kind_of, refuse_negated, refuse_strange, resized, surroundings
from samplewise.compiled.compiler import as_written, compiled, why_not_compiled
from samplewise.compiled.parts import gives_little, parted
from samplewise.compiled.replay import Recorder, can_be_recorded, state_of
from samplewise.compiled.snapshot import Snapshot
from samplewise.compiled.trace import Record, Run, Trace
from samplewise.errors import SamplewiseError
from samplewise.kept import Kept
from samplewise.still import RandomnessPutBack, gpus_of
from samplewise.undo import Undo

MAX_FAMILIES = 8
"""How often a step is compiled anew for one kind of batch because something that its code reads has changed."""
FAILURES = (RuntimeError, AssertionError)
"""What running a graph may raise, the compiler's own among them, which runs with it for the first time."""
MAX_SIZES = 4
"""How many sizes of a batch are compiled one by one where no graph for all sizes is found; others are taken op by op."""


@dataclass
class Graph:
    """A step compiled for one size of the batch, or for all."""

    trace: Trace
    run: Callable[..., list[Tensor]]
    is_parted: bool = False
    """Whether it gives gradients of every sample and is recorded all the same, which a graph for all sizes is not."""


@dataclass(kw_only=True)
class AnySize(Graph):
    """A step compiled for all sizes, as far as graphs of some agree."""

    form: sizes.Template
    smallest: int
    largest: int
    """Of the sizes that agreed: code may take another course for few samples or for many."""


@dataclass
class Family:
    """The graphs of one kind of batch, for one state of what the step's code reads."""

    snapshot: Snapshot
    of_size: dict[int, Graph] = field(default_factory=dict)
    of_any_size: AnySize | None = None
    why_not: str | None = None
    """Why there is no graph for all sizes."""


class Compiled:
    """step(*batch), compiled when a batch is the first of its kind, and once more when a second size of it comes."""

    def __init__(self, model: nn.Module, run: Run, functions: tuple[Callable, ...], *, batch_dim: int, verify: bool):
        self.model, self.run, self.functions = model, run, functions
        self.batch_dim, self.verify = batch_dim, verify
        self.num_graphs = 0
        """How many graphs have been compiled."""
        self.num_op_by_op = 0
        """How many steps were taken op by op in the graph's place: their answers are the same, their time is not."""
        self.why_op_by_op: str | None = None
        """Why the last of them was."""
        self._families: dict[Any, list[Family]] = {}
        self._recorder = Recorder()

    @property
    def num_recordings(self) -> int:
        """For how many sizes of the batch the step is recorded as a CUDA graph."""
        return self._recorder.num_recordings

    def __call__(self, *batch: Any) -> Any:
        leaves, spec = tree_flatten(batch)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        refuse_strange(tensors)
        size = next((t.shape[self.batch_dim] for t in tensors if t.ndim > self.batch_dim), 0)
        if not size:
            return self._op_by_op(batch, "a batch without samples")
        kind = (spec, tuple(kind_of(leaf, self.batch_dim, size) for leaf in leaves), surroundings())
        graph, outputs = self._launched(kind, size, tensors)
        family = None
        if graph is None:
            family, taken = self._family(kind, batch)
            if taken:
                self._note_op_by_op("the first step makes what later ones read")
                return taken[0]
            graph = self._graph(family, size, batch)
            if graph is None:
                return self._op_by_op(batch, f"a size beyond {MAX_SIZES}, and no graph serves all: {family.why_not}")
        graph.trace.check_others()
        undo = Undo(graph.trace.written(tensors) if graph.trace.writes else ())
        try:
            outputs = graph.run(*tensors) if outputs is None else outputs
        except FAILURES as error:
            undo()
            why = why_not_compiled(error)
            if why is None:
                raise
            if family is None or graph is not family.of_any_size:
                raise SamplewiseError(
                    f"the step cannot be compiled: torch's compiler fails ({why}). "
                    "Take it op by op: per_sample_step(..., compile=False)."
                ) from error
            # not every op of torch tells the sizes of its results where those of its inputs are open
            family.of_any_size, family.why_not = None, f"torch does not compile it: {why}"
            return self(*batch)
        if graph.trace.has_doubt and bool(outputs[-1]):
            undo()
            return self._op_by_op(batch, "values that need care: a sample that is not finite, or positions that cancel")
        return graph.trace.result(outputs)

    def _op_by_op(self, batch: tuple, why: str) -> Any:
        self._note_op_by_op(why)
        return self.run(batch, Record(), verify=False)

    def _note_op_by_op(self, why: str) -> None:
        self.num_op_by_op += 1
        self.why_op_by_op = why

    def _launched(self, kind: Any, size: int, tensors: list[Tensor]) -> tuple[Graph | None, list[Tensor] | None]:
        """The graph of the last step of this kind and what it gives, if it holds for this one.

        Whether it holds is looked at while the device is at work: thousands of attributes take milliseconds.
        """
        family = next(iter(self._families.get(kind, ())), None)
        graph = None if family is None else family.of_size.get(size)
        if family is None or graph is None or graph.trace.writes:
            return None, None
        with RandomnessPutBack(gpus_of(self.model)) if graph.trace.draws else nullcontext() as randomness:
            try:
                outputs = graph.run(*tensors)
            except FAILURES:  # parameters of another shape; if it is something else, it comes again
                return None, None
            if family.snapshot.change() is not None:
                return None, None
            if randomness is not None:
                randomness.let_go()
        return graph, outputs

    def _family(self, kind: Any, batch: tuple) -> tuple[Family, list[Any]]:
        """The family of such steps, and if it is new and the step was taken to make it, the result."""
        families, change = self._families.setdefault(kind, []), None
        for family in families:
            change = family.snapshot.change()
            if change is None:
                return family, []
        if len(families) == MAX_FAMILIES:
            raise SamplewiseError(
                f"the step was compiled {MAX_FAMILIES} times for one kind of batch, because {change!r}, which its code reads, "
                "keeps changing. Let the code read a tensor in its place, or take the step op by op: compile=False."
            )
        snapshot, taken = self._settled(batch)
        families.insert(0, Family(snapshot))
        return families[0], taken

    def _settled(self, batch: tuple) -> tuple[Snapshot, list[Any]]:
        """What the step's code reads, once taking the step changes nothing of it; what only running shows is refused here.

        Parameters, buffers, other tensors that code has at hand, the batch and torch's generators are left as they were: the step
        itself is taken by the graph. Not so where code makes something for good, a cache, or a flag beside a buffer that it sets to
        the first batch: then the first run is the step, and its result is given too.
        """
        refuse_lazy(self.model.named_parameters())
        snapshot = Snapshot(self.model, *self.functions)
        refuse_negated(snapshot.all_tensors())
        undo = self._undo(snapshot, batch)
        with Kept(self.model.parameters()) as kept, RandomnessPutBack(gpus_of(self.model)) as randomness:
            try:
                result = self._tried(batch, snapshot)
                later = snapshot if snapshot.change() is None else self._unchanged(batch)
            except BaseException:
                undo()
                raise
            if later is snapshot:
                undo()
                return snapshot, []
            kept.let_go()
            randomness.let_go()
        return later, [result]

    def _undo(self, snapshot: Snapshot, batch: tuple) -> Undo:
        return Undo(t for t in (*snapshot.tensors(), *tree_leaves(batch)) if isinstance(t, Tensor))

    def _tried(self, batch: tuple, snapshot: Snapshot) -> Any:
        grads = [(t, t.grad, None if t.grad is None else t.grad._version) for t in snapshot.leaves()]
        result = self.run(batch, Record(), verify=self.verify)
        for t, grad, version in grads:
            if t.grad is not grad or (grad is not None and grad._version != version):
                raise SamplewiseError(
                    f"the step gives a gradient to a tensor {tuple(t.shape)} that is not a parameter of the model, which a compiled "
                    "step would not. Make it a parameter of the model, or take the step op by op: compile=False."
                )
        return result

    def _unchanged(self, batch: tuple) -> Snapshot:
        """What the code reads now that a first run has made what is there for later ones; refused if the next changes it again."""
        snapshot = Snapshot(self.model, *self.functions)
        undo = self._undo(snapshot, batch)
        try:
            with Kept(self.model.parameters()), RandomnessPutBack(gpus_of(self.model)):
                self.run(batch, Record(), verify=False)
        finally:
            undo()
        change = snapshot.change()
        if change is not None:
            raise SamplewiseError(
                f"the step changes {change!r}, which its code reads: once compiled, it would stay as it is. Let the code keep it in "
                "a buffer and write to that in place, self.name.copy_(...), or take the step op by op: compile=False."
            )
        return snapshot

    def _graph(self, family: Family, size: int, batch: tuple) -> Graph | None:
        """The graph for this size; None if the step is to be taken op by op."""
        if size in family.of_size:
            return family.of_size[size]
        if size > 1 and family.of_any_size is not None and self._serves(family, size, batch):
            return family.of_any_size
        others = [n for n in family.of_size if n > 1]
        if size > 1 and others and family.why_not is None:
            try:
                family.of_any_size = self._graph_of_any_size(family, family.of_size[others[0]].trace, size, batch)
                family.of_size = {n: graph for n, graph in family.of_size.items() if n == 1 or graph.is_parted}
                return family.of_any_size
            except sizes.NotAlikeError as error:
                family.why_not = str(error)
        if len(others) >= MAX_SIZES and size > 1:
            return None
        trace = self._traced(family, batch, Record())
        run, is_parted = self._compiled(trace.graph, batch, is_fixed=True, writes=trace.writes)
        family.of_size[size] = Graph(trace, run, is_parted)
        return family.of_size[size]

    def _traced(self, family: Family, batch: tuple, record: Record) -> Trace:
        """The step written down; tensors are left as they were, for torch works with the values of small ones while it traces."""
        undo = Undo(family.snapshot.tensors())
        try:
            with Kept(self.model.parameters()):
                return Trace(self.model, self.run, batch, record)
        finally:
            undo()

    def _serves(self, family: Family, size: int, batch: tuple) -> bool:
        """Whether the graph of any size is one of this; found out by a trace where the size is smaller or larger than others."""
        graph = family.of_any_size
        assert graph is not None
        if graph.smallest <= size <= graph.largest:
            return True
        if family.why_not is not None:
            return False
        trace = self._traced(family, batch, Record(routes=graph.trace.record.routes))
        try:
            sizes.check(graph.form, graph.trace.graph, trace.graph, size)
            _check_results(graph.trace, trace)
        except sizes.NotAlikeError as error:
            family.why_not = str(error)
            return False
        graph.smallest, graph.largest = min(size, graph.smallest), max(size, graph.largest)
        return True

    def _graph_of_any_size(self, family: Family, first: Trace, size: int, batch: tuple) -> AnySize:
        small = first.record.batch_size
        leaves, spec = tree_flatten(batch)
        tensors = [t for t in leaves if isinstance(t, Tensor)]
        place = next((i for i, t in enumerate(tensors) if has_rows(t, self.batch_dim, size)), None)
        if small is None or place is None:
            raise sizes.NotAlikeError("the size of the batch is not one of its tensors'")
        pinned = Record(routes=first.record.routes)
        second = self._traced(family, batch, pinned)
        # even and odd ones among the three: code may round up to multiples of 8
        third_size = small + size + (small % 2 == size % 2 == 0)
        more = tree_unflatten([resized(t, self.batch_dim, size, third_size) for t in leaves], spec)
        third = self._traced(family, more, pinned)
        if second.record.batch_size != size:
            raise sizes.NotAlikeError("the size of the batch is not that of its first tensor")
        form = sizes.template(first.graph, second.graph, (small, size))
        sizes.check(form, first.graph, third.graph, third_size)
        _check_results(first, second, third)
        graph = sizes.of_any_size(form, first.graph, (place, self.batch_dim))
        run, _ = self._compiled(graph, batch, is_fixed=False, writes=first.writes)
        return AnySize(first, run, form=form, smallest=min(small, size), largest=third_size)

    def _compiled(
        self, graph: torch.fx.GraphModule, batch: tuple, *, is_fixed: bool, writes: bool
    ) -> tuple[Callable[..., list[Tensor]], bool]:
        """What runs the graph, and whether it does so in two parts."""
        self.num_graphs += 1
        if writes and torch.__version__ < "2.12":  # where what a compiled graph writes to a buffer is lost
            return as_written(graph.forward), False
        run = lambda graph: compiled(graph) if is_fixed else compiled(graph, open_dim=self.batch_dim)
        tensors, state = [t for t in tree_flatten(batch)[0] if isinstance(t, Tensor)], state_of(graph)
        if writes or not can_be_recorded(graph, tensors):
            return run(graph), False
        if gives_little(graph, state):
            return self._recorder.recorded(run(graph), graph), False
        parts = parted(graph, state) if is_fixed else None
        if parts is None or not can_be_recorded(parts.early, tensors):  # a number of the host may be left to the second part
            return run(graph), False
        late = run(parts.late)
        finish = lambda outputs, batch: parts.joined(outputs, late, batch)
        return self._recorder.recorded(run(parts.early), parts.early, parts.num_small, finish), True


def _check_results(first: Trace, *others: Trace) -> None:
    """Raises if what the step gives beside tensors follows the size of the batch: a graph has it as it was."""
    if not all(first.gives_as(other) for other in others):
        raise sizes.NotAlikeError("the result holds something that is no tensor and follows the size of the batch")
