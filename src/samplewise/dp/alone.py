"""Whether a loss gives samples the same when another one is taken out: tried once, where the loss can be run again."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from samplewise.errors import SamplesMixError
from samplewise.losses import LossFn
from samplewise.step import per_sample_step
from samplewise.still import Still, attributes_put_back, same_randomness
from samplewise.verification.alone import gradients_put_back
from samplewise.verification.comparing import tolerance


def refuse_dependence(
    model: nn.Module, loss_fn: LossFn, batch: tuple, params: Iterable[str], options: dict[str, Any]
) -> None:
    """Raises if the norms of the samples' gradients are others without the first sample of the batch.

    ‖G[b]‖ of the batch = ‖G[b - 1]‖ of the batch without sample 0, for b = 1 ... B - 1

    So is seen what marks cannot tell: a scale that is computed from the size of the batch, weights by a sample's place in it. Random
    numbers are held still. A batch of strings cannot be cut, and is taken as it is.
    """
    dim = options.get("batch_dim", 0)
    if any(not isinstance(leaf, Tensor | int | float | None) for leaf in tree_leaves(batch)):
        return
    fewer = tree_map_only(Tensor, lambda t: t.narrow(dim, 1, t.shape[dim] - 1) if t.ndim > dim else t, batch)
    norms = per_sample_step(model, loss_fn, lambda grads: grads.norms(), params=params, verify=False, **options)
    found = []
    for rows in (batch, fewer):
        with attributes_put_back(model), gradients_put_back(model), Still(), torch.enable_grad(), same_randomness(model):
            found.append(norms(*rows).answer.double())
    whole, alone = found[0][1:], found[1]
    allowed = max(tolerance(p.dtype) for p in model.parameters())
    off = (whole - alone).abs() > allowed * (torch.maximum(whole, alone) + 0.01 * whole.max())
    if bool((off & whole.isfinite() & alone.isfinite()).any()):
        b = int(off.nonzero()[0])
        raise SamplesMixError(
            f"the gradient of sample {b + 1} of the batch has norm {whole[b]:.6g}, and {alone[b]:.6g} when sample 0 is taken out: "
            "what loss_fn gives a sample depends on the others, on their number or on its place among them. Give each sample a loss "
            "of its own, and take torch's mean or sum."
        )
