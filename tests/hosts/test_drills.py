"""Drills that take hosts with a network of their own."""

import pytest

from tests.hosts.drills import inject, stored_incident
from tests.hosts.job import FORM_S
from tests.hosts.scenarios import Stage, becomes_a_spare
from tests.hosts.scenarios_recovery import THREE, exact, told_once, training, went_on

pytestmark = pytest.mark.hosts


def test_a_host_without_network(hosts: Stage) -> None:
    """A spare takes its ranks; when the network is back the host is a spare, and says what it was."""
    with training(hosts, *THREE, "--allow-drills", spares=1) as (job, first):
        lost = next(name for name in first.hosts.values() if name != hosts.leader(job))
        row = inject(hosts, job, "network", f"--host={lost}", "--duration=6")
        assert (row["outcome"], row["incident"]["action"]) == ("recovered", "replace-host")
        assert row["incident"]["hosts"] == [row["host"]]
        world = job.world(after=first.generation, size=3, within_s=FORM_S)
        assert lost not in world.hosts.values()
        becomes_a_spare(job, world, lost)
        number = row["incident"]["id"]
        job.wait_for(
            lambda: stored_incident(hosts, job, number)["fault_class"] == "network",
            FORM_S,
            "the class of the fault is known",
        )
        job.finish()
        told_once(job)


def test_a_host_is_left_before_it_fails(hosts: Stage) -> None:
    """A spare takes its ranks within the step, its workers end, the others' live on; no bit differs."""
    with training(hosts, *THREE, "--allow-drills", spares=1) as (job, first):
        left = first.hosts[1]
        row = inject(hosts, job, "device:warning", "--rank=1", "--duration=8")
        assert (row["outcome"], row["incident"]["kind"]) == ("recovered", "drain"), row
        assert (row["incident"]["ranks"], row["incident"]["steps_lost"]) == ([1], 0)
        world = job.world(after=first.generation, size=3, within_s=FORM_S)
        assert left not in world.hosts.values()
        went_on(job, first, world, {1})
        becomes_a_spare(job, world, left)
        job.finish()
        exact(job, 3)
