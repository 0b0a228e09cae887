"""Tensors put back as they were, where code has to run twice that writes to them."""

from collections.abc import Iterable

import torch
from torch import Tensor


class Undo:
    """Remembers tensors; called, it puts back those that were written to since.

    >>> t = torch.zeros(2)
    >>> undo = Undo([t])
    >>> _ = t.add_(1)
    >>> undo()
    >>> t.tolist()
    [0.0, 0.0]
    """

    def __init__(self, tensors: Iterable[Tensor]):
        self._before = [(t, t._version, t.detach().clone()) for t in tensors if not t.is_inference()]

    def __call__(self) -> None:
        with torch.no_grad():
            for t, version, before in self._before:
                if t._version != version or _differs(t, before):
                    t.copy_(before)


def _differs(t: Tensor, before: Tensor) -> bool:
    """Whether a tensor was written to through its `.data`, of which no version tells; NaN is what NaN was."""
    if type(t) is not Tensor or t.layout is not torch.strided or t.is_meta or torch.equal(t, before):
        return False
    return not bool(((t == before) | ((t != t) & (before != before))).all())
