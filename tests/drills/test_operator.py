"""How a command comes into the store."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from frun.clock import SystemClock
from frun.drills.catalogue import Outcome, fault
from frun.drills.operator import Operator
from frun.drills.targets import Selection
from frun.errors import UsageError
from frun.protocol import wire
from frun.protocol.faults import KEPT, Command, CommandState
from frun.protocol.keys import Keys
from frun.protocol.records import (
    HostRecord,
    HostReport,
    JobSpec,
    Phase,
    RankTable,
    Slot,
    WorkerReport,
    WorkerState,
)
from frun.rendezvous.store import Put
from tests.fakes.memory_store import MemoryCluster, MemoryStore

KEYS = Keys("j")


async def job(store: MemoryStore, *, drills: bool = True) -> int:
    """Write a job of one host with one worker; return its lease."""
    lease = await store.grant(60)
    spec = JobSpec(
        job_id="j", uid="u", min_hosts=1, max_hosts=1, max_restarts=0, entry="t", version="1",
        drills=drills, lease=lease,
    )  # fmt: skip
    slot = Slot(host="a", address="x", port=1, first_rank=0, nproc=1, incarnations=(1,))
    table = RankTable(generation=1, phase=Phase.RUN, reason="all is well", slots=(slot,))
    worker = WorkerReport(local_rank=0, incarnation=1, state=WorkerState.RUNNING, pid=7)
    documents = {
        KEYS.spec: spec,
        KEYS.ranktable: table,
        KEYS.host("a"): HostRecord(host="a", name="a", address="x", port=1, nproc=1),
        KEYS.report("a"): HostReport(host="a", generation=1, workers=(worker,)),
    }
    await store.commit([], [Put(key=k, value=wire.encode(v)) for k, v in documents.items()])
    return lease


def play(story: Callable[[MemoryCluster], Awaitable[None]]) -> None:
    """Run a story."""
    asyncio.run(asyncio.wait_for(story(MemoryCluster()), 20))


def operator(cluster: MemoryCluster) -> Operator:
    """Return one that talks to nobody."""
    return Operator(cluster.client(), "j", SystemClock(), lambda line: None)


async def answer(cluster: MemoryCluster, number: int, text: str) -> Command:
    """Wait for a command as its host does, and refuse it."""
    store, key = cluster.client(), KEYS.command(number)
    while key not in cluster.items:
        await asyncio.sleep(0.01)
    asked = wire.decode_command(cluster.items[key].value)
    told = Command(
        id=asked.id, uid=asked.uid, host=asked.host, rank=asked.rank, fault=asked.fault,
        state=CommandState.REFUSED, text=text,
    )  # fmt: skip
    await store.commit([], [Put(key=key, value=wire.encode(told), lease=cluster.items[key].lease)])
    return asked


def test_a_command_is_asked_of_one_host_for_this_very_job() -> None:
    """Under the job's lease, so that it never outlives it; numbers go on, and old ones go."""

    async def story(cluster: MemoryCluster) -> None:
        lease = await job(cluster.client())
        async with operator(cluster) as one:
            for number in range(1, KEPT + 3):
                victim = one.choose(fault("exit:3"), Selection(), random.Random(0))
                asked, verdict = await asyncio.gather(
                    answer(cluster, number, "no"), one.inject(fault("exit:3"), victim, 5.0)
                )
                assert (asked.uid, asked.host, asked.rank) == ("u", "a", 0)
                assert (verdict.outcome, verdict.text) == (Outcome.REFUSED, "no")
                assert cluster.items[KEYS.command(number)].lease == lease
        left = [key for key in cluster.items if key.startswith(KEYS.commands)]
        assert len(left) == KEPT

    play(story)


def test_a_job_that_does_not_allow_drills_is_left_alone() -> None:
    """Nothing is written."""

    async def story(cluster: MemoryCluster) -> None:
        await job(cluster.client(), drills=False)
        with pytest.raises(UsageError, match="start it with --allow-drills"):
            async with operator(cluster):
                pass
        assert not [key for key in cluster.items if key.startswith(KEYS.commands)]

    play(story)


def test_a_fault_that_nobody_does_is_given_up() -> None:
    """Its host may be gone, or busy with an etcd that it does not reach."""

    async def story(cluster: MemoryCluster) -> None:
        await job(cluster.client())
        async with operator(cluster) as one:
            victim = one.choose(fault("kill"), Selection(rank=0), random.Random(0))
            verdict = await one.inject(fault("kill"), victim, 0.2)
        assert (verdict.outcome, verdict.text) == (
            Outcome.OPEN,
            "it has not happened within 0.2 s",
        )
        assert KEYS.command(1) not in cluster.items  # and it must not happen later

    play(story)
