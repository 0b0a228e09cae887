"""One method on one row in this process: its numbers are checked, it warms up, waits for its turn, and is timed alone.

It speaks with `gpu_jobs.py`: it says "checked" and waits for "warm", says "ready" and waits for "go", says "timed"; or "failed".
"""

import contextlib
import dataclasses
import gc
import json
import math
import os
import statistics
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config
from gpu_floor import Rates, floor, layers_of, measured_rates
from gpu_methods import (
    MAX_NORM,
    METHODS,
    Gradients,
    LossFn,
    Method,
    Samplewise,
    Step,
    clipped_by_hand,
    norms_by_hand,
    trained,
)
from gpu_models import ROWS, Batch, Row
from torch import Tensor, nn

from samplewise import plan

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
TRUTH = "truth"
"""The process of each row that is no method: it runs one backward a sample in float32, and reckons the floor."""
SECONDS_AT_REST = 0.2


@dataclasses.dataclass(frozen=True)
class Given:
    """What a worker is told as it starts."""

    row: str
    dtype: str
    method: str
    tiny: bool
    seconds: float
    truth: Path
    small_error: float | None
    """The error on a few samples, if another dtype's process has found it."""
    rates: dict[str, dict[str, float]]
    """What the device does in a second: `print_rates`."""
    num_threads: int
    """Of the compiler."""
    log: Path
    """Where all that it prints goes."""


class Parent:
    """Who started this process."""

    connection: Connection


def say(state: str, **facts: Any) -> None:
    Parent.connection.send({"state": state, **facts})


def hear(word: str) -> None:
    """Waits for the parent's word; ends if the parent is gone."""
    try:
        heard = Parent.connection.recv()
    except EOFError:
        heard = None
    if heard != word:
        os._exit(1)


def work(given: Given, connection: Connection) -> None:
    """Runs a job: the whole life of a process, which leads a group of its own with those that it starts."""
    os.setsid()
    with given.log.open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    Parent.connection = connection
    torch._inductor.config.compile_threads = given.num_threads
    run(given)
    os._exit(0)  # without waiting for the device's context to be taken apart in order


def run(given: Given) -> None:
    warnings.filterwarnings("ignore")
    device = "cpu" if given.tiny else "cuda"
    Samplewise.rates = plan.Rates(**given.rates["plan"])
    row = (ROWS[given.row], given.dtype, device, given.truth)
    try:
        if given.method == TRUTH:
            time_alone = prepare_truth(*row, Rates(**given.rates["floor"]))
        else:
            time_alone = prepare(*row, METHODS[given.method], given.small_error)
        release(device)
        say("ready", more_gib=more_gib(device))
        hear("go")
        wait_for_rest(device)
        begin = time.time()
        facts = time_alone(given.seconds)
        say("timed", **facts, turn=[begin, time.time()])
    except BaseException as error:
        traceback.print_exc()  # before it is said, for then this process is ended
        text = next((line for line in str(error).splitlines() if line.strip()), "").strip()
        say("failed", failed=f"{type(error).__name__}: {text}"[:300], out_of_memory=out_of_memory(error))


def out_of_memory(error: BaseException) -> bool:
    return any(words in str(error) for words in ("out of memory", "ALLOC_FAILED"))


