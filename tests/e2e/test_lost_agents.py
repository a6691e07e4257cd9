"""Agents that are killed while their hosts live: known long before their lease ends."""

import time

from tests.e2e.cluster import Job
from tests.e2e.harness import Site
from tests.fakes.etcd_server import etcd_server

LEASE = "--rdzv-conf=keep_alive_interval=10,keep_alive_max_attempt=3,last_call_timeout=20"
WITHIN_S = 20.0
"""Of a lease of 30 s."""


def test_a_killed_agent_is_known_without_its_lease(site: Site) -> None:
    """One that does not lead, then the one that does: each time the others go on without it."""
    with etcd_server() as etcd:
        job = Job(site, etcd, job_id="gone", flags=("--nnodes=1:3", "--replace-timeout=0", LEASE))
        agents = job.starts(3)
        world = job.world(agents)
        for _ in range(2):
            leader = job.stored("leader")["leader"]["value"]
            leads = [up for up in world if _host(job, up.group_rank) == leader]
            dead = next(up for up in world if up not in leads) if len(world) == 3 else leads[0]
            began = time.monotonic()
            job.kill([dead.agent])
            agents.remove(dead.agent)
            world = job.world(agents, after=world, limit_s=WITHIN_S)
            assert time.monotonic() - began < WITHIN_S
        job.finish(agents)


def _host(job: Job, group_rank: int) -> str:
    return str(job.stored("ranktable")["ranktable"]["value"]["slots"][group_rank]["host"])
