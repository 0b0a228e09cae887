"""Questions about the gradients of a batch: asks the parameters one by one, and puts their answers together."""

from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any, overload

import torch
from torch import Tensor

from samplewise.answers import Answers, clipping, normalizing
from samplewise.choice import Groups, grouped
from samplewise.errors import SamplewiseError
from samplewise.held import Held
from samplewise.parameter import kept, runs, scaled_by, sq_size
from samplewise.projections import Projector, projector_of
from samplewise.samples import Layout
from samplewise.second import SecondPass
from samplewise.tracing import is_tracing
from samplewise.unwatched import unwatched


class Grads(Held, Answers[dict[str, Tensor]]):
    """The per-sample gradients of one batch, by parameter name.

    Entered as a context it records; afterwards (or inside, after backward) it answers. Parameters that took no part in
    the loss are absent, as their `.grad` would be None.
    """

    @unwatched
    def materialize(self) -> dict[str, Tensor]:
        """{name: G} with G[b] the gradient of sample b, shape [B, *shape]."""
        return {name: self[name].materialize() for name in self}

    @overload
    def stream(self, *, samples: None = None, keep: bool = False) -> Iterator[tuple[str, Tensor]]: ...

    @overload
    def stream(self, *, samples: int, keep: bool = False) -> Iterator[tuple[slice, dict[str, Tensor]]]: ...

    def stream(self, *, samples: int | None = None, keep: bool = False) -> Iterator[tuple[Any, Any]]:
        """(name, G) for one parameter after the other; or, for runs of so many samples, (which samples, {name: their G}).

        What has been handed out is freed: a parameter's factor when the next one is asked for, or all at the end of a
        stream of samples. A question about it later raises; `keep=True` keeps everything.
        """
        if samples is None:
            for name in list(self):
                yield name, self[name].materialize()
                self._release([] if keep else [name])
            return
        for run in runs(self.batch_size or 0, samples):
            yield run, {name: self[name]._scaled(self._joined(name).select(run).materialize()) for name in self}
        self._release([] if keep else list(self))

    @overload
    def sq_norms(self, *, groups: None = None) -> Tensor: ...

    @overload
    def sq_norms(self, *, groups: Groups) -> dict[str, Tensor]: ...

    @unwatched
    def sq_norms(self, *, groups: Groups | None = None) -> Tensor | dict[str, Tensor]:
        """n with n[b] = sum |G[b]|² over all captured parameters, shape [B]; {group: n} with `groups`, as in `norms`."""
        if groups is None:
            return self._added(self._planner.sq_norms_of_all(self._all_joined())) * self._factor_scale**2
        of = {name: self[name].sq_norms() for name in self}
        none = torch.zeros_like(self._added(list(of.values())))
        return {
            group: self._added([of[name] for name in names if name in of] or [none])
            for group, names in grouped(self._aliases, groups).items()
        }

    @overload
    def norms(self, *, groups: None = None) -> Tensor: ...

    @overload
    def norms(self, *, groups: Groups) -> dict[str, Tensor]: ...

    @unwatched
    def norms(self, *, groups: Groups | None = None) -> Tensor | dict[str, Tensor]:
        """n with n[b] = ‖gradient of sample b over all captured parameters‖, shape [B], in float32 or better.

        `groups`: {group: n} with n over each group's parameters alone. Groups are patterns, one a group; or {group: its
        patterns}; or "layer", one group a module. Every captured parameter is in the first group that matches it.
        """
        if groups is None:
            return self.sq_norms().sqrt()
        return {group: n.sqrt() for group, n in self.sq_norms(groups=groups).items()}

    def routes(self) -> dict[str, str]:
        """{parameter: the route that its norms take}, for those that have a choice; see `plan`."""
        return self._planner.routes()

    def plan(self) -> str:
        """A table of the route that each use takes, with the FLOPs, the bytes held and the predicted time that were weighed.

        gram: norms from products of positions; direct: from gradients built a few samples at a time; build: all gradients
        built once, in place of what they are made of. A star marks a route that `capture(plan=...)` pinned.
        """
        return self._planner.table()

    def weighted_sum(self, w: Tensor) -> dict[str, Tensor]:
        """{name: sum_b w[b] G[b]}, each like its parameter.

        A sample with w[b] = 0 is left out, even if it is NaN; not so if w needs a gradient, which then is that of all samples.
        """
        if self.keep == "graph":  # backward may run a checkpointed forward again, which must be seen
            return self._by_second_backward(*kept(w, self.batch_size))
        return self._sum_of(*kept(w, self.batch_size))

    @unwatched
    def _sum_of(self, keep: Tensor | None, w: Tensor) -> dict[str, Tensor]:
        if len(w) == 0:
            return {name: torch.zeros_like(self.parameters[name]) for name in self}
        dtypes = {name: self.parameters[name].dtype for name in self}
        return self._planner.weighted_sums(self._all_joined(), scaled_by(w, self._factor_scale), keep, dtypes)

    def clipped_sum(self, *, max_norm: float | Mapping[str, float], groups: Groups | None = None) -> dict[str, Tensor]:
        """{name: sum_b min(1, max_norm / ‖G[b]‖) G[b]}, each like its parameter.

        The norm is taken over all captured parameters, or over each of the `groups`, as in `norms`; `max_norm` may then be
        {group: bound}. A sample whose norm, in any group, is inf or NaN is left out.

        >>> from samplewise import capture
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> with capture(model) as grads:
        ...     grads.backward(model(torch.tensor([[3.0, 4.0], [0.0, 0.5]])).squeeze(1))
        >>> grads.clipped_sum(max_norm=1.0)["weight"]
        tensor([[0.6000, 1.3000]])
        """
        if groups is None:
            if isinstance(max_norm, Mapping):
                raise ValueError("max_norm for each group needs the groups: clipped_sum(max_norm={...}, groups={...})")
            return super().clipped_sum(max_norm=max_norm)
        norms = self.norms(groups=groups)
        bounds = max_norm if isinstance(max_norm, Mapping) else dict.fromkeys(norms, max_norm)
        if bounds.keys() != norms.keys():
            raise ValueError(
                f"max_norm has bounds for {sorted(bounds)}, but the groups are {sorted(norms)}: give each group one"
            )
        return self._weighted_by_group(groups, {group: clipping(n, bounds[group]) for group, n in norms.items()})

    def normalized_sum(self, *, eps: float = 0.01, groups: Groups | None = None) -> dict[str, Tensor]:
        """{name: sum_b G[b] / (‖G[b]‖ + eps)}, each like its parameter: AUTO-S (Bu et al., 2023).

        The norm is taken as in `clipped_sum`, and the same samples are left out.
        """
        if groups is None:
            return super().normalized_sum(eps=eps)
        weights = {group: normalizing(n, eps) for group, n in self.norms(groups=groups).items()}
        return self._weighted_by_group(groups, weights)

    @unwatched
    def dots(self, direction: "Mapping[str, Tensor] | Grads") -> Tensor:
        """d with d[b] = <direction, gradient of sample b>, shape [B], in float32 or better.

        `direction` gives a tensor like the parameter for some or all captured parameters: a validation gradient, a
        momentum, the sum of another capture. With another capture itself: [B, C], as `gram`.
        """
        if isinstance(direction, Grads):
            return self.gram(direction)
        unknown = [name for name in direction if name not in self._aliases]
        if unknown:
            raise KeyError(
                f"the direction names {unknown}, which are not captured parameters. Leave them out of it, or capture them: "
                "capture(model, params=[...])."
            )
        parts = [self[name].dots(d) for name, d in self._by_first_name(direction).items() if name in self]
        return self._added(parts) if parts else self.norms().zero_()

    @unwatched
    def gram(self, other: "Grads | None" = None) -> Tensor:
        """K with K[b, c] = <gradient of sample b, gradient of sample c of the other capture, or of this>, shape [B, C].

        In float32 or better. Both captures are of the same parameters, by name.
        """
        other = self if other is None else other
        if other.parameters.keys() != self.parameters.keys():
            differing = sorted(other.parameters.keys() ^ self.parameters.keys())
            raise ValueError(f"{differing} are captured by one of the two only; give both the same params= and exclude=")
        if not len(other):
            raise nothing_captured()
        parts = [self[name].gram(other[name]) for name in self if name in other]
        return self._added(parts or [torch.outer(self.norms(), other.norms()).zero_()])

    def _by_first_name(self, direction: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The direction, each parameter once: a state dict has a tied one under all of its names."""
        by_name: dict[str, Tensor] = {}
        for name, d in direction.items():
            first = self._aliases[name]
            if d.shape != self.parameters[first].shape:
                raise ValueError(f"{name!r} is {tuple(self.parameters[first].shape)}, its direction {tuple(d.shape)}")
            known = by_name.setdefault(first, d)
            if known is not d and not torch.equal(known, d):
                raise ValueError(
                    f"the direction has another tensor for {name!r} than for {first!r}, which are one parameter"
                )
        return by_name

    def sum(self) -> dict[str, Tensor]:
        """{name: sum_b G[b]}, each like its parameter: what `.grad` would be."""
        if self.keep == "graph":
            return self.weighted_sum(torch.ones(self.batch_size or 0))
        return self._sums()

    @unwatched
    def _sums(self) -> dict[str, Tensor]:
        return {name: self[name].sum() for name in self}

    @unwatched
    def second_moment(self) -> dict[str, Tensor]:
        """{name: sum_b |G[b]|² element by element}, each shaped like its parameter, real, in float32 or better."""
        return {name: self[name].second_moment() for name in self}

    @unwatched
    def fisher_diagonal(self) -> dict[str, Tensor]:
        """{name: (1/B) sum_b |G[b]|² element by element}: the diagonal of the empirical Fisher matrix."""
        return {name: self[name].fisher_diagonal() for name in self}

    @unwatched
    def variance(self) -> dict[str, Tensor]:
        """{name: 1/(B-1) sum_b |G[b] - mean|² element by element}, real, in float32 or better."""
        return {name: self[name].variance() for name in self}

    @unwatched
    def project(self, projector: Projector | None = None, *, dim: int | None = None, seed: int = 0) -> Tensor:
        """p with p[b] the projection of the gradient of sample b, shape [B, K], in float32 or better.

        `projector` is one of `Gaussian`, `Rademacher`, `SparseJL` (parameters are added up) or `Kronecker` (they stand side
        by side); `dim=` stands for Rademacher(dim, seed). Inner products are kept in expectation.
        """
        projector = projector_of(projector, dim, seed)
        if not projector.side_by_side:
            return self._added([self[name].project(projector) for name in self])
        parts = {name: self[name].project(projector) for name in self}
        like = self._added([part.sum(1) for part in parts.values()])
        for name in self.parameters.keys() - parts.keys():
            parts[name] = like.new_zeros(len(like), projector.width(self.parameters[name]))
        return torch.cat([parts[name].to(like) for name in self.parameters], 1)

    @unwatched
    def dots_with_sum(self, samples: Tensor | None = None) -> Tensor:
        """d with d[b] = <gradient of sample b, sum of these samples, or all>, shape [B], in float32 or better."""
        return self._added([self[name].dots_with_sum(samples) for name in self])

    def _w_of_losses(self, losses: Tensor, w_B: Tensor) -> Tensor:
        """The weight of each loss; where several rows are of one sample, the losses' mark tells whose they are, not their number."""
        if self.sample_ids is None:
            return w_B
        mark = self.marks.get(losses)
        if isinstance(mark, Layout):
            return w_B[mark.ids.expand(losses.shape).to(w_B.device)]
        return w_B[self.sample_ids.to(w_B.device)] if len(losses) == self.num_rows else w_B

    @unwatched
    def _weighted_by_group(self, groups: Groups, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """{name: sum_b w[b] G[b]} with the weights of its group; a sample without one in some group is left out of all."""
        left_out = reduce(torch.logical_or, (w == 0 for w in weights.values()))
        w_of = {name: weights[group] for group, names in grouped(self._aliases, groups).items() for name in names}
        return {name: self[name].weighted_sum(torch.where(left_out, 0.0, w_of[name])) for name in self}

    @unwatched
    def _norm_of(self, direction: Mapping[str, Tensor]) -> Tensor:
        """|direction| over all parameters that it has."""
        return self._added([sq_size(d) for d in self._by_first_name(direction).values()]).sqrt()

    def _by_second_backward(self, keep: Tensor | None, w: Tensor) -> dict[str, Tensor]:
        """The weighted sum from a backward of the weighted losses, which brings each use's share and lets it go."""
        if not self._losses or self._began_elsewhere:
            raise SamplewiseError(
                'with keep="graph" weighted sums are taken by a second backward: ask inside the block, after '
                "grads.backward(losses), which every backward must be."
            )
        if w.requires_grad:
            raise SamplewiseError(
                'with keep="graph" a weighted sum has no gradient for its weights. Give it w.detach(), or leave out keep="graph".'
            )
        w_B = w if keep is None else w.new_zeros(self.batch_size or 0).index_copy(0, keep, w)
        self._second = second = SecondPass(keep, self.anchor)
        try:
            for losses in self._losses:
                second.run(losses, self._w_of_losses(losses, w_B))
        finally:
            self._second = None
        missed = sorted(name for name in self if second.has_run and second.num_taken[name] != self._num_taken[name])
        if missed:
            raise SamplewiseError(
                f'with keep="graph" weighted sums are taken by a second backward, which did not reach all uses of {missed[0]!r} (a '
                'reentrant checkpoint? use_reentrant=False goes through). Leave out keep="graph".'
            )
        of = {name: (self.parameters[name], second.sums.get(name)) for name in self}
        return {name: torch.zeros_like(p) if total is None else total.to(p.dtype) for name, (p, total) in of.items()}

    def _added(self, parts: list[Tensor]) -> Tensor:
        """The sum of one answer [B] a parameter."""
        if not parts:
            raise nothing_captured()
        dtype = reduce(torch.promote_types, (part.dtype for part in parts), torch.float32)
        parts = [part.to(parts[0].device, dtype) for part in parts]
        return (
            reduce(torch.add, parts) if is_tracing() else torch.stack(parts).sum(0)
        )  # the compiler would copy part by part


def nothing_captured() -> SamplewiseError:
    """What is raised where there is no gradient to ask."""
    return SamplewiseError(
        "no gradient was captured. Run the model and its backward inside the block: with capture(model) as grads: ..."
    )
