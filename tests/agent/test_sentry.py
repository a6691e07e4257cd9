"""The watch over another host's agent: what proves that it is gone, and what does not."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from frun.agent.groupstore import GroupStore, Shard
from frun.agent.sentry import Sentry, answers, next_host
from frun.clock import SystemClock
from frun.protocol.keys import Keys
from frun.protocol.records import Phase, RankTable
from frun.protocol.storeframe import hello_blobs
from frun.rendezvous.store import Put
from tests.fakes.memory_store import MemoryStore
from tests.protocol.build import table

LIMIT_S = 40.0
KEYS = Keys("j")
RECORD = KEYS.host("b")


class Watch:
    """Host a watches host b, whose record is under a lease."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.gone: list[float] = []
        self.peer = GroupStore("secret", "j")
        self.sentry = Sentry(
            self.store, KEYS, "a", lambda: ("j", "secret"), SystemClock(), self._gone
        )

    def _gone(self, table: RankTable, peer: Shard, since_s: float) -> None:
        assert peer.host == "b"
        self.gone.append(since_s)

    async def begin(self, port: int = 0) -> int:
        """Let host b listen; return its port."""
        return await self.peer.listen_tcp("127.0.0.1", port)

    async def look(self, port: int, phase: Phase = Phase.RUN) -> None:
        """Register host b there and watch it."""
        lease = await self.store.grant(60)
        await self.store.commit([], [Put(key=RECORD, value=b"{}", lease=lease)])
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


def play(story: Callable[[Watch], Awaitable[None]]) -> None:
    """Run a story to its end, within a limit."""

    async def whole() -> None:
        watch = Watch()
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

    play(story)


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
