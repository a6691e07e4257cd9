"""Jobs of MIN to MAX hosts: they shrink, grow, and outlive hosts that leave or fail."""

import signal
import time

import pytest

from tests.hosts.job import FORM_S, LEASE_S, NOTICE_S, RESTART_S
from tests.hosts.scenarios import Stage, fail_rank

pytestmark = pytest.mark.hosts


def test_the_world_shrinks_and_grows(hosts: Stage) -> None:
    """A lost host, a polite leave and a failure for good each cost one host; a new agent joins (R59-R69)."""
    three = ("--nnodes=1:3", "--replace-timeout=1", "--rdzv-conf=last_call_timeout=20")
    with hosts.job(*three) as job:
        for name in ("h1", "h2", "h3"):
            job.start(hosts.network[name])
        world = job.world(size=3, within_s=FORM_S)
        agents = {agent.host.name: agent.process.pid for agent in job.agents}

        fault_at = time.monotonic()
        job.agent("h2").host.kill()
        dead = job.agent("h2")
        assert job.noticed_after(fault_at, world.generation) <= NOTICE_S
        two = job.world(after=world.generation, size=2, within_s=RESTART_S)
        assert sorted(two.hosts.values()) == ["h1", "h3"]

        hosts.network["h2"].mend()
        job.start(hosts.network["h2"])
        three_again = job.world(after=two.generation, size=3, within_s=FORM_S)
        assert {r: h for r, h in three_again.hosts.items() if h != "h2"} == two.hosts
        for name in ("h1", "h3"):
            assert job.agent(name).process.pid == agents[name]
            assert job.agent(name).process.poll() is None

        # The agent that came first leaves politely, whatever it was to the others.
        fault_at = time.monotonic()
        job.signal("h1", signal.SIGTERM)
        without_first = job.world(after=three_again.generation, size=2, within_s=RESTART_S)
        assert (
            job.noticed_after(fault_at, three_again.generation) < LEASE_S
        )  # it said so: no lease had to end
        assert sorted(without_first.hosts.values()) == ["h2", "h3"]
        first = job.agent("h1")
        assert first.wait(30) == 1
        assert "stopped by SIGTERM" in first.said
        job.leaves_nothing(first)

        # A worker that fails for good, with no restart allowed, costs its host and not the job.
        rank = without_first.rank_of("h2")
        fail_rank(job, without_first, rank)
        one = job.world(after=without_first.generation, size=1, within_s=RESTART_S)
        assert one.hosts == {0: "h3"}
        failed = job.agent("h2")
        assert failed.wait(30) == 1

        job.start(hosts.network["h4"])
        last = job.world(after=one.generation, size=2, within_s=FORM_S)
        assert last.hosts == {0: "h3", 1: "h4"}
        job.finish(without=(dead, first, failed))
