"""Questions about the gradients of a batch: joins the uses of each parameter, asks the factors, puts the answers together."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor, nn

from samplewise.capture import Capture
from samplewise.errors import SamplewiseError
from samplewise.factors.base import Factor
from samplewise.factors.total import join
from samplewise.plan import Rates


class Grads(Capture):
    """The per-sample gradients of one batch, by parameter name.

    Entered as a context it records; afterwards (or inside, after backward) it answers. Parameters that took no part in
    the loss are absent, as their `.grad` would be None.
    """

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.parameters if name in self._factors)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return self._aliases.get(name) in self._factors  # type: ignore[call-overload]

    def __getitem__(self, name: str) -> "ParameterGrads":
        if name not in self:
            known = "took no part in the loss" if name in self._aliases else "is not a captured parameter"
            raise KeyError(f"{name!r} {known}; there are gradients for {list(self)}")
        return ParameterGrads(self, self._aliases[name])

    def materialize(self) -> dict[str, Tensor]:
        """{name: G} with G[b] the gradient of sample b, shape [B, *shape]."""
        return {name: self[name].materialize() for name in self}

    def norms(self) -> Tensor:
        """n with n[b] = ‖gradient of sample b over all captured parameters‖, shape [B], in float32 or better."""
        return self._added([self[name]._sq_norms() for name in self]).sqrt() * self._factor_scale

    def plan(self) -> str:
        """A table of the route that each use takes, with the FLOPs, the bytes held and the predicted time that were weighed.

        gram: norms from products of positions; direct: from gradients built a few samples at a time; build: all gradients
        built once, in place of what they are made of. A star marks a route that `capture(plan=...)` pinned.
        """
        return self._planner.table()

    def weighted_sum(self, w: Tensor) -> dict[str, Tensor]:
        """{name: sum_b w[b] G[b]}, each like its parameter; a sample with w[b] = 0 is left out, even if it is NaN."""
        keep, w = self._kept(w)
        return {name: self[name]._weighted_sum(keep, w) for name in self}

    def clipped_sum(self, *, max_norm: float) -> dict[str, Tensor]:
        """{name: sum_b min(1, max_norm / ‖G[b]‖) G[b]}, each like its parameter.

        The norm is taken over all captured parameters. A sample whose norm is inf or NaN is left out.

        >>> model = nn.Linear(2, 1, bias=False)
        >>> with capture(model) as grads:
        ...     grads.backward(model(torch.tensor([[3.0, 4.0], [0.0, 0.5]])).squeeze(1))
        >>> grads.clipped_sum(max_norm=1.0)["weight"]
        tensor([[0.6000, 1.3000]])
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm must be positive, got {max_norm}")
        norms = self.norms()
        coefficients = torch.where(norms > max_norm, max_norm / norms, 1.0)
        return self.weighted_sum(torch.where(norms.isfinite(), coefficients, 0.0))

    def dots(self, direction: Mapping[str, Tensor]) -> Tensor:
        """d with d[b] = <direction, gradient of sample b>, shape [B], in float32 or better.

        `direction` gives a tensor like the parameter for some or all captured parameters: a validation gradient, a
        momentum, the sum of another capture.
        """
        unknown = [name for name in direction if name not in self._aliases]
        if unknown:
            raise KeyError(f"the direction names {unknown}, which are not captured parameters")
        parts = [self[name].dots(direction[name]) for name in direction if name in self]
        return self._added(parts)

    def sum(self) -> dict[str, Tensor]:
        """{name: sum_b G[b]}, each like its parameter: what `.grad` would be."""
        return {name: self[name].sum() for name in self}

    def _added(self, parts: list[Tensor]) -> Tensor:
        """The sum of one answer [B] a parameter."""
        if not parts:
            raise SamplewiseError(
                "no gradient was captured. Run the model and its backward inside the block: with capture(model) as grads: ..."
            )
        dtype = reduce(torch.promote_types, (part.dtype for part in parts), torch.float32)
        return torch.stack([part.to(parts[0].device, dtype) for part in parts]).sum(0)

    def _kept(self, w: Tensor) -> tuple[Tensor | None, Tensor]:
        """The samples with a weight, and their weights; None for all of them."""
        if w.shape != (self.batch_size,):
            raise ValueError(f"one weight a sample: expected shape ({self.batch_size},), got {tuple(w.shape)}")
        w = w.to(torch.promote_types(w.dtype, torch.float32)) * self._factor_scale
        keep = w.nonzero().squeeze(1)
        return (None, w) if len(keep) == len(w) else (keep, w[keep])

    @property
    def _factor_scale(self) -> float:
        return 1.0 if self._scale is None else self._scale

    def _joined(self, name: str) -> Factor:
        for tensor, version in self._versions[name]:
            if tensor._version != version:
                raise SamplewiseError(
                    f"an input or gradient {tuple(tensor.shape)} of parameter {name!r} was changed in place after backward, so "
                    "its per-sample gradients are gone. Ask before changing it, or give the model a copy."
                )
        factors = self._factors[name]
        if len(factors) > 1:
            factors[:] = [join(factors)]
            self._versions[name] += [(t, t._version) for t in factors[0].tensors()]
        return factors[0]


