"""The user's own optimizer, made to step on clipped sums with noise alone."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer, SparseAdam

from samplewise.dp.accounting import Accountant
from samplewise.dp.privacy import Bounds, Privacy, fixed
from samplewise.errors import SamplewiseError

KEY = "privacy"
"""Under which the state of an optimizer has what privacy needs."""


class PrivateOptimizer(Optimizer):
    """What `make_private` adds to an optimizer: the object stays, its class is one made of this and its own.

    `step()` after every batch: it clips and adds up, and when the draw of the batch is complete adds noise, once, moves the
    parameters and accounts for it (`stepped` says whether it did). `.grad` holds the noisy gradient afterwards.

    **Guarantee.** The parameters move by nothing but clipped sums with noise, and every such step is in the account.

    | step() | |
    |-|-|
    | without a batch of the private loader, twice for one batch, without backward | refused |
    | after a backward that was not captured; without zero_grad | refused: such gradients have no noise |
    | of an empty draw | a step of noise |
    | with a closure | refused |
    | parameters added, or frozen within a draw | refused |
    | beyond a target epsilon | refused |
    """

    _privacy: Privacy
    stepped: bool
    """Whether the last `step()` moved the parameters."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise SamplewiseError(
                "a private optimizer takes no closure: it would run the model again on a batch whose gradients count once. Call "
                "backward, then step()."
            )
        self._opt_called = True  # what schedulers look for
        self._refuse_other_parameters()
        self.stepped = self._privacy.take()
        if self.stepped:
            for name, gradient in self._privacy.released().items():
                self._privacy.session.parameters[name].grad = gradient
            super().step()  # type: ignore[call-arg]

    def step_on(self, *batch: Any) -> Tensor:
        """The loss of the batch, after forward, backward, clipping and `step()`; by the loss_fn that make_private was given.

        With `make_private(compile=True)` all but noise and step is one compiled graph. Of an empty draw the loss is NaN.

        **Guarantee.** As `step()`.
        """
        loss = self._privacy.run(batch)
        self.step()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # hooks on steps run around the inner one, on noisy gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Takes `.grad` off, whatever `set_to_none` says; what was added up within a draw stays."""
        super().zero_grad(set_to_none=True)

    def epsilon(self, delta: float, *, accountant: str = "pld") -> float:
        """ε that the steps so far have cost at this delta; see `samplewise.dp.epsilon`."""
        return self.accountant.epsilon(delta, accountant=accountant)

    @property
    def accountant(self) -> Accountant:
        return self._privacy.accountant

    @property
    def sample_rate(self) -> float:
        """The probability with which a sample takes part in a step."""
        return self._privacy.loader.sample_rate

    @property
    def expected_batch_size(self) -> float:
        """What the sum is divided by where the loss is a mean."""
        return self._privacy.loader.batch_size

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise over the bound; a number set here holds from the next step on, and is accounted so."""
        return self._privacy.noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        before, self._privacy.noise_multiplier = self._privacy.noise_multiplier, value
        try:
            self._privacy.noise_stds()
        except ValueError:
            self._privacy.noise_multiplier = before
            raise

    @property
    def max_grad_norm(self) -> Bounds:
        """The bound on a sample's gradient; noise follows it. It can be set between draws."""
        return self._privacy.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: Bounds) -> None:
        self._privacy.refuse_in_a_draw("max_grad_norm")
        before, self._privacy.max_grad_norm = self._privacy.max_grad_norm, fixed(value)
        try:
            self._privacy.noise_stds()
        except ValueError:
            self._privacy.max_grad_norm = before
            raise

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, and under "privacy" the account, where the loader stands, bounds and noise.

        Nothing secret is in it: randomness of the operating system is not saved, and a run that goes on draws new one.
        """
        return {**super().state_dict(), KEY: self._privacy.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on where the saved run stood, with its account: what it has cost is not forgotten."""
        if KEY not in state_dict:
            raise SamplewiseError(
                "the state has no account of the steps that led to it (it was not saved by a private optimizer), so that epsilon "
                "would be too low. Load the state_dict() of a private optimizer; to start from weights that are not private, load "
                "them into the model before make_private."
            )
        self._privacy.load_state_dict(state_dict[KEY])
        super().load_state_dict({k: v for k, v in state_dict.items() if k != KEY})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise SamplewiseError(
            "parameters are added to a private optimizer: their gradients are not clipped with the others. Add them before "
            "make_private."
        )

    def __deepcopy__(self, memo: Any) -> Any:
        raise SamplewiseError("a private optimizer is not copied: two would share one account. Use state_dict().")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise SamplewiseError("a private optimizer is not pickled, as it holds model and loader. Save its state_dict().")

    def _refuse_other_parameters(self) -> None:
        known = {id(p) for p in self._privacy.session.parameters.values()}
        if any(id(p) not in known for group in self.param_groups for p in group["params"]):
            raise SamplewiseError(
                "the optimizer has parameters that it had not at make_private: their gradients are not clipped. Add them before."
            )


def privatized(optimizer: Optimizer, privacy: Privacy) -> PrivateOptimizer:
    """The optimizer, now private: the same object, still an instance of its class."""
    cls = type(optimizer)
    track = _tracked_by_scheduler(optimizer)
    optimizer.__class__ = type(f"Private{cls.__name__}", (PrivateOptimizer, cls), {"__module__": cls.__module__})
    assert isinstance(optimizer, PrivateOptimizer)
    optimizer._privacy, optimizer.stepped = privacy, False
    if track:
        _track(optimizer)
    return optimizer


def refuse_optimizer(optimizer: Optimizer) -> None:
    """Raises for optimizers that have no private step."""
    if isinstance(optimizer, PrivateOptimizer):
        raise SamplewiseError("the optimizer is private already.")
    if isinstance(optimizer, LBFGS | SparseAdam):
        why = "needs a closure" if isinstance(optimizer, LBFGS) else "needs sparse gradients, and noise is dense"
        raise SamplewiseError(f"{type(optimizer).__name__} {why}. Use another optimizer.")
    replaced = vars(optimizer).get("step")
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
        raise SamplewiseError(
            "optimizer.step was replaced on this optimizer (by a GradScaler, a profiler?), so that steps would go past clipping "
            "and noise. Make it private before."
        )


def _tracked_by_scheduler(optimizer: Optimizer) -> bool:
    """Whether a scheduler made before put its own `step` on the optimizer, which would call the class's of then; takes it off."""
    return vars(optimizer).pop("step", None) is not None


def _track(optimizer: PrivateOptimizer) -> None:
    """Puts a `step` there that a scheduler knows for its own."""
    ref = weakref.ref(optimizer)

    def step(*args: Any, **kwargs: Any) -> None:
        me = ref()
        assert me is not None
        type(me).step(me, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]
