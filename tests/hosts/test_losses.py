"""Hosts, networks and etcd members that are lost under a running job with a fixed number of hosts."""

import time

import pytest

from tests.hosts.job import FORM_S, LEASE_S, NOTICE_S, RESTART_S
from tests.hosts.scenarios import (
    ALONE,
    LIGHT,
    Stage,
    a_host_is_cut_off,
    an_etcd_member_dies,
    becomes_a_spare,
    fail_rank,
    four_and_a_spare,
    replaced,
    spare_is_registered,
    the_leader_dies,
)

pytestmark = pytest.mark.hosts


def test_one_loss_after_another(hosts: Stage) -> None:
    """Four hosts and a spare go through the loss of a network, the leader, an etcd member and rank 0."""
    with four_and_a_spare(hosts) as (job, first):
        cut = a_host_is_cut_off(hosts, job, first)
        led = the_leader_dies(hosts, job, cut.world)
        member = an_etcd_member_dies(hosts, job, led.world)
        # No spare is left: the ranks wait for a host that comes later.
        world = member.world
        lost, later = world.hosts[0], hosts.network["h6"]
        fault_at = time.monotonic()
        job.agent(lost).host.kill()
        assert job.noticed_after(fault_at, world.generation) <= NOTICE_S
        job.start(later)
        after = job.world(after=world.generation, size=4, within_s=FORM_S)
        assert after.hosts == {**world.hosts, 0: later.name}
        assert after.master == later.address
        assert after.restarts == 1  # the failure of a worker while an etcd member was away
        killed = tuple(agent for agent in job.agents if agent.process.poll() is not None)
        assert len(killed) == 2
        job.advances(after)
        job.finish(without=killed)


def test_a_host_that_comes_back_from_the_dead(hosts: Stage) -> None:
    """A frozen leader, and rank 0 whose packets are lost, are replaced; on return they wait as spares."""
    with hosts.job("--nnodes=2", "--max-restarts=1", "--replace-timeout=60") as job:
        for name in ("h1", "h2"):
            job.start(hosts.network[name])
        world = job.world(size=2, within_s=FORM_S)
        job.start(hosts.network["h3"])
        spare_is_registered(hosts, job, 3)
        leader = hosts.leader(job)
        fault_at = time.monotonic()
        job.agent(leader).host.freeze()
        frozen = replaced(job, world, leader, "h3", fault_at)
        job.agent(leader).host.thaw()
        becomes_a_spare(job, frozen.world, leader)
        rank0 = frozen.world.hosts[0]
        fault_at = time.monotonic()
        job.agent(rank0).host.cut()
        cut = replaced(job, frozen.world, rank0, leader, fault_at)
        job.agent(rank0).host.mend()
        becomes_a_spare(job, cut.world, rank0)
        assert cut.world.restarts == 0

        # One that comes back after the end learns of it.
        late = job.agent(cut.world.hosts[1])
        fault_at = time.monotonic()
        late.host.cut()
        last = replaced(job, cut.world, late.host.name, rank0, fault_at)
        job.advances(last.world)
        (job.folder / "finish").touch()
        for name in last.world.hosts.values():
            assert job.agent(name).wait(30) == 0
        late.host.mend()
        job.all_end()


def test_an_outage_of_etcd_disturbs_nobody(hosts: Stage) -> None:
    """Without any etcd for 20 s, and with a frozen one, training goes on; then failures are handled."""
    etcd = hosts.etcd
    with hosts.job("--nnodes=2", "--max-restarts=2") as job:
        for name in ("h1", "h2"):
            job.start(hosts.network[name])
        world = job.world(size=2, within_s=FORM_S)
        for number in range(3):
            etcd.kill(number)
        job.trains_for(world, 20.0)
        for number in range(3):
            etcd.start(number)
        for number in range(3):
            etcd.wait_healthy(number)
        job.trains_for(world, LEASE_S + 1)
        for number in range(3):
            etcd.freeze(number)
        job.trains_for(world, LEASE_S + 2)
        for number in range(3):
            etcd.thaw(number)
        job.trains_for(world, LEASE_S + 1)
        fail_rank(job, world, 1)
        after = job.world(after=world.generation, size=2, within_s=RESTART_S)
        assert (after.hosts, after.restarts) == (world.hosts, 1)
        # One member of three that hangs is as good as dead.
        leader, _ = etcd.members_by_role()
        etcd.freeze(leader)
        job.trains_for(after, LEASE_S)
        fail_rank(job, after, 0)
        last = job.world(after=after.generation, size=2, within_s=RESTART_S)
        assert (last.hosts, last.restarts) == (world.hosts, 2)
        etcd.thaw(leader)
        job.finish()


def test_a_lost_host_without_any_other(hosts: Stage) -> None:
    """When nobody takes the ranks within --replace-timeout, the job ends and says why."""
    with hosts.job("--nnodes=2", "--replace-timeout=1", *LIGHT, script=ALONE) as job:
        for name in ("h1", "h2"):
            job.start(hosts.network[name])
        world = job.world(size=2, within_s=FORM_S)
        job.agent("h1").host.kill()
        left = job.agent("h2")
        assert left.wait(NOTICE_S + 20) == 1
        assert "stayed vacant for 1 s (--replace-timeout)" in left.said
        assert "lost host h1-" in left.said
        assert f"(rank {world.rank_of('h1')})" in left.said
        job.leaves_nothing(left)


def test_a_job_whose_hosts_all_died(hosts: Stage) -> None:
    """Started again at once under the same id, it forms as soon as the old leases end (R81)."""
    with hosts.job("--nnodes=2", "--replace-timeout=60", *LIGHT, script=ALONE) as job:
        for name in ("h1", "h2"):
            job.start(hosts.network[name])
        world = job.world(size=2, within_s=FORM_S)
        dead = tuple(job.agents)
        for agent in dead:
            agent.host.kill()
        job.forget()
        for agent in dead:
            agent.host.mend()
            job.start(agent.host)
        after = job.world(size=2, within_s=FORM_S)
        assert sorted(after.hosts.values()) == ["h1", "h2"]
        assert not set(after.pids.values()) & set(world.pids.values())
        for rank in (0, 1):
            (job.folder / f"end-{rank}").touch()
        job.all_end(without=dead)
