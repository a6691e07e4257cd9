"""REPORTS.md, several agents: members that fail, leave, come late or too many; the order of ranks."""

import random
import signal
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.e2e.cluster import ACT_S, LEASE_S, Job
from tests.e2e.harness import Site, wait_gone
from tests.fakes.etcd_server import EtcdServer, etcd_server

LAST_CALL = "--rdzv-conf=last_call_timeout={}"
ELASTIC = ("--nnodes=1:3", "--replace-timeout=0.5", LAST_CALL.format(20))
"""All three are waited for at the start; a lost one is not."""


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    """One member for all tests here, each of which uses ids of its own."""
    with etcd_server() as server:
        yield server


def listens(port: int) -> bool:
    """Return whether something on this machine accepts connections at a port."""
    return any(
        each.status == psutil.CONN_LISTEN and each.laddr[1:] == (port,)
        for each in psutil.net_connections("tcp")
    )


def test_r62_one_agent_that_gives_up_does_not_close_the_job(site: Site, etcd: EtcdServer) -> None:
    """Its worker failed and no restart is left: the two others go on without it, to a good end."""
    job = Job(site, etcd, job_id="r62", flags=ELASTIC)
    agents = job.starts(3)
    world = job.world(agents, limit_s=ACT_S)
    job.tell(1, 7)
    assert "exit status 7" in world[1].agent.ends(1)
    others = [agent for agent in agents if agent is not world[1].agent]
    job.world(others, after=world)
    job.finish(others)
    job.left_nothing()


def test_r63_r85_restarts_leave_the_rendezvous_open(site: Site, etcd: EtcdServer) -> None:
    """One host's worker is killed three times: three restarts, counted alike on both; the fourth ends it."""
    job = Job(site, etcd, job_id="r63", flags=("--nnodes=2", "--max-restarts=3"))
    agents = job.starts(2)
    world = job.world(agents)
    hosts = job.hosts()
    for count in range(4):
        assert [up.count for up in world] == [count, count]
        assert job.hosts() == hosts
        victim = psutil.Process(world[1].pid)
        victim.kill()
        if count < 3:
            world = job.world(agents, after=world)
    for agent in agents:
        said = agent.ends(1)
        assert "SIGKILL" in said
        assert "3 of 3" in said
    job.left_nothing()


def test_r64_r86_the_first_node_leaves_again_and_again(site: Site, etcd: EtcdServer) -> None:
    """Whoever is first provides MASTER_PORT; no change of membership counts as a restart; one comes back."""
    job = Job(site, etcd, job_id="r64", flags=ELASTIC)
    left = job.starts(3)
    world = job.world(left)
    for _ in range(2):
        assert listens(world[0].master[1])
        assert {up.count for up in world} == {0}
        first = world[0].agent
        first.running.send(signal.SIGTERM)
        assert "stopped by SIGTERM" in first.ends(1)
        left.remove(first)
        world = job.world(left, after=world)
    left.append(job.start())
    world = job.world(left, after=world)
    assert listens(world[0].master[1])
    assert {up.count for up in world} == {0}
    job.finish(left)


def test_r65_ranks_follow_names_in_natural_order(site: Site, etcd: EtcdServer) -> None:
    """Eleven agents in random order of their start: ...2 comes before ...10, as documented."""
    seed = time.time_ns()
    numbers = list(range(1, 12))
    random.Random(seed).shuffle(numbers)
    job = Job(site, etcd, job_id="r65", flags=("--nnodes=11",))
    agents = {number: job.start(f"--local-addr=127.0.0.{number}") for number in numbers}
    world = job.world(list(agents.values()), limit_s=4 * ACT_S)
    assert [up.agent for up in world] == [agents[number] for number in range(1, 12)], seed
    assert {up.master[0] for up in world} == {"127.0.0.1"}
    job.finish(list(agents.values()))


def test_r65_a_given_node_rank_is_honoured_and_a_clash_refused(
    site: Site, etcd: EtcdServer
) -> None:
    """The given order beats the names; a second host of the same rank is told which one has it."""
    job = Job(site, etcd, job_id="r65-given", flags=("--nnodes=3",))
    agents = {
        rank: job.start(f"--node-rank={rank}", f"--local-addr=127.0.0.{9 - rank}")
        for rank in (0, 1)
    }
    job.until(lambda: len(job.hosts()) == 2, ACT_S, "two are registered")
    clash = job.start("--node-rank=1").ends(2)
    assert "--node-rank 1 is already taken by 127.0.0.8" in clash
    assert clash.count("\n") == 1
    agents[2] = job.start("--node-rank=2", "--local-addr=127.0.0.1")
    world = job.world(list(agents.values()))
    assert [up.agent for up in world] == [agents[rank] for rank in range(3)]
    job.finish(list(agents.values()))


