"""Compiled steps recorded as CUDA graphs: their kernels are launched at once, in memory that all recordings of a step share."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

Run = Callable[..., list[Tensor]]
Finish = Callable[[list[Tensor], tuple[Tensor, ...]], list[Tensor]]
"""finish(what a graph gave, the batch) gives the results of the step."""
Shapes = tuple[torch.Size, ...]

MAX_RECORDINGS = 64
"""Of a step, for batches of so many sizes; each takes some megabytes besides the memory that they share."""
MAX_SHARE = 0.5
"""Of the device's memory, for the recordings of all steps: what they keep is for nobody else."""
MAX_TRIES = 4
"""How often a batch size is recorded: anew where parameters have moved in memory, again where memory had ended."""
MAX_PLANS = 8
"""How often the shared memory is planned anew because a recording asks for more."""

NUM_HALVINGS = 6
"""How often the memory of a recording is halved in search of the least."""
SMALL_BYTES = 1 << 25
"""What may lie beside the block, besides tensors below a megabyte, which torch keeps in segments of their own."""


def as_given(outputs: list[Tensor], _: tuple[Tensor, ...]) -> list[Tensor]:
    return outputs


class Recorder:
    """The recordings of one step.

    One of them runs at a time, the batch copied in and the results out: what a step gave is not touched by the next one, and all
    recordings can be cut from the same memory.
    """

    def __init__(self) -> None:
        self._recordings: WeakKeyDictionary[Run, dict[Shapes, Recording]] = WeakKeyDictionary()
        self._turn: torch.Event | None = None
        """When the last one that ran is done, on whatever stream."""
        self._lock = threading.Lock()
        self._num_plans = 0
        self.num_bytes = 0
        """What the recordings keep."""
        _recorders.add(self)

    def recorded(self, compiled: Run, graph: GraphModule, num_given: int | None = None, finish: Finish = as_given) -> Run:
        """The compiled graph, recorded when a batch size comes for the second time; `finish` makes the step's results of its own.

        It is run once more than it is asked for, so it must write to nothing that stays. Of what it gives the first `num_given` are
        copied out; what else there is, `finish` finds in the memory of the recording.
        """
        state = state_of(graph)
        recordings = self._recordings.setdefault(compiled, {})
        num_left: dict[Shapes, int] = {}

        def recording_of(shapes: Shapes, tensors: tuple[Tensor, ...]) -> Recording | None:
            if shapes in recordings and not recordings[shapes].is_valid():
                del recordings[shapes]
                num_left[shapes] -= 1
            if shapes not in recordings and num_left[shapes] and self.num_recordings < MAX_RECORDINGS:
                try:
                    recordings[shapes] = self._record(compiled, list(tensors), state)
                except torch.OutOfMemoryError:
                    num_left[shapes] -= 1  # others may have it now and not later
                except RuntimeError:  # no recording takes some op; if it is something else, it comes again
                    num_left[shapes] = 0
            return recordings.get(shapes)

        def run(*tensors: Tensor) -> list[Tensor]:
            shapes = tuple(t.shape for t in tensors)
            if shapes not in num_left:
                num_left[shapes] = MAX_TRIES
                return finish(compiled(*tensors), tensors)
            with self._lock:
                recording = recording_of(shapes, tensors)
            if recording is None:
                return finish(compiled(*tensors), tensors)
            with self._turn_of(tensors):
                return finish(recording(tensors, num_given), tensors)

        return run

    def _record(self, compiled: Run, tensors: list[Tensor], state: list[Tensor]) -> "Recording":
        """A recording in the memory of the others, or in the least that holds it, where the others are then to be made anew."""
        with torch.cuda.device(tensors[0].device):
            inputs = [t.clone() for t in tensors]
            with torch.random.fork_rng([tensors[0].device]):
                compiled(*inputs)  # what is made once, by the first call on tensors that lie like these, is not recorded
            other = next(self._all(), None)
            recording = None if other is None else Recording(compiled, inputs, state, other.pool)
            if (
                recording is not None
                and recording.num_bytes() > self.num_bytes + SMALL_BYTES
                and self._num_plans < MAX_PLANS
            ):
                recording = None
            if recording is None:
                self._num_plans += 1
                del other
                for recordings in self._recordings.values():
                    recordings.clear()
                recording = _compact(lambda num_bytes: Recording(compiled, inputs, state, None, num_bytes))
            self.num_bytes = recording.num_bytes()
            if sum(recorder.num_bytes for recorder in _recorders) > MAX_SHARE * torch.cuda.mem_get_info()[1]:
                self.num_bytes = max((other.num_bytes() for other in self._all()), default=0)
                raise torch.OutOfMemoryError(f"recordings may keep {MAX_SHARE:.0%} of the device's memory")
            return recording

    @contextmanager
    def _turn_of(self, tensors: tuple[Tensor, ...]) -> Iterator[None]:
        """Inside, the memory of the recordings is this step's: the one before is done with it, and the next one waits."""
        with self._lock, torch.cuda.device(tensors[0].device):
            if self._turn is not None:
                self._turn.wait()
            try:
                yield
            finally:
                self._turn = torch.cuda.current_stream().record_event()

    @property
    def num_recordings(self) -> int:
        return sum(map(len, self._recordings.values()))

    def _all(self) -> Iterator["Recording"]:
        return (recording for recordings in self._recordings.values() for recording in recordings.values())


