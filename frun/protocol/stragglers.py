"""Which rank is slower than its peers, from how long its own part of a step takes. Pure.

In a synchronous job every step takes all ranks the same time: the slow one computes, the others wait for it.
So a worker measures what it does between the end of one wait and the beginning of the next, and tells the
median of its last steps with each beat. An agent reports it when it has really changed (`settle`), whoever
looks compares (`scores`), and the leader tells of one that falls behind (`compare`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SETTLED_S = 5.0
"""How long a worker has to differ from what was reported of it."""
REST_S = 10.0
"""The least time between two reports of a host because of that."""
HOLD_S = REST_S + SETTLED_S + 1.0
"""Where several hosts report, each in its own time: within so long all have told of the same change."""
_CHANGED = 1.25
"""By what factor it has to differ."""
_SLOW, _FINE = 1.5, 1.3
"""From this score on a rank is a straggler, down to that one it remains one."""
_LEAST_S = 0.005
"""A rank that takes less than this longer than its peers is no straggler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a rank does by itself in each step."""

    own_s: float
    """Median time; 0: not known."""
    team: str = ""
    """Only ranks of the same text do the same work."""
    delay_s: float = 0.0
    """How long in each step it was ready to run and had no processor: that is not its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settling:
    """What an agent keeps of one worker between two beats."""

    known_s: float = 0.0
    """As reported last."""
    since: float | None = None
    """Since when it differs; None: it does not."""
    least_s: float = 0.0
    """Of the different ones that which differs least."""

    def is_due(self, now: float) -> bool:
        """Tell whether it differs for long enough to be reported."""
        return self.since is not None and now >= self.since + SETTLED_S

    def reported(self) -> "Settling":
        """Return the same after a report."""
        return Settling(known_s=self.least_s)


def settle(before: Settling, own_s: float, now: float) -> Settling:
    """Take what a beat tells. Noise, which is now on this side and now on that one, changes nothing."""
    known_s = before.known_s
    if not own_s or (known_s and known_s / _CHANGED < own_s < known_s * _CHANGED):
        return Settling(known_s=known_s)
    same_side = before.since is not None and (own_s > known_s) == (before.least_s > known_s)
    if not same_side:
        return Settling(known_s=known_s, since=now, least_s=own_s)
    least_s = min(own_s, before.least_s) if own_s > known_s else max(own_s, before.least_s)
    return Settling(known_s=known_s, since=before.since, least_s=least_s)


def scores(works: Mapping[int, Work]) -> dict[int, float]:
    """Return, per rank, how many times as long as the median it takes; who is not known is left out."""
    return {rank: own_s / median_s for rank, (own_s, median_s) in _compared(works).items()}


def compare(works: Mapping[int, Work], told: Iterable[int]) -> dict[int, str]:
    """Return the stragglers among all ranks with what there is to say of each.

    `told` are those of the last time: they remain stragglers a little longer. What a rank waited for a
    processor is taken from its time, and not from the median: on a crowded machine chance is no straggler.
    """
    known, found = frozenset(told), {}
    for rank, (own_s, median_s) in _compared(works).items():
        bound = _FINE if rank in known else _SLOW
        least_s = own_s - works[rank].delay_s
        if least_s >= bound * median_s and least_s - median_s >= _LEAST_S:
            found[rank] = (
                f"rank {rank} takes {own_s * 1000:.0f} ms for its own part of a step,"
                f" {own_s / median_s:.1f} times the median of {median_s * 1000:.0f} ms"
            )
    return found


def _compared(works: Mapping[int, Work]) -> dict[int, tuple[float, float]]:
    """Return, per rank, its own time and the median of its team."""
    teams: dict[str, dict[int, float]] = {}
    for rank, work in works.items():
        if work.own_s > 0:
            teams.setdefault(work.team, {})[rank] = work.own_s
    found: dict[int, tuple[float, float]] = {}
    for team in teams.values():
        if len(team) > 1:
            # The lower one of two: where half of the ranks are slow, it is they who are.
            median_s = sorted(team.values())[(len(team) - 1) // 2]
            found.update({rank: (own_s, median_s) for rank, own_s in team.items()})
    return found
