"""Batches from any point on: the same ones as without an interruption, without loading those before."""

import random
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from frun.worker import rng
from frun.worker.batches import Source, check


class Numbers(Dataset[tuple[int, float]]):
    """Numbers with a random part; remembers which were loaded."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[int, float]:
        self.loaded.append(index)
        return index, random.random() + float(torch.rand(()))


class Stream(IterableDataset[int]):
    """Numbers without a place to begin at."""

    def __iter__(self) -> Any:
        return iter(range(10))


def given(loader: Any, epoch: int, index: int) -> list[Any]:
    """Return what is given from a point on, as plain values."""
    source = Source(loader, {})
    return [[part.tolist() for part in batch] for batch in source.begin(epoch, index, 7 + epoch)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": True},
        {"shuffle": True, "generator": torch.Generator().manual_seed(3)},
        {"shuffle": True, "num_workers": 2},
        {"sampler": DistributedSampler(Numbers(), num_replicas=2, rank=1)},
    ],
    ids=["in order", "shuffled", "own generator", "loader processes", "distributed sampler"],
)
def test_an_epoch_goes_on_where_it_was(options: dict[str, Any]) -> None:
    """Order, and with loader processes also random parts, follow from the epoch's seed alone."""

    def loader() -> Any:
        generator = options.get("generator")
        fresh = {} if generator is None else {"generator": torch.Generator().manual_seed(3)}
        return DataLoader(Numbers(), batch_size=3, **{**options, **fresh})

    whole = given(loader(), 2, 0)
    rest = given(loader(), 2, 2)
    if not options.get("num_workers"):  # drawn in this process, where each step is seeded
        whole, rest = ([batch[0] for batch in found] for found in (whole, rest))
    assert rest == whole[2:]
    if "shuffle" in options:
        assert [b for b in given(loader(), 3, 0)] != whole


def test_what_was_done_is_not_loaded() -> None:
    """Skipped batches cost nothing."""
    data = Numbers()
    given(DataLoader(data, batch_size=5), 0, 3)
    assert data.loaded == [15, 16, 17, 18, 19]


def test_the_loader_itself_is_untouched() -> None:
    """The script can go through it on its own as well."""
    loader = DataLoader(Numbers(), batch_size=10)
    given(loader, 0, 1)
    assert len(list(loader)) == 2


def test_streams_are_consumed() -> None:
    """What can't begin in the middle is gone through."""
    source = Source(DataLoader(Stream(), batch_size=None), {})
    assert list(source.begin(0, 7, 1)) == [7, 8, 9]
    assert list(Source([1, 2, 3], {}).begin(0, 1, 1)) == [2, 3]


def test_iterators_are_refused() -> None:
    """They can be gone through once only."""
    with pytest.raises(TypeError, match="list_iterator"):
        check(iter([1]))


def test_seeds_differ_and_repeat() -> None:
    """The same words give the same numbers, others give others."""
    seeds = {rng.derived(base, word, n) for base in (1, 2) for word in ("a", "b") for n in range(9)}
    assert len(seeds) == 36
    rng.seed(5)
    first = torch.rand(3).tolist(), random.random()
    rng.seed(5)
    assert (torch.rand(3).tolist(), random.random()) == first
