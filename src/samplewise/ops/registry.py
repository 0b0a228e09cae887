"""Rules: for an op in which a parameter meets data, how the gradient of its result becomes factors."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from samplewise.factors.base import Factor
from samplewise.fold import Fold
from samplewise.samples import Layout

FactorOf = Callable[..., Factor]
"""(g, *kept) → the factor of one weight; g is the gradient that backward brings."""
Spread = Callable[[Tensor], Tensor]
"""A weight → the same numbers in the shape of what it meets."""


@dataclass
class Use:
    """One op call meeting one weight."""

    weight: Tensor
    factor_of: FactorOf
    keep: tuple[Tensor, ...] = ()


@dataclass
class Gated:
    """One weight that an op call takes spread out."""

    source: Tensor
    spread: Spread
    factor_of: FactorOf


@dataclass(frozen=True)
class Note:
    """How one use of a parameter was understood."""

    op: str
    how: str
    """By which rule: "rule", "elementwise", "generic" or "foreign"."""
    layout: Layout
    dtype: torch.dtype
    """In which the op gave its result."""


note_of = lru_cache(maxsize=1024)(Note)
"""The Note of these, one object for all uses alike."""


class Taps(Protocol):
    """Puts taps and gates into the graph, as `intercept.Intercept` does."""

    def tap(self, meeting: "Meeting", t: Tensor) -> Tensor: ...
    def gate(self, meeting: "Meeting", gated: Gated) -> Tensor: ...


@dataclass
class Meeting:
    """One op call in which weights meet data, as its rule sees it.

    The rule runs the op on `plain` weights, which need no gradient, and says with `use` what each weight gets from the
    gradient of the result. Where a rule would rather have the gradient of the weight itself, spread out to the shape of
    the result, it lets the op `run` on a `gate`.
    """

    name: str
    func: Callable
    args: tuple
    kwargs: dict[str, Any]
    layouts: dict[int, Layout]
    """The samples of each tensor of data, by its id."""
    weight_ids: set[int]
    """The ids of the weights."""
    taps: "Taps"
    how: str = "rule"
    uses: list[Use] = field(default_factory=list)
    gates: dict[int, Gated] = field(default_factory=dict)
    """Weights that `run` puts spread out in their places, by id."""
    marks: list[Layout] | None = None
    ran: Callable | None = None
    """What `run` ran, and what that gave."""
    results: tuple = ()

    @property
    def first_layout(self) -> Layout:
        return next(iter(self.layouts.values()))

    def layout_of(self, t: Tensor) -> Layout | None:
        """The samples of an argument; None if it does not depend on the batch."""
        return self.layouts.get(id(t))

    def is_weight(self, t: Any) -> bool:
        return id(t) in self.weight_ids

    def gate(self, weight: Tensor, source: Tensor, spread: Spread, factor_of: FactorOf) -> None:
        """`run` takes `spread(source)` for the weight, and what gradient that gets is handed to `factor_of` for `source`."""
        self.gates[id(weight)] = Gated(source, spread, factor_of)

    def tap(self, t: Tensor) -> Tensor:
        """`t` again, whose gradient goes to the uses so far; for a rule that taps something else than its result."""
        return self.taps.tap(self, t)

    def marked(self, results: list[Tensor], layouts: list[Layout]) -> tuple[Tensor, ...]:
        """The results of a rule that knows their layouts itself."""
        self.marks = layouts
        return tuple(results)

    def plain(self, t: Any) -> Any:
        """`t`, without gradient if it is a weight."""
        return t.detach() if id(t) in self.weight_ids else t

    def run(self, func: Callable | None = None) -> Any:
        """The result of the op, or of `func` in its place, of the same arguments with weights that need no gradient, or gated.

        A rule that takes all it keeps from the arguments and from what this gives is not asked again for calls alike.
        """
        self.ran = func or self.func
        out = self.ran(*map(self._taken, self.args), **{k: self._taken(v) for k, v in self.kwargs.items()})
        self.results = out if isinstance(out, tuple) else (out,)
        return out

    def _taken(self, a: Any) -> Any:
        """What `run` takes for an argument."""
        if type(a) in (list, tuple):
            return type(a)(map(self._taken, a))
        return self.taps.gate(self, self.gates[id(a)]) if id(a) in self.gates else self.plain(a)

    def is_data(self, t: Any) -> bool:
        return id(t) in self.layouts

    def layout(self, t: Tensor) -> Layout:
        return self.layouts[id(t)]

    def rows(self, t: Tensor, *, features: int) -> Fold | None:
        """How `t` folds into [B, T, *features]; None if samples change along a feature."""
        layout = self.layout(t)
        return None if any(d >= t.ndim - features for d in layout.dims) else layout.fold(features)

    def use(self, weight: Any, factor_of: FactorOf, *, keep: tuple[Tensor, ...] = ()) -> None:
        """`weight` gets `factor_of(g, *keep)`; nothing happens if it is not a weight (frozen, absent)."""
        if id(weight) in self.weight_ids:
            self.uses.append(Use(weight, factor_of, keep))


Rule = Callable[..., Any]
RULES: dict[Callable, Rule] = {}


def rule(*funcs: Callable) -> Callable[[Rule], Rule]:
    """Registers a rule for these functions: called as `rule(meeting, *args, **kwargs)`, it returns the op's result, or
    NotImplemented to leave the call to the generic rule.
    """

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(funcs, function))
        return function

    return register


EXPANSIONS: dict[Callable, Rule] = {}


def expansion(*funcs: Callable) -> Callable[[Rule], Rule]:
    """Registers for these functions how to write them in ops that have rules: called like a rule, but watched."""

    def register(function: Rule) -> Rule:
        EXPANSIONS.update(dict.fromkeys(funcs, function))
        return function

    return register