_recorders: WeakSet[Recorder] = WeakSet()


def can_be_recorded(graph: GraphModule, tensors: list[Tensor]) -> bool:
    """Whether a graph on such a batch runs on one GPU, and all sizes are known before."""
    if not is_of_known_sizes(graph):
        return False
    devices = {t.device for t in (*tensors, *state_of(graph))}
    return len(devices) == 1 and next(iter(devices)).type == "cuda" and is_all_on(next(iter(devices)), graph)


def state_of(graph: GraphModule) -> list[Tensor]:
    """The parameters and buffers that a graph reads."""
    read = (attrgetter(str(node.target))(graph) for node in graph.graph.nodes if node.op == "get_attr")
    return [t for t in read if isinstance(t, Tensor)]


def is_all_on(device: torch.device, graph: GraphModule) -> bool:
    """Whether the host computes nothing but constants that stay inside: what it does is done once, when it is recorded.

    A number that it draws, `x * torch.rand(())` on the CPU, would be the same in every step.
    """
    away = {node for node in graph.graph.nodes if any(t.device != device for t in values_of(node))}
    seeded = torch.Tag.nondeterministic_seeded
    if any(
        seeded in getattr(node.target, "tags", ()) or any(map(values_of, set(node.all_input_nodes) - away)) for node in away
    ):
        return False
    return away.isdisjoint(*(out.all_input_nodes for out in graph.graph.find_nodes(op="output")))


def is_of_known_sizes(graph: GraphModule) -> bool:
    """Whether how large things are follows from no value."""
    values = (t for node in graph.graph.nodes for t in values_of(node))
    return all(t.layout is torch.strided and all(type(n) is int for n in t.shape) for t in values)


def values_of(node: Node) -> list[Tensor]:
    return [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]


