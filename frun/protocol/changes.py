"""How one rank table differs from the one before it: what all hosts are sent instead of thousands of places.

The whole table stays in etcd under its own key, for whoever begins to follow or has missed a change. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from frun.protocol.records import RankTable, Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One place that is not as the rest are."""

    at: int
    slot: Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class TableChange:
    """`news`, written in one transaction with each rank table."""

    table: RankTable
    """The new table, without its places."""
    base: int = 0
    """Revision of the table that this changes; 0: it is not told by its difference, read it whole."""
    renewed: bool = False
    """In places that are not named all workers are new; else these places are as they were."""
    places: tuple[Placed, ...] = ()

    def __hash__(self) -> int:
        """Return something cheap; equality is decided by all fields."""
        return hash((self.base, len(self.places)))


def between(old: RankTable | None, revision: int, new: RankTable) -> TableChange:
    """Return how to get from `old`, stored at `revision`, to `new`; if that is worth it."""
    whole = TableChange(table=replace(new, slots=()))
    if old is None or not revision or len(old.slots) != len(new.slots):
        return whole
    places = _different(old.slots, new.slots)
    renewed = 2 * len(places) > len(new.slots)
    if renewed:
        places = _different([_renew(slot, new.generation) for slot in old.slots], new.slots)
        if 2 * len(places) > len(new.slots):
            return whole
    return replace(whole, base=revision, renewed=renewed, places=tuple(places))


@lru_cache(maxsize=2)
def apply(old: RankTable, change: TableChange) -> RankTable:
    """Return the table that `change` makes of the one at its base revision.

    The latest ones are kept: all agents of one process share the work.
    """
    generation = change.table.generation
    slots = [_renew(slot, generation) for slot in old.slots] if change.renewed else list(old.slots)
    for place in change.places:
        slots[place.at] = place.slot
    return replace(change.table, slots=tuple(slots))


def _different(old: Sequence[Slot], new: Sequence[Slot]) -> list[Placed]:
    pairs = enumerate(zip(old, new, strict=True))
    return [
        Placed(at=at, slot=theirs)
        for at, (ours, theirs) in pairs
        if ours is not theirs and ours != theirs
    ]


def _renew(slot: Slot, generation: int) -> Slot:
    return replace(slot, incarnations=(generation,) * slot.nproc)
