"""All ranks make an update or none does, over real agents' stores, whenever the generation ends."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from frun.protocol.storeframe import COMMIT_SCOPE, shard_of
from frun.worker.commit import Commit
from frun.worker.groupstore import GroupStore
from tests.worker.groupstore_hosts import LIMIT_S, Hosts


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Hosts]:
    """Two hosts in generation 1."""
    hosts = Hosts(tmp_path, 2)
    hosts.begin(1)
    yield hosts
    hosts.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads that stand for ranks."""
    with ThreadPoolExecutor(8) as made:
        yield made


def commits(
    hosts: Hosts, world_size: int, *, generation: int = 1, look_s: float = LIMIT_S
) -> list[Commit]:
    """Return each rank's side; ranks take turns on the hosts."""
    return [
        Commit(
            GroupStore(
                hosts.paths[rank % 2],
                generation,
                scope=COMMIT_SCOPE,
                timeout=timedelta(seconds=look_s),
            ),
            world_size,
        )
        for rank in range(world_size)
    ]


def host_of_word(number: int) -> int:
    """Return the host that holds the word on an update."""
    return shard_of(f"{COMMIT_SCOPE}{number}".encode(), 2)


def test_nobody_goes_before_all_are_there(two: Hosts, pool: ThreadPoolExecutor) -> None:
    """Update after update; nothing piles up in the store; a slow rank is waited for."""
    ranks = commits(two, 3, look_s=0.05)
    for _ in range(20):
        first = [pool.submit(rank.reached) for rank in ranks[:2]]
        two.until_waiting(0, 1)
        assert not any(each.done() for each in first)
        assert ranks[2].reached()
        assert all(each.result(LIMIT_S) for each in first)
    assert GroupStore(two.paths[0], 1).num_keys() == 2  # the count, and the last word


def test_who_waits_is_told_to_stop_by_a_pause(two: Hosts, pool: ThreadPoolExecutor) -> None:
    """One pause decides for all, also for those who come later and know of none."""
    ranks = commits(two, 3)
    waiting = pool.submit(ranks[0].reached)
    two.until_waiting(0, 1)
    ranks[0].settle()
    assert not waiting.result(LIMIT_S)
    assert not ranks[1].reached()
    assert not ranks[2].reached()


def test_a_pause_takes_nothing_back(two: Hosts) -> None:
    """A word that stands is the word, whoever asks again."""
    ranks = commits(two, 2)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(ranks[1].reached)
        assert ranks[0].reached()
        ranks[0].settle()
        assert other.result(LIMIT_S)


@pytest.mark.parametrize("first", [0, 1])
def test_a_generation_that_ends_leaves_the_word(
    two: Hosts, pool: ThreadPoolExecutor, first: int
) -> None:
    """Hosts see the end one after the other; whoever is cut off gets the answer that others got."""
    for generation in range(1, 12):
        ranks = commits(two, 4, generation=generation)
        start = threading.Barrier(6)

        def go(commit: Commit, start: threading.Barrier = start) -> bool:
            start.wait(LIMIT_S)
            return commit.reached()

        def end(host: int, next_one: int, start: threading.Barrier = start) -> None:
            start.wait(LIMIT_S)
            two.begin(next_one, host)

        results = [pool.submit(go, each) for each in ranks]
        ends: list[Future[None]] = [
            pool.submit(end, host, generation + 1) for host in (first, 1 - first)
        ]
        for each in ends:
            each.result(LIMIT_S)
        assert len({each.result(LIMIT_S) for each in results}) == 1


def test_a_word_that_is_lost_with_its_host_is_a_stop(two: Hosts, pool: ThreadPoolExecutor) -> None:
    """The host that holds it is gone: nobody waits for it."""
    ranks = commits(two, 2)
    gone = host_of_word(1)
    mine = ranks[1 - gone]
    waiting = pool.submit(mine.reached)
    two.until_waiting(1 - gone, 1)
    two.wait(two.stores[gone].close())
    assert not waiting.result(LIMIT_S)
    assert not mine.reached()


def test_only_the_last_generation_is_remembered(two: Hosts) -> None:
    """Other keys end with their generation, and words with the one after it."""
    store = GroupStore(two.paths[0], 1, timeout=timedelta(seconds=1))
    store.set(f"{COMMIT_SCOPE}1", b"go")
    store.set("other", b"1")
    two.begin(2)
    assert store.compare_set(f"{COMMIT_SCOPE}1", b"", b"stop") == b"go"
    for refused in (
        lambda: store.compare_set("other", b"", b"2"),
        lambda: store.get(f"{COMMIT_SCOPE}1"),
        lambda: store.set(f"{COMMIT_SCOPE}1", b"x"),
    ):
        with pytest.raises(Exception, match="generation 1 ended"):
            refused()
    two.begin(3)
    with pytest.raises(Exception, match="generation 1 ended"):
        store.compare_set(f"{COMMIT_SCOPE}1", b"", b"stop")
