"""A run that is saved, killed and resumed is the run that was not."""

import copy
import io
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from private_runs import difference, mlp, private, train, weights
from torch.utils.data import DataLoader

import samplewise as sw
from samplewise.errors import SamplewiseError

HERE = Path(__file__).parent
ARGUMENTS = {"max_grad_norm": 1.0, "noise_multiplier": 1.0, "batch_size": 8, "max_physical_batch_size": 5}


def saved(model, optimizer):
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


def run(adaptive=False, **arguments):
    model = mlp()
    how = {"clipping": "adaptive"} if adaptive else {}
    return private(model, torch.optim.Adam(model.parameters(), lr=0.05), **{**ARGUMENTS, **how, **arguments})


@pytest.mark.parametrize("at", [1, 2, 4, 7, 9])
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_resumed_run_is_the_unbroken_one(at, adaptive):
    """Bit by bit with a seed: draws, noise, moments, bound, account; `at` batches are seen before the save, some within a draw."""
    whole = run(adaptive)
    train(*whole, epochs=2)
    model, optimizer, loader = run(adaptive)
    state = None
    for num, (x, y) in enumerate(loader, 1):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if num == at:
            state = saved(model, optimizer)
            break
    assert state is not None
    model, optimizer, loader = run(adaptive)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    train(model, optimizer, loader)
    train(model, optimizer, loader)
    assert difference(weights(model), weights(whole[0])) == 0
    assert optimizer.accountant.history == whole[1].accountant.history == [(1.0, 0.2, 10)]
    assert optimizer.max_grad_norm == whole[1].max_grad_norm
    assert optimizer.epsilon(delta=1e-5, accountant="rdp") == whole[1].epsilon(delta=1e-5, accountant="rdp")


def test_nothing_secret_is_saved_and_noise_does_not_repeat():
    """Without a seed two runs that go on from one state have other draws and other noise."""
    model, optimizer, loader = run(seed=None)
    train(model, optimizer, loader)
    state = saved(model, optimizer)
    assert state["optimizer"]["privacy"]["noise"] == {} and state["optimizer"]["privacy"]["loader"]["seed"] is None
    ends = []
    for _ in range(2):
        model, optimizer, loader = run(seed=None)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        train(model, optimizer, loader)
        assert optimizer.accountant.num_steps == 10
        ends.append(weights(model))
    assert difference(*ends) > 0


def test_seeded_noise_goes_on_and_does_not_begin_again():
    def noises(optimizer, model, loader):
        seen = []
        for x, _ in loader:
            optimizer.zero_grad()
            (model(x) * 0).mean().backward()
            optimizer.step()
            if optimizer.stepped:
                seen.append(model[0].weight.grad.clone())
        return seen

    model, optimizer, loader = run()
    first = noises(optimizer, model, loader)
    state = saved(model, optimizer)
    model, optimizer, loader = run()
    optimizer.load_state_dict(state["optimizer"])
    second = noises(optimizer, model, loader)
    assert not any(torch.equal(a, b) for a in first for b in second)


def test_a_scheduled_noise_multiplier_is_restored():
    model, optimizer, loader = run()
    optimizer.noise_multiplier = 3.0
    train(model, optimizer, loader)
    state = saved(model, optimizer)
    model, optimizer, loader = run()
    optimizer.load_state_dict(state["optimizer"])
    assert optimizer.noise_multiplier == 3.0 and optimizer.accountant.history == [(3.0, 0.2, 5)]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"noise_multiplier": 0.5}, "noise_multiplier 1.0, now 0.5"),
        ({"max_grad_norm": 2.0}, "max_grad_norm 1.0, now 2.0"),
        ({"clipping": "automatic"}, "clipping None, now Automatic"),
        ({"batch_size": 10}, "sample_rate 0.2, now 0.25"),
        ({"seed": 7}, "seed 0, now 7"),
        ({"dataset": torch.utils.data.Subset(private()[2].dataset, range(39))}, "num_samples 40, now 39"),
    ],
)
def test_going_on_as_another_run_is_refused(changed, text):
    model, optimizer, loader = run()
    train(model, optimizer, loader)
    state = saved(model, optimizer)
    _, optimizer, _ = run(**changed)
    with pytest.raises(SamplewiseError, match=text):
        optimizer.load_state_dict(state["optimizer"])
    assert optimizer.accountant.num_steps == 0


def test_a_state_without_an_account_is_refused():
    _, optimizer, _ = run()
    plain = torch.optim.Adam(mlp().parameters())
    with pytest.raises(SamplewiseError, match="no account"):
        optimizer.load_state_dict(plain.state_dict())


