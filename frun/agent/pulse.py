"""Listens to the beats of this host's workers, and ends one that is frozen.

Owns how long each has been silent, counted in this agent's own turns. What silence means is
`protocol.liveness`', what becomes of a worker that ended the leader's.
"""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from frun import procfs
from frun.agent.paces import Paces
from frun.agent.spy import Spy
from frun.clock import Clock
from frun.protocol import hangs, liveness
from frun.protocol.channel import Beat, Explain, Order, Stacks
from frun.protocol.hangs import Position, Standing
from frun.protocol.liveness import Activity, Limits
from frun.protocol.stragglers import Work

_BUSY_S = 30.0
"""How long a worker may be silent that computes: a garbage collection of 10 s is nothing yet."""


class Workers(Protocol):
    """The workers of this host, as far as they matter here."""

    def connected(self) -> Collection[int]:
        """Return the pids of live workers that have a channel."""
        ...

    def stands(self, pid: int, standing: Standing | None, generation: int) -> None:
        """Take note that a worker has not moved for too long in this generation; None: it moves."""
        ...

    def takes(self, works: Mapping[int, Work]) -> None:
        """Take note of how long workers take for their own part of a step, by pid."""
        ...

    def give_up(self, pid: int, why: str, since_s: float) -> None:
        """Kill a worker that has been of no use for so long; its failure says why."""
        ...


class Line(Protocol):
    """The way to a worker."""

    def send(self, pid: int, order: Order) -> bool:
        """Send an order; False if that is not possible."""
        ...


@dataclass(slots=True, kw_only=True)
class _Pulse:
    beat: Beat
    stepped: bool
    """It has completed a step, as the beat says or as was told since."""
    silent_s: float = 0.0
    spied: bool = False
    """Somebody looks at it from outside."""


class Pulse:
    """What was heard of each worker. Use it on the agent's event loop only."""

    def __init__(
        self,
        workers: Workers,
        line: Line,
        beat_s: float,
        hang_s: float,
        clock: Clock,
        spy: Spy | None = None,
    ) -> None:
        """`beat_s` is how long a worker may be silent, `hang_s` how long it may stand still at least.

        `spy` looks at those that are silent; it can be left out.
        """
        self.barren = 0
        """Generations in a row, before the present one, without a completed step."""
        self._workers = workers
        self._line = line
        self._limits = Limits(silent_s=beat_s, busy_s=max(beat_s, _BUSY_S))
        self._hang_s = hang_s
        self._clock = clock
        self._pulses: dict[int, _Pulse] = {}
        self._paces = Paces(clock)
        self._spy = spy or Spy(None)
        self._stacks: dict[int, str] = {}
        """What the threads of workers did that were asked last, by pid."""

    def heard(self, pid: int, fact: Beat | Stacks) -> None:
        """Note a beat, the last of which says that none follows, or what the threads of a worker do."""
        if isinstance(fact, Stacks):
            self._stacks[pid] = fact.text
            return
        before = self._pulses.pop(pid, None)
        if before is not None and before.spied:
            self._spy.forget(pid)
        if fact.last:
            self._paces.forget(pid)
            return
        stepped = fact.completed > 0 or (before is not None and before.stepped)
        self._pulses[pid] = _Pulse(beat=fact, stepped=stepped)
        position = _position(fact)
        bound_s = hangs.bound_s(position, self._hang_s, self.barren)
        asked = _half(before.beat.still_s if before is not None else 0.0, bound_s)
        if _half(fact.still_s, bound_s) and not asked:
            # In time: who hangs is killed at once when that is known.
            self._line.send(pid, Explain(generation=fact.generation))
        standing = hangs.standing(position, self._hang_s, self.barren)
        self._workers.stands(pid, standing, fact.generation)
        work = Work(own_s=fact.own_s, team=fact.team, delay_s=fact.delay_s)
        works = self._paces.heard(pid, work)
        if works:
            self._workers.takes(works)

    def stepped(self, pid: int) -> None:
        """Note that a worker completed a step: it may be frozen before its next beat says so."""
        pulse = self._pulses.get(pid)
        if pulse is not None:
            pulse.stepped = True

    def explained(self, pids: Mapping[int, int]) -> dict[int, str]:
        """Return, per rank, what the threads of these workers did when they stood still; forget the rest."""
        found = {
            rank: self._stacks.get(pid, "") or self._spy.text(pid) for rank, pid in pids.items()
        }
        self._stacks.clear()
        return found

    def still_s(self, pid: int) -> float:
        """Return how long a worker had not moved by its last beat."""
        pulse = self._pulses.get(pid)
        return 0.0 if pulse is None else pulse.beat.still_s

    async def watch(self) -> None:
        """Look at all workers again and again."""
        looked_at = self._clock.monotonic()
        while True:
            await asyncio.sleep(liveness.TURN_S)
            now = self._clock.monotonic()
            self.turn(now - looked_at)
            looked_at = now

    def turn(self, elapsed_s: float) -> None:
        """Look once, this long after the last time."""
        here = set(self._workers.connected())
        for pid, pulse in list(self._pulses.items()):
            if pid not in here:
                self._paces.forget(pid)
                self._spy.forget(pid)
                del self._pulses[pid]
                continue
            pulse.silent_s = liveness.silence(pulse.silent_s, elapsed_s)
            limit_s = self._limits.silent_s
            if limit_s and pulse.silent_s >= limit_s / 2 and not pulse.spied:
                # Over before the verdict: a process that somebody looks into is taken for a debugger's.
                pulse.spied = True
                self._spy.look(pid, limit_s - pulse.silent_s - liveness.TURN_S)
            if limit_s and pulse.silent_s >= limit_s:
                self._look(pid, pulse)

    def spied(self, pid: int) -> str:
        """Return what the threads of a silent worker do, as seen from outside; empty if nobody looked."""
        return self._spy.text(pid)

    def _look(self, pid: int, pulse: _Pulse) -> None:
        states, cpu_s = procfs.activity(pid)
        activity = Activity(states=states, used_s=cpu_s - pulse.beat.cpu_s)
        why = liveness.frozen(pulse.silent_s, activity, self._limits, stepped=pulse.stepped)
        if why:
            del self._pulses[pid]
            self._workers.give_up(pid, why, pulse.silent_s)
            self._spy.forget(pid)


def _half(still_s: float, bound_s: float | None) -> bool:
    """Tell whether a worker has stood still for half of the time that it may."""
    return bound_s is not None and still_s >= bound_s / 2


def _position(beat: Beat) -> Position:
    return Position(
        generation=beat.generation,
        step=beat.step,
        completed=beat.completed,
        fresh=beat.fresh,
        recent_s=beat.recent_s,
        place=beat.place,
        where=beat.where,
        still_s=beat.still_s,
    )
