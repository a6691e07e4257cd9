"""The job's state machine: from one snapshot of etcd to the next rank table, with the reason.

`decide` is the only place that makes a new generation or a new phase. It is pure: the same snapshot,
stopwatches, policy and `now` give the same decision, so a new leader goes on from etcd alone, and a
decision can be replayed from a log. It is level-triggered: it reads where things stand, never what just
happened, so a lost event does not matter. The phases (drawn in docs/protocol.md):

    GATHER  -> RECOVER      the world is complete, or as complete as the policy lets it be
            -> FAILED       too few hosts came in time
    RECOVER -> RUN          every member stopped what is old and prepared the group store
            -> RECOVER, GATHER of the next generation     a member was lost meanwhile
            -> FAILED       a member does not get ready
    RUN     -> DONE         every worker ended with 0
            -> RECOVER of the next generation    a worker failed, a host joined, a spare replaces a host
            -> GATHER of the next generation     a host was lost and nobody is there to take its ranks
            -> FAILED       the restarts are used up, or the world can not be whole again
"""

from dataclasses import replace

from frun.protocol import blame, classify, hangs, ranks, survival
from frun.protocol.case import (
    Case,
    all_succeeded,
    fail,
    failure_incident,
    hang,
    loss_incident,
    lost_hosts,
    lost_reason,
    next_generation,
    reports,
    short,
    slot_succeeded,
    stay,
    survivors,
    write,
)
from frun.protocol.gather import gather
from frun.protocol.hangs import Hang
from frun.protocol.planned import before_it_fails, growth
from frun.protocol.policy import Decision, Policy, Seen
from frun.protocol.records import Failure, Incident, Phase, RankTable, View, WorkerState

__all__ = ["Decision", "Policy", "Seen", "decide"]


def decide(view: View, seen: Seen, policy: Policy, now: float) -> Decision:
    """Return the next rank table, or none, with the reason in words.

    `now` and the times in `seen` and `view.watching_since` are one process's monotonic seconds.
    """
    table = view.table
    if table is None:
        first = RankTable(generation=1, phase=Phase.GATHER, reason="waiting for hosts")
        return Decision(table=first, seen=seen, reason=first.reason)
    if (seen.generation, seen.phase) != (table.generation, table.phase):
        seen = Seen(generation=table.generation, phase=table.phase, since=now)
    case = Case(view=view, table=table, seen=seen, policy=policy, now=now)
    match table.phase:
        case Phase.GATHER:
            return gather(case)
        case Phase.RECOVER:
            return _recover(case)
        case Phase.RUN:
            return _run(case)
        case Phase.DONE | Phase.FAILED:
            return stay(case, table.reason)


# -- RECOVER ----------------------------------------------------------------------------------------


def _recover(case: Case) -> Decision:
    lost, unsure_until = lost_hosts(case)
    if lost:
        return _after_loss(case, lost)
    table = case.table
    dead = survival.dead_survivors(table, reports(case))
    if dead:
        return _after_death_in_recovery(case, dead)
    ready = [r for r in reports(case) if r.prepared]
    if len(ready) == len(table.slots):
        first = next(r for r in ready if r.host == table.slots[0].host)
        return write(
            case,
            replace(
                table,
                phase=Phase.RUN,
                master_addr=table.slots[0].address,
                master_port=first.master_port,
                reason=f"{len(table.slots)} hosts, {table.world_size} ranks; {table.reason}",
            ),
        )
    deadline = case.seen.since + case.policy.prepare_timeout_s
    waiting_for = sorted({slot.host for slot in table.slots} - {report.host for report in ready})
    names = ", ".join(waiting_for[:5]) + (" ..." if len(waiting_for) > 5 else "")
    if case.now >= deadline:
        return fail(
            case, f"not ready within {case.policy.prepare_timeout_s:g} s: {names}; {table.reason}"
        )
    wake_at = deadline if unsure_until is None else min(deadline, unsure_until)
    return stay(case, f"waiting until {names} are ready; {table.reason}", wake_at=wake_at)


# -- RUN --------------------------------------------------------------------------------------------