class ParameterGrads:
    """The per-sample gradients of one parameter."""

    def __init__(self, grads: Grads, name: str):
        self._grads, self.name = grads, name
        self._parameter = grads.parameters[name]

    def __repr__(self) -> str:
        factor = self._grads._joined(self.name)
        shape = "x".join(map(str, self._parameter.shape))
        return f"<gradients of {self.name!r} ({shape}) for {factor.num_samples} samples as {type(factor).__name__}>"

    def materialize(self) -> Tensor:
        """G with G[b] the gradient of sample b, shape [B, *shape], in the parameter's dtype."""
        G, scale = self._grads._joined(self.name).materialize(), self._grads._factor_scale
        return (G * scale if scale != 1 else G).to(self._parameter.dtype)

    def of_samples(self, samples: Tensor | Sequence[int]) -> Tensor:
        """G of these samples alone, shape [len(samples), *shape], in the parameter's dtype."""
        factor = self._grads._joined(self.name)
        G = factor.select(torch.as_tensor(samples, device=factor.tensors()[0].device)).materialize()
        return (G * self._grads._factor_scale).to(self._parameter.dtype)

    def norms(self) -> Tensor:
        """n with n[b] = ‖G[b]‖, shape [B], in float32 or better."""
        return self._sq_norms().sqrt() * self._grads._factor_scale

    def dots(self, direction: Tensor) -> Tensor:
        """d with d[b] = <direction, G[b]>, shape [B], in float32 or better."""
        if direction.shape != self._parameter.shape:
            raise ValueError(f"{self.name!r} is {tuple(self._parameter.shape)}, its direction {tuple(direction.shape)}")
        return self._grads._joined(self.name).dots(direction) * self._grads._factor_scale

    def weighted_sum(self, w: Tensor) -> Tensor:
        """sum_b w[b] G[b], like the parameter; a sample with w[b] = 0 is left out."""
        return self._weighted_sum(*self._grads._kept(w))

    def sum(self) -> Tensor:
        """sum_b G[b], like the parameter: what `.grad` would be."""
        factor = self._grads._joined(self.name)
        device = factor.tensors()[0].device
        w = torch.full((factor.num_samples,), self._grads._factor_scale, dtype=torch.float64, device=device)
        return self._weighted_sum(None, w)

    def _sq_norms(self) -> Tensor:
        """sum |G[b]|² but for the scale of the losses."""
        return self._grads._planner.sq_norms(self.name, self._grads._joined(self.name))

    def _weighted_sum(self, keep: Tensor | None, w: Tensor) -> Tensor:
        factor = self._grads._joined(self.name)
        if keep is not None:
            device = factor.tensors()[0].device
            factor, w = factor.select(keep.to(device)), w.to(device)
        if factor.num_samples == 0:
            return torch.zeros_like(self._parameter)
        return self._grads._planner.weighted_sum(factor, w).to(self._parameter.dtype)


def capture(
    model: nn.Module,
    *,
    batch_size: int | None = None,
    batch_dim: int = 0,
    sample_ids: Tensor | None = None,
    loss_reduction: str = "sum",
    params: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    verify: bool = True,
    keep: str = "gradients",
    memory: str | int | float | None = None,
    plan: Mapping[str, str] | None = None,
    rates: Rates | None = None,
) -> Grads:
    """The per-sample gradients of whatever forward and backward of `model` run inside the block.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> with capture(model) as grads:
    ...     losses = model(torch.tensor([[3.0, 4.0], [6.0, 8.0]])).squeeze(1)
    ...     grads.backward(losses)
    >>> grads.norms()
    tensor([ 5., 10.])

    `batch_size`: how many samples; found from the model's inputs if None.
    `batch_dim`: along which dimension of the inputs they lie.
    `sample_ids`: for each row along that dimension the number of its sample, where several rows are of one sample (views
    of one image, rows of one user, packed sequences).
    `loss_reduction`: "sum" if `loss.backward()` is called on a sum of the samples' losses, "mean" if on their mean;
    `grads.backward(losses)` needs no such word.
    `params`, `exclude`: names or patterns ("layers.*.bias") of the parameters to capture, and of those to leave to
    ordinary autograd.
    `verify`: check the first call of its kind against two samples run alone, at about the cost of one more step.
    `keep`: "norms" takes the norms of each parameter as backward passes it and lets everything else go: norms then are the
    only question, at about the memory of plain training.
    `memory`: how much may be built beside what backward leaves, "4GiB", bytes, or a fraction of the device's memory:
    gradients that make answers quicker are then kept. Without it nothing is kept that is larger than what it is made of.
    `plan`: routes pinned by name or pattern, {"layers.*.weight": "gram"}; see `Grads.plan`.
    `rates`: what the device does in a second, for the plan; measured once a process if None.
    """
    return Grads(
        model,
        batch_size=batch_size,
        batch_dim=batch_dim,
        sample_ids=sample_ids,
        loss_reduction=loss_reduction,
        params=params,
        exclude=exclude,
        verify=verify,
        keep=keep,
        memory=memory,
        plan=plan,
        rates=rates,
    )
