"""Random numbers of a traced step: each draw stands once in the graph, also where code goes back to it.

A checkpoint runs forward again during backward with the generator as it was, to get the same dropout. In a graph an op that is written
down twice draws twice, so there the second is given the numbers of the first. It cannot be seen that its arguments are the same, as
they are in a forward that is run again; so outside of backward that is refused.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from samplewise.errors import SamplewiseError

SHARES = {"p", "dropout", "dropout_p"}
"""Arguments of random ops by which nothing is drawn if they are 0."""


class Draws(TorchDispatchMode):
    """Follows torch's generator, which tensors without values leave as it is: it is moved on by one number for each draw.

    Leaves it elsewhere than it was.
    """

    def __init__(self) -> None:
        super().__init__()
        _draw(1009)  # to a state that no seed of the code's own leads to, as the one of now may be
        self._reached = {_state()}
        self._drawn: dict[bytes, tuple[Any, Any]] = {}
        """By the state of the generator: the call that drew from it, and a copy of what it gave."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():  # torch may hold a lock here, as in `Constants`
            return self._drawn_once(func, args, kwargs) if _draws(func, args, kwargs) else func(*args, **kwargs)

    def _drawn_once(self, func: Any, args: tuple, kwargs: dict) -> Any:
        state, call = _state(), (func, tree_map_only(Tensor, lambda t: (t.shape, t.dtype), (args, kwargs)))
        if state not in self._reached or any(isinstance(a, torch.Generator) for a in tree_leaves((args, kwargs))):
            raise SamplewiseError(
                f"the step cannot be compiled: {func.overloadpacket} draws from a torch.Generator of its own, or from a seed that its "
                "code sets, and a graph would draw other numbers. Draw them before the step and keep them in a buffer, or take the "
                "step op by op: per_sample_step(..., compile=False)."
            )
        if state not in self._drawn:
            out = func(*args, **kwargs)
            self._drawn[state] = call, _copied(out)
        elif self._drawn[state][0] == call and torch._C._current_graph_task_id() != -1:
            out = _drawn_again(func, args, kwargs, self._drawn[state][1])
        else:
            raise SamplewiseError(
                f"the step cannot be compiled: {func.overloadpacket} draws numbers that were drawn before, as code has put the "
                "generator back, and a graph would draw others. Keep the numbers, or take the step op by op: "
                "per_sample_step(..., compile=False)."
            )
        _draw(1)
        self._reached.add(_state())
        return out


def _draws(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether a call draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    specs = func._schema.arguments
    given = {spec.name: spec.default_value for spec in specs if spec.has_default_value()}
    given |= {spec.name: a for spec, a in zip(specs, args, strict=False)} | kwargs
    return not any(given.get(name) == 0 for name in SHARES)


def _drawn_again(func: Any, args: tuple, kwargs: dict, drawn: Any) -> Any:
    """The result of a call in a forward that is run again: what it gave the first time, for the same arguments."""
    if not func._schema.is_mutable:
        return _copied(drawn)
    written = [a for spec, a in zip(func._schema.arguments, args, strict=False) if spec.is_write] or [kwargs["out"]]
    return written[0].copy_(drawn)


def _copied(out: Any) -> Any:
    return tree_map_only(Tensor, Tensor.clone, out)


def _draw(num: int) -> None:
    """Moves torch's generator on, without a trace."""
    with _disable_current_modes():
        torch.rand(num, device="cpu")


def _state() -> bytes:
    """Where torch's generator of the CPU stands; a checkpoint puts it back whatever device it is for."""
    with _disable_current_modes():
        return torch.get_rng_state().numpy().tobytes()
