"""Every phase and every fact: what the leader writes next, and why. One changed fact per case."""

from dataclasses import dataclass, field, replace

import pytest

from frun.protocol.decide import Decision, Policy, Seen, decide
from frun.protocol.records import Failure, Phase, RankTable, View
from tests.protocol.build import (
    ELASTIC,
    POLICY,
    failure,
    host,
    placed,
    report,
    table,
    victim,
    view,
)

NOW = 1000.0
BUDGET = replace(POLICY, max_restarts=2)
RUNNING = [report(name, "rr") for name in "abc"]
KILLED = failure("b", exit_code=-9)
FAILED_B = [report("a", "rr"), report("b", "fr", cause=KILLED), report("c", "rr")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A snapshot, and what must follow from it."""

    view: View
    policy: Policy = POLICY
    since: float = NOW
    """When the leader first saw this generation in this phase."""
    seen: dict[str, float] = field(default_factory=dict)
    """Further stopwatches."""
    phase: Phase | None = None
    """Phase written; None: nothing is written."""
    generation: int = 1
    hosts: str | None = None
    """Places written, in the order of ranks."""
    restarts: int = 0
    cause: Failure | None = None
    dropped: tuple[str, ...] = ()
    why: str
    """Part of the reason."""
    wake: float | None = None
    """Seconds from now until which nothing need be asked again; None: no bound."""


def _decide(case: Case) -> Decision:
    stored = case.view.table
    seen = Seen()
    if stored is not None:
        seen = Seen(generation=stored.generation, phase=stored.phase, since=case.since)
        seen = replace(seen, **case.seen)  # type: ignore[arg-type]
    return decide(case.view, seen, case.policy, NOW)


def _check(case: Case) -> None:
    decision = _decide(case)
    assert case.why in decision.reason
    if case.phase is None:
        assert decision.table is None
        expected = None if case.wake is None else pytest.approx(NOW + case.wake)
        assert decision.wake_at == expected
        return
    written = decision.table
    assert written is not None
    assert written.reason == decision.reason
    assert (written.phase, written.generation) == (case.phase, case.generation)
    assert (written.restarts, written.failure) == (case.restarts, case.cause)
    assert written.dropped == case.dropped
    if case.hosts is not None:
        assert placed(written) == case.hosts


FIRST = table(Phase.GATHER, "")
TWO_TO_FOUR = replace(POLICY, min_hosts=2, max_hosts=4)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            Case(view=view("a"), phase=Phase.GATHER, hosts="", why="waiting for hosts"),
            id="no-table-yet",
        ),
        pytest.param(
            Case(view=view("a b", table=FIRST), why="waiting for hosts: 2 of 3", wake=600.0),
            id="too-few",
        ),
        pytest.param(
            Case(view=view("a b", table=FIRST), since=NOW - 599, why="2 of 3", wake=1.0),
            id="too-few-nearly-too-late",
        ),
        pytest.param(
            Case(
                view=view("a b", table=FIRST),
                since=NOW - 600,
                phase=Phase.FAILED,
                why="only 2 of 3 hosts came within 600 s (join_timeout)",
            ),
            id="too-few-too-late",
        ),
        pytest.param(
            Case(
                view=view("c b a", table=FIRST),
                phase=Phase.RECOVER,
                hosts="a b c",
                why="all 3 hosts are here",
            ),
            id="all-here-in-natural-order",
        ),
        pytest.param(
            Case(
                view=view([host("n10"), host("n9"), host("x", node_rank=0)], table=FIRST),
                phase=Phase.RECOVER,
                hosts="x n9 n10",
                why="all 3 hosts are here",
            ),
            id="node-rank-then-natural-order",
        ),
        pytest.param(
            Case(
                view=view("d c b a", table=FIRST),
                phase=Phase.RECOVER,
                hosts="b c d",
                why="all 3 hosts are here",
            ),
            id="one-too-many-stays-a-spare",
        ),
        pytest.param(
            Case(
                view=view("a", table=FIRST),
                policy=TWO_TO_FOUR,
                why="waiting for hosts: 1 of 2",
                wake=600.0,
            ),
            id="elastic-too-few",
        ),
        pytest.param(
            Case(
                view=view("a b", table=FIRST),
                policy=TWO_TO_FOUR,
                why="last call for hosts: 2 of at most 4",
                wake=30.0,
            ),
            id="elastic-last-call",
        ),
        pytest.param(
            Case(
                view=view("a b c", table=FIRST),
                policy=TWO_TO_FOUR,
                seen={"enough_since": NOW - 29},
                why="last call for hosts: 3 of at most 4",
                wake=1.0,
            ),
            id="elastic-last-call-counts-from-the-minimum",
        ),
        pytest.param(
            Case(
                view=view("a b c", table=FIRST),
                policy=TWO_TO_FOUR,
                seen={"enough_since": NOW - 30},
                phase=Phase.RECOVER,
                hosts="a b c",
                why="3 hosts are here after the last call",
            ),
            id="elastic-last-call-over",
        ),
        pytest.param(
            Case(
                view=view("a b c d", table=FIRST),
                policy=TWO_TO_FOUR,
                phase=Phase.RECOVER,
                hosts="a b c d",
                why="all 4 hosts are here",
            ),
            id="elastic-maximum-needs-no-last-call",
        ),
    ],
)
def test_forming_the_first_world(case: Case) -> None:
    """Join time, last call, MIN:MAX, order of ranks."""
    _check(case)


def test_falling_below_the_minimum_restarts_the_last_call() -> None:
    """A host that leaves during the last call takes its stopwatch with it."""
    seen = Seen(generation=1, phase=Phase.GATHER, since=NOW - 50, enough_since=NOW - 20)
    below = decide(view("a", table=FIRST), seen, TWO_TO_FOUR, NOW)
    assert below.seen.enough_since is None
    again = decide(view("a b", table=FIRST), below.seen, TWO_TO_FOUR, NOW + 5)
    assert again.wake_at == NOW + 35


VACANT = table(Phase.GATHER, "a - c", generation=2, reason="lost host b")
VACANT_TWO = table(Phase.GATHER, "a - -", generation=2, reason="lost hosts")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            Case(view=view("a c", table=VACANT), generation=2, why="lost host b", wake=60.0),
            id="waits",
        ),
        pytest.param(
            Case(
                view=view("a c z", table=VACANT),
                generation=2,
                phase=Phase.RECOVER,
                hosts="a z c",
                why="all 3 places are taken",
            ),
            id="a-newcomer-takes-the-place",
        ),
        pytest.param(
            Case(
                view=view("a c z", table=VACANT_TWO),
                generation=2,
                phase=Phase.RECOVER,
                hosts="a c z",
                why="all 3 places are taken",
            ),
            id="newcomers-in-the-order-they-came",
        ),
        pytest.param(
            Case(
                view=view("a z", table=VACANT_TWO),
                generation=2,
                phase=Phase.GATHER,
                hosts="a z -",
                why="lost hosts",
            ),
            id="one-of-two-comes",
        ),
        pytest.param(
            Case(
                view=view("a z", table=VACANT),
                generation=2,
                phase=Phase.GATHER,
                hosts="a z -",
                why="lost host b",
            ),
            id="one-comes-another-goes",
        ),
        pytest.param(
            Case(
                view=view("a", table=VACANT, watching_since=NOW - 1),
                generation=2,
                why="waiting to see which hosts are alive",
                wake=2.0,
            ),
            id="a-new-leader-waits-for-a-host-it-never-saw",
        ),
        pytest.param(
            Case(
                view=view("a", table=VACANT, watching_since=NOW - 1, gone="c"),
                generation=2,
                phase=Phase.GATHER,
                hosts="a - -",
                why="lost host b",
            ),
            id="a-new-leader-believes-what-it-saw",
        ),
        pytest.param(
            Case(
                view=view("a c", table=VACANT),
                since=NOW - 60,
                generation=2,
                phase=Phase.FAILED,
                why="1 of 3 places stayed vacant for 60 s (--replace-timeout) and 2 hosts are below",
            ),
            id="fixed-gives-up",
        ),
        pytest.param(
            Case(
                view=view("a c", table=VACANT),
                policy=ELASTIC,
                since=NOW - 5,
                generation=2,
                phase=Phase.RECOVER,
                hosts="a c",
                why="nobody took 1 vacant places within 5 s: going on with 2 hosts",
            ),
            id="elastic-shrinks",
        ),
        pytest.param(
            Case(
                view=view("a", table=VACANT_TWO),
                policy=replace(ELASTIC, min_hosts=2),
                since=NOW - 5,
                generation=2,
                why="lost hosts",
                wake=595.0,
            ),
            id="elastic-below-the-minimum-waits-as-at-the-start",
        ),
        pytest.param(
            Case(
                view=view("a", table=VACANT_TWO),
                policy=replace(ELASTIC, min_hosts=2),
                since=NOW - 600,
                generation=2,
                phase=Phase.FAILED,
                why="2 of 3 places stayed vacant for 600 s",
            ),
            id="elastic-below-the-minimum-gives-up",
        ),
        pytest.param(
            Case(
                view=view("a c z", table=replace(VACANT, dropped=("z",))),
                generation=2,
                dropped=("z",),
                why="lost host b",
                wake=60.0,
            ),
            id="a-dropped-host-is-not-let-in",
        ),
    ],
)
def test_waiting_for_hosts_in_a_formed_world(case: Case) -> None:
    """Vacant places: who may take them, how long they are kept, and what follows."""
    _check(case)


RECOVER = table(Phase.RECOVER)
READY = [report(name, port=29000 + index) for index, name in enumerate("abc")]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            Case(
                view=view(table=RECOVER),
                why="waiting until a, b, c are ready",
                wake=90.0,
            ),
            id="nobody-ready",
        ),
        pytest.param(
            Case(
                view=view(table=RECOVER, reports=READY[:2]),
                why="waiting until c are ready",
                wake=90.0,
            ),
            id="one-missing",
        ),
        pytest.param(
            Case(
                view=view(table=RECOVER, reports=[*READY[:2], replace(READY[2], prepared=False)]),
                why="waiting until c are ready",
                wake=90.0,
            ),
            id="one-not-prepared",
        ),
        pytest.param(
            Case(
                view=view(table=RECOVER, reports=[*READY[:2], replace(READY[2], generation=0)]),
                why="waiting until c are ready",
                wake=90.0,
            ),
            id="old-report",
        ),
        pytest.param(
            Case(
                view=view("a b c z", table=RECOVER, reports=[*READY[:2], report("z")]),
                why="waiting until c are ready",
                wake=90.0,
            ),
            id="a-stranger-does-not-count",
        ),
        pytest.param(
            Case(
                view=view(table=RECOVER, reports=READY),
                phase=Phase.RUN,
                hosts="a b c",
                why="3 hosts, 6 ranks; because",
            ),
            id="all-ready",
        ),
        pytest.param(
            Case(
                view=view(table=RECOVER, reports=READY[:2]),
                since=NOW - 90,
                phase=Phase.FAILED,
                why="not ready within 90 s: c",
            ),
            id="too-late",
        ),
        pytest.param(
            Case(
                view=view("a b", table=RECOVER, reports=READY[:2]),
                generation=2,
                phase=Phase.GATHER,
                hosts="a b -",
                why="lost host c (ranks 4-5)",
            ),
            id="host-lost",
        ),
        pytest.param(
            Case(
                view=view("a b z", table=RECOVER, reports=READY[:2]),
                generation=2,
                phase=Phase.RECOVER,
                hosts="a b z",
                why="lost host c (ranks 4-5)",
            ),
            id="host-lost-with-a-spare",
        ),
        pytest.param(
            Case(
                view=view("a b", table=RECOVER, reports=READY[:2], watching_since=NOW - 1),
                why="waiting until c are ready",
                wake=2.0,
            ),
            id="host-not-yet-seen-by-a-new-leader",
        ),
    ],
)
def test_recover(case: Case) -> None:
    """Members get ready, do not, or are lost meanwhile."""
    _check(case)


def test_run_names_the_first_host_as_master() -> None:
    """Address of the first place, port that its agent holds."""
    written = decide(view(table=RECOVER, reports=READY), Seen(), POLICY, NOW).table
    assert written is not None
    assert (written.master_addr, written.master_port) == ("10.0.0.a", 29000)


RUN = table(Phase.RUN)
RUN_ELASTIC = table(Phase.RUN, "a b c", generation=4)
FOURTH = [report(name, "rr", generation=4) for name in "abc"]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(view=view(table=RUN), why="because"), id="no-reports-yet"),
        pytest.param(Case(view=view(table=RUN, reports=RUNNING), why="because"), id="all-run"),
        pytest.param(
            Case(view=view("a b c z", table=RUN, reports=RUNNING), why="because"),
            id="a-spare-waits",
        ),
        pytest.param(
            Case(
                view=view(table=RUN, reports=[report("a", "oo"), report("b", "or"), RUNNING[2]]),
                why="because",
            ),
            id="some-ended",
        ),
        pytest.param(
            Case(
                view=view(table=RUN, reports=[report(name, "oo") for name in "abc"]),
                phase=Phase.DONE,
                why="every worker ended with 0",
            ),
            id="all-ended",
        ),
        pytest.param(
            Case(
                view=view(table=RUN, reports=[report(name, "oo") for name in "ab"]),
                why="because",
            ),
            id="all-but-a-silent-host-ended",
        ),
        pytest.param(
            Case(
                view=view(
                    table=RUN, reports=[report("a", "oo"), report("b", "oo"), report("c", "")]
                ),
                why="because",
            ),
            id="a-host-without-workers-has-not-ended",
        ),
        pytest.param(
            Case(
                view=view(
                    table=replace(RUN, generation=2),
                    reports=[report(name, "oo", generation=1) for name in "abc"],
                ),
                generation=2,
                why="because",
            ),
            id="old-success-is-old-news",
        ),
        pytest.param(
            Case(
                view=view(table=replace(RUN, generation=2), reports=FAILED_B),
                generation=2,
                policy=BUDGET,
                why="because",
            ),
            id="old-failure-is-old-news",
        ),
        pytest.param(
            Case(
                view=view("a b c z", table=RUN, reports=[*RUNNING, report("z", "f")]),
                policy=BUDGET,
                why="because",
            ),
            id="a-stranger's-failure-does-not-count",
        ),
        pytest.param(
            Case(
                view=view(table=RUN, reports=[*RUNNING[:2], report("c", "xx")]),
                policy=BUDGET,
                why="because",
            ),
            id="stopped-is-no-failure",
        ),
    ],
)
def test_run_and_success(case: Case) -> None:
    """Healthy running needs nothing; the end is everybody's end, in this generation."""
    _check(case)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            Case(
                view=view(table=RUN, reports=FAILED_B),
                policy=BUDGET,
                generation=2,
                phase=Phase.RECOVER,
                hosts="a b c",
                restarts=1,
                cause=KILLED,
                why="rank 0 on b failed (-9): restart 1 of 2",
            ),
            id="within-budget",
        ),
        pytest.param(
            Case(
                view=view(table=replace(RUN, restarts=1), reports=FAILED_B),
                policy=BUDGET,
                generation=2,
                phase=Phase.RECOVER,
                restarts=2,
                cause=KILLED,
                why="restart 2 of 2",
            ),
            id="last-restart",
        ),
        pytest.param(
            Case(
                view=view(table=replace(RUN, restarts=2), reports=FAILED_B),
                policy=BUDGET,
                phase=Phase.FAILED,
                restarts=2,
                cause=KILLED,
                why="rank 0 on b failed (-9) and restarts are used up (2 of 2)",
            ),
            id="budget-spent",
        ),
        pytest.param(
            Case(
                view=view(table=RUN, reports=FAILED_B),
                phase=Phase.FAILED,
                cause=KILLED,
                why="restarts are used up (0 of 0)",
            ),
            id="no-budget",
        ),
        pytest.param(
            Case(
                view=view(
                    table=RUN,
                    reports=[
                        report("a", "ff", cause=failure("a", exit_code=4)),
                        report("b", "ff", cause=KILLED),
                        report("c", "ff", cause=failure("c", exit_code=5)),
                    ],
                ),
                policy=BUDGET,
                generation=2,
                phase=Phase.RECOVER,
                restarts=1,
                cause=failure("a", exit_code=4),
                why="restart 1 of 2",
            ),
            id="six-failures-of-one-generation-cost-one-restart",
        ),
        pytest.param(
            Case(
                view=view(
                    table=RUN,
                    reports=[
                        report("a", "fr", cause=victim("a")),
                        report("b", "fr", cause=KILLED),
                        report("c", "fr", cause=victim("c")),
                    ],
                ),
                policy=BUDGET,
                generation=2,
                phase=Phase.RECOVER,
                restarts=1,
                cause=KILLED,
                why="on b failed",
            ),
            id="R35-the-kill-is-the-cause",
        ),
        pytest.param(
            Case(
                view=view(
                    table=RUN,
                    reports=[report("a", "oo"), report("b", "fr", cause=KILLED), RUNNING[2]],
                ),
                policy=BUDGET,
                generation=2,
                phase=Phase.RECOVER,
                hosts="a b c",
                restarts=1,
                cause=KILLED,
                why="restart 1 of 2",
            ),
            id="failure-after-another-host-ended",
        ),
        pytest.param(
            Case(
                view=view(table=RUN, reports=[report("a", "oo"), FAILED_B[1], FAILED_B[2]]),
                phase=Phase.FAILED,
                cause=KILLED,
                why="restarts are used up",
            ),
            id="R38-a-finished-host-hears-of-a-final-failure",
        ),
        pytest.param(
            Case(
                view=view("a b z", table=RUN, reports=FAILED_B[:2]),
                policy=BUDGET,
                generation=2,
                phase=Phase.RECOVER,
                hosts="a b z",
                restarts=1,
                cause=KILLED,
                why="restart 1 of 2",
            ),
            id="failure-and-a-lost-host-at-once",
        ),
    ],
)
def test_a_worker_failed(case: Case) -> None:
    """Restart all within the budget, each generation once; else give up, with the cause."""
    _check(case)


