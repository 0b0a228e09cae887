"""Whether a loss gives samples the same when another one is taken out: tried once, where the loss can be run again."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from samplewise.errors import SamplesMixError, SamplewiseError
from samplewise.kept import Kept
from samplewise.losses import LossFn
from samplewise.precision import rounded_kinds
from samplewise.queries import Grads
from samplewise.step import per_sample_step
from samplewise.still import Still, attributes_put_back, same_randomness
from samplewise.unwatched import unwatched
from samplewise.verification.alone import gradients_put_back
from samplewise.verification.comparing import HALF, tolerance

NUM_AGAIN = 3
"""How often a batch is run again to see whether it is random: a toss of a coin may fall alike for all samples, once."""


def refuse_dependence(
    model: nn.Module, loss_fn: LossFn, batch: tuple, params: Iterable[str], options: dict[str, Any]
) -> None:
    """Raises if the samples' gradients are others without the first sample of the batch, by their norms or along one direction.

    ‖G[b]‖ and <r, G[b]> of the batch = ‖G[b - 1]‖ and <r, G[b - 1]> of the batch without sample 0, for b = 1 ... B - 1, r random

    So is seen what marks cannot tell: a scale that is computed from the size of the batch, weights by a sample's place in it. A batch
    of strings cannot be cut, and is taken as it is.

    | random numbers | |
    |-|-|
    | torch's (rand, randn, randint, bernoulli, dropout ...) | held still |
    | Python's and NumPy's, one for the batch | the same in both runs |
    | Python's and NumPy's drawn row by row, or of a generator of their own; torch's gamma, beta | refused: not comparable |
    """
    dim = options.get("batch_dim", 0)
    if any(not isinstance(leaf, Tensor | int | float | None) for leaf in tree_leaves(batch)):
        return
    fewer = tree_map_only(Tensor, lambda t: t.narrow(dim, 1, t.shape[dim] - 1) if t.ndim > dim else t, batch)
    step = per_sample_step(model, loss_fn, _norms_and_dots, params=params, verify=False, **options)
    parameters = list(model.parameters())
    by_dtype = max(tolerance(p.dtype) for p in parameters)
    rounds = rounded_kinds(parameters, {p.dtype for p in parameters})
    # what is rounded here and there hardly changes a norm
    allowed = torch.tensor([by_dtype, max(by_dtype, HALF) if rounds else by_dtype])

    def found(rows: tuple, seed: int) -> Tensor:
        random = same_randomness(model, seed=seed)
        as_it_was = Kept(model.parameters())
        with attributes_put_back(model), gradients_put_back(model), as_it_was, Still(), torch.enable_grad(), random:
            return step(*rows).answer.double()

    whole, alone = found(batch, 0)[1:], found(fewer, 0)
    b = _first_off(whole, alone, allowed)
    if b is None:
        return
    for seed in range(1, 1 + NUM_AGAIN):
        again = found(batch, seed)[1:]
        k = _first_off(whole, again, allowed)
        if k is not None:
            raise SamplewiseError(
                f"the gradient of sample {k + 1} of the batch has {_words(whole[k])}, and {_words(again[k])} when the same batch "
                "is run again: loss_fn draws random numbers that cannot be held still (Python's or NumPy's by rows or of a generator "
                "of their own, torch's gamma), so that it cannot be tried whether what it gives a sample depends on the others. Draw "
                "them by torch.rand, randn, randint, bernoulli or dropout, or in the data set; or write the loop with backward and "
                "step(), where this is not tried."
            )
    raise SamplesMixError(
        f"the gradient of sample {b + 1} of the batch has {_words(whole[b])}, and {_words(alone[b])} when sample 0 is taken out: "
        "what loss_fn gives a sample depends on the others, on their number or on its place among them. Give each sample a loss "
        "of its own, and take torch's mean or sum."
    )


@unwatched
def _norms_and_dots(grads: Grads) -> Tensor:
    """[B, 2]: the norm of each sample's gradient, and its product with a direction that is random and always the same."""
    random = {device: torch.Generator(device).manual_seed(0) for device in {p.device for p in grads.parameters.values()}}
    direction = {}
    for name, p in grads.parameters.items():
        direction[name] = torch.empty_like(p, requires_grad=False)
        torch.nn.init.normal_(direction[name], generator=random[p.device])
    dots = grads.dots(direction)
    return torch.stack([grads.norms(), dots.real if dots.is_complex() else dots], 1)


def _words(found_2: Tensor) -> str:
    return f"norm {found_2[0]:.6g} ({found_2[1]:.6g} along a direction)"


def _first_off(found_B2: Tensor, others_B2: Tensor, allowed_2: Tensor) -> int | None:
    """The first sample whose gradient is another, None if there is none; those that are not finite are not compared."""
    norms_B = torch.maximum(found_B2[:, 0], others_B2[:, 0])
    scale_B = norms_B + 0.01 * found_B2[:, 0].max()
    off = (found_B2 - others_B2).abs() > scale_B[:, None] * allowed_2.to(scale_B.device)
    off = (off & found_B2.isfinite() & others_B2.isfinite()).any(1)
    return int(off.nonzero()[0]) if bool(off.any()) else None
