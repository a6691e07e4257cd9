"""A drill that needs a network of its own: a host cuts itself off for a while."""

import json
import os
import sys

import pytest

from tests.hosts.job import FORM_S, ROOT
from tests.hosts.scenarios import Stage, becomes_a_spare
from tests.hosts.scenarios_recovery import THREE, told_once, training

pytestmark = pytest.mark.hosts


def test_a_host_without_network(hosts: Stage) -> None:
    """A spare takes its ranks; when the network is back by itself the host is a spare."""
    with training(hosts, *THREE, "--allow-drills", spares=1) as (job, first):
        lost = next(name for name in first.hosts.values() if name != hosts.leader(job))
        output = job.folder / "drill"
        command = [sys.executable, "-m", "frun", "inject-fault", "network", f"--host={lost}"]
        command += ["--duration=6", f"--rdzv-endpoint={hosts.etcd.endpoints}"]
        command += [f"--job-id={job.job_id}", "--yes", "--json"]
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(output)}
        host = hosts.network[hosts.leader(job)]
        assert host.run(command, env=environment, output=output).wait(60) == 0, output.read_text()

        def class_of(number: int) -> str:
            key = f"/frun/{job.job_id}/incidents/{number:08d}"
            return str(json.loads(hosts.etcd.get(key) or "{}").get("fault_class"))

        (row,) = json.loads(output.read_text())["faults"]
        assert (row["outcome"], row["incident"]["action"]) == ("recovered", "replace-host")
        assert row["incident"]["hosts"] == [row["host"]]
        world = job.world(after=first.generation, size=3, within_s=FORM_S)
        assert lost not in world.hosts.values()
        becomes_a_spare(job, world, lost)
        job.wait_for(lambda: class_of(row["incident"]["id"]) == "network", 20, "the class is known")
        job.finish()
        told_once(job)
