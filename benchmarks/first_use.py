"""What the check of a first call adds to a step: clipped sum with it over clipped sum without.

python benchmarks/first_use.py       writes benchmarks/results/first-use-cpu.md
"""

import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from step import MAX_NORM, MODELS, describe_machine
from torch import Tensor, nn

import samplewise as sw
from samplewise.verification.first_use import VERIFIED


def seconds(model: nn.Module, x: Tensor, y: Tensor, *, is_first: bool) -> float:
    VERIFIED.pop(model, None)
    start = time.perf_counter()
    with sw.capture(model, verify=is_first) as grads:
        grads.backward(F.cross_entropy(model(x), y, reduction="none"))
    grads.clipped_sum(max_norm=MAX_NORM)
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(2)
    lines = ["| model | step, ms | with the check, ms | ratio |", "|-|-|-|-|"]
    for name, make in MODELS.items():
        torch.manual_seed(0)
        batch = make()
        seconds(*batch, is_first=True)
        pairs = [(seconds(*batch, is_first=False), seconds(*batch, is_first=True)) for _ in range(9)]
        step, first = (statistics.median(times) for times in zip(*pairs, strict=True))
        lines.append(f"| {name} | {1e3 * step:.0f} | {1e3 * first:.0f} | {first / step:.2f}× |")
        print(lines[-1], flush=True)
    output = Path(__file__).parent / "results" / "first-use-cpu.md"
    output.write_text("\n".join([describe_machine(), "", *lines]) + "\n")


if __name__ == "__main__":
    main()
