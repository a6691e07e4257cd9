"""Stops workers and everything that came from them: soft signal, grace, SIGKILL, a bounded wait.

Runs inside the zygote, which adopts the orphans of its workers and so sees all of their descendants.
It owns whose process is whose; forking, reaping and talking to the agent are the zygote's.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from frun import procfs
from frun.procfs import Process

Send = Callable[[Iterable[Process], int], None]

KILL_WAIT_S = 5.0
"""How long SIGKILL may take before a process is reported as stuck."""


class Family:
    """Whose process is whose, among all descendants of this process."""

    def __init__(self) -> None:
        """Start without workers."""
        self.live: set[int] = set()
        self._known: set[int] = set()
        self._adopted: dict[tuple[int, int], frozenset[int]] = {}

    def born(self, pid: int) -> None:
        """Note a worker that leads its own session from now on."""
        self.live.add(pid)
        self._known.add(pid)

    def died(self, workers: frozenset[int]) -> None:
        """Note workers that were reaped together; orphans that are new are theirs.

        An orphan in the session of a worker says whose it is. One with its own session doesn't: it is
        counted to the workers whose end has just been seen.
        """
        self.live -= workers
        me = os.getpid()
        adopted: dict[tuple[int, int], frozenset[int]] = {}
        below = procfs.descendants(me, procfs.table())
        # The number of a dead worker stays taken while its session has members, no longer.
        self._known &= self.live | {process.session for process in below}
        for process in below:
            if process.parent == me and process.pid not in self.live:
                key = (process.pid, process.started)
                session = process.session
                owners = frozenset({session}) if session in self._known else workers
                adopted[key] = self._adopted.get(key, owners)
        self._adopted = adopted

    def members(self, workers: frozenset[int]) -> list[Process]:
        """Return what runs of these workers and their descendants, dead workers' ones too."""
        owners: dict[int, frozenset[int]] = {}
        found = []
        for process in procfs.descendants(os.getpid(), procfs.table()):
            owners[process.pid] = owner = self._owner(process, owners)
            if process.running and not owner.isdisjoint(workers):
                found.append(process)
        return found

    def everybody(self) -> list[Process]:
        """Return all that runs below this process."""
        below = procfs.descendants(os.getpid(), procfs.table())
        return [process for process in below if process.running]

    def _owner(self, process: Process, owners: dict[int, frozenset[int]]) -> frozenset[int]:
        if process.pid in self.live:
            return frozenset({process.pid})
        if process.parent in owners:
            return owners[process.parent]
        if process.session in self._known:
            return frozenset({process.session})
        return self._adopted.get((process.pid, process.started), frozenset())


@dataclass(slots=True, kw_only=True)
class _Stop:
    """One request under way."""

    ident: int
    workers: frozenset[int]
    signum: int
    kill_at: float
    give_up_at: float | None = None
    remaining: list[Process] = field(default_factory=list)
    told: set[tuple[int, int]] = field(default_factory=set)
    """Pid and start time of what got the soft signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """The end of one request: what the kernel did not end is in `stuck` as (pid, state)."""

    ident: int
    stuck: tuple[tuple[int, str], ...]


class Stopper:
    """The stops under way. Call `step` after every reaping and when `next_at` has come."""

    def __init__(self, family: Family, send: Send = procfs.send_all) -> None:
        """Stop members of this family only."""
        self._family = family
        self._send = send
        self._stops: list[_Stop] = []

    @property
    def next_at(self) -> float | None:
        """When `step` has something to do even if no process ends."""
        times = [s.kill_at if s.give_up_at is None else s.give_up_at for s in self._stops]
        return min(times, default=None)

    def begin(
        self, ident: int, pids: Iterable[int], signum: int, grace_s: float, now: float
    ) -> None:
        """Signal these workers and all that came from them; after the grace they are killed.

        A worker that is being stopped already keeps the earlier end of its grace.
        """
        workers = frozenset(pids)
        earlier = [s.kill_at for s in self._stops if not s.workers.isdisjoint(workers)]
        kill_at = min([now + grace_s, *earlier])
        for other in self._stops:
            if not other.workers.isdisjoint(workers):
                other.kill_at = min(other.kill_at, kill_at)
        stop = _Stop(ident=ident, workers=workers, signum=signum, kill_at=kill_at)
        self._stops.append(stop)
        if kill_at > now:
            self._signal_groups(stop)

    def hurry(self, now: float) -> None:
        """End the grace of all stops now."""
        for stop in self._stops:
            stop.kill_at = min(stop.kill_at, now)

    def step(self, now: float) -> list[Stopped]:
        """Kill what has used up its grace; return the stops that are over."""
        over = [done for stop in self._stops if (done := self._step(stop, now)) is not None]
        ended = {done.ident for done in over}
        self._stops = [stop for stop in self._stops if stop.ident not in ended]
        return over

    def _step(self, stop: _Stop, now: float) -> Stopped | None:
        while stop.remaining and not procfs.is_alive(stop.remaining[-1]):
            stop.remaining.pop()
        due = stop.give_up_at is None and now >= stop.kill_at
        if not stop.remaining or due:
            # What was forked or orphaned since the last look is only seen by a fresh one.
            stop.remaining = self._family.members(stop.workers)
        if not stop.remaining and stop.workers.isdisjoint(self._family.live):
            # Reaped, too: until then nobody knows which orphans with a session of their own are whose.
            return Stopped(ident=stop.ident, stuck=())
        if now < stop.kill_at:
            fresh = [p for p in stop.remaining if (p.pid, p.started) not in stop.told]
            self._send(fresh, stop.signum)
            stop.told |= {(p.pid, p.started) for p in fresh}
            return None
        if stop.give_up_at is None:
            stop.give_up_at = now + KILL_WAIT_S
        elif now >= stop.give_up_at:
            left = self._family.members(stop.workers)
            return Stopped(ident=stop.ident, stuck=tuple((p.pid, p.state) for p in left))
        self._send(stop.remaining, signal.SIGKILL)
        return None

    def _signal_groups(self, stop: _Stop) -> None:
        """Signal whole process groups, which also reaches what was forked a moment ago."""
        groups = stop.workers & self._family.live
        for process in self._family.members(stop.workers):
            if process.group in groups:
                stop.told.add((process.pid, process.started))
        for pid in groups:
            # A worker that lives is our child and not reaped: its group's number is its own.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, stop.signum)
