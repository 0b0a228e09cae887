"""In which precision sums are accumulated, and to which torch rounds."""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from samplewise.tracing import is_tracing

HALF = (torch.float16, torch.bfloat16)


def wide(t: Tensor) -> Tensor:
    """`t` in the dtype that sums are accumulated in: float32 for half precision, otherwise its own."""
    return t.float() if t.dtype in HALF else t


def wide_dtype(t: Tensor) -> torch.dtype:
    """The dtype of `wide(t)`."""
    return torch.float32 if t.dtype in HALF else t.dtype


def scaled(t: Tensor, w: Tensor) -> Tensor:
    """t * w in t's dtype, rounded once: w is of the dtype of `wide(t)`, or real where t is complex."""
    if t.dtype not in HALF or w.requires_grad or is_tracing():
        return (t * w).to(t.dtype)
    return torch.mul(t, w, out=torch.empty_like(t))  # one pass where `to` would make two


def wide_product(x: Tensor, y: Tensor) -> Tensor:
    """x @ y for [..., n, k] and [..., k, m], accumulated and given in float32 or better.

    On a GPU half precision goes through its tensor cores as it is: a product of two such numbers is exact in float32.
    """
    if not (x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)):
        return wide(x) @ wide(y)
    lead = x.shape[:-2]
    product = torch.bmm(x.flatten(0, -3), y.flatten(0, -3), out_dtype=torch.float32)
    return product.reshape(*lead, *product.shape[1:])


def kept_dtype(t: Tensor) -> torch.dtype:
    """In which gradients built from `t` are kept: float32 or better, but for bfloat16 on a GPU, where memory is what building costs.

    Norms are then those of the rounded gradients, which the sums are made of.
    """
    return t.dtype if t.is_cuda and t.dtype == torch.bfloat16 else wide_dtype(t)


def rounded_kinds(tensors: Iterable[Tensor], dtypes: Collection[torch.dtype]) -> set[str]:
    """Which of "matmul", "conv" and "rnn" may round the float32 numbers that they take on these tensors' devices, if of `dtypes`.

    TF32 keeps 11 bits, bfloat16 8. torch's default is TF32 for convolutions and recurrent layers on CUDA.
    """
    kinds = set()
    if torch.float32 not in dtypes and torch.complex64 not in dtypes:
        return kinds
    backends = torch.backends
    of_device = {"cpu": (backends.mkldnn, backends.mkldnn), "cuda": (backends.cuda, backends.cudnn)}
    for products, layers in (of_device[device] for device in {t.device.type for t in tensors} & of_device.keys()):
        settings = {"matmul": products.matmul, "conv": layers.conv, "rnn": layers.rnn}
        kinds |= {kind for kind, setting in settings.items() if setting.fp32_precision in ("tf32", "bf16")}
    return kinds
