"""The mirror equals the store, whatever breaks, and says so at once."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frun.rendezvous.etcd import EtcdStore
from frun.rendezvous.mirror import Mirror
from frun.rendezvous.store import Delete, Put, Snapshot
from tests.fakes.etcd_server import EtcdServer
from tests.fakes.memory_store import MemoryCluster, MemoryStore

_LIMIT_S = 40.0


async def _until(mirror: Mirror, holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(_LIMIT_S):
        while not holds():
            await mirror.wait_changed(mirror.version, _LIMIT_S)


def _run(story: Callable[[MemoryCluster, MemoryStore, Mirror], Awaitable[None]]) -> None:
    """Run a story on a mirror of `/a/` that has read its first snapshot, with a second client."""

    async def main() -> None:
        cluster = MemoryCluster()
        client = cluster.client()
        await client.commit([], [Put(key="/a/1", value=b"1"), Put(key="/b/1", value=b"no")])
        async with Mirror(cluster.client(), "/a/") as mirror:
            while not cluster.open_watches:
                await asyncio.sleep(0)
            await story(cluster, client, mirror)
        assert cluster.open_watches == 0

    asyncio.run(main())


def test_it_follows() -> None:
    """Puts, changes and deletes arrive, each with one step of the version."""

    async def story(_: MemoryCluster, client: MemoryStore, mirror: Mirror) -> None:
        seen = mirror.version
        await client.commit([], [Put(key="/a/1", value=b"2"), Put(key="/a/2", value=b"x")])
        assert await mirror.wait_changed(seen, _LIMIT_S) == seen + 1
        assert {key: kv.value for key, kv in mirror.items.items()} == {"/a/1": b"2", "/a/2": b"x"}
        revision = await client.commit([], [Delete(key="/a/1")])
        assert await mirror.wait_changed(seen + 1, _LIMIT_S) == seen + 2
        assert mirror.revision == revision
        assert list(mirror.items) == ["/a/2"]
        assert mirror.drain_deletions()["/a/1"].value == b"2"
        assert not mirror.drain_deletions()

    _run(story)


def test_waiting_ends_by_itself() -> None:
    """A wait without a change returns the same version when its time is over."""

    async def story(_: MemoryCluster, __: MemoryStore, mirror: Mirror) -> None:
        assert await mirror.wait_changed(mirror.version, 0.01) == mirror.version
        assert await mirror.wait_changed(mirror.version - 1, None) == mirror.version

    _run(story)


def test_an_outage_is_seen_and_healed() -> None:
    """While cut off the last known items stay; then a snapshot shows what was missed."""

    async def story(cluster: MemoryCluster, client: MemoryStore, mirror: Mirror) -> None:
        store = mirror._store
        assert isinstance(store, MemoryStore)
        with store.outage():
            await _until(mirror, lambda: not mirror.connected)
            assert "cut off" in str(mirror.error)
            await client.commit([], [Delete(key="/a/1")])
            await client.commit([], [Put(key="/a/2", value=b"")])
            assert list(mirror.items) == ["/a/1"]
        await _until(mirror, lambda: mirror.connected)
        assert list(mirror.items) == ["/a/2"]
        assert list(mirror.drain_deletions()) == ["/a/1"]
        assert mirror.resyncs == 2
        assert mirror.error is None
        assert cluster.open_watches <= 1

    _run(story)


def test_a_key_made_again_during_an_outage_counts_as_deleted() -> None:
    """A key that is there again, but as another one, was deleted in between."""

    async def story(cluster: MemoryCluster, client: MemoryStore, mirror: Mirror) -> None:
        cluster.break_watches("cut")
        await client.commit([], [Delete(key="/a/1")])
        await client.commit([], [Put(key="/a/1", value=b"new")])
        await _until(mirror, lambda: mirror.resyncs == 2)
        assert mirror.items["/a/1"].value == b"new"
        assert mirror.drain_deletions()["/a/1"].value == b"1"

    _run(story)


def test_a_wiped_store_is_noticed() -> None:
    """When the store lost its data the mirror is empty, not stuck at a revision to come."""

    async def story(cluster: MemoryCluster, client: MemoryStore, mirror: Mirror) -> None:
        for _ in range(5):
            await client.commit([], [Put(key="/a/2", value=b"")])
        cluster.wipe()
        await _until(mirror, lambda: mirror.resyncs == 2)
        assert (mirror.items, mirror.wipes) == ({}, 1)
        await client.commit([], [Put(key="/a/3", value=b"")])
        await _until(mirror, lambda: list(mirror.items) == ["/a/3"])

    _run(story)


def test_a_bug_in_a_store_is_not_swallowed() -> None:
    """What is no trouble of etcd ends the wait of the owner by an error."""

    class Broken(MemoryStore):
        async def read(self, prefix: str, limit: int = 0) -> Snapshot:
            raise KeyError(prefix)

    async def main() -> None:
        mirror = Mirror(Broken(), "/a/")
        await mirror.start()
        with pytest.raises(KeyError):
            await mirror.wait_changed(0, _LIMIT_S)
        await mirror.close()

    asyncio.run(main())


_steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from("abc")),
        st.tuples(st.just("delete"), st.sampled_from("abc")),
        st.tuples(st.sampled_from(["break", "wipe", "compact", "turn"]), st.just("")),
    ),
    max_size=25,
)


@settings(deadline=None, max_examples=40)
@given(steps=_steps)
def test_it_ends_equal_whatever_happened(steps: list[tuple[str, str]]) -> None:
    """After any row of writes, breaks, compactions and wipes the mirror equals the store."""

    async def story(cluster: MemoryCluster, client: MemoryStore, mirror: Mirror) -> None:
        for what, name in steps:
            match what:
                case "put":
                    await client.commit([], [Put(key=f"/a/{name}", value=b"")])
                case "delete":
                    await client.commit([], [Delete(key=f"/a/{name}")])
                case "break":
                    cluster.break_watches("cut")
                case "wipe":
                    cluster.wipe()
                case "compact":
                    cluster.compact()
                case _:
                    await asyncio.sleep(0)
        await client.commit([], [Put(key="/a/end", value=b"")])
        await _until(mirror, lambda: mirror.items == dict(cluster.read("/a/").items))

    _run(story)


def test_on_etcd_it_is_quick(shared_etcd: EtcdServer) -> None:
    """From the start of a write to the wake-up of who waits for it: a few milliseconds."""

    async def main() -> None:
        store = EtcdStore([shared_etcd.endpoint])
        took = []
        async with Mirror(store, "/mirror/") as mirror:
            await _until(mirror, lambda: mirror.connected)
            for number in range(50):
                seen, begun = mirror.version, time.perf_counter()
                write = asyncio.ensure_future(
                    store.commit([], [Put(key="/mirror/a", value=str(number).encode())])
                )
                await mirror.wait_changed(seen, _LIMIT_S)
                took.append(time.perf_counter() - begun)
                await write
        await store.close()
        assert sorted(took)[25] < 0.2

    asyncio.run(main())