def _run(case: Case) -> Decision:
    lost, unsure_until = lost_hosts(case)
    if all_succeeded(case):
        return write(
            case, replace(case.table, phase=Phase.DONE, reason="every worker ended with 0")
        )
    failures = blame.ranked(
        worker.failure
        for report in reports(case)
        if not report.at_work and report.host not in lost
        for worker in report.workers
        if worker.state is WorkerState.FAILED and worker.failure is not None
    )
    if failures and blame.is_clear(failures[0]):
        if _is_starting(case, lost):
            # In a moment they run, and can go on; what is only asked for would be started in vain.
            return stay(case, f"rank {failures[0].rank} failed; others are just being started")
        return _after_failure(case, failures[0], lost)
    if lost:
        return _after_loss(case, lost)
    if failures:
        return _settle(case, failures[0])
    found = hang(case)
    if found is not None:
        return _after_hang(case, found, unsure_until)
    case = replace(case, seen=replace(case.seen, stall_since=None))
    planned = growth(case)
    if planned is None and unsure_until is None:
        planned = before_it_fails(case)
    if planned is not None:
        return planned
    return stay(case, case.table.reason, wake_at=unsure_until)


def _is_starting(case: Case, lost: frozenset[str]) -> bool:
    """Tell whether a worker was asked for that neither runs nor has failed to; its agent bounds that."""
    return any(
        worker.state is WorkerState.STARTING
        for report in reports(case)
        if not report.at_work and report.host not in lost
        for worker in report.workers
    )


def _settle(case: Case, victim: Failure) -> Decision:
    """Wait a little for the cause: a death nearby, or a host whose lease has not run out yet."""
    since = case.now if case.seen.failure_since is None else case.seen.failure_since
    longest = case.policy.settle_s
    if len(case.table.slots) > 1:
        longest = max(longest, case.policy.lease_ttl_s + 1.0)
    if case.now >= since + longest:
        return _after_failure(case, victim, frozenset())
    return stay(
        case,
        f"rank {victim.rank} failed as a victim would; looking for the cause",
        seen=replace(case.seen, failure_since=since),
        wake_at=since + longest,
    )


def _after_failure(case: Case, cause: Failure, lost: frozenset[str]) -> Decision:
    """Replace what died if others can go on; else restart all workers if the budget allows.

    A failure of the user's code costs a restart in either case. With none left the job goes on without
    that host if the world may shrink, and ends if not.
    """
    table, policy = case.table, case.policy
    what = f"rank {cause.rank} on {cause.host} failed ({short(cause)})"
    kept = survivors(case, lost) if cause.kind != survival.NO_DONOR else {}
    users = survival.is_users(cause)
    action = "replace-worker" if kept else "restart-all"
    incident = failure_incident(case, what, "user" if users else "process", action, lost, cause)
    if kept and not users:
        reason = f"{what}: {len(kept)} processes go on"
        return next_generation(
            case, lost=lost, reason=reason, failure=cause, kept=kept, incident=incident
        )
    if table.restarts < policy.max_restarts:
        used = table.restarts + 1
        return next_generation(
            case,
            lost=lost,
            reason=f"{what}: restart {used} of {policy.max_restarts}",
            restarts=used,
            failure=cause,
            kept=kept,
            incident=incident,
        )
    left = [slot for slot in table.slots if slot.host not in lost and slot.host != cause.host]
    if policy.min_hosts < policy.max_hosts and len(left) >= policy.min_hosts:
        return next_generation(
            case,
            lost=lost | {cause.host},
            reason=f"{what}, restarts are used up ({table.restarts} of {policy.max_restarts}):"
            " going on without that host",
            failure=cause,
            dropped=cause.host,
            kept=survivors(case, lost | {cause.host}) if kept else {},
            incident=replace(incident, action="shrink"),
        )
    used_up = f"restarts are used up ({table.restarts} of {policy.max_restarts})"
    return fail(case, f"{what} and {used_up}", failure=cause)


