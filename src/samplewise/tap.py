"""Where gradients leave autograd: the nodes that hand the gradient of an op over to its uses."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from samplewise.errors import UnattributedError
from samplewise.factors.base import Factor
from samplewise.marks import Marks
from samplewise.ops.registry import FactorOf, Note
from samplewise.samples import Layout, Mark
from samplewise.weights import Pull, Weights

Targets = list[tuple[str, Pull]]
"""The parameters behind a weight, and how a factor of the weight becomes one of each."""


class Guard(Protocol):
    """Hears what code does with a batch that its marks do not tell, and says whether a loss is to be believed."""

    def read(self, name: str, mark: Mark, *, is_inside: bool) -> None:
        """The function gave values with this mark to Python, inside of the model or in the code around it."""

    def scaled(self, mark: Mark, numbers: list[float], *, is_inside: bool) -> None:
        """Values with this mark that need a gradient were multiplied with or divided by these numbers."""

    def hid(self, what: str, *, is_inside: bool) -> None:
        """Something took part, `what` in words, by which samples may count for something that marks do not tell."""

    def saw(self, since: int) -> None:
        """All nodes of autograd from this number on were made in sight."""

    def is_of_batch(self, t: Tensor) -> bool:
        """Whether a tensor from outside with a row a sample came with the batch, as labels that were moved to another device."""
        ...

    def met(self, tensors: list[Tensor]) -> None:
        """An op outside of the model, or the model itself, takes these."""

    def check(self, mark: Mark | None, *, num_samples: int, loss_reduction: str, is_weighted: bool) -> None:
        """Raises if backward is not to start from a loss with this mark; `is_weighted` if it is given a gradient."""


class Recorder(Protocol):
    """What receives the factors, as `capture.Capture` does."""

    weights: Weights
    marks: Marks[Mark]
    constants: Marks[bool]
    """Unmarked tensors made inside the block: True if from constants alone, False if from something from outside."""
    batch_size: int | None
    batch_dim: int
    loss_reduction: str
    anchor: Tensor
    """A leaf that every tap and gate hangs on, so that results need a gradient although the weights under them do not."""
    anchor_node: Any
    guard: Guard | None

    @property
    def num_rows(self) -> int | None: ...
    def mark(self, tensor: Tensor) -> Tensor: ...
    def rows_of(self, tensor: Tensor, dim: int) -> Layout: ...

    @property
    def is_inside(self) -> bool:
        """Whether the model is being called."""
        ...

    def deliver(self, targets: Targets, factor: Factor) -> None: ...
    def note(self, targets: Targets, use: Note) -> None: ...
    def check_losses(self, losses: list[tuple[Tensor, Mark | None]], *, is_weighted: bool) -> None: ...


class Tap(torch.autograd.Function):
    """The identity, which hands the gradient of an op's result to the uses of the op's weights.

    What the uses keep goes through autograd, so that changes in place are noticed, hooks see it and it is freed. The
    result aliases y and shares its version counter, so that an op which keeps its own result notices later changes too.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        y: Tensor,
        anchor: Tensor,
        recorder: Recorder,
        uses: list[tuple[Targets, FactorOf, Sequence[int]]],
        kept: list[Tensor],
    ) -> Tensor:
        ctx.handed = recorder, uses
        ctx.save_for_backward(anchor, *kept)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        _, *kept = ctx.saved_tensors  # may recompute a checkpointed forward, which must be seen
        recorder, uses = ctx.handed
        with torch._C.DisableTorchFunction():
            if is_wanted(recorder.anchor_node):
                kept = [t.detach() if t.layout is torch.strided else t.detach().to_dense() for t in kept]
                for targets, factor_of, places in uses:
                    recorder.deliver(targets, factor_of(g, *[kept[i] for i in places]))
        return g, None, None, None, None


class Gate(torch.autograd.Function):
    """A weight spread to the shape of an elementwise op's result; its gradient becomes the factor."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, spread: Tensor, anchor: Tensor, recorder: Recorder, targets: Targets, factor_of: FactorOf
    ) -> Tensor:
        ctx.recorder, ctx.targets, ctx.factor_of = recorder, targets, factor_of
        ctx.save_for_backward(anchor)
        return spread.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        _ = ctx.saved_tensors  # raises in a second backward
        with torch._C.DisableTorchFunction():
            if is_wanted(ctx.recorder.anchor_node):
                ctx.recorder.deliver(ctx.targets, ctx.factor_of(g))
        return (None,) * 5


apply_tap: Any = super(torch.autograd.Function, Tap).apply  # type: ignore[misc]
apply_gate: Any = super(torch.autograd.Function, Gate).apply  # type: ignore[misc]
"""Their `apply` without what torch does there for transforms, in which captured parameters are refused."""


def is_wanted(leaf_node: Any) -> bool:
    """Whether this backward is one that would fill the `.grad` of that leaf, and not `autograd.grad` for something else."""
    if torch.is_grad_enabled():
        raise UnattributedError(
            "backward(create_graph=True) met a captured model: gradients of gradients have parts of their own that are not "
            "seen here. Take the second derivative outside of the capture."
        )
    return torch._C._will_engine_execute_node(leaf_node)
