"""The results of the GPU benchmark: one JSON for one machine and its versions, and the Markdown table of it."""

import importlib.metadata
import json
import os
import platform
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_methods import METHODS, Method
from gpu_models import ROWS

Key = tuple[str, str, str]
DTYPES = ("bf16", "fp32")
PACKAGES = "torch triton transformers torchvision opacus backpack-for-pytorch peft".split()
SMALL_TOLERANCE = 1e-3
"""Of float32 without TF32 on a few samples: ‖answer - oracle‖ / ‖oracle‖."""
TIMES_THE_LOOP = 3
"""On the timed batch an answer may be off this many times as far as one backward a sample is in the same dtype."""


def machine(device: str) -> dict[str, str]:
    """What must agree for two results to stand in one table."""
    versions = {name: version(name) for name in PACKAGES}
    cpus = f"{os.cpu_count()} CPUs"
    return {"device": device, "host": cpus, "python": platform.python_version(), **versions}


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def device_name() -> tuple[str, str]:
    """The first GPU and its driver, asked without opening a context on it."""
    ask = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    done = subprocess.run(ask, capture_output=True, text=True, check=True)
    name, driver = done.stdout.splitlines()[0].split(", ")
    return name, f"driver {driver}"


@dataclass
class Results:
    """Facts of each (row, dtype, method), written as they come."""

    path: Path
    machine: dict[str, str]
    facts: dict[Key, dict[str, Any]]
    commit: str = ""
    """Of what is added."""
    anew: dict[Key, dict[str, Any]] = field(default_factory=dict)
    """Of rows that an earlier run has measured in part, until this one has all of that."""

    @classmethod
    def at(cls, path: Path, machine: dict[str, str], commit: str) -> "Results":
        """What the file holds, or nothing yet; refuses a file of another machine or version."""
        held = cls.read(path) if path.exists() else cls(path, machine, {})
        held.commit = commit
        other = [
            f"{k}: {held.machine.get(k)} there, {machine[k]} here" for k in machine if held.machine.get(k) != machine[k]
        ]
        if other:
            raise SystemExit(f"{path} holds results that do not go with these: {'; '.join(other)}.\nName another --out.")
        return held

    @classmethod
    def read(cls, path: Path) -> "Results":
        held = json.loads(path.read_text())
        return cls(path, held["machine"], {(f["row"], f["dtype"], f["method"]): f for f in held["results"]})

    def add(self, key: Key, facts: dict[str, Any]) -> None:
        row, dtype, method = key
        self.anew[key] = {"row": row, "dtype": dtype, "method": method, **facts, "commit": self.commit}
        of_row = {k: f for k, f in self.anew.items() if k[:2] == key[:2]}
        if all(k in of_row or f["run"] == facts["run"] for k, f in self.facts.items() if k[:2] == key[:2]):
            self.facts |= of_row
            self.anew = {k: f for k, f in self.anew.items() if k not in of_row}
            self.write()

    def write(self) -> None:
        text = {"machine": self.machine, "results": list(self.facts.values())}
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(text, indent=1) + "\n")
        part.rename(self.path)
        self.path.with_suffix(".md").write_text(markdown(self))

    def holds(self, row: str, dtype: str, methods: list[str]) -> bool:
        """Whether all of this is there, of this commit."""
        return all(self.facts.get((row, dtype, m), {}).get("commit") == self.commit for m in methods)

    def check(self, row: str, method: str) -> dict[str, Any]:
        """What the check on a few samples found, if it was run at this commit: it is in float32 whatever is timed."""
        for key in ((row, dtype, method) for dtype in DTYPES):
            facts = self.anew.get(key) or self.facts.get(key, {})
            if facts.get("commit") == self.commit and ("small_error" in facts or facts.get("in_check")):
                return {k: facts[k] for k in ("small_error", "failed", "in_check") if k in facts}
        return {}

    def ratio(self, facts: dict[str, Any], to: str, what: str) -> float | None:
        """Time or memory over that of `to` in the same run; two runs may be on two machines of a kind, and are not mixed."""
        base = self.facts.get((facts["row"], facts["dtype"], to), {})
        if base.get("run") != facts["run"] or not base.get(what) or not facts.get(what):
            return None
        return facts[what] / base[what]