MAYBE = [report("a", "fr", cause=victim("a")), *RUNNING[1:]]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            Case(
                view=view(table=RUN, reports=MAYBE),
                policy=BUDGET,
                why="rank 0 failed as a victim would; looking for the cause",
                wake=4.0,
            ),
            id="waits-for-the-cause",
        ),
        pytest.param(
            Case(
                view=view(
                    table=RUN,
                    reports=[report("a", "fr", cause=failure("a", exit_code=1)), *RUNNING[1:]],
                ),
                policy=BUDGET,
                why="looking for the cause",
                wake=4.0,
            ),
            id="status-1-may-be-a-victim's",
        ),
        pytest.param(
            Case(
                view=view("a", table=table(Phase.RUN, "a"), reports=MAYBE[:1]),
                policy=replace(BUDGET, min_hosts=1, max_hosts=1),
                why="looking for the cause",
                wake=0.3,
            ),
            id="one-host-waits-shortly",
        ),
        pytest.param(
            Case(
                view=view(table=RUN, reports=MAYBE),
                policy=BUDGET,
                seen={"failure_since": NOW - 4},
                generation=2,
                phase=Phase.RECOVER,
                restarts=1,
                cause=victim("a"),
                why="restart 1 of 2",
            ),
            id="no-cause-came",
        ),
        pytest.param(
            Case(
                view=view("a c", table=RUN, reports=[MAYBE[0], RUNNING[2]]),
                policy=BUDGET,
                seen={"failure_since": NOW - 2},
                generation=2,
                phase=Phase.GATHER,
                hosts="a - c",
                why="lost host b (ranks 2-3)",
            ),
            id="the-cause-was-a-lost-host-and-costs-no-restart",
        ),
        pytest.param(
            Case(
                view=view(table=RUN, reports=[MAYBE[0], FAILED_B[1], RUNNING[2]]),
                policy=BUDGET,
                seen={"failure_since": NOW - 0.1},
                generation=2,
                phase=Phase.RECOVER,
                restarts=1,
                cause=KILLED,
                why="on b failed",
            ),
            id="the-cause-is-reported-later",
        ),
        pytest.param(
            Case(
                view=view("a b c d", table=RUN_ELASTIC, reports=[MAYBE[0], *FOURTH[1:]]),
                policy=ELASTIC,
                generation=4,
                why="hosts want to join",
                wake=1.0,
            ),
            id="an-old-victim-holds-up-nothing",
        ),
    ],
)
def test_looking_for_the_cause(case: Case) -> None:
    """Failures that look like victims' wait a little for what killed them."""
    policy = case.policy
    if policy is ELASTIC:
        case = replace(case, policy=replace(ELASTIC, max_hosts=5))
    _check(case)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            Case(
                view=view("a c", table=RUN, reports=[RUNNING[0], RUNNING[2]]),
                generation=2,
                phase=Phase.GATHER,
                hosts="a - c",
                why="lost host b (ranks 2-3)",
            ),
            id="no-spare",
        ),
        pytest.param(
            Case(
                view=view("a c y z", table=RUN, reports=[RUNNING[0], RUNNING[2]]),
                generation=2,
                phase=Phase.RECOVER,
                hosts="a y c",
                why="lost host b (ranks 2-3)",
            ),
            id="the-earliest-spare",
        ),
        pytest.param(
            Case(
                view=view("c y", table=RUN, reports=[RUNNING[2]]),
                generation=2,
                phase=Phase.GATHER,
                hosts="y - c",
                why="lost host a (ranks 0-1), host b (ranks 2-3)",
            ),
            id="two-lost-one-spare",
        ),
        pytest.param(
            Case(
                view=view("a c", table=RUN, watching_since=NOW - 2.9),
                why="because",
                wake=0.1,
            ),
            id="law-7-a-new-leader-waits",
        ),
        pytest.param(
            Case(
                view=view("a c", table=RUN, watching_since=NOW - 3),
                generation=2,
                phase=Phase.GATHER,
                hosts="a - c",
                why="lost host b",
            ),
            id="law-7-for-one-lease-time",
        ),
        pytest.param(
            Case(
                view=view("a c", table=RUN, watching_since=NOW, gone="b"),
                generation=2,
                phase=Phase.GATHER,
                hosts="a - c",
                why="lost host b",
            ),
            id="law-7-not-for-what-it-saw-itself",
        ),
        pytest.param(
            Case(view=view("a c", table=RUN, gone="b", answering="b"), why=""),
            id="its-lease-has-ended-and-it-answers",
        ),
        pytest.param(
            Case(
                view=view("c", table=RUN, gone="a b", answering="b"),
                generation=2,
                phase=Phase.GATHER,
                hosts="- b c",
                why="lost host a",
            ),
            id="one-is-lost-and-one-answers",
        ),
        pytest.param(
            Case(
                view=view("c", table=RUN, watching_since=NOW, gone="b"),
                generation=2,
                phase=Phase.GATHER,
                hosts="a - c",
                why="lost host b",
            ),
            id="law-7-one-certain-one-unsure",
        ),
        pytest.param(
            Case(
                view=view("a c", table=RUN, reports=[report("a", "oo"), RUNNING[2]]),
                phase=Phase.FAILED,
                why="lost host b (ranks 2-3) after a had finished, and no spare is there",
            ),
            id="R80-lost-after-another-ended",
        ),
        pytest.param(
            Case(
                view=view("a c z", table=RUN, reports=[report("a", "oo"), RUNNING[2]]),
                generation=2,
                phase=Phase.RECOVER,
                hosts="a z c",
                why="lost host b",
            ),
            id="lost-after-another-ended-with-a-spare",
        ),
        pytest.param(
            Case(
                view=view(
                    "a c z",
                    table=replace(RUN, dropped=("z",)),
                    reports=[RUNNING[0], RUNNING[2]],
                ),
                generation=2,
                phase=Phase.GATHER,
                hosts="a - c",
                dropped=("z",),
                why="lost host b",
            ),
            id="a-dropped-host-is-no-spare",
        ),
        pytest.param(
            Case(
                view=view("a c", table=replace(RUN, restarts=1), reports=[RUNNING[0], RUNNING[2]]),
                policy=BUDGET,
                generation=2,
                phase=Phase.GATHER,
                restarts=1,
                why="lost host b",
            ),
            id="a-lost-host-costs-no-restart",
        ),
    ],
)
def test_a_host_is_lost(case: Case) -> None:
    """Spares, vacancies, law 7, and losses after a part of the job has ended."""
    _check(case)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            Case(
                view=view(table=RUN, reports=FAILED_B),
                policy=ELASTIC,
                generation=2,
                phase=Phase.GATHER,
                hosts="a - c",
                cause=KILLED,
                dropped=("b",),
                why="restarts are used up (0 of 0): going on without that host",
            ),
            id="R62-the-failing-host-is-dropped",
        ),
        pytest.param(
            Case(
                view=view("a b c z", table=RUN, reports=FAILED_B),
                policy=replace(ELASTIC, max_hosts=3),
                generation=2,
                phase=Phase.RECOVER,
                hosts="a z c",
                cause=KILLED,
                dropped=("b",),
                why="going on without that host",
            ),
            id="R62-a-spare-takes-its-place",
        ),
        pytest.param(
            Case(
                view=view(table=replace(RUN, dropped=("y",)), reports=FAILED_B),
                policy=ELASTIC,
                generation=2,
                phase=Phase.GATHER,
                hosts="a - c",
                cause=KILLED,
                dropped=("y", "b"),
                why="going on without that host",
            ),
            id="an-earlier-one-stays-dropped",
        ),
        pytest.param(
            Case(
                view=view(table=RUN, reports=FAILED_B),
                policy=replace(ELASTIC, min_hosts=3),
                phase=Phase.FAILED,
                cause=KILLED,
                why="restarts are used up",
            ),
            id="too-few-would-be-left",
        ),
        pytest.param(
            Case(
                view=view(table=RUN, reports=FAILED_B),
                policy=replace(ELASTIC, max_restarts=1),
                generation=2,
                phase=Phase.RECOVER,
                hosts="a b c",
                restarts=1,
                cause=KILLED,
                why="restart 1 of 1",
            ),
            id="restarts-come-first",
        ),
        pytest.param(
            Case(
                view=view("a b c d", table=RUN_ELASTIC, reports=FOURTH),
                policy=replace(ELASTIC, max_hosts=5),
                generation=4,
                why="1 hosts want to join",
                wake=1.0,
            ),
            id="a-newcomer-waits-for-others",
        ),
        pytest.param(
            Case(
                view=view("a b c d", table=RUN_ELASTIC, reports=FOURTH),
                policy=replace(ELASTIC, max_hosts=5),
                seen={"joiner_since": NOW - 1},
                generation=5,
                phase=Phase.RECOVER,
                hosts="a b c d",
                why="d joined: the world grows to 4 hosts",
            ),
            id="a-newcomer-joins",
        ),
        pytest.param(
            Case(
                view=view("a b c e d", table=RUN_ELASTIC, reports=FOURTH),
                policy=ELASTIC,
                generation=5,
                phase=Phase.RECOVER,
                hosts="a b c e",
                why="e joined: the world grows to 4 hosts",
            ),
            id="the-earliest-joins-a-world-with-room-for-one",
        ),
        pytest.param(
            Case(
                view=view("a b c d", table=replace(RUN_ELASTIC, dropped=("d",)), reports=FOURTH),
                policy=ELASTIC,
                generation=4,
                dropped=("d",),
                why="because",
            ),
            id="a-dropped-host-does-not-join",
        ),
        pytest.param(
            Case(
                view=view(
                    "a b c d",
                    table=RUN_ELASTIC,
                    reports=[report("a", "oo", generation=4), *FOURTH[1:]],
                ),
                policy=ELASTIC,
                generation=4,
                why="because",
            ),
            id="nobody-joins-at-the-end",
        ),
    ],
)
def test_an_elastic_world(case: Case) -> None:
    """Dropping a host that used up the restarts, its ban, and growth."""
    _check(case)


