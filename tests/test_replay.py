"""Which compiled steps are recorded as CUDA graphs; that a recording gives the right numbers is for tests/test_gpu.py."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from samplewise.replay import Recorder, is_small_beside


def test_gradients_of_every_sample_are_not_kept_twice():
    state = [torch.empty(1000, 1000, 10, device="meta")]
    assert is_small_beside([torch.empty_like(state[0]), torch.empty(64, device="meta")], state)
    assert not is_small_beside([torch.empty(64, 1000, 1000, 10, device="meta")], state)
    assert is_small_beside([torch.empty(64, 100, device="meta")], [torch.empty(100, device="meta")])


def test_the_cpu_records_nothing():
    graph = make_fx(lambda x: [x.sin()])(torch.zeros(4, 4))
    assert Recorder().recorded(graph.forward, graph, [torch.zeros(4, 4)]) == graph.forward
