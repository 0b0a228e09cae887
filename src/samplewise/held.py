"""The gradients that a capture holds, by parameter: the factors of its uses, joined when they are first asked for."""

from collections.abc import Iterator

from torch import Tensor

from samplewise.capture import Capture
from samplewise.errors import SamplewiseError
from samplewise.factors.base import Factor
from samplewise.factors.total import join
from samplewise.parameter import ParameterGrads
from samplewise.tracing import asks, is_tracing


class Held(Capture):
    """{name: the per-sample gradients of that parameter}, for those that took part in the loss."""

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.parameters if name in self._factors)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return self._aliases.get(name) in self._factors  # type: ignore[call-overload]

    def __getitem__(self, name: str) -> ParameterGrads:
        if name not in self:
            known = "took no part in the loss" if name in self._aliases else "is not a captured parameter"
            raise KeyError(f"{name!r} {known}; there are gradients for {list(self)}")
        first = self._aliases[name]
        return ParameterGrads(first, self.parameters[first], lambda: self._joined(first), self._factor_scale, self._planner)

    @property
    def _factor_scale(self) -> float:
        """What a factor is multiplied with to give the gradient of a sample's loss: B where backward began at a mean."""
        return 1.0 if self._scale is None else self._scale

    def _release(self, names: list[str]) -> None:
        """Frees what these parameters keep."""
        for name in names:
            self._factors[name] = []
            self._versions[name] = []

    def _all_joined(self) -> dict[str, Factor]:
        """{name: the factor of all its uses}."""
        return {name: self._joined(name) for name in self}

    def versions(self) -> list[tuple[Tensor, int]]:
        """What weights are computed from, with its versions, if some are: gradients are pulled back through what they are now."""
        if not any(factor.is_pulled_back for factor in self._all_joined().values()):
            return []
        return [(t, t._version) for t in (*self.model.parameters(), *self.model.buffers())]

    def check(self, versions: list[tuple[Tensor, int]]) -> None:
        """Raises if what answers are made of was changed or freed, these weights among it."""
        self._all_joined()
        for t, version in versions:
            if t._version != version:
                raise SamplewiseError(
                    f"a tensor {tuple(t.shape)} of the model was changed in place (a parameter by an optimizer's step?) since another "
                    "capture, which the step asks, computed weights from it. Ask for what is needed before, "
                    "other.materialize() or other.sum(), and give the step that."
                )

    def _joined(self, name: str) -> Factor:
        """The factor of all uses of the parameter; raises if what it is made of was changed or freed since."""
        is_others = is_tracing() and not self.is_traced
        if is_others:
            asks(self)
        for tensor, version in self._versions[name]:
            if tensor._version != version:
                raise SamplewiseError(
                    f"an input or gradient {tuple(tensor.shape)} of parameter {name!r} was changed in place after backward, so "
                    "its per-sample gradients are gone. Ask before changing it, or give the model a copy."
                )
        factors = self._factors[name]
        if not factors:
            raise SamplewiseError(
                f"the gradients of {name!r} were freed when a stream had handed them out. Ask before, or keep them: "
                "grads.stream(keep=True)."
            )
        if is_others and len(factors) > 1:
            return join(factors)  # of tensors without values: not for later
        if len(factors) > 1:
            factors[:] = [join(factors)]
            self._versions[name] += [(t, t._version) for t in factors[0].tensors()]
        return factors[0]
