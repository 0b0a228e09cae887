"""What makes the steps of one optimizer private: its bounds, its noise, its account."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from samplewise.choice import Groups, grouped
from samplewise.dp.accounting import Accountant, Steps, epsilon
from samplewise.dp.adaptive import Adaptive, sum_noise_multiplier
from samplewise.dp.clipping import WHOLE, Automatic, bounds_of
from samplewise.dp.loader import PoissonLoader
from samplewise.dp.noise import Noise, noise_stds
from samplewise.dp.session import Session, WholeStep
from samplewise.errors import SamplewiseError

LEAST_BOUND = 1e-15
"""Squares of gradients near a smaller bound are lost in float32, and with them their norms."""
Bounds = float | Mapping[str, float]


@dataclass(frozen=True)
class Budget:
    """What a run may cost, and the steps and the noise that were chosen for it."""

    epsilon: float
    delta: float
    steps: int
    accountant: str
    noise_multiplier: float


def fixed(bounds: Bounds) -> Bounds:
    """The bounds as they are now, whatever becomes of the caller's dict."""
    return MappingProxyType(dict(bounds)) if isinstance(bounds, Mapping) else bounds


class Privacy:
    """From the clipped sums of a draw to the gradients of a step, accounted."""

    def __init__(
        self,
        session: Session,
        loader: PoissonLoader,
        noise: Noise,
        *,
        noise_multiplier: float,
        max_grad_norm: Bounds,
        groups: Groups | None = None,
        how: Automatic | Adaptive | None = None,
        loss_reduction: str = "mean",
        budget: Budget | None = None,
    ):
        self.session, self.loader, self.noise = session, loader, noise
        self.whole: WholeStep | None = None
        """How a batch is taken in one, where a loss was given."""
        self.groups, self.how, self.budget = groups, how, budget
        self.accountant = Accountant()
        self.divisor = loader.batch_size if loss_reduction == "mean" else 1.0
        self.noise_multiplier, self.max_grad_norm = noise_multiplier, fixed(max_grad_norm)
        self.given = {
            "noise_multiplier": noise_multiplier,
            "max_grad_norm": dict(max_grad_norm) if isinstance(max_grad_norm, Mapping) else max_grad_norm,
            "clipping": repr(how),
            "groups": repr(groups),
            "loss_reduction": loss_reduction,
        }
        """What the run was started with; a run that goes on must be started with the same."""
        self.noise_stds()  # raises here what cannot be had

    @property
    def eps(self) -> float | None:
        return self.how.eps if isinstance(self.how, Automatic) else None

    # --- the bounds and the noise ------------------------------------------------------------------------------------

    def bounds(self) -> dict[str, float]:
        return bounds_of(self.session.aliases(), self.max_grad_norm, self.groups)

    def noise_stds(self) -> dict[str, float]:
        """{group: standard deviation of the noise on its sum}."""
        z = self.noise_multiplier
        if not 0 <= z < math.inf:
            raise ValueError(f"a noise multiplier is 0 or more and finite, got {z}")
        if isinstance(self.how, Adaptive):
            z = sum_noise_multiplier(z, self.how.count_std(self.loader.batch_size, z))
        bounds = self.bounds()
        if not all(bound >= LEAST_BOUND for bound in bounds.values()):
            raise ValueError(
                f"max_grad_norm is positive, and not so small that squares vanish ({LEAST_BOUND}), got {bounds}"
            )
        return noise_stds(bounds, z)

    def refuse_in_a_draw(self, what: str) -> None:
        if self.session.draw is not None:
            raise SamplewiseError(
                f"{what} was changed between batches of one draw: some of its samples are clipped already. Change it after a step "
                "that moved the parameters (optimizer.stepped)."
            )

    # --- a step ------------------------------------------------------------------------------------------------------

    def take(self) -> bool:
        """Takes the gradients of the batch; True if its draw is complete, so that the parameters are to be moved."""
        return self.session.take(self.bounds(), self.groups, self.eps)

    def run(self, batch: tuple) -> Tensor:
        """Takes forward, backward and clipping of the batch in one; its loss."""
        if self.whole is None:
            raise SamplewiseError(
                "step_on() needs the loss: make_private(..., loss_fn=...), a function (model, *batch) → the batch's loss. Or write "
                "the loop with backward and step()."
            )
        return self.session.run(self.whole, self.bounds(), batch)

    def released(self) -> dict[str, Tensor]:
        """{name: (clipped sum + noise) / expected batch size} of the draw, for every trainable parameter; and accounts for it.

        **Guarantee.** Each element gets noise of the standard deviation that `noise_stds` says for its group, also of parameters
        that took no part and in a draw of no samples: what is left out would show. Rounding to the parameter's dtype comes after.
        """
        self._refuse_beyond_budget()
        sums, draw = self.session.sums, self.session.draw
        if sums and not bool(torch.stack([total.isfinite().all().cpu() for total in sums.values()]).all()):
            raise SamplewiseError("a clipped sum is not finite, though samples that are not are left out of it.")
        if any(torch.promote_types(total.dtype, torch.float32) != total.dtype for total in sums.values()):
            raise SamplewiseError("a clipped sum was rounded to half precision before noise was added to it.")
        stds, gradients = self.noise_stds(), {}
        groups = {WHOLE: sorted(self.session.trainable())} if self.groups is None else self._grouped()
        self.accountant.record(noise_multiplier=self.noise_multiplier, sample_rate=self.loader.sample_rate)
        for group, names in groups.items():
            for name in names:
                p = self.session.parameters[name]
                total = sums.get(name)
                if total is None:
                    total = torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
                noisy = self.noise.added(total, stds[group]) / self.divisor
                # strides as the parameter has: fused optimizers read both as they lie in memory
                gradients[name] = torch.empty_like(p, requires_grad=False).copy_(noisy)
        self._adapt()
        self.session.drop()
        assert draw is not None
        self.loader.position = draw + 1
        return gradients

    def _grouped(self) -> dict[str, list[str]]:
        assert self.groups is not None
        return grouped(self.session.aliases(), self.groups)

    def _adapt(self) -> None:
        if isinstance(self.how, Adaptive):
            session, size = self.session, self.loader.batch_size
            assert not isinstance(self.max_grad_norm, Mapping)
            count = self.noise.number(
                session.num_below - session.num_samples / 2, self.how.count_std(size, self.noise_multiplier)
            )
            self.max_grad_norm = self.how.updated(self.max_grad_norm, count, size)

    def _refuse_beyond_budget(self) -> None:
        budget, done = self.budget, self.accountant
        if budget is None:
            return
        noises = [self.noise_multiplier, *(steps.noise_multiplier for steps in done.history)]
        if done.num_steps < budget.steps and min(noises) >= budget.noise_multiplier:
            return  # as planned
        more = [*done.history, Steps(self.noise_multiplier, self.loader.sample_rate, 1)]
        spent = epsilon(more, delta=budget.delta, accountant=budget.accountant)
        if spent > budget.epsilon:
            raise SamplewiseError(
                f"one more step would cost epsilon {spent:.4g} at delta {budget.delta}, above the target {budget.epsilon}: the noise "
                f"was chosen for {budget.steps} steps, and {done.num_steps} were taken. Stop here, or plan for more epochs."
            )

    # --- saved and loaded --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        bound = self.max_grad_norm
        return {
            "history": [list(steps) for steps in self.accountant.history],
            "loader": self.loader.state_dict(),
            "noise": self.noise.state_dict(),
            "noise_multiplier": self.noise_multiplier,
            "max_grad_norm": dict(bound) if isinstance(bound, Mapping) else bound,
            "given": self.given,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        differing = [f"{k} {state['given'].get(k)}, now {v}" for k, v in self.given.items() if state["given"].get(k) != v]
        if differing:
            raise SamplewiseError(
                f"the saved run was started with {'; '.join(differing)}. Start with the same, load, and change it then "
                "(optimizer.noise_multiplier = ...): the account keeps both."
            )
        saved = Accountant(state["history"])
        if not saved.goes_on_from(self.accountant):
            raise SamplewiseError(
                f"the state has an account of {saved.num_steps} steps, and does not go on from the {self.accountant.num_steps} that "
                "were taken here: what those have cost would be forgotten, while the weights, or what was seen of them, have it. "
                "Go on from an earlier state in a new process, or with a model and an optimizer made anew."
            )
        self.loader.load_state_dict(state["loader"])
        self.accountant = saved
        self.noise.load_state_dict(state["noise"])
        self.noise_multiplier, self.max_grad_norm = state["noise_multiplier"], state["max_grad_norm"]
        self.session.drop()
