"""`make_private`: an ordinary training loop made differentially private."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from samplewise.choice import Groups
from samplewise.dp.accounting import noise_multiplier_for
from samplewise.dp.adaptive import Adaptive
from samplewise.dp.clipping import Automatic
from samplewise.dp.loader import PoissonLoader
from samplewise.dp.noise import Noise, derived_seed
from samplewise.dp.optimizer import PrivateOptimizer, privatized, refuse_optimizer
from samplewise.dp.privacy import Bounds, Budget, Privacy
from samplewise.dp.session import Session
from samplewise.dp.validation import validate
from samplewise.dp.watched import is_watched, sharing, watch
from samplewise.dp.whole import Whole
from samplewise.errors import SamplewiseError
from samplewise.losses import LossFn

CLIPPING = {"flat": None, "per_layer": None, "automatic": Automatic(), "adaptive": Adaptive()}
OPTIONS = {"batch_dim", "memory", "plan", "rates"}
"""Of `capture`, which decide how gradients are taken and not which. `verify` is none: it stands between privacy and models whose
samples mix through Python numbers."""


def make_private(
    model: nn.Module,
    optimizer: Optimizer,
    loader: DataLoader | PoissonLoader,
    *,
    max_grad_norm: Bounds,
    noise_multiplier: float | None = None,
    target_epsilon: float | None = None,
    target_delta: float | None = None,
    epochs: int | None = None,
    clipping: str | Automatic | Adaptive = "flat",
    groups: Groups | None = None,
    loss_reduction: str = "mean",
    sample_ids: Tensor | Sequence[int] | None = None,
    views: int = 1,
    max_physical_batch_size: int | None = None,
    accountant: str = "pld",
    secure: bool = False,
    seed: int | None = None,
    loss_fn: LossFn | None = None,
    compile: bool = False,
    **options: Any,
) -> tuple[nn.Module, PrivateOptimizer, PoissonLoader]:
    """(model, optimizer, loader) for an ordinary loop: the same model, the same optimizer, a loader that Poisson-samples.

    p.grad = (sum_b min(1, C / ‖G[b]‖) G[b] + N(0, (z C)²)) / expected batch size, made at `step()`

    **Guarantee.** What the steps do to the parameters in the optimizer is (ε, δ)-differentially private, with
    ε = optimizer.epsilon(δ), for data sets that differ by one sample added or removed; a sample is a row of the data set,
    or all rows of one user with `sample_ids`. Not covered: what else is taken from the data (hyperparameters chosen by it,
    metrics, buffers outside of the model, the number of samples), parameters that are not in the optimizer, losses computed
    beside the private model. docs/privacy.md has the whole of it.

    | | |
    |-|-|
    | gradient of norm 0 | counts with 0 |
    | gradient inf or NaN | left out; the others count as ever |
    | empty draw | tensors of 0 rows; the step is noise |
    | batch norm in training mode, losses that mix samples | refused |
    | a loader with another sampler | refused |
    | max_grad_norm=inf, noise_multiplier=0 | plain training; ε = inf |
    | several processes (torch.distributed) | refused |

    `noise_multiplier` z, or `target_epsilon`, `target_delta` and `epochs`, for which the smallest z is sought; steps beyond
    the target are then refused.
    `clipping`: "flat"; "per_layer", a bound C / sqrt(L) for each of L layers; "automatic" or `Automatic(eps)`, normalised
    gradients; "adaptive" or `Adaptive(...)`, a bound that follows a quantile of the norms.
    `groups`: bounds for groups of parameters, as in `Grads.norms`; `max_grad_norm` may be {group: bound}.
    `loss_reduction`: "mean" or "sum", what the loss is over the samples of a batch; it is refused where it is seen to be another.
    `sample_ids`: for each row of the data set the number of its user; the loader's batch_size then counts users.
    `views`: how often each row is fetched in a batch (a data set that augments gives other views); they count as one sample.
    `max_physical_batch_size`: how many rows come at once; call `step()` after each, the last of a draw moves the parameters.
    `accountant`: "pld" or "rdp", for the target. `secure`: see `Noise`. `seed`: for tests, determines draws and noise.
    `loss_fn`: (model, *batch) → the loss of the batch as `loss_reduction` says, or one loss a sample; `optimizer.step_on(*batch)`
    then stands for model, backward and step, and with `compile` is one compiled graph but for noise and step.
    `options`: batch_dim, memory, plan and rates of `capture`.

    >>> model = nn.Linear(4, 2)
    >>> data = torch.utils.data.TensorDataset(torch.randn(100, 4), torch.randint(2, (100,)))
    >>> model, optimizer, loader = make_private(
    ...     model,
    ...     torch.optim.SGD(model.parameters(), lr=0.1),
    ...     DataLoader(data, batch_size=20),
    ...     noise_multiplier=1.0,
    ...     max_grad_norm=1.0,
    ... )
    >>> for x, y in loader:
    ...     optimizer.zero_grad()
    ...     loss = nn.functional.cross_entropy(model(x), y)
    ...     loss.backward()
    ...     optimizer.step()
    >>> round(optimizer.epsilon(delta=1e-5), 2)
    3.88
    """
    if loss_reduction not in ("mean", "sum"):
        raise ValueError(f'loss_reduction is "mean" or "sum", got {loss_reduction!r}')
    _refuse(model, optimizer, options)
    _refuse_shared(optimizer)
    how, groups = _clipping(clipping, groups, max_grad_norm)
    if not isinstance(loader, PoissonLoader):
        loader = PoissonLoader.of(
            loader,
            sample_ids=sample_ids,
            views=views,
            max_physical_batch_size=max_physical_batch_size,
            seed=seed,
            batch_dim=options.get("batch_dim", 0),
        )
    elif (sample_ids, views, max_physical_batch_size) != (None, 1, None):
        raise ValueError("sample_ids, views and max_physical_batch_size are the PoissonLoader's, which was given.")
    noise_multiplier, budget = _noise(noise_multiplier, target_epsilon, target_delta, epochs, loader, accountant)
    session = Session(model, _parameters(model, optimizer), {**options, "loss_reduction": loss_reduction})
    privacy = Privacy(
        session,
        loader,
        Noise(None if seed is None else derived_seed(seed, 0), secure=secure),
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        groups=groups,
        how=how,
        loss_reduction=loss_reduction,
        budget=budget,
    )
    if loss_fn is not None:
        kinds = {**{k: v for k, v in options.items() if k != "rates"}, "loss_reduction": loss_reduction}
        privacy.whole = Whole(session, loss_fn, groups=groups, eps=privacy.eps, compile=compile, options=kinds)
    elif compile:
        raise ValueError(
            "compile=True needs loss_fn=, as the loop's own forward and backward are not compiled: optimizer.step_on(*batch)"
        )
    loader.attach(session)
    watch(model, session)
    return model, privatized(optimizer, privacy), loader


def _refuse(model: nn.Module, optimizer: Optimizer, options: Mapping[str, Any]) -> None:
    unknown = sorted(options.keys() - OPTIONS)
    if unknown:
        raise TypeError(f"make_private got {unknown}; it takes {sorted(OPTIONS)} of capture beside its own")
    refuse_optimizer(optimizer)
    if is_watched(model):
        raise SamplewiseError(
            "the model is trained privately already by another optimizer: each would miss the other's steps."
        )
    problems = validate(model)
    if problems:
        raise SamplewiseError(
            "training this model is not private:\n"
            + "\n".join(f"  {problem}" for problem in problems)
            + "\nsamplewise.dp.fix(model), before the optimizer is made, replaces what can be; or put the module in eval mode."
        )
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise SamplewiseError("make_private works in one process: with several, noise and account would be each one's own.")


def _refuse_shared(optimizer: Optimizer) -> None:
    """Raises if a parameter of this optimizer is in another private one, by way of another model."""
    shared = sharing(p for group in optimizer.param_groups for p in group["params"])
    if shared:
        raise SamplewiseError(
            f"parameter {shared[0]!r} is trained privately already by another optimizer, of another model that has it too: each "
            "would miss the other's steps. Train it by one."
        )


def _parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The parameters in the optimizer by their first name in the model."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if id(p) in held}
    if len(found) != len(held):
        raise SamplewiseError(
            f"the optimizer holds {len(held) - len(found)} parameters that are not in the model, whose gradients would not be "
            "clipped. Give the module that has them all (it may have been replaced, by fix for one, after the optimizer was made)."
        )
    return found


def _clipping(
    clipping: str | Automatic | Adaptive, groups: Groups | None, max_grad_norm: Bounds
) -> tuple[Automatic | Adaptive | None, Groups | None]:
    if isinstance(clipping, str) and clipping not in CLIPPING:
        raise ValueError(f"clipping is one of {sorted(CLIPPING)}, Automatic(...) or Adaptive(...), got {clipping!r}")
    if clipping == "per_layer" and groups is None:
        groups = "layer"
    how = CLIPPING[clipping] if isinstance(clipping, str) else clipping
    if isinstance(how, Adaptive) and (groups is not None or isinstance(max_grad_norm, Mapping)):
        raise ValueError("adaptive clipping follows one bound for the whole gradient: it takes no groups.")
    return how, groups


def _noise(
    noise_multiplier: float | None,
    target_epsilon: float | None,
    target_delta: float | None,
    epochs: int | None,
    loader: PoissonLoader,
    accountant: str,
) -> tuple[float, Budget | None]:
    """The noise multiplier, and what it was sought for."""
    targets = (target_epsilon, target_delta, epochs)
    if noise_multiplier is not None:
        if targets != (None, None, None):
            raise ValueError("give noise_multiplier, or target_epsilon, target_delta and epochs, for which it is sought")
        return noise_multiplier, None
    if target_epsilon is None or target_delta is None or epochs is None:
        raise ValueError("give noise_multiplier, or all of target_epsilon, target_delta and epochs")
    steps = epochs * loader.steps
    z = noise_multiplier_for(
        target_epsilon=target_epsilon,
        target_delta=target_delta,
        sample_rate=loader.sample_rate,
        steps=steps,
        accountant=accountant,
    )
    return z, Budget(target_epsilon, target_delta, steps, accountant, z)