@pytest.mark.parametrize("nnodes", ["2", "1:2"])
def test_r71_a_spare_neither_disturbs_nor_is_disturbed(
    site: Site, etcd: EtcdServer, nnodes: str
) -> None:
    """It waits; a fault on the first host leaves it waiting; it takes the place of a lost host."""
    flags = (f"--nnodes={nnodes}", "--max-restarts=1", LAST_CALL.format(20))
    job = Job(site, etcd, job_id=f"r71-{nnodes}", flags=flags)
    pair = job.starts(2)
    world = job.world(pair)
    spare = job.start()
    job.until(lambda: len(job.hosts()) == 3, ACT_S, "the spare is registered")
    psutil.Process(world[0].pid).kill()
    world = job.world(pair, after=world)
    assert spare.workers == []

    lost = world[1].agent
    job.kill([lost])
    assert wait_gone([world[1].pid], 20) == []
    both = [world[0].agent, spare]
    replaced = job.world(both, after=world, limit_s=LEASE_S + ACT_S)
    assert [up.agent for up in replaced] == both
    job.finish(both)
    job.left_nothing()


TRIALS = 10
AT_ONCE = 2


def test_r73_one_that_goes_in_the_middle_holds_nobody_up(site: Site, etcd: EtcdServer) -> None:
    """A third agent is stopped, killed or frozen at a random moment: the two form soon, each time."""
    seed = time.time_ns()
    dice = random.Random(seed)
    last_call_s = 1.0
    flags = ("--nnodes=2:3", LAST_CALL.format(last_call_s), "--replace-timeout=0.5")
    for trial in range(0, TRIALS, AT_ONCE):
        jobs = [Job(site, etcd, job_id=f"r73-{trial}-{n}", flags=flags) for n in range(AT_ONCE)]
        pairs = [job.starts(2) for job in jobs]
        thirds = [job.start() for job in jobs]
        begun = time.monotonic()
        ways = [
            (dice.uniform(0.0, 2.0), dice.choice(["SIGTERM", "SIGKILL", "freeze"])) for _ in jobs
        ]
        context = f"seed {seed}, trial {trial}: {ways}"
        for job, third, (after_s, how) in sorted(
            zip(jobs, thirds, ways, strict=True), key=lambda each: each[2]
        ):
            time.sleep(max(0.0, begun + after_s - time.monotonic()))
            if how == "freeze":
                third.freeze()
            elif how == "SIGKILL":
                job.kill([third])
            else:
                third.running.send(signal.SIGTERM)
        for job, pair in zip(jobs, pairs, strict=True):
            try:
                job.world(pair, limit_s=LEASE_S + last_call_s + ACT_S)
            except AssertionError as error:
                raise AssertionError(context) from error
        for job, pair, third in zip(jobs, pairs, thirds, strict=True):
            job.finish(pair)
            third.running.send(signal.SIGTERM)
            third.thaw()  # it was away from before the world formed until after the job's end
            code = third.running.wait(ACT_S).code
            # -SIGTERM: it came before the program had begun to handle signals.
            assert code in (0, 1, -signal.SIGKILL, -signal.SIGTERM), context
            job.left_nothing()


def test_r17_a_job_that_was_given_only_an_endpoint(site: Site, etcd: EtcdServer) -> None:
    """It meets on that etcd and says so; when one fails for good the other ends in bounded time."""
    job = Job(site, etcd, job_id="r17", flags=("--nnodes=2",))
    job.backend = ()
    pair = [job.start(env={"LOGLEVEL": "INFO"}) for _ in range(2)]
    job.world(pair)
    job.tell(1, 7)
    failed = time.monotonic()
    for agent in pair:
        said = agent.ends(1)
        assert f"meeting on the etcd at {etcd.endpoint}" in said
        assert "exit status 7" in said
        assert "0 of 0" in said
    assert time.monotonic() - failed < ACT_S


def test_r75_one_that_comes_late_is_taken_in(site: Site, etcd: EtcdServer) -> None:
    """The first went on alone after the last call; the second makes the world two, at no restart's cost."""
    job = Job(site, etcd, job_id="r75", flags=("--nnodes=1:2", LAST_CALL.format(0.2)))
    first = job.start()
    alone = job.world([first])
    second = job.start()
    both = job.world([first, second], after=alone)
    assert {up.count for up in both} == {0}
    job.finish([first, second])


def test_r81_dead_members_are_not_counted(site: Site, etcd: EtcdServer) -> None:
    """All three agents of a job are killed; the same job of two forms when the leases have ended."""
    job = Job(site, etcd, job_id="r81", flags=("--nnodes=3",))
    three = job.starts(3)
    job.world(three)
    job.kill(three)
    job.flags = ("--nnodes=2",)
    two = job.starts(2)
    job.world(two, limit_s=LEASE_S + ACT_S)
    assert len(job.hosts()) == 2
    job.finish(two)
