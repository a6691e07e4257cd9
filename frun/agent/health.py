"""Hears what the checks of this host's devices find, and acts on it.

Owns their process, and which facts hold. What a fact means is `protocol.health`'s, looking at devices
`frun.devices`'; whether a host that is unwell is given up the leader's.
"""

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from frun.agent.environment import zygote_environment
from frun.clock import Clock
from frun.config import LaunchConfig
from frun.devices import child, text
from frun.devices.contract import LONGEST_POLL_S
from frun.events import Event, HealthChanged
from frun.protocol.health import Fact, Known, calm_in_s, judge, warning

logger = logging.getLogger(__name__)

_SILENT_S = LONGEST_POLL_S + 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_CLOSE_S = 2.0
_LONGEST_LINE = 1 << 20
_DRILLS = "devices.json"


class Workers(Protocol):
    """The workers of this host, as far as they matter here."""

    def strike(self, local_rank: int, fact: Fact) -> None:
        """Kill the worker whose device is of no use any more, if it runs."""
        ...


class HealthWatch:
    """What is wrong with this host. All methods run on the agent's event loop."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        nproc: int,
        workers: Workers,
        emit: Callable[[Event, int], None],
        clock: Clock,
    ) -> None:
        """`command` starts the checks, see `frun.devices.child`; `emit` takes events with a generation."""
        self.drill_file = ""
        """Where a check looks for facts that drills make up; empty: none does."""
        self.silent_s = _SILENT_S
        """The checks are told to speak every second; after this long they are started again."""
        self._tell: Callable[[tuple[Fact, ...]], None] = lambda _: None
        self._command = command
        self._environment = environment
        self._nproc = nproc
        self._workers = workers
        self._emit = emit
        self._clock = clock
        self._known: tuple[Known, ...] = ()
        self._reported: tuple[Fact, ...] = ()
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Listen from now on."""
        self._task = asyncio.create_task(self._run(), name="checks")

    def tell(self, amend: Callable[[tuple[Fact, ...]], None]) -> None:
        """Tell all that holds from now on: after every change, before any worker is killed for it."""
        self._tell = amend
        amend(self._facts())

    def _facts(self) -> tuple[Fact, ...]:
        return tuple(each.fact for each in self._known)

    def calm_in_s(self, local_rank: int) -> float:
        """Return how long a further fault of a worker's device would count as one that is known."""
        return calm_in_s(self._known, local_rank, self._clock.monotonic(), self._nproc)

    async def saw(self, name: str) -> None:
        """Wait until a fact of this name holds."""
        while all(fact.name != name for fact in self._facts()):
            self._news.clear()
            await self._news.wait()

    async def close(self) -> None:
        """Listen no more, and end the checks."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        """Checks that end or fall silent are started again, later each time."""
        pause_s = _FIRST_PAUSE_S
        while True:
            began = self._clock.monotonic()
            why = await self._listen()
            logger.warning("the checks of this host's devices %s", why)
            broken = warning("broken", f"the process of the checks {why}", check="checks")
            self.take((*self._reported, broken))
            if self._clock.monotonic() - began > _LONGEST_PAUSE_S:
                pause_s = _FIRST_PAUSE_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _listen(self) -> str:
        """Start the checks and take what they say; return how that ended."""
        try:
            # Not asyncio's own: that would need a thread to wait for it.
            process = subprocess.Popen(
                self._command,
                env=dict(self._environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
                cwd="/",
            )
        except OSError as error:
            return f"can not be started: {error.strerror}"
        lines = asyncio.StreamReader(limit=_LONGEST_LINE)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(lines), process.stdout
        )
        try:
            return await self._hear(lines)
        finally:
            transport.close()
            process.kill()
            if process.stdin is not None:
                process.stdin.close()
            # One that is held up in the kernel stays until the kernel lets it go.
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, _CLOSE_S)

    async def _hear(self, lines: asyncio.StreamReader) -> str:
        last = b""
        while True:
            try:
                async with asyncio.timeout(self.silent_s):
                    line = await lines.readline()
                if line != last:
                    self._reported, last = _read(line), line
            except TimeoutError:
                return f"said nothing for {self.silent_s:g} s"
            except ValueError as error:
                return f"ended, or said what can't be read: {error}"
            self.take(self._reported)

    def take(self, facts: Iterable[Fact]) -> None:
        """Act on what was reported just now."""
        now = self._clock.monotonic()
        judged = judge(self._known, facts, now, self._nproc)
        self._known = judged.known
        for fact in judged.new:
            self._emit(_event(fact, holds=True), 0)
        for fact in judged.gone:
            self._emit(_event(fact, holds=False), 0)
        if judged.new or judged.gone:
            self._tell(self._facts())
            self._news.set()
        for local_rank, fact in judged.struck:
            self._workers.strike(local_rank, fact)


def begin_watch(
    config: LaunchConfig,
    base: Mapping[str, str],
    run_dir: str,
    log_folder: str,
    workers: Workers,
    emit: Callable[[Event, int], None],
    clock: Clock,
) -> HealthWatch:
    """Begin to look at this host's devices, unless nobody is to.

    `base` is the agent's environment, `log_folder` empty where there are no files.
    """
    names, nproc = config.workers.device_checks, config.workers.nproc
    looks = names != ()
    drill_file = os.path.join(run_dir, _DRILLS) if looks and config.job.allow_drills else ""
    command = child.command(
        sys.executable,
        str(Path(__file__).parents[1]),
        names,
        nproc=nproc,
        log_folder=log_folder or run_dir,
        files=[drill_file] if drill_file else [],
    )
    watch = HealthWatch(command, zygote_environment(base, config), nproc, workers, emit, clock)
    watch.drill_file = drill_file
    if looks:
        watch.start()
    return watch


def _read(line: bytes) -> tuple[Fact, ...]:
    """Return the facts of a line. Raises ValueError, also at the end of all lines."""
    if not line:
        raise ValueError("no more lines")
    document = json.loads(line)
    checks = document.get("checks") if isinstance(document, dict) else None
    if not isinstance(checks, dict):
        raise ValueError("a line without checks")  # noqa: TRY004 - one kind of error
    return tuple(
        replace(text.read(each), check=name) for name, facts in checks.items() for each in facts
    )


def _event(fact: Fact, *, holds: bool) -> HealthChanged:
    return HealthChanged(
        check=fact.check,
        name=fact.name,
        severity=fact.severity.value,
        fault_class=fact.fault_class.value,
        device=-1 if fact.device is None else fact.device,
        lasting=fact.lasting,
        reason=fact.reason,
        holds=holds,
    )
