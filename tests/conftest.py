"""Tests import the case table as `cases`."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _same_numbers_every_time():
    torch.manual_seed(0)


@pytest.fixture
def uncompiled(monkeypatch):
    """Graphs run as they were traced: what the compiler makes of them is its own matter, and takes seconds."""
    monkeypatch.setattr(torch, "compile", lambda graph, **_: graph)


@pytest.fixture
def in_double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