def release(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def more_gib(device: str) -> float:
    """What the last step took besides what is kept between steps."""
    if device == "cpu":
        return 0.0
    return (torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()) / 2**30


def wait_for_rest(device: str) -> None:
    """Until the device does nothing for others: what it had queued of processes that were stopped, it still does."""
    if device == "cpu":
        return
    probe = torch.zeros((), device=device)
    begin = rests_since = time.perf_counter()
    while time.perf_counter() - rests_since < SECONDS_AT_REST:
        start = time.perf_counter()
        if start - begin > 60:
            raise TimeoutError("the device does not come to rest")
        probe.add_(1)
        torch.cuda.synchronize()
        if time.perf_counter() - start > 1e-3:  # others had it meanwhile, for milliseconds at a time
            rests_since = time.perf_counter()


def print_rates(device: str, dtypes: list[str]) -> None:
    """{dtype: what the device does in a second}, as samplewise plans by and as the floor counts; nothing else may run on it."""
    rates = {
        dtype: {
            "plan": dataclasses.asdict(plan.measured_rates(device, DTYPES[dtype])),
            "floor": measured_rates(device, DTYPES[dtype])._asdict(),
        }
        for dtype in dtypes
    }
    print(json.dumps(rates))


# --- truth ----------------------------------------------------------------------------------------------------------------------


def looped(model: nn.Module, loss_fn: LossFn, batch: Batch) -> tuple[Tensor, Gradients]:
    """(norms [B], clipped sum) by one backward a sample, added up in float32."""
    parameters = trained(model)
    norms, total = [], {name: torch.zeros_like(p, dtype=torch.float32) for name, p in parameters.items()}
    for b in range(len(batch[0])):
        model.zero_grad(set_to_none=True)
        loss_fn(model, *(t[b : b + 1] for t in batch)).sum().backward()
        grads = {name: p.grad.float() for name, p in parameters.items() if p.grad is not None}
        norms.append(torch.stack([G.norm() for G in grads.values()]).norm())
        for name, G in grads.items():
            total[name] += G * (MAX_NORM / norms[-1]).clamp(max=1)
    model.zero_grad(set_to_none=True)
    return torch.stack(norms), total


def allow_tf32(allow: bool) -> None:
    """torch's defaults are True for convolutions and False for products, which nothing here changes."""
    torch.backends.cudnn.allow_tf32 = allow


def prepare_truth(row: Row, dtype: str, device: str, path: Path, rates: Rates) -> Any:
    """Writes norms and clipped sum of the full batch, and how far the same loop is off in `dtype`; gives the floor."""
    say("checked")
    hear("warm")
    model, batch = row.built("tiny" if device == "cpu" else "full", device, DTYPES[dtype])
    layers = layers_of(model, lambda: row.loss_fn(model, *(t[:1] for t in batch)), num_samples=1)
    _, rough = looped(model, row.loss_fn, batch)
    allow_tf32(False)
    exact = tuple(t.float() if t.is_floating_point() else t for t in batch)
    norms, clipped = looped(model.float(), row.loss_fn, exact)
    yardstick = relative_error(rough, clipped)
    clipped = {name: G.cpu() for name, G in clipped.items()}
    torch.save({"norms": norms.cpu(), "clipped": clipped, "yardstick": yardstick}, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)
    least = floor(layers, rates, num_bytes=DTYPES[dtype].itemsize)
    return lambda _: {"floor": least, "yardstick": yardstick, "flops": rates.flops, "bytes": rates.bytes}


def relative_error(got: Gradients, truth: Gradients) -> float:
    """‖got - truth‖ / ‖truth‖ over all parameters together; what is missing counts as zero, a wrong shape as infinite.

    >>> relative_error({"w": torch.tensor([3.0])}, {"w": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    0.8
    """
    off = total = 0.0
    for name, exact in truth.items():
        mine = got.get(name)
        if mine is not None and mine.shape != exact.shape:
            return math.inf
        exact = exact if mine is None else exact.to(mine.device)
        difference = exact.float() if mine is None else mine.float() - exact.float()
        off += difference.square().sum().item()
        total += exact.float().square().sum().item()
    return math.sqrt(off / total) if off == off else math.inf


# --- a method -------------------------------------------------------------------------------------------------------------------


def prepare(row: Row, dtype: str, device: str, path: Path, method: Method, known: float | None) -> Any:
    """Checks the method on the small batch and on the full one; gives the function that times it."""
    facts: dict[str, Any] = {}
    if method.answer != "plain":
        facts["small_error"] = small_error(row, method, device) if known is None else known
        release(device)
    say("checked")
    hear("warm")
    model, batch = row.built("tiny" if device == "cpu" else "full", device, DTYPES[dtype])
    changes = changed(model, row, method)
    facts |= {"changes": changes} if changes else {}
    step = method.build(model, row.loss_fn, batch)
    with memory_given_back(device, method):
        answer = step()
    if method.answer != "plain" and "untied head" not in changes:
        facts |= full_error(answer, method, path)
    del answer
    release(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step()

    def time_alone(seconds: float) -> dict[str, Any]:
        times = timed(step, device, seconds)
        return {**times, **facts, **(step.facts() if isinstance(step, Samplewise) else {})}

    return time_alone


@contextlib.contextmanager
def memory_given_back(device: str, method: Method) -> Iterator[None]:
    """Gives the device's memory that nothing uses back to other processes, again and again: to compile takes a minute."""
    done = threading.Event()

    def work() -> None:
        while not done.wait(0.5):
            torch.cuda.empty_cache()

    thread = threading.Thread(target=work)
    if device == "cuda" and method.compiled:
        thread.start()
    try:
        yield
    finally:
        done.set()
        if thread.ident is not None:
            thread.join()


def changed(model: nn.Module, row: Row, method: Method) -> list[str]:
    """Changes the model as Opacus needs it, where this is what the method says; what was changed."""
    if not method.opacus:
        return []
    changes = [*row.changes, *([row.ghost_change] if method.opacus == "ghost" and row.ghost_change else [])]
    if not changes:
        raise NotNeededError("Opacus takes the model as it is")
    return [change(model) for change in changes]


class NotNeededError(Exception):
    """There is nothing to measure here."""


def small_error(row: Row, method: Method, device: str) -> float:
    """How far the method's answer is from the oracle's, on a few samples in float32."""
    from samplewise.testing import oracle

    allow_tf32(False)
    model, batch = row.built("tiny" if device == "cpu" else "small", device, torch.float32)
    changed(model, row, method)
    grads = oracle(model, row.loss_fn, *batch)
    truth = {"gradients": grads, "clipped": clipped_by_hand(grads), "norms": {"norms": norms_by_hand(grads)}}[method.answer]
    answer = method.build(model, row.loss_fn, batch)()
    error = relative_error({"norms": answer} if method.answer == "norms" else answer, truth)
    allow_tf32(True)
    torch.compiler.reset()  # or the next compilation would take sizes for dynamic that differ from these
    return error


def full_error(answer: Any, method: Method, path: Path) -> dict[str, Any]:
    """How far the answer for the timed batch is from one float32 backward a sample: norms, clipped sum, or of gradients both."""
    while not path.exists():
        if path.with_suffix(".failed").exists():
            return {}
        time.sleep(0.2)
    truth = torch.load(path, mmap=True)
    norms = {"norms": truth["norms"]}
    if method.answer == "norms":
        error = relative_error({"norms": answer}, norms)
    elif method.answer == "clipped":
        error = relative_error(answer, truth["clipped"])
    else:  # the clipped sum says nothing of the length of what is clipped
        by_norms = relative_error({"norms": norms_by_hand(answer)}, norms)
        error = max(by_norms, relative_error(clipped_by_hand(answer), truth["clipped"]))
    return {"full_error": error, "yardstick": truth["yardstick"]}


def timed(step: Step, device: str, seconds: float) -> dict[str, Any]:
    """Milliseconds of a step, at least three of them, and the peak GiB reserved while they ran, weights and batch in it."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds / 5:
        milliseconds(step, device)
    release(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - begin < seconds:
        times.append(milliseconds(step, device))
    p20, p50, p80 = (statistics.quantiles(times, n=10, method="inclusive")[k] for k in (1, 4, 7))
    peak = torch.cuda.max_memory_reserved() / 2**30 if device == "cuda" else None
    return {"p20": p20, "p50": p50, "p80": p80, "num_steps": len(times), "peak_gib": peak}


def milliseconds(step: Step, device: str) -> float:
    """One step, by the device's own clock, with nothing under way before and after."""
    if device == "cpu":
        begin = time.perf_counter()
        step()
        return (time.perf_counter() - begin) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)