class Recording:
    """A compiled graph's kernels for one batch size, launched all at once."""

    def __init__(self, compiled: Run, tensors: list[Tensor], state: list[Tensor], pool: Any, num_bytes: int = 0):
        """In the memory `pool`, or in one that begins as one block of so many bytes. Recording runs no kernel."""
        self._state, self._places = state, list(map(place_in_memory, state))
        self._graph = torch.cuda.CUDAGraph()
        torch._C._cuda_clearCublasWorkspaces()  # or one of an earlier recording would be used, and would hold that one's memory
        with _captured(self._graph, pool or torch.cuda.graph_pool_handle()):
            block = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
            del block
            inputs = [torch.empty_like(t) for t in tensors]
            outputs = [t.resolve_conj().resolve_neg() for t in compiled(*inputs)]  # their memory is all that is kept
        torch._C._cuda_clearCublasWorkspaces()
        self._inputs, self._outputs = [_unheld(t) for t in inputs], [_unheld(t) for t in outputs]
        self.pool = self._graph.pool()

    def is_valid(self) -> bool:
        """Whether parameters and buffers are where they were."""
        return list(map(place_in_memory, self._state)) == self._places

    def __call__(self, tensors: tuple[Tensor, ...], num_given: int | None = None) -> list[Tensor]:
        """Copies of the first `num_given` results, or of all; of others the recording's own, which the next step writes over."""
        torch._foreach_copy_(self._inputs, list(tensors))
        self._graph.replay()
        outputs = self._outputs[:num_given]
        results = [torch.empty_like(t) for t in outputs]
        if outputs:  # torch takes no empty list
            torch._foreach_copy_(results, outputs)
        return results + self._outputs[len(outputs) :]

    def num_bytes(self, *kinds: str) -> int:
        """What this recording and those that share its memory keep, in segments of these kinds ("large", "small") or of all."""
        segments = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == self.pool]
        return sum(s["total_size"] for s in segments if not kinds or s["segment_type"] in kinds)


def place_in_memory(t: Tensor) -> tuple[int, bool]:
    """Where the tensor is, and whether it is the conjugate of what is there."""
    return t.data_ptr(), t.is_conj()


@contextmanager
def _captured(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """What is launched inside goes into the graph. Where that fails, stream, allocator and generator are left as they were.

    Torch ends a capture that has met what none takes, such as a wait for the device, by raising halfway: its own stream stays
    current, the allocator goes on to serve the pool and keeps its memory, and before torch 2.13 no random number is drawn any more.
    """
    capture = torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")  # loaders may allocate meanwhile
    with torch.cuda.stream(torch.cuda.current_stream()):
        capture.__enter__()
        try:
            yield
        finally:
            try:
                capture.__exit__(None, None, None)
            except RuntimeError:
                _give_up(pool)
                raise


def _give_up(pool: Any) -> None:
    """Does what torch leaves undone when a capture ends by raising."""
    device = torch.cuda.current_device()
    torch._C._cuda_endAllocateToPool(device, pool)
    torch._C._cuda_releasePool(device, pool)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device=device)  # a capture that ends well ends the generator's, too


def _compact(record: Callable[[int], Recording]) -> Recording:
    """What `record` gives, in nearly the least memory that it can be cut from.

    A recording keeps its memory. Taken block by block, as blocks are asked for, it is full of holes: GPT-2 at B8 T1024 kept 7.0 GiB
    where 4.6 were in use at once. Cut from one block it has few, so the least block is sought that everything fits into.
    """
    low, high = 0, record(0).num_bytes("large")
    for _ in range(NUM_HALVINGS):
        middle = (low + high) // 2
        low, high = (low, middle) if record(middle).num_bytes("large") <= middle + SMALL_BYTES else (middle, high)
    return record(high)


# --- tensors that do not hold their memory ---------------------------------------------------------------------------------------


class _Memory:
    """Some bytes of a GPU, for torch.as_tensor."""

    def __init__(self, place: int, num: int):
        self.__cuda_array_interface__ = {"data": (place, False), "shape": (num,), "typestr": "|u1", "version": 2}


def _unheld(t: Tensor) -> Tensor:
    """t, whose memory may be given to others while this is there: to recordings, which leave it alone until they run."""
    if not t.numel():
        return torch.empty_like(t)
    num = t.element_size() * (1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True)))
    return torch.as_tensor(_Memory(t.data_ptr(), num), device=t.device).view(t.dtype).as_strided(t.shape, t.stride())
