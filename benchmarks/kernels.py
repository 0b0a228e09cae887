"""What each kernel takes on a GPU, beside torch.compile of its reference and the best composition of torch's own calls.

python benchmarks/kernels.py                needs CUDA and Triton; checks, times, writes benchmarks/results/kernels-h200.md
python benchmarks/kernels.py gram direct    only these
python benchmarks/kernels.py --tune         also tries every cut of the work and prints the best for each shape
"""

import argparse
import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samplewise.kernels import conv_gram_norm, conv_norm, depthwise, direct_norm, gram_norm, reference

RESULT = Path(__file__).parent / "results" / "kernels-h200.md"
TOLERANCE = 1e-4
"""Against the reference in float64, of each answer's own size (of m, for n from Gram matrices); 2e-3 where tf32 rounds."""


@dataclass
class Case:
    """One kernel on one shape."""

    kernel: str
    shape: str
    run: Callable[[], Any]
    reference: Callable[[], Any]
    """The meaning, on the same tensors; compiled, it is what the kernel must beat."""
    compositions: dict[str, Callable[[], Any]]
    """Other ways to the same numbers by calls of torch."""
    check: Callable[[Any], float]
    """The relative error of an answer."""
    flops: float
    floor: Callable[[], Any] | None = None
    """What plain training does here: the gradient of the whole batch."""
    cuts: dict[str, Callable[[], Any]] = field(default_factory=dict)
    """The kernel, cut otherwise."""
    tolerance: float = TOLERANCE


_flush: list[Tensor] = []


