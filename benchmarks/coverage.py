"""On what each library gives the right gradients, refuses, or is wrong without a word; in float64, on the CPU.

python benchmarks/coverage.py                kinds of use, all libraries; writes benchmarks/results/coverage.md
python benchmarks/coverage.py --of models    published architectures; writes benchmarks/results/coverage-models.md
"""

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from cases import CASES
from coverage_cases import USES, Use

from samplewise.testing import oracle

Gradients = dict[str, Tensor]
NO_GRADIENTS = "gives numbers where samples have no gradients of their own, or where plain autograd raises"
SECONDS = 120
"""For one use in one library; a process that takes longer is ended and counts as crashed."""


# --- the libraries: each gives {name: [B, *shape]}, or raises ----------------------------------------------------------------


def samplewise(use: Use, model: nn.Module, batch: tuple, loss_fn: Callable, bound: float) -> Gradients:
    """Also the other routes: norms, and the sum clipped at `bound`."""
    import samplewise as sw

    options = {"loss_reduction": use.reduction} if use.reduction != "none" else {}
    with sw.capture(model, **use.options, **options) as grads, use.under():
        loss = loss_fn(model, *batch)
        grads.backward(loss) if use.reduction == "none" else loss.backward()
    clipped = {f"clipped sum of {name}": S for name, S in grads.clipped_sum(max_norm=bound).items()}
    return {**grads.materialize(), "norms": grads.norms(), **clipped}


def grad_samples(model: nn.Module) -> Gradients:
    found = {name: getattr(p, "grad_sample", None) for name, p in model.named_parameters()}
    return {name: torch.cat(G) if isinstance(G, list) else G for name, G in found.items() if G is not None}


def expanded_weights(use: Use, model: nn.Module, batch: tuple, loss_fn: Callable, bound: float) -> Gradients:
    from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

    reduction = "mean" if use.reduction == "mean" else "sum"
    size, batch_first = num_samples(use, batch), use.batch_dim == 0
    with use.under():
        call = call_for_per_sample_grads(model, batch_size=size, loss_reduction=reduction, batch_first=batch_first)
        loss_fn(call, *batch).sum().backward()
    return grad_samples(model)


def vmap(use: Use, model: nn.Module, batch: tuple, loss_fn: Callable, bound: float) -> Gradients:
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    leaves, tree = tree_flatten(batch)
    dims = tuple(use.batch_dim if isinstance(leaf, Tensor) else None for leaf in leaves)

    def loss(parameters: Gradients, *sample: Any) -> Tensor:
        alone = [t if dim is None else t.unsqueeze(dim) for t, dim in zip(sample, dims, strict=True)]
        call = lambda *args, **kwargs: torch.func.functional_call(model, parameters, args, kwargs)
        return loss_fn(call, *tree_unflatten(alone, tree)).sum()

    with use.under():
        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, *dims))(parameters, *leaves)


def opacus(use: Use, model: nn.Module, batch: tuple, loss_fn: Callable, bound: float) -> Gradients:
    from opacus.grad_sample import GradSampleModule

    reduction = "mean" if use.reduction == "mean" else "sum"
    with use.under():
        wrapped = GradSampleModule(model, batch_first=use.batch_dim == 0, loss_reduction=reduction)
        loss_fn(wrapped, *batch).sum().backward()
    return grad_samples(model)


LIBRARIES = {
    "samplewise": samplewise,
    "ExpandedWeights": expanded_weights,
    "vmap(grad)": vmap,
    "Opacus hooks": opacus,
}


# --- one use in one library ----------------------------------------------------------------------------------------------------


def num_samples(use: Use, batch: tuple) -> int:
    return next(leaf.shape[use.batch_dim] for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor))


def truth_of(use: Use) -> Gradients:
    model, batch, loss_fn = use.build(use.truth)
    if num_samples(use, batch) == 0:
        return {name: p.new_zeros(0, *p.shape) for name, p in model.named_parameters()}
    return oracle(model, loss_fn, *batch, batch_dim=use.batch_dim)


def outcome(use: Use, library: str) -> tuple[str, str]:
    """("right" | "refused" | "wrong", why). What is refused in float64 is asked again in float32, which has kernels of its own."""
    if use.right == "as the model":
        try:
            truth = truth_of_model(use)
        except Exception as error:
            return "left out", said(error)
        return attempt(replace(use, right="gradients" if truth else "refusal"), library, truth)
    result, why = attempt(use, library, {} if use.right == "refusal" else truth_of(use))
    if result == "refused" and use.dtype == torch.float64 and not any(p.is_complex() for p in use.build()[0].parameters()):
        single = replace(use, dtype=torch.float32, tolerance=1e-4)
        again = attempt(single, library, truth_of(single))
        return (result, why) if again[0] == "refused" else again
    return result, why


