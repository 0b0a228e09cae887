"""What a step costs over plain training, and over what peers cost: time and peak memory, each method in a fresh process.

python benchmarks/step.py            both models, all methods; writes benchmarks/results/step-cpu.md
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_NORM = 1.0
Step = Callable[[], None]


def cnn() -> tuple[nn.Module, Tensor, Tensor]:
    """Two convolutions with GroupNorm on 32×32 images, B = 64."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(4, 64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 64, 10),
    )  # fmt: skip
    return model, torch.randn(64, 3, 32, 32), torch.randint(10, (64,))


class Transformer(nn.Module):
    def __init__(self, width: int = 256, depth: int = 4, vocabulary: int = 1000, length: int = 128):
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "norm2": nn.LayerNorm(width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.position
        for block in self.blocks:
            q, k, v = block["qkv"](block["norm1"](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
            x = x + block["out"](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            x = x + block["down"](F.gelu(block["up"](block["norm2"](x))))
        return self.norm(x)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(ids).mean(1))


def transformer() -> tuple[nn.Module, Tensor, Tensor]:
    """Four blocks of width 256, T = 128, B = 16."""
    return Transformer(), torch.randint(1000, (16, 128)), torch.randint(10, (16,))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(64, 128, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0].mean(1))


def lstm() -> tuple[nn.Module, Tensor, Tensor]:
    """An LSTM of width 128, T = 100, B = 32."""
    return Tagger(), torch.randn(32, 100, 64), torch.randint(10, (32,))


MODELS = {"cnn": cnn, "transformer": transformer, "lstm": lstm}


def plain(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    def step() -> None:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()

    return step


def plain_compiled(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    loss = torch.compile(lambda x, y: F.cross_entropy(model(x), y))

    def step() -> None:
        model.zero_grad()
        loss(x, y).backward()

    return step


def samplewise_clipped(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    import samplewise as sw

    def step() -> None:
        with sw.capture(model) as grads:
            grads.backward(F.cross_entropy(model(x), y, reduction="none"))
        grads.clipped_sum(max_norm=MAX_NORM)

    return step


def samplewise_compiled(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    import samplewise as sw

    losses = lambda model, x, y: F.cross_entropy(model(x), y, reduction="none")
    step = sw.per_sample_step(model, losses, lambda grads: grads.clipped_sum(max_norm=MAX_NORM), compile=True)
    return lambda: step(x, y) and None


def samplewise_materialized(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    import samplewise as sw

    def step() -> None:
        with sw.capture(model) as grads:
            grads.backward(F.cross_entropy(model(x), y, reduction="none"))
        grads.materialize()

    return step


def expanded_weights(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

    def step() -> None:
        for p in model.parameters():
            p.grad_sample = None  # type: ignore[attr-defined]
        F.cross_entropy(call_for_per_sample_grads(model, batch_size=len(x))(x), y, reduction="sum").backward()

    return step


def vmap(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, parameters, (x.unsqueeze(0),)), y.unsqueeze(0))

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    return lambda: gradients(parameters, x, y) and None


def opacus(mode: str) -> Callable[[nn.Module, Tensor, Tensor], Step]:
    def build(model: nn.Module, x: Tensor, y: Tensor) -> Step:
        from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping

        if mode == "ghost":
            wrapped = GradSampleModuleFastGradientClipping(
                model, batch_first=True, loss_reduction="sum", max_grad_norm=MAX_NORM, use_ghost_clipping=True
            )

            def ghost() -> None:
                wrapped.zero_grad(set_to_none=True)
                losses = F.cross_entropy(wrapped(x), y, reduction="none")
                losses.sum().backward(retain_graph=True)
                weights = wrapped.get_clipping_coef()
                wrapped.zero_grad(set_to_none=True)
                wrapped.disable_hooks()
                (weights * losses).sum().backward()
                wrapped.enable_hooks()

            return ghost
        wrapped = GradSampleModule(model, batch_first=True, loss_reduction="sum")

        def hooks() -> None:
            wrapped.zero_grad(set_to_none=True)
            F.cross_entropy(wrapped(x), y, reduction="sum").backward()
            grads = [p.grad_sample for p in wrapped.parameters()]
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads]).norm(dim=0)
            coefficients = (MAX_NORM / norms).clamp(max=1)
            for g in grads:
                torch.einsum("b,b...->...", coefficients, g)

        return hooks

    return build


METHODS: dict[str, Callable[[nn.Module, Tensor, Tensor], Step]] = {
    "plain": plain,
    "plain, compiled": plain_compiled,
    "samplewise, clipped sum": samplewise_clipped,
    "samplewise compiled, clipped sum": samplewise_compiled,
    "samplewise, gradients": samplewise_materialized,
    "torch ExpandedWeights, gradients": expanded_weights,
    "vmap(grad), gradients": vmap,
    "Opacus hooks, clipped sum": opacus("hooks"),
    "Opacus ghost, clipped sum": opacus("ghost"),
}


def measure(model_name: str, method: str, num_steps: int) -> dict[str, float]:
    """Median seconds of a step beside interleaved plain steps, and the process's peak memory above its start."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    model, x, y = MODELS[model_name]()
    step = METHODS[method](model, x, y)  # which imports the library
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(3):
        step()
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    other, ox, oy = MODELS[model_name]()
    reference = plain(other, ox, oy)
    for _ in range(3):
        reference()
    times: dict[str, list[float]] = {"step": [], "plain": []}
    for _ in range(num_steps):
        for key, run in (("step", step), ("plain", reference)):
            start = time.perf_counter()
            run()
            times[key].append(time.perf_counter() - start)
    p20, p50, p80 = (statistics.quantiles(times["step"], n=10)[k] for k in (1, 4, 7))
    return {"p20": p20, "p50": p50, "p80": p80, "plain": statistics.median(times["plain"]), "memory": memory}


def main(script: str, output: Path) -> None:
    """Measures every method on every model, each in a fresh process of `script`, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-steps", type=int, default=20)
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "METHOD"), help="measure one in this process, print JSON")
    parser.add_argument("--output", type=Path, default=output)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one, options.num_steps)))
        return
    lines = [
        describe_machine(),
        "",
        "| model | method | ms (p20 / p50 / p80) | time / plain | peak memory / plain |",
        "|-|-|-|-|-|",
    ]
    for model in MODELS:
        plain_memory = None
        for method in METHODS:
            command = [sys.executable, script, "--num-steps", str(options.num_steps), "--one", model, method]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                reason = done.stderr.strip().splitlines()[-1][:100].replace("|", "/")
                lines.append(f"| {model} | {method} | fails: {reason} | | |")
            else:
                r = json.loads(done.stdout.splitlines()[-1])
                plain_memory = plain_memory or r["memory"]
                ms = " / ".join(f"{1000 * r[k]:.0f}" for k in ("p20", "p50", "p80"))
                memory = (
                    "" if "compiled" in method else f"{r['memory'] / plain_memory:.2f}×"
                )  # the compiler's own would count
                lines.append(f"| {model} | {method} | {ms} | {r['p50'] / r['plain']:.2f}× | {memory} |")
            print(lines[-1], flush=True)
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text("\n".join(lines) + "\n")


def describe_machine() -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    load = Path("/proc/loadavg").read_text().split()[0]
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ""
    )
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, commit {commit}"
    return f"{cpu}, 2 threads, float32, load average {load} at the end, {versions}."


if __name__ == "__main__":
    main(__file__, Path(__file__).parent / "results" / "step-cpu.md")
