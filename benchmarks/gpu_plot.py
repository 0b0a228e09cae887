"""The picture of the GPU benchmark: time of a clipped step over plain compiled training, samplewise beside its peers.

python benchmarks/gpu_plot.py benchmarks/results/gpu-h200.json        writes gpu-h200.svg beside it
"""

import argparse
from pathlib import Path
from typing import Any

from gpu_models import ROWS
from gpu_results import Results, wrong_by

BARS = {
    "plain compiled": "plain, compiled",
    "plain eager": "plain, eager",
    "samplewise compiled, clipped sum": "samplewise, compiled",
    "samplewise eager, clipped sum": "samplewise, eager",
    "vmap(grad) compiled, clipped sum": "vmap(grad), compiled",
    "vmap(grad), clipped sum": "vmap(grad), eager",
    "torch ExpandedWeights, clipped sum": "ExpandedWeights",
    "Opacus hooks, clipped sum": "Opacus hooks",
    "Opacus ghost, clipped sum": "Opacus ghost",
    "BackPACK, clipped sum": "BackPACK",
}
COLOURS = {"plain": "#9aa0a6", "samplewise": "#1a66c2"}
PEER = "#d9904a"
LONGEST = 10
"""Bars are cut here; the number stands behind them."""
CHANGED = {
    "Opacus hooks, clipped sum": "Opacus hooks, changed model, clipped sum",
    "Opacus ghost, clipped sum": "Opacus ghost, changed model, clipped sum",
}


def bars(results: Results, row: str, dtype: str) -> list[tuple[str, float | None, str]]:
    """(label, ratio, words behind the bar) of each method of a row; no ratio where the method failed."""
    shown = []
    for method, label in BARS.items():
        facts = results.facts.get((row, dtype, method))
        other = results.facts.get((row, dtype, CHANGED.get(method, "")))
        if not usable(facts) and other and usable(other):
            facts, label = other, f"{label}, changed model"
        ratio = results.ratio(facts, "plain compiled", "p50") if facts else None
        if facts is None or (ratio is None and "failed" not in facts):
            continue
        wrong = wrong_by(facts)
        words = "fails" if ratio is None else f"{ratio:.2f}×" + (f", wrong by {wrong:.0%}" if wrong else "")
        shown.append((label, ratio, words))
    return shown


def usable(facts: dict[str, Any] | None) -> bool:
    return facts is not None and "p50" in facts and wrong_by(facts) is None


def draw(results: Results, dtype: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = {row: some for row in ROWS if len(some := bars(results, row, dtype)) > 1}
    if not rows:
        raise SystemExit(f"{results.path} holds nothing in {dtype} to draw.")
    matplotlib.rcParams.update({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "samplewise"})
    num_lines = (len(rows) + 1) // 2
    figure, axes = plt.subplots(num_lines, 2, figsize=(11, 2.6 * num_lines), squeeze=False, facecolor="white")
    for axis, (row, some) in zip(axes.flat, rows.items(), strict=False):
        panel(axis, ROWS[row].title, some, results.facts.get((row, dtype, "truth"), {}).get("floor"))
    for axis in axes.flat[len(rows) :]:
        axis.set_visible(False)
    figure.suptitle(
        f"Forward, backward and clipped sum over a plain compiled step, {dtype}, {results.machine['device'].split(',')[0]}"
        "\nshorter is better; solid line: plain compiled; dotted: the floor"
    )
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    figure.savefig(path, metadata={"Date": None})


def panel(axis: Any, title: str, some: list[tuple[str, float | None, str]], floor: float | None) -> None:
    for k, (label, ratio, words) in enumerate(some):
        colour = COLOURS.get(label.split(",")[0], PEER)
        length = min(ratio or 0.0, LONGEST)
        axis.barh(k, length, color=colour, height=0.75)
        if ratio and ratio > LONGEST:
            words = f"… {words}"
        axis.text(length + 0.1, k, words, va="center", color="black" if ratio else "#8a1f1f", fontsize=8)
    axis.axvline(1, color="#444444", linewidth=0.8)
    if floor:
        axis.axvline(floor, color="#444444", linewidth=0.8, linestyle=":")
    axis.set_xlim(0, LONGEST * 1.25)
    axis.set_ylim(len(some) - 0.5, -0.5)
    axis.set_xticks(range(0, LONGEST + 1, 2), [f"{t}×" for t in range(0, LONGEST + 1, 2)])
    axis.set_yticks(range(len(some)), [label for label, _, _ in some])
    axis.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axis.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", default=Path(__file__).parent / "results" / "gpu-h200.json")
    parser.add_argument("--dtype", default="bf16")
    options = parser.parse_args()
    draw(Results.read(options.results), options.dtype, options.results.with_suffix(".svg"))


if __name__ == "__main__":
    main()