def wrong_by(facts: dict[str, Any]) -> float | None:
    """The error, if it is more than rounding: against the oracle on a few samples, or against the loop on the timed batch.

    >>> wrong_by({"small_error": 1e-6, "full_error": 0.02, "yardstick": 0.01})
    >>> wrong_by({"small_error": 1e-6, "full_error": 0.2, "yardstick": 0.01})
    0.2
    """
    small, full = facts.get("small_error") or 0.0, facts.get("full_error") or 0.0
    if full > max(SMALL_TOLERANCE, TIMES_THE_LOOP * facts.get("yardstick", 0.0)):
        return full
    return small if small > SMALL_TOLERANCE else None


# --- the table ------------------------------------------------------------------------------------------------------------------


def markdown(results: Results) -> str:
    machine = ", ".join(f"{v}" if k in ("device", "host") else f"{k} {v}" for k, v in results.machine.items())
    parts = [f"`python benchmarks/gpu.py`: {machine}.\n\n{LEGEND}"]
    for dtype in DTYPES:
        parts += [part for row in ROWS if (part := section(results, row, dtype))]
    return "\n\n".join(parts) + "\n"


LEGEND = """\
One step is forward, backward and the answer, without an optimizer. Each method in a fresh process, timed alone, by CUDA events,
synchronised each step; "ms" is the median with the 20th and 80th percentile. Peak memory is what torch reserves.
A clipped sum clips each sample's whole gradient to norm 1; ExpandedWeights, vmap and BackPACK give gradients alone, and norms and
weighted sum are added by hand. "Changed model" is what Opacus needs where it does not take the model as it is. "Off by" is
‖answer - truth‖ / ‖truth‖ over all parameters: on 3 samples of a model of fewer layers in float32 against one float64 backward a
sample, and on the timed batch in the timed dtype against one float32 backward a sample (gradients by norms and clipped sum). The
floor counts the products alone. bf16 is weights, activations and gradients in bfloat16; fp32 is torch's default, with TF32 in
convolutions and without it in products. "Not recorded" are compiled steps whose kernels Python launches one by one.
A line without ratios is of another run than plain training's."""


def section(results: Results, row: str, dtype: str) -> str:
    """One row's table, or "" if nothing of it was measured."""
    facts = {m: results.facts[row, dtype, m] for m in METHODS if (row, dtype, m) in results.facts}
    facts = {m: f for m, f in facts.items() if not f.get("failed", "").startswith("NotNeeded")}
    if not facts:
        return ""
    truth = results.facts.get((row, dtype, "truth"), {})
    runs = dict.fromkeys(f"{f['run']}, commit {f['commit']}" for f in facts.values())
    lines = [f"## {ROWS[row].title}, {dtype}", "", f"Run of {' and '.join(runs)}.", ""]
    if "floor" in truth:
        rates = f"{truth['flops'] / 1e12:.0f} TFLOP/s, {truth['bytes'] / 1e12:.1f} TB/s"
        lines += [
            f"Floor of a clipped step: {truth['floor']:.2f}× plain, at the measured {rates}. One backward a sample in {dtype} is "
            f"itself off by {truth['yardstick']:.1e}.",
            "",
        ]
    lines += [
        "| method | ms (p20 - p80) | / plain compiled | / plain eager | peak GiB | / plain compiled | off by: 3 samples, batch |",
        "|-|-|-|-|-|-|-|",
        *(line(results, METHODS[m], f) for m, f in facts.items()),
    ]
    return "\n".join(lines)


def line(results: Results, method: Method, facts: dict[str, Any]) -> str:
    told = [*facts.get("changes", ()), *(["not recorded"] if facts.get("num_recordings") == 0 else [])]
    changes = f" ({', '.join(told)})" if told else ""
    if "failed" in facts:
        return f"| {method.name} | fails: {facts['failed'].replace('|', '/')} | | | | | |"
    times = f"{facts['p50']:.2f} ({facts['p20']:.2f} - {facts['p80']:.2f})"
    ratios = [f"{r:.2f}×" if (r := results.ratio(facts, to, "p50")) else "" for to in ("plain compiled", "plain eager")]
    gib = f"{facts['peak_gib']:.2f}" if facts["peak_gib"] else ""
    memory = f"{r:.2f}×" if (r := results.ratio(facts, "plain compiled", "peak_gib")) else ""
    errors = ", ".join(f"{facts[k]:.1e}" for k in ("small_error", "full_error") if facts.get(k) is not None)
    wrong = wrong_by(facts)
    errors = f"**wrong by {wrong:.1%}** ({errors})" if wrong else errors
    return f"| {' | '.join([method.name + changes, times, *ratios, gib, memory, errors])} |"
