"""Worker processes that get ready side by side, as far as the device's memory goes, and are timed while all others are stopped."""

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_methods import METHODS
from gpu_models import ROWS
from gpu_worker import TRUTH, Given, work

PROCESSES = multiprocessing.get_context("forkserver")
"""Imports once what every worker needs; a worker is forked off it, where nothing has run and no device was touched yet."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Of workers: many run side by side, and who asks for CUDA as it is imported must not open it before the fork."""
HERE = Path(__file__).parent
SPARE_GIB = 8
"""Contexts of processes, and what a reckoning of memory may be off by."""
MOST_GIB = 80
"""Of a job beside others. One that needs as much, or finds too little, is run alone in the end."""
SECONDS_TO_ALLOCATE = 15
"""From when a job is let in until what it takes shows in the device's own count; a heavy one's is counted until it is ready."""
DONE = ("timed", "failed", "out of time")


@dataclass
class Job:
    """A worker process, and how far it is: started → checked → warm → ready → timed, or failed, or out of time."""

    row: str
    dtype: str
    method: str
    state: str = "started"
    facts: dict[str, Any] = field(default_factory=dict)
    others: bool = True
    """Whether other jobs get ready beside it."""
    process: Any = None
    connection: Any = None
    log: Path = Path(os.devnull)
    deadline: float = 0.0
    limit: float = 0.0
    let_in_at: float = -math.inf

    @property
    def key(self) -> tuple[str, str, str]:
        return self.row, self.dtype, self.method

    @property
    def first(self) -> int:
        """The order of a row's jobs: the truth, which others wait for, then what must be compiled."""
        return 0 if self.method == TRUTH else 1 if METHODS[self.method].compiled else 2

    @property
    def order(self) -> tuple:
        """Among the jobs of a dtype: truths; plain training and samplewise, so that a run cut short has these of every row; peers.

        Of each those first who compile, and of them the slow ones, lest all wait for them in the end.
        """
        is_peer = self.first > 0 and not self.method.startswith(("plain", "samplewise"))
        return self.first > 0, self.is_heavy, is_peer, self.first, not ROWS[self.row].compiles_slowly

    @property
    def gib(self) -> float:
        """What an eager step of its row takes."""
        return ROWS[self.row].gib * (2 if self.dtype == "fp32" else 1)

    @property
    def is_heavy(self) -> bool:
        """Whether the device holds but a few such jobs."""
        return self.gib > MOST_GIB / 2

    @property
    def most_gib(self) -> float:
        """What it takes until it is ready. samplewise runs a step op by op before it compiles it."""
        if self.method == TRUTH:
            return self.gib
        method = METHODS[self.method]
        holds_gradients = method.library.startswith(("vmap", "BackPACK"))
        is_eager_first = not method.compiled or method.library.startswith("samplewise")
        return self.gib * (1 if is_eager_first else 0.5) * (2 if holds_gradients else 1)

    @property
    def needs_all(self) -> bool:
        """Whether it is run alone. A truth is not: others wait for it."""
        return self.first > 0 and self.most_gib >= MOST_GIB

    def start(
        self,
        options: argparse.Namespace,
        folder: Path,
        heard: queue.Queue,
        num_compiled: int,
        small_error: float | None,
        rates: dict[str, Any],
    ) -> None:
        share = (os.cpu_count() or 1) // max(1, num_compiled)
        num_threads = min(8, max(4 if ROWS[self.row].compiles_slowly else 1, share))
        self.log = folder / f"{self.row}-{self.dtype}-{self.method.replace(' ', '_')}.log"
        self.log.touch()
        how = (options.tiny, options.seconds, truth_path(folder, self), small_error, rates[self.dtype], num_threads)
        self.connection, other_end = PROCESSES.Pipe()
        self.process = PROCESSES.Process(target=work, args=(Given(*self.key, *how, self.log), other_end), daemon=True)
        self.process.start()
        other_end.close()
        self.wait(options.limit)
        threading.Thread(target=self.listen, args=(heard,), daemon=True).start()

    def listen(self, heard: queue.Queue) -> None:
        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:
                heard.put((self, self.connection.recv()))
        heard.put((self, {"state": "ended"}))

    def wait(self, limit: float) -> None:
        self.limit, self.deadline = limit, time.monotonic() + limit

    def tell(self, word: str, limit: float) -> None:
        self.wait(limit)
        with contextlib.suppress(BrokenPipeError):  # it ended; the reader says so
            self.connection.send(word)

    def stop(self) -> None:
        """Lets the process and what it started stand still."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGSTOP)

    def resume(self, seconds: float) -> None:
        """Lets them go on after so many seconds, which do not count."""
        self.deadline += seconds
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGCONT)

    def fail(self, why: str) -> None:
        self.state, self.facts = "failed", {"failed": why}
        self.end()

    def end(self) -> None:
        """Ends the process and what it started (its compiler's processes); it takes a while until it `is_gone`."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # in case that it leads no group yet

    def is_gone(self) -> bool:
        """Whether the device is free of it."""
        return not self.process.is_alive()

    def take(self, message: dict[str, Any]) -> None:
        """Goes on to what the process said it is."""
        state = message.pop("state")
        if self.state in DONE:
            return
        if state == "ended":
            last = (self.log.read_text(errors="replace").splitlines() or [""])[-1]
            self.process.join()
            self.fail(f"the process ended with code {self.process.exitcode}: {last}"[:300])
        else:
            fails_the_check = state == "failed" and self.state == "started" and not message.get("out_of_memory")
            self.state, self.facts = state, {**message, "in_check": True} if fails_the_check else message or self.facts


def import_once(rows: Iterable[str]) -> None:
    """Lets the server of workers import what these rows need; before the first is started."""
    os.environ |= {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)}
    PROCESSES.set_forkserver_preload(["gpu_worker", "samplewise.testing", *{ROWS[row].library for row in rows}])


