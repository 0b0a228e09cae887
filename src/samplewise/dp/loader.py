"""A loader whose batches are Poisson samples, and which knows of each batch what a private step must know."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from samplewise.dp.collating import Collate
from samplewise.dp.noise import derived_seed, generator
from samplewise.dp.part import Part
from samplewise.dp.sampling import Units, poisson_sample, split
from samplewise.errors import SamplewiseError


class Listener(Protocol):
    """Hears what the loader hands out."""

    def received(self, part: Part, batch: Any) -> None: ...
    def completed(self) -> None: ...
    def ended(self) -> None: ...


class PoissonLoader:
    """Batches of a data set in which every sample is drawn with probability `sample_rate`, each by itself.

    An epoch is `steps` draws; a sample may come several times in it or never. A draw of no sample gives tensors of 0 rows. With
    `max_physical_batch_size` a draw comes in several batches of at most so many rows, of which the last makes the step.

    **Guarantee.** The rate that is accounted is the rate of the draws. Draws come from the operating system's entropy, new in
    every process, and are nowhere saved: the rate amplifies privacy only while nobody knows who was drawn. With `seed` they are
    determined, for tests.

    | | |
    |-|-|
    | a sample twice in a batch | never: a draw asks each sample once |
    | rows of one user (`sample_ids`) | drawn together, one sample, never split |
    | `views` = K | each row fetched K times, one sample |
    | the last batch of an epoch | like any other; `drop_last` has no meaning |
    | workers that fetch ahead | draws are counted when they are handed out |
    | left by `break` | the next iteration is a new epoch |

    >>> loader = PoissonLoader(list(range(100)), sample_rate=0.1, steps=3, seed=0)
    >>> [len(batch) for batch in loader]
    [9, 13, 13]
    """

    def __init__(
        self,
        dataset: Any,
        *,
        sample_rate: float,
        steps: int,
        sample_ids: Tensor | Sequence[int] | None = None,
        views: int = 1,
        max_physical_batch_size: int | None = None,
        collate_fn: Callable[[list], Any] | None = None,
        seed: int | None = None,
        batch_dim: int = 0,
        **options: Any,
    ):
        """`options` are those of `DataLoader` that tell how rows are fetched (num_workers, pin_memory ...)."""
        if not 0 < sample_rate <= 1:
            raise ValueError(f"a sample rate lies in (0, 1], got {sample_rate}")
        if steps < 1 or views < 1:
            raise ValueError(f"an epoch has a step or more and a sample a view or more, got {steps} and {views}")
        self.dataset, self._sample_rate, self.steps, self.views = dataset, sample_rate, steps, views
        self.units = Units.of(len(dataset), sample_ids)
        self.max_physical_batch_size, self.seed, self.batch_dim = max_physical_batch_size, seed, batch_dim
        most = self.units.most_rows * views
        if max_physical_batch_size is not None and most > max_physical_batch_size:
            raise ValueError(
                f"a sample has {most} rows, and max_physical_batch_size is {max_physical_batch_size}: its gradient is clipped as "
                "one, so that its rows cannot be split. Allow as many rows, or keep fewer of it."
            )
        self._collate = Collate(collate_fn or default_collate, dataset, batch_dim)
        self._options = options
        self.epoch = self.position = 0
        """Which draw comes next: of which epoch, and its place in it."""
        self._iteration = 0
        self._listener: weakref.ref[Listener] | None = None

    @classmethod
    def of(
        cls,
        loader: DataLoader,
        *,
        sample_ids: Tensor | Sequence[int] | None = None,
        views: int = 1,
        max_physical_batch_size: int | None = None,
        seed: int | None = None,
        batch_dim: int = 0,
    ) -> "PoissonLoader":
        """The loader that draws by Poisson sampling what `loader` takes in order or shuffled: batch_size / N is the rate."""
        _refuse_other_sampling(loader)
        assert loader.batch_size is not None
        units = Units.of(len(loader.dataset), sample_ids)  # type: ignore[arg-type]
        if units.num == 0:
            raise ValueError("the loader's data set is empty")
        return cls(
            loader.dataset,
            sample_rate=min(1.0, loader.batch_size / units.num),
            steps=max(1, -(-units.num // loader.batch_size)),
            sample_ids=sample_ids,
            views=views,
            max_physical_batch_size=max_physical_batch_size,
            collate_fn=loader.collate_fn,
            seed=seed,
            batch_dim=batch_dim,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
        )

    @property
    def sample_rate(self) -> float:
        """The probability with which a sample is drawn; fixed, as draws are made ahead of the steps that account for them."""
        return self._sample_rate

    @property
    def batch_size(self) -> float:
        """The expected number of samples in a draw: rate times their number, which is taken to be public."""
        return self.sample_rate * self.units.num

    def __len__(self) -> int:
        if self.max_physical_batch_size is not None:
            raise TypeError("how many batches draws are split into is random, so that this loader has no length")
        return self.steps

    def attach(self, listener: Listener) -> None:
        """From now on tells the listener of every batch that it hands out."""
        if self._listener is not None and self._listener() is not None:
            raise SamplewiseError("this loader feeds another private optimizer already. Make one loader for each.")
        self._listener = weakref.ref(listener)

    def __iter__(self) -> Iterator[Any]:
        self._iteration += 1
        mine = self._iteration
        parts: deque[Part] = deque()
        self._tell(None)  # an older iteration, if one was left alive within a draw, ends here
        try:
            for batch in self._batches(self.position, parts):
                if self._iteration != mine:
                    raise SamplewiseError(
                        "an older iteration over a private loader went on after a newer one had begun, so that it is not known "
                        "which batch a step is for. Use one at a time."
                    )
                part = parts.popleft()
                self.position = part.draw
                self._tell(part, batch)
                yield batch
                self.position = part.draw + part.is_last
            if (listener := self._heard_by()) is not None:
                listener.completed()
            self.epoch, self.position = self.epoch + 1, 0
        except GeneratorExit:
            if self._iteration == mine:
                self.epoch, self.position = self.epoch + 1, 0
            raise
        finally:
            if self._iteration == mine:
                self._tell(None)

    def draw(self, epoch: int, position: int) -> Tensor:
        """The units of one draw."""
        seed = None if self.seed is None else derived_seed(self.seed, 1, epoch, position)
        return poisson_sample(self.units.num, self.sample_rate, generator=generator(seed))

    def state_dict(self) -> dict[str, Any]:
        """Where it stands: draws whose batches were all handed out, and stepped on, are not drawn again."""
        return {"epoch": self.epoch, "position": self.position, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where another loader of the same data stood: the next iteration is the rest of that epoch."""
        differing = [f"{k} {state[k]}, now {v}" for k, v in self._identity().items() if state[k] != v]
        if differing:
            raise SamplewiseError(
                f"the saved loader had {'; '.join(differing)}. Steps on other data or at another rate are another run: keep both the "
                "same to go on."
            )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])

    def _identity(self) -> dict[str, Any]:
        return {"num_samples": self.units.num, "sample_rate": self.sample_rate, "steps": self.steps, "seed": self.seed}

    def _batches(self, first: int, parts: deque[Part]) -> Iterator[Any]:
        """The collated batches; what each is comes into `parts`, in order, no later than the batch."""

        def drawn() -> Iterator[list[int]]:
            for position in range(first, self.steps):
                units = self.units.rows(self.draw(self.epoch, position))
                runs = list(split([rows * self.views for rows in units], self.max_physical_batch_size))
                for k, run in enumerate(runs):
                    plain = self.units.ids is None and self.views == 1
                    ids = [s for s, rows in enumerate(run) for _ in rows]
                    ids = None if plain else torch.tensor(ids, dtype=torch.long, device="cpu")
                    parts.append(Part(position, len(run), ids, is_last=k == len(runs) - 1))
                    yield [row for rows in run for row in rows]

        yield from DataLoader(self.dataset, batch_sampler=_Given(drawn), collate_fn=self._collate, **self._options)

    def _tell(self, part: Part | None, batch: Any = None) -> None:
        listener = self._heard_by()
        if listener is not None:
            listener.ended() if part is None else listener.received(part, batch)

    def _heard_by(self) -> Listener | None:
        return None if self._listener is None else self._listener()


class _Given:
    """A batch sampler of what a function gives."""

    def __init__(self, drawn: Callable[[], Iterator[list[int]]]):
        self._drawn = drawn

    def __iter__(self) -> Iterator[list[int]]:
        return self._drawn()


def _refuse_other_sampling(loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise TypeError(f"make_private takes a DataLoader or a PoissonLoader, got {type(loader).__name__}")
    way_out = (
        "Private steps are accounted as Poisson samples: give a DataLoader with batch_size= and shuffle=, nothing else."
    )
    if isinstance(loader.dataset, IterableDataset):
        raise SamplewiseError(f"the loader's data set is an IterableDataset, from which nobody can draw a sample. {way_out}")
    if loader.batch_size is None:
        raise SamplewiseError(
            f"the loader has a batch sampler of its own ({type(loader.batch_sampler).__name__}). {way_out}"
        )
    sampler = loader.sampler
    whole = isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    if type(sampler) is not SequentialSampler and not (type(sampler) is RandomSampler and whole):
        raise SamplewiseError(
            f"the loader draws by {type(sampler).__name__}, which would be replaced. {way_out} To train on a part of the data, use "
            "torch.utils.data.Subset."
        )
