"""REPORTS.md, several agents: signals while they meet, and how agents end."""

import signal
import socket
import time
from collections.abc import Iterator

import pytest

from tests.e2e.cluster import ACT_S, Job
from tests.e2e.harness import Site
from tests.fakes.etcd_server import EtcdServer, etcd_server

SOON_S = 20.0
"""Bound for what should take less than two seconds, on a busy machine."""
SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    """One member for all tests here, each of which uses ids of its own."""
    with etcd_server() as server:
        yield server


def stop(job: Job, signum: int) -> None:
    """Send a signal to the latest agent; it ends soon, with one line that names it."""
    agent = job.agents[-1]
    sent = time.monotonic()
    agent.running.send(signum)
    said = agent.ends(1)
    assert time.monotonic() - sent < SOON_S
    assert signal.Signals(signum).name in said.splitlines()[-1]


@pytest.mark.parametrize("signum", SIGNALS)
def test_r27_a_signal_while_waiting_for_others(site: Site, etcd: EtcdServer, signum: int) -> None:
    """The membership key is gone when the agent is, and a new pair of the same id forms at once."""
    job = Job(site, etcd, job_id=f"r27-{signum}", flags=("--nnodes=2",))
    job.start()
    job.until(lambda: len(job.hosts()) == 1, ACT_S, "it is registered")
    stop(job, signum)
    assert job.hosts() == []
    pair = job.starts(2)
    job.world(pair)
    job.finish(pair)
    job.left_nothing()


@pytest.mark.parametrize("signum", SIGNALS)
def test_r27_a_signal_while_etcd_is_silent(site: Site, etcd: EtcdServer, signum: int) -> None:
    """Nothing listens, or what listens never answers: the end comes as soon."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for at in ("127.0.0.1:9", f"127.0.0.1:{silent.getsockname()[1]}"):
            job = Job(site, etcd, job_id="r27-silent", flags=("--nnodes=2",))
            agent = job.start(at=at, env={"LOGLEVEL": "INFO"})
            agent.running.expect("zygote was ready", stream="err")
            stop(job, signum)


def test_r27_a_signal_when_etcd_froze_meanwhile(site: Site) -> None:
    """The agent was registered; it does not wait for an answer that doesn't come."""
    with etcd_server() as etcd:
        job = Job(site, etcd, job_id="r27-frozen", flags=("--nnodes=2",))
        job.start()
        job.until(lambda: len(job.hosts()) == 1, ACT_S, "it is registered")
        etcd.signal(signal.SIGSTOP)
        try:
            stop(job, signal.SIGINT)
        finally:
            etcd.signal(signal.SIGCONT)


@pytest.mark.parametrize(("status", "code"), [(0, 0), (7, 1)])
def test_r74_a_spare_that_was_not_needed(
    site: Site, etcd: EtcdServer, status: int, code: int
) -> None:
    """It ends as the job does: with 0 and a line that says so, or with the failure that ended the job."""
    job = Job(site, etcd, job_id=f"r74-{status}", flags=("--nnodes=1",))
    first = job.start()
    job.world([first])
    spare = job.start()
    job.until(lambda: len(job.hosts()) == 2, ACT_S, "the spare is registered")
    job.tell(0, status)
    first.ends(code)
    said = spare.ends(code)
    assert ("not needed" if code == 0 else "exit status 7") in said
    assert spare.workers == []
    job.left_nothing()


TIMES = 10


def test_r78_three_agents_that_end_at_the_same_moment(site: Site, etcd: EtcdServer) -> None:
    """Ten times: each ends with 0, says nothing after the start of the world, and etcd is clean."""
    for number in range(TIMES):
        job = Job(site, etcd, job_id=f"r78-{number}", flags=("--nnodes=3",))
        agents = job.starts(3)
        job.world(agents)
        for said in job.finish(agents):
            assert said.splitlines()[-1] == "frun: generation 1 runs: 3 hosts, 3 ranks", number
        job.left_nothing()
