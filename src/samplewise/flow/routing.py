"""Arguments that tell an op where elements go or which shape they take, and not what they hold."""

from collections.abc import Callable

import torch
from torch import Tensor

from samplewise.samples import Layout, Lost, Mark, Mixed

PATTERNS = {"to", "type_as", "view_as", "reshape_as", "expand_as", "is_same_size"}
"""Ops whose further tensors only lend their shape or type."""

DISCRETE = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
"""Dtypes of which a value can tell a place."""

ROUTING = set(
    "getitem setitem index_select index_add index_copy index_put gather take_along_dim grouped_mm repeat_interleave "
    "embedding_bag".split()
)
"""Ops with integers that only tell where rows go: these may come from anywhere, without the samples mixing."""

READING = {"getitem", "index_select", "gather", "take_along_dim"}
WRITING = {"setitem", "index_put"}


def routes(name: str, t: Tensor, mark: Mark, args: tuple, mark_of: Callable[[Tensor], Mark | None]) -> bool:
    """Whether this argument of the op only tells where rows go, and is of no one sample.

    Rows that are read from a constant are another matter: which ones a sample gets is then up to the others.
    """
    tells = name in ROUTING and t.dtype in DISCRETE and not (args and t is args[0] and name != "embedding_bag")
    if name in READING and args and not (args[0].requires_grad or isinstance(mark_of(args[0]), Layout)):
        return False
    if name in WRITING and not any(isinstance(a, Tensor) and isinstance(mark_of(a), Layout) for a in args[2:]):
        return False  # which rows are overwritten with a constant is up to all samples
    return tells and isinstance(mark, Mixed | Lost) and mark.discrete
