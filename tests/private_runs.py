"""Small private runs, shared by the tests of `samplewise.dp`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw


def data(num: int = 40, width: int = 5, classes: int = 3) -> TensorDataset:
    rng = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(num, width, generator=rng), torch.randint(classes, (num,), generator=rng))


def mlp(width: int = 5, classes: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, classes))


def private(model: nn.Module | None = None, optimizer: Any = None, **arguments: Any) -> tuple[Any, Any, Any]:
    """make_private over 40 rows in batches of 10, without noise or bound unless said."""
    model = mlp() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5) if optimizer is None else optimizer
    dataset, batch_size = arguments.pop("dataset", None) or data(), arguments.pop("batch_size", 10)
    loader = arguments.pop("loader") if "loader" in arguments else DataLoader(dataset, batch_size=batch_size)
    options = {"noise_multiplier": 0.0, "max_grad_norm": float("inf"), "seed": 0, **arguments}
    if "target_epsilon" in options:
        del options["noise_multiplier"]
    return sw.dp.make_private(model, optimizer, loader, **options)


def train(model: nn.Module, optimizer: Any, loader: Any, *, epochs: int = 1, steps: int | None = None) -> list[int]:
    """Trains, and returns the sizes of the batches."""
    sizes = []
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            sizes.append(len(x))
            if steps is not None and len(sizes) == steps:
                return sizes
    return sizes


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)
