"""Random numbers of a traced step: each draw stands once in the graph, also where code goes back to it.

A checkpoint runs forward again during backward with the generator as it was, to get the same dropout. In a graph an op that is written
down twice draws twice, so there the second is given the numbers of the first.
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
        torch.rand(1009, device="cpu")  # to a state that no seed of the code's own leads to, as the one of now may be
        self._reached = {_state()}
        self._drawn: dict[bytes, tuple[Any, list[Tensor]]] = {}
        """By the state of the generator: the call that drew from it, and a copy of what it drew."""

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
            self._drawn[state] = call, [t.clone() for t in _tensors(out)]
        elif self._drawn[state][0] != call:
            raise SamplewiseError(
                f"the step cannot be compiled: {func.overloadpacket} draws the numbers that another op has drawn, of another shape or "
                "kind, and a graph would draw others. Take the step op by op: per_sample_step(..., compile=False)."
            )
        else:
            out = _drawn_again(func, args, kwargs, self._drawn[state][1])
        with _disable_current_modes():
            torch.rand((), device="cpu")
        self._reached.add(_state())
        return out


def _draws(func: Any, args: tuple, kwargs: dict) -> bool:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    named = {spec.name: a for spec, a in zip(func._schema.arguments, args, strict=False)} | kwargs
    return not any(named.get(name) == 0 for name in SHARES)


def _drawn_again(func: Any, args: tuple, kwargs: dict, numbers: list[Tensor]) -> Any:
    """The result of a call that draws, with these numbers."""
    if not func._schema.is_mutable:
        return numbers[0].clone() if len(func._schema.returns) == 1 else tuple(t.clone() for t in numbers)
    written = [a for spec, a in zip(func._schema.arguments, args, strict=False) if spec.is_write] or [kwargs["out"]]
    return written[0].copy_(numbers[0])


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, Tensor)]


def _state() -> bytes:
    """Where torch's generator of the CPU stands; a checkpoint puts it back whatever device it is for."""
    with _disable_current_modes():
        return torch.get_rng_state().numpy().tobytes()
