"""One frun job over several hosts as a test sees it: its agents, its steps, and the world they form."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import event_log
from tests.account.adds_up import adds_up
from tests.hosts.network import Host, until

ROOT = Path(__file__).parents[2]
TRAIN = Path(__file__).with_name("train.py")
LEASE_S = 3.0
NOTICE_S = LEASE_S + 9.0
"""A lost host is noticed within this time, however busy the machine; `tests.hosts.repeat` measures it."""
FORM_S = 150.0
"""Longest first start on a busy machine with few cores: every host imports torch."""
RESTART_S = 45.0
"""From the decision to the next step of all ranks, on such a machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What a worker told at one step; -1: it began."""

    at: float
    host: str
    name: str
    pid: int
    rank: int
    world_size: int
    restarts: int
    generation: int
    master_addr: str
    step: int
    digest: str = ""
    """Of the state after this step, from scripts that have one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One generation, all of whose ranks trained."""

    generation: int
    at: float
    """When the last of its ranks made its first step."""
    first_step: int
    ranks: dict[int, News]

    @property
    def hosts(self) -> dict[int, str]:
        """Which host has which rank."""
        return {rank: news.host for rank, news in sorted(self.ranks.items())}

    @property
    def pids(self) -> dict[int, int]:
        """The process of each rank."""
        return {rank: news.pid for rank, news in sorted(self.ranks.items())}

    def rank_of(self, host: str) -> int:
        """Return the rank of the one worker of a host."""
        return next(rank for rank, name in self.hosts.items() if name == host)

    @property
    def master(self) -> str:
        """MASTER_ADDR, the same for all."""
        (address,) = {news.master_addr for news in self.ranks.values()}
        return address

    @property
    def restarts(self) -> int:
        """TORCHELASTIC_RESTART_COUNT, the same for all."""
        (count,) = {news.restarts for news in self.ranks.values()}
        return count


@dataclass(slots=True, kw_only=True)
class AgentProcess:
    """One agent on one host."""

    host: Host
    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def said(self) -> str:
        """What the agent and its workers wrote to the console."""
        return (self.folder / "console").read_text(errors="replace")

    def events(self) -> list[dict[str, Any]]:
        """Return the events it wrote down so far."""
        return event_log.events(self.folder / "logs")

    def wait(self, within_s: float) -> int:
        """Return the exit status."""
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"the agent on {self.host.name} did not end in {within_s:g} s: {self.said}"
            ) from None


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A job: flags that all hosts share, and what its workers told."""

    folder: Path
    flags: tuple[str, ...]
    script: tuple[str, ...] = ()
    train: Path = TRAIN
    env: dict[str, str] = field(default_factory=dict)
    agents: list[AgentProcess] = field(default_factory=list)
    news: list[News] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _socket: socket.socket | None = None
    _reader: threading.Thread | None = None

    def __enter__(self) -> "Job":
        """Begin to listen to the workers."""
        self.folder.mkdir(parents=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.folder / "news"))
        self._reader = threading.Thread(target=self._listen, args=(self._socket,))
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End what is still there."""
        for agent in self.agents:
            agent.host.kill(silently=False)
            agent.host.mend()
            agent.process.wait(30)
        assert self._socket is not None
        assert self._reader is not None
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", str(self.folder / "news"))
        self._reader.join()
        self._socket.close()

    def start(
        self, host: Host, *flags: str, etc_hosts: str | None = None, **env: str
    ) -> AgentProcess:
        """Start an agent on a host."""
        folder = self.folder / f"{len(self.agents)}-{host.name}"
        (folder / "tmp").mkdir(parents=True)
        command = [
            *(sys.executable, "-m", "frun", *self.flags, *flags),
            *(f"--log-dir={folder}/logs", f"--state-dir={folder}/state"),
            *(str(self.train), str(self.folder), *self.script),
        ]
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": str(folder),
            "TMPDIR": str(folder / "tmp"),
            "OMP_NUM_THREADS": "1",
            "TEST_HOST": host.name,
            **self.env,
            **env,
        }
        process = host.run(command, env=environment, output=folder / "console", etc_hosts=etc_hosts)
        agent = AgentProcess(host=host, process=process, folder=folder)
        self.agents.append(agent)
        return agent

    @property
    def job_id(self) -> str:
        """The id in its flags."""
        (flag,) = [flag for flag in self.flags if flag.startswith("--job-id=")]
        return flag.removeprefix("--job-id=")

    def agent(self, name: str) -> AgentProcess:
        """Return the latest agent of a host."""
        return next(a for a in reversed(self.agents) if a.host.name == name)

    def world(self, *, after: int = 0, size: int, within_s: float) -> World:
        """Wait until all ranks of a generation later than `after` made a step; return it."""
        found: list[World] = []

        def formed() -> bool:
            found[:] = [w for w in self._worlds(after) if len(w.ranks) == size]
            return bool(found)

        self.until(formed, within_s, f"a world of {size} after generation {after}")
        return found[-1]

    def until(self, done: Callable[[], bool], within_s: float, what: str) -> None:
        """Wait until what the workers told makes `done()` true; fail once that can't be."""
        deadline = time.monotonic() + within_s
        with self._changed:
            while not done():
                if time.monotonic() > deadline or all(
                    a.process.poll() is not None for a in self.agents
                ):
                    raise AssertionError(f"not within {within_s:g} s: {what}\n{self.story()}")
                self._changed.wait(0.2)

    def wait_for(self, done: Callable[[], object], within_s: float, what: str) -> None:
        """Wait until `done()`, which looks at anything, is true."""
        until(done, within_s=within_s, what=lambda: f"{what}\n{self.story()}")

    def advances(self, world: World, *, steps: int = 5, within_s: float = 5.0) -> None:
        """Assert that a world trains on: all its processes, the same ones, make more steps."""
        reached = {r: self._last_step(world.generation, r) for r in world.ranks}

        def further() -> bool:
            return all(
                self._last_step(world.generation, rank) >= step + steps
                for rank, step in reached.items()
            )

        self.until(further, within_s, f"generation {world.generation} trains on")
        latest = max(news.generation for news in self.news)
        assert latest == world.generation, self.story()
        pids = {n.rank: n.pid for n in self.news if n.generation == world.generation}
        assert pids == world.pids

    def forget(self) -> None:
        """Forget what was told so far: all who told it are dead."""
        with self._changed:
            self.news.clear()

    def shelve(self, keep: int) -> list[News]:
        """Take out all but the latest news, which a long job would search again and again."""
        with self._changed:
            taken, self.news[:] = self.news[:-keep], self.news[-keep:]
        return taken

    def trains_for(self, world: World, seconds: float) -> None:
        """Assert that a world trains on, undisturbed, for so long."""
        until_at = time.monotonic() + seconds
        while time.monotonic() < until_at:
            self.advances(world, steps=10)

    def noticed_after(self, fault_at: float, generation: int) -> float:
        """Return the seconds from a fault to the first agent that saw a later generation."""
        seen: list[float] = []

        def look() -> bool:
            seen[:] = [
                event["monotonic_s"]
                for agent in self.agents
                for event in agent.events()
                if event["event"] == "phase_seen" and event["generation"] > generation
            ]
            return bool(seen)

        until(look, within_s=NOTICE_S + 5, what=lambda: f"fault not noticed\n{self.story()}")
        return min(seen) - fault_at

    def finish(self, *, within_s: float = 45.0, without: tuple[AgentProcess, ...] = ()) -> None:
        """End the training; assert that every agent but those in `without` ends with 0, cleanly."""
        (self.folder / "finish").touch()
        self.all_end(within_s=within_s, without=without)

    def all_end(self, *, within_s: float = 45.0, without: tuple[AgentProcess, ...] = ()) -> None:
        """Assert that every agent ends with 0 and leaves no process and no file."""
        deadline = time.monotonic() + within_s
        for agent in self.agents:
            if agent not in without:
                code = agent.wait(max(0.1, deadline - time.monotonic()))
                assert code == 0, f"{agent.host.name} ended with {code}\n{self.story()}"
        for agent in self.agents:
            if agent not in without:
                self.leaves_nothing(agent)
        assert adds_up(self.folder)

    def leaves_nothing(self, agent: AgentProcess) -> None:
        """Assert that nothing of an ended agent is left."""
        until(
            lambda: not agent.host.pids(),
            within_s=2,
            what=lambda: f"{agent.host.name} still runs {agent.host.pids()}",
        )
        # torch's own cache of compiled code stays, as after plain python.
        temporary = (agent.folder / "tmp").iterdir()
        left = [str(path) for path in temporary if not path.name.startswith("torchinductor_")]
        left += [str(path) for path in (agent.folder / "state" / "jobs").rglob("*.json")]
        assert not left, left

    def signal(self, name: str, signum: signal.Signals) -> None:
        """Send a signal to the agent of a host."""
        self.agent(name).process.send_signal(signum)

    def story(self) -> str:
        """Return what happened, for a failed assertion."""
        told = [f"== {a.host.name} {a.process.poll()}\n{a.said[-3000:]}" for a in self.agents]
        with self._changed:
            last = {(n.generation, n.rank): n for n in self.news}
        lines = [f"{n.at:.2f} {n}" for n in last.values()]
        return "\n".join([*told, "== last news of each rank", *lines])

    def _listen(self, told: socket.socket) -> None:
        while data := told.recv(4096):
            with self._changed:
                self.news.append(News(**json.loads(data)))
                self._changed.notify_all()

    def _worlds(self, after: int) -> list[World]:
        steps: dict[int, dict[int, News]] = {}
        for news in self.news:
            if news.generation > after and news.step >= 0:
                steps.setdefault(news.generation, {}).setdefault(news.rank, news)
        return [
            World(
                generation=generation,
                at=max(news.at for news in ranks.values()),
                first_step=min(news.step for news in ranks.values()),
                ranks=ranks,
            )
            for generation, ranks in sorted(steps.items())
            if len(ranks) == next(iter(ranks.values())).world_size
        ]

    def _last_step(self, generation: int, rank: int) -> int:
        return max(
            (n.step for n in self.news if (n.generation, n.rank) == (generation, rank)), default=-1
        )
