"""The account of a fault: when it is complete, whose times count, and which accounts are kept."""

from dataclasses import replace

import pytest

from frun.protocol import wire
from frun.protocol.classes import FaultClass
from frun.protocol.classify import LOST_HOST
from frun.protocol.incidents import IncidentRecord, outdated, renamed, summarize
from frun.protocol.records import HostRecord, HostReport, Incident, Phase, Recovery
from tests.protocol.build import table

RUN = replace(
    table(Phase.RUN, "a b", generation=4),
    incident=Incident(
        cause="rank 1 failed", kind="process", action="replace-worker", ranks=(1,), hosts=("a",)
    ),
)


def _report(host: str, recovery: Recovery | None, generation: int = 4) -> HostReport:
    return HostReport(host=host, generation=generation, prepared=True, recovery=recovery)


def test_the_longest_time_of_each_phase_counts() -> None:
    """A phase ends with the last host; bytes add up; the step is the one all agreed on."""
    reports = {
        "a": _report("a", Recovery(detect_s=0.01, pause_s=0.2, copy_s=0.1, total_s=0.5, step=9)),
        "b": _report("b", Recovery(pause_s=0.1, copy_s=0.3, total_s=0.4, copied_bytes=7, step=9)),
    }
    record = summarize(RUN, reports, 3.0)
    assert record is not None
    assert (record.id, record.generation, record.ranks, record.hosts) == (4, 4, (1,), ("a",))
    assert (record.detect_s, record.pause_s, record.copy_s) == (0.01, 0.2, 0.3)
    assert (record.total_s, record.copied_bytes, record.resumed_at_step) == (0.5, 7, 9)


def test_a_lost_host_was_unseen_for_its_lease() -> None:
    """Nobody measures how long a host was gone before its lease ended: the lease is counted."""
    lost = replace(RUN, incident=Incident(cause="lost b", kind="host", action="replace-host"))
    reports = {host: _report(host, Recovery(total_s=0.5)) for host in "ab"}
    record = summarize(lost, reports, 3)
    assert record is not None
    assert (record.detect_s, record.total_s) == (3.0, 3.5)
    assert wire.decode_incident(wire.encode(record)) == record


@pytest.mark.parametrize(
    "reports",
    [
        {},
        {"a": _report("a", Recovery())},
        {"a": _report("a", Recovery()), "b": _report("b", None)},
        {"a": _report("a", Recovery()), "b": _report("b", Recovery(), generation=3)},
    ],
    ids=["nobody", "one-missing", "one-not-in-yet", "old-news"],
)
def test_no_account_before_every_host_is_in_the_generation(reports: dict[str, HostReport]) -> None:
    """A host that has not reported, or speaks of an older generation, keeps the incident open."""
    assert summarize(RUN, reports, 3.0) is None


def test_nothing_is_closed_while_the_world_is_made() -> None:
    """Only a generation that runs, or has ended well, has an account; the first has no incident."""
    reports = {host: _report(host, Recovery()) for host in "ab"}
    for phase in (Phase.GATHER, Phase.RECOVER, Phase.FAILED):
        assert summarize(replace(RUN, phase=phase), reports, 3.0) is None
    assert summarize(replace(RUN, incident=None), reports, 3.0) is None
    assert summarize(None, reports, 3.0) is None


@pytest.mark.parametrize(
    ("stored", "gone"), [(0, 0), (1, 0), (60, 0), (99, 0), (100, 1), (130, 31)]
)
def test_a_hundred_accounts_are_kept(stored: int, gone: int) -> None:
    """The oldest go, and only when there are more than a hundred with the new one."""
    keys = [f"{number:08d}" for number in range(stored)]
    assert list(outdated(keys)) == keys[:gone]


def _loss(number: int, *hosts: str) -> IncidentRecord:
    return IncidentRecord(
        id=number,
        generation=number,
        cause="lost",
        kind="host",
        action="replace-host",
        hosts=hosts,
        fault_class=LOST_HOST.fault_class,
        evidence=LOST_HOST.evidence,
    )


def _back(*hosts: str, cut_off_s: float = 7.25) -> dict[str, HostRecord]:
    record = HostRecord(host="", name="", address="", port=1, nproc=1, cut_off_s=cut_off_s)
    return {host: replace(record, host=host) for host in hosts}


def test_a_lost_host_that_is_back_was_cut_off() -> None:
    """Its last loss gets another class, once; older ones, others' and what is not known do not."""
    records = (_loss(2, "a"), _loss(5, "b"), _loss(7, "a", "c"))
    (found,) = renamed(records, _back("a"))
    assert (found.id, found.fault_class) == (7, FaultClass.NETWORK)
    assert "did not reach etcd for 7.2 s" in found.evidence
    assert (
        replace(found, fault_class=LOST_HOST.fault_class, evidence=LOST_HOST.evidence) == records[2]
    )
    assert renamed((*records[:2], found), _back("a")) == ()
    assert renamed(records, _back("a", cut_off_s=0.0)) == ()
    assert renamed(records, _back("d")) == ()
    assert [record.id for record in renamed(records, _back("a", "b", "c"))] == [7, 5]


def test_the_class_of_what_was_no_lost_lease_stays() -> None:
    """A device or a process was at fault, whatever its host met since."""
    known = replace(_loss(3, "a"), fault_class=FaultClass.DEVICE, evidence="a row of memory")
    assert renamed((known,), _back("a")) == ()
