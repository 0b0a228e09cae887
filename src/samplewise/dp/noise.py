"""Gaussian noise for private sums: whose randomness, how much, and how it is added."""

import hashlib
import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

MT_WORDS, MT_FIRST_BYTE = 624, 24
"""Where the state of torch's Mersenne twister lies in what `get_state` gives: a word in each eight bytes from there on."""
GRID_BITS = 20
"""Secure noise is rounded to a grid 2^20 times finer than its standard deviation."""


def generator(seed: int | None = None, *, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator of this seed, or one whose state comes from the operating system.

    torch seeds its CPU generator with 32 bits whatever it is given, so that noise could be found by trying all seeds; here
    all 19,968 bits of the state are the operating system's. On CUDA the seed has 64 bits.
    """
    made = torch.Generator(device=device)
    if seed is not None:
        return made.manual_seed(seed)
    if made.device.type != "cpu":
        return made.manual_seed(int.from_bytes(os.urandom(8), "little") >> 1)
    state = made.manual_seed(0).get_state()
    words = torch.frombuffer(bytearray(os.urandom(4 * MT_WORDS)), dtype=torch.uint8).reshape(MT_WORDS, 4)
    state[MT_FIRST_BYTE : MT_FIRST_BYTE + 8 * MT_WORDS].view(MT_WORDS, 8)[:, :4] = words
    made.set_state(state)
    return made


def derived_seed(seed: int, *parts: int) -> int:
    """A seed for one of several things that a seed determines, the same in every process."""
    text = " ".join(map(str, (seed, *parts))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def noise_stds(bounds: Mapping[str, float], noise_multiplier: float) -> dict[str, float]:
    """{group: standard deviation of the noise on its sum}: z · C_g · sqrt(number of groups).

    **Guarantee.** Each group is a Gaussian mechanism of sensitivity C_g; together, scaled to noise 1, they have sensitivity
    sqrt(sum_g (C_g / std_g)²) = 1/z, so that all groups together cost what one flat bound costs at noise multiplier z.

    | | |
    |-|-|
    | z = 0 | no noise |
    | a bound that is inf, z > 0 | refused |

    >>> noise_stds({"all": 2.0}, 1.5)
    {'all': 3.0}
    >>> noise_stds({"a": 3.0, "b": 4.0, "c": 1.0, "d": 1.0}, 1.0)
    {'a': 6.0, 'b': 8.0, 'c': 2.0, 'd': 2.0}
    """
    if noise_multiplier == 0:
        return dict.fromkeys(bounds, 0.0)
    if math.inf in bounds.values():
        raise ValueError(
            "without a bound on the gradients (max_grad_norm=inf) no amount of noise makes them private. Give a bound, or "
            "noise_multiplier=0 for a run that is not private."
        )
    return {group: noise_multiplier * bound * math.sqrt(len(bounds)) for group, bound in bounds.items()}


class Noise:
    """Adds Gaussian noise; one source of randomness for a run.

    `seed` is for tests: who knows it can take the noise off. Without one the state comes from the operating system, and is
    never saved, so that a run that goes on never repeats the noise that another went on with.

    `secure`: every bit comes from the operating system's cryptographic generator; a number is the sum of four Gaussians (Holohan
    and Braghin, 2021), added in float64, and the result is rounded to a grid that does not depend on the data.
    """

    def __init__(self, seed: int | None = None, *, secure: bool = False):
        if secure and seed is not None:
            raise ValueError("secure noise is not to be repeated: secure=True takes no seed.")
        self.seed, self.secure = seed, secure
        self._generators: dict[torch.device, torch.Generator] = {}

    def added(self, total: Tensor, std: float) -> Tensor:
        """total + N(0, std²) element by element, in float32 or better; both parts of a complex number get it.

        **Guarantee.** That of the Gaussian mechanism in real numbers. Floating-point numbers are not real numbers: which
        of them can come out depends on `total` in the last bits (Mironov, 2012). `secure=True` rounds those bits off and
        makes the noise hard to invert. It is no proof: the Gaussian itself is computed in float64, to 53 bits and cut at
        about 8.5 standard deviations a term, and a sum of samples in float32 is rounded before the noise.

        | | |
        |-|-|
        | std = 0 | total itself |
        | std NaN, negative or inf | refused |
        | total not finite | stays so: clipped sums never are |
        """
        if not 0 <= std < math.inf:
            raise ValueError(f"noise has a standard deviation that is 0 or more and finite, got {std}")
        if total.is_complex():
            return torch.view_as_complex(self.added(torch.view_as_real(total), std).contiguous())
        if std == 0:
            return total
        if not self.secure:
            return total + self._normal(total) * std
        grid = 2.0 ** (math.floor(math.log2(std)) - GRID_BITS)
        noisy = total.double() + secure_normal(total.numel()).reshape(total.shape).to(total.device) * std
        return ((noisy / grid).round() * grid).to(total.dtype)

    def number(self, value: float, std: float) -> float:
        """value + N(0, std²)."""
        return float(self.added(torch.tensor(value, dtype=torch.float64, device="cpu"), std))

    def state_dict(self) -> dict[str, Any]:
        """Where a seeded generator stands; nothing of one that is the operating system's."""
        if self.seed is None:
            return {}
        return {str(device): made.get_state() for device, made in self._generators.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, saved in state.items():
            device = torch.device(name)
            made = generator(0, device=device)
            made.set_state(saved.cpu())
            self._generators[device] = made

    def _normal(self, like: Tensor) -> Tensor:
        if like.device not in self._generators:
            self._generators[like.device] = generator(self.seed, device=like.device)
        return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=self._generators[like.device])


def secure_normal(num: int) -> Tensor:
    """So many standard normal numbers in float64, each the sum of four by Box and Muller over 2, from `os.urandom`."""
    bits = torch.frombuffer(bytearray(os.urandom(8 * 4 * max(1, num))), dtype=torch.int64)[: 4 * num]
    uniform = ((bits >> 11) & ((1 << 53) - 1)).double().add_(0.5).mul_(2.0**-53).reshape(2, 2, num)  # in (0, 1)
    radius, angle = (-2 * uniform[0].log()).sqrt(), 2 * math.pi * uniform[1]
    return (radius * angle.cos() + radius * angle.sin()).sum(0) / 2
