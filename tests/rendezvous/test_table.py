"""Following the rank table: changes where they fit, the whole table where they don't."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from frun.protocol import changes, wire
from frun.protocol.keys import Keys
from frun.protocol.records import Phase, RankTable
from frun.rendezvous.store import Delete, Put, Snapshot
from frun.rendezvous.table import TableFollower
from tests.fakes.memory_store import MemoryCluster, MemoryStore
from tests.protocol import build

KEYS = Keys("job")
LIMIT_S = 40.0


class CountingStore(MemoryStore):
    """A client that counts how often the whole table was read."""

    reads = 0

    async def read(self, prefix: str, limit: int = 0) -> Snapshot:
        """Read."""
        self.reads += prefix == KEYS.ranktable
        return await super().read(prefix, limit)


class Leader:
    """Writes tables as the controller does."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self.cluster = cluster
        self.table: RankTable | None = None
        self.revision = 0

    def write(self, table: RankTable) -> None:
        """Store a table and how it differs from the last one."""
        news = changes.between(self.table, self.revision, table)
        puts = [
            Put(key=KEYS.ranktable, value=wire.encode(table)),
            Put(key=KEYS.news, value=wire.encode(news)),
        ]
        revision = self.cluster.commit([], puts)
        assert revision is not None
        self.table, self.revision = table, revision


class Followed:
    """A follower at work, and what it has told."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self.store = CountingStore(cluster)
        self.tables: list[RankTable] = []
        self.lost = 0
        follower = TableFollower(self.store, KEYS, self.tables.append, self._lose)
        self.task = asyncio.create_task(follower.run())

    def _lose(self) -> None:
        self.lost += 1

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until something holds."""
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                await asyncio.sleep(0.001)

    async def sees(self, table: RankTable) -> None:
        """Wait until this is the table that was told last."""
        await self.until(lambda: self.tables and self.tables[-1] == table)


def follow(story: Callable[[Leader, Followed], Awaitable[None]]) -> None:
    """Run a story that begins with a table of three hosts that is known."""

    async def main() -> None:
        leader = Leader(MemoryCluster())
        leader.write(build.table(Phase.RECOVER))
        followed = Followed(leader.cluster)
        try:
            await followed.sees(build.table(Phase.RECOVER))
            await story(leader, followed)
            assert not followed.task.done()
        finally:
            followed.task.cancel()
            await asyncio.wait({followed.task})

    asyncio.run(main())


def test_changes_are_not_read_whole() -> None:
    """One read at the beginning, and none for the changes that follow."""

    async def story(leader: Leader, followed: Followed) -> None:
        for generation in range(2, 6):
            leader.write(build.table(Phase.RUN, generation=generation))
            await followed.sees(build.table(Phase.RUN, generation=generation))
        assert followed.store.reads == 1

    follow(story)


def test_a_missed_change_and_another_world_are_read_whole() -> None:
    """Two changes at once, of which the second alone is seen, and a world that grew."""

    async def story(leader: Leader, followed: Followed) -> None:
        leader.write(build.table(Phase.RUN, generation=2))
        leader.write(build.table(Phase.RUN, generation=3))
        await followed.sees(build.table(Phase.RUN, generation=3))
        leader.write(build.table(Phase.RUN, "a b c d", generation=4))
        await followed.sees(build.table(Phase.RUN, "a b c d", generation=4))

    follow(story)


def test_a_break_makes_it_look_again() -> None:
    """Its end is told; what is as it was is not read again, whatever else is, whatever the revisions are."""

    async def story(leader: Leader, followed: Followed) -> None:
        with leader.cluster.outage():
            await followed.until(lambda: followed.store.cluster.down)
        await followed.until(lambda: followed.lost)
        leader.write(build.table(Phase.RUN, generation=2))
        await followed.sees(build.table(Phase.RUN, generation=2))
        before = followed.store.reads
        assert before == 1
        leader.cluster.wipe()
        leader.table, leader.revision = None, 0
        leader.write(build.table(Phase.RUN, generation=3))
        await followed.sees(build.table(Phase.RUN, generation=3))
        assert followed.store.reads > before

    follow(story)


def test_keys_that_vanish() -> None:
    """Without its news the table is read; without both it may be that etcd lost its data."""

    async def story(leader: Leader, followed: Followed) -> None:
        leader.cluster.commit([], [Delete(key=KEYS.news)])
        await followed.until(lambda: followed.store.reads > 1)
        assert followed.lost == 0
        leader.cluster.commit([], [Delete(key=KEYS.ranktable), Put(key=KEYS.news, value=b"{}")])
        leader.cluster.commit([], [Delete(key=KEYS.news)])
        await followed.until(lambda: followed.lost)
        broken = replace(build.table(Phase.RUN), generation=9)
        leader.write(broken)
        await followed.sees(broken)

    follow(story)
