"""What one decision reads, and the ways in which it can end: stay, write, fail, next generation.

Shared by the phases in `decide` and `gather`; pure like them.
"""

from dataclasses import dataclass, replace

from frun.protocol import classify, hangs, ranks, survival
from frun.protocol.hangs import Hang, Standing
from frun.protocol.policy import Decision, Policy, Seen
from frun.protocol.ranks import Kept
from frun.protocol.records import (
    Failure,
    HostReport,
    Incident,
    Phase,
    RankTable,
    Slot,
    View,
    WorkerState,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Everything one decision reads."""

    view: View
    table: RankTable
    seen: Seen
    policy: Policy
    now: float


def next_generation(
    case: Case,
    *,
    lost: frozenset[str],
    reason: str,
    kept: Kept,
    incident: Incident,
    restarts: int | None = None,
    failure: Failure | None = None,
    dropped: str = "",
    formed: bool = True,
) -> Decision:
    """Make the table of generation g+1: RECOVER if every place is taken, else GATHER.

    Not `formed`: the present one ends before it ran, since a survivor died. There are only so many of
    them, so that is nothing for the breaker.
    """
    table, policy = case.table, case.policy
    generation = table.generation + 1
    barren = survival.barren_after(table, reports(case))
    unformed = (table.unformed + (0 if formed else 1)) if barren else 0
    if kept and formed and barren - unformed >= policy.breaker:
        return fail(
            case,
            f"{barren - unformed} generations in a row ended without one completed step; the last: {reason}",
            failure=failure,
            exit_code=survival.EXIT_NO_PROGRESS,
        )
    if kept and policy.max_recoveries is not None and table.recoveries >= policy.max_recoveries:
        return fail(
            case, f"{reason}, and recoveries are used up (--max-recoveries {policy.max_recoveries})"
        )
    out = (*table.dropped, dropped) if dropped else table.dropped
    slots = ranks.vacate(table.slots, lost)
    slots = ranks.fill(slots, ranks.waiting(case.view, table.slots, without=out))
    full = ranks.is_full(slots)
    return write(
        case,
        RankTable(
            generation=generation,
            phase=Phase.RECOVER if full else Phase.GATHER,
            reason=reason,
            restarts=table.restarts if restarts is None else restarts,
            recoveries=table.recoveries + (1 if kept else 0),
            barren=barren,
            unformed=unformed,
            resumable=survival.is_resumable(table, reports(case)),
            slots=ranks.number(slots, generation, kept) if full else ranks.mark(slots, kept),
            failure=failure,
            incident=incident,
            dropped=out,
        ),
    )


def survivors(
    case: Case, lost: frozenset[str], *, hung: frozenset[tuple[str, int]] = frozenset()
) -> Kept:
    """Return the processes that go on: none if the state is lost with those that do not.

    Before RUN they are those of the table that still live. `hung` ones (host, local rank) live, and are
    of no use.
    """
    kept = {at: since for at, since in _alive(case, lost).items() if at not in hung}
    return {} if survival.state_is_gone(case.table, reports(case), kept) else kept


def _alive(case: Case, lost: frozenset[str]) -> Kept:
    if case.table.phase is Phase.RUN:
        resumable = survival.is_resumable(case.table, reports(case))
        return survival.survivors(reports(case), lost) if resumable else {}
    dead = set(survival.dead_survivors(case.table, reports(case)))
    return {
        place: incarnation
        for place, incarnation in survival.kept_of(case.table).items()
        if place[0] not in lost and place not in dead
    }


def failure_incident(
    case: Case, cause: str, kind: str, action: str, lost: frozenset[str], failure: Failure
) -> Incident:
    """Describe failed workers, of which `failure` is the cause, and hosts lost at the same time."""
    first = {slot.host: slot.first_rank for slot in case.table.slots}
    failed = [
        (report.host, first[report.host] + worker.local_rank)
        for report in reports(case)
        if not report.at_work
        for worker in report.workers
        if worker.state is WorkerState.FAILED
    ]
    numbers = {rank for _, rank in failed} | set(ranks_of(case, lost))
    return Incident(
        cause=cause,
        kind=kind,
        action=action,
        ranks=tuple(sorted(numbers)),
        hosts=tuple(sorted({host for host, _ in failed} | lost)),
        fault_class=failure.fault_class,
        evidence=failure.evidence,
    )


def ranks_of(case: Case, hosts: frozenset[str]) -> tuple[int, ...]:
    """Return the ranks on these hosts."""
    return tuple(
        slot.first_rank + local_rank
        for slot in case.table.slots
        if slot.host in hosts
        for local_rank in range(slot.nproc)
    )


def lost_hosts(case: Case) -> tuple[frozenset[str], float | None]:
    """Return members that are certainly dead or unfit, and until when the absence of others proves nothing.

    Law 7: a leader that is new, or was cut off from etcd, gives hosts one lease time to show up again,
    unless it saw their record vanish itself. A host that answers is not lost: etcd can end leases too early.
    """
    missing = {s.host for s in case.table.slots if s.host and s.host not in case.view.hosts}
    missing -= case.view.answering
    sure_at = case.view.watching_since + case.policy.lease_ttl_s
    left = _unfit_members(case)
    if case.now >= sure_at:
        return left | missing, None
    lost = missing & case.view.gone
    return left | lost, sure_at if missing - lost else None


def _unfit_members(case: Case) -> frozenset[str]:
    """Return members that can't go on; whose workers have ended well need not."""
    sick = ranks.unfit(case.view.hosts)
    return frozenset(
        host
        for host in sick
        if case.table.slot_of(host) is not None and not slot_succeeded(case, host)
    )


def lost_reason(case: Case, lost: frozenset[str]) -> str:
    """Name the lost hosts and their ranks, and why those that are there are none."""
    named = [
        (place_text(slot), case.view.hosts.get(slot.host))
        for slot in case.table.slots
        if slot.host in lost
    ]
    dead = [text for text, record in named if record is None]
    more = f" and {len(dead) - 3} more" if len(dead) > 3 else ""
    parts = [f"lost {', '.join(dead[:3])}{more}"] if dead else []
    unfit = [f"{text} is not fit: {record.unfit}" for text, record in named if record is not None]
    return "; ".join(parts + unfit[:3])


def loss_incident(case: Case, lost: frozenset[str], cause: str, action: str) -> Incident:
    """Describe the loss of hosts: dead ones, or only such as have a device that is of no use."""
    facts = [
        record.unfit
        for record in (case.view.hosts.get(host) for host in sorted(lost))
        if record is not None and record.unfit is not None
    ]
    alive = len(facts) == len(lost)
    found = classify.of_fact(facts[0]) if alive else classify.LOST_HOST
    return Incident(
        cause=cause,
        kind="device" if alive else "host",
        action=action,
        ranks=ranks_of(case, lost),
        hosts=tuple(sorted(lost)),
        fault_class=found.fault_class,
        evidence=found.evidence,
    )


def unfit_text(case: Case) -> str:
    """Name the hosts that are here and count for nothing, behind what is waited for."""
    facts = {host: case.view.hosts[host].unfit for host in sorted(ranks.unfit(case.view.hosts))}
    parts = [f"{host} is not fit: {fact}" for host, fact in facts.items()]
    return "".join(f"; {part}" for part in parts[:3])


def place_text(slot: Slot) -> str:
    """Name a member and its ranks."""
    last = slot.first_rank + slot.nproc - 1
    numbers = f"rank {last}" if slot.nproc == 1 else f"ranks {slot.first_rank}-{last}"
    return f"host {slot.host} ({numbers})"


def reports(case: Case) -> list[HostReport]:
    """Return members' reports about the stored generation; anything else is old news (law 4)."""
    members = {slot.host for slot in case.table.slots}
    return [
        report
        for report in case.view.reports.values()
        if report.host in members and report.generation == case.table.generation
    ]


def hang(case: Case) -> Hang | None:
    """Return what is wrong if all ranks stand still."""
    # Thousands of ranks are compared only when no host is at work.
    at_work = any(report.at_work for report in reports(case))
    return None if at_work else hangs.judge(_standings(case))


def _standings(case: Case) -> dict[int, Standing | None]:
    """Return for each rank whether it stands still; None also if it does not run or is not known."""
    found: dict[int, Standing | None] = dict.fromkeys(range(case.table.world_size))
    first = {slot.host: slot.first_rank for slot in case.table.slots}
    for report in reports(case):
        for worker in report.workers:
            if worker.state is WorkerState.RUNNING:
                found[first[report.host] + worker.local_rank] = worker.standing
    return found


def slot_succeeded(case: Case, host: str) -> bool:
    """Return True when every worker of this host ended with 0 in the stored generation."""
    report = case.view.reports.get(host)
    if report is None or report.generation != case.table.generation or not report.workers:
        return False
    return all(worker.state is WorkerState.SUCCEEDED for worker in report.workers)


def all_succeeded(case: Case) -> bool:
    """Return True when every worker of the job ended with 0."""
    return all(slot_succeeded(case, slot.host) for slot in case.table.slots)


def short(failure: Failure) -> str:
    """Return a failure's first line."""
    return failure.message.splitlines()[0][:200] if failure.message else str(failure.exit_code)


def write(case: Case, table: RankTable) -> Decision:
    """Decide to store this table."""
    return Decision(table=table, seen=case.seen, reason=table.reason)


def fail(case: Case, reason: str, failure: Failure | None = None, exit_code: int = 1) -> Decision:
    """Decide that the job is over, without success."""
    known = failure if failure is not None else case.table.failure
    return write(
        case,
        replace(case.table, phase=Phase.FAILED, reason=reason, failure=known, exit_code=exit_code),
    )


def stay(
    case: Case, reason: str, *, seen: Seen | None = None, wake_at: float | None = None
) -> Decision:
    """Decide to change nothing for now, and say what is waited for."""
    return Decision(
        table=None, seen=case.seen if seen is None else seen, reason=reason, wake_at=wake_at
    )
