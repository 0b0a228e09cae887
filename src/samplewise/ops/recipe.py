"""What a rule said of one call, for all calls alike: layers and steps repeat."""

import dataclasses
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samplewise.fold import Fold
from samplewise.ops.registry import FactorOf, Meeting, Note, Rule, Spread, note_of
from samplewise.samples import Layout


@dataclass(slots=True)
class Recipe:
    """The uses of a call, with tensors named by their places: arguments, then values of keywords, then results."""

    rule: Rule
    """The rule that said so: another that takes its place is asked itself."""
    run: Callable
    """What stands for the op, on weights that need no gradient; its first result is the op's."""
    note: Note
    """Of its uses."""
    weights: tuple[int, ...]
    """The places of the weights."""
    kept: tuple[int, ...]
    """The places of what the uses keep."""
    uses: tuple[tuple[int, FactorOf, tuple[int, ...]], ...]
    """For each use the place of its weight, how a gradient becomes its factor, and which of `kept` it keeps."""
    gates: tuple[tuple[int, Spread, FactorOf, Note], ...]
    """For each weight that the op takes spread out its place, how it is spread, and how a gradient becomes its factor."""


def recipe_of(rule: Rule, meeting: Meeting, y: Any) -> Recipe | None:
    """What the rule said of this call; None if of another call alike it might say something else.

    The rule must have left it to `Meeting.run` to run the op, and must hold on to no tensor of the call but through `keep`.
    """
    if meeting.ran is None or y is not meeting.results[0]:
        return None
    flat = (*meeting.args, *meeting.kwargs.values())
    tensors = [(place, t) for place, t in enumerate((*flat, *meeting.results)) if isinstance(t, Tensor)]
    places = {id(t): place for place, t in tensors}
    needed = {id(t) for use in meeting.uses for t in (use.weight, *use.keep)} | meeting.weight_ids
    if len(places) != len(tensors) or not needed <= places.keys():
        return None  # one tensor twice, where another call has two; or tensors in lists
    if any(id(gated.source) != weight for weight, gated in meeting.gates.items()):
        return None
    said_of = [use.factor_of for use in meeting.uses]
    said_of += [said for gated in meeting.gates.values() for said in (gated.spread, gated.factor_of)]
    if not all(map(_is_of_shapes, said_of)):
        return None
    weights = tuple(places[weight] for weight in meeting.weight_ids if weight not in meeting.gates)
    kept = list(dict.fromkeys(places[id(t)] for use in meeting.uses for t in use.keep))
    said = tuple(
        (places[id(use.weight)], use.factor_of, tuple(kept.index(places[id(t)]) for t in use.keep)) for use in meeting.uses
    )
    of_dtype = lambda dtype: note_of(meeting.name, meeting.how, meeting.first_layout, dtype)
    gates = tuple(
        (places[weight], gated.spread, gated.factor_of, of_dtype(gated.source.dtype))
        for weight, gated in meeting.gates.items()
    )
    return Recipe(rule, meeting.ran, of_dtype(y.dtype), weights, tuple(kept), said, gates)


PLAIN = (int, float, complex, str, type(None), torch.dtype, Fold, Layout)


def _is_of_shapes(value: Any) -> bool:
    """Whether a function holds on to nothing but numbers, names and where samples lie."""
    if isinstance(value, types.FunctionType):
        held = [cell.cell_contents for cell in value.__closure__ or ()]
        return not value.__defaults__ and not value.__kwdefaults__ and all(map(_is_of_shapes, held))
    if isinstance(value, list | tuple):
        return all(map(_is_of_shapes, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return all(_is_of_shapes(getattr(value, f.name)) for f in dataclasses.fields(value))
    return isinstance(value, PLAIN)
