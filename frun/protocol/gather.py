"""The GATHER phase: waiting for the first hosts, or for one that takes a vacant place.

Part of `decide`, which says when this phase is entered and left.
"""

from dataclasses import replace

from frun.protocol import ranks, survival
from frun.protocol.case import Case, fail, lost_hosts, reports, stay, unfit_text, write
from frun.protocol.policy import Decision
from frun.protocol.records import Phase, Slot


def gather(case: Case) -> Decision:
    """Decide in the GATHER phase: form the world, wait, shrink it, or give up."""
    lost, unsure_until = lost_hosts(case)
    slots = ranks.vacate(case.table.slots, lost)
    spares = ranks.waiting(case.view, slots, without=case.table.dropped)
    if not slots:
        return _gather_first(case, spares_count=len(spares))
    slots = ranks.fill(slots, spares)
    if unsure_until is not None:
        return stay(case, "waiting to see which hosts are alive", wake_at=unsure_until)
    if ranks.is_full(slots):
        return _form(case, slots, f"all {len(slots)} places are taken")
    return _gather_vacant(case, slots)


def _gather_first(case: Case, *, spares_count: int) -> Decision:
    """Form the first world: MAX hosts at once, or MIN after the last call, or give up."""
    policy, now, seen = case.policy, case.now, case.seen
    if spares_count >= policy.max_hosts:
        return _form_first(case, f"all {policy.max_hosts} hosts are here")
    if spares_count < policy.min_hosts:
        deadline = seen.since + policy.join_timeout_s
        unfit = unfit_text(case)
        reason = f"waiting for hosts: {spares_count} of {policy.min_hosts}{unfit}"
        if now >= deadline:
            return fail(
                case,
                f"only {spares_count} of {policy.min_hosts} hosts came within"
                f" {policy.join_timeout_s:g} s (join_timeout){unfit}",
            )
        return stay(case, reason, seen=replace(seen, enough_since=None), wake_at=deadline)
    since = now if seen.enough_since is None else seen.enough_since
    if now >= since + policy.last_call_s:
        return _form_first(case, f"{spares_count} hosts are here after the last call")
    return stay(
        case,
        f"last call for hosts: {spares_count} of at most {policy.max_hosts}",
        seen=replace(seen, enough_since=since),
        wake_at=since + policy.last_call_s,
    )


def _form_first(case: Case, reason: str) -> Decision:
    earliest = ranks.waiting(case.view, ())[: case.policy.max_hosts]
    ordered = ranks.order(earliest, case.view.joined)
    return _form(case, tuple(ranks.seat(host) for host in ordered), reason)


def _gather_vacant(case: Case, slots: tuple[Slot, ...]) -> Decision:
    """Wait for hosts that take vacant places; then shrink if the policy allows, else give up."""
    policy, now, since = case.policy, case.now, case.seen.since
    alive = tuple(slot for slot in slots if slot.host)
    vacant = len(slots) - len(alive)
    if len(alive) >= policy.min_hosts:
        deadline = since + policy.replace_timeout_s
        if now >= deadline:
            return _form(
                case,
                alive,
                f"nobody took {vacant} vacant places within {policy.replace_timeout_s:g} s: going on"
                f" with {len(alive)} hosts",
            )
    else:
        # A fixed world has one bound; an elastic one below MIN has torchrun's time to come back.
        fixed = policy.min_hosts == policy.max_hosts
        longest = max(policy.replace_timeout_s, 0 if fixed else policy.join_timeout_s)
        deadline = since + longest
        if now >= deadline:
            return fail(
                case,
                f"{vacant} of {len(slots)} places stayed vacant for {longest:g} s"
                f" (--replace-timeout) and {len(alive)} hosts are below the minimum of"
                f" {policy.min_hosts}; {case.table.reason}",
            )
    if [slot.host for slot in slots] != [slot.host for slot in case.table.slots]:
        slots = ranks.mark(slots, survival.kept_of(case.table))
        return write(case, replace(case.table, slots=slots))
    return stay(case, case.table.reason, wake_at=deadline)


def _form(case: Case, slots: tuple[Slot, ...], reason: str) -> Decision:
    table = case.table
    dead = set(survival.dead_survivors(table, reports(case)))
    kept = {place: n for place, n in survival.kept_of(table).items() if place not in dead}
    incident = table.incident
    if incident is not None and len(slots) < len(table.slots):
        incident = replace(incident, action="shrink")
    return write(
        case,
        replace(
            table,
            phase=Phase.RECOVER,
            slots=ranks.number(slots, table.generation, kept),
            master_addr="",
            master_port=0,
            reason=reason,
            incident=incident,
        ),
    )
