"""What can befall a job of four hosts with a spare, and what must come of it: for tests and `repeat`."""

import contextlib
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.hosts.etcd import EtcdCluster
from tests.hosts.job import FORM_S, NOTICE_S, RESTART_S, Job, World
from tests.hosts.network import Network, sweep

MEMBERS = ("e1", "e2", "e3")
HOSTS = ("h1", "h2", "h3", "h4", "h5", "h6")


@dataclass(slots=True, kw_only=True)
class Stage:
    """Hosts, etcd, and a folder that all of them share."""

    network: Network
    etcd: EtcdCluster
    folder: Path
    numbers: Iterator[int]

    def job(self, *flags: str, script: tuple[str, ...] = ()) -> Job:
        """Return a job that meets at the etcd; use it as a context manager."""
        number = next(self.numbers)
        ours = (f"--rdzv-endpoint={self.etcd.endpoints}", f"--job-id=job{number}")
        return Job(folder=self.folder / f"job{number}", flags=(*ours, *flags), script=script)

    def repair(self) -> None:
        """Mend all links, end what tests left on the hosts, and bring every member of etcd back."""
        for host in self.network.hosts.values():
            host.mend()
            host.thaw()
        for name in HOSTS:
            self.network[name].kill(silently=False)
        for number, host in enumerate(self.etcd.hosts):
            if not host.pids():
                self.etcd.start(number)
            self.etcd.wait_healthy(number)

    def leader(self, job: Job) -> str:
        """Return the host whose agent leads."""
        name = self.etcd.get(f"/frun/{job.job_id}/leader")
        assert name is not None
        return name.rpartition("-")[0]


@contextlib.contextmanager
def stage() -> Iterator[Stage]:
    """Make the hosts and the etcd; remove both whatever happens, and fail if anything was left."""
    sweep()
    folder = Path(tempfile.mkdtemp(prefix=f"frunt{os.getpid()}-"))
    try:
        with (
            Network((*MEMBERS, *HOSTS)) as network,
            EtcdCluster([network[name] for name in MEMBERS], folder) as etcd,
        ):
            yield Stage(network=network, etcd=etcd, folder=folder, numbers=itertools.count(1))
            # A job's last word stays under a lease for hosts that come back late; nothing else does.
            left = [key for key in etcd.keys("/frun/") if not key.endswith("/ranktable")]
            assert not left, f"the jobs left keys in etcd: {left}"
    finally:
        shutil.rmtree(folder)


ALONE = ("--alone",)
LIGHT = ("--start-method=spawn",)
"""Without torch in the zygote: for scripts that don't need it."""
FOUR = ("--nnodes=4", "--nproc-per-node=1", "--max-restarts=3", "--replace-timeout=60")


@contextlib.contextmanager
def four_and_a_spare(stage: Stage) -> Iterator[tuple[Job, World]]:
    """Train on h1 to h4 while h5 waits."""
    with stage.job(*FOUR) as job:
        for name in HOSTS[:4]:
            job.start(stage.network[name])
        world = job.world(size=4, within_s=FORM_S)
        assert sorted(world.hosts.values()) == list(HOSTS[:4])
        job.start(stage.network["h5"])
        spare_is_registered(stage, job)
        job.advances(world)
        yield job, world


