"""Which compiled steps are recorded as CUDA graphs; that a recording gives the right numbers is for tests/test_gpu.py."""

import pytest
import torch
from stepping import batch_of, per_row
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import samplewise as sw
from samplewise.compiled.parts import gives_little
from samplewise.compiled.replay import Recording, can_be_recorded, is_all_on, is_of_known_sizes, place_in_memory


def test_gradients_of_every_sample_are_not_kept_twice():
    state = [torch.empty(1000, 1000, 10, device="meta")]
    gives = lambda *shapes: make_fx(lambda x: [x.new_zeros(shape) for shape in shapes], tracing_mode="fake")(torch.zeros(1))
    assert gives_little(gives(state[0].shape, (64,)), state)
    assert not gives_little(gives((64, *state[0].shape)), state)
    assert gives_little(gives((64, 100)), [torch.empty(100, device="meta")])


def test_sizes_that_values_tell_are_not_recorded():
    """Nor is anything asked of them: how many bytes a result takes is not known."""
    step = sw.per_sample_step(
        nn.Linear(4, 3), per_row, lambda grads: grads["weight"].materialize()[grads.norms() > 1.5], compile=True
    )
    graphs = []
    traced = step._traced
    step._traced = lambda *args: graphs.append(traced(*args)) or graphs[-1]
    step(*batch_of())
    assert graphs and not is_of_known_sizes(graphs[0].graph)
    assert is_of_known_sizes(make_fx(lambda x: [x.sin()], tracing_mode="fake")(torch.zeros(4)))


def test_the_cpu_records_nothing():
    assert not can_be_recorded(make_fx(lambda x: [x.sin()])(torch.zeros(4, 4)), [torch.zeros(4, 4)])


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


def test_what_is_recorded_has_sizes_that_are_known():
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        x = torch.empty(4, 4, device="cuda")
        known, told = make_fx(lambda x: [x.sin()])(x), make_fx(lambda x: [x[x > 0]])(x)
    assert can_be_recorded(known, [x]) and not can_be_recorded(told, [x])


def test_a_recording_holds_for_parameters_as_they_were():
    p = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    recording = Recording.__new__(Recording)
    recording._state, recording._places = [p], [place_in_memory(p)]
    assert recording.is_valid()
    p.data = p.data.conj()  # lies where it lay
    assert not recording.is_valid()
    p.data = torch.ones(3, dtype=torch.complex64)
    assert not recording.is_valid()
