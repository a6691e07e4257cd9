"""A host that joins: while the last job of this id is ending, and while etcd doesn't answer."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from frun.agent import farewell
from frun.clock import SystemClock
from frun.errors import JobRefused, StoreUnavailable
from frun.protocol import wire
from frun.protocol.keys import Keys
from frun.protocol.records import HostRecord, JobSpec, Phase, RankTable
from frun.rendezvous.membership import Membership
from frun.rendezvous.store import Put
from tests.fakes.memory_store import MemoryStore

KEYS = Keys("j")


def member(store: MemoryStore, host: str) -> Membership:
    """One host's membership of job `j`."""
    record = HostRecord(host=host, name=host, address="10.0.0.1", port=1, nproc=1)
    return Membership(store, KEYS, record, 3, SystemClock())


def spec(uid: str) -> JobSpec:
    """A job that differs from others of its id in nothing but its uid."""
    return JobSpec(
        job_id="j", uid=uid, min_hosts=1, max_hosts=1, max_restarts=0, entry="s.py", version="1"
    )


async def ends(store: MemoryStore, phase: Phase) -> None:
    """Store the last rank table of a job."""
    table = RankTable(generation=1, phase=phase, reason="over")
    await store.commit([], [Put(key=KEYS.ranktable, value=wire.encode(table))])


def story(tell: Callable[[MemoryStore], Awaitable[None]]) -> None:
    """Run a story with a store of its own."""

    async def run() -> None:
        store = MemoryStore()
        async with asyncio.timeout(20):
            await tell(store)
        await store.close()

    asyncio.run(run())


@pytest.mark.parametrize("phase", [Phase.DONE, Phase.FAILED])
def test_a_job_that_is_ending_is_not_joined(phase: Phase) -> None:
    """The next one of this id begins when the last host has left, and is another job."""

    async def tell(store: MemoryStore) -> None:
        old, new = member(store, "old"), member(store, "new")
        await old.join(spec("first"))
        await ends(store, phase)
        joining = asyncio.ensure_future(new.join(spec("second")))
        await asyncio.sleep(0.5)
        assert not joining.done()
        assert set((await store.read(KEYS.hosts)).items) == {KEYS.host("old")}
        await farewell.clear(store, KEYS, "first")
        await old.leave()
        assert (await joining).uid == "second"
        left = (await store.read(KEYS.prefix)).items
        assert KEYS.ranktable not in left
        assert KEYS.host("new") in left

    story(tell)


def test_a_host_that_stays_in_an_ended_job_is_named() -> None:
    """The wait for it is bounded."""

    async def tell(store: MemoryStore) -> None:
        await member(store, "old/1").join(spec("first"))
        await ends(store, Phase.DONE)
        with pytest.raises(JobRefused, match="has ended, and host old/1 has not left it yet"):
            await member(store, "new").join(spec("second"), patience_s=0.5)

    story(tell)


def test_the_end_of_one_job_does_not_clear_the_next() -> None:
    """A host that was away until another job of its id had begun deletes nothing of it."""

    async def tell(store: MemoryStore) -> None:
        old, new = member(store, "old"), member(store, "new")
        await old.join(spec("first"))
        await store.revoke(old.lease)
        await new.join(spec("second"))
        before = (await store.read(KEYS.prefix)).items
        await farewell.clear(store, KEYS, "first")
        assert (await store.read(KEYS.prefix)).items == before
        await farewell.clear(store, KEYS, "second")
        assert KEYS.host("new") not in (await store.read(KEYS.prefix)).items

    story(tell)


@pytest.mark.parametrize("lost", [1, 3, 5, 7])
def test_an_etcd_that_does_not_answer_is_asked_again(lost: int) -> None:
    """Also when the request was carried out: the host is registered once, under its latest lease."""

    async def tell(store: MemoryStore) -> None:
        new = member(store, "new")
        store.lose_answers(lost)
        assert (await new.join(spec("first"))).uid == "first"
        kept = (await store.read(KEYS.hosts)).items
        assert {key: kv.lease for key, kv in kept.items()} == {KEYS.host("new"): new.lease}

    story(tell)


def test_patience_with_etcd_ends() -> None:
    """With the reason of the last try."""

    async def tell(store: MemoryStore) -> None:
        with store.outage(), pytest.raises(StoreUnavailable):
            await member(store, "new").join(spec("first"), patience_s=0.5)

    story(tell)
