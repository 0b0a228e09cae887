"""The GPU benchmark's whole way on tiny models on the CPU: processes, checks, turns, results, table, plot."""

import doctest
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def run_tiny(out, *options):
    command = [
        sys.executable,
        str(BENCHMARKS / "gpu.py"),
        "--tiny",
        "--seconds",
        "0.05",
        "--rows",
        "lstm",
        "--dtypes",
        "bf16",
    ]
    return subprocess.run([*command, "--out", str(out), *options], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["gpu_floor", "gpu_methods", "gpu_results", "gpu_worker"])
def test_examples_hold(name):
    assert doctest.testmod(__import__(name)).failed == 0


def test_each_method_is_checked_and_timed(tmp_path):
    done = run_tiny(tmp_path, "--methods", "plain eager", "samplewise eager, clipped", "vmap(grad), grad", "BackPACK, grad")
    assert done.returncode == 0, done.stderr
    facts = {f["method"]: f for f in json.loads((tmp_path / "gpu-tiny.json").read_text())["results"]}
    assert facts["truth"]["floor"] > 1
    assert facts["plain eager"]["p20"] <= facts["plain eager"]["p50"] <= facts["plain eager"]["p80"]
    for method in ("samplewise eager, clipped sum", "vmap(grad), gradients"):
        assert facts[method]["small_error"] < 1e-5
        assert facts[method]["full_error"] < 3 * facts["truth"]["yardstick"]
    assert "failed" in facts["BackPACK, gradients"]  # not installed, or no bfloat16 there: listed with its error either way
    turns = sorted(f["turn"] for f in facts.values() if "turn" in f)
    assert len(turns) == 4 and all(end <= begin for (_, end), (begin, _) in itertools.pairwise(turns)), "timed side by side"
    table = (tmp_path / "gpu-tiny.md").read_text()
    assert "| BackPACK, gradients | fails: " in table
    again = run_tiny(tmp_path, "--methods", "plain eager", "samplewise eager, clipped")
    assert "samplewise" not in again.stdout.split("`python")[0], "what stands there already was measured again"
    other = run_tiny(tmp_path, "--methods", "plain eager", "samplewise eager, clipped", "--commit", "another")
    assert other.stdout.count(" ms\n") == 3 and ", commit another." in (tmp_path / "gpu-tiny.md").read_text()
    held = json.loads((tmp_path / "gpu-tiny.json").read_text())
    (tmp_path / "gpu-tiny.json").write_text(json.dumps({**held, "machine": {**held["machine"], "torch": "0.4"}}))
    other = run_tiny(tmp_path, "--methods", "plain eager")
    assert "torch: 0.4 there" in other.stderr and "--out" in other.stderr


def test_what_fails_in_its_check_is_not_run_again(tmp_path):
    """The check is in float32 whatever is timed, and is run once for all dtypes."""
    done = run_tiny(
        tmp_path, "--rows", "vit", "--methods", "torch ExpandedWeights, grad", "--dtypes", "bf16", "fp32", "--slots", "1"
    )
    assert done.returncode == 0, done.stderr
    facts = [f for f in json.loads((tmp_path / "gpu-tiny.json").read_text())["results"] if f["method"] != "truth"]
    assert {f["dtype"] for f in facts} == {"bf16", "fp32"} and len({f["failed"] for f in facts}) == 1
    _, first, second = (tmp_path / "gpu-tiny-errors.txt").read_text().split("--- vit ")
    assert "Traceback" in first and "Traceback" not in second


def test_what_takes_too_long_is_ended_and_listed(tmp_path):
    done = run_tiny(tmp_path, "--methods", "plain eager", "--limit", "0")
    assert done.returncode == 0, done.stderr
    assert "plain eager | fails: took longer than 0 s" in (tmp_path / "gpu-tiny.md").read_text()


def test_a_row_keeps_an_earlier_run_until_a_later_one_has_as_much(tmp_path):
    from gpu_results import Results

    results = Results(tmp_path / "some.json", {"device": "none, tiny"}, {})
    times = {"p20": 1.0, "p50": 1.0, "p80": 1.0, "peak_gib": None}
    for method in ("plain eager", "plain compiled"):
        results.add(("lstm", "bf16", method), {**times, "run": "first"})
    later = Results.read(results.path)
    held = lambda: {key[2]: facts["run"] for key, facts in Results.read(results.path).facts.items()}
    for method, runs in (
        ("vmap(grad), gradients", {"plain eager": "first", "plain compiled": "first"}),
        ("plain eager", {"plain eager": "first", "plain compiled": "first"}),
        ("plain compiled", dict.fromkeys(["plain eager", "plain compiled", "vmap(grad), gradients"], "second")),
        ("vmap(grad), clipped sum", dict.fromkeys([*held(), "vmap(grad), gradients", "vmap(grad), clipped sum"], "second")),
    ):
        later.add(("lstm", "bf16", method), {**times, "run": "second"})
        assert held() == runs


def test_a_check_is_made_once_a_commit(tmp_path):
    from gpu_results import Results

    machine, times = {"device": "none, tiny"}, {"p20": 1.0, "p50": 1.0, "p80": 1.0, "peak_gib": None}
    for commit in ("one", "two"):
        results = Results.at(tmp_path / "some.json", machine, commit)
        assert results.check("lstm", "plain eager") == {}
        results.add(("lstm", "bf16", "plain eager"), {**times, "run": commit, "small_error": 0.5})
        assert results.check("lstm", "plain eager") == {"small_error": 0.5}
        results.add(("lstm", "bf16", "plain compiled"), {**times, "run": commit})
        assert results.holds("lstm", "bf16", ["plain eager", "plain compiled"])


def test_a_wrong_peer_is_called_wrong(tmp_path):
    from gpu_plot import bars, draw
    from gpu_results import Results, markdown

    results = Results(tmp_path / "some.json", {"device": "none, tiny"}, {})
    times = {"p20": 1.0, "p50": 2.0, "p80": 3.0, "peak_gib": 1.0, "run": "a"}
    results.add(("lstm", "bf16", "plain compiled"), times)
    results.add(("lstm", "bf16", "vmap(grad), clipped sum"), {**times, "p50": 4.0, "small_error": 0.25})
    results.add(("lstm", "bf16", "BackPACK, clipped sum"), {"failed": "ValueError: a|b", "run": "a"})
    results.add(("lstm", "bf16", "plain eager"), {**times, "run": "b"})
    text = markdown(results)
    assert (
        "| vmap(grad), clipped sum | 4.00 (1.00 - 3.00) | 2.00× |  | 1.00 | 1.00× | **wrong by 25.0%** (2.5e-01) |" in text
    )
    assert "fails: ValueError: a/b" in text
    assert ("BackPACK", None, "fails") in bars(results, "lstm", "bf16")
    assert ("plain, eager", None, "fails") not in bars(results, "lstm", "bf16"), "of another run, which is not a failure"
    draw(results, "bf16", tmp_path / "some.svg")
    assert "LSTM" in (tmp_path / "some.svg").read_text()
