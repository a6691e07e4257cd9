"""What every `Store` promises, run on the fake and on a real etcd."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import pytest

from frun.errors import LeaseLost, StoreRefused, StoreUnavailable
from frun.rendezvous.etcd import EtcdStore
from frun.rendezvous.store import Batch, Change, Compare, Delete, Put, Store
from tests.fakes.memory_store import MemoryCluster

_LIMIT_S = 40.0
_counter = itertools.count()


@dataclass(frozen=True, slots=True)
class Bench:
    """Two clients of one store, a prefix of the test's own, and a way to let time pass."""

    store: Store
    other: Store
    prefix: str
    pass_time: Callable[[float], Awaitable[None]]


@contextlib.asynccontextmanager
async def _open(kind: str, endpoint: str) -> AsyncIterator[Bench]:
    prefix = f"/contract/{next(_counter)}/"
    clients: Sequence[Store]
    if kind == "memory":
        cluster: MemoryCluster | None = MemoryCluster()
        assert cluster is not None
        clients = [cluster.client(), cluster.client()]
    else:
        cluster = None
        clients = [EtcdStore([endpoint]), EtcdStore([endpoint])]

    async def pass_time(seconds: float) -> None:
        if cluster is None:
            await asyncio.sleep(seconds)
        else:
            cluster.advance(seconds)

    try:
        yield Bench(clients[0], clients[1], prefix, pass_time)
    finally:
        for client in clients:
            await client.close()


Run = Callable[[Callable[[Bench], Awaitable[None]]], None]


