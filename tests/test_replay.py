"""Which compiled steps are recorded as CUDA graphs; that a recording gives the right numbers is for tests/test_gpu.py."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from samplewise import sizes
from samplewise.replay import Recorder, is_all_on, is_held_up, is_small_beside


def chain(x, w):
    for _ in range(100):
        x = (x @ w).sin()
    return [x]


def traced(size: int):
    return make_fx(chain, tracing_mode="fake")(torch.zeros(size, size), torch.zeros(size, size))


def test_short_kernels_are_held_up_by_launches_and_long_ones_are_not():
    assert is_held_up(traced(64))
    assert not is_held_up(traced(8192))  # 1.1e14 operations in 200 ops


def test_a_graph_of_any_size_is_judged_by_the_size_it_was_made_of():
    def trace(size: int):
        return make_fx(lambda x, w: [x.new_ones(len(x), 4) @ w, x @ w], tracing_mode="fake")(
            torch.zeros(size, 4), torch.zeros(4, 4)
        )

    first, second = trace(6), trace(8)
    graph = sizes.of_any_size(sizes.template(first, second, (6, 8)), first, (0, 0))
    assert graph(torch.ones(3, 4), torch.ones(4, 4))[0].shape == (3, 4)
    assert is_held_up(graph) and is_held_up(first)


def test_gradients_of_every_sample_are_not_kept_twice():
    state = [torch.empty(1000, 1000, 10, device="meta")]
    assert is_small_beside([torch.empty_like(state[0]), torch.empty(64, device="meta")], state)
    assert not is_small_beside([torch.empty(64, 1000, 1000, 10, device="meta")], state)
    assert is_small_beside([torch.empty(64, 100, device="meta")], [torch.empty(100, device="meta")])


def test_the_cpu_records_nothing():
    graph = make_fx(lambda x: [x.sin()])(torch.zeros(4, 4))
    assert Recorder().recorded(graph.forward, graph, [torch.zeros(4, 4)]) == graph.forward


HOSTS = {
    "nothing": (lambda x: [x.sin()], True),
    "a constant": (lambda x: [x * torch.full((), 2.0).sqrt()], True),
    "a number that it draws": (lambda x: [x * torch.rand(())], False),
    "a number that it draws, looked at": (lambda x: [x * (torch.rand(()) < 0.5)], False),
    "a copy": (lambda x: [x * x.sum().to("cpu", non_blocking=True)], False),
    "a result": (lambda x: [x.sin(), torch.zeros(())], False),
}


@pytest.mark.parametrize("name", HOSTS)
def test_a_step_is_not_recorded_if_the_host_has_part_in_it(name):
    """What the host does would be done once, when the step is recorded: numbers that it draws would not change any more."""
    function, is_recorded = HOSTS[name]
    with FakeTensorMode():
        x = torch.empty(4, 4, device="cuda")
        graph = make_fx(function)(x)
    assert is_all_on(x.device, graph) == is_recorded
