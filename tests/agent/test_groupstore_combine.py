"""Equal requests of one host's workers reach a peer as one, and each worker gets its own answer."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from frun.agent.groupstore import GroupStore, Shard
from frun.agent.groupstore_call import Call, Request
from frun.agent.groupstore_keyspace import Answer
from frun.protocol.storeframe import Blobs, Decoder, Frame, Op, Status, encode, shard_of

LIMIT_S = 40.0
KEY = next(key for key in (str(n).encode() for n in range(9)) if shard_of(key, 2) == 1)
"""Held by the second host."""


class CountingStore(GroupStore):
    """Remembers what peers and workers asked it."""

    def __init__(self) -> None:
        super().__init__("secret", "job")
        self.asked: list[Request] = []

    def start(self, request: Request, answer: Answer) -> Call:
        """Begin a request."""
        self.asked.append(request)
        return super().start(request, answer)


class Two:
    """Two hosts, of which the second has not begun: what is asked of it waits there."""

    def __init__(self, folder: Path) -> None:
        self.a, self.b = CountingStore(), CountingStore()
        self.path = str(folder / "s")
        self._shards: list[Shard] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> None:
        """Listen; the first host begins generation 1."""
        for name, store in (("a", self.a), ("b", self.b)):
            port = await store.listen_tcp("127.0.0.1")
            self._shards.append(Shard(host=name, address="127.0.0.1", port=port))
        await self.a.listen_unix(self.path)
        self.a.begin(1, self._shards, 0)

    def begin(self) -> None:
        """Let the second host begin."""
        self.b.begin(1, self._shards, 1)

    async def worker(self, op: Op, *blobs: bytes, timeout_ms: int = 9000) -> asyncio.Task[Frame]:
        """Ask over a connection of its own on the first host."""
        reader, writer = await asyncio.open_unix_connection(self.path)
        self._writers.append(writer)
        before = len(self.a.asked)
        writer.write(encode(1, op, blobs, generation=1, timeout_ms=timeout_ms))
        await until(lambda: len(self.a.asked) > before)

        async def answer() -> Frame:
            decoder = Decoder()
            while data := await reader.read(4096):
                for frame in decoder.feed(data):
                    return frame
            raise EOFError

        return asyncio.create_task(answer())

    async def leave(self, number: int) -> None:
        """End the connection of a worker."""
        before = len(self.a.links)
        self._writers[number].close()
        await until(lambda: len(self.a.links) < before)

    async def close(self) -> None:
        """Close everything; nothing is under way any more."""
        for writer in self._writers:
            writer.close()
        await self.a.close()
        await self.b.close()


async def until(condition: Callable[[], object]) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.001)


def play(folder: Path, story: Callable[[Two], Awaitable[None]]) -> None:
    """Run a story on two hosts."""

    async def main() -> None:
        two = Two(folder)
        await two.start()
        try:
            async with asyncio.timeout(LIMIT_S):
                await story(two)
        finally:
            await two.close()

    asyncio.run(main())


def answers(frames: Sequence[Frame]) -> list[Blobs]:
    """Return what was answered; all of it must be OK."""
    assert {frame.code for frame in frames} == {Status.OK}
    return [frame.blobs for frame in frames]


def test_a_barrier_of_eight_workers_takes_four_requests(tmp_path: Path) -> None:
    """Each gets a number of its own when it adds, and the value when it reads."""

    async def story(two: Two) -> None:
        adding = [await two.worker(Op.ADD, KEY, b"1") for _ in range(8)]
        await until(lambda: two.b.asked)
        two.begin()
        assert answers(await asyncio.gather(*adding)) == [(str(n + 1).encode(),) for n in range(8)]
        assert [request.blobs for request in two.b.asked] == [(KEY, b"1"), (KEY, b"7")]
        reading = [await two.worker(Op.GET, KEY) for _ in range(8)]
        assert answers(await asyncio.gather(*reading)) == [(b"8",)] * 8

    play(tmp_path, story)


def test_one_that_leaves_takes_nothing_from_the_others(tmp_path: Path) -> None:
    """The first, whose request is under way, and one of those that wait for their turn."""

    async def story(two: Two) -> None:
        waiting = [await two.worker(Op.WAIT, KEY) for _ in range(4)]
        await two.leave(0)
        await two.leave(2)
        two.begin()
        (done,) = answers([await (await two.worker(Op.SET, KEY, b"here"))])
        assert done == ()
        assert answers([await waiting[1], await waiting[3]]) == [(), ()]
        gone = await asyncio.gather(waiting[0], waiting[2], return_exceptions=True)
        assert [type(error) for error in gone] == [EOFError, EOFError]

    play(tmp_path, story)


@pytest.mark.parametrize("op", [Op.GET, Op.WAIT])
def test_each_has_its_own_time(op: Op, tmp_path: Path) -> None:
    """One with little time behind one with much is told in time which key was missing."""

    async def story(two: Two) -> None:
        two.begin()
        patient = await two.worker(op, KEY)
        hasty = await (await two.worker(op, KEY, timeout_ms=50))
        assert hasty.code == Status.TIMEOUT
        assert hasty.blobs == (b"wait timeout after 50ms, keys: " + KEY,)
        await (await two.worker(Op.SET, KEY, b"1"))
        assert (await patient).code == Status.OK

    play(tmp_path, story)


def test_a_failure_is_everybody_s(tmp_path: Path) -> None:
    """Adding to text is refused for all who did, and nothing is added."""

    async def story(two: Two) -> None:
        setting = await two.worker(Op.SET, KEY, b"text")
        adding = [await two.worker(Op.ADD, KEY, b"1") for _ in range(3)]
        two.begin()
        assert (await setting).code == Status.OK
        assert {frame.code for frame in await asyncio.gather(*adding)} == {Status.REFUSED}

    play(tmp_path, story)
