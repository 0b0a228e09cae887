"""What the tests of compiled steps share: the two steps, their batches, and how far two results are apart."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

import samplewise as sw
from samplewise.flow.memory import REMEMBERED
from samplewise.samples import Layout
from samplewise.testing import relative_error

B = 5


def tensors(value: Any) -> list[Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, Tensor)]


def error(got: Any, want: Any) -> float:
    """The largest relative error of two results; inf if they are not made alike."""
    got, want = tensors(got), tensors(want)
    if [t.shape for t in got] != [t.shape for t in want]:
        return float("inf")
    real = [torch.view_as_real(t) if t.is_complex() else t for t in got + want]
    return max(map(relative_error, real[: len(got)], real[len(got) :]), default=0.0)


def per_row(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def norms(grads: Any) -> Tensor:
    return grads.norms()


def questions(grads: Any) -> tuple:
    return grads.norms(), grads.clipped_sum(max_norm=0.1), grads.sum()


def batch_of(size: int = B, width: int = 4, classes: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(size, width), torch.randint(classes, (size,))


def mlp(width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 6), nn.Tanh(), nn.Linear(6, 3))


def both(model: nn.Module, loss_fn: Any = per_row, query: Any = questions, **options: Any) -> tuple[Any, Any]:
    """The compiled step and the one op by op."""
    return (
        sw.per_sample_step(model, loss_fn, query, compile=True, **options),
        sw.per_sample_step(model, loss_fn, query, **options),
    )


def with_dropout(p: float) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(p), nn.Linear(6, 3))


def fakes(model: nn.Module) -> list[str]:
    """Where a tensor without values was left behind."""
    found = [name for name, t in [*model.named_parameters(), *model.named_buffers()] if isinstance(t, FakeTensor)]
    found += [f"{name}.grad" for name, p in model.named_parameters() if isinstance(p.grad, FakeTensor)]
    found += [f"{n}.{k}" for n, m in model.named_modules() for k, v in vars(m).items() if any(map(is_fake, tree_leaves(v)))]
    marks = [mark for mark in tree_leaves([known.mark for known in REMEMBERED.values()]) if isinstance(mark, Layout)]
    return found + [str(mark) for mark in marks if isinstance(mark.ids, FakeTensor)]


def is_fake(value: Any) -> bool:
    return isinstance(value, FakeTensor)


def outcome(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except sw.SamplewiseError as refusal:
        return refusal
