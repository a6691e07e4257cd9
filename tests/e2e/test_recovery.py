"""What a recovery is from outside: who lives on, what is reported, when it ends."""

import json
import re
import signal
import socket
import threading
import time
import urllib.request
from decimal import Decimal
from pathlib import Path
from typing import Any

from tests.e2e.exact import Training
from tests.e2e.harness import LIMIT_S, Running, Site

CONFIG = {"steps": 12, "optimizer": "sgd"}
FOR_EVER = {"steps": 1_000_000, "optimizer": "sgd"}
FIELDS = {
    "id", "generation", "cause", "kind", "ranks", "hosts", "action", "detect_s", "pause_s",
    "respawn_s", "rebuild_s", "agree_s", "copy_s", "first_step_s", "total_s", "steps_lost",
    "resumed_at_step",
}  # fmt: skip


def status(site: Site, job: Running, incidents: int) -> dict[str, Any]:
    """Return what `frun status --json` says once it knows of so many incidents."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        done = site.run("status", "--json")
        if done.code == 0:
            document: dict[str, Any] = json.loads(done.out)
            if len(document["incidents"]) >= incidents:
                return document
        threading.Event().wait(0.1)
    raise AssertionError(f"no {incidents} incidents: {done.out} {done.err} {job.err}")


def free_port() -> int:
    """Return a port that nobody listens at just now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def report(site: Site) -> dict[str, Any]:
    """Return what `frun report --json` says; its seconds must add up exactly."""
    done = site.run("report", "--json")
    assert done.code == 0, done.err
    document: dict[str, Any] = json.loads(done.out)
    buckets = [Decimal(repr(seconds)) for seconds in document["buckets_s"].values()]
    assert sum(buckets) == Decimal(repr(document["wall_s"]))
    assert document["hosts_without_log"] == []
    return document


def steps_of(folder: Path, rank: int) -> list[tuple[int, int]]:
    """Return (step, pid) of the updates that a rank has done."""
    return [
        (int(step), int(pid))
        for step, pid in re.findall(
            r"^done (\d+) (\d+)$", (folder / f"log.{rank}").read_text(), re.M
        )
    ]


def test_an_incident_in_the_status(site: Site) -> None:
    """`frun status --json` tells what died, what was done, how long each phase took, and what was lost."""
    port = free_port()
    faults = "rank 1: SIGKILL at step 7 in backward"
    job, folder = Training(site, 3, FOR_EVER).start(faults, f"--metrics-port={port}")
    document = status(site, job, 1)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert b'frun_incidents_total{action="replace-worker",kind="process"} 1.0' in answer.read()
    (incident,) = document["incidents"]
    assert set(incident) >= FIELDS
    assert incident["ranks"] == [1]
    assert (incident["kind"], incident["action"]) == ("process", "replace-worker")
    assert "rank 1" in incident["cause"]
    assert "SIGKILL" in incident["cause"]
    # The dead one may have been an update ahead of the others, who stood before theirs.
    assert incident["steps_lost"] == 0
    assert incident["resumed_at_step"] in (6, 7)
    phases = [incident[name] for name in ("respawn_s", "rebuild_s", "agree_s", "first_step_s")]
    assert all(0 < seconds <= incident["total_s"] for seconds in phases), incident
    assert (document["restarts"], document["recoveries"], document["generation"]) == (0, 1, 2)
    during = report(site)
    assert not during["over"]
    job.send(signal.SIGTERM)
    assert job.wait().code == 1
    after = report(site)  # the job failed, so its log folder is there
    for account in (during, after):
        (fault,) = account["incidents"]
        assert (fault["cause"], fault["ranks"]) == (incident["cause"], [1])
        spent = fault["spent_s"]
        assert set(spent) == {
            "detection", "pause", "respawn", "rebuild", "copy", "first_step"
        }  # fmt: skip
        assert fault["spent_total_s"] < incident["total_s"] + 0.5
        assert account["run"] == during["run"]
        assert account["steps"] >= 8
    assert after["over"]
    assert during["buckets_s"]["productive"] < after["wall_s"]
    for rank in (0, 2):
        assert len({pid for _, pid in steps_of(folder, rank)}) == 1
    assert len({pid for _, pid in steps_of(folder, 1)}) == 2


