"""A job of several agents on this machine, at one real etcd, for the reports about rendezvous and membership.

Each agent is a real `frun`, its workers are plain processes without torch, which tell who they are and
then do what the test says. What is asserted is what a user would see: lines, statuses, keys in etcd.
"""

import base64
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frun import registry
from frun.protocol.keys import Keys
from tests.e2e.harness import Running, Site, is_alive
from tests.fakes.etcd_server import EtcdServer, etcdctl

LEASE_S = 3.0
"""frun's default: a host is lost this long after its last sign of life."""
ACT_S = 30.0
"""Longest time for anything that needs no lease to end, on a machine that is busy with other things."""

WORKER = """
import json, os, sys, time
names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
env = os.environ
print("up", json.dumps({
    **{name: env[name] for name in names}, "pid": os.getpid(), "count": env["TORCHELASTIC_RESTART_COUNT"],
    **{name: env.get(name) for name in sys.argv[2:]},
}))
alone = f"{sys.argv[1]}/end-{env['RANK']}"
while True:
    if os.path.exists(f"{sys.argv[1]}/end"):
        sys.exit(0)
    if os.path.exists(alone):
        status = int(open(alone).read())
        os.unlink(alone)
        sys.exit(status)
    time.sleep(0.05)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Up:
    """What one worker told when it began."""

    agent: "Agent"
    rank: int
    world: int
    group_rank: int
    pid: int
    count: int
    """TORCHELASTIC_RESTART_COUNT."""
    master: tuple[str, int]
    said: dict[str, Any]


@dataclass(slots=True, eq=False)
class Agent:
    """One agent of a job."""

    running: Running
    name: str

    @property
    def workers(self) -> list[Up]:
        """Its workers so far, the latest last."""
        found = []
        for line in re.findall(r"^up (.*)$", self.running.out, re.MULTILINE):
            said = json.loads(line)
            found.append(
                Up(
                    agent=self,
                    rank=int(said["RANK"]),
                    world=int(said["WORLD_SIZE"]),
                    group_rank=int(said["GROUP_RANK"]),
                    pid=said["pid"],
                    count=int(said["count"]),
                    master=(said["MASTER_ADDR"], int(said["MASTER_PORT"])),
                    said=said,
                )
            )
        return found

    @property
    def latest(self) -> Up | None:
        """Its one worker, if it lives."""
        workers = self.workers
        return workers[-1] if workers and is_alive(workers[-1].pid) else None

    def ends(self, code: int, limit_s: float = ACT_S) -> str:
        """Assert that it ends so; return what it wrote to stderr."""
        done = self.running.wait(limit_s)
        assert done.code == code, f"{self.name} ended with {done.code}\n{done.err}"
        assert "Traceback" not in done.err
        return done.err

    def freeze(self) -> None:
        """Freeze the agent and all its descendants, as a machine that hangs."""
        signal_tree(self.running.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """End a freeze."""
        signal_tree(self.running.pid, signal.SIGCONT)


@dataclass(slots=True)
class Job:
    """Agents that share flags, a job id and a folder in which workers find what they are to do."""

    site: Site
    etcd: EtcdServer
    flags: tuple[str, ...] = ("--nnodes=1",)
    job_id: str = "x1"
    backend: tuple[str, ...] = ("--rdzv-backend=etcd",)
    agents: list[Agent] = field(default_factory=list)
    folder: Path = field(init=False)
    script: str = field(init=False)

    def __post_init__(self) -> None:
        """Make the folder and the script."""
        self.folder = self.site.cwd / f"job-{len(list(self.site.cwd.glob('job-*')))}"
        self.folder.mkdir()
        self.script = self.site.script("worker.py", WORKER)

    def start(
        self,
        *flags: str,
        env: dict[str, str | None] | None = None,
        names: Sequence[str] = (),
        prefix: Sequence[str] = (),
        at: str | None = None,
    ) -> Agent:
        """Start an agent. Workers tell the variables `names`; `at` is another etcd endpoint."""
        running = self.site.start(
            *(f"--rdzv-endpoint={at or self.etcd.endpoint}", *self.backend),
            *(() if not self.job_id else (f"--rdzv-id={self.job_id}",)),
            *("--start-method=spawn", "--shutdown-timeout=5", *self.flags, *flags),
            *(self.script, str(self.folder), *names),
            env=env,
            prefix=prefix,
        )
        agent = Agent(running, f"agent {len(self.agents)}")
        self.agents.append(agent)
        return agent

    def starts(self, count: int, *flags: str) -> list[Agent]:
        """Start several agents at once."""
        return [self.start(*flags) for _ in range(count)]

    def world(
        self, agents: Sequence[Agent], *, after: Sequence[Up] = (), limit_s: float = ACT_S
    ) -> list[Up]:
        """Wait until exactly these agents run a world, with other workers than those in `after`.

        Returns the workers by rank. Every one of them saw the same world.
        """
        old = {up.pid for up in after}
        found: list[Up] = []

        def formed() -> bool:
            ups = [up for agent in agents if (up := agent.latest) is not None]
            found[:] = sorted(ups, key=lambda up: up.rank)
            return (
                [up.rank for up in found] == list(range(len(agents)))
                and {up.world for up in found} == {len(agents)}
                and len({(up.master, up.count) for up in found}) == 1
                and not old & {up.pid for up in found}
            )

        self.until(formed, limit_s, f"a world of {[agent.name for agent in agents]}")
        return found

    def until(self, done: Callable[[], bool], limit_s: float, what: str) -> None:
        """Wait until `done()`; fail with what the agents said once the time is over."""
        deadline = time.monotonic() + limit_s
        while not done():
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {limit_s:g} s: {what}\n{self.story()}")
            threading.Event().wait(0.02)

    def tell(self, rank: int | None, status: int = 0) -> None:
        """Let the worker of a rank end with a status, or with None all of them, now and later, with 0."""
        name = "end" if rank is None else f"end-{rank}"
        draft = self.folder / f".{name}"
        draft.write_text(str(status))
        draft.rename(self.folder / name)

    def finish(self, agents: Sequence[Agent], *, limit_s: float = ACT_S) -> list[str]:
        """Let all workers end well; assert that these agents end with 0; return their stderr."""
        self.tell(None)
        return [agent.ends(0, limit_s) for agent in agents]

    def renew(self) -> None:
        """Let the workers of a new job of this id live."""
        (self.folder / "end").unlink(missing_ok=True)

    def kill(self, agents: Sequence[Agent]) -> None:
        """SIGKILL these agents, whose workers die with them."""
        self.site.keeps = (r"frun_.*",)
        for agent in agents:
            agent.running.send(signal.SIGKILL)
        for agent in agents:
            agent.running.wait()
        registry.live_jobs(
            str(self.site.state / "frun")
        )  # reading it removes the files of the dead

    def stored(self, under: str = "") -> dict[str, Any]:
        """Return the keys of this job in etcd, without the job's prefix, with their documents."""
        prefix = Keys(self.job_id).prefix
        answer = json.loads(etcdctl(self.etcd, "get", "--prefix", prefix + under, "-w", "json"))
        found = {}
        for kv in answer.get("kvs", []):
            value = unbase64(kv["value"])
            document = json.loads(value) if value.startswith(b"{") else value.decode()
            found[unbase64(kv["key"]).decode().removeprefix(prefix)] = {
                "value": document,
                "lease": kv.get("lease", 0),
            }
        return found

    def hosts(self) -> list[str]:
        """Return the ids of the registered hosts."""
        return sorted(key.removeprefix("hosts/") for key in self.stored("hosts/"))

    def left_nothing(self) -> None:
        """Assert that all that is left of an ended job in etcd goes by itself."""
        left = self.stored()
        assert set(left) <= {"ranktable"}, left
        assert all(each["lease"] for each in left.values()), left

    def story(self) -> str:
        """Return what the agents said."""
        return "\n".join(
            f"== {agent.name}, {agent.running.process.poll()}\n"
            f"{agent.running.out[-2000:]}\n{agent.running.err[-3000:]}"
            for agent in self.agents
        )


def unbase64(text: str) -> bytes:
    """Decode what etcdctl writes."""
    return base64.b64decode(text)


def signal_tree(pid: int, signum: int) -> None:
    """Send a signal to a process and all its descendants, parents first."""
    try:
        os.kill(pid, signum)
        tasks = list(Path(f"/proc/{pid}/task").glob("*/children"))
        children = [int(child) for task in tasks for child in task.read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return
    for child in children:
        signal_tree(child, signum)


def cpu_s(pid: int) -> float:
    """Return the processor time of one process, all threads, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def descriptors(pid: int) -> int:
    """Return how many files and sockets a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


@contextmanager
def wiped(server: EtcdServer) -> Iterator[None]:
    """Kill an etcd; afterwards start it again with no data."""
    server.kill()
    yield
    for each in Path(server.folder, "data").glob("**/*"):
        if each.is_file():
            each.unlink()
    server.start()
    server.wait_ready()
