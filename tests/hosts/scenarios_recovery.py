"""What can befall a resumable job of three hosts, and what must come of it: for tests and `repeat`.

Survivors keep their processes, no completed step is done again, and every bit is as in a run that nothing
befell.
"""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from frun import journals
from frun.account.summary import account
from frun.account.timeline import Bucket
from tests.hosts.job import FORM_S, NOTICE_S, ROOT, Job, World
from tests.hosts.scenarios import (
    HOSTS,
    Recovery,
    Stage,
    becomes_a_spare,
    spare_is_registered,
    spare_of,
)

RESUMABLE = Path(__file__).with_name("resumable_train.py")
THREE = ("--nnodes=3", "--nproc-per-node=1", "--replace-timeout=60")
AGAIN_S = 20.0
"""From the notice to a completed step of all ranks, on a busy machine with few cores."""


@contextlib.contextmanager
def training(
    stage: Stage, *flags: str, hosts: int = 3, spares: int = 0, ranks: int = 3
) -> Iterator[tuple[Job, World]]:
    """Train on the first hosts while the next ones wait as spares."""
    job = stage.job(*flags)
    job.train = RESUMABLE
    with job:
        for name in HOSTS[:hosts]:
            job.start(stage.network[name])
        world = job.world(size=ranks, within_s=FORM_S)
        for name in HOSTS[hosts : hosts + spares]:
            job.start(stage.network[name])
        spare_is_registered(stage, job, hosts + spares)
        job.advances(world)
        yield job, world


def accounted(job: Job, *kinds: str) -> None:
    """Assert that the logs of all hosts, put together, account for all time and for these incidents."""
    folders = [str(agent.folder / "logs") for agent in job.agents]
    made = account(journals.latest_run(journals.in_folders(folders, None)))
    assert sum(made.buckets.values()) == made.wall_us
    assert made.missing == ()
    assert len(made.journals) == len(job.agents)
    faults = [fault for fault in made.faults if fault.record["closed"]]
    assert [fault.record["kind"] for fault in faults] == list(kinds), job.story()
    for fault in faults:
        assert fault.spent_us[Bucket.DETECTION] > 0
        assert fault.total_us > fault.spent_us[Bucket.DETECTION]
    assert made.steps_lost == 0
    assert made.buckets[Bucket.PRODUCTIVE] > 0
    assert made.story.final is not None


def went_on(job: Job, before: World, after: World, lost: set[int] | None = None) -> None:
    """Assert that all but the `lost` ranks kept their processes, and all went on at the same step."""
    kept = before.ranks.keys() - (lost or set())
    for rank in kept & after.ranks.keys():
        pids = before.pids[rank], after.pids[rank]
        assert pids[0] == pids[1], f"rank {rank} changed its process\n{job.story()}"
    reached = max(n.step for n in job.news if n.generation < after.generation and n.rank in kept)
    begun = {rank: news.step for rank, news in after.ranks.items()}
    assert set(begun.values()) == {reached + 1}, f"{begun} after {reached}\n{job.story()}"


def told_once(job: Job) -> None:
    """Assert that no process made a step twice, and that all ranks had the same state after each."""
    made: dict[int, list[int]] = {}
    states: dict[int, str] = {}
    for news in job.news:
        made.setdefault(news.pid, []).append(news.step)
        assert states.setdefault(news.step, news.digest) == news.digest, f"state after {news}"
    for pid, steps in made.items():
        assert steps == sorted(set(steps)), f"steps of pid {pid}: {steps}"


