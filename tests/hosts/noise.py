"""Noise: what slows a job of several hosts down, stops it for a while or confuses it, and is no fault.

Each function makes one noise and undoes it. That nothing came of it is for `soak` to see.
"""

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.hosts.job import FORM_S, Job, World
from tests.hosts.network import Host
from tests.hosts.scenarios import Stage
from tests.hosts.wallclock import WallClock

LONG_S = 10.0
LOSS_S = 3.0
LOSS_PERCENT = 30
CUT_S = 1.0
"""Longest time for which every packet may be lost: a lease is refreshed all 0.75 s and ends after 3."""
ETCD_S = 6.0
SLOW_S = 8.0
BURN_S = 15.0
BURNERS = 4
"""Busy loops for each core."""
CLOCK_S = 60
PATIENCE_S = 120.0
_NO_EVENT = "a while goes by"


@dataclass(slots=True, kw_only=True)
class Scene:
    """The job that is disturbed."""

    stage: Stage
    job: Job
    clock: WallClock
    draw: random.Random
    killed: int = 0
    """Workers that were killed on purpose so far."""
    did: list[str] = field(default_factory=list)
    """What was done since somebody looked."""

    @property
    def world(self) -> World:
        """The world that trains now."""
        return self.job.world(size=4, within_s=FORM_S)

    def step(self) -> int:
        """Return the latest step that was told."""
        return max(news.step for news in self.job.news)

    def all_do(self, word: str, seconds: float, who: str = "all") -> None:
        """Let ranks do something after the same step, and wait until all have made a step more."""
        step = self.step() + 12
        self.ask(step, who, word, seconds)
        self.reach(step + 1)

    def ask(self, step: int, who: str, word: str, seconds: float) -> None:
        """Write down what is to be done after a step."""
        folder = self.job.folder
        with (folder / f"do-{step}.new").open("a") as file:
            file.write(f"{who} {word} {seconds}\n")
        (folder / f"do-{step}.new").rename(folder / f"do-{step}")

    def reach(self, step: int) -> None:
        """Wait until all ranks have made this step."""

        def reached() -> bool:
            return len({n.rank for n in self.job.news if n.step >= step}) == 4

        self.job.until(reached, PATIENCE_S, f"all ranks make step {step}")

    def rest(self, seconds: float) -> None:
        """Let time go by."""
        until = time.monotonic() + seconds
        self.job.wait_for(lambda: time.monotonic() >= until, seconds + 60, _NO_EVENT)

    def any_host(self) -> Host:
        """Return a host: a member of the job or of etcd, or the spare."""
        names = [agent.host.name for agent in self.job.agents]
        return self.stage.network[self.draw.choice([*names, "e1", "e2", "e3"])]


def all_sleep(scene: Scene) -> None:
    """`time.sleep` on all ranks."""
    scene.did.append(f"all ranks sleep {LONG_S:g} s")
    scene.all_do("sleep", LONG_S)


def all_collect(scene: Scene) -> None:
    """A garbage collection on all ranks, with Python's lock held."""
    scene.did.append(f"all ranks collect garbage for {LONG_S:g} s")
    scene.all_do("collect", LONG_S)


def long_evaluation(scene: Scene) -> None:
    """One rank evaluates, declared, while the others wait for it."""
    rank = scene.draw.randrange(4)
    scene.did.append(f"rank {rank} evaluates for {1.5 * LONG_S:g} s")
    scene.all_do("evaluate", 1.5 * LONG_S, who=str(rank))


def slow_first_step(scene: Scene) -> None:
    """A worker is killed, which is a fault; that the next one's first step takes long is none."""
    world = scene.world
    rank = scene.draw.randrange(4)
    scene.did.append(
        f"rank {rank} is killed, its next process takes {SLOW_S:g} s for its first step"
    )
    pid = world.pids[rank]
    slow = scene.job.folder / f"slow-{rank}"
    slow.with_suffix(".new").write_text(f"{pid} {SLOW_S}")
    slow.with_suffix(".new").rename(slow)
    scene.killed += 1
    os.kill(pid, signal.SIGKILL)
    scene.job.world(after=world.generation, size=4, within_s=PATIENCE_S)
    assert not slow.exists(), "the new process was not slow"


