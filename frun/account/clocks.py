"""Puts the entries of several hosts on one clock.

No wall clock is trusted for that where it can be helped: every host notes when it sees a new rank table, and
all see the same table within the milliseconds that etcd needs to tell them. The differences between these
sights are the differences between the clocks.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from frun.account.journal import Entry, Journal

_Mark = tuple[int, str, str, int]
_SAME_US = 1000
"""Agents of one machine have one clock: their wall and monotonic clocks are equally far apart. Machines that
booted within the same millisecond are taken for one."""


def aligned(journals: Sequence[Journal]) -> tuple[Journal, ...]:
    """Return the journals with all `at_us` on the clock of the one that saw the most tables.

    One that shares no table with any other is placed by its wall clock.
    """
    if not journals:
        return ()
    marks = [_marks(journal) for journal in journals]
    order = sorted(range(len(journals)), key=lambda i: (-len(marks[i]), journals[i].host))
    reference = order[0]
    common = dict(marks[reference])
    offsets = {reference: 0}
    left = order[1:]
    while left:
        # Those that share a table with what is placed already; then those that share one with these.
        near = [index for index in left if not marks[index].keys().isdisjoint(common)]
        for index in near or left:
            by_wall = _by_wall(journals[index]) - _by_wall(journals[reference])
            offset = 0 if abs(by_wall) < _SAME_US else _offset(marks[index], common)
            offsets[index] = by_wall if offset is None else offset
            for mark, at_us in marks[index].items():
                common.setdefault(mark, at_us + offsets[index])
        left = [index for index in left if index not in offsets]
    return tuple(_moved(journal, offsets[index]) for index, journal in enumerate(journals))


def _marks(journal: Journal) -> Mapping[_Mark, int]:
    """Return when each table was first seen; one that came twice is told from itself by its count."""
    marks: dict[_Mark, int] = {}
    seen: Counter[tuple[int, str, str]] = Counter()
    for entry in journal.all("phase_seen"):
        table = (entry.generation, entry.text("phase"), entry.text("reason"))
        marks[(*table, seen[table])] = entry.at_us
        seen[table] += 1
    return marks


def _offset(own: Mapping[_Mark, int], common: Mapping[_Mark, int]) -> int | None:
    differences = [common[mark] - own[mark] for mark in own.keys() & common.keys()]
    return round(median(differences)) if differences else None


def _by_wall(journal: Journal) -> int:
    entry = journal.entries[-1]
    return entry.wall_us - entry.at_us


def _moved(journal: Journal, offset: int) -> Journal:
    if offset == 0:
        return journal
    entries: tuple[Entry, ...] = tuple(
        replace(entry, at_us=entry.at_us + offset) for entry in journal.entries
    )
    return replace(journal, entries=entries)
