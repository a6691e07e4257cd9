"""The rows of `benchmarks.detection`: how each fault is injected, and what is measured of it.

A row of `IN_A_WORKER` is a small function that hurts one rank of a running job once and returns what it
cost until that was noticed; the job is well again before the next one. Rows that need jobs of another kind
stand in functions of their own below. All times are of one monotonic clock.
"""

import json
import os
import re
import select
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frun import registry
from tests import event_log
from tests.e2e import cluster
from tests.e2e.harness import Site
from tests.e2e.test_detection import Job
from tests.fakes.etcd_server import etcd_server
from tests.hosts.job import FORM_S, TRAIN
from tests.hosts.network import missing, until
from tests.hosts.scenarios import ALONE, HOSTS, LIGHT, spare_is_registered, stage

PATIENCE_S = 60.0
EVERY = 10
"""Steps from one comparison of replicas to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One fault of the table."""

    title: str
    bound: float
    unit: str = "s"
    """Seconds, or steps of the job."""


def noticed(job: Job, before: int, name: str = "fault_noticed") -> dict[str, Any]:
    """Wait for the next event of a name, when there were so many; return it."""
    deadline = time.monotonic() + PATIENCE_S
    while len(found := job.events(name)) <= before:
        assert time.monotonic() < deadline, f"no {name}\n{job.running.err[-3000:]}"
        threading.Event().wait(0.02)
    return found[before]


def does(job: Job, rank: int, what: str) -> tuple[float, dict[str, Any]]:
    """Let a rank hurt itself; return when it did, and what was noticed."""
    before = len(job.events("fault_noticed"))
    job.do(rank, what)
    word = what.partition(" ")[0]
    began = re.findall(rf"does {word} \d \d+ ([\d.]+)", job.running.out)[-1]
    return float(began), noticed(job, before)


def itself(what: str) -> Callable[[Site, Job, int], float]:
    """Return what lets a rank hurt itself so, and sees its replacement."""

    def inject(site: Site, job: Job, rank: int) -> float:
        began, event = does(job, rank, what)
        job.recovers()
        return float(event["monotonic_s"]) - began

    return inject


def killed(site: Site, job: Job, rank: int) -> float:
    """Kill a worker from outside; return the time from its end to what its agent says of it.

    The kernel takes 10 to 20 ms to end a process that has loaded torch, which is nobody's to notice yet.
    """
    pid = int(re.findall(rf"entered {rank} (\d+)", job.running.out)[-1])
    before = len(job.events("worker_exited"))
    process = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        assert select.select([process], [], [], PATIENCE_S)[0], "it does not end"
    finally:
        os.close(process)
    ended = time.monotonic()
    event = noticed(job, before, "worker_exited")
    assert event["rank"] == rank
    job.recovers()
    return max(0.0, float(event["monotonic_s"]) - ended)


def reported(site: Site, job: Job, rank: int) -> float:
    """Report a loss that is no number; return how many steps later that was known."""
    _, event = does(job, rank, "nan")
    assert (event["source"], event["rank"]) == ("numbers", rank)
    return float(_step(event) - int(re.findall(r"nan at (\d+)", job.running.out)[-1]))


def flipped(site: Site, job: Job, rank: int) -> float:
    """Flip a bit of a replica; return how many steps later that was known. Its process is replaced then."""
    before = len(job.events("fault_noticed"))
    drill = site.start("inject-fault", "bitflip", f"--rank={rank}", "--yes")
    event = noticed(job, before)
    assert (event["source"], event["rank"]) == ("replicas", rank), event
    done = drill.wait(PATIENCE_S)
    (step,) = re.findall(r"which was at step (\d+)", done.out + done.err)
    killed(site, job, rank)
    # All look one step after the one that was compared.
    return float(_step(event) + 1 - int(step))


def unfit(site: Site, job: Job, rank: int) -> float:
    """Let a check report a fault of a worker's device; the worker is replaced."""
    began, event = drilled(site, job, "device", f"--rank={rank}")
    assert (event["source"], event["rank"]) == ("device", rank), event
    job.recovers()
    return float(event["monotonic_s"]) - began


def drilled(site: Site, job: Job, *drill: str) -> tuple[float, dict[str, Any]]:
    """Inject a fault; return when its host did it, and what was noticed."""
    before, injected = len(job.events("fault_noticed")), len(job.events("fault_injected"))
    command = site.start("inject-fault", *drill, "--yes")
    event = noticed(job, before)
    began = noticed(job, injected, "fault_injected")
    command.wait(2 * PATIENCE_S)
    return float(began["monotonic_s"]), event


def _step(event: dict[str, Any]) -> int:
    (step,) = re.findall(r"step (\d+)", event["reason"])
    return int(step)


IN_A_WORKER: dict[Row, Callable[[Site, Job, int], float]] = {
    Row(title="worker ended by SIGKILL", bound=0.02): killed,
    Row(title="worker stopped by a signal", bound=2.0): itself("stop"),
    Row(title="worker holds Python's lock and waits", bound=2.0): itself("hold 60"),
    Row(title="one rank loops, others wait", bound=3.0): itself("loop"),
    Row(title="one rank sleeps, others wait", bound=3.0): itself("sleep 60"),
    Row(title="loss that is no number", bound=0.0, unit="steps"): reported,
    Row(title="a check reports a fault of a device", bound=1.5): unfit,
    Row(title=f"replica differs, compared every {EVERY}", bound=EVERY + 1.0, unit="steps"): flipped,
}
STRAGGLER = Row(title="one rank takes 50 ms longer per step", bound=17.0)
ALL_WAIT = Row(title="all ranks wait in a collective", bound=11.0)
AGENT = Row(title="agent killed, its host up", bound=0.5)
HOST_2 = Row(title="host off, lease of 2 s", bound=2.5)
HOST_3 = Row(title="host off, lease of 3 s", bound=3.5)
Found = Iterator[tuple[Row, float]]


