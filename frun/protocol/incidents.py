"""The account of one fault and its recovery, put together from what all hosts measured. Pure.

Durations come from each host's own clock; the job's is the longest of them, since every phase ends with
the last host.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from frun.protocol import classify
from frun.protocol.classes import FaultClass
from frun.protocol.records import HostRecord, HostReport, Phase, RankTable, Recovery

KEPT = 100
"""Closed incidents that stay in etcd; the event logs hold all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentRecord:
    """`incidents/<id>`: what happened, what was done, how long each phase took (seconds)."""

    id: int
    """The generation that the incident made; a job's incidents have increasing ids."""
    generation: int
    cause: str
    kind: str
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    action: str
    detect_s: float = 0.0
    pause_s: float = 0.0
    respawn_s: float = 0.0
    rebuild_s: float = 0.0
    agree_s: float = 0.0
    copy_s: float = 0.0
    first_step_s: float = 0.0
    total_s: float = 0.0
    copied_bytes: int = 0
    steps_lost: int = 0
    resumed_at_step: int = 0
    fault_class: FaultClass | None = None
    """None: nothing was wrong."""
    evidence: str = ""
    """What speaks for that class."""


def summarize(
    table: RankTable | None, reports: Mapping[str, HostReport], lease_ttl_s: float
) -> IncidentRecord | None:
    """Return the incident that made this generation once every member is in it; None before.

    The detection of a lost host is its lease: at most that long (and what etcd adds) went by unseen, unless
    another host saw that its agent was gone.
    """
    if table is None or table.incident is None or table.phase not in (Phase.RUN, Phase.DONE):
        return None
    times: list[Recovery] = []
    for slot in table.slots:
        report = reports.get(slot.host)
        current = report is not None and report.generation == table.generation
        if report is None or not current or report.recovery is None:
            return None
        times.append(report.recovery)
    incident = table.incident
    detect_s = max(time.detect_s for time in times)
    unseen_s = lease_ttl_s if incident.kind == "host" and detect_s == 0.0 else 0.0
    return IncidentRecord(
        id=table.generation,
        generation=table.generation,
        cause=incident.cause,
        kind=incident.kind,
        ranks=incident.ranks,
        hosts=incident.hosts,
        action=incident.action,
        detect_s=_seconds(max(detect_s, unseen_s)),
        pause_s=_seconds(max(time.pause_s for time in times)),
        respawn_s=_seconds(max(time.respawn_s for time in times)),
        rebuild_s=_seconds(max(time.rebuild_s for time in times)),
        agree_s=_seconds(max(time.agree_s for time in times)),
        copy_s=_seconds(max(time.copy_s for time in times)),
        first_step_s=_seconds(max(time.first_step_s for time in times)),
        total_s=_seconds(max(time.total_s for time in times) + max(0.0, unseen_s - detect_s)),
        copied_bytes=sum(time.copied_bytes for time in times),
        steps_lost=max(time.steps_lost for time in times),
        resumed_at_step=max(time.step for time in times),
        fault_class=incident.fault_class,
        evidence=incident.evidence,
    )


def renamed(
    records: Iterable[IncidentRecord], hosts: Mapping[str, HostRecord]
) -> tuple[IncidentRecord, ...]:
    """Return the accounts whose class is another one now that a lost host is back.

    While a host is away nobody can tell one that is off from one that is cut off. A host comes back under its
    id only if its agent lived, and that knows whether it reached etcd. It speaks of its last loss alone.
    """
    newest = sorted(records, key=lambda record: record.id, reverse=True)
    found: dict[int, IncidentRecord] = {}
    for name, host in hosts.items():
        if host.cut_off_s:
            record = next((record for record in newest if name in record.hosts), None)
            if record is not None and record.evidence == classify.LOST_HOST.evidence:
                finding = classify.of_cut_off(host.cut_off_s)
                found[record.id] = replace(
                    record, fault_class=finding.fault_class, evidence=finding.evidence
                )
    return tuple(found.values())


def outdated(stored: Sequence[str], kept: int = KEPT) -> Sequence[str]:
    """Return the keys, oldest first, that must go so that `kept` are left once one more is stored."""
    return stored[: max(0, len(stored) + 1 - kept)]


def _seconds(value: float) -> float:
    return round(float(value), 4)  # a lease may be a whole number, and JSON tells the two apart
