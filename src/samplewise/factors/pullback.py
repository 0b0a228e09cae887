"""Gradients of a parameter that met the data only through a value computed from it (`g * v / v.norm()`, `pos[:T]`)."""

import torch
from torch import Tensor
from torch._C._functorch import _is_vmap_fallback_enabled, _set_vmap_fallback_enabled  # type: ignore[attr-defined]
from torch.autograd.graph import GradientEdge

from samplewise.factors.base import Factor
from samplewise.plan import Use
from samplewise.precision import HALF


class Pullback(Factor):
    """G[b] = Jᵀ derived[b], with J the Jacobian of the derived value in the parameter.

    `edge` and `leaf` are the places of the derived value and of the parameter in the graph of the parameter-only ops, which
    ordinary autograd keeps. `uncounted` are parameters whose values it keeps in a way that does not notice when they are changed.
    """

    is_pulled_back = True

    def __init__(
        self,
        derived: Factor,
        edge: GradientEdge,
        parameter: Tensor,
        leaf: GradientEdge,
        dtype: torch.dtype,
        uncounted: tuple[Tensor, ...] = (),
    ):
        self.derived, self.edge, self.parameter, self.leaf = derived, edge, parameter, leaf
        self.dtype, self.uncounted = dtype, uncounted
        self.num_samples, self.shape = derived.num_samples, tuple(parameter.shape)

    def materialize(self) -> Tensor:
        if self.num_samples == 0:
            return self.parameter.new_zeros(0, *self.shape)
        inner = self.derived.materialize().to(self.dtype)
        try:
            return self._vjp(inner, batched=True)
        except RuntimeError:  # an op without a batching rule: one sample at a time
            return torch.stack([self._vjp(row, batched=False) for row in inner])

    def select(self, samples: Tensor | slice) -> "Pullback":
        return self._of(self.derived.select(samples))

    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.uncounted, *self.derived.tensors())

    def use(self) -> Use | None:
        return self.derived.use()

    def built(self) -> "Pullback":
        return self._of(self.derived.built())

    def elements_per_sample(self) -> int:
        return max(super().elements_per_sample(), self.derived.elements_per_sample())

    def is_complex(self) -> bool:
        return self.parameter.is_complex()

    def weighted_sum(self, w_B: Tensor, *, rounded: bool = False) -> Tensor:
        """Jᵀ is linear, so the weighted sum is taken first and pulled back once.

        Where Jᵀ rounds to half precision it is pulled back sample by sample: a rounded sum of 2,048 ones and one more is 2,064.
        """
        if not rounded and self._rounds():
            return super().weighted_sum(w_B)
        return self._vjp(self.derived.weighted_sum(w_B, rounded=rounded).to(self.dtype), batched=False)

    def joined(self, other: Factor) -> "Pullback | None":
        if not isinstance(other, Pullback) or other.edge != self.edge or other.parameter is not self.parameter:
            return None
        inner = self.derived.joined(other.derived)
        return None if inner is None else self._of(inner)

    def _of(self, derived: Factor) -> "Pullback":
        """The factor of the same parameter for another factor of the derived value."""
        return Pullback(derived, self.edge, self.parameter, self.leaf, self.dtype, self.uncounted)

    def _rounds(self) -> bool:
        """Whether a gradient passes half precision on its way to the parameter."""
        seen, stack = set(), [self.edge.node]
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if any(value.dtype in HALF for value in node._input_metadata):  # type: ignore[attr-defined]
                return True
            stack += [following for following, _ in node.next_functions if following is not None]
        return False

    def _vjp(self, cotangent: Tensor, *, batched: bool) -> Tensor:
        def pull(c: Tensor) -> Tensor:
            return torch.autograd.grad(self.edge, self.leaf, c, retain_graph=True)[0]

        if not batched:
            return pull(cotangent)
        # is_grads_batched=True knows far fewer ops: where and masked_fill go one sample at a time there
        was_enabled = _is_vmap_fallback_enabled()
        _set_vmap_fallback_enabled(False)
        try:
            return torch.vmap(pull)(cotangent)
        finally:
            _set_vmap_fallback_enabled(was_enabled)
