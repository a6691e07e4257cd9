"""Injects faults into jobs of namespace hosts, as an operator does, and reads what is stored of them."""

import json
import os
import sys
from typing import Any

from tests.hosts.job import ROOT, Job
from tests.hosts.scenarios import Stage


def inject(hosts: Stage, job: Job, *drill: str) -> dict[str, Any]:
    """Inject a fault from a host of the etcd, which none befalls; return what came of it."""
    output = job.folder / "drill"
    output.unlink(missing_ok=True)
    where = (f"--rdzv-endpoint={hosts.etcd.endpoints}", f"--job-id={job.job_id}")
    command = [sys.executable, "-m", "frun", "inject-fault", *drill, *where, "--yes", "--json"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(job.folder)}
    operator = hosts.etcd.hosts[0]
    assert operator.run(command, env=environment, output=output).wait(60) == 0, output.read_text()
    (row,) = json.loads(output.read_text())["faults"]
    return dict(row)


def stored_incident(hosts: Stage, job: Job, number: int) -> dict[str, Any]:
    """Return the account of a fault as etcd has it now."""
    stored = hosts.etcd.get(f"/frun/{job.job_id}/incidents/{number:08d}")
    return dict(json.loads(stored or "{}"))
