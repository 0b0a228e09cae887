"""The oracle: the gradient of each sample from a backward of its own, in float64; slow, obvious and true."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from samplewise.losses import LossFn
from samplewise.opening import per_sample
from samplewise.queries import Grads
from samplewise.samples import picked


def oracle(model: nn.Module, loss_fn: LossFn, *batch: Any, batch_dim: int = 0) -> dict[str, Tensor]:
    """{name: G} with G[b] the gradient of `loss_fn(model, sample b alone)`, one backward a sample, in float64.

    Works on a copy of the model. Floating-point tensors of the batch become float64; every tensor of the batch is cut
    along `batch_dim`, anything else is passed on. Parameters without a gradient are absent.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> oracle(model, lambda model, x: model(x).squeeze(1), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))["weight"].tolist()
    [[[1.0, 2.0]], [[3.0, 4.0]]]
    """
    model = _double(copy.deepcopy(model))
    batch = tree_map_only(Tensor, _double, batch)
    num_samples = _num_samples(batch, batch_dim)
    rows: dict[str, list[Tensor | None]] = {name: [] for name, p in model.named_parameters() if p.requires_grad}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for b in range(num_samples):
        model.load_state_dict(state)
        model.zero_grad()
        alone = tree_map_only(Tensor, lambda t, b=b: picked(t, batch_dim, torch.tensor([b], device=t.device)), batch)
        loss_fn(model, *alone).sum().backward()
        for name, p in model.named_parameters():
            if p.requires_grad:
                rows[name].append(None if p.grad is None else p.grad.to_dense() if p.grad.is_sparse else p.grad)
    parameters = dict(model.named_parameters())
    return {
        name: torch.stack([torch.zeros_like(parameters[name]) if G is None else G.clone() for G in some])
        for name, some in rows.items()
        if any(G is not None for G in some)
    }


def _double(t: Any) -> Any:
    """float64 or complex128 of a tensor or module; integers stay."""
    if isinstance(t, nn.Module):
        for p in [*t.parameters(), *t.buffers()]:
            p.data = _double(p.data)
        return t
    return t.to(torch.complex128) if t.is_complex() else t.double() if t.is_floating_point() else t


def _num_samples(batch: Any, batch_dim: int) -> int:
    sizes: set[int] = set()
    tree_map_only(Tensor, lambda t: sizes.add(t.shape[batch_dim]), batch)
    if len(sizes) != 1:
        raise ValueError(f"the tensors of the batch have sizes {sorted(sizes)} along dimension {batch_dim}; one is needed")
    return sizes.pop()


@dataclass(frozen=True)
class Check:
    """How far captured gradients are from the oracle's."""

    errors: dict[str, float]
    """Largest error of a parameter's gradients, relative to the largest entry of the oracle's (`relative_errors`)."""
    missing: tuple[str, ...]
    """Parameters that the oracle has gradients for and the capture has not."""

    def __str__(self) -> str:
        lines = [f"{name:40} {error:.1e}" for name, error in self.errors.items()]
        return "\n".join([*lines, *(f"{name:40} missing" for name in self.missing)])


def check(model: nn.Module, loss_fn: LossFn, *batch: Any, batch_dim: int = 0, **options: Any) -> Check:
    """Captured per-sample gradients of the model against the oracle, parameter by parameter.

    >>> str(check(nn.Linear(2, 1), lambda model, x: model(x).squeeze(1), torch.ones(3, 2))).split()[0]
    'weight'
    """
    captured = run_capture(model, loss_fn, *batch, batch_dim=batch_dim, **options).materialize()
    truth = oracle(model, loss_fn, *batch, batch_dim=batch_dim)
    missing = tuple(name for name in truth if name not in captured)
    return Check(relative_errors(captured, {name: G for name, G in truth.items() if name in captured}), missing)


def assert_matches_oracle(
    model: nn.Module, loss_fn: LossFn, *batch: Any, batch_dim: int = 0, tolerance: float = 1e-9, **options: Any
) -> None:
    """Raises AssertionError with a table if a captured gradient is off by more than `tolerance`.

    The default suits a model in float64; in float32 1e-4 is what rounding leaves.
    """
    result = check(model, loss_fn, *batch, batch_dim=batch_dim, **options)
    if result.missing or any(error > tolerance for error in result.errors.values()):
        raise AssertionError(f"captured gradients differ from the oracle\n{result}")


def run_capture(model: nn.Module, loss_fn: LossFn, *batch: Any, **options: Any) -> Grads:
    """The gradients captured while `loss_fn(model, *batch)` and its backward ran once."""
    return per_sample(model, loss_fn, **options)(*batch)


ROUNDING = 2**-40
"""What is this small beside other gradients in float64, which has 52 bits, may be rounding alone."""


def relative_errors(got: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> dict[str, float]:
    """`relative_error` of each answer; of one that is zero but for rounding, relative to a thousandth of the largest of all.

    A softmax does not see the bias of its keys: the gradient there is zero, and the digits that are computed are all wrong.

    >>> truth = {"weight": torch.tensor([2.0]), "scale": torch.tensor([2e-8]), "bias": torch.tensor([1e-17])}
    >>> errors = relative_errors({name: G + 1e-8 for name, G in truth.items()}, truth)
    >>> [f"{error:.0e}" for error in errors.values()]
    ['0e+00', '5e-01', '5e-06']
    """
    sizes = {name: _largest(G) for name, G in truth.items()}
    largest = max(filter(math.isfinite, sizes.values()), default=0.0)
    scales = {name: 1e-3 * largest if size < ROUNDING * largest else size for name, size in sizes.items()}
    return {name: relative_error(got[name], G, scales[name]) for name, G in truth.items()}


def relative_error(got: Tensor, truth: Tensor, scale: float | None = None) -> float:
    """max |got - truth| / max |truth|, or / `scale`; inf if shapes differ or something is not finite."""
    if got.shape != truth.shape:
        return float("inf")
    if truth.numel() == 0:
        return 0.0
    scale = max(_largest(truth) if scale is None else scale, torch.finfo(truth.real.dtype).tiny)
    error = _largest(got.detach().to(truth.dtype).cpu() - truth.cpu()) / scale
    return error if error == error else float("inf")


def _largest(t: Tensor) -> float:
    return t.abs().max().item() if t.numel() else 0.0
