"""The methods of the GPU benchmark: each makes, of a model, a loss and a batch, a step that gives its answer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

MAX_NORM = 1.0
Gradients = dict[str, Tensor]
LossFn = Callable[..., Tensor]
Step = Callable[[], Any]
Build = Callable[[nn.Module, LossFn, tuple[Tensor, ...]], Step]


@dataclass(frozen=True)
class Method:
    """A step of some library and what it answers."""

    library: str
    answer: str
    """"plain": `.grad`; "clipped": {name: like the parameter}; "norms": [B]; "gradients": {name: [B, *shape]}."""
    build: Build
    compiled: bool = False
    opacus: str = ""
    """"hooks" or "ghost" where the row's changes for Opacus are made to the model first."""

    @property
    def name(self) -> str:
        return self.library if self.answer == "plain" else f"{self.library}, {ANSWERS[self.answer]}"


ANSWERS = {"clipped": "clipped sum", "norms": "norms", "gradients": "gradients"}


def trained(model: nn.Module) -> Gradients:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def clipped_by_hand(grads: Gradients) -> Gradients:
    """{name: sum_b min(1, C / ‖g_b‖) G[b]}, for libraries that give gradients alone.

    >>> clipped_by_hand({"w": torch.tensor([[3.0, 4.0], [0.5, 0.0]])})["w"].tolist()
    [1.100000023841858, 0.800000011920929]
    """
    c_B = (MAX_NORM / norms_by_hand(grads)).clamp(max=1)
    return {name: torch.tensordot(c_B.to(G.dtype), G, dims=1) for name, G in grads.items()}


def norms_by_hand(grads: Gradients) -> Tensor:
    """[B]: ‖g_b‖ over all parameters, in float32 or better."""
    wide = lambda G: torch.promote_types(G.dtype, torch.float32)
    norms = [torch.linalg.vector_norm(G.flatten(1), dim=1, dtype=wide(G)) for G in grads.values()]
    return torch.stack(norms).norm(dim=0)


def then_clipped(build: Build) -> Build:
    """The step of a library that gives gradients, and the clipping by hand."""

    def built(model: nn.Module, loss_fn: LossFn, batch: tuple[Tensor, ...]) -> Step:
        step = build(model, loss_fn, batch)
        return lambda: clipped_by_hand(step())

    return built


# --- plain training -------------------------------------------------------------------------------------------------------------


def plain(mode: str | None) -> Build:
    """zero_grad, forward, backward; with a mode of torch.compile, forward and loss are compiled in it."""

    def build(model: nn.Module, loss_fn: LossFn, batch: tuple[Tensor, ...]) -> Step:
        total = lambda *batch: loss_fn(model, *batch).sum()
        total = torch.compile(total, mode=mode) if mode else total

        def step() -> None:
            model.zero_grad(set_to_none=True)
            total(*batch).backward()

        return step

    return build


# --- samplewise -----------------------------------------------------------------------------------------------------------------

QUERIES: dict[str, Callable[[Any], Any]] = {
    "clipped": lambda grads: grads.clipped_sum(max_norm=MAX_NORM),
    "norms": lambda grads: grads.norms(),
    "gradients": lambda grads: grads.materialize(),
}


