"""What a step of recurrent layers costs over plain training, and over what peers cost, each method in a fresh process.

python benchmarks/recurrent.py       all models and methods; writes benchmarks/results/recurrent-cpu.md
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import step
import torch
from step import METHODS, Step, main, opacus
from torch import Tensor, nn


class Tagger(nn.Module):
    def __init__(self, kind: Callable[..., nn.RNNBase], **how: int):
        super().__init__()
        self.rnn = kind(64, 128, batch_first=True, **how)
        self.head = nn.Linear(128 * (1 + how.get("bidirectional", 0)), 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0].mean(1))


def tagger(kind: Callable[..., nn.RNNBase], **how: int) -> tuple[nn.Module, Tensor, Tensor]:
    """64 features, width 128, T = 100, B = 32."""
    return Tagger(kind, **how), torch.randn(32, 100, 64), torch.randint(10, (32,))


def opacus_dp(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Opacus's hooks on its own recurrent layers, which are what it has gradients for."""
    from opacus.layers import DPGRU, DPLSTM, DPRNN

    kinds = {nn.LSTM: DPLSTM, nn.GRU: DPGRU, nn.RNN: DPRNN}
    rnn = model.rnn
    how = {"num_layers": rnn.num_layers, "bidirectional": rnn.bidirectional}
    return opacus("hooks")(Tagger(kinds[type(rnn)], **how), x, y)


MODELS = {
    "LSTM": partial(tagger, nn.LSTM),
    "LSTM, 2 layers, both directions": partial(tagger, nn.LSTM, num_layers=2, bidirectional=True),
    "GRU": partial(tagger, nn.GRU),
    "RNN": partial(tagger, nn.RNN),
}


if __name__ == "__main__":
    kept = ("plain", "samplewise, clipped sum", "samplewise, gradients", "vmap(grad), gradients")
    step.MODELS = MODELS
    step.METHODS = {name: METHODS[name] for name in kept} | {"Opacus DP layers, clipped sum": opacus_dp}
    main(__file__, Path(__file__).parent / "results" / "recurrent-cpu.md")