def packet_loss(scene: Scene) -> None:
    """Packets of one host are lost by chance, both ways."""
    host = scene.any_host()
    scene.did.append(f"{host.name} loses {LOSS_PERCENT} % of its packets for {LOSS_S:g} s")
    with losing(host):
        scene.rest(LOSS_S)


@contextlib.contextmanager
def losing(host: Host) -> Iterator[None]:
    """Drop packets of a host."""
    hooks = {"prerouting": -300, "postrouting": 300}
    rules = "\n".join(
        f"add chain inet noise {hook} {{ type filter hook {hook} priority {priority}; }}\n"
        f"add rule inet noise {hook} numgen random mod 100 < {LOSS_PERCENT} drop"
        for hook, priority in hooks.items()
    )
    rules = f"add table inet noise\n{rules}\n"
    _nft(host, rules)
    try:
        yield
    finally:
        _nft(host, "delete table inet noise")


def _nft(host: Host, text: str) -> None:
    command = ["ip", "netns", "exec", host.space, "nft", "-f", "-"]
    done = subprocess.run(command, input=text, text=True, capture_output=True, timeout=20)
    assert done.returncode == 0, done.stderr


def short_cut(scene: Scene) -> None:
    """One host loses every packet, for less than its lease."""
    host = scene.any_host()
    scene.did.append(f"{host.name} is cut off for {CUT_S:g} s")
    host.cut()
    try:
        scene.rest(CUT_S)
    finally:
        host.mend()


def etcd_stops(scene: Scene) -> None:
    """A member of etcd stands still, its leader as often as not."""
    etcd = scene.stage.etcd
    leader, followers = etcd.members_by_role()
    number = leader if scene.draw.random() < 0.5 else scene.draw.choice(followers)
    what = "etcd's leader" if number == leader else "a follower of etcd"
    scene.did.append(f"{what} stands still for {ETCD_S:g} s")
    etcd.freeze(number)
    try:
        scene.rest(ETCD_S)
    finally:
        etcd.thaw(number)
    etcd.wait_healthy(number)


def clock_steps(scene: Scene) -> None:
    """The wall clock of all hosts of the job is set, either way, and set back later."""
    step_s = scene.draw.choice((CLOCK_S, -CLOCK_S))
    scene.did.append(f"the clock steps by {step_s:+d} s, and back")
    try:
        scene.clock.set(step_s)
        for path in scene.job.folder.glob("clock-*"):
            path.unlink()
        scene.all_do("clock", 0)
        real = time.clock_gettime(time.CLOCK_REALTIME)
        told = [float(path.read_text()) for path in scene.job.folder.glob("clock-?")]
        assert len(told) == 4
        assert all(abs(one - real - step_s) < CLOCK_S / 2 for one in told), (told, real)
        scene.rest(5.0)
    finally:
        scene.clock.set(0)
    scene.rest(5.0)


def load(scene: Scene) -> None:
    """All cores are busy with other things, during which something else is noisy as well."""
    count = BURNERS * len(os.sched_getaffinity(0))
    other = scene.draw.choice((all_sleep, all_collect, packet_loss, etcd_stops, long_evaluation))
    scene.did.append(f"{count} busy loops for {BURN_S:g} s")
    with burning(count):
        scene.rest(BURN_S / 2)
        other(scene)
        scene.rest(BURN_S / 2)


@contextlib.contextmanager
def burning(count: int) -> Iterator[None]:
    """Keep so many processes computing."""
    loops = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait(20)


Noise = Callable[[Scene], None]
NOISES: tuple[Noise, ...] = (
    load,
    all_sleep,
    all_collect,
    clock_steps,
    packet_loss,
    short_cut,
    etcd_stops,
    long_evaluation,
    slow_first_step,
)


def title(noise: Noise) -> str:
    """Return a noise's name in words."""
    return noise.__name__.replace("_", " ")
