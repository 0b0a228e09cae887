"""The two ways to the gradients of every sample: a block around code of your own, and a function of a batch."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from samplewise.losses import LossFn
from samplewise.plan import Rates
from samplewise.queries import Grads


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

    >>> import torch
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
    only question, at about the memory of plain training. "graph" does so too and keeps autograd's graph: weighted and clipped
    sums of the whole model, asked inside the block, run backward a second time.
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


def per_sample(model: nn.Module, loss_fn: LossFn, **options: Any) -> Callable[..., Grads]:
    """A function of a batch that runs forward and backward once and returns the per-sample gradients.

    `loss_fn(model, *batch)` calls the model and returns one loss a sample, shape [B]; `options` are those of `capture`.

    >>> import torch
    >>> model = nn.Linear(2, 1, bias=False)
    >>> grads_of = per_sample(model, lambda model, x, y: (model(x).squeeze(1) - y).square())
    >>> grads_of(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([0.0, 1.0])).norms()[1]
    tensor(0.)
    """

    def grads_of(*batch: Any, **named: Any) -> Grads:
        with capture(model, **options) as grads:
            grads.backward(loss_fn(model, *batch, **named))
        return grads

    return grads_of
