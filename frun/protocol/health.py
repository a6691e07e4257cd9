"""What is known of a host's devices and of the host itself, and what follows from it. Pure.

A check reports facts, in each poll again for as long as they hold. `judge` says which of them are new, which
are gone, and whose workers have to be replaced; what a lasting fault means for the host is `ranks`'.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from frun.protocol.classes import FaultClass

HOLD_S = 5.0
"""A fact that is not reported for so long is gone; faults of one device within this time are one fault."""
_MOST = 16
"""Facts of one host with which no further warning is kept: they travel in its record through etcd."""
_LONGEST = 200


class Severity(StrEnum):
    """What a fact means for those who work there."""

    WARNING = "warning"
    """They go on; other hosts are preferred to this one for newcomers, and instead of it if it lasts."""
    FAULT = "fault"
    """They are of no use any more and are replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One thing that is wrong with a device, or with the whole host."""

    name: str
    """What it is, in a word; by it the fact is known again in the next poll."""
    severity: Severity
    fault_class: FaultClass
    reason: str
    """The evidence, on one line."""
    device: int | None = None
    """The device that the worker of this local rank uses; None: the whole host."""
    lasting: bool = False
    """Of a fault: nothing can run there for as long as it is reported. Of a warning: a fault will follow, and
    the host is left before that if it can be."""
    check: str = ""
    """Who reports it; set by whoever polls the check."""

    @property
    def foretells(self) -> bool:
        """True when the host is still fit for work, and should be left before it is not."""
        return self.lasting and self.severity is Severity.WARNING

    @property
    def forbids(self) -> bool:
        """True when the host is not fit for work."""
        return self.lasting and self.severity is Severity.FAULT

    def __str__(self) -> str:
        """Say it in words."""
        where = "" if self.device is None else f"device {self.device}: "
        return f"{self.check}: {where}{self.reason}"


def warning(
    name: str, reason: str, fault_class: FaultClass = FaultClass.UNKNOWN, *, check: str = ""
) -> Fact:
    """Return a fact about the whole host, or about a check itself, that ends nothing."""
    return Fact(
        name=name, severity=Severity.WARNING, fault_class=fault_class, reason=reason, check=check
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A fact that holds, and its times on the agent's own clock."""

    fact: Fact
    """As it was first reported: figures in its reason may have changed since."""
    since: float
    seen_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What the latest facts mean."""

    known: tuple[Known, ...]
    new: tuple[Fact, ...] = ()
    gone: tuple[Fact, ...] = ()
    struck: tuple[tuple[int, Fact], ...] = ()
    """Local ranks whose workers have to be replaced, and why."""


def judge(known: Sequence[Known], facts: Iterable[Fact], now: float, nproc: int) -> Judged:
    """Return what holds now, from what held before and what was reported just now.

    Devices that no worker uses count for nothing. A worker is replaced once for a fault, however long that is
    reported: another one may fare better, and whether the host still counts is the leader's to say.
    """
    reported = {_key(fact): _short(fact) for fact in facts if _matters(fact, nproc)}
    before = {_key(each.fact): each for each in known}
    held = [
        replace(each, seen_at=now) if key in reported else each
        for key, each in before.items()
        if key in reported or now - each.seen_at < HOLD_S
    ]
    fresh = [fact for key, fact in reported.items() if key not in before]
    faults = [fact for fact in fresh if fact.severity is Severity.FAULT]
    warnings = [fact for fact in fresh if fact.severity is not Severity.FAULT]
    room = max(0, _MOST - len(held) - len(faults))
    new = sorted(faults, key=lambda fact: not fact.lasting) + warnings[:room]
    struck: dict[int, Fact] = {}
    for fact in new:
        if fact.severity is Severity.FAULT:
            for local_rank in ranks_of(fact, nproc):
                if calm_in_s(known, local_rank, now, nproc) == 0:
                    struck.setdefault(local_rank, fact)
    kept = {_key(each.fact) for each in held}
    return Judged(
        known=(*held, *(Known(fact=fact, since=now, seen_at=now) for fact in new)),
        new=tuple(new),
        gone=tuple(each.fact for key, each in before.items() if key not in kept),
        struck=tuple(sorted(struck.items(), key=lambda item: item[0])),
    )


def calm_in_s(known: Iterable[Known], local_rank: int, now: float, nproc: int) -> float:
    """Return how long a further fault of a worker's device would still count as one that is known."""
    ages = (
        now - each.since
        for each in known
        if each.fact.severity is Severity.FAULT and local_rank in ranks_of(each.fact, nproc)
    )
    return max((HOLD_S - age for age in ages if age < HOLD_S), default=0.0)


def ranks_of(fact: Fact, nproc: int) -> range:
    """Return the local ranks that a fact is about."""
    return range(nproc) if fact.device is None else range(fact.device, fact.device + 1)


def _matters(fact: Fact, nproc: int) -> bool:
    return fact.device is None or 0 <= fact.device < nproc


def _key(fact: Fact) -> tuple[str, str, Severity, int | None, bool]:
    return fact.check, fact.name, fact.severity, fact.device, fact.lasting


def _short(fact: Fact) -> Fact:
    line = " ".join(fact.reason.split())
    return replace(fact, reason=line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "...")
