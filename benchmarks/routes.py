"""Whether the plan takes the right route: each route measured on a grid of shapes, and beside the one chosen.

python benchmarks/routes.py                     the grid and the sweep over T; writes benchmarks/results/routes-cpu.md
python benchmarks/routes.py --device cuda       the same on a GPU; writes benchmarks/results/routes-cuda.md
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from step import describe_machine
from torch import Tensor

from samplewise.factors.outer import Outer
from samplewise.plan import ROUTES, choose, measured_rates

GRID = [
    (B, T, d, p) for B in (4, 16) for T in (1, 16, 64, 256, 1024) for d, p in ((64, 64), (256, 256), (256, 1024), (1024, 16))
]
LARGE = [(B, T, d, p) for B in (8, 64) for T in (64, 256, 1024) for d, p in ((768, 768), (768, 3072), (4096, 16))]
SWEEP = [(4, T, 256, 256) for T in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)]
WITHIN = 1.3


def clipped(route: str, a: Tensor, g: Tensor, w: Tensor) -> Callable[[], Tensor]:
    """Norms, then a weighted sum, by one route from fresh a and g."""

    def run() -> Tensor:
        factor = Outer.of_rows(a, g)
        if route == "build":
            factor = factor.built()
        return factor.sq_norms(route).sum() + factor.weighted_sum(w)[0, 0]

    return run


def quickest(runs: dict[str, Callable[[], Tensor]], device: str, num: int) -> dict[str, float]:
    """Seconds of each, the best of interleaved runs: many take less than a time slice of a shared machine."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(num + 1):
        for name, run in runs.items():
            if device != "cpu":
                torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            if device != "cpu":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    return {name: min(taken[1:]) for name, taken in times.items()}


def row(shape: tuple[int, int, int, int], device: str, dtype: torch.dtype, num: int) -> tuple[str, float]:
    """A line of the table, and how much longer than the best allowed route the chosen one takes."""
    B, T, d, p = shape
    a = torch.randn(B, T, d, device=device, dtype=dtype)
    g = torch.randn(B, T, p, device=device, dtype=dtype)
    w = torch.rand(B, device=device)
    taken = quickest({route: clipped(route, a, g, w) for route in ROUTES if T > 1 or route != "direct"}, device, num)
    taken.setdefault("direct", taken["gram"])  # one position: both are |a|² |g|²
    use = Outer.of_rows(a, g).use()
    spared = choose(use, measured_rates(device), spare=use.built)
    kept = choose(use, measured_rates(device))
    allowed = [route for route in ROUTES if kept.costs[route].held <= use.held]
    excess = taken[kept.route] / min(taken[route] for route in allowed)
    with_memory = taken[spared.route] / min(taken.values())
    cells = " | ".join(f"{1000 * taken[route]:.2f}" for route in ROUTES)
    line = f"| {B} | {T} | {d} | {p} | {cells} | {kept.route} | {excess:.2f}× | {spared.route} | {with_memory:.2f}× |"
    return line, max(excess, with_memory)


def table(
    shapes: list[tuple[int, int, int, int]], device: str, dtype: torch.dtype, num: int
) -> tuple[list[str], list[float]]:
    lines = [
        f"| B | T | d | p | {' | '.join(f'{route}, ms' for route in ROUTES)} | chosen | over best | with memory | over best |",
        "|-" * 11 + "|",
    ]
    excesses = []
    for shape in shapes:
        line, excess = row(shape, device, dtype, num)
        lines.append(line)
        excesses.append(excess)
        print(line, flush=True)
    return lines, excesses


def load() -> str:
    return Path("/proc/loadavg").read_text().split()[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--num", type=int, default=15)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    torch.manual_seed(0)
    torch.set_num_threads(2)
    is_cpu = options.device == "cpu"
    before = load()
    grid, excesses = table(GRID if is_cpu else GRID + LARGE, options.device, dtype, options.num)
    sweep, more = table(SWEEP, options.device, dtype, options.num)
    excesses += more
    machine = (
        describe_machine() if is_cpu else f"{torch.cuda.get_device_name()}, {options.dtype}, torch {torch.__version__}."
    )
    num_good = sum(excess <= WITHIN for excess in excesses)
    lines = [
        machine,
        "",
        f"Norms and one weighted sum of a weight p×d at T positions of B samples, best of {options.num} interleaved runs, load "
        f"average {before} to {load()}. Chosen: without memory beside a and g, against the best route that needs none; with "
        f"memory: if the gradients may be kept, against the best of all. Rates measured: {rates(options.device)}.",
        "",
        f"Within {WITHIN}× of the best: {num_good} of {len(excesses)} shapes; geometric mean "
        f"{math.exp(statistics.mean(map(math.log, excesses))):.2f}×, worst {max(excesses):.2f}×.",
        "",
        "## Grid",
        "",
        *grid,
        "",
        "## T from 16 to 4096",
        "",
        *sweep,
    ]
    output = options.output or Path(__file__).parent / "results" / f"routes-{options.device}.md"
    output.parent.mkdir(exist_ok=True)
    output.write_text("\n".join(lines) + "\n")


def rates(device: str) -> str:
    found = measured_rates(device)
    products = f"{found.small / 1e9:.0f} and {found.large / 1e9:.0f} GFLOP/s (16 and 512 rows)"
    return f"{products}, {found.memory / 1e9:.0f} GB/s, {found.fresh / 1e9:.1f} to fresh memory, {found.latency * 1e6:.0f} µs an op"


if __name__ == "__main__":
    main()
