"""Planned changes of a world that runs well: hosts that join, and hosts that are left before they fail.

Part of `decide`, which asks for them when nothing is wrong; pure like it.
"""

from dataclasses import replace

from frun.protocol import classify, ranks
from frun.protocol.case import (
    Case,
    next_generation,
    place_text,
    ranks_of,
    reports,
    slot_succeeded,
    stay,
    survivors,
)
from frun.protocol.health import Fact
from frun.protocol.policy import Decision
from frun.protocol.records import HostReport, Incident, Slot


def growth(case: Case) -> Decision | None:
    """Take in waiting hosts when the world is smaller than MAX."""
    room = case.policy.max_hosts - len(case.table.slots)
    free = ranks.waiting(case.view, case.table.slots, without=case.table.dropped)
    joiners = free[: max(room, 0)]
    if not joiners or any(slot_succeeded(case, slot.host) for slot in case.table.slots):
        return None
    since = case.now if case.seen.joiner_since is None else case.seen.joiner_since
    if case.now < since + case.policy.join_settle_s and len(joiners) < room:
        return stay(
            case,
            f"{len(joiners)} hosts want to join",
            seen=replace(case.seen, joiner_since=since),
            wake_at=since + case.policy.join_settle_s,
        )
    grown = case.table.slots + tuple(ranks.seat(host) for host in joiners)
    names = ", ".join(host.host for host in joiners[:5])
    reason = f"{names} joined: the world grows to {len(grown)} hosts"
    return next_generation(
        replace(case, table=replace(case.table, slots=grown)),
        lost=frozenset(),
        reason=reason,
        kept=survivors(case, frozenset()),
        incident=Incident(
            cause=reason,
            kind="membership",
            action="grow",
            hosts=tuple(host.host for host in joiners),
        ),
    )


def before_it_fails(case: Case) -> Decision | None:
    """Let a healthy spare take the place of a host whose check foretells a fault, if nothing is lost by that.

    One host at a time, while all train: what its workers hold is on another host too, and is so again before
    the next one is left. Never by the last recovery that is allowed.
    """
    foretold = _foretold(case)
    if not foretold:
        return None
    table, policy = case.table, case.policy
    spares = ranks.waiting(case.view, table.slots, without=table.dropped)
    if not spares or spares[0].health:
        return None
    if policy.max_recoveries is not None and table.recoveries + 1 >= policy.max_recoveries:
        return None
    known = {report.host: report for report in reports(case)}
    if len(known) < len(table.slots) or not all(map(_trains, known.values())):
        return None
    for slot, fact in foretold:
        lost = frozenset({slot.host})
        kept = survivors(case, lost)
        if kept and all(worker.homes > 1 for worker in known[slot.host].workers):
            found = classify.of_fact(fact)
            reason = f"{place_text(slot)} is left before it fails: {fact}"
            incident = Incident(
                cause=reason,
                kind="drain",
                action="replace-host",
                ranks=ranks_of(case, lost),
                hosts=(slot.host,),
                fault_class=found.fault_class,
                evidence=found.evidence,
            )
            return next_generation(case, lost=lost, reason=reason, kept=kept, incident=incident)
    return None


def _foretold(case: Case) -> list[tuple[Slot, Fact]]:
    """Return the places whose hosts should be left, and why."""
    records = ((slot, case.view.hosts.get(slot.host)) for slot in case.table.slots)
    return [
        (slot, fact)
        for slot, record in records
        if record is not None and record.health and (fact := record.foretold) is not None
    ]


def _trains(report: HostReport) -> bool:
    """Tell whether a host has completed a step, and all its workers run and hold what their replicas hold."""
    diverged = any(worker.diverged for worker in report.workers)
    return report.at_work and report.progress and not diverged