def spare_is_registered(stage: Stage, job: Job, hosts: int = 5) -> None:
    """Wait until so many hosts are registered."""
    job.wait_for(
        lambda: len(stage.etcd.keys(f"/frun/{job.job_id}/hosts/")) == hosts,
        FORM_S,
        f"{hosts} hosts are registered",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """How a fault was mended."""

    noticed_s: float
    """From the fault to the first agent that saw the next generation."""
    trained_s: float
    """From the fault to the first step of the last rank."""
    world: World


def replaced(job: Job, before: World, lost: str, by: str, fault_at: float) -> Recovery:
    """Assert that a lost host's ranks went to `by`, in time, and nothing else moved."""
    noticed_s = job.noticed_after(fault_at, before.generation)
    assert noticed_s <= NOTICE_S, f"noticed after {noticed_s:.1f} s\n{job.story()}"
    world = job.world(after=before.generation, size=len(before.ranks), within_s=RESTART_S)
    assert world.hosts == {r: by if h == lost else h for r, h in before.hosts.items()}
    assert world.restarts == before.restarts, "the loss of a host is no failure of a worker"
    alive = {agent.host.address for agent in job.agents if agent.host.name in world.hosts.values()}
    assert world.master in alive, f"MASTER_ADDR {world.master} is no member"
    assert world.master == job.agent(world.hosts[0]).host.address
    last = max(
        n.step for n in job.news if n.generation == before.generation and n.host == before.hosts[0]
    )
    assert world.first_step >= last - 1, "steps with a checkpoint were lost"
    return Recovery(noticed_s=noticed_s, trained_s=world.at - fault_at, world=world)


def a_host_dies(stage: Stage, job: Job, world: World) -> Recovery:
    """Every process of a host is killed; the others, whose connections break, are not blamed."""
    leader = stage.leader(job)
    lost = next(h for h in reversed(world.hosts.values()) if h not in (leader, world.hosts[0]))
    fault_at = time.monotonic()
    job.agent(lost).host.kill(silently=False)
    return replaced(job, world, lost, spare_of(job, world), fault_at)


def the_leader_dies(stage: Stage, job: Job, world: World) -> Recovery:
    """The leader's host loses its power: another leads, and the spare takes the ranks."""
    lost = stage.leader(job)
    fault_at = time.monotonic()
    job.agent(lost).host.kill()
    recovery = replaced(job, world, lost, spare_of(job, world), fault_at)
    assert stage.leader(job) != lost
    return recovery


def a_host_is_cut_off(stage: Stage, job: Job, world: World) -> Recovery:
    """A host loses its network: the spare takes its ranks; when it is back it waits as a spare."""
    lost = next(h for h in world.hosts.values() if h != stage.leader(job))
    agent = job.agent(lost)
    fault_at = time.monotonic()
    agent.host.unplug()
    recovery = replaced(job, world, lost, spare_of(job, world), fault_at)
    agent.host.mend()
    becomes_a_spare(job, recovery.world, lost)
    return recovery


def an_etcd_member_dies(stage: Stage, job: Job, world: World) -> Recovery:
    """One of three members is killed, the leading one: training goes on, and so does what frun does."""
    leader, _ = stage.etcd.members_by_role()
    fault_at = time.monotonic()
    stage.etcd.kill(leader)
    job.advances(world, steps=20)
    trained_s = time.monotonic() - fault_at
    fail_rank(job, world, 1)
    after = job.world(after=world.generation, size=len(world.ranks), within_s=RESTART_S)
    assert after.hosts == world.hosts
    assert after.restarts == world.restarts + 1
    stage.etcd.start(leader)
    stage.etcd.wait_healthy(leader)
    return Recovery(noticed_s=0.0, trained_s=trained_s, world=after)


def spare_of(job: Job, world: World) -> str:
    """Return the host that runs an agent and has no rank."""
    names = {a.host.name for a in job.agents if a.process.poll() is None}
    (spare,) = names - set(world.hosts.values())
    return spare


def becomes_a_spare(job: Job, world: World, name: str) -> None:
    """Assert that a host that was replaced meanwhile stops its workers, and that nobody is disturbed."""
    agent = job.agent(name)
    old = {n.pid for n in job.news if n.host == name}
    job.wait_for(
        lambda: not old & set(agent.host.pids()), NOTICE_S + 5, f"the old workers of {name} stop"
    )
    job.advances(world)
    assert agent.process.poll() is None, agent.said


def fail_rank(job: Job, world: World, rank: int) -> None:
    """Let the worker of a rank end with 7."""
    assert rank in world.ranks
    (job.folder / f"fail-{rank}").touch()


Scenario = Callable[[Stage, Job, World], Recovery]
FOUR_SCENARIOS: dict[str, Scenario] = {
    "a host dies": a_host_dies,
    "the leader's host dies": the_leader_dies,
    "one etcd member of three dies": an_etcd_member_dies,
    "a host's network is cut": a_host_is_cut_off,
}


def run_alone(stage: Stage, scenario: Scenario) -> Recovery:
    """Run one scenario on a job of its own, to the end of the training, which must be good."""
    with four_and_a_spare(stage) as (job, world):
        recovery = scenario(stage, job, world)
        killed = tuple(a for a in job.agents if a.process.poll() is not None)
        job.advances(recovery.world)
        job.finish(without=killed)
    return recovery
