"""Faults that end no process by themselves: how fast they are seen, and that noise is no fault."""

import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

from tests import event_log
from tests.e2e.harness import Running, Site

MODULE = ("-m", "tests.e2e.faulty_train")
FOR_EVER = "1000000"


class Job:
    """A training of three ranks that does what it is told."""

    def __init__(self, site: Site, *options: str) -> None:
        self.folder = site.cwd
        self.recovered = 0
        logs = site.cwd / "logs"
        self.running: Running = site.start(
            "--nproc-per-node=3", f"--log-dir={logs}", *options, *MODULE, str(self.folder), FOR_EVER
        )
        self.running.expect(r"entered \d", 3)
        self.logs = logs
        self.steps(20)

    def steps(self, count: int) -> None:
        """Wait until rank 0 has done so many more steps."""
        (self.folder / "tmp").write_text(f"count {count}", encoding="ascii")
        seen = len(re.findall(r"counted", self.running.out))
        os.replace(self.folder / "tmp", self.folder / "do.0")
        self.running.expect(r"counted", seen + 1)

    def do(self, rank: int, what: str) -> None:
        """Let a rank do something in its next step."""
        said = rf"does {what.partition(' ')[0]}"
        seen = len(re.findall(said, self.running.out))
        (self.folder / "tmp").write_text(what, encoding="ascii")
        os.replace(self.folder / "tmp", self.folder / f"do.{rank}")
        self.running.expect(said, seen + 1)

    def recovers(self) -> None:
        """Wait for one more recovery that loses no step."""
        self.recovered += 1
        self.running.expect(r"at step \d+, 0 steps lost", self.recovered, stream="err")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of a name so far."""
        return event_log.events(self.logs, name)

    def end(self) -> None:
        """Stop it."""
        self.running.send(signal.SIGTERM)
        self.running.wait()


def test_a_frozen_worker_is_replaced_and_noise_is_none(site: Site) -> None:
    """Stopped, or with Python's lock held in C: known after two seconds, and nothing else is taken for it."""
    job = Job(site)
    # An agent that stands still itself, for less than its lease.
    job.running.send(signal.SIGSTOP)
    threading.Event().wait(2.5)
    job.running.send(signal.SIGCONT)
    job.steps(20)
    job.do(1, "collect 4")
    job.do(2, "sleep 1")
    job.steps(20)
    assert job.events("fault_noticed") == []
    for rank, how in ((1, "stop"), (2, "hold 60")):
        job.do(rank, how)
        job.recovers()
    job.end()
    stopped, held = job.events("fault_noticed")
    assert (stopped["source"], stopped["rank"], held["source"], held["rank"]) == (
        "beat", 1, "beat", 2,
    )  # fmt: skip
    assert stopped["reason"].endswith("stopped by a signal")
    for fault, incident in zip((stopped, held), job.events("incident_closed"), strict=True):
        assert fault["since_s"] >= 2.0
        assert fault["since_s"] <= incident["detect_s"]
        assert (incident["kind"], incident["action"]) == ("process", "replace-worker")
        assert "no beat for " in incident["cause"]


def test_a_rank_that_others_wait_for_is_replaced(site: Site) -> None:
    """In a loop or asleep in the script; not while it has declared to take long, or evaluates."""
    job = Job(site)
    for how in ("declare 3", "evaluate 3"):
        job.do(1, how)
        job.steps(25)
    assert job.events("fault_noticed") == []
    (declared,) = job.events("worker_phase_ended")
    assert (declared["rank"], declared["phase"]) == (1, "eval")
    assert declared["took_s"] >= 3.0
    for rank, how in ((1, "loop"), (0, "sleep 60")):
        job.do(rank, how)
        job.recovers()
        job.steps(10)
    job.end()
    faults, incidents = job.events("fault_noticed"), job.events("incident_closed")
    assert [(fault["source"], fault["rank"]) for fault in faults] == [("hang", 1), ("hang", 0)]
    for fault, incident in zip(faults, incidents, strict=True):
        assert fault["since_s"] >= 2.0
        assert (incident["kind"], incident["action"]) == ("hang", "replace-worker")
        assert re.search(
            r"stands still in the script of step \d+, at faulty_train.py:", fault["reason"]
        )
    assert [event["exit_code"] for event in job.events("worker_exited")[:2]] == [
        -signal.SIGKILL
    ] * 2
    written = Path(job.events("stacks_written")[0]["path"]).read_text(encoding="utf-8")
    culprit, others = written.split("===")[1:3]
    assert culprit.startswith(" rank 1\n")
    assert "in loop" in culprit
    assert others.startswith(" 2 ranks: 0, 2\n")
    assert "backward" in others


def test_when_all_wait_for_each_other_all_try_again(site: Site) -> None:
    """Nobody is at fault, so every process lives on; --hang-timeout is where the bound comes from."""
    job = Job(site, "--hang-timeout=0.6")
    job.do(0, "barrier")
    job.recovers()
    job.steps(10)
    job.end()
    (fault,), (incident,) = job.events("fault_noticed"), job.events("incident_closed")
    assert (fault["source"], fault["rank"]) == ("hang", -1)
    assert (incident["kind"], incident["action"], incident["ranks"]) == ("link", "retry", [])
    assert len(job.events("worker_started")) == 3
