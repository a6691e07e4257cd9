"""Faults on purpose, from the command line to the end of the incident."""

import json
import re
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from frun import registry
from tests.e2e.cluster import Job
from tests.e2e.harness import Running, Site
from tests.fakes.etcd_server import EtcdServer, etcd_server

TRAIN = """
    import time
    import torch
    import torch.distributed as dist
    import frun

    @frun.resumable
    def train(session):
        dist.init_process_group("gloo")
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.restore(model=model, optimizer=optimizer)
        replica = torch.nn.parallel.DistributedDataParallel(model)
        while session.step < 100_000:
            time.sleep(0.01)
            optimizer.zero_grad()
            replica(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            if session.step == 2:
                print("trains", session.rank)

    train()
"""


def drill(site: Site, *args: str, code: int = 0) -> dict[str, Any]:
    """Inject one fault; return its row."""
    done = site.run("inject-fault", *args, "--yes", "--json")
    assert done.code == code, done.err + done.out
    (row,) = json.loads(done.out)["faults"]
    assert isinstance(row, dict)
    return row


def pid_of(site: Site, rank: int) -> int:
    """Return the process of a rank."""
    status = json.loads(site.run("status", "--json").out)
    workers = [worker for host in status["hosts"] for worker in host["workers"]]
    return next(int(worker["pid"]) for worker in workers if worker["rank"] == rank)


def differ(site: Site) -> list[int]:
    """Return the ranks that differ from their replicas."""
    status = json.loads(site.run("status", "--json").out)
    workers = [worker for host in status["hosts"] for worker in host["workers"]]
    return [int(worker["rank"]) for worker in workers if worker["diverged"]]


def differs_and_is_healed(site: Site, job: Running) -> None:
    """Flip a bit of rank 1 and let rank 0 die: of the others the one that is right gives both its state."""
    assert differ(site) == []
    assert drill(site, "bitflip", "--rank=1")["outcome"] == "unharmed"
    job.expect(
        r"rank 1 holds other parameters after step \d+ than most of its replicas", 1, stream="err"
    )
    assert differ(site) == [1]
    row = drill(site, "kill", "--rank=0")
    assert (row["outcome"], row["incident"]["ranks"]) == ("recovered", [0])
    assert differ(site) == []


def of_a_device(site: Site) -> None:
    """Let a check report a fault: its rank is replaced where it is, at the same step."""
    incident = drill(site, "device", "--rank=1")["incident"]
    assert (incident["ranks"], incident["action"]) == ([1], "replace-worker")
    assert (incident["fault_class"], incident["steps_lost"]) == ("device", 0)
    assert incident["evidence"].startswith("file: device 1: drill")


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    """An etcd that runs anyway."""
    with etcd_server() as server:
        yield server


def test_faults_of_a_host(site: Site) -> None:
    """The private etcd, the disk of the logs, a device, the zygote; there is no network to cut here."""
    script = site.script("train.py", TRAIN)
    job = site.start("--allow-drills", "--nproc-per-node=2", "--max-restarts=1", script)
    job.expect("trains", 2)
    row = drill(site, "disk-full", "--duration=0.5")
    assert (row["outcome"], row["rank"]) == ("unharmed", None)
    assert drill(site, "etcd")["outcome"] == "unharmed"
    assert drill(site, "etcd", "--duration=0.5")["outcome"] == "unharmed"
    row = drill(site, "network", "--duration=1", code=1)
    assert row["outcome"] == "refused"
    assert "nothing to cut" in row["text"]
    of_a_device(site)
    row = drill(site, "zygote")
    assert (row["outcome"], row["incident"]["action"]) == ("restarted", "restart-all")
    job.send(signal.SIGTERM)
    assert job.wait().code == 1


def test_faults_of_hosts(site: Site, etcd: EtcdServer) -> None:
    """An agent, the leader, all of a host: a spare takes the place each time."""
    flags = ("--nnodes=2", "--allow-drills", "--max-restarts=0")
    job = Job(site, etcd, job_id="drills", flags=flags)
    agents = job.starts(2)
    world = job.world(agents)
    agents += job.starts(3)
    job.until(lambda: len(job.hosts()) == 5, 30.0, "three spares")
    where = (f"--rdzv-endpoint={etcd.endpoint}", "--job-id=drills")
    # The host goes, is not fit for some seconds, and is the last of the spares then.
    status = json.loads(site.run("status", "--json", *where).out)
    others = [
        host["host"]
        for host in status["hosts"]
        if host["role"] == "member" and host["host"] != status["leader"]
    ]
    row = drill(site, "device", "--duration=1", f"--host={others[0]}", *where)
    assert (row["incident"]["kind"], row["incident"]["action"]) == ("device", "replace-host")
    assert (row["incident"]["hosts"], row["incident"]["fault_class"]) == ([others[0]], "device")
    assert len(job.hosts()) == 5
    for kind, more in (("agent", "--rank=1"), ("leader", "--yes"), ("host", "--random")):
        row = drill(site, kind, more, *where)
        assert row["outcome"] in ("restarted", "recovered")
        assert row["incident"]["hosts"] == [row["host"]]
        assert row["incident"]["fault_class"] == "host"
    assert len(job.hosts()) == 2
    left = [agent for agent in agents if agent.running.process.poll() is None]
    assert len(left) == 2
    site.keeps = (r"frun_.*",)
    registry.live_jobs(str(site.state / "frun"))  # reading it removes the files of the dead
    job.world(left, after=world)
    job.finish(left)
    job.left_nothing()


