"""Reads the event logs of a job's agents: lines in, entries out, whatever is broken in them.

An entry's times are whole microseconds, so that sums of them are exact.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One event of one agent."""

    name: str
    host: str
    generation: int
    at_us: int
    """On the clock of the journal; after `clocks.aligned` on the one that all journals share."""
    wall_us: int
    """What the host's wall clock said, for people."""
    fields: Mapping[str, Any]

    def number(self, name: str) -> float:
        """Return a field that is a number; 0 when it is missing or something else."""
        value = self.fields.get(name)
        return value if isinstance(value, int | float) else 0

    def text(self, name: str) -> str:
        """Return a field that is a text; empty when it is missing or something else."""
        value = self.fields.get(name)
        return value if isinstance(value, str) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """All that one agent wrote, in its order."""

    job: str
    host: str
    entries: tuple[Entry, ...]
    broken: int = 0
    """Lines that could not be read: the last one of a host that lost its power, say."""
    source: str = field(default="", compare=False)
    """Where it was found."""

    def all(self, name: str) -> Iterator[Entry]:
        """Yield the entries of one event."""
        return (entry for entry in self.entries if entry.name == name)

    @property
    def run(self) -> str:
        """What the hosts of one run share; empty for an agent that never registered."""
        return next((entry.text("run") for entry in self.all("host_registered")), "")

    @property
    def began_wall_us(self) -> int:
        """Wall clock of the first entry."""
        return self.entries[0].wall_us if self.entries else 0


_OWN = {"schema", "event", "job", "host", "generation", "monotonic_s", "wall_s"}


def read_journal(lines: Iterable[str], source: str = "") -> Journal | None:
    """Return what an agent's event log says; None if no line is an event.

    Unknown events and fields are kept, for they may be of a later version.
    """
    entries: list[Entry] = []
    job = ""
    broken = 0
    for line in lines:
        if not line.strip():
            continue
        try:
            document = json.loads(line)
            entry = _entry(document)
            job = str(document["job"])
        except (ValueError, TypeError, KeyError, OverflowError):
            broken += 1
            continue
        entries.append(entry)
    if not entries:
        return None
    # Threads may have queued two events in another order than they read the clock.
    entries.sort(key=lambda entry: entry.at_us)
    return Journal(
        job=job, host=entries[-1].host, entries=tuple(entries), broken=broken, source=source
    )


def _entry(document: Mapping[str, Any]) -> Entry:
    return Entry(
        name=str(document["event"]),
        host=str(document["host"]),
        generation=int(document["generation"]),
        at_us=microseconds(document["monotonic_s"]),
        wall_us=microseconds(document["wall_s"]),
        fields={name: value for name, value in document.items() if name not in _OWN},
    )


def microseconds(seconds: float) -> int:
    """Return seconds as whole microseconds."""
    return round(seconds * 1_000_000)
