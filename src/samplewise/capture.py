"""`with capture(model)`: owns the uses of the parameters, from the model's forward to the end of its backward."""

import threading
from collections.abc import Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import _get_current_function_mode_stack

from samplewise.choice import captured_parameters, named_parts
from samplewise.errors import SamplewiseError, UnattributedError
from samplewise.factors.base import Factor
from samplewise.flow.call import tensors_in
from samplewise.intercept import Intercept
from samplewise.losses import check_loss, check_reduction
from samplewise.marked import MarkedBatch
from samplewise.marks import has_memory
from samplewise.plan import Rates
from samplewise.planner import Planner, device_of
from samplewise.samples import Layout, Lost, Mark, Mixed
from samplewise.second import SecondPass
from samplewise.sight import close_eyes, open_eyes
from samplewise.tap import Guard, Targets
from samplewise.tracing import is_tracing
from samplewise.uses import Uses
from samplewise.watching import Watch
from samplewise.weights import Weights


class Capture(MarkedBatch, Uses):
    """Records, for each captured parameter, one factor a use; the arguments are those of `opening.capture`."""

    def __init__(
        self,
        model: nn.Module,
        *,
        batch_size: int | None = None,
        batch_dim: int = 0,
        sample_ids: Tensor | None = None,
        loss_reduction: str = "sum",
        params: Iterable[str] | None = None,
        exclude: Iterable[str] = (),
        verify: bool = True,
        keep: str = "gradients",
        memory: str | int | float | None = None,
        plan: Mapping[str, str] | None = None,
        rates: Rates | None = None,
    ):
        if not isinstance(model, nn.Module):
            raise TypeError(f"capture takes an nn.Module, got {type(model).__name__}")
        if loss_reduction not in ("sum", "mean"):
            raise ValueError(f'loss_reduction is "sum" or "mean", got {loss_reduction!r}')
        if keep not in ("gradients", "norms", "graph"):
            raise ValueError(f'keep is "gradients", "norms" or "graph", got {keep!r}')
        if torch.is_inference_mode_enabled():
            raise SamplewiseError("there are no gradients under torch.inference_mode(). Capture outside of it.")
        parts = named_parts(model)
        scripted = [prefix[:-1] for prefix, module in parts if isinstance(module, torch.jit.ScriptModule)]
        if scripted:
            raise SamplewiseError(
                f"submodule {scripted[0]!r} is a ScriptModule, whose ops cannot be seen from Python. "
                "Capture the module that it was scripted from."
            )
        self.is_traced = is_tracing()
        """Whether it is made while a step is traced, of which it is then the own."""
        self.model = model
        self.loss_reduction, self.verify = loss_reduction, verify
        self._modules = list(dict.fromkeys(module for _, module in parts))
        self.parameters, self._aliases = captured_parameters(model, parts, params, exclude)
        MarkedBatch.__init__(self, batch_size, batch_dim, sample_ids)
        Uses.__init__(self, Planner(memory, plan, rates, device_of(self.parameters)), keep)
        for module in self._modules:
            if module._buffers or module._parameters:
                for t in (*module._buffers.values(), *module._parameters.values()):
                    if t is not None and not t.requires_grad:
                        self.constants.set(t, True)
        self.anchor = torch.zeros((), requires_grad=True, device="cpu")
        self.anchor_node = get_gradient_edge(self.anchor).node
        hooked = [n for n, p in self.parameters.items() if p._backward_hooks or p._post_accumulate_grad_hooks]  # type: ignore[attr-defined]
        if hooked:
            raise SamplewiseError(
                f"parameter {hooked[0]!r} has a gradient hook (register_hook, "
                "register_post_accumulate_grad_hook), which per-sample gradients do not pass. Remove the hook, or leave the "
                "parameter out: capture(model, exclude=[...])."
            )
        self.weights = Weights(self.parameters, self.anchor_node)
        self.guard: Guard | None = None
        """Who is stricter about losses than a capture must be."""
        self._takes_each = False
        """Whether backward starts from one loss a sample, so that there is no reduction to check."""
        self._losses: list[Tensor] = []
        """What second backwards start from."""
        self._began_elsewhere = False
        """Whether a backward began at something else than one loss a sample."""
        self._second: SecondPass | None = None
        self._intercept: Intercept | None = None
        self._handles: list[Any] = []
        self._watch: Watch | None = None
        self._outermost: nn.Module | None = None
        self._since = 0
        """The number of autograd's first node in the present call of the model, or in the last one."""
        self._is_open = False
        self._was_entered = False
        self._memory_written: frozenset[int] = frozenset()
        """Memory that data was written into, when the block has ended."""

    # --- the block ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._was_entered:
            raise SamplewiseError("a capture holds one batch and is entered once. Make a new one: capture(model).")
        for outer in _get_current_function_mode_stack():
            shared = self._shared_with(outer)
            if shared:
                raise SamplewiseError(
                    f"parameter {shared[0]!r} is captured already by a block around this one, which would miss what this one "
                    "takes. Give each its own parameters: capture(model, params=[...])."
                )
        self._was_entered = True
        open_eyes()
        self._watch_modules()
        self._guard_parameters()
        self._is_open = True
        self._intercept = Intercept(self)
        self._intercept.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._intercept is not None
        self._intercept.__exit__(kind, error, trace)
        self._memory_written = self._intercept.marking.written
        self._losses = []
        self._intercept = None  # it holds this capture, and what that holds should be freed without a search for cycles
        self._is_open = False
        self._let_go()
        close_eyes()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: to copy what it holds of autograd and of memory that others own would free that memory twice."""
        raise SamplewiseError(
            "per-sample gradients hold on to their batch, its memory and autograd's graph, so they cannot be copied or pickled. Keep "
            "what they answer (grads.norms(), grads.materialize(), ...), and not the grads where a model is deep-copied or saved."
        )

    def _shared_with(self, mode: Any) -> list[str]:
        if not isinstance(mode, Intercept) or mode.is_paused:
            return []
        theirs = {id(p) for p in mode.weights.parameters.values()}
        return [name for name, p in self.parameters.items() if id(p) in theirs]

    def _let_go(self) -> None:
        if self._watch is not None:
            self._watch.remove()
            self._watch = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _watch_modules(self) -> None:
        """Tensors passed to the model, or to a part of it, from outside are the batch."""
        self._watch = Watch(self, self._modules)

    def entered(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Hears that a module of the model is called."""
        if self._outermost is None and self._is_listening:
            if self.guard is not None:
                self.guard.met(tensors_in((args, kwargs)))
            self._outermost, self._since = module, torch.autograd._get_sequence_nr()
            if self._watch is not None:
                self._watch.hear_only(module)
            self.mark_inputs(args, kwargs)
            if self.verify and self._intercept is not None and torch.is_grad_enabled():
                self._verify(module, args, kwargs)

    def left(self, module: nn.Module) -> None:
        """Hears that a module of the model has returned."""
        if self._outermost is module and self._is_listening:
            self._outermost = None
            if self.guard is not None:
                self.guard.saw(self._since)
            if self._watch is not None:
                self._watch.hear_all()

    @property
    def is_inside(self) -> bool:
        """Whether the model is being called."""
        return self._outermost is not None

    @property
    def _is_listening(self) -> bool:
        if torch._C._current_graph_task_id() != -1:
            return False  # a checkpoint that runs forward again during backward
        return self._intercept is None or not self._intercept.is_paused

    def _refuse_strange(self, inputs: list[Tensor]) -> None:
        if inputs and self._factors and torch.is_grad_enabled():
            raise UnattributedError(
                "the model was called on new inputs after a backward. One capture holds one batch: open one for each "
                "micro-batch and add up what they answer."
            )
        if self._outermost is not self.model and any(self.constants.get(t) is False for t in inputs):
            raise UnattributedError(
                "a part of the model was called on something computed inside the block from a tensor of which it is not "
                "known where its samples lie. Mark that tensor first, grads.mark(tensor), or call the whole model."
            )

    def _guard_parameters(self) -> None:
        """An ordinary gradient on its way to a captured parameter is a use that was not seen."""
        thread = threading.get_ident()

        def guard(name: str, _: Any) -> None:
            if self._intercept is not None and self._intercept.is_paused:
                return
            if self.parameters[name].is_cpu and threading.get_ident() != thread:
                return  # another thread trains the same model; on the CPU, backward stays in its own
            raise UnattributedError(unseen([name]))

        self._handles = [node.register_prehook(partial(guard, name)) for name, node in self.weights.nodes.items()]

    def _verify(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Checks the call against truth if it is the first of its kind; nothing that this runs is recorded."""
        from samplewise.verification.first_use import verify_first_use  # it captures, so it stands above this

        watching = [
            mode for mode in _get_current_function_mode_stack() if isinstance(mode, Intercept) and not mode.is_paused
        ]
        for mode in watching:
            mode.is_paused = True
        try:
            verify_first_use(self, module, args, kwargs)
        finally:
            for mode in watching:
                mode.is_paused = False

    # --- backward ----------------------------------------------------------------------------------------------------

    def backward(self, losses: Tensor) -> None:
        """Backward from one loss a sample, shape [B]: no reduction, so nothing to get wrong.

        Per-sample gradients are those of `losses[b]`. Serves losses that average over a sample's own tokens, whatever
        their number.
        """
        if not losses.requires_grad:
            raise SamplewiseError(
                "the losses need no gradient: they were computed under torch.no_grad(), from detached values, or all parameters that "
                "they are made of are frozen."
            )
        mark = self.marks.get(losses)
        check_loss(mark, None)
        in_order = mark is None or (isinstance(mark, Layout) and mark.fold(0).axis == 0)
        by_row = self.sample_ids is not None and losses.shape == (self.num_rows,)
        if not by_row and (losses.shape != (self.batch_size,) or not in_order):
            raise UnattributedError(
                f"grads.backward takes one loss a sample, shape ({self.batch_size},) in the order of the batch, "
                f"got {tuple(losses.shape)}{' summed over samples' if isinstance(mark, Mixed) else ''}. Use reduction='none' and "
                "sum what belongs to one sample."
            )
        self._set_scale(1.0)
        self._takes_each = True
        try:
            losses.sum().backward(retain_graph=self.keep == "graph")
        finally:
            self._takes_each = False
        if self.keep == "graph":
            self._losses.append(losses)

    def check_losses(self, losses: list[tuple[Tensor, Mark | None]], *, is_weighted: bool) -> None:
        """Raises if a value that backward starts from is not made of separate samples, or not as `loss_reduction` says."""
        for loss, mark in losses:
            if mark is None and self.weights.is_data(loss):
                mark = Lost("code that was not seen")
            check_loss(mark, None if self._takes_each else self.loss_reduction)
            reduction = "sum" if self._takes_each else self.loss_reduction
            is_outermost = torch._C._current_graph_task_id() == -1  # not within a backward, by a checkpoint
            if mark is not None and is_outermost and not self._takes_each and self._second is None:
                self._began_elsewhere = True
            if self.guard is None and not self._takes_each:
                check_reduction(mark, reduction)
            elif self.guard is not None and is_outermost:
                self.guard.check(mark, num_samples=self.batch_size or 0, loss_reduction=reduction, is_weighted=is_weighted)

    def deliver(self, targets: Targets, factor: Factor) -> None:
        """Takes the factor of one use."""
        if not self._is_open:
            raise UnattributedError(
                "backward ran after the capture block had ended. Call it inside: with capture(model) as grads: ..."
            )
        if self._second is not None:
            self._second.take(targets, factor)
            return
        self._keep_use(targets, factor, default_scale=float(self.batch_size or 0) if self.loss_reduction == "mean" else 1.0)

    def took_in(self, t: Tensor) -> bool:
        """Whether data of the batch was written into this tensor, or into its memory; asked after the block."""
        return self.marks.get(t) is not None or (has_memory(t) and t.untyped_storage()._cdata in self._memory_written)


def unseen(names: Iterable[str]) -> str:
    return (
        f"an ordinary gradient reached captured parameter {', '.join(map(repr, sorted(names)))}: it was used where samplewise "
        "does not see it (a custom autograd.Function, compiled or scripted code, another thread, a reentrant checkpoint that "
        "returns a value of parameters alone: use_reentrant=False), or on a tensor that is not known to hold samples. Mark "
        "such a tensor, grads.mark(tensor), or leave the parameter out: "
        "capture(model, exclude=[...])."
    )
