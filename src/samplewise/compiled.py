"""A step as one compiled graph, traced through the same interception and rules as the step that runs op by op."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from samplewise.still import attributes_put_back
from samplewise.tracing import collecting


class Trace:
    """One step written down: `graph(*tensors of the batch)` gives [*tensors of the result, *doubt]."""

    def __init__(self, model: nn.Module, run: Callable[..., Any], batch: tuple):
        leaves, spec = tree_flatten(batch)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def flat_run(*tensors: Tensor) -> list[Tensor]:
            filled = list(leaves)
            for i, t in zip(places, tensors, strict=True):
                filled[i] = t
            with collecting() as doubts:
                result = run(tree_unflatten(filled, spec), verify=False)
            values, self.out_spec = tree_flatten(result)
            self.values = [None if isinstance(v, Tensor) else v for v in values]
            flag = doubts.any()
            self.has_doubt = flag is not None
            return [v for v in values if isinstance(v, Tensor)] + ([] if flag is None else [flag])

        with attributes_put_back(model):
            traced = make_fx(flat_run, tracing_mode="fake", _allow_non_fake_inputs=True)
            self.graph: GraphModule = traced(*[leaves[i] for i in places])
        self.places = places

    def result(self, outputs: list[Tensor]) -> Any:
        """The step's result from what the graph gave."""
        tensors = iter(outputs)
        return tree_unflatten([next(tensors) if v is None else v for v in self.values], self.out_spec)


class Compiled:
    """The step of a batch, compiled for each kind of batch that it meets."""

    def __init__(self, model: nn.Module, run: Callable[..., Any], *, verify: bool):
        self.model, self.run, self.verify = model, run, verify
        self._known: dict[Any, tuple[Trace, Callable]] = {}

    def __call__(self, *batch: Any) -> Any:
        leaves, spec = tree_flatten(batch)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        key = (spec, tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves))
        if key not in self._known:
            if self.verify:
                self.run(batch, verify=True)
            trace = Trace(self.model, self.run, batch)
            self._known[key] = trace, torch.compile(trace.graph, fullgraph=True, dynamic=False)
        trace, graph = self._known[key]
        with torch.no_grad():
            outputs = graph(*tensors)
        if trace.has_doubt and bool(outputs[-1]):
            return self.run(batch, verify=False)
        return trace.result(outputs)