@contextmanager
def site() -> Iterator[Site]:
    """Make a corner of the machine."""
    with tempfile.TemporaryDirectory() as folder, Site(Path(folder)) as made:
        yield made


def in_a_worker(count: int, rows: Callable[[Row], bool]) -> Found:
    """Hurt one rank after another in one job of three ranks with steps of 10 ms."""
    if not any(map(rows, IN_A_WORKER)):
        return
    with site() as here:
        job = Job(here, "--allow-drills", f"--compare-replicas={EVERY}", "--max-restarts=1000")
        for row, inject in IN_A_WORKER.items():
            for number in range(count if rows(row) else 0):
                value = inject(here, job, number % 3)
                job.steps(25)
                yield row, value
        job.end()


def all_wait(count: int, rows: Callable[[Row], bool]) -> Found:
    """Let one rank enter a collective that no other enters, again and again."""
    if not rows(ALL_WAIT):
        return
    with site() as here:
        job = Job(here)
        for number in range(count):
            began, event = does(job, number % 3, "barrier")
            assert (event["source"], event["rank"]) == ("hang", -1), event
            job.recovers()
            job.steps(25)
            yield ALL_WAIT, float(event["monotonic_s"]) - began
        assert len(job.events("worker_started")) == 3, "a process was replaced"
        job.end()


def straggles(count: int, rows: Callable[[Row], bool]) -> Found:
    """Make one rank slower than its peers, for long enough to be told of, again and again."""
    if not rows(STRAGGLER):
        return
    with site() as here:
        job = Job(here, "--allow-drills")
        for number in range(count):
            rank = number % 3
            began, event = drilled(here, job, "slow:0.05", f"--rank={rank}", "--duration=16")
            assert (event["source"], event["rank"]) == ("straggler", rank), event
            yield STRAGGLER, float(event["monotonic_s"]) - began
            # Two of three that are slow are no stragglers.
            until(
                lambda: max(_scores(here)) < 1.3, within_s=PATIENCE_S, what="all are as fast again"
            )
        job.end()


def _scores(here: Site) -> list[float]:
    (host,) = json.loads(here.run("status", "--json").out)["hosts"]
    return [worker["score"] or 1.0 for worker in host["workers"]]


def agents(count: int, rows: Callable[[Row], bool]) -> Found:
    """Kill agents of a job of two that has spares, the one that leads or the other."""
    if not rows(AGENT):
        return
    with site() as here, etcd_server() as etcd:
        flags = ("--nnodes=2", "--max-restarts=0", f"--log-dir={here.cwd / 'logs'}")
        job = cluster.Job(here, etcd, job_id="agents", flags=flags)
        live = job.starts(2)
        world = job.world(live)
        for number in range(count):
            live.append(job.start())
            job.until(lambda: len(job.hosts()) == 3, PATIENCE_S, "a spare")
            victim = world[number % 2].agent
            before = len(_events(here.cwd / "logs", "fault_noticed"))
            began = time.monotonic()
            job.kill([victim])
            live.remove(victim)
            world = job.world(live, after=[up for up in world if up.agent is victim])
            events = _events(here.cwd / "logs", "fault_noticed")[before:]
            assert events, "known by the lease only"
            assert events[0]["source"] == "peer"
            yield AGENT, float(events[0]["monotonic_s"]) - began
        job.finish(live)
    registry.live_jobs(str(here.state / "frun"))  # reading it removes the files of the dead


def hosts(count: int, rows: Callable[[Row], bool]) -> Found:
    """Switch off a host of three, unheard by its peers, while a fourth waits as a spare."""
    wanted = {HOST_2: 2, HOST_3: 3}
    if missing() or not any(map(rows, wanted)):
        return
    with stage() as ready:
        for row, lease_s in wanted.items():
            flags = ("--nnodes=3", "--replace-timeout=60", *LIGHT)
            lease = f"--rdzv-conf=keep_alive_interval={lease_s},keep_alive_max_attempt=1"
            job = ready.job(*flags, lease, script=ALONE)
            job.train = TRAIN
            with job:
                for name in HOSTS[:4]:
                    job.start(ready.network[name])
                generation, killed = 0, []
                for number in range(count if rows(row) else 0):
                    world = job.world(after=generation, size=3, within_s=FORM_S)
                    spare_is_registered(ready, job, 4)
                    lost = ready.network[world.hosts[number % 3]]
                    killed.append(job.agent(lost.name))
                    began = time.monotonic()
                    lost.kill()
                    yield row, job.noticed_after(began, world.generation)
                    generation = world.generation
                    lost.mend()
                    job.start(lost)
                job.world(after=generation, size=3, within_s=FORM_S)
                spare_is_registered(ready, job, 4)
                for rank in range(3):
                    (job.folder / f"end-{rank}").touch()
                job.all_end(without=tuple(killed))


def _events(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the events of a name of all agents, in the order in which they happened."""
    return sorted(event_log.events(folder, name), key=lambda event: float(event["monotonic_s"]))


JOBS = (in_a_worker, straggles, agents, hosts)
"""One after the other: on two cores a second job makes stragglers of all ranks."""
BESIDE = (all_wait,)
"""While the others run: its ranks wait nearly all the time."""
ALL = (*IN_A_WORKER, STRAGGLER, ALL_WAIT, AGENT, HOST_2, HOST_3)
