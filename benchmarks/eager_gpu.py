"""What the eager engine costs on a GPU: GPT-2 small in bfloat16, plain, captured, norms, clipped sum.

python benchmarks/eager_gpu.py       needs CUDA and transformers; prints a table
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import samplewise as sw

SHAPES = ((16, 256), (8, 1024))


def measured(step: Callable[[], object], num: int = 15) -> tuple[float, float]:
    """(median milliseconds, peak GiB) of a step."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(num):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3, torch.cuda.max_memory_allocated() / 2**30


def main() -> None:
    config = GPT2Config(use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = GPT2LMHeadModel(config).to("cuda", torch.bfloat16).train()
    print(f"GPT-2 small, bfloat16, eager, {torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| B | T | step | ms | time / plain | peak GiB | memory / plain |\n|-|-|-|-|-|-|-|")
    for B, T in SHAPES:
        ids = torch.randint(50257, (B, T), device="cuda")

        def losses(ids: Tensor = ids) -> Tensor:
            z = model(ids).logits[:, :-1].float()
            return F.cross_entropy(z.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1).sum(1)

        def plain(losses: Callable[[], Tensor] = losses) -> None:
            model.zero_grad()
            losses().sum().backward()

        def captured(losses: Callable[[], Tensor] = losses, **options: str) -> sw.Grads:
            with sw.capture(model, **options) as grads:  # type: ignore[arg-type]
                grads.backward(losses())
            return grads

        steps: dict[str, Callable[[], object]] = {
            "plain": plain,
            "captured, nothing asked": captured,
            "norms": lambda: captured(keep="norms").norms(),
            "clipped sum": lambda: captured().clipped_sum(max_norm=1.0),
        }
        base: tuple[float, float] | None = None
        for name, step in steps.items():
            ms, gib = measured(step)
            model.zero_grad(set_to_none=True)
            base = base or (ms, gib)
            print(f"| {B} | {T} | {name} | {ms:.1f} | {ms / base[0]:.2f}× | {gib:.2f} | {gib / base[1]:.2f}× |", flush=True)


if __name__ == "__main__":
    main()