def truth_of_model(use: Use) -> Gradients:
    """Of a model that is not ours; nothing if its samples mix. Raises if plain backward of one sample is not that of the batch."""
    model, batch, loss_fn = use.build()
    together = loss_fn(model, *batch)
    alone = torch.cat([loss_fn(model, *(t[b : b + 1] for t in batch)) for b in range(num_samples(use, batch))])
    if not together.isfinite().all():
        raise ValueError("the losses are not finite")
    if not torch.allclose(together, alone, rtol=1e-9):
        return {}
    together.sum().backward()
    plain = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    truth = truth_of(use)
    why = difference({name: truth[name].sum(0) for name in plain}, plain, 1e-4, needed=plain)
    if why:
        raise ValueError(f"torch's backward of one sample is not that of the batch: {why}")
    return truth


def attempt(use: Use, library: str, truth: Gradients) -> tuple[str, str]:
    norms = torch.cat([G[..., None].flatten(1) for G in truth.values()], 1).abs().norm(dim=1) if truth else torch.ones(1)
    bound = (norms.median().item() if len(norms) else 0.0) or 1.0
    model, batch, loss_fn = use.build()
    before = named(model)
    try:
        got = LIBRARIES[library](use, model, batch, loss_fn, bound)
    except Exception as error:
        return ("refused" if use.right == "gradients" else "right"), said(error)
    if use.right == "refusal":
        return "wrong", NO_GRADIENTS
    w = (bound / norms).clamp(max=1)
    clipped = {f"clipped sum of {name}": torch.tensordot(w.to(G.dtype), G, 1) for name, G in truth.items()}
    why = difference(got, {**truth, "norms": norms, **clipped}, use.tolerance, needed=truth)
    if not why and named(model) != before:
        why = "leaves the model with other parameters than it had"
    return ("wrong", why) if why else ("right", "")


def named(model: nn.Module) -> list[tuple[str, int]]:
    return [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)]


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def difference(got: Gradients, expected: Gradients, tolerance: float, *, needed: Gradients) -> str:
    """What is wrong in words, "" if nothing is."""
    missing = [name for name, G in needed.items() if name not in got and G.any()]
    if missing:
        return f"no gradient for {missing[0]}"
    largest = max((float(G.abs().max()) for G in needed.values() if G.numel()), default=0.0)
    for name, found in got.items():
        G = expected.get(name, torch.zeros_like(found))
        if found.shape != G.shape:
            return f"{name} is {tuple(found.shape)}, not {tuple(G.shape)}"
        if G.numel():
            # a softmax does not see the bias of its keys, whose gradient is zero but for rounding
            scale = max(float(G.abs().max()), 1e-6 * largest, 1e-300)
            error = float((found.detach().to(G.dtype) - G).abs().max()) / scale
            if not error < tolerance:
                return f"{name} is off by {error:.0%}" if error > 0.01 else f"{name} is off by {error:.1e}"
    return ""


# --- all of them ----------------------------------------------------------------------------------------------------------------


def uses(of: str) -> list[Use]:
    if of == "models":
        import coverage_adapters
        import coverage_diffusers
        import coverage_models

        return [*coverage_models.MODELS, *coverage_diffusers.MODELS, *coverage_adapters.MODELS]
    return [*(Use(**vars(case)) for case in CASES), *USES]


def work(of: str, library: str, start: int) -> None:
    """Prints the outcome of every use from `start` on, a line of JSON each."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for use in uses(of)[start:]:
        signal.alarm(SECONDS)
        print(json.dumps([use.name, *outcome(use, library)]), flush=True)


def outcomes(of: str, library: str) -> dict[str, tuple[str, str]]:
    """{use: outcome}; a process that dies is started again behind the use that it died of."""
    found: dict[str, tuple[str, str]] = {}
    names = [use.name for use in uses(of)]
    assert len(set(names)) == len(names)
    while len(found) < len(names):
        command = [sys.executable, "-W", "ignore", __file__, "--of", of, "--work", library, str(len(found))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
        found |= {name: (result, why) for name, result, why in lines}
        if len(found) < len(names):
            last = (done.stderr.strip().splitlines() or [""])[-1]
            found[names[len(found)]] = "crashed", f"exit status {done.returncode}: {last}"
    return found


LEGEND = {
    "uses": """\
- right: the oracle's gradients, one backward a sample in float64 ({gradients} uses); an error where samples mix or plain autograd
  raises ({refusal}); either of them where the loss of a batch does not weigh its samples alike ({either})
- refused: an error where there are gradients; asked again in float32, which has kernels of its own, before it counts
- wrong: other numbers or shapes, a missing gradient, or a model left with other parameters, without an error
- crashed: the process ended

