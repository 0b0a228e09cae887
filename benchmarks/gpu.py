"""What a step costs on a GPU over plain training and over what peers cost: time, peak memory and whether the numbers are right.

python benchmarks/gpu.py --out DIR                    everything; adds to DIR/gpu-NAME.json, writes DIR/gpu-NAME.md
python benchmarks/gpu.py --rows llama --dtypes bf16 --methods plain samplewise --budget 500
python benchmarks/gpu.py --tiny --out DIR             tiny models on the CPU, to try the way

Each method runs in a process of its own, forked off one that has imported and done nothing else. Several get ready side by side
(checks, compilation, warming up); one that is ready is timed at once, while all others are stopped. Rows of a dtype of which all
methods stand in the JSON already, of this commit, are not measured again, so that several runs make one table; the others are measured
whole, since only one run's times are compared, and what an earlier run has of such a row stands until the new one has as much.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from gpu_jobs import Job, import_once, measure, rates_alone
from gpu_methods import METHODS
from gpu_models import ROWS
from gpu_results import Results, device_name, machine
from gpu_worker import DTYPES, TRUTH, print_rates

HERE = Path(__file__).parent
PEERS = HERE.parent / ".peers"
"""Libraries carried to a machine that cannot install them: `make peers`."""


def main() -> None:
    sys.path.append(str(PEERS))
    options = parsed()
    if options.print_rates:
        print_rates(options.print_rates, options.dtypes)
        return
    until = time.monotonic() + options.budget
    device, driver = ("CPU, tiny models", "") if options.tiny else device_name()
    options.out.mkdir(parents=True, exist_ok=True)
    results = Results.at(
        options.out / f"gpu-{'tiny' if options.tiny else device.split()[-1].lower()}.json",
        machine(device),
        options.commit or current_commit(),
    )
    run = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} {driver}".strip()
    units = [(row, dtype) for dtype in options.dtypes for row in options.rows]
    units = [unit for unit in units if not results.holds(*unit, options.methods)]
    asked = lambda unit, method: method in (TRUTH, *options.methods) or (*unit, method) in results.facts
    jobs = [Job(*unit, m) for m in (TRUTH, *METHODS) for unit in units if asked(unit, m)]  # large rows beside small ones
    jobs.sort(key=lambda job: (options.dtypes.index(job.dtype), *job.order))
    import_once(options.rows)
    with tempfile.TemporaryDirectory() as folder:
        how = (options, Path(folder), until, results.check, rates_alone(options))
        alone = [Job(*job.key, others=False) for job in jobs if job.needs_all]
        beside = [job for job in jobs if not job.needs_all]
        for job in [*report(measure(beside, *how), results, run), *alone]:
            report(measure([job], *how), results, run)
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
        if job.state == "failed":
            with results.path.with_name(f"{results.path.stem}-errors.txt").open("a") as file:
                file.write(f"--- {' '.join(job.key)}\n{job.log.read_text(errors='replace')[-6000:]}\n")
        shown = job.facts.get("failed") or (f"{job.facts['p50']:.2f} ms" if "p50" in job.facts else job.state)
        print(f"{job.row} {job.dtype} {job.method}: {shown}", flush=True)
    return again


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), metavar="METHOD", help="names, or how they begin")
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["bf16", "fp32"], metavar="DTYPE")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long a method is timed")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds until a process counts as too slow")
    parser.add_argument("--budget", type=float, default=36000.0, help="seconds for the whole call")
    parser.add_argument("--slots", type=int, default=os.cpu_count() or 1, help="processes that get ready side by side")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--commit", help="what the results are of, where there is no repository to ask")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--print-rates", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.methods = [m for m in METHODS if any(m.startswith(asked) for asked in options.methods)]
    if not options.methods:
        parser.error(f"no such method; there are: {'; '.join(METHODS)}")
    return options


def current_commit() -> str:
    if shutil.which("git") is None:
        return "unknown"
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=HERE)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
