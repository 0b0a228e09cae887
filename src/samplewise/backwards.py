"""Somebody's own code in backward, gradient hooks and `autograd.Function`s, followed as forward is."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from samplewise.errors import SamplesMixError
from samplewise.marks import Marks
from samplewise.samples import Layout, Lost, Mark, Mixed
from samplewise.tracing import untraced


def followed_hook(mode: TorchFunctionMode, marks: Marks[Mark], layout: Mark, hook: Callable) -> Callable:
    """The hook of a tensor with this layout; it raises if in what it makes of the gradient samples meet."""

    def followed(g: Tensor) -> Tensor | None:
        marks.set(g, layout)
        if mode in _get_current_function_mode_stack():
            out = hook(g)
        else:  # a backward thread of CUDA
            with mode:
                out = hook(g)
        _refuse_mixed(marks, layout, g if out is None else out, f"a gradient hook on a tensor {tuple(g.shape)}")
        return out

    return followed


def follow(marks: Marks[Mark], name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """From now on the backward of the Function that made these marked outputs raises if samples meet in what it gives data."""
    places = [(k, mark) for k, t in enumerate(inputs) if (mark := marks.get(t)) is not None]
    outputs = [t for t in outputs if t.grad_fn is not None]
    nodes = {get_gradient_edge(t).node for t in outputs}
    layouts: dict[int, Mark] = {t.output_nr: mark for t in outputs if (mark := marks.get(t)) is not None}
    for node in nodes:
        held: list[Tensor] = []

        def enter(gradients: tuple[Tensor | None, ...], held: list[Tensor] = held) -> None:
            for k, g in enumerate(gradients):
                if g is not None and k in layouts:
                    marks.set(g, layouts[k])
                    held.append(g)

        def leave(gradients: tuple[Tensor | None, ...], _: Any, held: list[Tensor] = held) -> None:
            held.clear()
            for k, mark in places:
                g = gradients[k]
                if g is not None and marks.get(g) is not None:  # what leaves torch is left to verification
                    _refuse_mixed(marks, mark, g, f"the backward of {name}")

        node.register_prehook(enter)
        node.register_hook(leave)


@untraced
def _agree(mark: Layout, layout: Layout) -> bool:
    return torch.equal(*torch.broadcast_tensors(mark.ids, layout.ids))


def _refuse_mixed(marks: Marks[Mark], layout: Mark, g: Tensor, where: str) -> None:
    """Raises if `g` does not hold, in each place, a gradient of the sample there and of no other."""
    mark = marks.get(g)
    if isinstance(layout, Layout) and not (isinstance(mark, Layout) and _agree(mark, layout)):
        how = (
            f"{mark.op} combines gradients of several samples" if isinstance(mark, Mixed | Lost) else "samples change places"
        )
        raise SamplesMixError(
            f"in {where}, {how if mark is not None else 'the gradient leaves torch'}, so that a sample may get something of the "
            "others. Per-sample gradients do not exist for it. Let it treat each sample alone and in place, or remove it."
        )
