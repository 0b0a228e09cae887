"""A graph as torch's compiler makes it, and what it is told for that."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from samplewise.compiled.batches import has_rows
from samplewise.compiled.channels_last import lay_images
from samplewise.compiled.hints import hinted
from samplewise.compiled.replay import values_of
from samplewise.ops import cudnn  # noqa: F401  (registers its ops)

UNSIZED = torch.ops.samplewise.cudnn_steps.default
"""An op whose results are of sizes that only running it tells."""
WITHOUT_VECTORS = 1
"""The width of vectors in code for the CPU. With wider ones the compiler stores whole vectors at the end of a sum whose length is no
multiple: torch 2.11 aborts on depthwise convolutions of one sample, and torch 2.15 still writes past the end, or over the next row,
where sums are tiled (pytorch/pytorch#196681). It also takes code that its cache on disk has for a processor with other vectors."""


def compiled(graph: GraphModule, open_dim: int | None = None) -> Callable[..., list[Tensor]]:
    """The graph compiled for the sizes that it is first run on, or for all sizes that the batch has along `open_dim`."""
    # the compiler would put a product off until it is read: gradients are built as backward passes, and read after it, so that
    # all that they are built from would be kept till then
    settings: dict[str, Any] = {"reorder_for_locality": False}
    computed = [node for node in graph.graph.nodes if node.op == "call_function"]
    if any(node.target is UNSIZED for node in computed):
        settings["size_asserts"] = False
    if any(t.is_cpu for node in computed for t in values_of(node)):
        settings["cpp.simdlen"] = WITHOUT_VECTORS
    told = hinted(graph)
    if lay_images(told):
        settings["force_layout_optimization"] = True
    options: Any = {"fullgraph": True, "options": settings}
    if open_dim is None:
        return as_written(torch.compile(told.forward, dynamic=False, **options))
    made = as_written(torch.compile(told.forward, **options))

    def run(*tensors: Tensor) -> list[Tensor]:
        size = next(t.shape[open_dim] for t in tensors if t.ndim > open_dim)
        rows = [t for t in tensors if has_rows(t, open_dim, size)]
        for t in rows:
            torch._dynamo.maybe_mark_dynamic(t, open_dim)
        return made(*tensors)

    return run


def as_written(compiled: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """The graph without gradients and without autocast: its casts stand in it, where the step has them and nowhere else."""

    @torch.no_grad()
    def run(*tensors: Tensor) -> list[Tensor]:
        with ExitStack() as off:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    off.enter_context(torch.autocast(device, enabled=False))
            return compiled(*tensors)

    return run


def why_not_compiled(error: Exception) -> str | None:
    """What torch's compiler says of its failure, or its code: an op has other strides than it was told. None if it is no such."""
    from torch._dynamo.exc import TorchDynamoException  # slow to import

    is_such = isinstance(error, TorchDynamoException | AssertionError)
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}" if is_such else None
