"""Who goes on: healthy processes of a resumable script, and nobody else's."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from frun.protocol.decide import decide
from frun.protocol.policy import Policy, Seen
from frun.protocol.records import HostReport, Phase, RankTable
from tests.protocol.build import ELASTIC, POLICY, failure, placed, report, table, victim, view

NOW = 1000.0
RUN = table(Phase.RUN)
KILLED = failure("b", exit_code=-9)
USERS = failure("b", exit_code=1, message="ValueError: nan", recorded=True)


def resumable(*reports: HostReport) -> list[HostReport]:
    """Return the reports of workers whose script has a resumable function."""
    return [
        replace(one, workers=tuple(replace(worker, resumable=True) for worker in one.workers))
        for one in reports
    ]


def _write(
    reports: Iterable[HostReport],
    *,
    hosts: str = "a b c",
    stored: RankTable = RUN,
    policy: Policy = POLICY,
) -> RankTable:
    decision = decide(view(hosts, table=stored, reports=reports), Seen(), policy, NOW)
    assert decision.table is not None
    return decision.table


def _marks(written: RankTable) -> dict[str, tuple[int, ...]]:
    return {slot.host: slot.incarnations for slot in written.slots}


def test_only_what_died_is_replaced() -> None:
    """A worker dies: its place gets a newcomer, all other processes go on, and no restart is spent."""
    written = _write(
        resumable(report("a", "rr"), report("b", "fr", cause=KILLED), report("c", "rr"))
    )
    assert (written.phase, written.generation, written.restarts) == (Phase.RECOVER, 2, 0)
    assert written.recoveries == 1
    assert _marks(written) == {"a": (1, 1), "b": (2, 1), "c": (1, 1)}
    assert written.incident is not None
    assert (written.incident.action, written.incident.ranks) == ("replace-worker", (2,))


def test_the_word_of_the_dead_counts() -> None:
    """The only one that had said that the script is resumable dies: those that are still loading go on."""
    (said,) = resumable(report("b", "fr", cause=KILLED))
    first, second = said.workers
    said = replace(said, workers=(first, replace(second, resumable=False)))
    written = _write([report("a", "rr"), said, report("c", "rr")])
    assert _marks(written) == {"a": (1, 1), "b": (2, 1), "c": (1, 1)}


def test_the_word_of_an_earlier_generation_counts() -> None:
    """The script is known to be resumable: newcomers that have not come so far go on beside each other."""
    (said,) = resumable(report("b", "fr", cause=KILLED))
    second = _write([report("a", "rr"), said, report("c", "rr")])
    assert second.resumable
    ran = replace(second, phase=Phase.RUN)
    loading = [
        replace(one, workers=tuple(replace(w, incarnation=2) for w in one.workers))
        for one in (
            report("a", "rr", generation=2),
            report("b", "fr", generation=2, cause=KILLED),
            report("c", "rr", generation=2),
        )
    ]
    third = _write(loading, stored=ran)
    assert (third.phase, third.restarts, third.resumable) == (Phase.RECOVER, 0, True)
    assert _marks(third) == {"a": (2, 2), "b": (3, 2), "c": (2, 2)}


def test_workers_that_are_being_started_are_waited_for() -> None:
    """A newcomer has no process yet when the only other one dies: it goes on as soon as it has one."""
    (dead,) = resumable(report("b", "ff", cause=KILLED))
    starting = [report("a", "ss"), report("c", "ss")]
    waits = decide(view("a b c", table=RUN, reports=[*starting, dead]), Seen(), POLICY, NOW)
    assert waits.table is None
    assert waits.reason.endswith("failed; others are just being started")
    written = _write([report("a", "rr"), report("c", "rr"), dead])
    assert _marks(written) == {"a": (1, 1), "b": (2, 2), "c": (1, 1)}


def test_a_script_that_is_not_resumable_starts_again() -> None:
    """Without a resumable function all workers are restarted, within the budget."""
    reports = [report("a", "rr"), report("b", "fr", cause=KILLED), report("c", "rr")]
    written = _write(reports, policy=replace(POLICY, max_restarts=1))
    assert (written.restarts, written.recoveries) == (1, 0)
    assert _marks(written) == {"a": (2, 2), "b": (2, 2), "c": (2, 2)}


def test_a_failure_of_the_users_code_costs_a_restart() -> None:
    """Its process is replaced and others go on, but --max-restarts counts it."""
    reports = resumable(report("a", "rr"), report("b", "fr", cause=USERS), report("c", "rr"))
    spent = _write(reports)
    assert (spent.phase, spent.failure) == (Phase.FAILED, USERS)
    written = _write(reports, policy=replace(POLICY, max_restarts=1))
    assert (written.restarts, written.recoveries) == (1, 1)
    assert _marks(written)["a"] == (1, 1)


@pytest.mark.parametrize(
    ("hosts", "phase", "places", "marks"),
    [
        pytest.param(
            "a c z", Phase.RECOVER, "a z c", {"a": (1, 1), "z": (2, 2), "c": (1, 1)}, id="spare"
        ),
        pytest.param("a c", Phase.GATHER, "a - c", {"a": (1, 1), "": (), "c": (1, 1)}, id="wait"),
    ],
)
def test_survivors_of_a_lost_host(
    hosts: str, phase: Phase, places: str, marks: dict[str, tuple[int, ...]]
) -> None:
    """They go on beside a spare's newcomers, or wait with their processes alive."""
    written = _write(resumable(report("a", "rr"), report("c", "rr")), hosts=hosts)
    assert (written.phase, placed(written)) == (phase, places)
    assert _marks(written) == marks


