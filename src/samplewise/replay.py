"""A compiled step recorded as a CUDA graph: its kernels are launched at once, in memory that is planned once."""

from collections.abc import Callable
from operator import attrgetter
from weakref import WeakSet

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

MAX_SHARE = 0.5
"""Of the device's memory, for all recordings together: what they keep is for nobody else."""
MAX_MOVES = 3
"""How often a step is recorded anew because its parameters have moved in memory."""

NUM_HALVINGS = 6
"""How often the memory of a recording is halved in search of the least."""
SMALL_BYTES = 1 << 25
"""What may lie beside the block: tensors below a megabyte have memory of their own."""


def replayed(compiled: Callable, graph: GraphModule, tensors: list[Tensor]) -> Callable[..., list[Tensor]]:
    """The compiled graph, recorded by its first call if it runs on a GPU and there is memory to keep what it takes."""
    read = [attrgetter(str(node.target))(graph) for node in graph.graph.nodes if node.op == "get_attr"]
    state = [t for t in read if isinstance(t, Tensor)]
    outputs = [t for node in graph.graph.find_nodes(op="output") for n in node.all_input_nodes for t in _results(n)]
    if not tensors or not all(t.is_cuda for t in tensors) or not is_small_beside(outputs, state):
        return compiled
    replay: Replay | None = None
    num_left = 1 + MAX_MOVES

    def run(*tensors: Tensor) -> list[Tensor]:
        nonlocal replay, num_left
        if replay is None or not replay.is_valid():
            replay = None
            if not num_left:
                return compiled(*tensors)
            num_left -= 1
            try:
                replay = Replay(compiled, list(tensors), state)
            except torch.OutOfMemoryError:
                num_left = 0
                return compiled(*tensors)
        return replay(*tensors)

    return run


def is_small_beside(outputs: list[Tensor], state: list[Tensor]) -> bool:
    """Whether results, of which a recording keeps a copy, are as large as parameters (sums) and not as those of every sample."""
    return sum(t.nbytes for t in outputs) <= max(2 * sum(t.nbytes for t in state), SMALL_BYTES)


def _results(node: Node) -> list[Tensor]:
    return [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]


class Replay:
    """The compiled graph's kernels, launched all at once on tensors that stay where they are.

    The batch is copied in, and the results out: what a step gave is not touched by the next one.
    """

    def __init__(self, compiled: Callable, tensors: list[Tensor], state: list[Tensor]):
        self._inputs = [t.clone() for t in tensors]
        self._state, self._places = state, [t.data_ptr() for t in state]
        with torch.cuda.device(tensors[0].device):
            compiled(*self._inputs)  # what is made once, by the first call, is not recorded
            self._recording, self._outputs = _compact(lambda: compiled(*self._inputs))
            self.num_bytes = _memory_of(self._recording)
            _free, whole = torch.cuda.mem_get_info()
        if self.num_bytes + sum(other.num_bytes for other in _kept) > MAX_SHARE * whole:
            raise torch.OutOfMemoryError(f"recordings may keep {MAX_SHARE:.0%} of the device's memory")
        _kept.add(self)

    def is_valid(self) -> bool:
        """Whether parameters and buffers are where they were."""
        return [t.data_ptr() for t in self._state] == self._places

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        torch._foreach_copy_(self._inputs, list(tensors))
        self._recording.replay()
        results = [torch.empty_like(t) for t in self._outputs]
        torch._foreach_copy_(results, self._outputs)
        return results


_kept: WeakSet[Replay] = WeakSet()


def _compact(run: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """The recording of `run`, in nearly the least memory it can be recorded in, and its results.

    A recording keeps its memory. Taken block by block, as blocks are asked for, it is full of holes: GPT-2 at B8 T1024 kept 7.0 GiB
    where 4.6 were in use at once. Cut from one block it has few, so the least block is sought that everything fits into.
    Recording runs no kernel.
    """
    low, high = 0, _memory_of(_recorded(run)[0])
    for _ in range(NUM_HALVINGS):
        middle = (low + high) // 2
        low, high = (low, middle) if _memory_of(_recorded(run, middle)[0]) <= middle + SMALL_BYTES else (middle, high)
    return _recorded(run, high)


def _recorded(run: Callable[[], list[Tensor]], num_bytes: int = 0) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """The recording of `run` and its results; its memory begins as one block of so many bytes."""
    recording = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recording):  # which first gives back what an earlier recording had
        block = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        del block
        return recording, run()


def _memory_of(recording: torch.cuda.CUDAGraph) -> int:
    """Bytes that the recording keeps."""
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == recording.pool())
