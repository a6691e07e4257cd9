"""The zygote process: imports torch once, forks workers on request, adopts and ends their descendants.

Owns the request loop, reaping and what is left when the agent dies. What happens inside a forked
worker is `bootstrap`'s, how workers are stopped is `stopping`'s; when, is the agent's.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from frun import procfs
from frun.worker import bootstrap, entry, warmup
from frun.worker.stopping import Family, Stopper

_SPAWN_LIMIT_S = 60.0
"""How long a child may take to tell how it starts; looking at the script's folder may hang."""
_END_LIMIT_S = 5.0
"""How long the descendants may take to die at the end."""
_OURS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


@dataclass(slots=True, kw_only=True)
class _Birth:
    """A child that has not told yet how it starts."""

    ident: int
    pid: int
    pidfd: int
    deadline: float
    told: bytes = b""


def main(bare: frozenset[str]) -> Callable[[], object]:
    """Serve the agent. Return only in a forked worker: what it shall run, without a frame of ours.

    `bare` names the modules that a fresh interpreter has loaded. The agent passes one JSON argument.
    """
    settings = json.loads(sys.argv[1])
    zygote = Zygote(settings, bare)
    zygote.start()
    launch = zygote.serve()
    if launch is None:
        zygote.remove()
        os._exit(0)  # nothing of the imported libraries' clean-up is wanted here
    del zygote
    return entry.enter(launch)


