"""How the samples flow through an op: from the marks of its arguments to the marks of its results.

Ops that only move elements are applied to the sample ids themselves, so that views, permutations and indexing need no
rules of their own. Ops are known by name, one name for `torch.add`, `Tensor.add_` and `+`. What is not known is `Lost`,
and refused where it meets a parameter.
"""

from dataclasses import replace
from typing import Any

import torch

from samplewise.flow.attention import attention
from samplewise.flow.call import Call, Several, is_in_place, tensors_in
from samplewise.flow.handlers import BY_SHAPES, MOVES, handler_of
from samplewise.flow.indexing import indexed
from samplewise.flow.memory import key_of, recalled, remember, shapes_of
from samplewise.flow.mixed import of_mixed
from samplewise.flow.moves import indexed_along
from samplewise.flow.probe import probed
from samplewise.flow.routing import DISCRETE
from samplewise.fold import NO_SAMPLE
from samplewise.samples import Layout, Lost, Mark, Mixed, one_each, same_ids
from samplewise.tracing import untraced


@untraced
def flow(call: Call, key: Any = None) -> Mark | Several | None:
    """The mark of the call's results; remembered where it does not depend on values, as layers and steps repeat.

    `key` tells more of a call in which weights meet data than its flow depends on, if that is to be remembered with it.
    """
    of_flow, meets = _key(call), key is not None
    if of_flow is None:
        return _found(call)
    key = key if meets else of_flow
    known, shapes = recalled(key), shapes_of(call.results or [call.out])
    if known is not None and known.shapes == shapes:
        return known.mark
    mark = _found(call)
    if isinstance(mark, Lost) or call.was_tried or (is_in_place(call.func) and not _stays(call, mark)):
        return mark
    if isinstance(mark, Several):
        mark = Several([one_each(each) if isinstance(each, Layout) else each for each in mark])
    mark = one_each(mark) if isinstance(mark, Layout) else mark
    remember(key, shapes, mark, meets=meets)
    return mark


def _key(call: Call) -> Any:
    """All that the call's flow depends on; None if that may be values."""
    handler = handler_of(call)
    if handler not in BY_SHAPES and handler not in MOVES:
        return None
    marks = {id(t): mark for t, mark in call.marks}
    if not all(isinstance(mark, Layout) for mark in marks.values()):
        return None
    if handler in (indexed, indexed_along) and len(tensors_in((*call.args, *call.kwargs.values()))) > 1:
        return None  # where an index puts rows is in its values
    return key_of(call.func, call.args, call.kwargs, lambda t: marks.get(id(t)))


def _stays(call: Call, mark: Mark | Several | None) -> bool:
    """Whether an op in place left the samples of its first argument where they were, so that no other tensor is concerned."""
    before = next((mark for t, mark in call.marks if t is call.args[0]), None) if call.args else None
    if not isinstance(mark, Layout) or not isinstance(before, Layout):
        return False
    return mark.discrete == before.discrete and same_ids(mark, before)


def _found(call: Call) -> Mark | Several | None:
    """The mark of the call's results, `discrete` where integers alone went into them."""
    mark = _followed(call)
    if not all(mark.discrete or t.dtype in DISCRETE for t, mark in call.marks):
        return mark
    discrete = {id(t) for t, mark in call.marks if mark.discrete}
    if all(t.dtype in DISCRETE or id(t) in discrete for t in tensors_in((*call.args, *call.kwargs.values()))):
        if isinstance(mark, Mixed | Lost):
            return replace(mark, discrete=True)
        if isinstance(mark, Layout) and not mark.discrete:
            return Layout(mark.ids, mark.num_samples, discrete=True)
    return mark


def _followed(call: Call) -> Mark | Several | None:
    """The mark of the call's results: what its handler says, or what trying it out shows."""
    marks = [mark for _, mark in call.marks]
    if any(isinstance(mark, Lost) for mark in marks):
        return next(mark for mark in marks if isinstance(mark, Lost))
    handler = handler_of(call)
    if is_in_place(call.func) and handler in MOVES:
        return Lost(call.name)  # its shape before is gone
    if any(isinstance(mark, Mixed) for mark in marks):
        if call.name == "scaled_dot_product_attention" and all(mark.discrete for mark in marks if isinstance(mark, Mixed)):
            return attention(call)  # a block mask, made of the samples' ids
        return of_mixed(call, is_move=handler in MOVES)
    sample = _only_sample(marks)
    if sample is not None:  # whatever the op does with it
        return Several([call.layout(torch.full([1] * t.ndim, sample, device="cpu")) for t in call.results or [call.out]])
    mark = handler(call) if handler else Lost(call.name)
    if isinstance(mark, Lost):
        call.was_tried = True
        return probed(call)
    return mark


@untraced
def _only_sample(marks: list[Mark]) -> int | None:
    """The sample that all of these are of; None if there are several."""
    ids = [int(mark.ids) if isinstance(mark, Layout) and mark.ids.numel() == 1 else NO_SAMPLE for mark in marks]
    return ids[0] if ids[0] != NO_SAMPLE and len(set(ids)) == 1 else None
