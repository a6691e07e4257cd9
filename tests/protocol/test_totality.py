"""Every phase meets every fact: something is decided, with a reason, and nothing is ever raised."""

import itertools
from dataclasses import replace

import pytest

from frun.protocol.classes import FaultClass
from frun.protocol.decide import decide
from frun.protocol.health import Fact, Severity
from frun.protocol.policy import Policy, Seen
from frun.protocol.records import Failure, HostReport, Phase, RankTable
from tests.protocol.build import ELASTIC, POLICY, failure, report, table, victim, view
from tests.protocol.job import check_laws

NOW = 1000.0
POLICIES = [
    POLICY,
    replace(POLICY, max_restarts=1),
    ELASTIC,
    replace(ELASTIC, min_hosts=2, max_hosts=3, max_restarts=1, max_recoveries=0),
    replace(ELASTIC, breaker=1),
]
PLACES = ["", "a b c", "a - c", "- - -", "z"]
HOSTS = ["", "a", "a c", "a b c", "a b c y z"]
CAUSES: list[Failure | None] = [None, failure("b", exit_code=-9), victim("b")]
WATCHING = [NOW - 100, NOW - 1]


def _tables(phase: Phase, places: str) -> list[RankTable]:
    plain = table(phase, places, generation=2, dropped=("y",) if places else ())
    kept = tuple(
        replace(slot, incarnations=(1,) + (2,) * (slot.nproc - 1)) if slot.host == "a" else slot
        for slot in plain.slots
    )
    return [plain, replace(plain, slots=kept)]


def _reports(
    stored: RankTable, cause: Failure | None, generation: int, *, resumable: bool
) -> list[HostReport]:
    marks = {slot.host: slot.incarnations for slot in stored.slots}
    reports = [
        report("a", "rr", generation=generation),
        report("b", "fo" if cause else "oo", generation=generation, cause=cause),
        report("c", "sx", generation=generation, prepared=False),
    ]
    return [
        replace(
            one,
            workers=tuple(
                replace(worker, resumable=resumable, incarnation=incarnation)
                for worker, incarnation in zip(
                    one.workers, marks.get(one.host) or (generation,) * 2, strict=True
                )
            ),
        )
        for one in reports
    ]


# The phases after GATHER have a world; the job can also fail before it has one.
@pytest.mark.parametrize(
    ("phase", "places"),
    [
        (phase, places)
        for phase, places in itertools.product(Phase, PLACES)
        if places or phase in (Phase.GATHER, Phase.FAILED)
    ],
)
def test_every_fact_is_decided(phase: Phase, places: str) -> None:
    """Whatever is stored and reported, the leader says what to do and why; what it writes is lawful."""
    for stored, hosts, cause, policy, watching_since in itertools.product(
        _tables(phase, places), HOSTS, CAUSES, POLICIES, WATCHING
    ):
        for generation, resumable, since in ((1, False, NOW), (2, False, NOW), (2, True, 0.0)):
            snapshot = view(
                hosts,
                table=stored,
                reports=_reports(stored, cause, generation, resumable=resumable),
                gone="b",
                watching_since=watching_since,
            )
            seen = Seen(generation=2, phase=phase, since=since)
            decision = decide(snapshot, seen, policy, NOW)
            assert decision.reason
            assert decision.wake_at is None or decision.wake_at >= NOW
            assert _is_final(stored) <= (decision.table is None)
            if decision.table is not None and _lawful(stored, policy):
                check_laws(stored, decision.table, policy)
            assert decide(snapshot, seen, policy, NOW) == decision, "not pure"


@pytest.mark.parametrize("sick", ["a", "b", "z", "a b c y z"])
@pytest.mark.parametrize("phase", [Phase.GATHER, Phase.RECOVER, Phase.RUN])
@pytest.mark.parametrize("severity", Severity)
def test_every_fact_is_decided_where_hosts_are_not_fit(
    severity: Severity, phase: Phase, sick: str
) -> None:
    """The same with hosts of which a device is gone, or will be."""
    fact = Fact(
        name="lost",
        severity=severity,
        fault_class=FaultClass.DEVICE,
        reason="gone",
        lasting=True,
    )
    for stored, hosts, policy in itertools.product(_tables(phase, "a b c"), HOSTS, POLICIES):
        reports = [
            replace(
                one,
                progress=True,
                workers=tuple(replace(worker, homes=2) for worker in one.workers),
            )
            for one in _reports(stored, CAUSES[severity is Severity.FAULT], 2, resumable=True)
        ]
        plain = view(hosts, table=stored, reports=reports)
        records = {
            name: replace(record, health=(fact,)) if name in sick.split() else record
            for name, record in plain.hosts.items()
        }
        snapshot = replace(plain, hosts=records)
        decision = decide(snapshot, Seen(generation=2, phase=phase), policy, NOW)
        assert decision.reason
        if decision.table is not None and _lawful(stored, policy):
            check_laws(stored, decision.table, policy)
        fit = records.keys() - set(sick.split() if severity is Severity.FAULT else ())
        if fit and decision.table is not None and decision.table.phase is Phase.RECOVER:
            assert {slot.host for slot in decision.table.slots} <= fit


def _is_final(stored: RankTable) -> bool:
    return stored.phase.is_final


def _lawful(stored: RankTable, policy: Policy) -> bool:
    """Return True for tables that this policy's leader can have written."""
    members = [slot.host for slot in stored.slots]
    if stored.phase is Phase.GATHER:
        return len(members) <= policy.max_hosts and (not members or "" in members)
    return "" not in members and policy.min_hosts <= len(members) <= policy.max_hosts
