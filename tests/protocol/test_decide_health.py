"""Hosts with a device that is of no use: they count as lost, unless nobody else is left."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from frun.protocol.classes import FaultClass
from frun.protocol.decide import decide
from frun.protocol.hangs import Place, Standing
from frun.protocol.health import Fact, Severity
from frun.protocol.policy import Decision, Policy, Seen
from frun.protocol.records import HostRecord, HostReport, Phase, RankTable, View
from tests.protocol.build import ELASTIC, POLICY, failure, host, placed, report, table, view
from tests.protocol.test_decide_recovery import resumable

NOW = 1000.0
RUN = table(Phase.RUN)
REPORTS = resumable(*(report(name, "rr") for name in "abc"))
GONE = Fact(
    check="gpu",
    name="lost",
    severity=Severity.FAULT,
    fault_class=FaultClass.DEVICE,
    reason="fell off the bus",
    device=1,
    lasting=True,
)
PASSING = replace(GONE, name="ecc", lasting=False)
WARM = replace(PASSING, name="heat", severity=Severity.WARNING)
WORN = replace(GONE, name="rows", severity=Severity.WARNING, reason="no spare rows are left")


def hosts(**health: Fact | None) -> list[HostRecord]:
    """Return records of hosts in the order in which they came, each with what is wrong there."""
    return [
        replace(host(name), health=() if fact is None else (fact,)) for name, fact in health.items()
    ]


def decided(
    records: Iterable[HostRecord],
    *,
    stored: RankTable | None = RUN,
    reports: Iterable[HostReport] = tuple(REPORTS),
    policy: Policy = POLICY,
    seen: Seen | None = None,
) -> Decision:
    """Decide about these hosts."""
    snapshot: View = view(list(records), table=stored, reports=reports)
    return decide(snapshot, seen or Seen(), policy, NOW)


def written(records: Iterable[HostRecord], **rest: object) -> RankTable:
    """Return the table that was decided."""
    found = decided(records, **rest).table  # type: ignore[arg-type]
    assert found is not None
    return found


def test_a_spare_takes_the_place_of_a_host_that_is_not_fit() -> None:
    """At once, also before its worker has ended; the others' processes live on."""
    after = written(hosts(a=None, b=GONE, c=None, z=None))
    assert (after.phase, placed(after), after.recoveries) == (Phase.RECOVER, "a z c", 1)
    assert after.reason == "host b (ranks 2-3) is not fit: gpu: device 1: fell off the bus"
    incident = after.incident
    assert incident is not None
    assert (incident.kind, incident.action, incident.hosts) == ("device", "replace-host", ("b",))
    assert incident.fault_class is FaultClass.DEVICE
    assert incident.evidence == "gpu: device 1: fell off the bus"
    assert [slot.incarnations for slot in after.slots] == [(1, 1), (2, 2), (1, 1)]
    ended = resumable(report("b", "rf", cause=failure("b", exit_code=-9)))
    assert written(hosts(a=None, b=GONE, c=None, z=None), reports=[*ended, *REPORTS]) == after


def test_without_a_spare_its_place_is_kept_and_it_may_come_back() -> None:
    """The rules of a lost host: wait, then shrink or give up; a host that is fit again takes its place."""
    after = written(hosts(a=None, b=GONE, c=None))
    assert (after.phase, placed(after)) == (Phase.GATHER, "a - c")
    assert after.incident is not None
    assert after.incident.action == "wait"
    waits = decided(hosts(a=None, b=GONE, c=None), stored=after, reports=[])
    assert waits.table is None
    back = written(hosts(a=None, b=None, c=None), stored=after, reports=[])
    assert (back.phase, placed(back)) == (Phase.RECOVER, "a b c")
    late = Seen(generation=2, phase=Phase.GATHER, since=NOW - 100)
    shrunk = written(
        hosts(a=None, b=GONE, c=None), stored=after, reports=[], policy=ELASTIC, seen=late
    )
    assert placed(shrunk) == "a c"
    ended = written(hosts(a=None, b=GONE, c=None), stored=after, reports=[], seen=late)
    assert ended.phase is Phase.FAILED


@pytest.mark.parametrize("fact", [PASSING, WARM], ids=lambda fact: fact.name)
def test_what_does_not_last_keeps_no_host_from_work(fact: Fact) -> None:
    """Its worker is replaced in place when it has ended, or goes on."""
    assert decided(hosts(a=None, b=fact, c=None, z=None)).table is None
    killed = resumable(report("b", "rf", cause=failure("b", exit_code=-9)))
    after = written(
        hosts(a=None, b=fact, c=None, z=None), reports=[REPORTS[0], *killed, REPORTS[2]]
    )
    assert placed(after) == "a b c"


def test_where_no_host_is_fit_all_count() -> None:
    """A job of one host, or one that is sick everywhere, goes on in place for as long as it can."""
    alone = replace(POLICY, min_hosts=1, max_hosts=1)
    first = table(Phase.GATHER, "")
    assert placed(written(hosts(a=GONE), stored=first, reports=[], policy=alone)) == "a"
    stored = table(Phase.RUN, "a")
    running = resumable(report("a", "rr"))
    assert decided(hosts(a=GONE), stored=stored, reports=running, policy=alone).table is None
    killed = resumable(report("a", "rf", cause=failure("a", exit_code=-9)))
    after = written(hosts(a=GONE), stored=stored, reports=killed, policy=alone)
    assert (after.phase, [slot.incarnations for slot in after.slots]) == (Phase.RECOVER, [(1, 2)])
    # A spare that is not fit either changes nothing; one that is does.
    assert (
        decided(hosts(a=GONE, z=GONE), stored=stored, reports=running, policy=alone).table is None
    )
    assert (
        placed(written(hosts(a=GONE, z=None), stored=stored, reports=running, policy=alone)) == "z"
    )


