"""Peak memory of the norms of a GPT-2-sized tied model over plain training, each in a fresh process.

python benchmarks/norms_memory.py       B = 8, T = 512; writes benchmarks/results/norms-memory-cpu.md
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from step import Transformer, describe_machine
from torch import Tensor

import samplewise as sw

METHODS = ("plain", "norms", 'norms, keep="norms"', "clipped sum")


class TiedTransformer(Transformer):
    """The benchmark's transformer with its embedding as output head."""

    def __init__(self, width: int, depth: int, vocabulary: int, length: int):
        super().__init__(width, depth, vocabulary, length)
        del self.head

    def forward(self, ids: Tensor) -> Tensor:
        x = self.hidden(ids)
        return F.linear(x, self.embedding.weight)


def losses_of(model: TiedTransformer, ids: Tensor) -> Tensor:
    logits = model(ids)
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").unflatten(0, ids.shape).mean(1)


def measure(method: str, batch: int, length: int, depth: int) -> dict[str, float]:
    """Seconds of the second step, and peak memory in GB above the model's, over two steps."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    model, ids = TiedTransformer(768, depth, 50257, length), torch.randint(50257, (batch, length))
    before, seconds = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0.0
    for _ in range(2):
        start = time.perf_counter()
        if method == "plain":
            model.zero_grad()
            losses_of(model, ids).sum().backward()
        else:
            with sw.capture(model, keep="norms" if "keep" in method else "gradients", verify=False) as grads:
                grads.backward(losses_of(model, ids))
            grads.clipped_sum(max_norm=1.0) if method == "clipped sum" else grads.norms()
            del grads
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "memory": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024**2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", choices=METHODS, help="measure one in this process, print JSON")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--depth", type=int, default=12)
    options = parser.parse_args()
    shape = (options.batch, options.length, options.depth)
    if options.one:
        print(json.dumps(measure(options.one, *shape)))
        return
    lines = [
        describe_machine(),
        "",
        f"{options.depth} layers, d 768, vocabulary 50257 tied, B = {options.batch}, T = {options.length}. Peak resident memory "
        "above the model's own, two steps, without the check of a first call.",
        "",
        "| method | s | GiB | memory / plain |",
        "|-|-|-|-|",
    ]
    plain = None
    for method in METHODS:
        sizes = [f"--{name}={n}" for name, n in zip(("batch", "length", "depth"), shape, strict=True)]
        done = subprocess.run(
            [sys.executable, __file__, "--one", method, *sizes], capture_output=True, text=True, check=True
        )
        found = json.loads(done.stdout.splitlines()[-1])
        plain = plain or found["memory"]
        lines.append(f"| {method} | {found['seconds']:.1f} | {found['memory']:.2f} | {found['memory'] / plain:.2f}× |")
        print(lines[-1], flush=True)
    (Path(__file__).parent / "results" / "norms-memory-cpu.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
