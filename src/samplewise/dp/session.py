"""Between a batch and its step: opens a capture at the model's forward, closes it at the optimizer's step, adds up what it gave."""

import math
import threading
import weakref
from collections.abc import Callable, Mapping
from glob import escape
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from samplewise.choice import Groups
from samplewise.dp.buffers import Buffers
from samplewise.dp.clipping import Bound, Clipped, clipped
from samplewise.dp.closing import close
from samplewise.dp.losses import Scales, Strict
from samplewise.dp.part import Part
from samplewise.errors import SamplewiseError
from samplewise.opening import capture
from samplewise.queries import Grads

WholeStep = Callable[[Mapping[str, float], tuple], tuple[Tensor, Clipped]]
"""(bounds, batch) → the loss, and the clipped gradients."""


class Session:
    """The clipped gradients of one draw of samples, from the first of its batches to the step."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor], options: dict[str, Any]):
        """`parameters` are those that the optimizer changes, by their first name; `options` those of `capture`."""
        self.model, self.parameters, self._options = model, dict(parameters), options
        self.part: Part | None = None
        """The batch that was handed out and not stepped on yet."""
        self._tensors: list[weakref.ref[Tensor]] = []
        self._is_behind = False
        """Whether a batch was handed out before the one before it was stepped on."""
        self._trains = False
        """Whether this iteration over the loader had a forward with gradients, or a step."""
        self.grads: Grads | None = None
        self._whole: Clipped | None = None
        """What a step taken as a whole (`run`) gave for the batch, in place of a capture."""
        self._is_running = False
        self.sums: dict[str, Tensor] = {}
        self.num_samples = self.num_below = 0
        self.draw: int | None = None
        """The draw that the sums are of."""
        self._trainable: frozenset[str] = frozenset()
        self._scales = Scales()
        self._buffers: Buffers | None = None
        """Those of the model when the batch was handed out."""
        self._thread = 0
        self._handles: list[Any] = []

    # --- what the loader says ----------------------------------------------------------------------------------------

    def received(self, part: Part, batch: Any) -> None:
        """A batch is handed out."""
        waiting = self.grads is not None and len(self.grads) > 0
        self._close()
        if waiting:
            self.drop()
            raise SamplewiseError(
                "backward ran on a batch, and the next one was asked for without optimizer.step(). Steps that are left out by a "
                "look at the data are not private, and draws cannot be added up (a sample may be in both). Call step() after "
                "each backward; with max_physical_batch_size= it moves the parameters when the draw is complete."
            )
        if self.draw is not None and part.draw != self.draw:
            missed, self.draw = self.draw, None
            self.drop()
            raise SamplewiseError(
                f"the last batch of draw {missed} was not stepped on, and draw {part.draw} begins: its gradients would be lost, or "
                "counted in another step. Call optimizer.step() for every batch."
            )
        self._is_behind = self._is_behind or self.part is not None
        self.part, self._buffers = part, Buffers(self.model)
        self._tensors = [weakref.ref(t) for t in tree_leaves(batch) if isinstance(t, Tensor)]

    def completed(self) -> None:
        """The last batch of an epoch was done with."""
        if self.part is not None and self._trains:
            raise SamplewiseError(
                "the last batch of the epoch was left without optimizer.step(), in a loop that trains: steps that are left out by a "
                "look at the data are not private. Call step() for every batch, also for an empty one; to look at data alone, use "
                "torch.no_grad()."
            )

    def ended(self) -> None:
        """The iteration over the loader is over, or was left: what was not stepped on is dropped, and costs nothing."""
        self._close()
        self.part, self._is_behind, self._whole, self._trains = None, False, None, False
        self.drop()

    # --- what the model says -----------------------------------------------------------------------------------------

    def entered(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """A part of the model is called: opens a capture, if gradients are to come of it."""
        if self.grads is not None or self.part is None or self._is_running or not torch.is_grad_enabled():
            return
        self._refuse_behind()
        self._trains = True
        if self.draw is None:
            self._trainable = self.trainable()
        grads = capture(
            self.model,
            params=[escape(name) for name in sorted(self.trainable())],
            batch_size=self.part.num_samples,
            sample_ids=self.part.ids,
            **self._options,
        )
        self._thread = threading.get_ident()
        self.grads = grads.__enter__()
        self.guard(grads)
        self._mark(grads)
        try:
            self.grads.entered(module, args, kwargs)
        except BaseException:
            self._close()
            raise
        # the last of the module's hooks: where forward raises, torch goes over them as they are, and none may go but the last
        self._handles = [module.register_forward_hook(self._left, always_call=True)]

    def guard(self, grads: Grads) -> None:
        """Lets losses be looked at as privacy needs it."""
        grads.guard = Strict(self._scales)

    def _mark(self, grads: Grads) -> None:
        """Labels are of the samples too: a loss that mixes them is seen, as one divided by how many of them count."""
        for t in (t for ref in self._tensors if (t := ref()) is not None):
            if t.ndim > grads.batch_dim and t.shape[grads.batch_dim] == grads.num_rows:
                grads.mark(t)

    def _left(self, module: nn.Module, args: Any, out: Any) -> None:
        for handle in self._handles:
            handle.remove()
        if out is None:  # forward raised
            self._close()

    def trainable(self) -> frozenset[str]:
        """The parameters of the optimizer that need a gradient now."""
        return frozenset(name for name, p in self.parameters.items() if p.requires_grad)

    def aliases(self) -> dict[str, str]:
        """For every name of such a parameter its first name."""
        first = {id(self.parameters[name]): name for name in self.trainable()}
        found = {n: first[id(p)] for n, p in self.model.named_parameters(remove_duplicate=False) if id(p) in first}
        gone = first.keys() - {id(self.parameters[name]) for name in found.values()}
        if gone:
            raise SamplewiseError(
                f"parameter {min(first[key] for key in gone)!r} of the optimizer is not in the model any more: it was replaced (by a "
                "new module, load_state_dict(assign=True)) after make_private. Replace it before."
            )
        return found

    def run(self, step: "WholeStep", bounds: Mapping[str, float], batch: tuple) -> Tensor:
        """The loss of the batch, whose forward, backward and clipping `step` takes in one; nothing of it is left open."""
        if self.part is None:
            raise SamplewiseError(
                "step_on() without a batch of the private loader: every step is for one batch of it, once. Iterate over the loader "
                "that make_private returned."
            )
        self._refuse_behind()
        if self.draw is None:
            self._trainable = self.trainable()
        if self.part.num_samples == 0:
            return torch.full((), math.nan)
        self._is_running = True
        try:
            loss, self._whole = step(bounds, batch)
        finally:
            self._is_running = False
        return loss

    # --- what the step asks ------------------------------------------------------------------------------------------

    def take(self, bounds: Mapping[str, float], groups: Groups | None, eps: float | None) -> bool:
        """Clips and adds the gradients of the batch; True if its draw is complete."""
        part = self.part
        if part is None:
            raise SamplewiseError(
                "step() without a batch of the private loader: every step is for one batch of it, once. Iterate over the loader "
                "that make_private returned, and step once a batch (next(iter(loader)) ends its iteration at once: keep the "
                "iterator)."
            )
        self._refuse_behind()
        self._trains = True
        self._refuse_foreign_gradients()
        if part.num_samples and self._whole is None and (self.grads is None or not len(self.grads)):
            raise SamplewiseError(
                "step() without gradients of the batch: no backward ran since it was handed out, or the loss was not computed by "
                "the private model from it. Call the model, and backward on its loss, before step()."
            )
        if (
            self.grads is not None or self._whole is not None or self.draw is not None
        ) and self.trainable() != self._trainable:
            changed = sorted(self.trainable() ^ self._trainable)
            raise SamplewiseError(
                f"{', '.join(map(repr, changed))} were frozen or unfrozen between the forward of a draw and its step. Do it after "
                "a step that moved the parameters."
            )
        self._trainable = self.trainable()
        grads, found = self._close(), self._whole
        if found is None and grads is not None and part.num_samples:
            found = clipped_of(self.model, grads, bounds, groups, eps)
        assert self._buffers is not None
        self._buffers.refuse_changes(self.model)
        if found is not None:
            self._add(found)
        self._whole = self._buffers = None
        self.draw, self.part = part.draw, None
        return part.is_last

    def drop(self) -> None:
        """Forgets what was added up."""
        self.sums, self.num_samples, self.num_below, self.draw = {}, 0, 0, None

    def _add(self, more: Clipped) -> None:
        for name, total in more.sums.items():
            self.sums[name] = self.sums[name] + total if name in self.sums else total
        self.num_samples += more.num_samples
        self.num_below += int(more.is_below.sum())

    def _close(self) -> Grads | None:
        """Ends the capture, if one is open, and gives it back."""
        if self.grads is None:
            return None
        if self._thread != threading.get_ident():
            raise SamplewiseError("the model's forward and the step ran in different threads. Let one thread run both.")
        grads, self.grads = self.grads, None
        for handle in self._handles:
            handle.remove()
        close(grads)
        return grads

    def _refuse_behind(self) -> None:
        if self._is_behind:
            raise SamplewiseError(
                "a batch of the private loader was left without step(), or the loop takes batches ahead of their steps, so that it "
                "is not known which one this is. Step on every batch, also on an empty one, before the next is asked for."
            )

    def _refuse_foreign_gradients(self) -> None:
        found = [name for name, p in self.parameters.items() if p.grad is not None]
        if found:
            raise SamplewiseError(
                f"parameter {found[0]!r} has a gradient that did not pass clipping: either zero_grad() was not called since the "
                "last step, or a backward ran outside of what is private (on data of another loader, on a loss that does not come "
                "from the model). Such a gradient would reach the parameters without noise."
            )


def clipped_of(
    model: nn.Module, grads: Grads, bounds: Mapping[str, Bound], groups: Groups | None, eps: float | None
) -> Clipped:
    """The one place where gradients of a private model are asked for."""
    kept = [("buffer", *named) for named in model.named_buffers()]
    for kind, name, t in (*kept, *(("parameter", *named) for named in model.named_parameters())):
        if grads.took_in(t):
            raise SamplewiseError(
                f"{kind} {name!r} took in values of the batch in forward: it would carry them without clipping and noise. "
                "Remove such statistics (samplewise.dp.fix replaces those of torch's norms), or do not save them in the model."
            )
    return clipped(grads, bounds, groups=groups, eps=eps)
