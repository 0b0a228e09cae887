"""One call for a whole step: forward, backward to the uses, query."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from samplewise.compiled import Compiled
from samplewise.queries import Grads, LossFn, capture

Query = Callable[[Grads], Any]


class Step(NamedTuple):
    """What one step gives."""

    loss: Tensor
    """What `loss_fn` returned, detached."""
    answer: Any
    """What the query gave."""


def per_sample_step(
    model: nn.Module,
    loss_fn: LossFn,
    query: Query,
    *,
    compile: bool = False,
    memory: str | int | float | None = None,
    loss_reduction: str = "sum",
    verify: bool = True,
    plan: Mapping[str, str] | None = None,
) -> Callable[..., Step]:
    """A function of a batch that runs forward, backward and the query.

    >>> import torch
    >>> model = nn.Linear(2, 1, bias=False)
    >>> step = per_sample_step(model, lambda model, x: model(x).squeeze(1), lambda grads: grads.norms())
    >>> step(torch.tensor([[3.0, 4.0], [6.0, 8.0]])).answer
    tensor([ 5., 10.])
    """
    options = {"memory": memory, "loss_reduction": loss_reduction, "plan": plan}

    def run(batch: tuple, *, verify: bool) -> Step:
        with capture(model, verify=verify, **options) as grads:
            loss = loss_fn(model, *batch)
            if loss.ndim:
                grads.backward(loss)
            else:
                loss.backward()
        return Step(loss.detach(), query(grads))

    if not compile:
        return lambda *batch: run(batch, verify=verify)
    return Compiled(model, run, verify=verify)
