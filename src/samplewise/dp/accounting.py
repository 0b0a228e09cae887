"""ε of what was done: steps of noise and sampling, composed by Google's `dp-accounting`."""

import importlib
import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

ACCOUNTANTS = ("pld", "rdp")


class Steps(NamedTuple):
    """So many steps in a row, each a Gaussian mechanism on a Poisson sample."""

    noise_multiplier: float
    """Standard deviation of the noise over the sensitivity, of everything that a step releases taken together."""
    sample_rate: float
    """The probability with which each sample takes part in a step."""
    num: int


def epsilon(history: Iterable[Steps], *, delta: float, accountant: str = "pld") -> float:
    """ε such that these steps, composed, are (ε, delta)-differentially private.

    ε = accountant(compose_i(PoissonSampled(q_i, Gaussian(z_i)) ^ num_i), delta)

    **Guarantee.** For data sets that differ by one sample added or removed, if each step was what the history says: a sum in
    which a sample changes at most C, plus noise of standard deviation z·C, over a sample drawn with probability q for each
    alone. "pld" (privacy loss distributions) is the tighter one, rounded to the safe side; "rdp" (Rényi) bounds it from above.

    | history | ε |
    |-|-|
    | empty | 0 |
    | a step without noise (z = 0, q > 0) | inf |
    | a step that samples nothing (q = 0) | costs nothing |
    | delta = 0, or 1 and above | refused |

    >>> round(epsilon([Steps(1.0, 0.01, 1000)], delta=1e-5), 3)
    1.828
    >>> round(epsilon([Steps(1.0, 0.01, 1000)], delta=1e-5, accountant="rdp"), 3)
    2.101
    """
    if not 0 < delta < 1:
        raise ValueError(f"delta lies between 0 and 1, got {delta}")
    if accountant not in ACCOUNTANTS:
        raise ValueError(f'accountant is "pld" or "rdp", got {accountant!r}')
    taken = [_checked(steps) for steps in history if steps.sample_rate > 0 and steps.num > 0]
    if not taken:
        return 0.0
    if any(steps.noise_multiplier == 0 for steps in taken):
        return math.inf
    dp = _dp_accounting()
    made = (dp.pld.PLDAccountant if accountant == "pld" else dp.rdp.RdpAccountant)()
    with _quiet():
        for z, q, num in taken:
            made.compose(dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(z)), num)
        return float(made.get_epsilon(delta))


def noise_multiplier_for(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    accountant: str = "pld",
    tolerance: float = 1e-3,
) -> float:
    """The smallest noise multiplier z, to within `tolerance` of itself, for which so many steps cost at most the target.

    z = min { z : epsilon([Steps(z, sample_rate, steps)], delta=target_delta) <= target_epsilon }

    **Guarantee.** ε of the result is at most `target_epsilon`: the search ends on its upper side.

    | target | result |
    |-|-|
    | target_epsilon = 0 or below, not finite | refused |
    | no steps | 0 |

    >>> z = noise_multiplier_for(target_epsilon=2.0, target_delta=1e-5, sample_rate=0.01, steps=100, accountant="rdp")
    >>> 1.9 < epsilon([Steps(z, 0.01, 100)], delta=1e-5, accountant="rdp") <= 2.0
    True
    """
    if not 0 < target_epsilon < math.inf:
        raise ValueError(f"target_epsilon is positive and finite, got {target_epsilon}")
    if steps == 0:
        return 0.0

    def cost(z: float) -> float:
        return epsilon([Steps(z, sample_rate, steps)], delta=target_delta, accountant=accountant)

    high, ratio = 1.0, 2.0
    if accountant == "pld":  # whose cost is slow to compute, and a little below that of "rdp"
        wanted: Any = {
            "target_epsilon": target_epsilon,
            "target_delta": target_delta,
            "sample_rate": sample_rate,
            "steps": steps,
        }
        with suppress(ValueError):  # targets so small that Rényi orders do not reach them
            high, ratio = noise_multiplier_for(**wanted, accountant="rdp", tolerance=1e-2), 1.2
    costs = {high: cost(high)}
    while costs[high] > target_epsilon:
        high *= ratio
        if high > 1e6:
            raise ValueError(
                f"no noise multiplier below 1e6 brings {steps} steps at rate {sample_rate} to epsilon {target_epsilon}, "
                f"delta {target_delta}. Ask for fewer steps, a smaller batch or more epsilon."
            )
        costs[high] = cost(high)
    low = high / ratio
    while low > 1e-2:
        costs[low] = costs[low] if low in costs else cost(low)
        if costs[low] > target_epsilon:
            break
        ratio = min(2.0, ratio**2)
        high, low = low, low / ratio
    while high - low > tolerance * high:
        z = _between((low, costs.get(low, math.inf)), (high, costs[high]), target_epsilon, tolerance)
        costs[z] = cost(z)
        low, high = (low, z) if costs[z] <= target_epsilon else (z, high)
    return high


