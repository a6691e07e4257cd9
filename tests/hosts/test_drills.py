"""Drills that take hosts with a network of their own."""

import json
import os
import sys
from typing import Any

import pytest

from tests.hosts.job import FORM_S, ROOT, Job
from tests.hosts.scenarios import Stage, becomes_a_spare
from tests.hosts.scenarios_recovery import THREE, exact, told_once, training, went_on

pytestmark = pytest.mark.hosts


def inject(hosts: Stage, job: Job, *drill: str) -> dict[str, Any]:
    """Inject a fault from the leader's host; return what came of it."""
    output = job.folder / "drill"
    where = (f"--rdzv-endpoint={hosts.etcd.endpoints}", f"--job-id={job.job_id}")
    command = [sys.executable, "-m", "frun", "inject-fault", *drill, *where, "--yes", "--json"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(output)}
    host = hosts.network[hosts.leader(job)]
    assert host.run(command, env=environment, output=output).wait(60) == 0, output.read_text()
    (row,) = json.loads(output.read_text())["faults"]
    return dict(row)


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
        key = f"/frun/{job.job_id}/incidents/{row['incident']['id']:08d}"

        def is_known() -> bool:
            return bool(json.loads(hosts.etcd.get(key) or "{}")["fault_class"] == "network")

        job.wait_for(is_known, FORM_S, "the class of the fault is known")
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
