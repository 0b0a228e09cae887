"""Buffers of a private model, held against what they were: data must not be left in them."""

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from samplewise.errors import SamplewiseError


class Buffers:
    """Copies of a model's floating-point buffers.

    **Guarantee.** A buffer that took in anything since, whether under `no_grad`, by `.data` or by a number, is found.

    | | |
    |-|-|
    | integers | taken for counters of calls |
    | the vectors of torch's spectral norms | made of weights alone |
    | a buffer that was put there, or changed its shape | found |
    """

    def __init__(self, model: nn.Module):
        self._before = {name: b.detach().clone() for name, b in _watched(model).items()}

    def refuse_changes(self, model: nn.Module) -> None:
        """Raises if a buffer is not what it was."""
        now = _watched(model)
        changed = sorted(now.keys() ^ self._before.keys())
        kept = [(name, now[name], before) for name, before in self._before.items() if name in now]
        changed += [name for name, b, before in kept if (b.shape, b.dtype) != (before.shape, before.dtype)]
        alike = [(name, b.detach(), before) for name, b, before in kept if name not in changed]
        flags = [_differs(b, before.to(b.device)) for _, b, before in alike]
        if flags and bool(
            torch.stack([flag.to(flags[0].device) for flag in flags]).any()
        ):  # one look for all, as a GPU waits for it
            changed += [name for (name, _, _), flag in zip(alike, flags, strict=True) if flag]
        if changed:
            raise SamplewiseError(
                f"buffer {changed[0]!r} changed between a batch and its step: it may have taken in data, which it would carry without "
                "clipping and noise. Remove such statistics (samplewise.dp.fix replaces those of torch's norms); count in an integer "
                "buffer; change a buffer that is no statistic after step()."
            )


def _differs(b: Tensor, before: Tensor) -> Tensor:
    return ((b != before) & ~(b.isnan() & before.isnan())).any()


def _watched(model: nn.Module) -> dict[str, Tensor]:
    """The floating-point buffers, but for those that are made of weights alone."""
    found = {}
    for prefix, module in model.named_modules():
        names = {"_u", "_v"} if isinstance(module, _SpectralNorm) else set()
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                names |= {f"{hook.name}_u", f"{hook.name}_v"}
        for name, b in module._buffers.items():
            if b is not None and name not in names and (b.is_floating_point() or b.is_complex()):
                found[f"{prefix}.{name}" if prefix else name] = b
    return found
