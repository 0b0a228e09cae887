"""What a step costs on a GPU over plain training and over what peers cost: time, peak memory and whether the numbers are right.

python benchmarks/gpu.py --out DIR                    everything; adds to DIR/gpu-NAME.json, writes DIR/gpu-NAME.md
python benchmarks/gpu.py --rows llama --dtypes bf16 --methods plain samplewise --budget 500
python benchmarks/gpu.py --tiny --out DIR             tiny models on the CPU, to try the way

Each method runs in a process of its own. The processes of a row get ready together (imports, checks, compilation, warming up);
when all are ready or have failed, one after the other is told to go and is timed while all others wait. What stands in the JSON
already is not measured again, so that several runs on one machine make one table.
"""

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpu_worker
from gpu_methods import METHODS
from gpu_models import ROWS
from gpu_results import Results, device_name, machine
from gpu_worker import TRUTH

HERE = Path(__file__).parent
PEERS = HERE.parent / ".peers"
"""Libraries carried to a machine that cannot install them: `make peers`."""
DEVICE_GIB = 125
IDLE_GIB = 0.7
"""A process's context, and what it holds while it waits is reckoned as an eighth of what it took to warm up."""
SECONDS_A_TURN = 5
"""Kept of the budget for each process that is to be timed."""


@dataclass
class Job:
    """A worker process, and how far it is: started → checked → warm → ready → timed, or failed."""

    row: str
    dtype: str
    method: str
    state: str = "started"
    facts: dict[str, Any] = field(default_factory=dict)
    others: bool = True
    """Whether other jobs get ready beside it."""
    process: Any = None
    deadline: float = 0.0
    limit: float = 0.0

    @property
    def key(self) -> tuple[str, str, str]:
        return self.row, self.dtype, self.method

    @property
    def first(self) -> int:
        """The order of warming up: the truth, which others wait for, then what must be compiled."""
        return 0 if self.method == TRUTH else 1 if METHODS[self.method].compiled else 2

    @property
    def gib(self) -> float:
        gib = ROWS[self.row].gib * (2 if self.dtype == "fp32" else 1)
        return {"warm": gib, "ready": IDLE_GIB + gib / 8}.get(self.state, IDLE_GIB)

    def start(self, options: argparse.Namespace, folder: Path, heard: queue.Queue, num_compiled: int) -> None:
        threads = max(1, (os.cpu_count() or 1) // max(1, num_compiled))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]),
            "TORCHINDUCTOR_COMPILE_THREADS": str(min(threads, 8)),
            "OMP_NUM_THREADS": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        given = [self.row, self.dtype, self.method, options.tiny, options.seconds, str(truth_path(folder, self))]
        log = (folder / f"{self.row}-{self.dtype}-{self.method.replace(' ', '_')}.log").open("w")
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "gpu.py"), "--worker", json.dumps(given)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, start_new_session=True,
        )  # fmt: skip
        self.wait(options.limit)
        threading.Thread(target=self.listen, args=(heard,), daemon=True).start()

    def listen(self, heard: queue.Queue) -> None:
        for line in self.process.stdout:
            if line.startswith(gpu_worker.SAYS):
                heard.put((self, json.loads(line[len(gpu_worker.SAYS) :])))
        heard.put((self, {"state": "ended"}))

    def wait(self, limit: float) -> None:
        self.limit, self.deadline = limit, time.monotonic() + limit

    def tell(self, word: str, limit: float) -> None:
        self.wait(limit)
        with contextlib.suppress(BrokenPipeError):  # it ended; the reader says so
            self.process.stdin.write(word + "\n")
            self.process.stdin.flush()

    def fail(self, why: str) -> None:
        self.state, self.facts = "failed", {"failed": why}
        self.end()

    def end(self) -> None:
        """Ends the process and what it started (its compiler's processes), and waits until the device is free of it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def take(self, message: dict[str, Any]) -> None:
        """Goes on to what the process said it is."""
        state = message.pop("state")
        if self.state in ("failed", "timed"):
            return
        if state == "ended":
            self.fail(f"the process ended with code {self.process.wait()}")
        else:
            self.state, self.facts = state, message or self.facts


def truth_path(folder: Path, job: Job) -> Path:
    return folder / f"{job.row}-{job.dtype}.truth"


# --- a group of jobs ------------------------------------------------------------------------------------------------------------


def measure(jobs: list[Job], options: argparse.Namespace, folder: Path, until: float) -> Iterator[Job]:
    """Gets all jobs ready together, then times one after the other; gives each as it is done, those without a turn last."""
    heard: queue.Queue = queue.Queue()
    num_compiled = sum(job.first == 1 for job in jobs)
    for job in jobs:
        job.start(options, folder, heard, num_compiled)
    try:
        get_ready(jobs, options, folder, heard, until - SECONDS_A_TURN * len(jobs))
        for job in jobs:
            if job.state == "ready" and time.monotonic() < until:
                job.tell("go", options.limit)
                while job.state == "ready":
                    listen([job], heard, folder, waits=("ready",))
                job.end()
            yield job
    finally:
        for job in jobs:
            job.end()


def get_ready(jobs: list[Job], options: argparse.Namespace, folder: Path, heard: queue.Queue, until: float) -> None:
    while unready := [job for job in jobs if job.state in ("started", "checked", "warm")]:
        if time.monotonic() > until:
            for job in unready:
                job.end()
                job.state = "out of time"
            return
        for job in sorted((job for job in unready if job.state == "checked"), key=lambda job: job.first):
            others = [other for other in jobs if other is not job and other.state not in ("failed", "timed")]
            gib = sum(other.gib for other in others) + ROWS[job.row].gib * (2 if job.dtype == "fp32" else 1)
            if gib > DEVICE_GIB and any(other.state == "warm" for other in others):
                break
            job.state = "warm"
            job.tell("warm", options.limit)
        listen(jobs, heard, folder)


def listen(jobs: list[Job], heard: queue.Queue, folder: Path, waits: tuple[str, ...] = ("started", "warm")) -> None:
    """Takes the next message, if one comes soon; ends what is in one of the states `waits` for too long."""
    try:
        job, message = heard.get(timeout=0.5)
        job.take(message)
    except queue.Empty:
        pass
    for job in jobs:
        if job.state in waits and time.monotonic() > job.deadline:
            job.fail(f"took longer than {job.limit:.0f} s")
        if job.state == "failed" and job.method == TRUTH:
            truth_path(folder, job).with_suffix(".failed").touch()


# --- the command ----------------------------------------------------------------------------------------------------------------


def main() -> None:
    sys.path.append(str(PEERS))
    options = parsed()
    if options.worker:
        gpu_worker.main(*json.loads(options.worker))
        return
    until = time.monotonic() + options.budget
    device = "CPU, tiny models" if options.tiny else device_name()
    options.out.mkdir(parents=True, exist_ok=True)
    results = Results.at(
        options.out / f"gpu-{'tiny' if options.tiny else device.split(',')[0].split()[-1].lower()}.json",
        machine(device, options.commit),
    )
    run = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    units = [(row, dtype) for dtype in options.dtypes for row in options.rows]
    units = [unit for unit in units if any((*unit, method) not in results.facts for method in options.methods)]
    longest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for k in range(0, len(units), options.together):
            begin = time.monotonic()
            if until - begin < longest:
                print(f"too little is left of {options.budget:.0f} s for more; call again for the rest")
                break
            jobs = [Job(*unit, method) for unit in units[k : k + options.together] for method in (TRUTH, *options.methods)]
            again = report(measure(jobs, options, Path(folder), until), results, run)
            for job in again:
                report(measure([job], options, Path(folder), until), results, run)
            for truth in Path(folder).glob("*.truth"):
                truth.unlink()
            longest = max(longest, time.monotonic() - begin)
            print(f"{time.monotonic() - begin:.0f} s for these", flush=True)
    print(results.path.with_suffix(".md").read_text())


def report(done: Iterator[Job], results: Results, run: str) -> list[Job]:
    """Adds what was measured to the results; gives the jobs that ran out of memory beside others, to be tried alone."""
    again = []
    for job in done:
        beside_others = job.facts.pop("out_of_memory", False) and job.others
        if beside_others:
            again.append(Job(*job.key, others=False))
        elif job.state in ("timed", "failed"):
            results.add(job.key, {**job.facts, "run": run})
        shown = job.facts.get("failed") or (f"{job.facts['p50']:.2f} ms" if "p50" in job.facts else job.state)
        print(f"{job.row} {job.dtype} {job.method}: {shown}", flush=True)
    return again


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), metavar="METHOD", help="names, or how they begin")
    parser.add_argument("--dtypes", nargs="+", choices=list(gpu_worker.DTYPES), default=["bf16", "fp32"], metavar="DTYPE")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long a method is timed")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds until a process counts as too slow")
    parser.add_argument("--budget", type=float, default=36000.0, help="seconds for the whole call")
    parser.add_argument("--together", type=int, default=2, help="rows that get ready at the same time")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--commit", default=commit(), help="what the results are of, where there is no repository to ask")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.methods = [m for m in METHODS if any(m.startswith(asked) for asked in options.methods)]
    if not options.methods:
        parser.error(f"no such method; there are: {'; '.join(METHODS)}")
    return options


def commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=HERE)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