def test_a_dead_peer_and_its_victims_are_newcomers() -> None:
    """Processes that failed as victims have ended too, and are replaced with the cause."""
    reports = resumable(
        report("a", "fr", cause=victim("a")), report("b", "fr", cause=KILLED), report("c", "rr")
    )
    written = _write(reports)
    assert written.failure == KILLED
    assert _marks(written) == {"a": (2, 1), "b": (2, 1), "c": (1, 1)}


def test_a_survivor_that_dies_while_paused_makes_the_next_generation() -> None:
    """A fault during recovery is an ordinary fault."""
    stored = replace(
        table(Phase.RECOVER, generation=2),
        slots=tuple(replace(s, incarnations=(1, 1)) for s in RUN.slots),
    )
    dead = replace(report("b", "rf", generation=2, prepared=False), prepared=False)
    reports = [
        replace(one, workers=tuple(replace(w, incarnation=1) for w in one.workers))
        for one in (report("a", "rr", generation=2), dead, report("c", "rr", generation=2))
    ]
    written = _write(reports, stored=stored)
    assert (written.generation, written.phase) == (3, Phase.RECOVER)
    assert written.reason == "rank 3 died while it was paused"
    assert _marks(written) == {"a": (1, 1), "b": (1, 3), "c": (1, 1)}


def test_when_the_last_survivors_die_while_paused_a_restart_is_spent() -> None:
    """All died at once and are seen one after another: that costs what it costs when seen together."""
    stored = replace(
        table(Phase.RECOVER, generation=2),
        slots=tuple(replace(s, incarnations=(1, 1)) for s in RUN.slots),
    )
    reports = [
        replace(one, workers=tuple(replace(w, incarnation=1) for w in one.workers))
        for one in (report(name, "ff", generation=2, prepared=False) for name in "abc")
    ]
    written = _write(reports, stored=stored, policy=replace(POLICY, max_restarts=1))
    assert (written.generation, written.restarts) == (3, 1)
    assert written.reason == "ranks 0, 1, 2, 3, 4, 5 died while they were paused: restart 1 of 1"
    assert _marks(written) == {"a": (3, 3), "b": (3, 3), "c": (3, 3)}
    ended = _write(reports, stored=stored)
    assert (ended.phase, ended.exit_code) == (Phase.FAILED, 1)


def test_generations_without_a_step_end_the_job() -> None:
    """The breaker has an exit status of its own; one completed step starts its count anew."""
    reports = resumable(report("a", "rr"), report("b", "fr", cause=KILLED), report("c", "rr"))
    barren = replace(RUN, barren=POLICY.breaker - 1)
    broken = _write(reports, stored=barren)
    assert (broken.phase, broken.exit_code) == (Phase.FAILED, 93)
    assert "5 generations in a row ended without one completed step" in broken.reason
    reports[0] = replace(reports[0], progress=True)
    written = _write(reports, stored=barren)
    assert (written.phase, written.barren) == (Phase.RECOVER, 0)


def test_deaths_before_the_world_ran_are_not_tries_that_failed() -> None:
    """Many die at once and are seen one after another: the breaker counts what ran without a step."""
    stored = replace(
        table(Phase.RECOVER, generation=2),
        slots=tuple(replace(s, incarnations=(1, 1)) for s in RUN.slots),
        barren=POLICY.breaker - 1,
    )
    reports = [
        replace(one, workers=tuple(replace(w, incarnation=1) for w in one.workers))
        for one in (
            report("a", "rr", generation=2, prepared=False),
            report("b", "rf", generation=2, prepared=False),
            report("c", "rr", generation=2, prepared=False),
        )
    ]
    written = _write(reports, stored=stored)
    assert (written.phase, written.barren, written.unformed) == (Phase.RECOVER, POLICY.breaker, 1)
    again = resumable(report("a", "rr"), report("b", "fr", cause=KILLED), report("c", "rr"))
    ran = replace(RUN, barren=written.barren, unformed=written.unformed)
    broken = _write(again, stored=ran)
    assert (broken.phase, broken.exit_code) == (Phase.FAILED, 93)
    assert "5 generations in a row" in broken.reason
    again[0] = replace(again[0], progress=True)
    assert (_write(again, stored=ran).barren, _write(again, stored=ran).unformed) == (0, 0)


def test_recoveries_can_be_bounded() -> None:
    """With --max-recoveries used up the next one ends the job."""
    reports = resumable(report("a", "rr"), report("b", "fr", cause=KILLED), report("c", "rr"))
    bounded = replace(POLICY, max_recoveries=1)
    assert _write(reports, policy=bounded).recoveries == 1
    ended = _write(reports, policy=bounded, stored=replace(RUN, recoveries=1))
    assert (ended.phase, ended.exit_code) == (Phase.FAILED, 1)
    assert "--max-recoveries 1" in ended.reason


def test_a_world_grows_around_its_survivors() -> None:
    """Hosts that join bring newcomers; nobody else is restarted."""
    reports = resumable(*(report(name, "rr") for name in "abc"))
    written = _write(reports, hosts="a b c d", policy=replace(ELASTIC, max_hosts=4))
    assert _marks(written) == {"a": (1, 1), "b": (1, 1), "c": (1, 1), "d": (2, 2)}
