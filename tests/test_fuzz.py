"""A few hundred random models against the oracle, and that the fuzzer sees a wrong rule; `make fuzz` runs more."""

import fuzz
import pytest
import torch

from samplewise.factors.outer import Outer

NUM_IN_A_TEST = 50


@pytest.fixture(autouse=True)
def _one_thread():
    """Models this small are slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("first", range(0, 300, NUM_IN_A_TEST))
def test_no_number_is_wrong(first):
    lines = []
    kinds = fuzz.run(range(first, first + NUM_IN_A_TEST), say=lines.append)
    assert not kinds["WRONG"] and not kinds["CRASH"], "\n".join(lines)
    assert kinds["right"] >= 0.8 * NUM_IN_A_TEST, "\n".join(lines)


def test_examples_are_determined_by_their_seed():
    assert [fuzz.example(seed) for seed in range(30)] == [fuzz.example(seed) for seed in range(30)]


def test_a_wrong_rule_is_seen(monkeypatch):
    product = Outer._product
    monkeypatch.setattr(Outer, "_product", staticmethod(lambda a, g: 1.001 * product(a, g)))
    kinds = fuzz.run(range(30), say=lambda line: None)
    assert kinds["WRONG"] >= 5


def test_a_wrong_norm_is_seen(monkeypatch):
    monkeypatch.setattr(Outer, "sq_norms", lambda self, route: 1.001 * super(Outer, self).sq_norms())
    lines = []
    kinds = fuzz.run(range(30), say=lines.append)
    assert kinds["WRONG"] >= 5
    assert any("norms() is off" in line for line in lines)


def test_a_failure_can_be_read_and_repeated(monkeypatch):
    monkeypatch.setattr(Outer, "materialize", lambda self: 1 / 0)
    lines = []
    assert fuzz.run(range(5), say=lines.append)["CRASH"]
    failure = next(line for line in lines if line.startswith("CRASH"))
    assert "ZeroDivisionError" in failure and "seed " in failure and "class Model" in failure
