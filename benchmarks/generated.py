"""What torch's compiler writes for a clipped step on an H200, on a machine without one: kernels, launches, bytes.

python benchmarks/generated.py                   the rows of the GPU table, bfloat16, beside plain training
python benchmarks/generated.py --keep generated  and the code, to be read

Steps are traced at full size on tensors without values, and their graphs moved to a GPU that is not there: the code is written and not
run. What it moves is counted, what it takes is not: times need the device. What is pretended are internals of torch, 2.11 and 2.15.
"""

import argparse
import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from gpu_models import ROWS, Batch, Row
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map_only

import samplewise as sw
from samplewise.compiled.channels_last import lay_images
from samplewise.compiled.hints import hinted
from samplewise.compiled.trace import Record, Trace
from samplewise.factors import outer, patches
from samplewise.kernels.backend import DTYPES
from samplewise.plan import CHUNK_BYTES, Rates

H200 = Rates(small=40e12, large=650e12, memory=4e12, latency=0.0)
"""About what the plan measures there."""
GPU = torch.device("cuda", 0)
PROPERTIES = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=141 << 30, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32, shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448, gcnArchName="", L2_cache_size=60 << 20,
)  # fmt: skip


class Written(BaseException):
    """The compiler's code, taken from it before it would run."""


def fake(mode: FakeTensorMode, t: Tensor, device: torch.device) -> FakeTensor:
    return FakeTensor(mode, torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"), device)


def built(row: Row, mode: FakeTensorMode) -> tuple[nn.Module, Batch]:
    """Model and batch at full size, without values; autograd has no stream of a GPU that is not there, so they say the CPU."""
    model, batch = row.built("full", "meta", torch.bfloat16)
    cpu, parameters = torch.device("cpu"), {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = parameters.setdefault(p, nn.Parameter(fake(mode, p, cpu), p.requires_grad))
        for name, t in module._buffers.items():
            if t is not None:
                module._buffers[name] = fake(mode, t, cpu)
    return model, tuple(fake(mode, t, cpu) for t in batch)


@contextlib.contextmanager
def traced_for_a_gpu() -> Iterator[None]:
    """Inside, samplewise takes tensors for CUDA's."""
    has_kernel = lambda *tensors: all(t.dtype in DTYPES and t.numel() > 0 for t in tensors)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Tensor, "is_cuda", True, create=True))
        stack.enter_context(mock.patch.object(Tensor, "is_cpu", False, create=True))
        stack.enter_context(mock.patch.dict(CHUNK_BYTES, cpu=CHUNK_BYTES["cuda"]))
        for module in (outer, patches):
            stack.enter_context(mock.patch.object(module, "has_kernel", has_kernel))
        yield


def graph_of(row: Row, mode: FakeTensorMode, *, is_clipped: bool) -> GraphModule:
    model, batch = built(row, mode)
    step: Any = sw.per_sample_step(
        model, row.loss_fn, lambda grads: grads.clipped_sum(max_norm=1.0), compile=True, verify=False, rates=H200
    )

    def plain(batch: tuple, record: Record, *, verify: bool) -> list[Tensor]:
        parameters = [p for p in model.parameters() if p.requires_grad]
        return list(torch.autograd.grad(row.loss_fn(model, *batch).sum(), parameters))

    with mode, traced_for_a_gpu():
        return Trace(model, step.run if is_clipped else plain, batch, Record()).graph


def moved(graph: GraphModule, mode: FakeTensorMode) -> GraphModule:
    """The graph on the GPU, its parameters and buffers among its inputs."""
    inputs: dict[str, Node] = {}
    for node in list(graph.graph.nodes):
        if node.op == "get_attr":
            value = graph
            for part in str(node.target).split("."):
                value = getattr(value, part)
            node.meta["val"] = value
        node.meta.pop("tensor_meta", None)
        node.meta["val"] = tree_map_only(Tensor, lambda t: fake(mode, t, GPU), node.meta.get("val"))
        if node.op == "get_attr":
            first = next(iter(graph.graph.nodes))
            if str(node.target) not in inputs:
                with graph.graph.inserting_before(first):
                    inputs[str(node.target)] = graph.graph.placeholder(f"attribute_{len(inputs)}")
                inputs[str(node.target)].meta = dict(node.meta)
            node.replace_all_uses_with(inputs[str(node.target)])
            graph.graph.erase_node(node)
        elif node.op == "call_function":
            node.args = torch.fx.node.map_aggregate(node.args, lambda a: GPU if isinstance(a, torch.device) else a)  # type: ignore[arg-type]
            node.kwargs = {k: GPU if isinstance(v, torch.device) else v for k, v in node.kwargs.items()}
    graph.recompile()
    return graph