def _after_hang(case: Case, found: Hang, unsure_until: float | None) -> Decision:
    """Replace the ranks that hang; where all wait for each other let the same processes try again.

    Only in time: what a report says can be of the generation before for a moment.
    """
    limit_s, seen = case.policy.hang_s, case.seen
    due = seen.since + limit_s
    if not found.ranks:
        since = case.now if seen.stall_since is None else seen.stall_since
        seen, due = replace(seen, stall_since=since), max(due, since + hangs.link_s(limit_s))
    if case.now < due:
        wake_at = due if unsure_until is None else min(due, unsure_until)
        return stay(case, found.reason, seen=seen, wake_at=wake_at)
    places = {
        (slot.host, rank - slot.first_rank)
        for slot in case.table.slots
        for rank in found.ranks
        if slot.first_rank <= rank < slot.first_rank + slot.nproc
    }
    kept = survivors(case, frozenset(), hung=frozenset(places))
    action = "replace-worker" if kept else "restart-all"
    named = classify.of_hang(found)
    incident = Incident(
        cause=found.reason,
        kind="hang" if found.ranks else "link",
        action=action if found.ranks else "retry",
        ranks=found.ranks,
        hosts=tuple(sorted({host for host, _ in places})),
        fault_class=named.fault_class,
        evidence=named.evidence,
    )
    none: frozenset[str] = frozenset()
    if kept:
        return next_generation(
            case,
            lost=none,
            reason=f"{found.reason}: {len(kept)} processes go on",
            kept=kept,
            incident=incident,
        )
    return _restart_all(case, found.reason, incident, None)


def _restart_all(case: Case, reason: str, incident: Incident, failure: Failure | None) -> Decision:
    """Begin anew with all workers, since the state has gone with some; that costs a restart.

    `failure` is that of one of them, if it did not just end.
    """
    table, policy = case.table, case.policy
    if table.restarts >= policy.max_restarts:
        used_up = f"restarts are used up ({table.restarts} of {policy.max_restarts})"
        return fail(case, f"{reason} and {used_up}", failure=failure)
    used = table.restarts + 1
    return next_generation(
        case,
        lost=frozenset(),
        reason=f"{reason}: restart {used} of {policy.max_restarts}",
        restarts=used,
        failure=failure,
        kept={},
        incident=incident,
    )


def _after_loss(case: Case, lost: frozenset[str]) -> Decision:
    """Replace lost hosts, or wait for hosts, unless a part of the job has already ended well."""
    finished = [slot.host for slot in case.table.slots if slot_succeeded(case, slot.host)]
    spares = ranks.waiting(case.view, case.table.slots, without=case.table.dropped)
    reason = lost_reason(case, lost)
    if finished and len(spares) < len(lost):
        return fail(
            case,
            f"{reason} after {finished[0]} had finished, and no spare is there to take its ranks",
        )
    action = "replace-host" if len(spares) >= len(lost) else "wait"
    return next_generation(
        case,
        lost=lost,
        reason=reason,
        kept=survivors(case, lost),
        incident=loss_incident(case, lost, reason, action),
    )


def _after_death_in_recovery(case: Case, dead: list[tuple[str, int]]) -> Decision:
    """A process that was to go on ended while it waited: it becomes a newcomer of the next one.

    If the state has ended with it all workers begin anew, which costs a restart as it does in RUN.
    """
    table = case.table
    first = {slot.host: slot.first_rank for slot in table.slots}
    numbers = tuple(sorted(first[host] + local_rank for host, local_rank in dead))
    several = "ranks {} died while they were paused"
    words = "rank {} died while it was paused" if len(numbers) == 1 else several
    reason = words.format(", ".join(map(str, numbers)))
    kept = survivors(case, frozenset())
    ended = blame.ranked(
        worker.failure
        for report in reports(case)
        for worker in report.workers
        if worker.failure is not None and (report.host, worker.local_rank) in dead
    )
    found = ended[0] if ended else classify.DEAD_WHILE_PAUSED
    incident = Incident(
        cause=reason,
        kind="process",
        action="replace-worker" if kept else "restart-all",
        ranks=numbers,
        hosts=tuple(sorted({host for host, _ in dead})),
        fault_class=found.fault_class,
        evidence=found.evidence,
    )
    none: frozenset[str] = frozenset()
    if kept:
        return next_generation(
            case, lost=none, reason=reason, kept=kept, incident=incident, formed=False
        )
    return _restart_all(case, reason, incident, ended[0] if ended else None)
