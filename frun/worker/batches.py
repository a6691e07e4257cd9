"""A loader's batches from any point on, and the same ones whenever they are loaded again.

Owns how an epoch is begun in its middle without loading what comes before. Which epoch and batch to begin
with is `session`'s.
"""

import copy
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from frun.worker import rng


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a run stands in its data."""

    pass_: int = 0
    """Number of the `batches` call in the function, from 0."""
    epoch: int = 0
    """Number of the epoch in the whole run, from 0."""
    index: int = 0
    """Batches of that epoch that belong to completed steps."""


class Source:
    """A loader that can begin anywhere in an epoch."""

    def __init__(
        self, loader: Iterable[Any], seeds: dict[int, tuple[torch.Generator, int]]
    ) -> None:
        """Look at what kind of loader it is; a torch DataLoader is used through a copy of its own.

        `seeds` are those that generators had before the first epoch; new generators are added.
        """
        self.loader = loader
        self._sampler: _From | None = None
        self._inner = loader
        self._generators = [
            seeds.setdefault(id(each), (each, each.initial_seed())) for each in _generators(loader)
        ]
        if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            self._inner = self._copied(loader)

    def begin(self, epoch: int, index: int, seed: int) -> Iterator[Any]:
        """Return the batches of an epoch from this one on.

        `seed` is the epoch's own; the order of an epoch follows from it where the loader draws it.
        """
        for part in _parts(self.loader):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        rng.seed(seed)
        for generator, first in self._generators:
            generator.manual_seed(rng.derived(first, epoch))
        if self._sampler is None:
            return itertools.islice(iter(self._inner), index, None)
        self._sampler.begin, self._sampler.seed = index, seed
        return iter(self._inner)

    def _copied(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return a copy that asks our sampler. A DataLoader does not let its sampler be exchanged."""
        clone = copy.copy(loader)
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._sampler = _From(getattr(loader, name), numbered=name == "batch_sampler")
        clone.__dict__[name] = self._sampler
        clone.__dict__["_iterator"] = None
        if loader.num_workers > 0 and name == "batch_sampler":
            clone.__dict__["dataset"] = _Seeding(loader.dataset)
        return clone


class _From:
    """A sampler that leaves out what it gave before, and numbers what it gives."""

    def __init__(self, sampler: Any, *, numbered: bool) -> None:
        self.begin = 0
        self.seed = 0
        self._sampler = sampler
        self._numbered = numbered

    def __iter__(self) -> Iterator[Any]:
        """Begin now and not with the first batch: samplers draw their order when they begin."""
        numbered = itertools.islice(enumerate(self._sampler), self.begin, None)
        return self._given(list(itertools.islice(numbered, 1)), numbered, self.seed)

    def _given(
        self, first: list[tuple[int, Any]], others: Iterator[tuple[int, Any]], seed: int
    ) -> Iterator[Any]:
        for number, indices in itertools.chain(first, others):
            yield _Batch(indices, rng.derived(seed, number)) if self._numbered else indices

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


class _Batch(list[Any]):
    """The indices of a batch, and the seed for loading it."""

    def __init__(self, indices: Iterable[Any], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed

    def __reduce__(self) -> Any:
        return _Batch, (list(self), self.seed)


class _Seeding:
    """A dataset in a loader's own process, where each batch draws its own random numbers.

    Which of these processes loads a batch, and what it loaded before, then does not matter.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, batch: Any) -> list[Any]:
        if isinstance(batch, _Batch) and get_worker_info() is not None:
            rng.seed(batch.seed)
        several = getattr(self._dataset, "__getitems__", None)
        if several is not None:
            loaded: list[Any] = several(batch)
            return loaded
        return [self._dataset[index] for index in batch]

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":  # asked for while it is unpickled
            raise AttributeError(name)
        return getattr(self._dataset, name)


def _parts(loader: Any) -> list[Any]:
    """Return a loader and what it draws its order from, each once."""
    found = [loader]
    for name in ("batch_sampler", "sampler"):
        part = getattr(loader, name, None)
        found += [part, getattr(part, "sampler", None)]
    return [
        part
        for number, part in enumerate(found)
        if part is not None and all(part is not earlier for earlier in found[:number])
    ]


def _generators(loader: Any) -> list[torch.Generator]:
    found = [getattr(part, "generator", None) for part in _parts(loader)]
    return [each for each in found if isinstance(each, torch.Generator)]


def check(loader: object) -> None:
    """Raise TypeError for what can not be gone through again."""
    if isinstance(loader, Iterator) or not isinstance(loader, Iterable):
        raise TypeError(
            f"session.batches needs a loader, or another iterable that can be begun again, not "
            f"{type(loader).__name__}"
        )
