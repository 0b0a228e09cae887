"""One call for a whole step: forward, backward to the uses, query."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from samplewise.compiled.steps import Compiled
from samplewise.compiled.trace import Record
from samplewise.losses import LossFn
from samplewise.opening import capture
from samplewise.plan import Rates
from samplewise.queries import Grads
from samplewise.verification.alone import gradients_put_back


class StepResult(NamedTuple):
    """What one step gives."""

    loss: Tensor
    """What `loss_fn` returned, detached."""
    answer: Any
    """What the query gave."""


def per_sample_step(
    model: nn.Module,
    loss_fn: LossFn,
    query: Callable[[Grads], Any],
    *,
    compile: bool = False,
    memory: str | int | float | None = None,
    loss_reduction: str = "sum",
    batch_dim: int = 0,
    verify: bool = True,
    plan: Mapping[str, str] | None = None,
    rates: Rates | None = None,
    params: Iterable[str] | None = None,
) -> Callable[..., StepResult]:
    """step(*batch) → (loss, answer): forward, backward and one query about the gradients of every sample.

    `loss_fn(model, *batch)` calls the model and returns one loss a sample, shape [B], or one number, which
    `loss_reduction` then says is their "sum" or their "mean". `query(grads)` is any question, or several in a tuple or dict.

    >>> import torch
    >>> model = nn.Linear(2, 1, bias=False)
    >>> step = per_sample_step(model, lambda model, x: model(x).squeeze(1), lambda grads: grads.norms())
    >>> step(torch.tensor([[3.0, 4.0], [6.0, 8.0]])).answer
    tensor([ 5., 10.])

    `compile`: forward, backward and query become one compiled graph, traced through the same rules when a batch is the
    first of its kind. Parameters and buffers are read anew in every step. A second size of the batch makes one graph for all
    sizes. Attributes of the model, and variables that `loss_fn` and `query` close over, are looked at in every step, and the
    step is compiled anew where they changed. Loss and answer are tensors, numbers and strings in tuples, lists and dicts. A step
    whose course depends on the values of the batch is refused. Where values turn out to need care (a sample that is not finite,
    positions that cancel), the batch is taken op by op; `step.num_graphs`, `step.num_op_by_op` and `step.why_op_by_op` tell how
    many graphs were compiled, how many batches went the long way and why.
    `memory`, `batch_dim`, `verify`, `plan`, `rates`, `params`: as in `capture`; a compiled step gives other parameters no gradient.
    """

    options = {"memory": memory, "loss_reduction": loss_reduction, "batch_dim": batch_dim, "verify": verify, "plan": plan}
    return step_with(lambda grads: None, model, loss_fn, query, compile=compile, params=params, rates=rates, **options)


def step_with(
    opened: Callable[[Grads], None],
    model: nn.Module,
    loss_fn: LossFn,
    query: Callable[[Grads], Any],
    *,
    compile: bool,
    params: Iterable[str] | None,
    plan: Mapping[str, str] | None = None,
    verify: bool = True,
    **options: Any,
) -> Callable[..., StepResult]:
    """As `per_sample_step`, whose options these are; `opened` is told of the capture of each step before anything runs."""
    names = None if params is None else list(params)

    def run(batch: tuple, record: Record, *, verify: bool) -> StepResult:
        with capture(model, verify=verify, params=names, plan={**(plan or {}), **record.routes}, **options) as grads:
            opened(grads)
            _mark(grads, batch)
            loss = loss_fn(model, *batch)
            if loss.ndim:
                grads.backward(loss)
            else:
                loss.backward()
        answer = query(grads)
        record.batch_size, record.routes = grads.batch_size, grads.routes()
        return StepResult(loss.detach(), answer)

    if not compile:
        return lambda *batch: run(batch, Record(), verify=verify)

    def run_named(batch: tuple, record: Record, *, verify: bool) -> StepResult:
        """As `run`; parameters that `params` does not name get no gradient, as a graph gives them none."""
        with gradients_put_back(model):
            return run(batch, record, verify=verify)

    return Compiled(
        model, run if names is None else run_named, (loss_fn, query), batch_dim=options.get("batch_dim", 0), verify=verify
    )


def _mark(grads: Grads, batch: tuple) -> None:
    """All of the batch is of its samples, also what only the loss sees: labels, weights.

    Where its tensors are of several sizes, the model's arguments tell which are.
    """
    tensors = [t for t in tree_leaves(batch) if isinstance(t, Tensor) and not t.is_nested and t.ndim > grads.batch_dim]
    if len({t.shape[grads.batch_dim] for t in tensors}) == 1:
        for t in tensors:
            grads.mark(t)