@contextlib.contextmanager
def pretended() -> Iterator[None]:
    """Inside, torch's compiler believes that there is an H200."""
    import torch._inductor.fx_passes.joint_graph as joint
    import torch._inductor.fx_passes.post_grad as post
    import torch._subclasses.fake_tensor as fakes
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.graph import GraphLowering
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    def write(self: Any, *_: Any) -> None:
        code, _ = self.codegen()
        raise Written(getattr(code, "value", code))

    def answers(**values: Any) -> dict[str, Any]:
        return {name: staticmethod(lambda *_, value=value: value) for name, value in values.items()}

    target = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    state = {"get_rng_state": lambda *_: torch.get_rng_state(), "set_rng_state": lambda *_: None}
    switches = {"_exchange_device": lambda *_: 0, "_maybe_exchange_device": lambda *_: 0, "device": contextlib.nullcontext}
    of_torch = {"get_device_properties": PROPERTIES, "get_device_capability": (9, 0), "current_device": 0, "device_count": 1}
    worker = answers(get_device_properties=PROPERTIES)
    patches = [
        mock.patch.multiple(torch.cuda, **answers(is_available=True, _lazy_init=None, **of_torch), **state, **switches),
        mock.patch.multiple(
            CudaInterface, **answers(is_available=True, current_device=0, get_compute_capability=90), **worker
        ),
        mock.patch.multiple(CudaInterface.Worker, **worker),
        mock.patch.object(driver, "_active", target),
        mock.patch.object(fakes, "init_gpu_context"),
        *(mock.patch.object(module, "lazy_init") for module in (joint, post)),
        mock.patch.object(GraphLowering, "_compile_to_module", write),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def code_of(graph: GraphModule, mode: FakeTensorMode, *, is_clipped: bool) -> str:
    """What the compiler writes; of a clipped step it is told what compiled steps tell it."""
    from torch._inductor.compile_fx import compile_fx

    settings = {"reorder_for_locality": False, "profile_bandwidth": True, "joint_graph_constant_folding": False}
    if is_clipped:
        graph = hinted(graph)
        settings["force_layout_optimization"] = lay_images(graph)
    inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    try:
        with torch.no_grad(), mode, torch._inductor.config.patch(settings):  # type: ignore[attr-defined]
            compile_fx(graph, inputs)
    except Written as written:
        return str(written)
    raise RuntimeError("the compiler wrote nothing")


def line(title: str, step: str, code: str) -> str:
    """What the code holds: its kernels are given with the bytes that each moves."""
    parts = re.split(r"\n(triton_\w+) = async_compile", code)
    gigabytes = {
        name: float(found[1]) if (found := re.search(r"'kernel_num_gb': ([\d.e-]+)", text)) else 0.0
        for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }
    launches = Counter(re.findall(r"^\s+(triton_\w+)\.run\(", code, re.MULTILINE))
    calls = re.findall(r"(extern_kernels|torch\.ops\.aten|torch\.ops\.samplewise)\.\w+[\w.]*\(", code)
    ours = calls.count("torch.ops.samplewise")
    moved = sum(gigabytes[name] * num for name, num in launches.items())
    return f"| {title} | {step} | {len(gigabytes)} | {launches.total()} | {moved:.1f} | {len(calls) - ours} | {ours} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name for name in ROWS if name != "lstm"]  # whose steps are cuDNN's, not the compiler's
    parser.add_argument("--rows", nargs="+", choices=names, default=names, metavar="ROW")
    parser.add_argument("--keep", type=Path, help="a folder for the code")
    options = parser.parse_args()
    print(f"`python benchmarks/generated.py`, torch {torch.__version__}: bfloat16, sizes of the GPU table. Bytes are what")
    print(
        "elementwise kernels and sums read and write; calls are products, convolutions and attention of torch's, then ops of"
    )
    print("samplewise's. Plain is forward and backward in one graph, where torch.compile makes two.\n")
    print("| model | step | kernels | launches | GB | calls of torch | of samplewise |\n|-|-|-|-|-|-|-|")
    for name in options.rows:
        for step in ("plain", "clipped"):
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            graph = graph_of(ROWS[name], mode, is_clipped=step == "clipped")
            with pretended():
                code = code_of(moved(graph, mode), mode, is_clipped=step == "clipped")
            print(line(ROWS[name].title, step, code), flush=True)
            if options.keep is not None:
                options.keep.mkdir(exist_ok=True)
                (options.keep / f"{name}-{step}.py").write_text(code)


if __name__ == "__main__":
    main()
