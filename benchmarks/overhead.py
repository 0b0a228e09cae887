"""What the eager path costs in Python, and where: phases of a clipped step beside those of a plain one.

python benchmarks/overhead.py                       models of full depth on the CPU, so small that kernels hardly count
python benchmarks/overhead.py --cuda                those of the GPU table: phases on the host, and what the device does meanwhile
python benchmarks/overhead.py --poisson 40          another size of the batch in each round, as private training draws
python benchmarks/overhead.py --profile --rows vit  and the functions that the time goes to

Nothing waits for the device but the end of a step. "Device" is what its kernels take, one after the other, and "kernels" their number:
a step that takes much longer than that waits for Python.
"""

import argparse
import cProfile
import gc
import platform
import pstats
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from gpu_models import ROWS, Batch, Row, Sizes
from torch import nn
from torch.overrides import BaseTorchFunctionMode

import samplewise as sw

DEEP: dict[str, Sizes] = {
    "gpt2-256": {"B": 2, "T": 7, "width": 32, "vocabulary": 64},
    "llama": {"B": 2, "T": 7, "width": 32, "vocabulary": 64},
    "llama-lora": {"B": 2, "T": 7, "width": 32, "vocabulary": 64, "rank": 4},
    "vit": {"B": 2, "size": 32, "width": 32, "classes": 10},
    "resnet18": {"B": 2, "size": 8},
    "resnet50": {"B": 2, "size": 32, "classes": 10},
}
"""What differs from a row's own sizes where kernels should hardly count; depths stay, and so do the widths of ResNets."""
PHASES = ["opening", "forward", "backward", "closing", "norms", "sums"]


class Phases(defaultdict[str, list[float]]):
    """{phase: ms in each round}."""

    def __init__(self) -> None:
        super().__init__(list)

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self[phase].append(1e3 * (time.perf_counter() - begin))


def plain(model: nn.Module, row: Row, batch: Batch, phases: Phases) -> None:
    with phases.of("forward"):
        losses = row.loss_fn(model, *batch)
    with phases.of("backward"):
        losses.sum().backward()
    model.zero_grad()


def seen(model: nn.Module, row: Row, batch: Batch, phases: Phases) -> None:
    """A plain step of which a mode is told that does nothing."""
    with BaseTorchFunctionMode():
        plain(model, row, batch, phases)


def clipped(model: nn.Module, row: Row, batch: Batch, phases: Phases) -> None:
    with phases.of("opening"):
        grads = sw.capture(model)
        grads.__enter__()
    with phases.of("forward"):
        losses = row.loss_fn(model, *batch)
    with phases.of("backward"):
        grads.backward(losses)
    with phases.of("closing"):
        grads.__exit__(None, None, None)
    with phases.of("norms"):
        w = (1 / grads.norms()).clamp(max=1)
    with phases.of("sums"):
        grads.weighted_sum(w)


STEPS: dict[str, Callable[[nn.Module, Row, Batch, Phases], None]] = {
    "plain": plain,
    "under an empty mode": seen,
    "clipped": clipped,
}


def on_device(step: Callable[[], None]) -> tuple[float, int]:
    """(ms that kernels of one step take, their number)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(event.self_device_time_total for event in kernels) / 1e3, len(kernels)


def measured(row: Row, options: argparse.Namespace) -> Iterator[list[str]]:
    """The table's lines of a row."""
    model, batch = built(row, options.cuda)
    rest: Callable[[], Any] = torch.cuda.synchronize if options.cuda else lambda: None
    phases = {name: Phases() for name in STEPS}
    batches = [batch] * options.rounds if options.poisson is None else drawn(row, options)
    for step in STEPS.values():
        for batch in batches if options.poisson else batches[:3]:
            step(model, row, batch, Phases())
    gc.collect()
    gc.freeze()
    for batch in batches:
        for name, step in STEPS.items():
            rest()
            with phases[name].of("whole"):
                step(model, row, batch, phases[name])
                rest()
    gc.unfreeze()
    whole_of_plain = statistics.median(phases["plain"]["whole"])
    for name, step in STEPS.items():
        of = {phase: statistics.median(ms) for phase, ms in phases[name].items()}
        device, num = on_device(lambda step=step: step(model, row, batch, Phases())) if options.cuda else (None, None)
        yield [
            row.title if options.cuda else row.name,
            name,
            f"{of['whole']:.1f}",
            f"{of['whole'] / whole_of_plain:.2f}×",
            *(f"{of[phase]:.1f}" if phase in of else "" for phase in PHASES),
            "" if device is None else f"{device:.1f}",
            "" if num is None else str(num),
        ]


def drawn(row: Row, options: argparse.Namespace) -> list[Batch]:
    """A batch for each round, of sizes that Poisson sampling draws."""
    nums = torch.poisson(torch.full((options.rounds,), options.poisson), generator=torch.Generator().manual_seed(0))
    return [row.batch(**{**row.full, **DEEP[row.name], "B": max(1, int(n))}) for n in nums]


def built(row: Row, cuda: bool) -> tuple[nn.Module, Batch]:
    if cuda:
        return row.built("full", "cuda", torch.bfloat16)
    sizes = {**row.full, **DEEP[row.name]}
    torch.manual_seed(0)
    return row.model(**sizes).train(), row.batch(**sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(DEEP), default=list(DEEP), metavar="ROW")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cuda", action="store_true", help="the table's own sizes in bfloat16")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--poisson", type=float, metavar="MEAN", help="on the CPU")
    options = parser.parse_args()
    if options.poisson and options.cuda:
        parser.error("--poisson is for the CPU")
    torch.set_num_threads(1)
    device = torch.cuda.get_device_name() if options.cuda else platform.processor() or platform.machine()
    print(f"{device}, torch {torch.__version__}, medians of {options.rounds} rounds in turns, ms\n")
    print(f"| model | step | whole | / plain | {' | '.join(PHASES)} | device | kernels |\n|{'-|' * (6 + len(PHASES))}")
    for name in options.rows:
        for line in measured(ROWS[name], options):
            print(f"| {' | '.join(line)} |", flush=True)
    for name in options.rows if options.profile else ():
        model, batch = built(ROWS[name], options.cuda)
        clipped(model, ROWS[name], batch, Phases())
        with cProfile.Profile() as profile:
            for _ in range(10):
                clipped(model, ROWS[name], batch, Phases())
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