def exact(job: Job, size: int) -> None:
    """Assert that after each step all ranks had, to the bit, the state of an undisturbed run."""
    told_once(job)
    last = max(news.step for news in job.news)
    right = undisturbed(size, -(-last // 500) * 500)
    wrong = [news for news in job.news if right[news.step] != news.digest]
    assert not wrong, f"first wrong: {wrong[0]}\n{job.story()}"


@functools.cache
def undisturbed(size: int, steps: int) -> dict[int, str]:
    """Return the digest of each step when torchrun trains so many ranks on one host."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "digests"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={size}", str(RESUMABLE), str(file), str(steps)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        limit_s = 200 + 0.2 * steps
        done = subprocess.run(command, env=environment, capture_output=True, timeout=limit_s)
        assert done.returncode == 0, done.stderr.decode()[-5000:]
        return {int(step): digest for step, digest in json.loads(file.read_text()).items()}


def ranks_on(world: World, *hosts: str) -> set[int]:
    """Return the ranks of these hosts."""
    return {rank for rank, host in world.hosts.items() if host in hosts}


def incident(job: Job, generation: int) -> dict[str, Any]:
    """Return the account of the fault that made this generation, from the leader's event log."""
    found: list[dict[str, Any]] = []

    def closed() -> bool:
        found[:] = [
            event
            for agent in job.agents
            for event in agent.events()
            if event["event"] == "incident_closed" and event["id"] == generation
        ]
        return bool(found)

    job.wait_for(closed, 10, f"the incident of generation {generation} is closed")
    assert found[0]["steps_lost"] == 0, found[0]
    return found[0]


def taken_over(
    job: Job, before: World, lost: str, by: str, fault_at: float, again_within_s: float = AGAIN_S
) -> Recovery:
    """Assert that a lost host's ranks went to `by`, in time and in the same step."""
    noticed_s = job.noticed_after(fault_at, before.generation)
    world = job.world(after=before.generation, size=len(before.ranks), within_s=FORM_S)
    assert world.hosts == {r: by if h == lost else h for r, h in before.hosts.items()}, job.story()
    assert world.restarts == before.restarts
    went_on(job, before, world, ranks_on(before, lost))
    account = incident(job, world.generation)
    assert account["resumed_at_step"] == world.first_step - 1, account
    assert account["kind"] == "host"
    recovery = Recovery(noticed_s=noticed_s, trained_s=world.at - fault_at, world=world)
    assert noticed_s <= NOTICE_S, f"noticed after {noticed_s:.1f} s: {account}\n{job.story()}"
    again_s = recovery.trained_s - noticed_s
    assert again_s <= again_within_s, (
        f"trained {again_s:.1f} s after the notice: {account}\n{job.story()}"
    )
    return recovery


def not_leading(stage: Stage, job: Job, world: World) -> str:
    """Return a host with ranks that neither leads nor holds rank 0."""
    leader = stage.leader(job)
    return next(h for h in reversed(world.hosts.values()) if h not in (leader, world.hosts[0]))


def a_host_with_a_spare(stage: Stage, job: Job, world: World) -> Recovery:
    """Every process of a host is killed; the others' connections break, and they wait for the news."""
    lost = not_leading(stage, job, world)
    fault_at = time.monotonic()
    job.agent(lost).host.kill(silently=False)
    return taken_over(job, world, lost, spare_of(job, world), fault_at)


def the_leaders_host(stage: Stage, job: Job, world: World) -> Recovery:
    """The leader's host loses its power, unheard by its peers."""
    lost = stage.leader(job)
    fault_at = time.monotonic()
    job.agent(lost).host.kill()
    recovery = taken_over(job, world, lost, spare_of(job, world), fault_at)
    assert stage.leader(job) != lost
    return recovery


def a_host_without_a_spare(stage: Stage, job: Job, world: World) -> Recovery:
    """Survivors wait, paused, in their processes, until a host comes that takes the lost one's ranks."""
    lost = not_leading(stage, job, world)
    free = next(h for h in HOSTS if all(h != agent.host.name for agent in job.agents))
    fault_at = time.monotonic()
    job.agent(lost).host.kill()
    noticed_s = job.noticed_after(fault_at, world.generation)
    waits_paused(job, world, {lost})
    joined_at = time.monotonic()
    job.start(stage.network[free])
    after = taken_over(job, world, lost, free, fault_at, again_within_s=FORM_S).world
    return Recovery(noticed_s=noticed_s, trained_s=after.at - joined_at, world=after)


def waits_paused(job: Job, world: World, lost: set[str], seconds: float = 1.5) -> None:
    """Assert that the survivors live and do nothing for a while."""
    told = len(job.news)
    until = time.monotonic() + seconds
    job.wait_for(lambda: time.monotonic() > until, seconds + 1, "some time goes by")
    assert len(job.news) == told, "a rank trained in an incomplete world"
    for rank, host in world.hosts.items():
        if host not in lost:
            assert world.pids[rank] in job.agent(host).host.pids(), f"rank {rank} is gone"


def a_freeze(stage: Stage, job: Job, world: World) -> Recovery:
    """A host stands still until it is replaced, then wakes up: it ends its workers and is a spare."""
    lost = not_leading(stage, job, world)
    host = job.agent(lost).host
    fault_at = time.monotonic()
    host.freeze()
    recovery = taken_over(job, world, lost, spare_of(job, world), fault_at)
    host.thaw()
    stands_aside(job, world, recovery.world, lost)
    return recovery


def a_cut(stage: Stage, job: Job, world: World) -> Recovery:
    """The same for a host whose packets are lost."""
    lost = not_leading(stage, job, world)
    host = job.agent(lost).host
    fault_at = time.monotonic()
    host.cut()
    recovery = taken_over(job, world, lost, spare_of(job, world), fault_at)
    host.mend()
    stands_aside(job, world, recovery.world, lost)
    return recovery


def stands_aside(job: Job, before: World, world: World, name: str) -> None:
    """Assert that a host that was away became a spare, and what it did in the old world came to nothing."""
    becomes_a_spare(job, world, name)
    pid = before.pids[before.rank_of(name)]
    assert all(news.generation <= before.generation for news in job.news if news.pid == pid)


def the_agent(stage: Stage, job: Job, world: World) -> Recovery:
    """An agent is killed: its workers go with it, and the spare takes their ranks."""
    lost = not_leading(stage, job, world)
    host = job.agent(lost).host
    fault_at = time.monotonic()
    os.kill(job.agent(lost).process.pid, signal.SIGKILL)
    job.wait_for(lambda: not host.pids(), 2, f"{lost} has no process left")
    return taken_over(job, world, lost, spare_of(job, world), fault_at)


def a_worker(job: Job, world: World, rank: int) -> Recovery:
    """A worker is killed: another one is started in its place."""
    fault_at = time.monotonic()
    os.kill(world.pids[rank], signal.SIGKILL)
    return restarted(job, world, rank, fault_at, AGAIN_S)


def restarted(job: Job, world: World, rank: int, fault_at: float, within_s: float) -> Recovery:
    """Assert that a rank got a new process on its host, in time, and everybody goes on."""
    after = job.world(after=world.generation, size=len(world.ranks), within_s=within_s + NOTICE_S)
    assert after.hosts == world.hosts
    assert after.pids[rank] != world.pids[rank]
    went_on(job, world, after, {rank})
    assert after.restarts == world.restarts
    noticed_s = job.noticed_after(fault_at, world.generation)
    assert after.at - fault_at <= within_s, f"{after.at - fault_at:.1f} s\n{job.story()}"
    return Recovery(noticed_s=noticed_s, trained_s=after.at - fault_at, world=after)


Scenario = Callable[[Stage, Job, World], Recovery]
THREE_SCENARIOS: dict[str, tuple[int, Scenario]] = {
    "recovery: a host, a spare": (1, a_host_with_a_spare),
    "recovery: a host, a late joiner": (0, a_host_without_a_spare),
    "recovery: the leader's host": (1, the_leaders_host),
    "recovery: a host frozen, thawed": (1, a_freeze),
}
"""With the number of spares each needs."""


def run_three(stage: Stage, name: str) -> Recovery:
    """Run one scenario on a job of its own, to the end of the training, which must be exact."""
    count, scenario = THREE_SCENARIOS[name]
    with training(stage, *THREE, spares=count) as (job, world):
        recovery = scenario(stage, job, world)
        killed = tuple(a for a in job.agents if a.process.poll() is not None)
        job.advances(recovery.world)
        job.finish(without=killed)
        exact(job, 3)
    return recovery
