"""Per-sample gradients checked against truth: a few samples run alone through the plain model."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from samplewise.errors import SamplewiseError
from samplewise.intercept import paused
from samplewise.kept import Kept, WriteError
from samplewise.opening import capture
from samplewise.samples import Layout
from samplewise.still import Still, attributes_put_back, same_randomness, twin
from samplewise.verification.alone import fresh, run_alone
from samplewise.verification.comparing import compared
from samplewise.verification.outputs import backward_from, outputs_of, refuse_mixed
from samplewise.verification.table import Verification


def verify(
    model: nn.Module,
    *args: Any,
    batch_size: int | None = None,
    batch_dim: int = 0,
    sample_ids: Tensor | None = None,
    **kwargs: Any,
) -> Verification:
    """How well per-sample gradients of `model(*args, **kwargs)` agree with those of samples run alone.

    Random state, buffers and gradients are left as they were; dropout is held still. Raises where samples mix or cannot
    be told apart.

    >>> verify(nn.Linear(2, 3), torch.ones(4, 2)).is_right
    True
    """
    return verified(model, args, kwargs, {"batch_size": batch_size, "batch_dim": batch_dim, "sample_ids": sample_ids})


def verified(
    module: nn.Module, args: tuple, kwargs: dict, options: dict[str, Any], marks: dict[int, Layout] | None = None
) -> Verification:
    """What two samples, the first and the last, show: the batch is run captured, and each of them alone.

    `options` are those of `capture`; `marks`, by the id of an argument, say where samples lie in it if that is known already.
    A forward that writes to its parameters is run on copies of them, or it would change the model as often as it is run.
    """
    try:
        return _verified(module, args, kwargs, options, marks or {}, own_parameters=False)
    except WriteError:
        pass
    try:
        return _verified(module, args, kwargs, options, marks or {}, own_parameters=True)
    except WriteError as error:
        raise SamplewiseError(
            f"forward writes to a parameter ({error}) by a reference of its own to the model, so that it cannot be run on a copy and "
            "was not verified. Write to parameters outside of forward, or turn the check off: capture(model, verify=False)."
        ) from error


def _verified(
    module: nn.Module, args: tuple, kwargs: dict, options: dict[str, Any], marks: dict[int, Layout], *, own_parameters: bool
) -> Verification:
    copies: list[tuple[Tensor, Layout]] = []

    @torch.enable_grad()
    def copied(t: Tensor) -> Tensor:
        own = t.detach().clone().requires_grad_(t.requires_grad)  # code may ask for its gradient
        own = own if t.is_leaf else own.clone()  # what was computed may be changed in place
        if id(t) in marks:
            copies.append((own, marks[id(t)]))
        return own

    args, kwargs = tree_map_only(Tensor, copied, (args, kwargs))
    twins = lambda: twin(module, own_parameters=own_parameters)
    with attributes_put_back(module), Kept(module.parameters()) as kept, Still(), torch.enable_grad():
        model = twins()
        with capture(model, verify=False, **options) as grads:
            for t, layout in copies:
                grads.marks.set(t, layout)
            grads.mark_inputs(args, kwargs)
            if grads.batch_size == 0:
                raise ValueError("a batch without samples shows nothing. Give one of two samples or more.")
            samples = tuple(sorted({0, (grads.batch_size or 1) - 1}))
            own, named = tree_map(fresh, (args, kwargs))
            with same_randomness(module):
                out = model(*own, **named)
            kept.check()
            refuse_mixed(out, grads)
            with paused():
                alone = {b: run_alone(b, twins(), grads, args, kwargs) for b in samples}
            kept.check()
            outputs = outputs_of(out, grads, {b: one.outputs for b, one in alone.items()})
            backward_from(outputs, grads)
        return compared(grads, outputs, alone)
