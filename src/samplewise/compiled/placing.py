"""Two ops that change no number and tell the compiler where results lie in memory, and what it makes of them.

It keeps what it has compiled on disk, and knows ops by their names alone: these have the digest of this file in theirs, lest code of
another version of it is run.
"""

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from samplewise.compiled.writes import written_by

LAST = torch.channels_last
DIGEST = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]


@torch.library.custom_op(f"samplewise::kept_{DIGEST}", mutates_args=())
def kept(t: Tensor) -> Tensor:
    """A copy of t. Compiled it is t itself, which is then in memory: later uses read it and do not compute it again."""
    return t.clone()


@kept.register_fake
def _(t: Tensor) -> Tensor:
    return torch.empty_like(t)


@torch.library.custom_op(f"samplewise::laid_{DIGEST}", mutates_args=())
def laid(t_BCHW: Tensor, was_last: bool) -> Tensor:
    """A copy, whose strides are those of channels last only if `was_last`. Compiled it is t itself, channels last in any case.

    What follows in the graph was traced with the strides that t had then: a view of channels first need not be one of channels last.
    """
    return t_BCHW.clone(memory_format=LAST if was_last else torch.contiguous_format)


@laid.register_fake
def _(t_BCHW, was_last):
    return torch.empty_like(t_BCHW, memory_format=LAST if was_last else torch.contiguous_format)


KEPT, LAID = kept._opoverload, laid._opoverload


@cache
def tell_the_compiler() -> None:
    """Teaches Inductor what both mean."""
    from torch._inductor.ir import ExternKernel  # imports Triton
    from torch._inductor.lowering import register_lowering

    @register_lowering(KEPT, type_promotion_kind=None)
    def _(t):
        t = _own(t)
        t.realize()
        return t

    @register_lowering(LAID, type_promotion_kind=None)
    def _(t_BCHW, was_last):
        return ExternKernel.require_channels_last(_own(t_BCHW))


def _own(t: Any) -> Any:
    """t itself if nothing else can reach its memory from here on, or nobody will write to it; else a copy.

    The compiler takes what an op gives for new memory, and may have let a later op write to it, or to what the op was given. What the
    graph is given or gives, its caller may write to.
    """
    from torch._inductor.ir import InputBuffer, TensorBox
    from torch._inductor.lowering import clone
    from torch._inductor.virtualized import V

    lowering: Any = V.graph
    node, storage = lowering.current_node, _storage(t)
    if isinstance(getattr(storage, "data", None), InputBuffer):
        return clone(t)
    if not any(map(_writes, lowering.module.graph.nodes)) and all(user.op != "output" for user in node.users):
        return t
    (source,) = node.all_input_nodes
    others = tree_leaves([value for other, value in lowering.env.items() if other is not source])
    is_shared = any(isinstance(value, TensorBox) and _storage(value) is storage for value in others)
    return clone(t) if is_shared or len(source.users) > 1 else t


def _writes(node: Node) -> bool:
    """Whether an op writes to something, or may: of ops that call functions nobody knows."""
    return isinstance(node.target, HigherOrderOperator) or bool(written_by(node))


def _storage(t: Any) -> Any:
    """What the compiler keeps a tensor in, under its views."""
    from torch._inductor.ir import BaseView, TensorBox

    while isinstance(t, TensorBox | BaseView):
        t = t.data
    return t
