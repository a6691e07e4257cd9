"""Owns torch's file timers: a named pipe in which workers set themselves limits, and notice when one is over.

Compatible with `torch.distributed.elastic.timer.FileTimerClient`: one JSON object per line. Whether a
process is a worker's, and its end, are for the owner of the workers.
"""

import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from frun import procfs
from frun.errors import LaunchError
from frun.procfs import Process

logger = logging.getLogger(__name__)

MAX_TIMERS = 10_000
"""Per host; a worker that sets more without releasing them is broken."""
_PIECE = 64 * 1024
_MAX_LINE = 4096
"""Bytes; the client writes no more at once, so that lines of several workers don't mix."""
_LOOK_AGAIN_S = 5.0
"""Limits are wall time, which may be set: it is read again this often while there are timers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One line: a limit that is set, or set anew, or (`expires_s` below 0) released."""

    pid: int
    scope: str
    """Name that the worker gave it."""
    expires_s: float
    """Wall time, seconds since 1970."""
    signum: int
    """Signal to send when it is over; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expired:
    """A limit that is over."""

    process: Process
    scope: str
    signum: int


def parse(line: bytes) -> Request | None:
    """Read one line; None when it is not one of the client's."""
    try:
        fields = json.loads(line)
        request = Request(
            pid=fields["pid"],
            scope=fields["scope_id"],
            expires_s=float(fields["expiration_time"]),
            signum=max(0, fields["signal"]),
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    whole = type(request.pid) is int and type(request.signum) is int
    if not whole or not isinstance(request.scope, str) or math.isnan(request.expires_s):
        return None
    return request if request.pid > 0 and request.signum < signal.NSIG else None


def first_over(timers: Iterable[tuple[Process, Request]], now: float) -> tuple[Expired, ...]:
    """Return per process the limit that ended it: of those over at `now` the first with a signal."""
    found: dict[tuple[int, int], Expired] = {}
    for process, request in sorted(timers, key=lambda timer: timer[1].expires_s):
        name = (process.pid, process.started)
        if request.expires_s <= now and not (name in found and found[name].signum):
            found[name] = Expired(process=process, scope=request.scope, signum=request.signum)
    return tuple(found.values())


class Timers:
    """The pipe and the limits set through it. Use it on the agent's event loop only."""

    def __init__(self, path: str, wall: Callable[[], float]) -> None:
        """Make the pipe at `path`, for this user only; a pipe that is there already is replaced.

        Raises:
            LaunchError: it can't be made, or something else is there.
        """
        self.on_expired: Callable[[Expired], None] = lambda expired: None
        """Called once for each process of which a limit is over; its other limits are forgotten."""
        self.path = os.path.abspath(path)
        self._wall = wall
        self._loop = asyncio.get_running_loop()
        self._timers: dict[tuple[int, str], tuple[Process, Request]] = {}
        self._rest = b""
        self._complained = False
        self._look: asyncio.TimerHandle | None = None
        try:
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISFIFO(os.lstat(self.path).st_mode):
                    raise LaunchError(
                        f"TORCHELASTIC_TIMER_FILE: {path} is there and no named pipe: name another"
                    )
                os.unlink(self.path)
            os.mkfifo(self.path, 0o600)
            # For writing as well: without a writer a pipe would be at its end all the time.
            self._fd = os.open(self.path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise LaunchError(
                f"TORCHELASTIC_TIMER_FILE: no pipe can be made at {path}: {error.strerror}"
            ) from error
        self._own = os.fstat(self._fd)
        self._loop.add_reader(self._fd, self._read)

    def close(self) -> None:
        """Forget all limits and remove the pipe, unless another took its place."""
        if self._look is not None:
            self._look.cancel()
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        with contextlib.suppress(OSError):
            if os.path.samestat(os.lstat(self.path), self._own):
                os.unlink(self.path)

    def _read(self) -> None:
        try:
            data = self._rest + os.read(self._fd, _PIECE)
        except BlockingIOError:
            return
        *lines, self._rest = data.split(b"\n")
        if len(self._rest) > _MAX_LINE:
            self._complain(self._rest)
            self._rest = b""
        for line in lines:
            request = parse(line)
            if request is None:
                self._complain(line)
            else:
                self._note(request)
        self._look_at_limits()

    def _note(self, request: Request) -> None:
        key = (request.pid, request.scope)
        if request.expires_s < 0:
            self._timers.pop(key, None)
            return
        process = procfs.read(request.pid)
        if process is None:
            return
        if key not in self._timers and len(self._timers) >= MAX_TIMERS:
            self._forget_the_dead()
        if key not in self._timers and len(self._timers) >= MAX_TIMERS:
            logger.warning("pid %d sets more timers than frun keeps: ignored", request.pid)
            return
        self._timers[key] = (process, request)

    def _look_at_limits(self) -> None:
        """Tell of the limits that are over, and come again when the next one is."""
        if self._look is not None:
            self._look.cancel()
            self._look = None
        now = self._wall()
        for expired in first_over(self._timers.values(), now):
            self._timers = {
                key: timer for key, timer in self._timers.items() if key[0] != expired.process.pid
            }
            if procfs.is_alive(expired.process):
                self.on_expired(expired)
        if self._timers:
            next_s = min(request.expires_s for _, request in self._timers.values())
            wait_s = min(max(next_s - now, 0.0), _LOOK_AGAIN_S)
            self._look = self._loop.call_later(wait_s, self._look_at_limits)

    def _forget_the_dead(self) -> None:
        self._timers = {
            key: timer for key, timer in self._timers.items() if procfs.is_alive(timer[0])
        }

    def _complain(self, line: bytes) -> None:
        if not self._complained:
            logger.warning(
                "the timer pipe %s got a line that is no timer: %r", self.path, line[:80]
            )
        self._complained = True