def _fork() -> int:
    """Fork, whatever newer versions of Python say of forking beside the threads of torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


class Zygote:
    """The single-threaded loop. `serve` returns the launch in a child, None when the agent is gone."""

    def __init__(self, settings: dict[str, Any], bare: frozenset[str]) -> None:
        """Take what the agent passed on the command line."""
        self._agent = int(settings["agent"])
        self._warm = bool(settings["warm"])
        self._preload = tuple(settings["preload"])
        self._folders = tuple(settings["remove"])
        self._origin = bootstrap.Origin.take(bare)
        self._socket = socket.socket(fileno=int(settings["socket"]))
        self._socket.set_inheritable(False)
        self._wake, self._woken = socket.socketpair()
        self._family = Family()
        self._stopper = Stopper(self._family)
        self._poll = select.poll()
        self._births: dict[int, _Birth] = {}
        self._refused: set[int] = set()
        self._inject: ModuleType | None = None
        self._orphaned = False

    def start(self) -> None:
        """Take the place of the workers' parent, then import what they shall find imported."""
        bootstrap.prctl(bootstrap.PR_SET_CHILD_SUBREAPER, 1)
        for signum in _OURS:
            signal.signal(signum, signal.SIG_IGN)
        # Until there are children, the agent's death may simply be ours, as soon as an import ends.
        signal.signal(signal.SIGTERM, self._orphaned_early)
        bootstrap.prctl(bootstrap.PR_SET_PDEATHSIG, signal.SIGTERM)
        self._orphaned_early()
        bootstrap.prctl(bootstrap.PR_SET_NAME, b"frun-zygote")
        bootstrap.set_title("frun zygote")
        started = time.monotonic()
        problems = warmup.warm(torch=self._warm, preload=self._preload)
        self._inject = importlib.import_module("frun.worker.inject")
        self._origin.forkable = not problems
        self._origin.why = "; ".join(problems)
        gc.collect()
        gc.freeze()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.signal(signal.SIGTERM, self._maybe_orphaned)
        if os.getppid() != self._agent:
            self._orphaned = True
        took = time.monotonic() - started
        self._tell({"op": "ready", "problem": self._origin.why, "seconds": took})

    def serve(self) -> bootstrap.Launch | None:
        """Answer requests until the agent is gone or this is a forked worker."""
        self._poll.register(self._socket, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        while not self._orphaned:
            events = dict(self._poll.poll(self._timeout_ms()))
            for fd in [fd for fd in self._births if fd in events]:
                if self._hear(fd):
                    self._born(fd)
            if self._wake.fileno() in events:
                with contextlib.suppress(BlockingIOError):
                    self._wake.recv(4096)
                self._reap()
            if self._socket.fileno() in events:
                launch = self._request()
                if launch is not None:
                    return launch
            now = time.monotonic()
            for fd, birth in list(self._births.items()):
                if now >= birth.deadline:
                    self._refuse_late(birth)
                    self._born(fd)
            for done in self._stopper.step(now):
                self._tell({"op": "stopped", "id": done.ident, "stuck": done.stuck})
        self._end_all()
        return None

    def _timeout_ms(self) -> int | None:
        times = [birth.deadline for birth in self._births.values()]
        if self._stopper.next_at is not None:
            times.append(self._stopper.next_at)
        if not times:
            return None
        return max(0, int((min(times) - time.monotonic()) * 1000) + 1)

    def remove(self) -> None:
        """Remove the folders that the agent wanted gone with it; it may have been killed."""
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _orphaned_early(self, *_: object) -> None:
        if os.getppid() != self._agent:
            self.remove()
            os._exit(0)

    def _maybe_orphaned(self, signum: int, frame: object) -> None:
        """SIGTERM: our parent's death, or somebody's mistake."""
        if os.getppid() != self._agent:
            self._orphaned = True

    def _tell(self, message: dict[str, Any], *fds: int) -> None:
        """Send to the agent; it may be gone, which the next read shows."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._socket, [json.dumps(message).encode()], list(fds))

    def _request(self) -> bootstrap.Launch | None:
        """Do one request. In a forked worker, return its launch."""
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, 1 << 16, 16, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            data, fds = b"", []
        if not data:
            self._orphaned = True
            return None
        request = json.loads(data)
        match request["op"]:
            case "spawn":
                return self._spawn(int(request["id"]), fds)
            case "stop":
                now = time.monotonic()
                self._stopper.begin(
                    request["id"], request["pids"], request["signum"], request["grace_s"], now
                )
            case "hurry":
                self._stopper.hurry(time.monotonic())
        return None

    def _spawn(self, ident: int, fds: list[int]) -> bootstrap.Launch | None:
        with os.fdopen(fds[0], "rb") as file:
            launch = bootstrap.Launch.parse(file.read(), tuple(fds[1:]))
        told, tell = os.pipe()
        me = os.getpid()
        try:
            pid = _fork()
        except OSError as error:
            for fd in (told, tell, *launch.fds):
                os.close(fd)
            self._tell({"op": "born", "id": ident, "error": f"fork: {error.strerror}"})
            return None
        if pid == 0:
            self._forget()
            os.close(told)
            bootstrap.begin(launch, self._origin, self._inject, parent=me, tell=tell)
            return launch
        for fd in (tell, *launch.fds):
            os.close(fd)
        os.set_blocking(told, False)
        self._poll.register(told, select.POLLIN)
        self._family.born(pid)
        self._births[told] = _Birth(
            ident=ident,
            pid=pid,
            pidfd=os.pidfd_open(pid),
            deadline=time.monotonic() + _SPAWN_LIMIT_S,
        )
        return None

    def _forget(self) -> None:
        """In a child: drop all that is the zygote's."""
        signal.set_wakeup_fd(-1)
        for end in (self._socket, self._wake, self._woken):
            end.close()
        for fd, birth in self._births.items():
            os.close(fd)
            os.close(birth.pidfd)

    def _hear(self, fd: int) -> bool:
        """Read what a child tells; return True when it has told all."""
        birth = self._births[fd]
        try:
            while data := os.read(fd, 65536):
                birth.told += data
        except BlockingIOError:
            return False
        return True

    def _born(self, fd: int) -> None:
        """Answer the request that made this child."""
        birth = self._births.pop(fd)
        self._poll.unregister(fd)
        os.close(fd)
        answer: dict[str, Any] = {"op": "born", "id": birth.ident, "pid": birth.pid}
        for line in birth.told.splitlines():
            answer |= json.loads(line)
        if "how" not in answer:
            answer.setdefault("error", "the process ended before it could start the worker")
        if "error" in answer:
            self._refused.add(birth.pid)
        self._tell(answer, birth.pidfd)
        os.close(birth.pidfd)

    def _refuse_late(self, birth: _Birth) -> None:
        """End a child that hangs before it has started."""
        signal.pidfd_send_signal(birth.pidfd, signal.SIGKILL)
        text = f"the worker did not start within {_SPAWN_LIMIT_S:g} s: is its folder reachable?"
        birth.told += b"\n" + json.dumps({"error": text}).encode()

    def _reap(self) -> None:
        """Reap all that ended, tell the agent about workers."""
        ended: dict[int, int] = {}
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                ended[found[0]] = os.waitstatus_to_exitcode(found[1])
        workers = frozenset(ended) & self._family.live
        if not workers:
            return
        for fd, birth in list(self._births.items()):
            # What it had to tell is complete now, and the agent must hear of its birth first.
            if birth.pid in workers:
                self._hear(fd)
                self._born(fd)
        for pid in workers:
            if pid not in self._refused:
                self._tell({"op": "exit", "pid": pid, "returncode": ended[pid]})
        self._refused -= workers
        self._family.died(workers)

    def _end_all(self) -> None:
        """Kill every descendant; whatever loses its parent comes to us, so look until none is left."""
        deadline = time.monotonic() + _END_LIMIT_S
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        while time.monotonic() < deadline:
            for process in self._family.everybody():
                procfs.send(process, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            poll.poll(20)
            with contextlib.suppress(BlockingIOError):
                self._wake.recv(4096)
