"""Which alarms were false, as far as the event logs can tell.

An incident is explained by a drill that hit one of its ranks or hosts, or by something that ended of
itself: a process, a lease. One that was only noticed (silence, a rank that stands still) may be real or not,
and nobody knows which, unless faults are being injected: then it should have been one of them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from frun.account.story import Drill, Story


class KnownBy(StrEnum):
    """What tells that an incident was real."""

    DRILL = "drill"
    END = "end"
    """Something ended of itself."""
    NOTICE = "notice"
    """It was noticed, and frun ended what it took for the cause."""
    NOTHING = "nothing"
    """No fault: the world grew, or a host was left before it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarms:
    """The account of false alarms."""

    nothing_came: int
    """Notices after which nothing had to be done."""
    unexplained: int | None
    """Incidents that were only noticed, in a job with drills; None: without drills nobody knows."""

    @property
    def count(self) -> int:
        """How many alarms were false."""
        return self.nothing_came + (self.unexplained or 0)

    @property
    def how(self) -> str:
        """How that number is derived."""
        if self.unexplained is None:
            return (
                "notices after which nothing had to be done; whether incidents that were only noticed"
                " were real is not known, for no fault was injected"
            )
        return (
            "notices after which nothing had to be done, and incidents that were only noticed and that no"
            " drill explains"
        )


def drill_of(story: Story, generation: int, record: Mapping[str, Any]) -> Drill | None:
    """Return the latest drill that hit a rank or a host of this incident since the generation before it."""
    tables = {each.number: each.table_us for each in story.generations}
    until_us = tables.get(generation, 0)
    since_us = max((us for number, us in tables.items() if number < generation), default=0)
    found = [
        drill
        for drill in story.drills
        if since_us <= drill.at_us <= until_us
        and (drill.rank in record["ranks"] or drill.host in record["hosts"] or not record["ranks"])
    ]
    return found[-1] if found else None


def known_by(story: Story, generation: int, record: Mapping[str, Any]) -> KnownBy:
    """Return what tells that the incident that made a generation was real."""
    if record["kind"] == "membership":
        return KnownBy.NOTHING
    if drill_of(story, generation, record) is not None:
        return KnownBy.DRILL
    if record["kind"] == "drain":
        return KnownBy.NOTHING
    noticed = any(notice.generation == generation for notice in story.noticed)
    return KnownBy.NOTICE if noticed else KnownBy.END


def alarms(story: Story, known: Iterable[KnownBy]) -> Alarms:
    """Count them, from what is known of each incident."""
    unexplained = sum(each is KnownBy.NOTICE for each in known)
    return Alarms(
        nothing_came=sum(notice.for_nothing for notice in story.noticed),
        unexplained=unexplained if story.drills else None,
    )