def test_faults_of_workers(site: Site) -> None:
    """Each kind is done to the worker that was meant, and followed until all is well again."""
    script = site.script("train.py", TRAIN)
    job = site.start("--allow-drills", "--nproc-per-node=3", "--compare-replicas=10", script)
    job.expect("trains", 3)

    done = site.run("inject-fault", "kill", "--rank=1", "--yes")
    assert done.code == 0, done.err
    assert "SIGKILL to pid" in done.out
    assert re.search(r"kill of rank 1 \(pid \d+ on .*\): recovered: .*, 0 steps lost", done.out)
    assert "replace-worker" in done.out.splitlines()[-1]

    row = drill(site, "exit:7", "--rank=2")
    assert (row["outcome"], row["rank"], row["fault"]) == ("recovered", 2, "exit:7")
    assert "exit status 7" in row["incident"]["cause"]
    row = drill(site, "segfault", "--leader", "--seed=1")
    assert row["outcome"] == "recovered"
    assert "SIGSEGV" in row["incident"]["cause"]
    assert row["incident"]["fault_class"] == "process"
    assert "SIGSEGV" in row["incident"]["evidence"]
    assert row["incident"]["ranks"] == [row["rank"]]
    row = drill(site, "kill", "--rank=0", "--phase=update")
    assert (row["outcome"], row["incident"]["steps_lost"]) == ("recovered", 0)
    row = drill(site, "kill", "--rank=0", "--at-step=0", code=1)
    assert (row["outcome"], row["text"]) == ("refused", "step 0 was over before")
    pid = pid_of(site, 1)
    (size,) = re.findall(r"VmSize:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    resource.prlimit(pid, resource.RLIMIT_AS, (int(size) * 1024 + (256 << 20),) * 2)
    assert drill(site, "oom", "--rank=1")["outcome"] == "recovered"
    # The first one waits for its place, the second one brings it there.
    first = site.start("inject-fault", "kill", "--rank=2", "--phase=copy", "--yes")
    first.expect("waits for rank 2")
    drill(site, "kill", "--rank=1")
    assert "kill in copy of rank 2" in first.wait().out
    assert ": recovered:" in first.wait().out
    for kind, fault_class in (("gil", "process"), ("hang", "user")):
        row = drill(site, kind, "--rank=2")
        assert row["incident"]["fault_class"] == fault_class
        assert (row["outcome"], row["incident"]["ranks"]) == ("recovered", [2])
    row = drill(site, "stop", "--duration=0.2", "--random")
    assert (row["outcome"], row["incident"]) == ("unharmed", None)

    differs_and_is_healed(site, job)

    asked = site.run("inject-fault", "kill")
    assert (asked.code, asked.out) == (2, "")
    assert "nobody is there to be asked: add --yes" in asked.err
    status = json.loads(site.run("status", "--json").out)
    assert (status["drills"], status["restarts"]) == (True, 0)
    assert status["recoveries"] == status["generation"] - 1 >= 7
    row = drill(site, "exception", "--rank=0", code=1)
    assert row["outcome"] == "failed"
    assert job.wait().code == 1
    assert "DrillError: drill" in job.err


CAMPAIGN = """
    seed: 3
    every: 0.1
    kinds:
      - {fault: kill, cause: a mishap, phase: backward}
      - {fault: "exit:9"}
      - {fault: stop, duration: 0.1}
    faults: 4
    """


def test_a_campaign(site: Site) -> None:
    """A row per fault, JSON in a file, and a status that says whether all was as expected."""
    script = site.script("train.py", TRAIN)
    site.script("mixed.yaml", CAMPAIGN)
    site.script("wrong.yaml", "{kinds: [{fault: kill, expect: failed}]}")
    job = site.start("--allow-drills", "--nproc-per-node=2", script)
    job.expect("trains", 2)

    done = site.run("drill", "mixed.yaml", "--yes", "--output=result.json")
    assert done.code == 0, done.out + done.err
    *rows, last = done.out.splitlines()
    assert last == "4 of 4 faults ended as expected"
    result = json.loads((site.cwd / "result.json").read_text())
    assert (result["as_expected"], result["seed"], result["planned"]) == (True, 3, 4)
    assert len(rows) == len(result["faults"]) == 4
    for row, told in zip(result["faults"], rows, strict=True):
        assert row["as_expected"]
        assert f"{row['fault']} of {row['victim']}" in told
        assert row["outcome"] in row["expected"]

    done = site.run("drill", "wrong.yaml", "--yes", "--json")
    assert done.code == 1
    assert not json.loads(done.out)["as_expected"]
    done = site.run("drill", "mixed.yaml", "--without=kill,exit,stop")
    assert (done.code, done.err) == (2, "frun: error: no kind of fault is left in the campaign\n")
    done = site.run("drill", "none.yaml")
    assert (done.code, done.out) == (2, "")
    assert "none.yaml: can not be read" in done.err
    job.send(signal.SIGTERM)
    assert job.wait().code == 1