def test_a_dropped_host_stays_out_after_later_losses() -> None:
    """The ban outlives the generation that made it, whoever is lost next."""
    dropped = decide(view(table=RUN, reports=FAILED_B), Seen(), ELASTIC, NOW).table
    assert dropped is not None
    # b is still stopping its workers when c dies.
    after = decide(view("a b", table=replace(dropped, phase=Phase.RUN)), Seen(), ELASTIC, NOW).table
    assert after is not None
    assert after.generation == 3
    assert "b" not in placed(after).split()
    assert after.dropped == ("b",)


@pytest.mark.parametrize("phase", [Phase.DONE, Phase.FAILED])
@pytest.mark.parametrize(
    "snapshot",
    [
        pytest.param(view("", gone="a b c"), id="everybody-gone"),
        pytest.param(view(reports=FAILED_B), id="a-late-failure"),
        pytest.param(view("a b c d e"), id="newcomers"),
        pytest.param(view(reports=[report(name, "oo") for name in "abc"]), id="late-success"),
    ],
)
def test_final_phases_stay(phase: Phase, snapshot: View) -> None:
    """Nothing follows the end."""
    for policy in (POLICY, ELASTIC, BUDGET):
        decision = decide(replace(snapshot, table=table(phase)), Seen(), policy, NOW)
        assert decision.table is None
        assert decision.reason
        assert decision.wake_at is None


def test_a_new_leader_starts_its_stopwatches_anew() -> None:
    """What an earlier phase or leader measured does not count: a wait can only get longer."""
    old = Seen(generation=1, phase=Phase.GATHER, since=0.0, failure_since=0.0, joiner_since=0.0)
    decision = decide(view(table=RECOVER), old, POLICY, NOW)
    assert decision.seen == Seen(generation=1, phase=Phase.RECOVER, since=NOW)
    assert decision.wake_at == NOW + POLICY.prepare_timeout_s


def test_the_cause_stays_known_to_the_end() -> None:
    """A job that fails while it recovers still names the failure that began it."""
    stored: RankTable = replace(table(Phase.RECOVER, generation=2), failure=KILLED)
    seen = Seen(generation=2, phase=Phase.RECOVER, since=NOW - 90)
    written = decide(view(table=stored), seen, POLICY, NOW).table
    assert written is not None
    assert (written.phase, written.failure) == (Phase.FAILED, KILLED)
