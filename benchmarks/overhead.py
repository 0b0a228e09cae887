"""What the eager path costs in Python: a model of GPT-2's depth and ops on tensors so small that kernels hardly count.

python benchmarks/overhead.py            prints the rows
python benchmarks/overhead.py --profile  and where the time goes, by function
"""

import argparse
import cProfile
import platform
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import GPT2Config, GPT2LMHeadModel

import samplewise as sw

B, T, VOCABULARY = 4, 16, 200


def model_and_batch(depth: int) -> tuple[nn.Module, Tensor]:
    """GPT-2 with `depth` layers of width 48, float32, without dropout, and ids [B, T]."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=depth, n_embd=48, n_head=4, vocab_size=VOCABULARY, n_positions=T, resid_pdrop=0.0)
    config.embd_pdrop = config.attn_pdrop = 0.0
    config.use_cache = False
    return GPT2LMHeadModel(config), torch.randint(VOCABULARY, (B, T))


class Counting(TorchFunctionMode):
    """Counts the calls that a mode is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def steps(model: nn.Module, ids: Tensor) -> dict[str, Callable[[], Any]]:
    """{row: a step}: each does what the one before does, and one thing more."""

    def plain() -> None:
        loss_of(model, ids).backward()
        for p in model.parameters():
            p.grad = None

    def seen() -> None:
        with Counting():
            loss_of(model, ids).backward()
        for p in model.parameters():
            p.grad = None

    def captured() -> sw.Grads:
        with sw.capture(model) as grads:
            loss_of(model, ids).backward()
        return grads

    return {
        "plain": plain,
        "under an empty mode": seen,
        "captured": captured,
        "norms": lambda: captured().norms(),
        "clipped sum": lambda: captured().clipped_sum(max_norm=1.0),
    }


def measured(of: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """{row: median ms}, the rows taken in turns, as the machine is shared."""
    times: dict[str, list[float]] = {row: [] for row in of}
    for _ in range(rounds):
        for row, step in of.items():
            start = time.process_time()
            step()
            times[row].append(1e3 * (time.process_time() - start))
    return {row: statistics.median(taken) for row, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--profile", metavar="ROW", nargs="?", const="clipped sum", help="profile this row")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, ids = model_and_batch(arguments.depth)
    of = steps(model, ids)
    for step in of.values():
        for _ in range(3):
            step()
    if arguments.profile:
        with cProfile.Profile() as profile:
            for _ in range(10):
                of[arguments.profile]()
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
        return
    with Counting() as counting:
        loss_of(model, ids).backward()
    num_parameters = len(list(model.parameters()))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    print(
        f"{platform.processor() or platform.machine()}, 1 thread, torch {torch.__version__}, Python {sys.version.split()[0]}, {commit}"
    )
    print(
        f"{counting.num} calls told to a mode, {num_parameters} parameters, medians of {arguments.rounds} rounds in turns\n"
    )
    print("| step | ms | × plain | µs over plain a call | µs over plain a parameter |\n|-|-|-|-|-|")
    times = measured(of, arguments.rounds)
    for row, ms in times.items():
        over = 1e3 * (ms - times["plain"])
        print(f"| {row} | {ms:.1f} | {ms / times['plain']:.2f} | {over / counting.num:.1f} | {over / num_parameters:.0f} |")


if __name__ == "__main__":
    main()