def test_a_mistake_of_the_script_is_its_own(site: Site) -> None:
    """A ValueError of one rank ends the job with 1, and is shown with rank and traceback."""
    run = Training(site, 3, CONFIG).run("rank 1: error at step 5 in forward")
    assert run.code == 1
    assert "rank 1" in run.stderr
    assert "ValueError: a mistake of the script" in run.stderr
    assert re.search(r'File ".*faults.py", line \d+, in _do', run.stderr)
    assert "restarts are used up (0 of 0)" in run.stderr
    assert all(len(log.pids) == 1 for log in run.logs)


def test_a_mistake_is_tried_again_within_the_budget(site: Site) -> None:
    """With a restart to spend the rank is replaced, the others live on, and the run ends as it should."""
    training = Training(site, 3, CONFIG)
    reference = training.run()
    faults = "rank 1: error at step 5 in forward"
    run = training.run(faults, "--max-restarts=1")
    assert run.code == 0, run.stderr
    assert [len(log.pids) for log in run.logs] == [1, 2, 1]
    assert [log.losses for log in run.logs] == [log.losses for log in reference.logs]
    # Both jobs ended well and their temporary folders went: what the latest one did is still known.
    account = report(site)
    assert (account["outcome"], account["steps"], account["steps_lost"]) == ("done", 12, 0)
    assert [fault["kind"] for fault in account["incidents"]] == ["user"]
    assert account["buckets_s"]["first_step"] > 0


def test_no_progress_ends_with_93(site: Site) -> None:
    """A rank that always dies in the same step is not replaced for ever."""
    run = Training(site, 2, CONFIG).run("rank 1: SIGKILL at step 5 in forward, always")
    assert run.code == 93
    assert "5 generations in a row ended without one completed step" in run.stderr
    assert len(run.logs[0].pids) == 1
    assert len(run.logs[1].pids) == 1 + 5


def test_recoveries_can_be_bounded(site: Site) -> None:
    """--max-recoveries is how often processes may go on; the next fault ends the job with 1."""
    faults = """
        rank 1: SIGKILL at step 3 in backward
        rank 0: SIGKILL at step 6 in backward
        """
    run = Training(site, 3, CONFIG).run(faults, "--max-recoveries=1")
    assert run.code == 1
    assert "recoveries are used up (--max-recoveries 1)" in run.stderr
    assert [len(log.pids) for log in run.logs] == [1, 2, 1]


def test_the_zygote_takes_the_workers_with_it(site: Site) -> None:
    """Nobody is left to go on: it is a restart of all workers, and without a budget the end."""
    run = Training(site, 2, CONFIG).run("zygote: SIGKILL at step 4 in backward")
    assert run.code == 1
    assert "the zygote" in run.stderr
    assert "restarts are used up (0 of 0)" in run.stderr


def test_a_survivor_that_does_not_come_out_is_replaced(site: Site) -> None:
    """Code of the user that runs for ever is given --pause-timeout; then its process is killed, too."""
    training = Training(site, 3, CONFIG)
    reference = training.run()
    faults = """
        rank 1: loop at step 5 in gate
        rank 0: SIGKILL at step 6 in forward
        """
    run = training.run(faults, "--pause-timeout=1.5")
    training.must_be_equal(run, reference, faults)
    assert "did not leave its step within 1.5 s" in run.stderr


ONLY_DONOR = """
    import os, signal, time
    import torch
    import torch.distributed as dist
    import frun
    import frun.worker.session as of_frun

    rank, copy, entries = int(os.environ["RANK"]), of_frun.agree.copy, []

    def dies(*args):
        if rank == 1 and len(entries) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return copy(*args)

    of_frun.agree.copy = dies

    @frun.resumable
    def train(session):
        entries.append(session.generation)
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        session.restore(model=model, optimizer=optimizer)
        first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        while session.step < 5:
            step = session.step
            model(torch.ones(2, 4)).sum().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            if step == 3 and first_life and rank == 2:
                time.sleep(1.5)  # the pause comes before this update, which others have done
            optimizer.step()
            optimizer.zero_grad()
            print("done", rank, step, flush=True)
            if step == 3 and first_life and rank == 0:
                os._exit(3)
        dist.destroy_process_group()

    train()
    """


def test_the_only_donor_dies_while_a_survivor_that_is_behind_takes_its_state(site: Site) -> None:
    """The result of completed steps is nowhere then: all begin anew, which costs a restart and is said."""
    script = site.script("train.py", ONLY_DONOR)
    done = site.run("--nproc-per-node=3", "--max-restarts=1", script)
    assert done.code == 0, done.err
    assert "no rank has a state: the donor died while it was copied to rank 2" in done.err
    assert "restart 1 of 1" in done.err
    assert done.out.count("done 2 0\n") == 2
