"""Owns the status document: what `frun status --json` prints, made from the job's keys alone.

Pure. Fetching the keys and showing the document belong to `status_cli` and `console`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any
from urllib.parse import unquote

from frun.agent.failures import describe_exit
from frun.protocol import noticed, stragglers, wire
from frun.protocol.health import Fact, Severity
from frun.protocol.keys import ROOT, Keys
from frun.protocol.records import (
    Failure,
    HostRecord,
    HostReport,
    Phase,
    RankTable,
    Slot,
    WorkerReport,
    WorkerState,
)
from frun.protocol.stragglers import Work

SCHEMA = 1
MEMBER, SPARE, LOST = "member", "spare", "lost"
UNKNOWN = "unknown"
"""State of a worker that no report speaks of: its host is lost, or has said nothing yet."""


def job_ids(items: Mapping[str, bytes]) -> list[str]:
    """Return the ids of the jobs that these keys (all under ROOT) belong to, sorted."""
    return sorted({unquote(key[len(ROOT) :].split("/", 1)[0]) for key in items})


def status_document(job_id: str, items: Mapping[str, bytes]) -> dict[str, Any] | None:
    """Return the status of a job from its keys, or None if there is no such job.

    Raises WireError when a document is from another version of frun.
    """
    keys = Keys(job_id)
    spec_data, table_data = items.get(keys.spec), items.get(keys.ranktable)
    records = {
        record.host: record
        for key, data in items.items()
        if key.startswith(keys.hosts)
        for record in (wire.decode_host(data),)
    }
    if spec_data is None and table_data is None and not records:
        return None
    reports = {
        report.host: report
        for key, data in items.items()
        if key.startswith(keys.reports)
        for report in (wire.decode_report(data),)
    }
    spec = wire.decode_spec(spec_data) if spec_data is not None else None
    table = wire.decode_table(table_data) if table_data is not None else _no_table()
    leader = items.get(keys.leader)
    hosts = [_member(slot, records, reports) for slot in table.slots]
    _score(hosts, noticed.works(table.slots, reports))
    seated = {slot.host for slot in table.slots}
    hosts += [
        _host(record.host, record, record.address, SPARE, [])
        for record in sorted(records.values(), key=lambda record: record.host)
        if record.host not in seated
    ]
    return {
        "schema": SCHEMA,
        "job_id": job_id,
        "generation": table.generation,
        "phase": table.phase.value,
        "reason": table.reason,
        "leader": leader.decode("utf-8", "replace") if leader is not None else None,
        "world_size": table.world_size,
        "restarts": table.restarts,
        "max_restarts": spec.max_restarts if spec is not None else None,
        "drills": spec is not None and spec.drills,
        "entry": spec.entry if spec is not None else None,
        "failure": _failure(table.failure) if table.failure is not None else None,
        "recoveries": table.recoveries,
        "hosts": hosts,
        "findings": _findings(table, records.values(), reports),
        "incidents": [
            asdict(wire.decode_incident(data))
            for key, data in sorted(items.items())
            if key.startswith(keys.incidents)
        ],
    }


def is_final(document: Mapping[str, Any]) -> bool:
    """Return True when nothing can follow this status."""
    return Phase(document["phase"]).is_final


def _no_table() -> RankTable:
    return RankTable(generation=0, phase=Phase.GATHER, reason="no rank table yet")


def _member(
    slot: Slot, records: Mapping[str, HostRecord], reports: Mapping[str, HostReport]
) -> dict[str, Any]:
    record = records.get(slot.host)
    report = reports.get(slot.host) if record is not None else None
    told = {worker.local_rank: worker for worker in report.workers} if report is not None else {}
    workers = []
    for local_rank in range(slot.nproc):
        worker = told.get(local_rank)
        if worker is None:
            incarnations = slot.incarnations[local_rank : local_rank + 1]
            entry = _unknown(incarnations[0] if incarnations else None)
        else:
            entry = _told(worker)
        workers.append({"rank": slot.first_rank + local_rank, "local_rank": local_rank, **entry})
    role = MEMBER if record is not None else LOST
    return _host(slot.host, record, slot.address, role, workers)


def _host(
    host: str, record: HostRecord | None, address: str, role: str, workers: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "host": host,
        "name": record.name if record is not None else "",
        "address": address,
        "role": role,
        "nproc": record.nproc if record is not None else len(workers),
        "keeps_store": record is not None and record.keeps_store,
        "agent_pid": record.pid if record is not None else None,
        "health": [_fact(fact) for fact in record.health] if record is not None else [],
        "workers": workers,
    }


def _fact(fact: Fact) -> dict[str, Any]:
    return {
        "check": fact.check,
        "name": fact.name,
        "severity": fact.severity.value,
        "class": fact.fault_class.value,
        "device": fact.device,
        "lasting": fact.lasting,
        "text": str(fact),
    }


def _unknown(incarnation: int | None) -> dict[str, Any]:
    return {
        "pid": None,
        "state": UNKNOWN,
        "incarnation": incarnation,
        "exit": None,
        "diverged": False,
        "own_s": None,
        "score": None,
    }


def _told(worker: WorkerReport) -> dict[str, Any]:
    return {
        "pid": worker.pid or None,
        "state": worker.state.value,
        "incarnation": worker.incarnation,
        "exit": _exit(worker),
        "diverged": worker.diverged,
        "own_s": worker.work.own_s if worker.work is not None else None,
        "score": None,
    }


def _score(hosts: Iterable[Mapping[str, Any]], works: Mapping[int, Work]) -> None:
    """Say of each worker how many times as long as the median it takes for its own part of a step."""
    scores = stragglers.scores(works)
    for host in hosts:
        for worker in host["workers"]:
            if worker["rank"] in scores:
                worker["score"] = round(scores[worker["rank"]], 2)


def _findings(
    table: RankTable, records: Iterable[HostRecord], reports: Mapping[str, HostReport]
) -> list[dict[str, Any]]:
    """Return all that is wrong now: with hosts, as their checks say, and with ranks."""
    ranks = noticed.noticed(table.slots, reports)
    return [
        {
            "source": fact.check,
            "severity": fact.severity.value,
            "host": record.host,
            "rank": None,
            "text": str(fact),
        }
        for record in records
        for fact in record.health
    ] + [{"severity": Severity.WARNING.value, **asdict(one)} for one in ranks]


def _exit(worker: WorkerReport) -> str | None:
    match worker.state:
        case WorkerState.SUCCEEDED:
            return describe_exit(0)
        case WorkerState.FAILED if worker.failure is not None:
            return failure_text(worker.failure)
        case WorkerState.STOPPED:
            return "stopped by frun"
        case _:
            return None


def failure_text(failure: Failure) -> str:
    """Return the exit in words, and the worker's own words if it recorded any, on one line."""
    text = describe_exit(failure.exit_code)
    return f"{text}: {' '.join(failure.message.split())}" if failure.recorded else text


def _failure(failure: Failure) -> dict[str, Any]:
    return {
        "rank": failure.rank,
        "local_rank": failure.local_rank,
        "host": failure.host,
        "pid": failure.pid or None,
        "exit_code": failure.exit_code,
        "exit": failure_text(failure),
        "log": failure.log,
        "fault_class": failure.fault_class.value,
        "evidence": failure.evidence,
    }
