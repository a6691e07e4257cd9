"""Replicas that differ are found, the odd one finds itself, over real agents' stores."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import cast

import pytest
import torch

from frun.protocol.channel import Diverged
from frun.worker.groupstore import GroupStore
from frun.worker.replicas import Replicas
from frun.worker.runtime import Runtime
from tests.worker.groupstore_hosts import LIMIT_S, Hosts


class Line:
    """What a rank has of its runtime here."""

    generation = 1
    compare_every = 10

    def __init__(self, path: str) -> None:
        self.told: list[tuple[int, str]] = []
        self._path = path

    def tell(self, fact: Diverged) -> None:
        self.told.append((fact.rank, fact.reason))

    def store_of(self, scope: str) -> GroupStore:
        return GroupStore(self._path, 1, scope=scope, timeout=timedelta(seconds=LIMIT_S))


class Job:
    """Ranks on two hosts that take turns; each has a model of its own."""

    def __init__(self, hosts: Hosts, parts: list[str]) -> None:
        self.lines = [Line(hosts.paths[rank % 2]) for rank in range(len(parts))]
        self.ranks = [Replicas(cast("Runtime", line)) for line in self.lines]
        self.models = [torch.nn.Linear(3, 3) for _ in parts]
        for rank, (replicas, model) in enumerate(zip(self.ranks, self.models, strict=True)):
            alike = [other for other, part in enumerate(parts) if part == parts[rank]]
            model.load_state_dict(self.models[alike[0]].state_dict())
            replicas.begin(parts[rank], alike, [model])

    def steps(self, first: int, last: int) -> None:
        """Complete these steps on all ranks."""
        for step in range(first, last + 1):
            for rank, replicas in enumerate(self.ranks):
                replicas.completed(rank, step)

    @property
    def told(self) -> list[tuple[int, str]]:
        return [fact for line in self.lines for fact in line.told]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Hosts]:
    """Two hosts in generation 1."""
    hosts = Hosts(tmp_path, 2)
    hosts.begin(1)
    yield hosts
    hosts.close()


def flip(model: torch.nn.Linear) -> None:
    """Flip the last bit of one parameter."""
    model.weight.data.view(torch.int32)[1, 1] ^= 1


def test_the_odd_one_is_named_once(two: Hosts) -> None:
    """Within two intervals, until it has what the others have; and nothing piles up in the store."""
    job = Job(two, [""] * 3)
    job.steps(1, 21)
    assert job.told == []
    flip(job.models[2])
    job.steps(22, 29)
    assert job.told == []
    job.steps(30, 51)
    assert job.told == [
        (2, "rank 2 holds other parameters after step 30 than most of its replicas")
    ]
    assert [each.diverged for each in job.ranks] == [False, False, True]
    flip(job.models[2])
    job.steps(52, 61)
    assert not any(each.diverged for each in job.ranks)
    assert GroupStore(two.paths[0], 1).num_keys() < 10


def test_of_two_nobody_knows_which(two: Hosts) -> None:
    """Both may be donors; ranks of another part have nothing to do with it."""
    job = Job(two, ["stage 0", "stage 1", "stage 0", "stage 1"])
    job.steps(1, 11)
    assert job.told == []
    flip(job.models[3])
    job.steps(12, 31)
    assert job.told == [
        (-1, "the 2 replicas of 'stage 1' differ after step 20, and no half of them agrees")
    ]
    assert not any(each.diverged for each in job.ranks)


def test_who_is_late_is_not_accused(two: Hosts) -> None:
    """A rank that looks before most have counted themselves in sees nothing."""
    job = Job(two, [""] * 3)
    flip(job.models[0])
    for step in (10, 11):
        job.ranks[0].completed(0, step)
    for step in (10, 11):
        job.ranks[1].completed(1, step)
        job.ranks[2].completed(2, step)
    assert job.told == []
    assert not any(each.diverged for each in job.ranks)


def test_without_replicas_nothing_is_compared(two: Hosts) -> None:
    """Each rank has a part of its own."""
    job = Job(two, ["a", "b"])
    job.steps(1, 30)
    assert GroupStore(two.paths[0], 1).num_keys() == 0