def test_the_inner_state_of_an_optimizer_that_was_there_before_is_kept():
    model = mlp()
    inner = torch.optim.Adam(model.parameters())
    F.cross_entropy(model(torch.ones(2, 5)), torch.zeros(2).long()).backward()
    inner.step()
    inner.zero_grad()
    steps = inner.state[model[0].weight]["step"].clone()
    _, optimizer, _ = private(model, inner)
    assert optimizer.state[model[0].weight]["step"] == steps == 1


SCRIPT = """
import os, sys, torch, torch.nn.functional as F
sys.path.insert(0, {here!r})
from private_runs import mlp, private
model = mlp()
model, optimizer, loader = private(
    model, torch.optim.Adam(model.parameters(), lr=0.05), max_grad_norm=1.0, noise_multiplier=1.0, batch_size=4,
    max_physical_batch_size=3)
epoch = 0
if os.path.exists(sys.argv[1]):
    state = torch.load(sys.argv[1], weights_only=True)
    model.load_state_dict(state["model"]); optimizer.load_state_dict(state["optimizer"]); epoch = state["epoch"]
print("ready", flush=True)
for epoch in range(epoch, 6):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if optimizer.stepped:
            state = {{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}}
            torch.save(state, sys.argv[1] + ".new")
            os.replace(sys.argv[1] + ".new", sys.argv[1])
print("done", optimizer.accountant.num_steps, repr(optimizer.epsilon(delta=1e-5, accountant="rdp")), flush=True)
torch.save(model.state_dict(), sys.argv[1] + ".end")
"""


def started(checkpoint):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(here=str(HERE)), str(checkpoint)],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(Path(sw.__file__).parents[1])},
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline().strip() == "ready"
    return process


def test_killed_at_random_moments_and_resumed(tmp_path):
    """kill -9, twice, wherever it strikes: within a draw, within a save. Steps, epsilon and weights are the unbroken run's."""
    checkpoint, other = tmp_path / "killed", started(tmp_path / "unbroken")
    for _ in range(2):
        process = started(checkpoint)
        time.sleep(random.uniform(0.02, 0.4))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    out, _ = started(checkpoint).communicate()
    unbroken, _ = other.communicate()
    assert out == unbroken and out.startswith("done 60 ")
    ends = [torch.load(tmp_path / f"{name}.end", weights_only=True) for name in ("killed", "unbroken")]
    assert difference(*ends) == 0


def test_a_loader_goes_on_within_an_epoch():
    rows = list(range(50))
    whole = [batch.tolist() for batch in sw.dp.PoissonLoader(rows, sample_rate=0.2, steps=6, seed=3)]
    first = sw.dp.PoissonLoader(rows, sample_rate=0.2, steps=6, seed=3)
    batches = iter(first)
    begun = [next(batches).tolist() for _ in range(2)]
    state = first.state_dict()
    second = sw.dp.PoissonLoader(rows, sample_rate=0.2, steps=6, seed=3)
    second.load_state_dict(state)
    # by itself, without an optimizer that steps, the loader counts a draw when the next is asked for
    assert begun[:1] + [batch.tolist() for batch in second] == whole
    assert [batch.tolist() for batch in DataLoader(rows, batch_size=50)] == [rows]


def test_an_account_does_not_get_shorter():
    """An older state over newer weights: the account would forget the steps in between (ε 0 in place of what they cost)."""
    model, optimizer, loader = private(max_grad_norm=1.0, noise_multiplier=1.0)
    first = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, loader)
    middle, cost = copy.deepcopy(optimizer.state_dict()), optimizer.epsilon(1e-5, accountant="rdp")
    train(model, optimizer, loader)
    for state in (first, middle):
        with pytest.raises(SamplewiseError, match="does not go on from the 8"):
            optimizer.load_state_dict(state)
    assert optimizer.epsilon(1e-5, accountant="rdp") > cost > 0
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # where it stands
    assert optimizer.accountant.num_steps == 8


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_a_new_process_goes_on_from_any_state(order):
    model, optimizer, loader = private(max_grad_norm=1.0, noise_multiplier=1.0)
    train(model, optimizer, loader)
    saved = model.state_dict(), optimizer.state_dict()
    again, its, _ = private(mlp().double(), max_grad_norm=1.0, noise_multiplier=1.0)
    if order == "model first":
        again.load_state_dict(saved[0])
    its.load_state_dict(saved[1])
    again.load_state_dict(saved[0])
    assert its.accountant.history == optimizer.accountant.history