def truth_path(folder: Path, job: Job) -> Path:
    return folder / f"{job.row}-{job.dtype}.truth"


# --- many jobs ------------------------------------------------------------------------------------------------------------------


def measure(
    jobs: list[Job],
    options: argparse.Namespace,
    folder: Path,
    until: float,
    check: Callable[[str, str], dict[str, Any]],
    rates: dict[str, Any],
) -> Iterator[Job]:
    """Gives each job when it is done, and in the end those that there was no time for.

    As many get ready at once as there are slots. One that is ready is timed at once, with all others stopped, and makes room.
    `check` gives what the check of a row's method on a few samples has found, if it was run; what failed it is not run again.
    `rates` are what the device does in a second, for each dtype.
    """
    heard: queue.Queue = queue.Queue()
    waiting, running, ending = list(jobs), [], []
    num_compiled = min(options.slots, sum(job.first == 1 for job in jobs))
    try:
        while (waiting or running) and time.monotonic() < until:
            while waiting and len(running) < options.slots:
                job = waiting.pop(0)
                found = check(job.row, job.method)
                if "failed" in found:
                    job.state, job.facts = "failed", found
                    yield job
                else:
                    job.start(options, folder, heard, num_compiled, found.get("small_error"), rates)
                    running.append(job)
            let_in(running, options)
            listen(running, heard, folder, 0.05 if ending else 0.5)  # the next turn begins as soon as they are gone
            ending = [job for job in ending if not job.is_gone()]
            ready = None if ending else next_ready(running, options)
            if ready is not None:
                take_turn(ready, [other for other in running if other is not ready], options, heard, folder)
            done = [job for job in running if job.state in DONE]
            running = [job for job in running if job.state not in DONE]
            for job in done:
                job.end()
                ending.append(job)
                yield job
    finally:
        for job in running:
            job.end()
    for job in [*running, *waiting]:
        job.state = "out of time"
        yield job


def rates_alone(options: argparse.Namespace) -> dict[str, Any]:
    """{dtype: what the device does in a second}, measured while no other process runs: those that get ready side by side cannot."""
    ask = [
        sys.executable,
        str(HERE / "gpu.py"),
        "--print-rates",
        "cpu" if options.tiny else "cuda",
        "--dtypes",
        *options.dtypes,
    ]
    path = os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(ask, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "PYTHONPATH": path})
    return json.loads(done.stdout.splitlines()[-1])


def let_in(jobs: list[Job], options: argparse.Namespace) -> None:
    """Lets jobs warm up that the device has memory for; what the first that must wait needs is left to it.

    First the truths, which others wait for with memory in their hands; heavy jobs last, or all others would wait for them.
    """
    turn = lambda job: (job.first > 0 and job.is_heavy, job.first, -job.most_gib)
    checked = sorted((job for job in jobs if job.state == "checked"), key=turn)
    if not checked:
        return
    now = time.monotonic()
    is_to_come = lambda job: job.state == "warm" and (job.is_heavy or now < job.let_in_at + SECONDS_TO_ALLOCATE)
    room = free_gib(options) - sum(job.most_gib for job in jobs if is_to_come(job))
    room -= max((job.facts["more_gib"] for job in jobs if job.state == "ready"), default=0)
    has_kept_room = False
    for job in checked:
        fits = job.most_gib <= room or not any(other.state == "warm" for other in jobs)
        if fits:
            job.state, job.let_in_at = "warm", now
            job.tell("warm", options.limit)
        if fits or not has_kept_room:
            room -= job.most_gib
        has_kept_room = has_kept_room or not fits


def next_ready(jobs: list[Job], options: argparse.Namespace) -> Job | None:
    """A job that can be timed in the memory that there is, or any if no other will make room."""
    ready = [job for job in jobs if job.state == "ready"]
    if not ready:
        return None
    room = free_gib(options) if any(job.state == "warm" for job in jobs) else math.inf
    return next((job for job in ready if job.facts["more_gib"] <= room), None)


def free_gib(options: argparse.Namespace) -> float:
    """What the device has left, less something to spare."""
    if options.tiny:
        return math.inf
    ask = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    done = subprocess.run(ask, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[0]) / 1024 - SPARE_GIB


def take_turn(job: Job, others: list[Job], options: argparse.Namespace, heard: queue.Queue, folder: Path) -> None:
    """Times the job while the others stand still."""
    begin = time.monotonic()
    for other in others:
        other.stop()
    job.tell("go", options.limit)
    while job.state == "ready":
        listen([job], heard, folder, waits=("ready",))
    for other in others:
        other.resume(time.monotonic() - begin)


def listen(
    jobs: list[Job], heard: queue.Queue, folder: Path, seconds: float = 0.5, waits: tuple[str, ...] = ("started", "warm")
) -> None:
    """Takes the next message, if one comes within so many seconds; ends what is in one of the states `waits` for too long."""
    try:
        job, message = heard.get(timeout=seconds)
        job.take(message)
    except queue.Empty:
        pass
    for job in jobs:
        if job.state in waits and time.monotonic() > job.deadline:
            job.fail(f"took longer than {job.limit:.0f} s")
        if job.state == "failed" and job.method == TRUTH:
            truth_path(folder, job).with_suffix(".failed").touch()
