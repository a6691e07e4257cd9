"""Somebody deletes all keys of a job while etcd serves and watches see it."""

import asyncio

from frun.protocol.policy import Policy
from frun.protocol.records import Phase
from frun.rendezvous.store import Delete
from tests.sim.cluster import Sim, play


def test_deleted_keys_tell_of_no_death() -> None:
    """The leader is slow to register again: the next one writes the table back and restarts nobody."""
    policy = Policy(min_hosts=3, max_hosts=3, max_restarts=1, replace_timeout_s=30.0)

    async def story(sim: Sim) -> None:
        sim.add("a", "b", "c", "s")
        await sim.running(1)
        await sim.until(lambda: len(sim.registered) == 4 and sim.leader)
        sim.wiped = True
        with sim.hosts[sim.leader].client.outage():
            sim.etcd.commit([], [Delete(key="/frun/", prefix=True)])
            await asyncio.sleep(1.0)
        await sim.until(lambda: len(sim.registered) == 4 and sim.table is not None)
        assert await sim.end() is Phase.DONE

    sim = play(Sim(policy, work_s=30.0), story)
    assert sim.tables[-1].generation == 1, sim.story()
