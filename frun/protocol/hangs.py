"""Which rank hangs, from where the main threads of all ranks stand. Pure.

When one rank hangs, all ranks stand still: the others wait for it in a collective. So a time limit alone
can't tell who is at fault, the places can. A worker tells its place to its agent; an agent reports it only
while the worker has not moved for long (`standing`); the leader compares all of them (`judge`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

FIRST_S = 600.0
"""How long a worker may take for its first step of a generation, once it has trained at all."""
_PATIENCE = 4
"""Each generation in a row without a step makes all bounds that many times longer."""
_LINK = 5
"""Where nobody is at fault the bound is that many times longer: lost packets come again by themselves."""


class Place(StrEnum):
    """Where the main thread of a worker is."""

    SCRIPT = "script"
    """In the script's own code, or in a library that it called."""
    LOADER = "loader"
    """Waits for a batch."""
    UPDATE = "update"
    COLLECTIVE = "collective"
    """Waits for other ranks."""
    PHASE = "phase"
    """Declared to take long, or known to: evaluation, checkpoint, compilation, import."""
    PAUSED = "paused"
    """Its generation is over; it leaves or waits for the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """What a worker tells of its main thread."""

    generation: int
    step: int
    """Completed updates."""
    completed: int
    """Those that this process did itself."""
    fresh: bool
    """It has not completed one in this generation."""
    recent_s: float
    """Longest but one of its latest steps."""
    place: str
    where: str
    """Line of the script."""
    still_s: float
    """How long it has not moved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """In a worker's report: it stands still for longer than it should."""

    place: Place
    step: int
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """What is wrong when all ranks stand still."""

    ranks: tuple[int, ...]
    """Who is at fault; empty: all wait for each other."""
    reason: str
    place: Place | None = None
    """Where the first of those at fault stands; None: nobody is."""
    where: str = ""
    """Its line of the script."""


def bound_s(position: Position, limit_s: float, barren: int) -> float | None:
    """Return how long a worker may stand at this position; None: for ever.

    `limit_s` is the least bound (0: none at all). `barren` generations ended without a step: then it was
    wrong to end the last one, or useless, and it takes more patience.
    """
    if not limit_s or position.place in (Place.PHASE, Place.PAUSED):
        return None
    if position.fresh:
        trained = position.completed or position.generation > 1
        return max(FIRST_S, 3 * position.recent_s) if trained else None
    return max(limit_s, 3 * position.recent_s) * float(_PATIENCE ** min(barren, 5))


def link_s(limit_s: float) -> float:
    """Return how long the leader waits before it ends a generation in which all wait for each other."""
    return (_LINK - 1) * limit_s


def standing(position: Position, limit_s: float, barren: int) -> Standing | None:
    """Return what there is to report of a worker at this position."""
    bound = bound_s(position, limit_s, barren)
    if bound is None or position.still_s < bound:
        return None
    return Standing(place=Place(position.place), step=position.step, where=position.where)


def judge(ranks: Mapping[int, Standing | None]) -> Hang | None:
    """Say who hangs, from the standing of all ranks (None: it moves, or may stand there)."""
    if len(ranks) < 2 or any(one is None for one in ranks.values()):
        return None
    known = {rank: one for rank, one in ranks.items() if one is not None}
    waiting = [rank for rank, one in known.items() if one.place is Place.COLLECTIVE]
    guilty = tuple(sorted(known.keys() - waiting))
    if not guilty:
        step = max(one.step for one in known.values())
        return Hang(
            ranks=(), reason=f"all ranks wait for each other in a collective of step {step}"
        )
    if len(guilty) > len(waiting):
        return None
    first = known[guilty[0]]
    at = f", at {first.where}" if first.where else ""
    several = f"ranks {_listed(guilty)} stand" if len(guilty) > 1 else f"rank {guilty[0]} stands"
    return Hang(
        ranks=guilty,
        reason=f"{several} still in the {first.place} of step {first.step}{at}, and the others wait",
        place=first.place,
        where=first.where,
    )


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
