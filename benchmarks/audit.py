"""How much too little noise `samplewise audit` sees: the bound for fractions of the noise that the claim needs, seeds 0 to 2.

python benchmarks/audit.py       writes benchmarks/results/audit-cpu.md; what it says of a fraction of 1 and 0.1 under gradient
canaries and seed 0 is `samplewise audit` and `samplewise audit --broken`
"""

from functools import cache
from pathlib import Path

import torch
from step import describe_machine

import samplewise.cli.audit as job

CLAIM = {"epsilon": 3.0, "delta": 1e-5, "num_canaries": 1000, "steps": 30, "batch_size": 512, "confidence": 0.95}
FRACTIONS = {"gradient": (1.0, 0.5, 0.3, 0.1), "input": (1.0, 0.1)}
SEEDS = range(3)


def row(canaries: str, fraction: float) -> str:
    black_box = canaries == "input"
    results = [job.audited_digits(**CLAIM, black_box=black_box, noise_factor=fraction, seed=seed) for seed in SEEDS]
    right = ", ".join(f"{result.best.num_correct} of {result.best.num_guesses}" for result in results)
    bounds = ", ".join(f"{result.best.lower_bound:.2f}" for result in results)
    return f"| {canaries} | {fraction:g} | {right} | {bounds} | {sum(r.is_refuted for r in results)} of {len(results)} |"


def main() -> None:
    torch.set_num_threads(1)
    search = cache(job.noise_multiplier_for)
    job.noise_multiplier_for = search  # the same for all rows
    claim = ", ".join(f"{name} {value:g}" for name, value in CLAIM.items())
    lines = [f"{claim}; seeds {', '.join(map(str, SEEDS))}.", ""]
    lines += ["| canaries | noise / what the claim needs | right guesses | epsilon is over | refuted |", "|-|-|-|-|-|"]
    for canaries, fractions in FRACTIONS.items():
        for fraction in fractions:
            lines.append(row(canaries, fraction))
            print(lines[-1], flush=True)
    output = Path(__file__).parent / "results" / "audit-cpu.md"
    output.write_text("\n".join([describe_machine().replace("2 threads", "1 thread"), "", *lines]) + "\n")


if __name__ == "__main__":
    main()
