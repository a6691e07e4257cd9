"""The leader among thousands of hosts: reports that come within a moment are looked at together."""

import asyncio

from frun.controller.loop import Controller
from frun.protocol import wire
from frun.protocol.keys import Keys
from frun.protocol.policy import Decision, Policy
from frun.protocol.records import Phase
from frun.rendezvous.election import Term
from frun.rendezvous.membership import Membership
from frun.rendezvous.store import Put
from tests.fakes.memory_store import MemoryCluster
from tests.protocol import build
from tests.sim import virtual

KEYS = Keys("sim")
HOSTS = 200
LOOK_S = 0.03
"""Seconds that one look takes on the clock of the test."""


class SlowClock(virtual.VirtualClock):
    """Each look takes its time."""

    def __init__(self) -> None:
        self.looks = 0

    def looked(self, _: Decision) -> None:
        """Let the time of one look pass."""
        self.looks += 1

    def monotonic(self) -> float:
        """Return the loop's seconds and those of all looks."""
        return super().monotonic() + self.looks * LOOK_S


async def never() -> bool:
    """Answer that no host does."""
    return False


def test_a_burst_of_reports_costs_few_looks_and_no_time_after_it() -> None:
    """200 hosts get ready one after the other: the leader looks some times, not 200, and then decides."""

    async def story() -> None:
        cluster = MemoryCluster()
        store = cluster.client()
        table = build.table(Phase.RECOVER, " ".join(f"h{n:03}" for n in range(HOSTS)))
        for slot in table.slots:
            record = build.host(slot.host)
            await store.commit([], [Put(key=KEYS.host(slot.host), value=wire.encode(record))])
        await store.commit([], [Put(key=KEYS.ranktable, value=wire.encode(table))])
        token = await store.commit([], [Put(key=KEYS.leader, value=b"h000")])
        assert token is not None
        clock = SlowClock()
        controller = Controller(
            store,
            KEYS,
            Membership(store, KEYS, build.host("h000"), 3, clock),
            Policy(min_hosts=1, max_hosts=HOSTS, max_restarts=0),
            clock,
            lambda _: never(),
            on_decision=clock.looked,
            on_incident=lambda _: None,
            on_renamed=lambda _: None,
            on_look=lambda *_: None,
        )
        leading = asyncio.create_task(
            controller.run(Term(token=token, predecessor=""), lambda: None)
        )
        while not clock.looks:
            await asyncio.sleep(0.001)
        for slot in table.slots:
            ready = wire.encode(build.report(slot.host, port=29500))
            await store.commit([], [Put(key=KEYS.report(slot.host), value=ready)])
            await asyncio.sleep(0.001)
        while wire.decode_table(cluster.items[KEYS.ranktable].value).phase is not Phase.RUN:
            await asyncio.sleep(0.001)
        leading.cancel()
        await asyncio.wait({leading})
        assert clock.looks <= HOSTS / 10

    virtual.run(story())
