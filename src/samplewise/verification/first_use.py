"""The first call of its kind in a capture, verified before it is recorded."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from samplewise.capture import Capture
from samplewise.errors import SamplesMixError
from samplewise.samples import Layout
from samplewise.verification import verified
from samplewise.verification.alone import tensors_of
from samplewise.verification.table import complaint

MAX_KINDS = 16
"""Of calls that differ in integers alone."""
VERIFIED: weakref.WeakKeyDictionary[nn.Module, set] = weakref.WeakKeyDictionary()
"""The kinds of calls of each model that were found right."""


def verify_first_use(recording: Capture, module: nn.Module, args: tuple, kwargs: dict) -> None:
    """Verifies a call that a capture is about to record, unless one of its kind has been verified; raises if it is wrong."""
    B = recording.batch_size
    if B is None or B < 2:
        return
    kind = _kind(recording, module, args, kwargs)
    if kind in VERIFIED.setdefault(module, set()):
        return
    names = {id(p): name for name, p in module.named_parameters()}
    chosen = [names[id(p)] for p in recording.parameters.values() if id(p) in names]
    if not chosen:
        return
    options = {
        "batch_size": B,
        "batch_dim": recording.batch_dim,
        "sample_ids": recording.sample_ids,
        "params": chosen,
    }
    marks = {id(t): mark for t in tensors_of((args, kwargs)) if isinstance(mark := recording.marks.get(t), Layout)}
    result = verified(module, args, kwargs, options, marks)
    if not result.is_right:
        raise SamplesMixError(complaint(result))
    VERIFIED[module].add(kind)


def _kind(recording: Capture, module: nn.Module, args: tuple, kwargs: dict) -> Any:
    """Calls of one kind differ in sizes alone, not in which sizes are 1 or the batch size."""
    B = recording.batch_size
    few = len(VERIFIED.get(module, ())) < MAX_KINDS  # a counter among the arguments would make each call a kind of its own

    def spec(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.dtype, leaf.device, tuple("B" if size == B else min(size, 2) for size in leaf.shape)
        return leaf if isinstance(leaf, bool | str | None) or (few and isinstance(leaf, int)) else type(leaf)

    modules = recording._modules if module is recording.model else module.modules()
    return tuple(map(spec, tree_leaves((args, kwargs)))), _flags(modules), recording.batch_dim, tuple(recording.parameters)


def _flags(modules: Iterable[nn.Module]) -> tuple:
    """For each module its class and number of hooks on its backward, then its attributes that are a flag, a string or None.

    Asked in every step, of 3,400 attributes for 164 modules, so it is a bare loop: 0.24 ms, as comprehensions 0.41 (Xeon).
    """
    found: list[Any] = []
    for module in modules:
        found.append(type(module))
        if module._backward_pre_hooks or module._backward_hooks:
            found.append((len(module._backward_pre_hooks), len(module._backward_hooks)))
        for value in vars(module).values():
            if value is None or value is True or value is False or type(value) is str:
                found.append(value)
    return tuple(found)
