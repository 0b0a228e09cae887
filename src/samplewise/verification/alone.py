"""Samples run alone through the plain model, and their plain gradients: the truth of a verification."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils._pytree import tree_leaves, tree_map

from samplewise.errors import SamplewiseError
from samplewise.queries import Grads
from samplewise.samples import Layout, picked
from samplewise.still import same_randomness


@dataclass
class Alone:
    """A sample that was run alone."""

    model: nn.Module
    outputs: list[Tensor]


def run_alone(b: int, model: nn.Module, grads: Grads, args: tuple, kwargs: dict) -> Alone:
    """Runs the plain model on sample b."""
    own, named = tree_map(_alone(b, grads), (args, kwargs), is_leaf=lambda a: isinstance(a, PackedSequence))
    own, named = tree_map(fresh, (own, named))
    try:
        with same_randomness(model):
            return Alone(model, tensors_of(model(*own, **named)))
    except Exception as error:
        raise SamplewiseError(
            f"the model could not be run on sample {b} alone, so it was not verified ({type(error).__name__}: {error}). "
            "Let it take a batch of one, or turn the check off: capture(model, verify=False)."
        ) from error


def _alone(b: int, grads: Grads) -> Callable[[Any], Any]:
    """An argument as sample b alone would have it."""

    def alone(leaf: Any) -> Any:
        data = leaf.data if isinstance(leaf, PackedSequence) else leaf
        mark = grads.marks.get(data) if isinstance(data, Tensor) else None
        if not isinstance(mark, Layout) or not mark.dims:
            return leaf.clone() if isinstance(leaf, Tensor) else leaf
        (axis,) = mark.dims
        rows = picked(data, axis, (mark.ids.flatten() == b).nonzero().squeeze(1).to(data.device))
        return pack_sequence([rows]) if isinstance(leaf, PackedSequence) else rows

    return alone


def fresh(leaf: Any) -> Any:
    """An object among the arguments that a forward may change (a cache of keys and values) as a copy of its own."""
    if isinstance(leaf, Tensor | nn.Module | type) or not hasattr(leaf, "__dict__") or callable(leaf):
        return leaf
    return copy.deepcopy(leaf)


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in containers, dataclasses and plain objects."""
    found = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, type | nn.Module) and not callable(leaf):
            found += [t for value in vars(leaf).values() for t in tree_leaves(value) if isinstance(t, Tensor)]
    return found


def gradients_of(total: Tensor, names: list[str], model: nn.Module) -> list[Tensor | None]:
    """Plain gradients of the model's parameters of these names, dense, with `.grad` of all parameters left as it is."""
    named = dict(model.named_parameters(remove_duplicate=False))
    parameters = [named[name] for name in names]
    total = total.real if total.is_complex() else total
    if not parameters:
        return []
    try:
        truth = torch.autograd.grad(total, parameters, allow_unused=True, retain_graph=True)
        if all(T is not None for T in truth):
            return [_dense(T) for T in truth]
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
    # autograd.grad does not see what lies in a reentrant checkpoint
    with gradients_put_back(model):
        total.backward()
        return [_dense(p.grad) for p in parameters]


def _dense(T: Tensor | None) -> Tensor | None:
    return T.to_dense() if T is not None and T.is_sparse else T


@contextmanager
def gradients_put_back(module: nn.Module) -> Iterator[None]:
    """`.grad` of all parameters None inside, and as it was afterwards."""
    before = [(p, p.grad) for p in module.parameters()]
    try:
        for p, _ in before:
            p.grad = None
        yield
    finally:
        for p, grad in before:
            p.grad = grad
