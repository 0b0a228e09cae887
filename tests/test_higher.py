"""Ops that are given functions: what those functions use is seen, or the op is refused."""

import functools

import pytest
import torch
import torch._dynamo  # as it is loaded wherever anything was compiled: what follows is then not compiled inside of a capture
from cases import Fn
from torch import nn
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import samplewise as sw
from samplewise import UnattributedError
from samplewise.testing import oracle, relative_error, run_capture

B, D = 4, 5


def rows(model, x):
    return model(x).sin().sum(1)


def branch(s, x):
    return torch.cond(s.flag, lambda y: s.a(y), lambda y: s.b(y) * 2, (x,)) + s.c(x)


CONDITIONS = {
    "a tensor": branch,
    "parameters handed over": lambda s, x: (
        torch.cond(s.flag, lambda y, w: y @ w, lambda y, w: y @ w.T, (x, s.a.weight)) + s.c(x)
    ),
    "in a branch": lambda s, x: torch.cond(s.flag, functools.partial(branch, s), lambda y: y * s.w, (s.c(x),)),
    "a parameter elementwise": lambda s, x: s.c(x) * torch.cond(s.flag, lambda o: o * s.w, lambda o: o + s.w, (s.ones,)),
}


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("name", CONDITIONS)
def test_the_branch_that_is_taken_is_seen(name, flag, verify, monkeypatch):
    layers = {n: nn.Linear(D, D) for n in "abc"}
    model = Fn(CONDITIONS[name], **layers, w=nn.Parameter(torch.rand(D)))
    model.register_buffer("flag", torch.tensor(flag))
    model.register_buffer("ones", torch.ones(D))
    model, x = model.double(), torch.randn(B, D).double()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cond", lambda flag, true, false, operands: (true if flag else false)(*operands))
        truth = oracle(model, rows, x)
    for _ in range(2):
        grads = run_capture(model, rows, x, verify=verify)
        assert set(grads) == {n for n, G in truth.items() if G.any()}
        for name_of, G in grads.materialize().items():
            assert relative_error(G, truth[name_of]) < 1e-9


HIDDEN = {
    "map": lambda s, x: mapped(lambda row: s.a(row), x),
    "scan": lambda s, x: scan(lambda c, row: ((c * s.w).clone(), s.a(row) + c), torch.ones_like(x[0]), x)[1],
    "while": lambda s, x: while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, s.a(y)), (torch.tensor(0), x))[1],
    "bound": lambda s, x: mapped(s.a.forward, x),
    "partial": lambda s, x: mapped(functools.partial(lambda w, row: row * w, s.w), x),
    "default": lambda s, x: mapped(lambda row, w=s.w: row * w, x),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_parameters_in_functions_of_other_ops_are_refused(name):
    model = Fn(lambda s, x: HIDDEN[name](s, x) + s.c(x), a=nn.Linear(D, D), c=nn.Linear(D, D), w=nn.Parameter(torch.rand(D)))
    for verify in (True, False):
        with sw.capture(model, verify=verify), pytest.raises(UnattributedError, match="Hand it over|in Python"):
            rows(model, torch.randn(B, D)).sum().backward()
