"""The agent's end of the zygote: starts it, asks it for workers, hears of their ends.

Owns the zygote process, its socket and the promise that no worker outlives `close`. What happens on the
other end is `frun.worker.zygote`'s; when to start or stop a worker is the caller's.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from frun import procfs
from frun.agent import processes
from frun.agent.processes import Stuck
from frun.agent.zygote_link import Future, Link, Message
from frun.config import EntryMode
from frun.errors import LaunchError

__all__ = ["EntryMode", "Stuck", "WorkerLaunch", "Zygote"]

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[1]
_CLOSE_LIMIT_S = 7.0
_DEATH_LIMIT_S = 5.0
_ROOM = 64

# The first lines load frun from where the agent has it, without a detour over sys.path: neither the
# working folder nor frun's own folders may hide a module. The last ones are the bottom of a worker's
# stack. No name is bound while the script runs: these are the globals of its __main__.
_CODE = """\
import sys
bare = frozenset(sys.modules)
if not sys.flags.safe_path: del sys.path[0]
import importlib.util as util
spec = util.spec_from_file_location("frun", sys.argv[2] + "/__init__.py",
    submodule_search_locations=[sys.argv[2]])
sys.modules["frun"] = util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["frun"])
from frun.worker.zygote import main
try:
    main(bare)()