class Samplewise:
    """A step and what is to be told of it."""

    rates: ClassVar[Any] = None
    """What the device does in a second, measured while no other process used it; each worker sets it."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, batch: tuple[Tensor, ...], answer: str, compiled: bool):
        import samplewise as sw

        self._step = sw.per_sample_step(model, loss_fn, QUERIES[answer], compile=compiled, rates=self.rates)
        self._batch = batch

    def __call__(self) -> Any:
        return self._step(*self._batch).answer

    def facts(self) -> dict[str, Any]:
        return {name: getattr(self._step, name) for name in ("num_recordings", "why_op_by_op") if hasattr(self._step, name)}


def samplewise(answer: str, compiled: bool) -> Build:
    return lambda model, loss_fn, batch: Samplewise(model, loss_fn, batch, answer, compiled)


# --- peers ----------------------------------------------------------------------------------------------------------------------


def expanded_weights(model: nn.Module, loss_fn: LossFn, batch: tuple[Tensor, ...]) -> Step:
    from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

    parameters = trained(model)

    def step() -> Gradients:
        for p in parameters.values():
            p.grad_sample = None  # type: ignore[attr-defined]
        call = call_for_per_sample_grads(model, batch_size=len(batch[0]), loss_reduction="sum")
        loss_fn(call, *batch).sum().backward()
        return {name: p.grad_sample for name, p in parameters.items()}  # type: ignore[attr-defined]

    return step


def vmap(answer: str, compiled: bool) -> Build:
    """torch.func.vmap(grad(loss of one sample)); compiled is all of it, with the clipping, in one torch.compile."""

    def build(model: nn.Module, loss_fn: LossFn, batch: tuple[Tensor, ...]) -> Step:
        parameters = {name: p.detach() for name, p in trained(model).items()}

        def loss(parameters: Gradients, *sample: Tensor) -> Tensor:
            call = lambda *args: torch.func.functional_call(model, parameters, args)
            return loss_fn(call, *(t.unsqueeze(0) for t in sample)).sum()

        gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, *(0 for _ in batch)))
        ask = gradients if answer == "gradients" else lambda *args: clipped_by_hand(gradients(*args))
        ask = torch.compile(ask) if compiled else ask
        return lambda: ask(parameters, *batch)

    return build


def opacus_hooks(model: nn.Module, loss_fn: LossFn, batch: tuple[Tensor, ...]) -> Step:
    """GradSampleModule, and the clipping of DPOptimizer (no noise, no step)."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    parameters = trained(model)
    wrapped = GradSampleModule(model, batch_first=True, loss_reduction="sum")
    optimizer = DPOptimizer(torch.optim.SGD(parameters.values()), **opacus_options(batch))

    def step() -> Gradients:
        optimizer.zero_grad(set_to_none=True)
        loss_fn(wrapped, *batch).sum().backward()
        optimizer.clip_and_accumulate()
        return {name: p.summed_grad for name, p in parameters.items()}  # type: ignore[attr-defined]

    return step


def opacus_ghost(model: nn.Module, loss_fn: LossFn, batch: tuple[Tensor, ...]) -> Step:
    """GradSampleModuleFastGradientClipping and Opacus's own loss object, whose backward runs twice (no noise, no step)."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    parameters = trained(model)
    wrapped = GradSampleModuleFastGradientClipping(
        model, batch_first=True, loss_reduction="sum", max_grad_norm=MAX_NORM, use_ghost_clipping=True
    )
    optimizer = DPOptimizerFastGradientClipping(torch.optim.SGD(parameters.values()), **opacus_options(batch))

    def step() -> Gradients:
        optimizer.zero_grad(set_to_none=True)
        DPTensorFastGradientClipping(wrapped, optimizer, loss_fn(wrapped, *batch), loss_reduction="sum").backward()
        return {name: p.grad for name, p in parameters.items()}  # type: ignore[misc]

    return step


def opacus_options(batch: tuple[Tensor, ...]) -> dict[str, Any]:
    return {
        "noise_multiplier": 0.0,
        "max_grad_norm": MAX_NORM,
        "expected_batch_size": len(batch[0]),
        "loss_reduction": "sum",
    }


def backpack(model: nn.Module, loss_fn: LossFn, batch: tuple[Tensor, ...]) -> Step:
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad

    parameters = trained(extend(model))

    def step() -> Gradients:
        model.zero_grad(set_to_none=True)
        for p in parameters.values():
            vars(p).pop("grad_batch", None)
        with backpack(BatchGrad()):
            loss_fn(model, *batch).sum().backward()
        return {name: p.grad_batch for name, p in parameters.items()}  # type: ignore[attr-defined]

    return step


METHODS = {
    method.name: method
    for method in (
        Method("plain eager", "plain", plain(None)),
        Method("plain compiled", "plain", plain("default"), compiled=True),
        Method("plain as CUDA graphs", "plain", plain("reduce-overhead"), compiled=True),
        *(Method("samplewise eager", answer, samplewise(answer, False)) for answer in QUERIES),
        *(Method("samplewise compiled", answer, samplewise(answer, True), compiled=True) for answer in QUERIES),
        Method("torch ExpandedWeights", "gradients", expanded_weights),
        Method("torch ExpandedWeights", "clipped", then_clipped(expanded_weights)),
        *(Method("vmap(grad)", answer, vmap(answer, False)) for answer in ("gradients", "clipped")),
        *(Method("vmap(grad) compiled", answer, vmap(answer, True), compiled=True) for answer in ("gradients", "clipped")),
        Method("Opacus hooks", "clipped", opacus_hooks),
        Method("Opacus hooks, changed model", "clipped", opacus_hooks, opacus="hooks"),
        Method("Opacus ghost", "clipped", opacus_ghost),
        Method("Opacus ghost, changed model", "clipped", opacus_ghost, opacus="ghost"),
        Method("BackPACK", "gradients", backpack),
        Method("BackPACK", "clipped", then_clipped(backpack)),
    )
}
