"""The least that a flat-clipped step can cost over plain training, from the shapes of the layers and two rates of the device."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Layer(NamedTuple):
    """A weight p×d that T positions of each sample share."""

    T: int
    d: int
    p: int
    trained: bool = True


class Rates(NamedTuple):
    """What the device does in a second, in the dtype of the step."""

    flops: float
    bytes: float


def floor(layers: Sequence[Layer], rates: Rates, num_bytes: int) -> float:
    """Σ (3 + α)u / Σ 3u over the layers, with u = 2Tpd FLOPs a sample: a clipped step over a plain one, by its products alone.

    A plain step of a layer is three products of u: forward, gradient of the input, gradient of the weight. No clipped weight
    gradient can begin before all norms are known, so norms cost α u besides, the least of

    - 1: the weight gradient once more, squared and let go;
    - T(d + p) / 2pd: the Gram matrices of positions, half of each;
    - num_bytes · flops / (T · bytes): gradients built once in place of the batch's, written and read again: 2·pd·num_bytes a
      sample at `rates.bytes`, over u at `rates.flops`.

    Frozen layers cost 2u either way. Attention's own products, and passes over activations, cost the same in both steps and
    are left out, so the ratio of whole steps may be a little lower.

    GPT-2's layers at 100 positions, where Gram matrices are cheapest, and at 4096, where keeping gradients is:

    >>> h200 = Rates(flops=790e12, bytes=4.3e12)
    >>> block = [(768, 2304), (768, 768), (768, 3072), (3072, 768)]
    >>> round(floor([Layer(100, d, p) for d, p in block], h200, num_bytes=2), 3)
    1.029
    >>> round(floor([Layer(4096, d, p) for d, p in block], h200, num_bytes=2), 3)
    1.03
    """

    def alpha(T: int, d: int, p: int) -> float:
        return min(1.0, T * (d + p) / (2 * p * d), num_bytes * rates.flops / (T * rates.bytes))

    u = [2 * T * d * p for T, d, p, _ in layers]
    plain = sum(u * (3 if layer.trained else 2) for u, layer in zip(u, layers, strict=True))
    more = sum(u * alpha(*layer[:3]) for u, layer in zip(u, layers, strict=True) if layer.trained)
    return (plain + more) / plain


def layers_of(model: nn.Module, run: Callable[[], Any], num_samples: int) -> list[Layer]:
    """The linear, convolutional and recurrent layers that `run()` calls, with the positions it gives them.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 10))
    >>> layers_of(model, lambda: model(torch.randn(2, 3, 8, 8)), num_samples=2)
    [Layer(T=36, d=27, p=8, trained=True), Layer(T=1, d=288, p=10, trained=True)]
    """
    found: list[Layer] = []

    def called(module: Any, _: Any, out: Any) -> None:
        if isinstance(module, nn.LSTM):
            T, H = out[0].shape[1], module.hidden_size
            shapes = [(T, module.input_size if k == 0 else H, 4 * H) for k in range(module.num_layers)]
            shapes += [(T, H, 4 * H)] * module.num_layers
            found.extend(Layer(*shape) for shape in shapes)
        elif isinstance(module, nn.Conv2d):
            T, p = math.prod(out.shape[2:]), module.out_channels // module.groups
            d = module.in_channels // module.groups * math.prod(module.kernel_size)
            found.extend([Layer(T, d, p, module.weight.requires_grad)] * module.groups)
        else:
            d, p = module.weight.shape if type(module).__name__ == "Conv1D" else module.weight.shape[::-1]
            found.append(Layer(out.numel() // p // num_samples, d, p, module.weight.requires_grad))

    wanted = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d | nn.LSTM) or type(m).__name__ == "Conv1D"]
    hooks = [module.register_forward_hook(called) for module in wanted]
    run()
    for hook in hooks:
        hook.remove()
    return found


def measured_rates(device: str, dtype: torch.dtype) -> Rates:
    """The rates of a large matrix product and of a large copy, reads and writes counted; the best of five."""
    n = 8192 if device == "cuda" else 256
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    x = torch.randn(2**28 if device == "cuda" else 2**18, device=device)
    y = torch.empty_like(x)
    return Rates(2 * n**3 / seconds(lambda: a @ b, a), 2 * x.nbytes / seconds(lambda: y.copy_(x), x))


def seconds(run: Callable[[], Any], on: Tensor) -> float:
    """The best of five, after one to warm up."""
    best = math.inf
    for _ in range(6):
        start = time.perf_counter()
        run()
        if on.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best
