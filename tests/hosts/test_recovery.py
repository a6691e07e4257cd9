"""Recovery within a step over several hosts: who lives on keeps its process, and no bit differs."""

import os
import signal
import time

import pytest

from tests.hosts.job import FORM_S, NOTICE_S, RESTART_S
from tests.hosts.scenarios import Stage
from tests.hosts.scenarios_recovery import (
    THREE,
    a_cut,
    a_freeze,
    a_host_with_a_spare,
    a_host_without_a_spare,
    a_worker,
    accounted,
    exact,
    ranks_on,
    restarted,
    the_agent,
    the_leaders_host,
    told_once,
    training,
    waits_paused,
    went_on,
)

pytestmark = pytest.mark.hosts


def test_hosts_are_lost_one_after_another(hosts: Stage) -> None:
    """A host, the leader's host, an agent: spares take their ranks; then none is left, and one comes late."""
    with training(hosts, *THREE, spares=1) as (job, first):
        one = a_host_with_a_spare(hosts, job, first)
        job.advances(one.world)
        two = a_host_without_a_spare(hosts, job, one.world)
        job.advances(two.world)
        # The host that was lost first is repaired, and waits.
        lost = next(a.host for a in job.agents if a.process.poll() is not None)
        job.start(lost)
        job.wait_for(
            lambda: len(hosts.etcd.keys(f"/frun/{job.job_id}/hosts/")) == 4, FORM_S, "a spare"
        )
        three = the_leaders_host(hosts, job, two.world)
        killed = tuple(agent for agent in job.agents if agent.process.poll() is not None)
        assert len(killed) == 3
        job.advances(three.world)
        job.finish(without=killed)
        exact(job, 3)
        accounted(job, "host", "host", "host")


def test_hosts_that_were_replaced_come_back(hosts: Stage) -> None:
    """One that stood still and one without network each end their workers, wait, and take over later."""
    with training(hosts, *THREE, spares=1) as (job, first):
        frozen = a_freeze(hosts, job, first)
        cut = a_cut(hosts, job, frozen.world)
        agent = the_agent(hosts, job, cut.world)
        killed = tuple(agent for agent in job.agents if agent.process.poll() is not None)
        assert len(killed) == 1
        job.advances(agent.world)
        job.finish(without=killed)
        exact(job, 3)
        accounted(job, "host", "host", "host")


def test_the_world_shrinks_and_grows(hosts: Stage) -> None:
    """Within MIN:MAX the survivors go on without the lost host, and take a new one in, in their processes."""
    elastic = ("--nnodes=1:3", "--replace-timeout=1", "--rdzv-conf=last_call_timeout=20")
    with training(hosts, *elastic) as (job, three):
        lost = three.hosts[0]
        fault_at = time.monotonic()
        job.agent(lost).host.kill()
        dead = job.agent(lost)
        assert job.noticed_after(fault_at, three.generation) <= NOTICE_S
        two = job.world(after=three.generation, size=2, within_s=RESTART_S)
        pids = {news.host: news.pid for news in three.ranks.values() if news.host != lost}
        assert {news.host: news.pid for news in two.ranks.values()} == pids
        told_once(job)
        hosts.network[lost].mend()
        job.start(hosts.network[lost])
        grown = job.world(after=two.generation, size=3, within_s=FORM_S)
        went_on(job, two, grown)
        assert grown.hosts == {**two.hosts, 2: lost}
        job.advances(grown)
        job.finish(without=(dead,))
        told_once(job)


def test_a_worker_dies_while_etcd_is_away(hosts: Stage) -> None:
    """Nobody can decide for 20 s; survivors keep their processes, and go on once etcd is back."""
    etcd = hosts.etcd
    with training(hosts, *THREE) as (job, first):
        world = a_worker(job, first, 1).world
        for number in range(3):
            etcd.kill(number)
        job.trains_for(world, 2.0)
        fault_at = time.monotonic()
        os.kill(world.pids[2], signal.SIGKILL)
        waits_paused(job, world, {world.hosts[2]}, seconds=18.0)
        for number in range(3):
            etcd.start(number)
        for number in range(3):
            etcd.wait_healthy(number)
        away_s = time.monotonic() - fault_at
        after = restarted(job, world, 2, fault_at, away_s + NOTICE_S).world
        job.advances(after)
        job.finish()
        exact(job, 3)


def test_one_of_three_is_left(hosts: Stage) -> None:
    """Two hosts die at once, the leader's and rank 0's among them: the third has all that is needed."""
    with training(hosts, *THREE) as (job, world):
        left = next(
            h
            for h in reversed(world.hosts.values())
            if h not in (hosts.leader(job), world.hosts[0])
        )
        dead = tuple(agent for agent in job.agents if agent.host.name != left)
        fault_at = time.monotonic()
        for agent in dead:
            agent.host.kill()
        assert job.noticed_after(fault_at, world.generation) <= NOTICE_S
        waits_paused(job, world, {agent.host.name for agent in dead})
        for name in ("h4", "h5"):
            job.start(hosts.network[name])
        after = job.world(after=world.generation, size=3, within_s=FORM_S)
        assert sorted(after.hosts.values()) == sorted([left, "h4", "h5"])
        went_on(job, world, after, ranks_on(world, *(agent.host.name for agent in dead)))
        assert after.rank_of(left) == world.rank_of(left)
        job.advances(after)
        job.finish(without=dead)
        exact(job, 3)


def test_a_spare_dies_while_it_takes_over(hosts: Stage) -> None:
    """The frozen leader, with two ranks, is replaced by a spare that dies at once; thawed, it is needed."""
    flags = ("--nnodes=2", "--nproc-per-node=2", "--replace-timeout=60")
    with training(hosts, *flags, hosts=2, spares=1, ranks=4) as (job, world):
        frozen, spare = hosts.leader(job), job.agent("h3")
        fault_at = time.monotonic()
        job.agent(frozen).host.freeze()
        assert job.noticed_after(fault_at, world.generation) <= NOTICE_S
        spare.host.kill(silently=False)
        fault_at = time.monotonic()
        noticed_s = job.noticed_after(fault_at, world.generation + 1)
        assert noticed_s <= NOTICE_S
        lost = ranks_on(world, frozen, "h3")
        waits_paused(job, world, {frozen})
        job.agent(frozen).host.thaw()
        after = job.world(after=world.generation + 1, size=4, within_s=RESTART_S)
        assert after.hosts == world.hosts
        went_on(job, world, after, lost)
        assert not {world.pids[rank] for rank in lost} & set(after.pids.values())
        job.advances(after)
        job.finish(without=(spare,))
        exact(job, 4)
