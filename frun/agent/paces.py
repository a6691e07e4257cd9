"""Knows how long this host's workers take for their own part of a step, and when that is worth a report.

Owns the rhythm of such reports: a job in which nothing changes makes none. What a change is, is
`protocol.stragglers`' to say.
"""

from dataclasses import replace

from frun.clock import Clock
from frun.protocol import stragglers
from frun.protocol.stragglers import Settling, Work

_TOGETHER_S = 1.0
"""A change waits so long for those of the other workers, to be one report with them."""


class Paces:
    """The paces of one host. Use it on the agent's event loop only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._settling: dict[int, Settling] = {}
        self._told: dict[int, Work] = {}
        self._rests_until = 0.0

    def heard(self, pid: int, told: Work) -> dict[int, Work]:
        """Take what a worker's beat tells; return what is to be reported now, by pid."""
        now = self._clock.monotonic()
        before = self._settling.get(pid, Settling())
        self._settling[pid] = stragglers.settle(before, told.own_s, now)
        self._told[pid] = told
        waited = any(each.is_due(now - _TOGETHER_S) for each in self._settling.values())
        if not waited or now < self._rests_until:
            return {}
        self._rests_until = now + stragglers.REST_S
        changed = {}
        for each, settling in self._settling.items():
            # All that differ, since they are compared with each other.
            if settling.since is not None:
                self._settling[each] = settling.reported()
                own_s, delay_s = _short(settling.least_s), _short(self._told[each].delay_s)
                changed[each] = replace(self._told[each], own_s=own_s, delay_s=delay_s)
        return changed

    def forget(self, pid: int) -> None:
        """A worker is gone, or has ended its training."""
        self._settling.pop(pid, None)
        self._told.pop(pid, None)


def _short(seconds: float) -> float:
    return float(f"{seconds:.3g}")
