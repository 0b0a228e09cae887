"""A second backward: weighted sums of gradients of which the first one left norms alone."""

from collections import Counter

import torch
from torch import Tensor

from samplewise.factors.base import Factor
from samplewise.tap import Targets


class SecondPass:
    """Adds up the gradients of the samples that count, use by use, as a backward of weighted losses brings them."""

    def __init__(self, samples: Tensor | None, anchor: Tensor):
        """`samples` count, or all of them: what is not finite is left out by selection. All uses hang on the `anchor`."""
        self.samples, self._anchor = samples, anchor
        self.sums: dict[str, Tensor] = {}
        self.num_taken: Counter[str] = Counter()
        """How many uses of each parameter were brought."""
        self.has_run = False
        """Whether some sample had a weight."""

    def run(self, losses: Tensor, w: Tensor) -> None:
        """Backward of sum_i w[i] losses[i] over those with a weight; the graph is kept for another.

        It ends at the uses: what is not captured got its gradient from the first backward.
        """
        w = w.to(losses.device)
        counted = w.nonzero().squeeze(1)
        if len(counted):
            self.has_run = True
            with torch.enable_grad():
                weighted = (losses[counted] * w[counted]).sum()
            weighted.backward(retain_graph=True, inputs=[self._anchor])

    def take(self, targets: Targets, factor: Factor) -> None:
        """Adds the share of one use, as backward brings it."""
        for name, pull in targets:
            self.num_taken[name] += 1
            part = pull(factor)
            device = part.tensors()[0].device
            if self.samples is not None:
                part = part.select(self.samples.to(device))
            total = part.weighted_sum(torch.ones(part.num_samples, dtype=torch.float64, device=device))
            self.sums[name] = self.sums[name] + total if name in self.sums else total
