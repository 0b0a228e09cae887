"""What a batch is of the draw that it comes from."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Part:
    """What one batch handed out is of the Poisson sample that it was drawn in."""

    draw: int
    """The place of that sample in the epoch."""
    num_samples: int
    ids: Tensor | None
    """The sample of every row, where samples have several."""
    is_last: bool

    @property
    def num_rows(self) -> int:
        return self.num_samples if self.ids is None else len(self.ids)