Of samplewise, norms and clipped sums must be right too. ExpandedWeights is torch's `call_for_per_sample_grads` with the batch size
given, vmap(grad) is `torch.func` over `functional_call`, Opacus hooks is `GradSampleModule` as it comes. vmap runs every sample
alone, so where samples mix it answers for another model than the one that trains; these are counted as wrong, and apart.

Most uses ({tested}) are the table of this project's own tests, which samplewise is held to: its count says what is covered, and is
no estimate for code that nobody tried.""",
    "models": """\
One architecture of each family of timm and torchvision, and of each type of transformers that takes ids or images; models of
diffusers; each method of peft, on Llama. Small, random weights, eval mode, 3 samples. Nothing here was written for this project or
changed for it.

- right: the oracle's gradients, one backward a sample; an error where samples mix, that is where the loss of a sample alone is
  not its loss in the batch
- refused: an error where there are gradients
- wrong: other numbers or shapes, a missing gradient, or a model left with other parameters, without an error
- crashed: the process ended, or took longer than {seconds} seconds

Of samplewise, norms and clipped sums must be right too. ExpandedWeights is torch's `call_for_per_sample_grads` with the batch size
given, vmap(grad) is `torch.func` over `functional_call`. Opacus is not in it: its hooks look at layers in training mode alone.""",
}


def table(of: str, results: dict[str, dict[str, tuple[str, str]]]) -> list[str]:
    kinds = ["right", "refused", "wrong", "crashed"]
    left_out = {name: why for found in results.values() for name, (result, why) in found.items() if result == "left out"}
    results = {
        library: {name: each for name, each in found.items() if name not in left_out} for library, found in results.items()
    }
    counts = {library: Counter(result for result, _ in found.values()) for library, found in results.items()}
    num = len(results["samplewise"])
    packages = ("torch", *(("timm", "torchvision", "transformers", "diffusers", "peft") if of == "models" else ("opacus",)))
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    numbers = {**Counter(use.right for use in uses(of)), "tested": len(CASES), "seconds": SECONDS}
    lines = [
        f"# Which {'published architectures' if of == 'models' else 'kinds of use'} each library gets right",
        "",
        f"`python benchmarks/coverage.py --of {of}`: {num} {of}, CPU, Python {platform.python_version()}, {versions}, samplewise "
        f"at commit {commit.strip()}.",
        "",
        *LEGEND[of].format(**numbers).splitlines(),
        "",
        "| library | " + " | ".join(kinds) + " | of the wrong ones, samples mix |",
        "|-" * (len(kinds) + 2) + "|",
        *(
            f"| {library} | " + " | ".join(str(counts[library][kind]) for kind in kinds) + f" | {mixing(of, found)} |"
            for library, found in results.items()
        ),
        "",
        "## Where samplewise is not right",
        "",
        "| | outcome | what it says |",
        "|-|-|-|",
        *(
            f"| {name} | {result} | {cell(why)} |"
            for name, (result, why) in results["samplewise"].items()
            if result != "right"
        ),
        "",
        "## Where any is not right",
        "",
        "| | " + " | ".join(results) + " |",
        "|-" * (len(results) + 1) + "|",
    ]
    for name in results["samplewise"]:
        row = [found[name][0] for found in results.values()]
        if set(row) != {"right"}:
            lines.append(f"| {name} | " + " | ".join(f"**{r}**" if r in ("wrong", "crashed") else r for r in row) + " |")
    if left_out:
        lines += ["", f"## Left out, {len(left_out)}", "", "| | why |", "|-|-|"]
        lines += [f"| {name} | {cell(why)} |" for name, why in left_out.items()]
    return lines


def mixing(of: str, found: dict[str, tuple[str, str]]) -> int:
    samples_mix = lambda name, why: name.startswith("mixing-") or (of == "models" and why == NO_GRADIENTS)
    return sum(result == "wrong" and samples_mix(name, why) for name, (result, why) in found.items())


def cell(text: str) -> str:
    return text.replace("|", "/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--of", choices=["uses", "models"], default="uses")
    parser.add_argument("--work", nargs=2, metavar=("LIBRARY", "START"), help="one library in this process, lines of JSON")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.work:
        work(options.of, options.work[0], int(options.work[1]))
        return
    libraries = [library for library in LIBRARIES if options.of == "uses" or library != "Opacus hooks"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = dict(zip(libraries, pool.map(lambda library: outcomes(options.of, library), libraries), strict=True))
    for library, found in results.items():
        print(library, dict(Counter(result for result, _ in found.values())), flush=True)
    name = "coverage.md" if options.of == "uses" else "coverage-models.md"
    path = options.output or Path(__file__).parent / "results" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(table(options.of, results)) + "\n")


if __name__ == "__main__":
    main()
