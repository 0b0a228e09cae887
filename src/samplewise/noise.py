"""The gradient noise scale: how many samples make a batch whose gradient is as much signal as noise."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class NoiseScale:
    """tr(Σ) / |G|² (McCandlish et al., 2018) from unbiased estimates of both, Σ the covariance of gradients, G their mean."""

    value: float
    """Negative where the estimate of |G|² is: the samples then say only that it is large."""
    standard_error: float
    """From the jackknife; NaN where leaving one out leaves nothing to estimate from."""
    trace: float
    """The estimate of tr(Σ)."""
    sq_norm: float
    """The estimate of |G|²."""


def of_samples(q_B: Tensor, d_B: Tensor) -> NoiseScale:
    """From q[b] = |G[b]|² and d[b] = <G[b], sum of all>: leaving out b, the sum of the others has |S|² - 2 d[b] + q[b].

    >>> q, d = torch.tensor([1.0, 1.0]), torch.tensor([1.6, 1.6])  # two unit vectors with inner product 0.6
    >>> noise = of_samples(q, d)
    >>> round(noise.trace, 6), round(noise.sq_norm, 6), round(noise.value, 6)
    (0.4, 0.6, 0.666667)
    """
    q, d, n = q_B.double(), d_B.double(), torch.tensor(float(len(q_B)), dtype=torch.float64, device=q_B.device)
    Q, N = q.sum(), d.sum()
    return _with_error(_estimate(n, n * (n - 1), Q, N), _estimate(n - 1, (n - 1) * (n - 2), Q - q, N - 2 * d + q))


def of_batches(n_K: Tensor, Q_K: Tensor, N_K: Tensor) -> NoiseScale:
    """From the size, sum of squared norms and squared norm of the sum of K batches; pairs of samples count within a batch."""
    n, Q, N = n_K.double(), Q_K.double(), N_K.double()
    sums = [n, n * (n - 1), Q, N]
    totals = [t.sum() for t in sums]
    return _with_error(_estimate(*totals), _estimate(*(total - t for total, t in zip(totals, sums, strict=True))))


def _estimate(num: Tensor, num_pairs: Tensor, Q: Tensor, N: Tensor) -> tuple[Tensor, Tensor]:
    """tr(Σ) = E|g|² - |G|² and |G|² = the mean of <g, g'> over ordered pairs of different samples."""
    sq_norm = (N - Q) / num_pairs
    return Q / num - sq_norm, sq_norm


def _with_error(whole: tuple[Tensor, Tensor], without_one: tuple[Tensor, Tensor]) -> NoiseScale:
    (trace, sq_norm), (traces, sq_norms) = whole, without_one
    values, n = traces / sq_norms, len(traces)
    error = ((n - 1) / n * (values - values.mean()).square().sum()).sqrt()
    return NoiseScale(float(trace / sq_norm), float(error), float(trace), float(sq_norm))
