"""The watch over another host's agent: what proves that it is gone, and what does not."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from frun.agent import sentry
from frun.agent.groupstore import GroupStore, Shard
from frun.agent.sentry import Sentry, answers, next_host
from frun.clock import SystemClock
from frun.protocol.keys import Keys
from frun.protocol.records import Phase, RankTable
from frun.protocol.storeframe import Status, encode, hello_blobs
from frun.rendezvous.store import Put
from tests.fakes.memory_store import MemoryStore
from tests.protocol.build import table

LIMIT_S = 40.0
KEYS = Keys("j")
RECORD = KEYS.host("b")


class Watch:
    """Host a watches host b, whose record is under a lease."""

    def __init__(self, lease_s: int) -> None:
        self.store = MemoryStore()
        self.gone: list[float] = []
        self.why = ""
        self.lease = 0
        self.peer = GroupStore("secret", "j")
        self.sentry = Sentry(
            self.store, KEYS, "a", lambda: ("j", "secret"), SystemClock(), self._gone, lease_s
        )

    def _gone(self, table: RankTable, peer: Shard, why: str, since_s: float) -> None:
        assert peer.host == "b"
        self.gone.append(since_s)
        self.why = why

    async def begin(self, port: int = 0) -> int:
        """Let host b listen; return its port."""
        return await self.peer.listen_tcp("127.0.0.1", port)

    async def look(self, port: int, phase: Phase = Phase.RUN) -> None:
        """Register host b there and watch it."""
        self.lease = await self.store.grant(60)
        await self.store.commit([], [Put(key=RECORD, value=b"{}", lease=self.lease)])
        self.sentry.look(world(port, phase))

    async def is_registered(self) -> bool:
        """Tell whether its record is in the store."""
        return RECORD in (await self.store.read(RECORD)).items


def world(port: int, phase: Phase = Phase.RUN) -> RankTable:
    """Return a table of hosts a and b."""
    stored = table(phase, "a b")
    return replace(
        stored,
        slots=tuple(replace(slot, address="127.0.0.1", port=port) for slot in stored.slots),
    )


def play(story: Callable[[Watch], Awaitable[None]], lease_s: int = 3) -> None:
    """Run a story to its end, within a limit."""

    async def whole() -> None:
        watch = Watch(lease_s)
        try:
            async with asyncio.timeout(LIMIT_S):
                await story(watch)
        finally:
            await watch.sentry.close()
            await watch.peer.close()

    asyncio.run(whole())


async def until(done: Callable[[], bool]) -> None:
    """Wait for something that comes by itself."""
    while not done():
        await asyncio.sleep(0.01)


def test_an_agent_that_is_gone_loses_its_lease() -> None:
    """The connection ends and the next is refused, twice: known long before the lease ends."""

    async def story(watch: Watch) -> None:
        await watch.look(await watch.begin())
        await until(lambda: len(watch.peer.links) == 1)
        assert watch.gone == []
        await watch.peer.close()
        await until(lambda: bool(watch.gone))
        assert not await watch.is_registered()
        assert watch.gone[0] < LIMIT_S / 2
        assert "refuses connections" in watch.why

    play(story)


def test_the_end_of_a_connection_is_heard_between_two_questions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who asks seldom knows it as soon."""
    monkeypatch.setattr(sentry, "_PING_S", 10 * LIMIT_S)
    test_an_agent_that_is_gone_loses_its_lease()


def test_a_broken_connection_alone_proves_nothing() -> None:
    """The agent that accepts another one is alive."""

    async def story(watch: Watch) -> None:
        await watch.look(await watch.begin())
        for _ in range(3):
            await until(lambda: len(watch.peer.links) == 1)
            watch.peer.links.copy().pop().close()
            await until(lambda: not watch.peer.links)
        await until(lambda: len(watch.peer.links) == 1)
        assert watch.gone == []
        assert await watch.is_registered()

    play(story)


def test_a_host_that_left_has_no_lease_to_end() -> None:
    """It revoked that itself before it stopped to listen."""

    async def story(watch: Watch) -> None:
        port = await watch.begin()
        await watch.look(port)
        await until(lambda: len(watch.peer.links) == 1)
        kept = (await watch.store.read(RECORD)).items[RECORD].lease
        await watch.store.revoke(kept)
        await watch.peer.close()
        await asyncio.sleep(0.4)
        assert watch.gone == []

    play(story)


