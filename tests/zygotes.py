"""A real zygote for tests, and what plain python does with the same command."""

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from frun import procfs
from frun.agent.zygote import EntryMode, WorkerLaunch, Zygote

LIMIT_S = 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a process ended and what it wrote."""

    returncode: int
    out: str
    err: str


@dataclass(slots=True, kw_only=True)
class Rig:
    """A started zygote and what it has reported."""

    env: dict[str, str]
    exits: dict[int, int] = field(default_factory=dict)
    deaths: list[str] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    zygote: Zygote = field(init=False)

    def on_exit(self, pid: int, returncode: int) -> None:
        """Take the report; one per worker."""
        assert pid not in self.exits
        self.exits[pid] = returncode
        self.news.set()

    def on_death(self, text: str) -> None:
        """Take the report."""
        self.deaths.append(text)
        self.news.set()

    async def ended(self, pid: int, limit_s: float = LIMIT_S) -> int:
        """Wait for the report of this worker's end."""
        async with asyncio.timeout(limit_s):
            while pid not in self.exits:
                self.news.clear()
                await self.news.wait()
        return self.exits[pid]

    def launch(self, command: Sequence[str], **more: object) -> WorkerLaunch:
        """Return the launch for what follows `python -u` in a command."""
        mode = EntryMode.MODULE if command[0] == "-m" else EntryMode.SCRIPT
        rest = command[1:] if mode is EntryMode.MODULE else command
        fields: dict[str, object] = {
            "mode": mode,
            "entry": rest[0],
            "args": tuple(rest[1:]),
            "python": sys.executable,
            "env": self.env,
        }
        return WorkerLaunch(**{**fields, **more})  # type: ignore[arg-type]

    async def spawn(self, command: Sequence[str], **more: object) -> int:
        """Start a worker with the tests' own output."""
        return await self.zygote.spawn(self.launch(command, **more))

    async def hear(self, command: Sequence[str], **more: object) -> tuple[int, str]:
        """Start a worker; return its pid and the first line that it prints."""
        read, write = os.pipe()
        with os.fdopen(read, "rb") as file:
            try:
                pid = await self.spawn(command, stdout_fd=write, **more)
            finally:
                os.close(write)
            reader = asyncio.StreamReader()
            loop = asyncio.get_running_loop()
            pipe, _ = await loop.connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), file
            )
            try:
                async with asyncio.timeout(LIMIT_S):
                    return pid, (await reader.readline()).decode()
            finally:
                pipe.close()

    async def idle(self) -> None:
        """Wait until the zygote is done with what it knows of; it does one thing at a time."""
        assert await self.zygote.stop([], 0, 0.0) == ()

    async def run(self, command: Sequence[str], **more: object) -> Outcome:
        """Run a worker to its end."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            streams = {"stdout_fd": out.fileno(), "stderr_fd": err.fileno()}
            pid = await self.zygote.spawn(self.launch(command, **{**streams, **more}))
            returncode = await self.ended(pid)
            out.seek(0)
            err.seek(0)
            return Outcome(returncode=returncode, out=out.read().decode(), err=err.read().decode())


def environment(**more: str) -> dict[str, str]:
    """Return an environment for zygote and workers."""
    return {"PATH": os.environ["PATH"], "HOME": "/", "LANG": "C.UTF-8", **more}


@contextlib.asynccontextmanager
async def running(
    *, warm: bool = False, env: Mapping[str, str] | None = None, **more: object
) -> AsyncIterator[Rig]:
    """Start a zygote in the current folder; end it with all its workers."""
    rig = Rig(env=dict(environment() if env is None else env))
    rig.zygote = Zygote(
        python=sys.executable,
        env=rig.env,
        warm=warm,
        on_exit=rig.on_exit,
        on_death=rig.on_death,
        title_args=[" " * 500],
        **more,  # type: ignore[arg-type]
    )
    await rig.zygote.start()
    try:
        yield rig
    finally:
        async with asyncio.timeout(LIMIT_S):
            await rig.zygote.close()


def with_rig(story: Callable[[Rig], Awaitable[None]], **more: object) -> None:
    """Run a story with a zygote from start to close."""

    async def run() -> None:
        async with running(**more) as rig:  # type: ignore[arg-type]
            await story(rig)

    asyncio.run(run())


def forked(command: Sequence[str], **more: object) -> Outcome:
    """Run one worker in a zygote of its own."""
    outcomes = []

    async def story(rig: Rig) -> None:
        outcomes.append(await rig.run(command))

    with_rig(story, **more)
    return outcomes[0]


def plain(command: Sequence[str], env: Mapping[str, str] | None = None) -> Outcome:
    """Run the same command with plain python in a session of its own."""
    done = subprocess.run(
        [sys.executable, "-u", *command],
        env=environment() if env is None else env,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=LIMIT_S,
        start_new_session=True,
    )
    return Outcome(returncode=done.returncode, out=done.stdout.decode(), err=done.stderr.decode())


async def gone(pids: Sequence[int], limit_s: float) -> list[int]:
    """Wait until none of these processes runs; return those that do after the limit."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    while left := [pid for pid in pids if (p := procfs.read(pid)) is not None and p.running]:
        if loop.time() > deadline:
            return left
        await asyncio.sleep(0.005)
    return []
