"""Which compiled steps are recorded as CUDA graphs; that a recording gives the right numbers is for tests/test_gpu.py."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from samplewise.replay import is_held_up, is_small_beside, replayed


def chain(x, w):
    for _ in range(100):
        x = (x @ w).sin()
    return [x]


def traced(size: int):
    return make_fx(chain, tracing_mode="fake")(torch.zeros(size, size), torch.zeros(size, size))


def test_short_kernels_are_held_up_by_launches_and_long_ones_are_not():
    assert is_held_up(traced(64))
    assert not is_held_up(traced(8192))  # 1.1e14 operations in 200 ops


def test_gradients_of_every_sample_are_not_kept_twice():
    state = [torch.empty(1000, 1000, 10, device="meta")]
    assert is_small_beside([torch.empty_like(state[0]), torch.empty(64, device="meta")], state)
    assert not is_small_beside([torch.empty(64, 1000, 1000, 10, device="meta")], state)
    assert is_small_beside([torch.empty(64, 100, device="meta")], [torch.empty(100, device="meta")])


def test_the_cpu_records_nothing():
    graph = traced(4)
    assert replayed(graph.forward, graph, [torch.zeros(4, 4)]) == graph.forward