@pytest.fixture(params=["memory", "etcd"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a story on a store, in a loop of its own and within a bound."""
    endpoint = ""
    if request.param == "etcd":
        endpoint = request.getfixturevalue("shared_etcd").endpoint

    def run_story(story: Callable[[Bench], Awaitable[None]]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(_LIMIT_S), _open(request.param, endpoint) as bench:
                await story(bench)

        asyncio.run(bounded())

    return run_story


async def _take(watch: AsyncGenerator[Batch, None], count: int) -> list[Change]:
    """Collect this many changes."""
    changes: list[Change] = []
    while len(changes) < count:
        changes += (await anext(watch)).changes
    return changes


def test_a_put_is_read_back_with_its_revisions(run: Run) -> None:
    """What was written is read with value, create and mod revision, and only under its prefix."""

    async def story(bench: Bench) -> None:
        first = await bench.store.commit([], [Put(key=bench.prefix + "a", value=b"1")])
        second = await bench.store.commit([], [Put(key=bench.prefix + "a", value=b"\0\xff")])
        await bench.store.commit([], [Put(key=bench.prefix[:-1] + "0", value=b"not below")])
        snapshot = await bench.other.read(bench.prefix)
        assert list(snapshot.items) == [bench.prefix + "a"]
        kv = snapshot.items[bench.prefix + "a"]
        assert (kv.key, kv.value, kv.lease) == (bench.prefix + "a", b"\0\xff", 0)
        assert (kv.create_revision, kv.mod_revision) == (first, second)
        assert second is not None
        assert snapshot.revision == second + 1
        assert bench.store.term == bench.other.term > 0

    run(story)


def test_the_empty_prefix_is_everything(run: Run) -> None:
    """A read of the empty prefix returns all keys."""

    async def story(bench: Bench) -> None:
        await bench.store.commit([], [Put(key=bench.prefix + "a", value=b"1")])
        assert bench.prefix + "a" in (await bench.store.read("")).items

    run(story)


def test_a_limited_read_returns_the_first_keys(run: Run) -> None:
    """So many of them in the order of keys; more than there are is all of them."""

    async def story(bench: Bench) -> None:
        keys = [bench.prefix + name for name in ("a", "b", "c")]
        for key in reversed(keys):
            await bench.store.commit([], [Put(key=key, value=b"1")])
        for limit in (1, 2, 3, 4):
            assert sorted((await bench.store.read(bench.prefix, limit)).items) == keys[:limit]

    run(story)


def test_a_failed_compare_writes_nothing(run: Run) -> None:
    """Create-only succeeds once; the loser is told None and changes no key and no revision."""

    async def story(bench: Bench) -> None:
        key = bench.prefix + "a"
        absent = [Compare(key=key, revision=0)]
        assert await bench.store.commit(absent, [Put(key=key, value=b"1")]) is not None
        before = await bench.store.read(bench.prefix)
        lost = await bench.other.commit(
            absent, [Put(key=key, value=b"2"), Put(key=bench.prefix + "b", value=b"2")]
        )
        assert lost is None
        assert await bench.store.read(bench.prefix) == before

    run(story)


def test_a_mod_compare_sees_every_write(run: Run) -> None:
    """A compare of the mod revision fails once anybody wrote the key."""

    async def story(bench: Bench) -> None:
        key = bench.prefix + "a"
        first = await bench.store.commit([], [Put(key=key, value=b"1")])
        assert first is not None
        guard = [Compare(key=key, revision=first)]
        assert await bench.store.commit(guard, [Put(key=key, value=b"2")]) is not None
        assert await bench.store.commit(guard, [Put(key=key, value=b"3")]) is None

    run(story)


def test_a_create_compare_is_a_fencing_token(run: Run) -> None:
    """The create revision holds over writes and fails once the key was deleted and made again."""

    async def story(bench: Bench) -> None:
        leader, table = bench.prefix + "leader", bench.prefix + "table"
        token = await bench.store.commit([], [Put(key=leader, value=b"a")])
        assert token is not None
        fence = [Compare(key=leader, revision=token, created=True)]
        await bench.store.commit([], [Put(key=leader, value=b"a again")])
        assert await bench.store.commit(fence, [Put(key=table, value=b"1")]) is not None
        await bench.other.commit([], [Delete(key=leader)])
        assert await bench.store.commit(fence, [Put(key=table, value=b"2")]) is None
        await bench.other.commit([], [Put(key=leader, value=b"b")])
        assert await bench.store.commit(fence, [Put(key=table, value=b"3")]) is None

    run(story)


def test_all_operations_of_a_commit_share_a_revision(run: Run) -> None:
    """Puts and deletes of one commit appear at one revision, and in one batch of a watch."""

    async def story(bench: Bench) -> None:
        start = await bench.store.commit(
            [], [Put(key=bench.prefix + name, value=b"") for name in ("x/1", "x/2", "y")]
        )
        assert start is not None
        async with contextlib.aclosing(bench.other.watch(bench.prefix, start)) as watch:
            done = await bench.store.commit(
                [],
                [
                    Put(key=bench.prefix + "z", value=b""),
                    Delete(key=bench.prefix + "x/", prefix=True),
                ],
            )
            batch = await anext(watch)
        assert done == start + 1
        assert batch.revision == done
        assert {(one.key[len(bench.prefix) :], one.kv is None) for one in batch.changes} == {
            ("z", False),
            ("x/1", True),
            ("x/2", True),
        }
        assert sorted((await bench.store.read(bench.prefix)).items) == [
            bench.prefix + "y",
            bench.prefix + "z",
        ]

    run(story)


def test_a_delete_of_nothing_changes_nothing(run: Run) -> None:
    """Deleting what is not there succeeds and keeps the revision."""

    async def story(bench: Bench) -> None:
        before = await bench.store.read(bench.prefix)
        assert await bench.store.commit([], [Delete(key=bench.prefix + "a")]) == before.revision

    run(story)


def test_a_key_named_twice_is_refused(run: Run) -> None:
    """A commit that puts one key twice is a mistake that no retry mends."""

    async def story(bench: Bench) -> None:
        put = Put(key=bench.prefix + "a", value=b"")
        with pytest.raises(StoreRefused):
            await bench.store.commit([], [put, put])
        with pytest.raises(StoreRefused):
            await bench.store.commit([], [put, Delete(key=bench.prefix, prefix=True)])

    run(story)


def test_a_watch_starts_after_its_revision(run: Run) -> None:
    """A watch yields what happened after its revision, old and new, in order, and nothing else."""

    async def story(bench: Bench) -> None:
        key = bench.prefix + "a"
        await bench.store.commit([], [Put(key=key, value=b"0")])
        after = (await bench.store.read(bench.prefix)).revision
        await bench.store.commit([], [Put(key=key, value=b"1")])
        await bench.store.commit([], [Put(key="/elsewhere", value=b"x")])
        await bench.store.commit([], [Delete(key=key)])
        async with contextlib.aclosing(bench.store.watch(bench.prefix, after)) as watch:
            old = await _take(watch, 2)
            await bench.other.commit([], [Put(key=key, value=b"2")])
            new = await _take(watch, 1)
        seen = [one.kv.value if one.kv is not None else None for one in [*old, *new]]
        assert seen == [b"1", None, b"2"]

    run(story)


def test_watches_are_independent(run: Run) -> None:
    """Two watches of one client each see everything under their own prefix."""

    async def story(bench: Bench) -> None:
        after = (await bench.store.read(bench.prefix)).revision
        async with (
            contextlib.aclosing(bench.store.watch(bench.prefix + "a/", after)) as a,
            contextlib.aclosing(bench.store.watch(bench.prefix, after)) as b,
        ):
            await bench.store.commit([], [Put(key=bench.prefix + "b/1", value=b"")])
            await bench.store.commit([], [Put(key=bench.prefix + "a/1", value=b"")])
            assert [one.key for one in await _take(a, 1)] == [bench.prefix + "a/1"]
            assert len(await _take(b, 2)) == 2

    run(story)


def test_a_watch_from_the_future_is_unavailable(run: Run) -> None:
    """A revision that the store has not reached (it lost its data) is an error, not silence."""

    async def story(bench: Bench) -> None:
        after = (await bench.store.read(bench.prefix)).revision + 1_000_000
        async with contextlib.aclosing(bench.store.watch(bench.prefix, after)) as watch:
            with pytest.raises(StoreUnavailable):
                await anext(watch)

    run(story)


def test_a_lease_takes_its_keys_along(run: Run) -> None:
    """Keys of a lease are there while it is refreshed, and all go at once when it ends."""

    async def story(bench: Bench) -> None:
        lease = await bench.store.grant(1)
        keys = [bench.prefix + name for name in "ab"]
        start = await bench.store.commit([], [Put(key=key, value=b"", lease=lease) for key in keys])
        assert start is not None
        for _ in range(3):
            await bench.pass_time(0.6)
            await bench.store.refresh(lease)
        snapshot = await bench.other.read(bench.prefix)
        assert [kv.lease for kv in snapshot.items.values()] == [lease, lease]
        async with contextlib.aclosing(bench.other.watch(bench.prefix, start)) as watch:
            await bench.pass_time(1.0)
            gone = await _take(watch, 2)
        assert [one.kv for one in gone] == [None, None]
        with pytest.raises(LeaseLost):
            await bench.store.refresh(lease)
        with pytest.raises(LeaseLost):
            await bench.store.commit([], [Put(key=keys[0], value=b"", lease=lease)])

    run(story)


def test_each_refresh_gets_its_own_answer(run: Run) -> None:
    """Also of several at a time, and after one that was given up before its answer came."""

    async def story(bench: Bench) -> None:
        alive, gone = await bench.store.grant(60), await bench.store.grant(60)
        await bench.other.revoke(gone)
        for number in range(20):
            given_up = asyncio.ensure_future(bench.store.refresh(alive))
            await asyncio.sleep(number / 10_000)
            given_up.cancel()
            outcomes = await asyncio.gather(
                *(bench.store.refresh(lease) for lease in (gone, alive, gone, alive)),
                return_exceptions=True,
            )
            assert [type(one) for one in outcomes] == [LeaseLost, type(None)] * 2
            await asyncio.gather(given_up, return_exceptions=True)

    run(story)


def test_what_a_lease_has_left(run: Run) -> None:
    """Whole seconds, rounded down; a refresh gives it all back, and without it there is nothing."""

    async def story(bench: Bench) -> None:
        lease = await bench.store.grant(60)
        assert 50 <= await bench.other.remaining(lease) <= 60
        await bench.pass_time(
            4.0
        )  # more than a busy machine takes for the two requests that follow
        left_s = await bench.store.remaining(lease)
        assert left_s <= 58
        await bench.store.refresh(lease)
        assert await bench.store.remaining(lease) > left_s
        await bench.store.revoke(lease)
        assert await bench.store.remaining(lease) == -1

    run(story)


def test_a_revoked_lease_is_gone_at_once(run: Run) -> None:
    """Revoke deletes the keys now, and is fine a second time."""

    async def story(bench: Bench) -> None:
        lease = await bench.store.grant(60)
        await bench.store.commit([], [Put(key=bench.prefix + "a", value=b"", lease=lease)])
        await bench.other.revoke(lease)
        assert not (await bench.store.read(bench.prefix)).items
        await bench.store.revoke(lease)

    run(story)


def test_a_key_can_leave_its_lease(run: Run) -> None:
    """A put without a lease, or under another, saves the key from the end of the first."""

    async def story(bench: Bench) -> None:
        first, second = await bench.store.grant(60), await bench.store.grant(60)
        keys = [bench.prefix + name for name in "abc"]
        await bench.store.commit([], [Put(key=key, value=b"", lease=first) for key in keys])
        await bench.store.commit(
            [], [Put(key=keys[0], value=b""), Put(key=keys[1], value=b"", lease=second)]
        )
        await bench.store.revoke(first)
        assert list((await bench.store.read(bench.prefix)).items) == keys[:2]

    run(story)


def test_a_closed_store_is_unavailable(run: Run) -> None:
    """After close, which may come twice, requests and open watches end by an error."""

    async def story(bench: Bench) -> None:
        after = (await bench.store.read(bench.prefix)).revision
        async with contextlib.aclosing(bench.store.watch(bench.prefix, after)) as watch:
            waiting = asyncio.ensure_future(anext(watch))
            await bench.other.commit([], [Put(key=bench.prefix + "a", value=b"")])
            await waiting
            waiting = asyncio.ensure_future(anext(watch))
            await asyncio.sleep(0)
            await bench.store.close()
            await bench.store.close()
            with pytest.raises(StoreUnavailable):
                await waiting
        with pytest.raises(StoreUnavailable):
            await bench.store.read(bench.prefix)

    run(story)
