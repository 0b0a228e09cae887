"""A compiled step recorded as a CUDA graph, where launching its kernels takes longer than running them."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

LAUNCH_BOUND = 0.6
"""From which share of a step's time on that its launches are taken to hold it up."""


def is_held_up(graph: Callable, tensors: list[Tensor]) -> bool:
    """Whether the GPU waits for Python to launch the graph's kernels."""
    shares = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph(*tensors)
        launched = time.perf_counter() - start
        torch.cuda.synchronize()
        shares.append(launched / (time.perf_counter() - start))
    return min(shares) > LAUNCH_BOUND


def replayed(graph: Callable, tensors: list[Tensor], state: list[Tensor]) -> Callable[..., list[Tensor]]:
    """The graph, as a CUDA graph where that is quicker; `state` is what it reads beside its arguments."""
    if not tensors or not all(t.is_cuda for t in tensors):
        return graph
    with torch.no_grad():
        graph(*tensors)
        if not is_held_up(graph, tensors):
            return graph
        replay = Replay(graph, tensors, state)

    def run(*tensors: Tensor) -> list[Tensor]:
        nonlocal replay
        if not replay.is_valid():
            replay = Replay(graph, list(tensors), state)
        return replay(*tensors)

    return run


class Replay:
    """The graph's kernels, launched all at once on tensors that stay where they are.

    The batch is copied in, and the results out: what a step gave is not touched by the next one.
    """

    def __init__(self, graph: Callable, tensors: list[Tensor], state: list[Tensor]):
        self._inputs = [t.clone() for t in tensors]
        self._state, self._places = state, [t.data_ptr() for t in state]
        self._recording = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._recording):
            self._outputs = graph(*self._inputs)

    def is_valid(self) -> bool:
        """Whether parameters and buffers are where they were."""
        return [t.data_ptr() for t in self._state] == self._places

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        torch._foreach_copy_(self._inputs, list(tensors))
        self._recording.replay()
        return [t.clone() for t in self._outputs]
