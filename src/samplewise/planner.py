"""The plan of one capture: which route each use takes, within the memory that the capture may take."""

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import reduce

import torch
from torch import Tensor

from samplewise.factors import stacked, together
from samplewise.factors.base import Factor, mended
from samplewise.plan import ROUTES, Choice, Rates, Use, choose, measured_rates, num_bytes
from samplewise.precision import HALF
from samplewise.tracing import is_tracing


class Planner:
    """Chooses a route for each use as it comes, and remembers what it chose.

    `memory` bounds what is built beside a and g: half for gradients that are kept although a and g are smaller, a quarter
    for the temporaries of a query. Without it nothing is kept that is larger than a and g.
    """

    def __init__(self, memory: str | int | float | None, pins: Mapping[str, str] | None, rates: Rates | None, device: str):
        self.pins, self.rates, self.device = dict(pins or {}), rates, device
        for pattern, route in self.pins.items():
            if route not in ROUTES:
                raise ValueError(f"plan={{{pattern!r}: {route!r}}} names no route; there are {', '.join(ROUTES)}")
        self.memory = None if memory is None else num_bytes(memory, device)
        self._spare = 0 if self.memory is None else self.memory // 2
        self._chunk_bytes = None if self.memory is None else max(1, self.memory // 4)
        self._choices: dict[str, Choice] = {}
        self._of_use: dict[int, Choice] = {}

    def settled(self, name: str, factor: Factor) -> Factor:
        """The factor, or its gradients in its place if they are to be built and kept."""
        use = factor.use()
        if use is None:
            return factor
        choice = self._choose(name, use)
        if choice.route != "build":
            return factor
        if not choice.is_pinned:
            self._spare -= max(0, use.built - use.held)
        return factor.built()

    def sq_norms(self, name: str, factor: Factor) -> Tensor:
        """What the factor's `sq_norms` gives, by the planned route and within the budget."""
        route = self._norm_route(name, factor)
        if self.memory is None or factor.num_samples == 0:
            return factor.sq_norms(route)
        return torch.cat([part.sq_norms(route) for _, part in factor.chunks(self._chunk_bytes)])

    def sq_norms_of_all(self, factors: Mapping[str, Factor]) -> list[Tensor]:
        """Squared norms that add up to those over all these parameters, by few ops and with one look at what is doubtful."""
        if self.memory is not None:
            return [self.sq_norms(name, factor) for name, factor in factors.items()]
        small, others = together.small(factors)
        routes = {name: self._norm_route(name, factor) for name, factor in others.items()}
        stacks, others = stacked.stacks(others, routes) if not is_tracing() else ([], others)
        of_stacks = [stack.hasty_sq_norms(routes[stack.first]) for stack in stacks]
        norms = mended([*of_stacks, *(factor.hasty_sq_norms(routes[name]) for name, factor in others.items())])
        added = [stack.added(n) for stack, n in zip(stacks, norms, strict=False)]
        return [*(part.sq_norms() for part in small), *added, *norms[len(stacks) :]]

    def weighted_sums(
        self, factors: Mapping[str, Factor], w_B: Tensor, keep: Tensor | None, dtypes: Mapping[str, torch.dtype]
    ) -> dict[str, Tensor]:
        """{name: sum_b w[b] G[b]} of the samples `keep`, or all, for which w holds the weights; each in its dtype."""
        small, others = together.small(factors) if self.memory is None else ([], dict(factors))
        sums: dict[str, Tensor] = {}
        for part in small:
            sums |= part.weighted_sums(*_there(w_B, keep, part.device), dtypes)
        there: dict[torch.device, tuple[Tensor, Tensor | None]] = {}
        for name, factor in others.items():
            device = factor.tensors()[0].device
            if device not in there:
                there[device] = _there(w_B, keep, device)
            w, samples = there[device]
            factor = factor if samples is None else factor.select(samples)
            sums[name] = self.weighted_sum(factor, w, rounded=dtypes[name] in HALF).to(dtypes[name])
        return {name: sums[name] for name in factors}

    def weighted_sum(self, factor: Factor, w_B: Tensor, *, rounded: bool = False) -> Tensor:
        """What the factor's `weighted_sum` gives, within the budget."""
        if self.memory is None:
            return factor.weighted_sum(w_B, rounded=rounded)
        return reduce(torch.add, (part.weighted_sum(w_B[samples]) for samples, part in factor.chunks(self._chunk_bytes)))

    def _norm_route(self, name: str, factor: Factor) -> str | None:
        """By which route a factor that was not built gives its norms."""
        use = factor.use()
        if use is None:
            return None
        choice = self._choices.get(name)
        if choice is None or (
            choice.use is not use and choice.use != use
        ):  # joined of several uses, or a selection of samples
            choice = self._choose(name, use)
        costs = choice.costs
        return choice.route if choice.route != "build" else min(("gram", "direct"), key=lambda r: costs[r].seconds)

    def routes(self) -> dict[str, str]:
        """{parameter: the route that it took}."""
        return {name: choice.route for name, choice in self._choices.items()}

    def table(self) -> str:
        """A row a use: its shapes, the route taken, and FLOPs, bytes held and predicted time of every route."""
        rows = [["parameter", "B", "T", "weight", "route", *(f"{r}: GFLOP, MB held, ms" for r in ROUTES)]]
        for name, choice in self._choices.items():
            use = choice.use
            weight = f"{use.O}x{use.I}" if use.G == 1 else f"{use.G}x{use.O}x{use.I}"
            costs = [choice.costs[r] for r in ROUTES]
            weighed = [f"{c.flops / 1e9:.3f}, {c.held / 1e6:.1f}, {c.seconds * 1e3:.2f}" for c in costs]
            rows.append([name, str(use.B), str(use.T), weight, choice.route + "*" * choice.is_pinned, *weighed])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)

    def _choose(self, name: str, use: Use) -> Choice:
        """The choice for a use of this parameter; uses alike are weighed once, unless pins or a budget tell them apart."""
        alike = self._of_use.get(id(use))
        if alike is None or alike.use is not use:
            alike = self._weighed(name, use)
            if not self.pins and self.memory is None:
                self._of_use[id(use)] = alike  # which holds the use, so that the id stays its own
        self._choices[name] = alike
        return alike

    def _weighed(self, name: str, use: Use) -> Choice:
        pinned = next((route for pattern, route in self.pins.items() if fnmatchcase(name, pattern)), None)
        is_half = use.itemsize < 4 and not self.device.startswith("cpu")  # the CPU takes them as float32
        rates = self.rates or measured_rates(self.device, torch.bfloat16 if is_half else torch.float32)
        if is_tracing():
            rates = replace(rates, latency=0.0)  # a compiled op does not pass through Python
        return choose(use, rates, spare=self._spare, pinned=pinned)


def _there(w_B: Tensor, keep: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor | None]:
    return w_B.to(device), None if keep is None else keep.to(device)


def device_of(parameters: Mapping[str, Tensor]) -> str:
    return next((str(p.device) for p in parameters.values()), "cpu")
