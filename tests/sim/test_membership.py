"""Registration beside others: who begins a job, and who enters one, when both happen at once."""

import asyncio
import contextlib
from collections.abc import Sequence

from frun.protocol import wire
from frun.protocol.keys import Keys
from frun.protocol.records import JobSpec
from frun.rendezvous.membership import Membership
from frun.rendezvous.store import Compare, Delete, Put
from tests.fakes.memory_store import MemoryCluster, MemoryStore
from tests.protocol.build import host
from tests.sim import virtual

KEYS = Keys("sim")


class LateStore(MemoryStore):
    """A client whose first commit waits."""

    def __init__(self, cluster: MemoryCluster) -> None:
        super().__init__(cluster)
        self.asked = asyncio.Event()
        self.go = asyncio.Event()

    async def commit(self, compares: Sequence[Compare], ops: Sequence[Put | Delete]) -> int | None:
        """Wait until the test lets it go on."""
        self.asked.set()
        await self.go.wait()
        return await super().commit(compares, ops)


def _spec(uid: str) -> JobSpec:
    return JobSpec(
        job_id="sim",
        uid=uid,
        min_hosts=1,
        max_hosts=2,
        max_restarts=0,
        entry="train.py",
        version="1",
    )


def _stored_uid(cluster: MemoryCluster) -> str:
    return wire.decode_spec(cluster.items[KEYS.spec].value).uid


def test_a_job_is_not_abandoned_when_a_host_returns_just_then() -> None:
    """A newcomer that saw no host enters the job if one registers again before it can begin its own."""

    async def story() -> None:
        cluster = MemoryCluster()
        clock = virtual.VirtualClock()
        old = Membership(cluster.client(), KEYS, host("a"), 3, clock)
        await old.join(_spec("old"))
        cluster.advance(4.0)  # its host was frozen: nobody is registered now
        late = LateStore(cluster)
        new = Membership(late, KEYS, host("b"), 3, clock)
        joining = asyncio.create_task(new.join(_spec("new")))
        await late.asked.wait()
        keeping = asyncio.create_task(old.keep())
        while KEYS.host("a") not in cluster.items:
            await asyncio.sleep(0.1)
        late.go.set()
        joined = await joining
        assert joined.uid == _stored_uid(cluster) == "old"
        assert {KEYS.host("a"), KEYS.host("b")} <= cluster.items.keys()
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping

    virtual.run(story())


def test_an_abandoned_job_is_begun_anew() -> None:
    """When no host of it is registered any more, its keys are the past of a new job."""

    async def story() -> None:
        cluster = MemoryCluster()
        clock = virtual.VirtualClock()
        old = Membership(cluster.client(), KEYS, host("a"), 3, clock)
        await old.join(_spec("old"))
        await cluster.client().commit([], [Put(key=KEYS.ranktable, value=b"old table")])
        cluster.advance(4.0)
        new = Membership(cluster.client(), KEYS, host("b"), 3, clock)
        assert (await new.join(_spec("new"))).uid == _stored_uid(cluster) == "new"
        assert KEYS.ranktable not in cluster.items

    virtual.run(story())


def test_a_job_that_lost_its_keys_is_not_begun_anew() -> None:
    """A newcomer waits while hosts are registered and their specification is not written back yet."""

    async def story() -> None:
        cluster = MemoryCluster()
        clock = virtual.VirtualClock()
        old = Membership(cluster.client(), KEYS, host("a"), 3, clock)
        await old.join(_spec("old"))
        cluster.wipe()
        keeping = asyncio.create_task(old.keep())
        while KEYS.host("a") not in cluster.items:
            await asyncio.sleep(0.1)
        new = Membership(cluster.client(), KEYS, host("b"), 3, clock)
        joining = asyncio.create_task(new.join(_spec("new")))
        await asyncio.sleep(1.0)
        assert KEYS.spec not in cluster.items
        await old.restore_spec()
        assert (await joining).uid == "old"
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping

    virtual.run(story())
