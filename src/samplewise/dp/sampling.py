"""Poisson samples: every unit takes part in a step with the same probability, each by itself."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Units:
    """What is sampled and protected as one: a row of the data set, or all rows of one user.

    `ids` has for every row the number of its unit, from 0 on, or is None where each row is its own.
    """

    num: int
    ids: Tensor | None = None

    @classmethod
    def of(cls, num_rows: int, sample_ids: Tensor | Sequence[int] | None = None) -> "Units":
        """The units of so many rows; rows of equal `sample_ids` are of one.

        >>> units = Units.of(4, torch.tensor([7, 5, 7, 7]))
        >>> units.num, units.rows(torch.tensor([1]))
        (2, [[0, 2, 3]])
        """
        if sample_ids is None:
            return cls(num_rows)
        given = torch.as_tensor(sample_ids, device="cpu")
        if given.shape != (num_rows,) or given.is_floating_point():
            raise ValueError(
                f"sample_ids has one integer a row, shape ({num_rows},), got {tuple(given.shape)} of {given.dtype}"
            )
        found, ids = given.unique(return_inverse=True)
        return cls(len(found), ids)

    def rows(self, units: Tensor) -> list[list[int]]:
        """The rows of each of these units."""
        if self.ids is None:
            return [[row] for row in units.tolist()]
        rows: dict[int, list[int]] = {unit: [] for unit in units.tolist()}
        for row in torch.isin(self.ids, units).nonzero().squeeze(1).tolist():
            rows[int(self.ids[row])].append(row)
        return list(rows.values())

    @property
    def most_rows(self) -> int:
        """How many rows the largest unit has."""
        return 1 if self.ids is None else int(torch.bincount(self.ids).max()) if len(self.ids) else 0


def poisson_sample(num: int, rate: float, *, generator: torch.Generator) -> Tensor:
    """The units drawn, in order: each of `num` with probability `rate`, independently of all others.

    **Guarantee.** The probability is `rate` to within 2^-53 (numbers of float32, of 24 bits, would draw at twice a rate
    of 3e-8). One unit's draw tells nothing of another's.

    | | drawn |
    |-|-|
    | rate 0 | none |
    | rate 1 | all |
    | no units | none |
    | by chance | none: an empty batch, which takes a step of noise |

    >>> poisson_sample(4, 1.0, generator=torch.Generator().manual_seed(0)).tolist()
    [0, 1, 2, 3]
    """
    return (torch.rand(num, dtype=torch.float64, generator=generator, device=generator.device) < rate).nonzero().squeeze(1)


def split(units: Sequence[Sequence[int]], max_rows: int | None) -> Iterator[list[Sequence[int]]]:
    """The units in runs of at most `max_rows` rows; a unit stays whole. At least one run, be it empty.

    >>> list(split([[0], [1, 2], [3]], 3))
    [[[0], [1, 2]], [[3]]]
    """
    run: list[Sequence[int]] = []
    size = 0
    for rows in units:
        if max_rows is not None and run and size + len(rows) > max_rows:
            yield run
            run, size = [], 0
        run.append(rows)
        size += len(rows)
    yield run