def test_who_is_silent_has_its_lease_and_no_more() -> None:
    """An agent that stands still loses the lease in the moment in which it runs out, not before."""

    async def story(watch: Watch) -> None:
        async with silent_agent() as port:
            await watch.look(port)
            await asyncio.sleep(1.5)
            assert await watch.is_registered()
            watch.store.cluster.advance(59.5)
            await asyncio.sleep(0.3)
            await watch.store.refresh(watch.lease)
            await asyncio.sleep(1.5)
            assert await watch.is_registered()
            assert watch.gone == []
            watch.store.cluster.advance(59.5)
            await until(lambda: bool(watch.gone))
            assert not await watch.is_registered()
            assert "says nothing" in watch.why

    play(story)


def test_a_lease_that_etcd_or_its_host_ended_is_not_ended_again() -> None:
    """Nor is the next one of the same host, which lives."""

    async def story(watch: Watch) -> None:
        async with silent_agent() as port:
            await watch.look(port)
            watch.store.cluster.advance(59.5)
            await asyncio.sleep(1.2)
            await watch.store.revoke(watch.lease)
            again = await watch.store.grant(60)
            await watch.store.commit([], [Put(key=RECORD, value=b"{}", lease=again)])
            await asyncio.sleep(1.5)
            assert watch.gone == []
            assert await watch.is_registered()

    play(story)


def test_an_agent_that_answers_may_be_late_with_its_lease() -> None:
    """That is etcd's to judge, which may be out of its reach."""

    async def story(watch: Watch) -> None:
        await watch.look(await watch.begin())
        await until(lambda: len(watch.peer.links) == 1)
        watch.store.cluster.advance(59.5)
        await asyncio.sleep(2.5)
        assert len(watch.peer.links) == 1
        assert watch.gone == []
        assert await watch.is_registered()

    play(story)


def test_leases_of_one_second_are_for_etcd() -> None:
    """What they have left is always less than a second, also when they were refreshed just now."""

    async def story(watch: Watch) -> None:
        async with silent_agent() as port:
            await watch.look(port)
            watch.store.cluster.advance(59.5)
            await asyncio.sleep(2.5)
            assert watch.gone == []
            assert await watch.is_registered()

    play(story, lease_s=1)


@asynccontextmanager
async def silent_agent() -> AsyncIterator[int]:
    """Answer the first request of each connection and no other; give the port."""
    writers: list[asyncio.StreamWriter] = []

    async def says_hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await reader.read(4096)
        writer.write(encode(0, Status.OK, ()))

    server = await asyncio.start_server(says_hello, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        await server.wait_closed()


async def _says_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


def test_who_answers() -> None:
    """An agent that lets the asker in; not one that is gone, and not one that accepts and says nothing."""

    async def story(watch: Watch) -> None:
        hello = hello_blobs("j", "secret")
        port = await watch.begin()
        place = Shard(host="b", address="127.0.0.1", port=port)
        assert await answers(place, hello)
        assert not await answers(place, hello_blobs("j", "wrong"))
        await watch.peer.close()
        assert not await answers(place, hello)
        silent = await asyncio.start_server(_says_nothing, "127.0.0.1", port)
        assert not await answers(place, hello)
        silent.close()
        await silent.wait_closed()

    play(story)


def test_a_job_that_is_over_is_not_watched() -> None:
    """Its agents leave one after the other."""

    async def story(watch: Watch) -> None:
        port = await watch.begin()
        await watch.look(port)
        await until(lambda: len(watch.peer.links) == 1)
        watch.sentry.look(world(port, Phase.DONE))
        await until(lambda: not watch.peer.links)

    play(story)


@pytest.mark.parametrize(
    ("hosts", "host", "ward"),
    [
        ("a b c", "a", "b"),
        ("a b c", "c", "a"),
        ("a - c", "a", "c"),
        ("- b -", "b", None),
        ("a b c", "x", None),
    ],
)
def test_the_ring(hosts: str, host: str, ward: str | None) -> None:
    """Each member watches the next one that is there."""
    found = next_host(table(Phase.GATHER, hosts), host)
    assert (found.host if found is not None else None) == ward
