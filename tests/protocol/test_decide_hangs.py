"""What the leader does when all ranks stand still."""

from collections.abc import Mapping
from dataclasses import replace

from frun.protocol.converge import LocalHost, StopWorkers, converge
from frun.protocol.decide import Decision, decide
from frun.protocol.hangs import Place, Standing
from frun.protocol.policy import Seen
from frun.protocol.records import HostReport, Phase, RankTable
from tests.protocol.build import POLICY, report, table, view

NOW = 1000.0
RUN = table(Phase.RUN)
WAITS = Standing(place=Place.COLLECTIVE, step=7)
LOOPS = Standing(place=Place.SCRIPT, step=7, where="train.py:9 in train")
OLD = Seen(generation=1, phase=Phase.RUN, since=NOW - 60)


def standing(others: Standing | None, here: Mapping[int, Standing | None]) -> list[HostReport]:
    """Return the reports of three hosts with two resumable workers each; `here` is by rank."""
    return [
        replace(
            one,
            workers=tuple(
                replace(w, resumable=True, standing=here.get(2 * at + w.local_rank, others))
                for w in one.workers
            ),
        )
        for at, one in enumerate((report("a", "rr"), report("b", "rr"), report("c", "rr")))
    ]


def _decide(reports: list[HostReport], *, now: float = NOW, seen: Seen = OLD) -> Decision:
    return decide(view(table=RUN, reports=reports), seen, POLICY, now)


def _written(decision: Decision) -> RankTable:
    assert decision.table is not None
    return decision.table


def test_the_rank_that_others_wait_for_is_replaced() -> None:
    """All other processes go on; no restart is spent; the reason names rank, place and line."""
    written = _written(_decide(standing(WAITS, {3: LOOPS})))
    assert (written.phase, written.generation, written.restarts) == (Phase.RECOVER, 2, 0)
    assert [slot.incarnations for slot in written.slots] == [(1, 1), (1, 2), (1, 1)]
    incident = written.incident
    assert incident is not None
    assert (incident.kind, incident.action, incident.ranks, incident.hosts) == (
        "hang",
        "replace-worker",
        (3,),
        ("b",),
    )
    assert "rank 3 stands still in the script of step 7, at train.py:9 in train" in written.reason


def test_its_host_kills_it_at_once() -> None:
    """A soft signal would be lost on it."""
    written = _written(_decide(standing(WAITS, {3: LOOPS})))
    workers = report("b", "rr").workers
    here = LocalHost(host="b", workers=workers, paused=2)
    (action,) = converge(written, here)
    assert action == StopWorkers(written.reason, (1,), at_once=True)


def test_nothing_is_done_while_one_moves() -> None:
    """Or may stand where it is, which its host does not report."""
    assert _decide(standing(WAITS, {3: LOOPS, 4: None})).table is None


def test_what_is_told_at_the_beginning_of_a_generation_is_not_believed() -> None:
    """It can be of the generation before."""
    early = _decide(standing(WAITS, {3: LOOPS}), seen=replace(OLD, since=NOW - 1))
    assert (early.table, early.wake_at) == (None, NOW + 1)


def test_where_all_wait_for_each_other_all_try_again() -> None:
    """Later, since lost packets come again by themselves; and not if they have moved meanwhile."""
    reports = standing(WAITS, {})
    first = _decide(reports)
    assert (first.table, first.wake_at) == (None, NOW + 8)
    moved = _decide(standing(WAITS, {0: None}), now=NOW + 4, seen=first.seen)
    assert moved.seen.stall_since is None
    written = _written(_decide(reports, now=NOW + 8, seen=first.seen))
    assert written.incident is not None
    assert (written.incident.kind, written.incident.action) == ("link", "retry")
    assert [slot.incarnations for slot in written.slots] == [(1, 1)] * 3


def test_the_state_can_be_lost_with_the_rank_that_hangs() -> None:
    """Then all begin anew, which costs a restart."""
    stored = replace(RUN, generation=2, slots=tuple(
        replace(slot, incarnations=(2, 1) if slot.host == "b" else (2, 2)) for slot in RUN.slots
    ))  # fmt: skip
    reports = [
        replace(
            one,
            generation=2,
            workers=tuple(
                replace(w, incarnation=1 if (one.host, w.local_rank) == ("b", 1) else 2)
                for w in one.workers
            ),
        )
        for one in standing(WAITS, {3: LOOPS})
    ]
    seen = replace(OLD, generation=2)
    ended = decide(view(table=stored, reports=reports), seen, POLICY, NOW).table
    assert ended is not None
    assert ended.phase is Phase.FAILED
    assert "restarts are used up (0 of 0)" in ended.reason
    policy = replace(POLICY, max_restarts=1)
    again = _written(decide(view(table=stored, reports=reports), seen, policy, NOW))
    assert (again.restarts, again.incident and again.incident.action) == (1, "restart-all")
