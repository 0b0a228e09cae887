"""What in a model breaks privacy, and what can be put in its place."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin

MAX_GROUPS, MIN_CHANNELS = 32, 4
"""A group of one channel would make every vector [N, C] a constant."""


@dataclass(frozen=True)
class Problem:
    """A module with which training is not private."""

    name: str
    """Of the module in the model; "" is the model itself."""
    kind: str
    why: str
    can_be_fixed: bool

    def __str__(self) -> str:
        return f"{self.name or 'the model'} ({self.kind}) {self.why}"


@dataclass(frozen=True)
class Change:
    """A module that `fix` replaced."""

    name: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.name}: {self.before} → {self.after}"


def validate(model: nn.Module) -> list[Problem]:
    """The modules that break privacy; empty if none is known to.

    Batch norms in training mode mix samples; norms with running statistics put them into buffers without noise; modules without
    parameters yet cannot be captured. Losses that mix samples, buffers of your own that learn from data, and parameters used
    unseen show when a batch runs: then it raises.

    **Guarantee.** None: that nothing is found does not mean that all is well. The checks of a captured batch are the guard.

    | module | |
    |-|-|
    | BatchNorm, SyncBatchNorm in training mode | mixes samples |
    | the same in eval mode | fine: it is a fixed scale and shift |
    | InstanceNorm(track_running_stats=True) in training mode | statistics of samples in buffers |
    | lazy modules not yet run | no parameters yet |

    >>> [str(p) for p in validate(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))]
    ['1 (BatchNorm2d) mixes the samples of a batch: one sample changes what all others give']
    """
    return list(_problems(model))


def _problems(model: nn.Module) -> Iterator[Problem]:
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
            yield Problem(name, kind, "has no parameters before it is run once", False)
        elif isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats):
            yield Problem(name, kind, "mixes the samples of a batch: one sample changes what all others give", bool(name))
        elif isinstance(module, _InstanceNorm) and module.track_running_stats and module.training:
            yield Problem(name, kind, "keeps statistics of the samples in buffers, without noise", bool(name))


def fix(model: nn.Module) -> list[Change]:
    """Replaces, in the model itself, what `validate` finds and can be replaced; returns what it changed.

    BatchNorm becomes GroupNorm of at most 32 groups of 4 channels or more, with its scale and shift; an InstanceNorm loses its
    running statistics. Do it before making the optimizer: a replaced module has parameters of its own.

    >>> model = nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48))
    >>> [str(change) for change in fix(model)]
    ['1: BatchNorm2d → GroupNorm']
    >>> validate(model)
    []
    """
    changes = []
    names: dict[str, Callable[[nn.Module], nn.Module]] = {}
    for problem in validate(model):
        if problem.can_be_fixed:
            names[problem.name] = _as_group_norm if "Instance" not in problem.kind else _without_statistics
    done: dict[nn.Module, nn.Module] = {}
    for name, replacement in names.items():
        parent, _, last = name.rpartition(".")
        before = model.get_submodule(name)
        done[before] = done.get(before) or replacement(before)
        for owner in model.modules():  # one module may be registered in several places
            for child_name, child in owner.named_children():
                if child is before:
                    setattr(owner, child_name, done[before])
        setattr(model.get_submodule(parent), last, done[before])
        changes.append(Change(name, type(before).__name__, type(done[before]).__name__))
    return changes


def _as_group_norm(norm: nn.Module) -> nn.GroupNorm:
    assert isinstance(norm, _BatchNorm)
    C = norm.num_features
    groups = max(g for g in range(1, MAX_GROUPS + 1) if g == 1 or (C % g == 0 and C // g >= MIN_CHANNELS))
    like = norm.weight if norm.affine else next(norm.buffers(), torch.empty(0))
    made = nn.GroupNorm(groups, C, eps=norm.eps, affine=norm.affine, device=like.device, dtype=like.dtype)
    return _with_affine(made, norm)


def _without_statistics(norm: nn.Module) -> nn.Module:
    assert isinstance(norm, _InstanceNorm)
    like = norm.weight if norm.affine else next(norm.buffers(), torch.empty(0))
    made = type(norm)(norm.num_features, eps=norm.eps, affine=norm.affine, device=like.device, dtype=like.dtype)  # type: ignore[call-arg]
    return _with_affine(made, norm)


def _with_affine(made: Any, norm: nn.Module) -> Any:
    if made.affine:
        for name in ("weight", "bias"):
            own, old = getattr(made, name), getattr(norm, name)
            with torch.no_grad():
                own.copy_(old)
            own.requires_grad_(old.requires_grad)
    return made.train(norm.training)
