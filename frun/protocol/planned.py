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
from frun.protocol.records import HostReport, Incident, WorkerState


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

    One host at a time, after a step was completed: what its workers hold is on another host too, and is so
    again before the next one is left. Never by the last recovery that is allowed.
    """
    facts = _foretold(case)
    if not facts:
        return None
    table, policy = case.table, case.policy
    known = {report.host: report for report in reports(case)}
    spares = ranks.waiting(case.view, table.slots, without=table.dropped)
    if not any(report.progress for report in known.values()) or not spares or spares[0].health:
        return None
    if policy.max_recoveries is not None and table.recoveries + 1 >= policy.max_recoveries:
        return None
    for host, fact in facts.items():
        lost = frozenset({host})
        kept = survivors(case, lost)
        if kept and _is_held_elsewhere(known.get(host)):
            found = classify.of_fact(fact)
            reason = f"{place_text(case, host)} is left before it fails: {fact}"
            incident = Incident(
                cause=reason,
                kind="drain",
                action="replace-host",
                ranks=ranks_of(case, lost),
                hosts=(host,),
                fault_class=found.fault_class,
                evidence=found.evidence,
            )
            return next_generation(case, lost=lost, reason=reason, kept=kept, incident=incident)
    return None


def _foretold(case: Case) -> dict[str, Fact]:
    """Return the members that should be left, and why."""
    found: dict[str, Fact] = {}
    for slot in case.table.slots:
        record = case.view.hosts.get(slot.host)
        if record is not None and record.health and (fact := record.foretold) is not None:
            found[slot.host] = fact
    return found


def _is_held_elsewhere(report: HostReport | None) -> bool:
    """Tell whether a host's workers run, and all that they hold is on another host too."""
    return report is not None and all(
        worker.state is WorkerState.RUNNING and worker.homes > 1 for worker in report.workers
    )
