"""A host that lost its lease and comes back to a job that is no longer its own."""

import asyncio
from collections.abc import Callable

import pytest

from frun.clock import SystemClock
from frun.errors import JobRefused
from frun.protocol import wire
from frun.protocol.classes import FaultClass
from frun.protocol.health import Fact, Severity
from frun.protocol.keys import Keys
from frun.protocol.records import HostRecord, HostReport, JobSpec
from frun.rendezvous.membership import Membership
from frun.rendezvous.store import Snapshot
from tests.fakes.memory_store import MemoryStore

KEYS = Keys("j")


def member(store: MemoryStore, host: str, node_rank: int | None = None) -> Membership:
    """One host's membership of job `j`."""
    record = HostRecord(
        host=host, name=host, address="10.0.0.1", port=1, nproc=1, node_rank=node_rank
    )
    return Membership(store, KEYS, record, 1, SystemClock())


def spec(uid: str) -> JobSpec:
    """A job that differs from others of its id in nothing but its uid."""
    return JobSpec(
        job_id="j", uid=uid, min_hosts=2, max_hosts=2, max_restarts=0, entry="s.py", version="1"
    )


async def refusal(membership: Membership) -> str:
    """Return why a host gives up; it must, within seconds."""
    with pytest.raises(JobRefused) as caught:
        async with asyncio.timeout(5):
            await membership.keep()
    return str(caught.value)


def test_another_job_of_the_same_id() -> None:
    """It does not enter the new job as if it were a spare of it."""

    async def story() -> None:
        store = MemoryStore()
        old, new = member(store, "old"), member(store, "new")
        await old.join(spec("first"))
        await store.revoke(old.lease)
        assert (await new.join(spec("second"))).uid == "second"
        assert "another job of this id is live" in await refusal(old)
        hosts = (await store.read(KEYS.hosts)).items
        assert set(hosts) == {KEYS.host("new")}
        await store.close()

    asyncio.run(story())


def test_its_node_rank_was_given_away() -> None:
    """It leaves with a clear word and does not knock for ever."""

    async def story() -> None:
        store = MemoryStore()
        other, old, new = member(store, "other"), member(store, "old", 1), member(store, "new", 1)
        await other.join(spec("first"))
        await old.join(spec("first"))
        await store.revoke(old.lease)
        await new.join(spec("first"))
        assert "--node-rank 1 is already taken by new" in await refusal(old)
        await store.close()

    asyncio.run(story())


def test_what_is_wrong_with_a_host_is_in_its_record_before_a_later_report() -> None:
    """Also in that of a new lease; the place in the order of hosts stays."""

    async def story() -> None:
        store = MemoryStore()
        fact = Fact(
            name="lost", severity=Severity.FAULT, fault_class=FaultClass.DEVICE, reason="it is gone"
        )
        one = member(store, "one")
        one.amend((fact,))
        await one.join(spec("first"))
        key, report = KEYS.host("one"), KEYS.report("one")
        (joined,) = (await store.read(key)).items.values()
        assert wire.decode_host(joined.value).health == (fact,)
        keeping = asyncio.create_task(one.keep())
        one.amend(())
        one.publish(HostReport(host="one", generation=1))
        async with asyncio.timeout(20):
            while report not in (items := (await store.read(KEYS.prefix)).items):
                await asyncio.sleep(0.01)
        assert wire.decode_host(items[key].value).health == ()
        assert items[key].create_revision == joined.create_revision
        assert items[key].mod_revision < items[report].mod_revision
        one.amend((fact,))
        await store.revoke(one.lease)
        async with asyncio.timeout(20):
            while (await store.read(key)).items.get(key, joined).create_revision == (
                joined.create_revision
            ):
                await asyncio.sleep(0.01)
        (again,) = (await store.read(key)).items.values()
        assert wire.decode_host(again.value).health == (fact,)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await store.close()

    asyncio.run(story())


def test_the_same_job() -> None:
    """It registers again under a new lease."""

    async def story() -> None:
        store = MemoryStore()
        old = member(store, "old")
        await old.join(spec("first"))
        before = old.lease
        await store.revoke(before)
        keeping = asyncio.ensure_future(old.keep())
        async with asyncio.timeout(5):
            async for batch in store.watch(KEYS.hosts, (await store.read(KEYS.hosts)).revision):
                if any(change.kv is not None for change in batch.changes):
                    break
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        assert KEYS.host("old") in (await store.read(KEYS.hosts)).items
        await store.close()

    asyncio.run(story())


class ByHand(SystemClock):
    """A clock that only a test moves."""

    now = 100.0

    def monotonic(self) -> float:
        """Return the time."""
        return self.now


@pytest.mark.parametrize(
    ("story", "seconds"), [("no answer", 7.0), ("a late answer", 5.0), ("it ended", 0.0)]
)
def test_it_tells_whether_it_was_cut_off(story: str, seconds: float) -> None:
    """An agent that lived without etcd knows for how long; one whose lease just ended was not."""
    clock = ByHand()

    class Late(MemoryStore):
        async def read(self, prefix: str, limit: int = 0) -> Snapshot:
            if story == "a late answer":
                clock.now += seconds
            return await super().read(prefix, limit)

    async def play() -> None:
        store = MemoryStore()
        record = HostRecord(host="one", name="one", address="10.0.0.1", port=1, nproc=1)
        one = Membership(Late(store.cluster), KEYS, record, 1, clock)
        await one.join(spec("first"))
        lease = one.lease
        keeping = asyncio.create_task(one.keep())
        if story == "no answer":
            with store.cluster.outage():
                one.reassert()
                await until(lambda: one.unreachable_since is not None)
                clock.now += seconds
        store.cluster.end_lease(lease)
        one.reassert()
        await until(lambda: one.lease not in (0, lease))
        (stored,) = (await store.read(KEYS.hosts)).items.values()
        assert wire.decode_host(stored.value).cut_off_s == seconds
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await store.close()

    asyncio.run(play())


async def until(done: Callable[[], bool]) -> None:
    """Wait for something that comes by itself."""
    async with asyncio.timeout(20):
        while not done():
            await asyncio.sleep(0.01)
