"""A clipping bound that follows a quantile of the gradient norms, privately (Andrew et al., 2021)."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Adaptive:
    """How the bound follows the norms: after each step C ← C · exp(-learning_rate · (f - quantile)).

    f = 1/2 + (sum_b (1[‖G[b]‖ <= C] - 1/2) + N(0, count_noise²)) / expected batch size

    **Guarantee.** One sample changes the sum by 1/2, and the count is released together with the clipped sum, so the two
    are one Gaussian mechanism: the sum gets the more noise (`sum_noise_multiplier`) that makes the two together cost what the
    noise multiplier says.

    | sample | counts as |
    |-|-|
    | norm 0 | below |
    | inf or NaN | above (and is left out of the sum) |
    | empty batch | f = 1/2 + noise |
    """

    quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise: float | None = None
    """Standard deviation of the noise on the count; if None a twentieth of the expected batch size, or the noise multiplier where
    that is more."""

    def __post_init__(self) -> None:
        if not 0 <= self.quantile <= 1:
            raise ValueError(f"a quantile lies in [0, 1], got {self.quantile}")
        if not 0 <= self.learning_rate < math.inf:
            raise ValueError(f"the learning rate of the bound is 0 or more, got {self.learning_rate}")
        if self.count_noise is not None and not self.count_noise > 0:
            raise ValueError(
                f"the count of norms below the bound is released, so its noise must be positive, got {self.count_noise}"
            )

    def count_std(self, expected_batch_size: float, noise_multiplier: float) -> float:
        return max(expected_batch_size / 20, noise_multiplier) if self.count_noise is None else self.count_noise

    def updated(self, bound: float, centred_count: float, expected_batch_size: float) -> float:
        """The next bound; `centred_count` is sum_b (1[below] - 1/2) with its noise.

        >>> round(Adaptive(quantile=0.5, learning_rate=1.0).updated(1.0, 2.5, 10.0), 4)  # three quarters are below
        0.7788
        """
        share = 0.5 + centred_count / expected_batch_size
        return bound * math.exp(-self.learning_rate * (min(max(share, 0.0), 1.0) - self.quantile))


def sum_noise_multiplier(noise_multiplier: float, count_std: float) -> float:
    """The noise multiplier of the sum, z_sum, such that sum and count together have `noise_multiplier` z.

    1/z² = 1/z_sum² + 1/(2 count_std)²

    **Guarantee.** Two Gaussian mechanisms on the same samples, sensitivities 1 and 1/2, noises z_sum and count_std, are after
    scaling one of sensitivity sqrt(1/z_sum² + 1/(4 count_std²)) and noise 1.

    | noise | result |
    |-|-|
    | z = 0 | 0: nothing is private |
    | 2 count_std <= z | refused: the count alone would cost more |

    >>> z = sum_noise_multiplier(1.0, 5.0)
    >>> round(1 / z**2 + 1 / 10.0**2, 6)
    1.0
    """
    if noise_multiplier == 0:
        return 0.0
    if 2 * count_std <= noise_multiplier:
        raise ValueError(
            f"noise of {count_std} on the count of norms below the bound costs more than the whole step may "
            f"(noise multiplier {noise_multiplier}). Give it more: Adaptive(count_noise=...) above {noise_multiplier / 2}."
        )
    return (noise_multiplier**-2 - (2 * count_std) ** -2) ** -0.5