def test_the_first_world_is_made_of_fit_hosts() -> None:
    """Those of which nothing is known before those with a warning; who is left out is named."""
    first = table(Phase.GATHER, "")
    after = written(hosts(a=WARM, b=None, c=None, d=None), stored=first, reports=[])
    assert placed(after) == "b c d"
    waits = decided(hosts(a=GONE, b=WARM, c=None), stored=first, reports=[])
    assert waits.reason == (
        "waiting for hosts: 2 of 3; a is not fit: gpu: device 1: fell off the bus"
    )
    ended = decided(
        hosts(a=GONE, b=WARM, c=None),
        stored=first,
        reports=[],
        seen=Seen(generation=1, phase=Phase.GATHER, since=NOW - 600),
    )
    assert "a is not fit: gpu: device 1" in ended.reason


def test_a_spare_with_a_warning_comes_last() -> None:
    """Also if it came first."""
    after = written(hosts(a=None, b=GONE, c=None, y=WARM, z=None))
    assert placed(after) == "a z c"
    assert placed(written(hosts(a=None, b=GONE, c=None, y=WARM, z=GONE))) == "a y c"


def test_a_host_that_has_done_its_part_is_not_sent_away() -> None:
    """Its workers ended well: what becomes of its devices then is nobody's loss."""
    done = [REPORTS[0], report("b", "oo"), REPORTS[2]]
    assert decided(hosts(a=None, b=GONE, c=None), reports=done).table is None


def test_a_dead_and_an_unfit_host_at_once() -> None:
    """Both are named; the incident is that of a lost host."""
    after = written(hosts(a=None, c=GONE))
    assert after.reason == (
        "lost host b (ranks 2-3); host c (ranks 4-5) is not fit: gpu: device 1: fell off the bus"
    )
    assert after.incident is not None
    assert (after.incident.kind, after.incident.hosts) == ("host", ("b", "c"))


def stepping(*reports: HostReport, homes: int = 2) -> list[HostReport]:
    """Return reports of hosts that have completed a step, of a state that is on so many hosts."""
    return [
        replace(
            one, progress=True, workers=tuple(replace(each, homes=homes) for each in one.workers)
        )
        for one in reports
    ]


STEPPING = stepping(*REPORTS)


def _with(one: HostReport, **facts: object) -> HostReport:
    """Return a report of whose workers the first one is different."""
    first = replace(one.workers[0], **facts)  # type: ignore[arg-type]
    return replace(one, workers=(first, *one.workers[1:]))


def test_a_host_is_left_before_it_fails() -> None:
    """A spare without any warning takes its place; others' processes live on, one host goes at a time."""
    sick = hosts(a=WORN, b=WORN, c=None, z=None)
    after = written(sick, reports=STEPPING)
    assert (after.phase, placed(after), after.recoveries) == (Phase.RECOVER, "z b c", 1)
    assert [slot.incarnations for slot in after.slots] == [(2, 2), (1, 1), (1, 1)]
    incident = after.incident
    assert incident is not None
    assert incident.cause == (
        "host a (ranks 0-1) is left before it fails: gpu: device 1: no spare rows are left"
    )
    assert (incident.kind, incident.action, incident.ranks) == ("drain", "replace-host", (0, 1))
    assert incident.fault_class is FaultClass.DEVICE


@pytest.mark.parametrize(
    ("records", "reports"),
    [
        (hosts(a=WORN, b=None, c=None), STEPPING),
        (hosts(a=WORN, b=None, c=None, z=WARM), STEPPING),
        (hosts(a=WARM, b=None, c=None, z=None), STEPPING),
        *(
            (hosts(a=WORN, b=None, c=None, z=None), reports)
            for reports in (
                stepping(*REPORTS, homes=1),
                stepping(*REPORTS, homes=0),
                [*STEPPING[:2], replace(STEPPING[2], progress=False)],
                STEPPING[1:],
                [*STEPPING[1:], *stepping(*resumable(report("a", "oo")))],
                [*STEPPING[:2], *stepping(*resumable(report("c", "or")))],
                [*STEPPING[:2], _with(STEPPING[2], diverged=True)],
                [*STEPPING[:2], _with(STEPPING[2], standing=Standing(place=Place.SCRIPT, step=1))],
            )
        ),
    ],
    ids=[
        "no-spare",
        "the-spare-is-worn-too",
        "it-passes",
        "its-state-is-nowhere-else",
        "it-is-not-known-where",
        "one-has-made-no-step-yet",
        "one-was-not-heard-of",
        "it-has-ended-well",
        "a-rank-of-another-has-ended-well",
        "a-rank-holds-something-else",
        "a-rank-stands-still",
    ],
)
def test_nothing_is_lost_by_leaving_a_host(
    records: list[HostRecord], reports: list[HostReport]
) -> None:
    """It goes on there until it can be left."""
    assert decided(records, reports=reports).table is None


@pytest.mark.parametrize(("used", "goes"), [(0, True), (1, False), (2, False)])
def test_the_last_recovery_is_not_for_that(used: int, *, goes: bool) -> None:
    """A fault may need it."""
    after = decided(
        hosts(a=WORN, b=None, c=None, z=None),
        stored=replace(RUN, recoveries=used),
        reports=STEPPING,
        policy=replace(POLICY, max_recoveries=2),
    ).table
    assert (after is not None) is goes
