"""How well a ranking finds the rows that matter: recall, average precision, rows to read."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Quality:
    """What a ranking of `num_rows` rows found of the `num_wanted` among them; for chance these are expectations.

    `found` counts the wanted rows among the first `num_wanted`, where precision and recall are the same number.
    `rows_to_read` is how far down one reads to meet 90% of them.
    """

    num_rows: int
    num_wanted: int
    found: float
    average_precision: float
    rows_to_read: float

    @property
    def recall(self) -> float:
        return self.found / self.num_wanted


def ranked(scores: Tensor) -> Tensor:
    """The rows [N] from the highest score to the lowest; rows that tie keep their order.

    >>> ranked(torch.tensor([0.1, 0.9, 0.1]))
    tensor([1, 0, 2])
    """
    return scores.argsort(descending=True, stable=True)


def recall_curve(order: Tensor, is_wanted: Tensor) -> Tensor:
    """r [N + 1] with r[k] the fraction of the wanted rows that stand among the first k of `order`.

    >>> recall_curve(torch.tensor([2, 0, 1]), torch.tensor([True, False, True]))
    tensor([0.0000, 0.5000, 1.0000, 1.0000])
    """
    hits = is_wanted[order].cumsum(0) / is_wanted.sum()
    return torch.cat([hits.new_zeros(1), hits])


def average_precision(order: Tensor, is_wanted: Tensor) -> float:
    """The mean, over the wanted rows, of the precision at the place where each stands in `order`.

    Places 1 and 3 of three: the mean of 1/1 and 2/3.

    >>> round(average_precision(torch.tensor([2, 1, 0]), torch.tensor([True, False, True])), 4)
    0.8333
    """
    places = is_wanted[order].nonzero().squeeze(1) + 1
    return (torch.arange(1, len(places) + 1) / places).mean().item()


def quality(order: Tensor, is_wanted: Tensor) -> Quality:
    """What `order` found of the wanted rows."""
    N, k = len(order), int(is_wanted.sum())
    places = is_wanted[order].nonzero().squeeze(1) + 1
    return Quality(
        num_rows=N,
        num_wanted=k,
        found=int((places <= k).sum()),
        average_precision=average_precision(order, is_wanted),
        rows_to_read=int(places[_nine_tenths(k) - 1]),
    )


def chance(num_rows: int, num_wanted: int) -> Quality:
    """What a random order finds on average.

    found = k²/N, average precision = (H + (N - H) (k - 1) / (N - 1)) / N with H = sum_{i<=N} 1/i, and the m-th wanted row
    stands at m (N + 1) / (k + 1).
    """
    N, k = num_rows, num_wanted
    H = (1 / torch.arange(1, N + 1, dtype=torch.float64)).sum().item()
    return Quality(
        num_rows=N,
        num_wanted=k,
        found=k * k / N,
        average_precision=(H + (N - H) * (k - 1) / max(N - 1, 1)) / N,
        rows_to_read=_nine_tenths(k) * (N + 1) / (k + 1),
    )


def _nine_tenths(k: int) -> int:
    return -(-9 * k // 10)
