"""A compiled step recorded as a CUDA graph, where launching its kernels takes longer than running them."""

from collections.abc import Callable
from operator import attrgetter

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves, tree_map_only

LAUNCH = 1e-5
"""Seconds from one kernel to the next where Python launches them: 1,950 kernels of a GPT-2 step in 19.6 ms, 13.6 of them
running (H200, torch 2.11)."""
FASTEST = 1e15
"""Floating-point operations in a second, about the most that a device does. A measured rate is lower while others use the device,
and a step that should be recorded is not: GPT-2 at B16 T256 then took 28.8 ms in place of 12.5. Recording one too many costs no more
than a copy of its results."""

NUM_RECORDINGS = 6
"""How often the memory of a recording is halved in search of the least."""
SMALL_BYTES = 1 << 25
"""What may lie beside the block: tensors below a megabyte have memory of their own."""


def replayed(compiled: Callable, graph: GraphModule, tensors: list[Tensor]) -> Callable[..., list[Tensor]]:
    """The compiled graph, as a CUDA graph where launches would hold it up."""
    read = [attrgetter(str(node.target))(graph) for node in graph.graph.nodes if node.op == "get_attr"]
    state = [t for t in read if isinstance(t, Tensor)]
    outputs = [t for node in graph.graph.find_nodes(op="output") for n in node.all_input_nodes for t in _results(n)]
    if not tensors or not all(t.is_cuda for t in tensors):
        return compiled
    if not is_held_up(graph) or not is_small_beside(outputs, state):
        return compiled
    replay: Replay | None = None

    def run(*tensors: Tensor) -> list[Tensor]:
        nonlocal replay
        if replay is None or not replay.is_valid():
            replay = Replay(compiled, list(tensors), state)
        return replay(*tensors)

    return run


def is_held_up(graph: GraphModule) -> bool:
    """Whether the GPU would wait for Python to launch the graph's kernels, by their number and by what they have to do."""
    nodes = [node for node in graph.graph.nodes if node.op == "call_function" and not _is_view(node)]
    return 2 * LAUNCH * len(nodes) > sum(map(_num_flops, nodes)) / FASTEST


def _num_flops(node: Node) -> int:
    """What the op's products take; the rest is fused or short."""
    from torch.utils.flop_counter import flop_registry  # imports Triton

    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    args, kwargs = tree_map_only(Node, lambda n: n.meta["val"], (node.args, node.kwargs))
    return count(*args, **kwargs, out_val=node.meta["val"]) if count is not None else 0


def is_small_beside(outputs: list[Tensor], state: list[Tensor]) -> bool:
    """Whether results, of which a recording keeps a copy, are as large as parameters (sums) and not as those of every sample."""
    return sum(t.nbytes for t in outputs) <= max(2 * sum(t.nbytes for t in state), SMALL_BYTES)


def _results(node: Node) -> list[Tensor]:
    return [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]


def _is_view(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


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

    def is_valid(self) -> bool:
        """Whether parameters and buffers are where they were."""
        return [t.data_ptr() for t in self._state] == self._places

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        torch._foreach_copy_(self._inputs, list(tensors))
        self._recording.replay()
        return [t.clone() for t in self._outputs]


def _compact(run: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """The recording of `run`, in nearly the least memory it can be recorded in, and its results.

    A recording keeps its memory. Taken block by block, as blocks are asked for, it is full of holes: GPT-2 at B8 T1024 kept 7.0 GiB
    where 4.6 were in use at once. Cut from one block it has few, so the least block is sought that everything fits into.
    Recording runs no kernel.
    """
    low, high = 0, _memory_of(_recorded(run)[0])
    for _ in range(NUM_RECORDINGS):
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
