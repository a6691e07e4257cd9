"""Injects faults of all kinds and prints which class frun gave each: a confusion matrix.

    python -m tests.e2e.classes 3

Ends with 1 if fewer than 95 % were named rightly. A network that is cut needs root and `ip`; it is named
once the host is back, since those that are left can't tell it from a host that is off.
"""

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from frun import registry
from frun.protocol.classes import FaultClass
from tests.e2e import cluster
from tests.e2e.harness import Site
from tests.e2e.test_detection import Job
from tests.fakes.etcd_server import etcd_server
from tests.hosts.drills import inject, stored_incident
from tests.hosts.network import missing
from tests.hosts.scenarios import spare_is_registered, stage
from tests.hosts.scenarios_recovery import THREE, training

WORKER_KINDS = {
    "kill": FaultClass.PROCESS,
    "exit:7": FaultClass.PROCESS,
    "segfault": FaultClass.PROCESS,
    "stop": FaultClass.PROCESS,
    "gil": FaultClass.PROCESS,
    "zygote": FaultClass.PROCESS,
    "exception": FaultClass.USER,
    "hang": FaultClass.USER,
    "oom": FaultClass.HOST,
    "device": FaultClass.DEVICE,
}
"""Kinds of `frun inject-fault`."""
SCRIPT_KINDS = {
    "fill": FaultClass.STORAGE,
    "dial": FaultClass.NETWORK,
    "barrier": FaultClass.NETWORK,
    "ecc": FaultClass.DEVICE,
}
"""What a script meets in other machines and devices, of which each is an exception or a wait."""
HOST_KINDS = ("agent", "host")
_PATIENCE_S = 60.0
_LATER_S = 20.0
"""A host that is back registers again within a second or two."""
_ROOM = 64 << 20
"""Bytes that a worker may still take before the kernel kills it."""


class Cgroup:
    """A memory limit around one worker, so that the kernel kills it and nothing else."""

    def __init__(self) -> None:
        """Make it. Raises OSError where that is not allowed, LookupError where there is none."""
        for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                parent = Path("/sys/fs/cgroup/memory" + path)
                break
        else:
            raise LookupError("no memory controller of cgroup v1")
        self._folder = parent / f"frun-classes-{os.getpid()}"
        self._folder.mkdir()

    def take(self, pid: int) -> None:
        """Put a process under a limit a little above what it uses."""
        (self._folder / "memory.limit_in_bytes").write_text("-1")
        (self._folder / "cgroup.procs").write_text(str(pid))
        used = int((self._folder / "memory.usage_in_bytes").read_text())
        (self._folder / "memory.limit_in_bytes").write_text(str(used + _ROOM))

    def close(self) -> None:
        """Remove it; nothing lives in it any more."""
        self._folder.rmdir()


def drill(site: Site, *args: str) -> dict[str, Any]:
    """Inject one fault; return the incident."""
    done = site.run("inject-fault", *args, "--yes", "--json")
    assert done.out, done.err
    (row,) = json.loads(done.out)["faults"]
    assert row["incident"] is not None, row
    return dict(row["incident"])


def of_workers(site: Site, count: int, table: Counter[tuple[str, str, str]]) -> None:
    """Do what can be done to a worker, in one job."""
    job = Job(site, "--allow-drills", "--max-restarts=1000", "--hang-timeout=1")
    for kind, expected in WORKER_KINDS.items():
        for number in range(count):
            group = None
            if kind == "oom":
                group = Cgroup()
                status = json.loads(site.run("status", "--json").out)
                group.take(status["hosts"][0]["workers"][number % 3]["pid"])
            found = drill(site, kind, f"--rank={number % 3}")
            note(table, kind, expected, found)
            job.steps(10)
            if group is not None:
                group.close()
    for word, expected in SCRIPT_KINDS.items():
        for number in range(count):
            before = len(job.events("incident_closed"))
            job.do(number % 3, word)
            note(table, word, expected, incident_after(job, before))
            job.steps(10)
    job.end()


def incident_after(job: Job, count: int) -> dict[str, Any]:
    """Wait for one more incident than these, and return it."""
    deadline = time.monotonic() + _PATIENCE_S
    while len(found := job.events("incident_closed")) <= count:
        assert time.monotonic() < deadline, job.running.err
        threading.Event().wait(0.1)
    return found[count]


def of_hosts(site: Site, count: int, table: Counter[tuple[str, str, str]]) -> None:
    """Take agents and whole hosts out of a job that has spares."""
    site.keeps = (r"frun_.*",)
    with etcd_server() as etcd:
        flags = ("--nnodes=2", "--allow-drills", "--max-restarts=0")
        job = cluster.Job(site, etcd, job_id="classes", flags=flags)
        agents = job.starts(2)
        job.world(agents)
        agents += job.starts(count * len(HOST_KINDS))
        job.until(lambda: len(job.hosts()) == len(agents), 60.0, "spares")
        where = (f"--rdzv-endpoint={etcd.endpoint}", "--job-id=classes")
        for kind in HOST_KINDS:
            for _ in range(count):
                note(table, kind, FaultClass.HOST, drill(site, kind, *where))
        left = [agent for agent in agents if agent.running.process.poll() is None]
        for agent in left:
            agent.running.send(signal.SIGTERM)
            agent.running.wait()
    registry.live_jobs(str(site.state / "frun"))  # reading it removes the files of the dead


def of_networks(count: int, table: Counter[tuple[str, str, str]]) -> None:
    """Cut hosts off that have a network of their own, and look once they are back."""
    with stage() as ready, training(ready, *THREE, "--allow-drills", spares=1) as (job, _):
        for _ in range(count):
            row = inject(ready, job, "network", "--duration=6")
            spare_is_registered(ready, job, 4)
            deadline = time.monotonic() + _LATER_S
            while True:
                found = stored_incident(ready, job, row["incident"]["id"])
                if found["fault_class"] == "network" or time.monotonic() > deadline:
                    break
                threading.Event().wait(0.1)
            note(table, "network", FaultClass.NETWORK, found)
        job.finish()


def note(
    table: Counter[tuple[str, str, str]], kind: str, expected: FaultClass, found: dict[str, Any]
) -> None:
    """Count one fault, and print its evidence."""
    named = str(found["fault_class"])
    table[kind, expected.value, named] += 1
    sys.stdout.write(f"{kind}: {named}: {found['evidence']}\n")
    sys.stdout.flush()


def main() -> int:
    """Do them all; return the exit status."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    table: Counter[tuple[str, str, str]] = Counter()
    for part in (of_workers, of_hosts):
        with tempfile.TemporaryDirectory() as folder, Site(Path(folder)) as site:
            part(site, count, table)
    if why := missing():
        sys.stdout.write(f"no network is cut: {why}\n")
    else:
        of_networks(count, table)
    names = [each.value for each in FaultClass]
    sys.stdout.write(f"\n{'kind':12}{'is':10}" + "".join(f"{name:>9}" for name in names) + "\n")
    for kind, expected in dict.fromkeys((kind, expected) for kind, expected, _ in table):
        cells = "".join(f"{table[kind, expected, name] or '-':>9}" for name in names)
        sys.stdout.write(f"{kind:12}{expected:10}{cells}\n")
    right = sum(n for (_, expected, found), n in table.items() if expected == found)
    sys.stdout.write(f"{right} of {table.total()} named rightly\n")
    return 0 if right >= 0.95 * table.total() else 1


if __name__ == "__main__":
    sys.exit(main())