def _between(low: tuple[float, float], high: tuple[float, float], target: float, tolerance: float) -> float:
    """Where to look next for the z that costs the target: a little off a straight line through the logarithms of two (z, cost).

    Above it, unless that is next to `high` already: then below, so that the two close in from both sides.
    """
    (z_low, c_low), (z_high, c_high) = low, high
    if not (math.isfinite(c_low) and c_high > 0) or z_low <= 0:
        return (z_low + z_high) / 2
    share = math.log(c_low / target) / math.log(c_low / c_high)
    z = z_low * (z_high / z_low) ** share
    z = z * (1 + tolerance / 4) if z < z_high * (1 - tolerance) else z_high * (1 - 0.9 * tolerance)
    return z if z_low < z < z_high else (z_low + z_high) / 2


class Accountant:
    """What was done so far: a list of `Steps`, which says all that ε needs.

    >>> accountant = Accountant()
    >>> for _ in range(3):
    ...     accountant.record(noise_multiplier=1.0, sample_rate=0.1)
    >>> accountant.record(noise_multiplier=2.0, sample_rate=0.1)
    >>> accountant.history
    [Steps(noise_multiplier=1.0, sample_rate=0.1, num=3), Steps(noise_multiplier=2.0, sample_rate=0.1, num=1)]
    """

    def __init__(self, history: Iterable[Iterable[float]] = ()):
        self.history = [_checked(Steps(float(z), float(q), int(num))) for z, q, num in history]

    def record(self, *, noise_multiplier: float, sample_rate: float, num: int = 1) -> None:
        """Adds steps to the history."""
        steps = _checked(Steps(float(noise_multiplier), float(sample_rate), num))
        if self.history and self.history[-1][:2] == steps[:2]:
            steps = steps._replace(num=self.history.pop().num + num)
        self.history.append(steps)

    def goes_on_from(self, earlier: "Accountant") -> bool:
        """Whether the history begins with that of another.

        >>> Accountant([(1.0, 0.1, 5)]).goes_on_from(Accountant([(1.0, 0.1, 3)]))
        True
        """
        num, later = len(earlier.history), self.history
        if num == 0:
            return True
        *same, last = earlier.history
        return (
            same == later[: num - 1]
            and len(later) >= num
            and last[:2] == later[num - 1][:2]
            and last.num <= later[num - 1].num
        )

    @property
    def num_steps(self) -> int:
        return sum(steps.num for steps in self.history)

    def epsilon(self, delta: float, *, accountant: str = "pld") -> float:
        """`epsilon(history)` of everything so far."""
        return epsilon(self.history, delta=delta, accountant=accountant)


def _checked(steps: Steps) -> Steps:
    z, q, num = steps
    if not (z >= 0 and z < math.inf and 0 <= q <= 1 and num >= 0):
        raise ValueError(f"steps have a noise multiplier of 0 or more, a rate in [0, 1] and a number, got {tuple(steps)}")
    return steps


@contextmanager
def _quiet() -> Iterator[None]:
    """Without a line for every Rényi order that is left out as its series does not converge, which only raises ε."""
    log = logging.getLogger("absl")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _dp_accounting() -> Any:
    try:
        dp = importlib.import_module("dp_accounting")
        for part in ("pld", "rdp"):
            importlib.import_module(f"dp_accounting.{part}")
    except ImportError as error:
        raise ImportError("epsilon is computed by the package dp-accounting: pip install 'samplewise[dp]'") from error
    return dp