def measured(call: Callable[[], Any], seconds: float = 0.08) -> tuple[float, float, float]:
    """(p20, p50, p80) microseconds of a call as a CUDA graph, its inputs not in the L2 cache."""
    if not _flush:
        _flush.append(torch.empty(1 << 28, dtype=torch.int8, device="cuda"))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    start = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    num = max(5, min(60, int(seconds / (time.perf_counter() - start + 1e-4))))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(num)]
    for before, after in events:
        _flush[0].zero_()
        before.record()
        graph.replay()
        after.record()
    torch.cuda.synchronize()
    times = sorted(before.elapsed_time(after) * 1e3 for before, after in events)
    return times[num // 5], times[num // 2], times[num * 4 // 5]


def attempted(call: Callable[[], Any]) -> tuple[float, float, float] | str:
    try:
        return measured(call)
    except Exception as error:  # a composition that this torch has not, a cut that does not fit the chip
        torch.cuda.synchronize()
        return f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"


def error_of(got: Tensor, expected: Tensor, scale: Tensor | None = None) -> float:
    scale = (expected if scale is None else scale).double().abs()
    return ((got.double() - expected.double()).abs() / scale.clamp(min=1e-30)).max().item()


def sides(B: int, T: int, I: int, O: int, dtype: torch.dtype, row: int | None = None) -> tuple[Tensor, Tensor]:
    """a [B, T, I] and g [B, T, O], of which a row begins `row` numbers after the last."""
    g = torch.randn(B, T, row or O, device="cuda", dtype=dtype)
    return torch.randn(B, T, I, device="cuda", dtype=dtype), g[..., :O]


def name_of(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def by_bmm(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    wide = {"out_dtype": torch.float32} if a.dtype != torch.float32 else {}
    of_a, of_g = torch.bmm(a, a.mT, **wide), torch.bmm(g, g.mT, **wide)
    lengths = (of_a.diagonal(dim1=1, dim2=2) * of_g.diagonal(dim1=1, dim2=2)).sqrt()
    return (of_a * of_g).sum((1, 2)), lengths.sum(1).square()


GRAM = [
    (16, 256, 768, 768),
    (16, 256, 768, 2304),
    (16, 256, 3072, 768),
    (16, 256, 768, 50257),
    (16, 256, 768, 50304),  # rows of g aligned, as where a model pads its vocabulary
    (16, 256, 768, 50257, 50304),  # or where the compiler pads rows
    (64, 197, 768, 3072),
    (256, 16, 4608, 512),
    (256, 64, 2304, 256),
]


def gram_cases() -> Iterator[Case]:
    for (B, T, I, O, *row), dtype in [*itertools.product(GRAM, [torch.bfloat16]), (GRAM[1], torch.float32)]:
        a, g = sides(B, T, I, O, dtype, *row)
        truth = [
            torch.cat(part)
            for part in zip(
                *(reference.gram_sq_norms(a[b : b + 1].double(), g[b : b + 1].double()) for b in range(B)), strict=True
            )
        ]

        def check(got: Any, truth: list[Tensor] = truth) -> float:
            return max(error_of(got[0], truth[0], truth[1]), error_of(got[1], truth[1]))

        cuts = {}
        is_half, is_aligned = dtype.itemsize == 2, g.stride(1) % 8 == 0
        of_k = (64, 128) if is_half and is_aligned else (32, 64) if is_half else (32,)
        for t, k in itertools.product([t for t in (16, 32, 64, 128) if min(64, T) <= t < 2 * T], of_k):
            P = -(-T // t) * (-(-T // t) + 1) // 2
            splits = [s for s in (1, 2, 3, 4, 5, 8, 12) if s == 1 or (s * B * P <= 1200 and s * 512 <= I + O)]
            for s, stages in [*itertools.product(splits, (3,)), *([(1, 4)] if k == 64 and is_aligned else [])]:
                if t * k <= 128 * 64:
                    cut = gram_norm.Config(t, k, s, 8 if t == 128 else 4, stages)
                    cuts[str(tuple(cut))] = lambda cut=cut, a=a, g=g: gram_norm.launch(a, g, cut)
        yield Case(
            kernel="gram",
            shape=f"B{B} T{T} {I}→{O} {name_of(dtype)}{', rows padded' if row else ''}",
            run=lambda a=a, g=g: gram_norm.gram_sq_norms(a, g),
            reference=lambda a=a, g=g: reference.gram_sq_norms(a, g),
            compositions={"bmm": lambda a=a, g=g: by_bmm(a, g)},
            check=check,
            flops=2.0 * B * T * T * (I + O),
            floor=lambda a=a, g=g: g.flatten(0, 1).mT @ a.flatten(0, 1),
            cuts=cuts,
        )


DIRECT = [(8, 1024, 768, 3072), (4, 2048, 2048, 8192), (4, 2048, 2048, 512), (8, 512, 1024, 1024)]


def direct_cases() -> Iterator[Case]:
    for (B, T, I, O), dtype in [*itertools.product(DIRECT, [torch.bfloat16]), (DIRECT[0], torch.float32)]:
        a, g = sides(B, T, I, O, dtype)
        truth = torch.cat([reference.direct_sq_norms(a[b : b + 1].double(), g[b : b + 1].double()) for b in range(B)])
        wide = {"out_dtype": torch.float32} if dtype != torch.float32 else {}
        cuts = {}
        blocks = [(128, 256, 64), (256, 128, 64), (128, 128, 64), (128, 128, 128), (64, 256, 64), (128, 64, 64)]
        if dtype == torch.float32:
            blocks = [(64, 128, 32), (128, 64, 32), (128, 128, 32), (64, 64, 32), (128, 256, 16)]
        for (o, i, t), stages in itertools.product(blocks, (3, 4)):
            for w in (4, 8) if o * i <= 128 * 128 else (8,):
                cut = direct_norm.Config(o, i, t, w, stages)
                cuts[str(tuple(cut))] = lambda cut=cut, a=a, g=g: direct_norm.launch(a, g, cut)
        yield Case(
            kernel="direct",
            shape=f"B{B} T{T} {I}→{O} {name_of(dtype)}",
            run=lambda a=a, g=g: direct_norm.direct_sq_norms(a, g),
            reference=lambda a=a, g=g: reference.direct_sq_norms(a, g),
            compositions={"bmm": lambda a=a, g=g, wide=wide: torch.bmm(g.mT, a, **wide).square().sum((1, 2))},
            check=lambda got, truth=truth: error_of(got, truth),
            flops=2.0 * B * T * I * O,
            floor=lambda a=a, g=g: g.flatten(0, 1).mT @ a.flatten(0, 1),
            cuts=cuts,
        )


CONV = [
    (256, 64, 64, 32, 3, 1, "last"),
    (256, 64, 64, 32, 3, 1, "first"),
    (256, 256, 256, 8, 3, 1, "last"),
    (256, 512, 512, 4, 3, 1, "last"),
    (32, 128, 128, 28, 3, 1, "last"),
    (32, 1024, 256, 14, 1, 1, "last"),
    (32, 3, 64, 224, 7, 2, "last"),
    (32, 64, 64, 56, 3, 1, "last"),
]
"""(B, C, O, size, kernel, stride, where channels lie)"""


def conv_cases(kind: str) -> Iterator[Case]:
    cases = [*itertools.product(CONV, [torch.bfloat16]), *itertools.product((CONV[0], CONV[2]), [torch.float32])]
    for (B, C, O, size, k, stride, channels), dtype in cases:
        layout = torch.channels_last if channels == "last" else torch.contiguous_format
        out = (size + 2 * (k // 2) - k) // stride + 1
        x = torch.randn(B, C, size, size, device="cuda", dtype=dtype).contiguous(memory_format=layout)
        g = torch.randn(B, O, out, out, device="cuda", dtype=dtype).contiguous(memory_format=layout)
        geometry = ([k, k], [stride, stride], [k // 2, k // 2], [1, 1], 1)

        def patched(x: Tensor = x, geometry: tuple = geometry) -> Tensor:
            kernel, stride, padding, dilation, _ = geometry
            return F.unfold(x, kernel, dilation=dilation, padding=padding, stride=stride)

        def built(g: Tensor = g, patched: Callable[[], Tensor] = patched) -> Tensor:
            return torch.bmm(g.flatten(2), patched().mT)

        def as_groups(x: Tensor = x, g: Tensor = g, geometry: tuple = geometry) -> Tensor:
            (B, C), O, (kernel, stride, padding, dilation, _) = x.shape[:2], g.shape[1], geometry
            images, gradients, weight = (
                x.reshape(1, B * C, *x.shape[2:]),
                g.reshape(1, B * O, *g.shape[2:]),
                (B * O, C, *kernel),
            )
            wanted = [False, True, False]
            return torch.ops.aten.convolution_backward(
                gradients, images, x.new_empty(weight), None, stride, padding, dilation, False, [0, 0], B, wanted
            )[1]

        def floor(x: Tensor = x, g: Tensor = g, geometry: tuple = geometry) -> Tensor:
            kernel, stride, padding, dilation, _ = geometry
            weight = x.new_empty(g.shape[1], x.shape[1], *kernel).contiguous(memory_format=torch.channels_last)
            wanted = [False, True, False]
            return torch.ops.aten.convolution_backward(
                g, x, weight, None, stride, padding, dilation, False, [0, 0], 1, wanted
            )[1]

        few = slice(0, 2)  # in float64 the gradients of all would not fit
        if kind == "conv":
            truth = reference.conv_per_sample(x[few].double(), g[few].double(), *geometry)
            run, of_reference = conv_norm.conv_per_sample, reference.conv_per_sample
            compositions: dict[str, Callable[[], Any]] = {"unfold, bmm": built, "samples as groups": as_groups}
            check = lambda got, truth=truth: error_of(got[:2], truth, truth.abs().max())
        elif kind == "conv-gram":
            if out > 16:
                continue
            truth = reference.conv_gram_sq_norms(x[few].double(), g[few].double(), *geometry)
            run, of_reference = conv_gram_norm.conv_gram_sq_norms, reference.conv_gram_sq_norms
            compositions = {"unfold, bmm": lambda g=g, patched=patched: by_bmm(patched().mT, g.flatten(2).mT)}
            check = lambda got, truth=truth: max(error_of(got[0][:2], *truth), error_of(got[1][:2], truth[1]))
        else:
            truth = reference.conv_sq_norms(x[few].double(), g[few].double(), *geometry)
            run, of_reference = conv_norm.conv_sq_norms, reference.conv_sq_norms
            compositions = {"unfold, bmm": lambda built=built: built().float().square().sum((1, 2))}
            if out <= 16:
                compositions["unfold, Gram"] = lambda g=g, patched=patched: by_bmm(patched().mT, g.flatten(2).mT)[0]
            check = lambda got, truth=truth: error_of(got[:2], truth)
        cuts, target = {}, x.new_empty(B, O, k, k, C).permute(0, 1, 4, 2, 3) if kind == "conv" else None
        blocks = [
            (128, 128, 64, 8),
            (128, 128, 64, 4),
            (64, 128, 64, 4),
            (128, 64, 64, 4),
            (64, 64, 64, 4),
            (64, 256, 64, 8),
        ]
        for t, n, stages in itertools.product((16, 32, 64), (64, 128), (3, 4)) if kind == "conv-gram" else ():
            if min(64, out * out) <= t < 2 * out * out:
                cut = gram_norm.Config(t, n, 1, 4, stages)
                cuts[str(tuple(cut))] = lambda cut=cut, x=x, g=g, geometry=geometry: conv_gram_norm.launch(
                    x, g, *geometry, cut
                )
        for (o, n, l, w), splits in (
            itertools.product([*blocks, (128, 128, 32, 8)], (1, 4, 8)) if kind != "conv-gram" else ()
        ):
            cut = conv_norm.Config(min(o, O), n, l, splits, w, 3)
            cuts[str(tuple(cut))] = lambda cut=cut, x=x, g=g, geometry=geometry, target=target: conv_norm.launch(
                x, g, *geometry, cut, target
            )
        yield Case(
            kernel=kind,
            shape=f"B{B} {C}→{O} {size}² {k}×{k} /{stride} {name_of(dtype)} channels {channels}",
            run=lambda run=run, x=x, g=g, geometry=geometry: run(x, g, *geometry),
            reference=lambda call=of_reference, x=x, g=g, geometry=geometry: call(x, g, *geometry),
            compositions=compositions,
            check=check,
            flops=2.0 * B * (out**4 * (C * k * k + O) if kind == "conv-gram" else C * O * k * k * out * out),
            floor=floor,
            cuts=cuts,
            tolerance=1e-2 if kind == "conv" else TOLERANCE,  # the gradients themselves are given in bfloat16
        )


DEPTHWISE = [
    (32, 96, 56, 7, 1, torch.bfloat16),
    (32, 384, 14, 7, 1, torch.bfloat16),
    (32, 144, 56, 3, 2, torch.bfloat16),
    (32, 384, 14, 7, 1, torch.float32),
]
"""(B, C, size, kernel, stride, dtype)"""


def depthwise_cases() -> Iterator[Case]:
    for B, C, size, k, stride, dtype in DEPTHWISE:
        out = (size + 2 * (k // 2) - k) // stride + 1
        x = torch.randn(B, C, size, size, device="cuda", dtype=dtype).contiguous(memory_format=torch.channels_last)
        g = torch.randn(B, C, out, out, device="cuda", dtype=dtype).contiguous(memory_format=torch.channels_last)
        geometry = ([k, k], [stride, stride], [k // 2, k // 2], [1, 1])

        def built(x: Tensor = x, g: Tensor = g, geometry: tuple = geometry) -> Tensor:
            (kernel, stride, padding, dilation), (B, C) = geometry, g.shape[:2]
            patches = F.unfold(x, kernel, dilation=dilation, padding=padding, stride=stride)
            return g.reshape(B, C, 1, -1) @ patches.view(B, C, -1, patches.shape[2]).mT

        def floor(x: Tensor = x, g: Tensor = g, geometry: tuple = geometry) -> Tensor:
            (kernel, stride, padding, dilation), C = geometry, x.shape[1]
            weight, wanted = x.new_empty(C, 1, *kernel), [False, True, False]
            return torch.ops.aten.convolution_backward(
                g, x, weight, None, stride, padding, dilation, False, [0, 0], C, wanted
            )[1]

        truth = reference.conv_per_sample(x[:2].double(), g[:2].double(), *geometry, C)
        cuts = {}
        for o, l in itertools.product((16, 32, 64), (1, 2, 4, 8)):
            cut = depthwise.config(g, [k, k])._replace(block_o=o, block_l=l)
            cuts[str(tuple(cut))] = lambda cut=cut, x=x, g=g, geometry=geometry: depthwise.launch(x, g, *geometry, cut)
        yield Case(
            kernel="depthwise",
            shape=f"B{B} {C} channels {size}² {k}×{k} /{stride} {name_of(dtype)}",
            run=lambda x=x, g=g, geometry=geometry: depthwise.depthwise_per_sample(x, g, *geometry),
            reference=lambda x=x, g=g, geometry=geometry, C=C: reference.conv_per_sample(x, g, *geometry, C),
            compositions={"unfold, bmm": built},
            check=lambda got, truth=truth: error_of(got[:2], truth, truth.abs().max()),
            flops=2.0 * B * C * k * k * out * out,
            floor=floor,
            cuts=cuts,
        )


KERNELS: dict[str, Callable[[], Iterator[Case]]] = {
    "gram": gram_cases,
    "direct": direct_cases,
    "conv": lambda: conv_cases("conv"),
    "conv-norm": lambda: conv_cases("conv-norm"),
    "conv-gram": lambda: conv_cases("conv-gram"),
    "depthwise": depthwise_cases,
}


def compiled(call: Callable[[], Any]) -> Callable[[], Any]:
    torch._dynamo.reset()
    return torch.compile(call, fullgraph=True, dynamic=False)


def best_composition(case: Case) -> tuple[str, tuple[float, float, float] | str]:
    tried = {}
    for name, call in case.compositions.items():
        tried[name] = attempted(call)
        tried[f"{name}, compiled"] = attempted(compiled(call))
    good = {name: times for name, times in tried.items() if not isinstance(times, str)}
    if not good:
        return next(iter(tried.items()))
    return min(good.items(), key=lambda item: item[1][1])


def tuned(case: Case) -> list[str]:
    """The cuts of this case, quickest first."""
    rows = []
    for name, call in case.cuts.items():
        times = attempted(call)
        if isinstance(times, str):
            rows.append((float("inf"), f"    {name}: {times}"))
            continue
        error = case.check(call())
        rows.append(
            (times[1], f"    {name}: {times[1]:.1f} us{'' if error < case.tolerance else f'  WRONG by {error:.1e}'}")
        )
    rows.sort(key=lambda row: row[0])
    shown = (
        rows[:6] + ([row for row in rows[6:] if "WRONG" in row[1]][:3]) + [row for row in rows if row[0] == float("inf")][:2]
    )
    return [text for _, text in shown]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", default=[], help=f"of {', '.join(KERNELS)}; all if none is named")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--commit", help="what is measured, where there is no repository to ask")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch._dynamo.config.cache_size_limit = 1000
    begun = time.perf_counter()
    rows = [
        "| kernel | shape | µs p20/p50/p80 | compiled reference | composition | batch gradient | reference / kernel | TFLOP/s |",
        "|-|-|-|-|-|-|-|-|",
    ]
    print("\n".join(rows), flush=True)
    for name in options.kernels or KERNELS:
        for case in KERNELS[name]():
            try:
                error = case.check(case.run())
                p20, p50, p80 = measured(case.run)
            except Exception as failure:
                print(f"| {name} | {case.shape} | FAILED {type(failure).__name__}: {str(failure)[:500]} |", flush=True)
                torch.cuda.synchronize()
            else:
                of_reference, (best, of_best) = attempted(compiled(case.reference)), best_composition(case)
                of_floor = attempted(case.floor) if case.floor else "-"
                shown = [t if isinstance(t, str) else f"{t[1]:.1f}" for t in (of_reference, of_best, of_floor)]
                ratio = "-" if isinstance(of_reference, str) else f"{of_reference[1] / p50:.2f}×"
                wrong = "" if error < case.tolerance else f" WRONG by {error:.1e}"
                rows.append(
                    f"| {name} | {case.shape}{wrong} | {p20:.1f}/{p50:.1f}/{p80:.1f} | {shown[0]} | {shown[1]} ({best}) "
                    f"| {shown[2]} | {ratio} | {case.flops / p50 * 1e-6:.0f} |"
                )
                print(rows[-1], flush=True)
            if options.tune:
                print("\n".join(tuned(case)), flush=True)
            del case
            torch.cuda.empty_cache()
    seconds = time.perf_counter() - begun
    print(f"{seconds:.0f} s")
    if not options.kernels:
        asked = ["git", "rev-parse", "--short", "HEAD"]
        commit = options.commit or subprocess.run(asked, capture_output=True, text=True, check=False).stdout
        RESULT.write_text(
            f"`python benchmarks/kernels.py`, commit {commit.strip() or 'unknown'}: {torch.cuda.get_device_name()}, torch "
            f"{torch.__version__}, triton {sys.modules['triton'].__version__}. Microseconds of one call as a CUDA graph, the L2 "
            "cache flushed before; FLOPs are those of the whole products (a Gram matrix's mirror half counted).\n\n"
            + "\n".join(rows)
            + "\n"
        )


if __name__ == "__main__":
    main()