except BaseException:
    __import__("frun.worker.entry", fromlist=["x"]).hide_frames()
    raise
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLaunch:
    """One worker process to be."""

    mode: EntryMode
    entry: str
    """Script, module or program, as typed."""
    args: tuple[str, ...] = ()
    python: str
    """Interpreter, unresolved. Another one than the zygote's means a fresh process."""
    env: Mapping[str, str]
    """The whole environment."""
    stdin: Literal["inherit", "null"] = "inherit"
    stdout_fd: int | None = None
    """Stays the caller's to close; None: the agent's own."""
    stderr_fd: int | None = None
    exec_: bool = False
    """Execute a fresh interpreter, with nothing of frun inside."""
    prefix: tuple[str, ...] = ()
    """Put in front of the command, such as numactl; the worker is then executed, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Worker:
    """A live child of the zygote."""

    pidfd: int
    started: int


class Zygote:
    """One zygote process. All methods belong to the event loop of the main thread."""

    def __init__(
        self,
        *,
        python: str,
        env: Mapping[str, str],
        preload: Sequence[str] = (),
        warm: bool = True,
        title_args: Sequence[str] = (),
        remove: Sequence[str] = (),
        ready_limit_s: float = 600.0,
        on_exit: Callable[[int, int], None],
        on_death: Callable[[str], None],
    ) -> None:
        """Say how it shall be; `start` makes it.

        `env` is the workers' environment without what differs between them. `warm=False` leaves torch
        out. `title_args`, a worker's script and arguments, make room for them in ps. `ready_limit_s`
        bounds how long a `spawn` waits for the imports, which may be on a slow file system.
        `on_exit(pid, returncode)` is called once for each worker, after the `spawn` that made it has
        returned; negative means a signal. `on_death(text)` is called when the zygote dies by itself,
        before `on_exit` of the workers that die with it.
        """
        self._python = python
        self._env = dict(env)
        self._preload = tuple(preload)
        self._warm = warm
        self._title_args = tuple(title_args)
        self._remove = tuple(remove)
        self._on_exit = on_exit
        self._on_death = on_death
        self._ready_limit_s = ready_limit_s
        self.on_ready: Callable[[float], None] = lambda _: None
        """Called once with the seconds that the imports took."""
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Link | None = None
        self._pidfd = -1
        self._workers: dict[int, _Worker] = {}
        self._ready: asyncio.Future[str] | None = None
        self._gone: asyncio.Future[None] | None = None
        self._closing = False
        self._ending: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """The zygote's process id; 0 before `start`."""
        return self._process.pid if self._process is not None else 0

    async def start(self) -> None:
        """Start the process; it imports while the caller goes on. Raises LaunchError."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            # With standard streams closed, the pair may have got their numbers.
            passed = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 3)
            try:
                self._process = subprocess.Popen(
                    self._command(passed),
                    env=self._env,
                    pass_fds=(passed,),
                    stdin=_own(0),
                    stdout=_own(1),
                    stderr=_own(2),
                    start_new_session=True,
                )
            except OSError as error:
                raise LaunchError(f"can't run {self._python!r}: {error.strerror}") from error
            finally:
                os.close(passed)
            self._pidfd = os.pidfd_open(self._process.pid)
            self._link = Link(ours.dup(), self._handle)
        self._ready = loop.create_future()
        self._gone = loop.create_future()
        loop.add_reader(self._pidfd, self._died)
        logger.info("the zygote is pid %d: %s", self._process.pid, self._python)

    async def ready(self, timeout_s: float) -> str:
        """Wait until the imports are done; return what is wrong, empty if nothing.

        With something wrong, workers are executed instead of forked.

        Raises:
            LaunchError: the zygote died, or was not ready in time.
        """
        if self._ready is None:
            raise LaunchError("the zygote was not started")
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._ready)
        except TimeoutError as error:
            raise LaunchError(f"the zygote was not ready within {timeout_s:g} s") from error

    async def spawn(self, launch: WorkerLaunch) -> int:
        """Start a worker, as soon as the zygote is ready; return its pid.

        `on_exit` may follow as soon as the awaiting task has gone on until its next await.

        Raises:
            LaunchError: the program can't be run, or the zygote is dead; the text says why.
        """
        given = [fd for fd in (launch.stdout_fd, launch.stderr_fd) if fd is not None]
        out = None if launch.stdout_fd is None else 0
        err = None if launch.stderr_fd is None else len(given) - 1
        fields = {
            "mode": launch.mode.value,
            "entry": launch.entry,
            "args": launch.args,
            "python": launch.python,
            "env": dict(launch.env),
            "stdin": launch.stdin,
            "exec_": launch.exec_,
            "prefix": launch.prefix,
            "out": out,
            "err": err,
        }
        answer = await self._make(fields, given)
        if answer.get("why") and not launch.exec_:
            logger.warning(
                "worker pid %d was executed, not forked: %s", answer["pid"], answer["why"]
            )
        return int(answer["pid"])

    async def call(self, target: str, fds: Sequence[int], *args: Any) -> int:
        """Fork a child that runs `target`, "module:function", with (fds, *args); return its pid.

        `args` are JSON values. The child ends with the function, and with the zygote; its end is told
        through `on_exit`, and `stop` ends it.

        Raises:
            LaunchError: it could not be made.
        """
        fields = {
            "mode": "call",
            "entry": target,
            "args": args,
            "python": self._python,
            "env": {},
            "stdin": "null",
            "exec_": False,
            "prefix": (),
            "out": None,
            "err": None,
        }
        return int((await self._make(fields, list(fds)))["pid"])

    async def stop(self, pids: Sequence[int], signum: int, grace_s: float) -> tuple[Stuck, ...]:
        """Stop these workers and all that came from them; return what the kernel would not end.

        Each worker's process group, and descendants that left it, get the signal; what is left after
        `grace_s` seconds gets SIGKILL, and at most 5 s more. Grace 0 is SIGKILL at once. Workers that
        are dead already may be named: their children are stopped. A worker that is being stopped
        already keeps the earlier end of its grace.
        """
        request = {"op": "stop", "pids": list(pids), "signum": int(signum), "grace_s": grace_s}
        try:
            answer = await (await self._live_link().ask(request))
        except LaunchError:
            # The zygote is dead, and its workers with it.
            if self._ending is not None:
                await asyncio.shield(self._ending)
            return ()
        return tuple(Stuck(pid=pid, state=state) for pid, state in answer["stuck"])

    def hurry(self) -> None:
        """End the grace of all stops that are under way."""
        if self._link is not None:
            self._link.tell({"op": "hurry"})

    async def close(self) -> None:
        """End the zygote with all workers and their descendants, at once."""
        self._closing = True
        if self._process is None or self._link is None or self._gone is None:
            return
        self._link.finish()
        if self._ready is not None and not self._ready.done():
            self._process.kill()  # it has no children yet, and would first finish its imports
        await asyncio.wait([self._gone], timeout=_CLOSE_LIMIT_S)
        if not self._gone.done():
            logger.error("the zygote, pid %d, did not end by itself", self._process.pid)
            self._process.kill()
            await asyncio.wait([self._gone], timeout=_DEATH_LIMIT_S)

    def _live_link(self) -> Link:
        if self._link is None or self._closing:
            raise LaunchError("the zygote is not running")
        return self._link

    def _command(self, fd: int) -> list[str]:
        settings = {
            "agent": os.getpid(),
            "socket": fd,
            "warm": self._warm,
            "preload": self._preload,
            "remove": self._remove,
        }
        # ps shows a worker's command in the place of this one, which must be long enough for it.
        need = sum(len(os.fsencode(arg)) + 1 for arg in self._title_args) + _ROOM
        room = " " * max(0, need - len(_CODE))
        return [self._python, "-u", "-c", _CODE, json.dumps(settings), str(_PACKAGE), room]

    async def _make(self, fields: Mapping[str, Any], fds: Sequence[int]) -> Message:
        link = self._live_link()
        await self.ready(self._ready_limit_s)
        # The environment may be longer than a message: it goes through a file in memory.
        file = os.memfd_create("frun-launch")
        try:
            with os.fdopen(os.dup(file), "wb") as writer:
                writer.write(json.dumps(fields).encode())
            os.lseek(file, 0, os.SEEK_SET)
            future = await link.ask({"op": "spawn"}, [file, *fds])
        finally:
            os.close(file)
        try:
            answer = await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(self._unwanted)
            raise
        if "error" in answer:
            raise LaunchError(answer["error"])
        return answer

    def _unwanted(self, future: Future) -> None:
        """End a worker whose caller did not wait for it."""
        if not future.cancelled() and future.exception() is None:
            worker = self._workers.get(future.result().get("pid", 0))
            if worker is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)

    def _handle(self, message: Message, fds: list[int]) -> None:
        match message["op"]:
            case "ready":
                logger.info("the zygote was ready after %.2f s", message["seconds"])
                self.on_ready(message["seconds"])
                if message["problem"]:
                    logger.warning("workers are executed, not forked: %s", message["problem"])
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(message["problem"])
            case "born":
                self._note_birth(message, fds)
                self._answer(message)
            case "stopped":
                self._answer(message)
            case "exit":
                worker = self._workers.pop(message["pid"], None)
                if worker is not None:
                    os.close(worker.pidfd)
                # Behind the task that waits for this worker's birth, which may be in this batch.
                loop = asyncio.get_running_loop()
                loop.call_soon(self._on_exit, message["pid"], message["returncode"])

    def _note_birth(self, message: dict[str, Any], fds: list[int]) -> None:
        if "error" in message or not fds:
            for fd in fds:
                os.close(fd)
            return
        process = procfs.read(message["pid"])
        started = process.started if process is not None else 0
        self._workers[message["pid"]] = _Worker(pidfd=fds[0], started=started)

    def _answer(self, message: Message) -> None:
        if self._link is not None:
            self._link.answer(message)

    def _died(self) -> None:
        """The zygote has ended; its workers get SIGKILL from the kernel."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        text = self._how_it_ended()
        if self._link is not None:
            self._link.read()
            self._link.close(text)
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(LaunchError(text))
            self._ready.exception()  # nobody may be waiting
        if not self._closing:
            self._on_death(text)
        self._ending = loop.create_task(self._end_workers())

    def _how_it_ended(self) -> str:
        returncode = self._process.wait() if self._process is not None else 0
        if returncode < 0:
            with contextlib.suppress(ValueError):
                return f"the zygote was ended by {signal.Signals(-returncode).name}"
        return f"the zygote ended with status {returncode}"

    async def _end_workers(self) -> None:
        """Make sure that no worker and nothing in its session outlives the zygote."""
        loop = asyncio.get_running_loop()
        workers, self._workers = self._workers, {}
        deadline = loop.time() + _DEATH_LIMIT_S
        ends = {pid: loop.create_future() for pid in workers}
        for pid, worker in workers.items():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)
            loop.add_reader(worker.pidfd, _settle, ends[pid])
        started = {pid: worker.started for pid, worker in workers.items()}
        while started and processes.kill_left_behind(started) and loop.time() < deadline:
            await asyncio.sleep(0.01)
        if ends:
            await asyncio.wait(ends.values(), timeout=max(0.0, deadline - loop.time()))
        for pid, worker in workers.items():
            if not ends[pid].done():
                logger.error("worker pid %d does not end after SIGKILL", pid)
            loop.remove_reader(worker.pidfd)
            os.close(worker.pidfd)
            self._on_exit(pid, -signal.SIGKILL)
        if self._gone is not None:
            self._gone.set_result(None)


def _own(fd: int) -> int | None:
    """Return what the zygote gets as this standard stream: ours, or the null device if that is closed.

    A number that was free at the start may since have gone to something of ours, which isn't inherited.
    """
    try:
        return None if os.get_inheritable(fd) else subprocess.DEVNULL
    except OSError:
        return subprocess.DEVNULL


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
