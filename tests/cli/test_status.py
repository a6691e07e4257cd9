"""The status document, its table, and finding the job that is meant."""

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from frun.console import status_rows, status_view
from frun.errors import UsageError, WireError
from frun.finding import find_target
from frun.protocol import wire
from frun.protocol.classes import FaultClass
from frun.protocol.health import Fact, Severity
from frun.protocol.keys import Keys
from frun.protocol.records import (
    Failure,
    HostRecord,
    HostReport,
    JobSpec,
    Phase,
    RankTable,
    Slot,
    WorkerReport,
    WorkerState,
)
from frun.protocol.stragglers import Work
from frun.registry import JobEntry, current_place
from frun.status import is_final, job_ids, status_document

KEYS = Keys("a/job")
DEATH = Failure(rank=1, local_rank=1, host="h1", exit_code=-9, pid=101, message="died")
RAISED = Failure(
    rank=1, local_rank=1, host="h1", exit_code=1, pid=101, message="KeyError:\n 3", recorded=True
)
NO_ETCD: dict[str, str | None] = dict.fromkeys(
    ("etcd_ca", "etcd_cert", "etcd_key", "etcd_user", "etcd_password_file", "etcd_password")
)


def host(name: str, **changes: Any) -> HostRecord:
    values = {"host": name, "name": name, "address": "10.0.0.1", "port": 1, "nproc": 2, "pid": 9}
    return HostRecord(**{**values, **changes})


def slot(name: str, first: int) -> Slot:
    return Slot(
        host=name, address="10.0.0.1", port=1, first_rank=first, nproc=2, incarnations=(2, 2)
    )


def worker(local_rank: int, state: WorkerState, failure: Failure | None = None) -> WorkerReport:
    return WorkerReport(
        local_rank=local_rank, incarnation=2, state=state, pid=100 + local_rank, failure=failure
    )


def job(failure: Failure = DEATH, phase: Phase = Phase.RUN) -> dict[str, bytes]:
    """Return the keys of a job of two hosts, one of them lost, and a spare."""
    table = RankTable(
        generation=2,
        phase=phase,
        reason="rank 1 failed: restart 1 of 3",
        restarts=1,
        slots=(slot("h1", 0), slot("h2", 2)),
        failure=failure,
    )
    spec = JobSpec(
        job_id="a/job",
        uid="u",
        min_hosts=2,
        max_hosts=2,
        max_restarts=3,
        entry="train.py",
        version="1",
    )
    report = HostReport(
        host="h1",
        generation=2,
        workers=(worker(0, WorkerState.RUNNING), worker(1, WorkerState.FAILED, failure)),
    )
    return {
        KEYS.spec: wire.encode(spec),
        KEYS.ranktable: wire.encode(table),
        KEYS.leader: b"h1",
        KEYS.host("h1"): wire.encode(host("h1")),
        KEYS.host("h3"): wire.encode(host("h3", address="10.0.0.3")),
        KEYS.report("h1"): wire.encode(report),
        KEYS.report("h3"): wire.encode(HostReport(host="h3", generation=0)),
    }


def document(items: dict[str, bytes]) -> dict[str, Any]:
    made = status_document("a/job", items)
    assert made is not None
    return made


def test_document_is_what_the_contract_says() -> None:
    """Every field of the published format is there, with members, lost hosts and spares."""
    made = document(job())
    wanted = {"schema", "job_id", "generation", "phase", "reason", "leader", "world_size", "hosts"}
    assert wanted <= set(made)
    assert (made["schema"], made["job_id"], made["generation"]) == (1, "a/job", 2)
    assert (made["phase"], made["leader"], made["world_size"]) == ("run", "h1", 4)
    assert (made["restarts"], made["max_restarts"]) == (1, 3)
    assert [(h["host"], h["role"]) for h in made["hosts"]] == [
        ("h1", "member"),
        ("h2", "lost"),
        ("h3", "spare"),
    ]
    assert made["hosts"][0]["workers"] == [
        {
            "rank": 0,
            "local_rank": 0,
            "pid": 100,
            "state": "running",
            "incarnation": 2,
            "exit": None,
            "diverged": False,
            "own_s": None,
            "score": None,
        },
        {
            "rank": 1,
            "local_rank": 1,
            "pid": 101,
            "state": "failed",
            "incarnation": 2,
            "exit": "SIGKILL (9)",
            "diverged": False,
            "own_s": None,
            "score": None,
        },
    ]
    assert [w["state"] for w in made["hosts"][1]["workers"]] == ["unknown", "unknown"]
    assert made["hosts"][2]["workers"] == []
    assert made["failure"]["exit"] == "SIGKILL (9)"


def test_recorded_words_are_on_one_line() -> None:
    """What the worker recorded follows its exit status."""
    made = document(job(RAISED))
    assert made["hosts"][0]["workers"][1]["exit"] == "exit status 1: KeyError: 3"


def test_no_job_and_a_job_without_table() -> None:
    """No keys: no document. Hosts that still gather: generation 0."""
    assert status_document("other", job()) is None
    items = {KEYS.host("h1"): wire.encode(host("h1"))}
    made = document(items)
    assert (made["generation"], made["phase"], made["leader"]) == (0, "gather", None)
    assert [h["role"] for h in made["hosts"]] == ["spare"]
    assert not is_final(made)
    assert is_final(document(job(phase=Phase.DONE)))


def test_vacant_place_is_lost() -> None:
    """A place that waits for a host is shown as lost, without a name."""
    table = RankTable(
        generation=3, phase=Phase.GATHER, reason="lost h2", slots=(replace(slot("h2", 0), host=""),)
    )
    made = document({KEYS.ranktable: wire.encode(table)})
    assert [(h["host"], h["role"]) for h in made["hosts"]] == [("", "lost")]
    assert status_rows(made)[0][:3] == ("(vacant)", "10.0.0.1", "lost")


def test_document_of_another_version_is_refused() -> None:
    """A document that this version can't read is an error that says so."""
    with pytest.raises(WireError, match="schema 9"):
        status_document("a/job", {KEYS.ranktable: b'{"schema": 9}'})


def test_job_ids_are_read_back() -> None:
    """Ids come back unquoted, each once."""
    assert job_ids({**job(), Keys("b").spec: b""}) == ["a/job", "b"]


def test_table_shows_every_worker_of_a_small_job() -> None:
    """One row per worker, the host named once; exits and reason in full."""
    output = io.StringIO()
    Console(file=output, width=120).print(status_view(document(job(RAISED)), note="careful"))
    text = output.getvalue()
    for part in (
        "rank 1 failed: restart 1 of 3",
        "exit status 1: KeyError: 3",
        "1 of 3",
        "careful",
    ):
        assert part in text
    rows = status_rows(document(job()))
    assert [row[0] for row in rows] == ["h1", "", "h2", "", "h3"]
    assert rows[1][3:] == ("1", "1", "101", "failed", "2", "", "SIGKILL (9)")


def test_what_is_wrong_stands_below_the_table() -> None:
    """With hosts and with ranks: in the document all of it, on a terminal the first ones."""
    fact = Fact(
        name="disk",
        severity=Severity.FAULT,
        fault_class=FaultClass.STORAGE,
        reason="/tmp is full",
        check="host",
    )
    slow = [
        replace(worker(local_rank, WorkerState.RUNNING), work=Work(own_s=own_s))
        for local_rank, own_s in ((0, 0.01), (1, 0.023))
    ]
    items = job()
    items[KEYS.host("h1")] = wire.encode(host("h1", health=(fact,)))
    items[KEYS.report("h1")] = wire.encode(HostReport(host="h1", generation=2, workers=tuple(slow)))
    made = document(items)
    assert [worker["score"] for worker in made["hosts"][0]["workers"]] == [1.0, 2.3]
    full, behind = made["findings"]
    assert full == {
        "source": "host",
        "severity": "fault",
        "host": "h1",
        "rank": None,
        "text": "host: /tmp is full",
    }
    assert (behind["source"], behind["severity"], behind["rank"]) == ("straggler", "warning", 1)
    output = io.StringIO()
    console = Console(file=output, width=160)
    console.print(status_view(made))
    console.print(status_view({**made, "findings": [full] * 12}))
    text = output.getvalue()
    assert "fault  h1: host: /tmp is full" in text
    assert "warning  h1: rank 1 takes 23 ms for its own part of a step, 2.3 times" in text
    assert " 2.3x " in text
    assert "and 2 more findings: frun status --json" in text


def test_large_job_has_a_row_per_host_and_its_failures() -> None:
    """With hundreds of workers hosts are summed up, and failed workers are still shown."""
    made = document(job())
    many = [{**made["hosts"][0], "workers": made["hosts"][0]["workers"] * 4} for _ in range(20)]
    rows = status_rows({**made, "hosts": many})
    assert len(rows) == 20 * 5
    assert rows[0] == ("h1", "10.0.0.1", "member", "0-1", "", "", "4 running, 4 failed", "", "", "")


def entry(job_id: str, endpoint: str = "127.0.0.1:1") -> JobEntry:
    return JobEntry(
        job_id=job_id,
        endpoints=(endpoint,),
        pid=1,
        pid_started=1,
        place=current_place(),
        started_at=0.0,
        tls_ca="/ca",
        user="me",
    )


def test_the_only_job_is_meant() -> None:
    """Without arguments the only job is taken, whatever the environment says of endpoints."""
    for agents in ([entry("a")], [entry("a"), entry("a")]):
        target = find_target(None, "else:2379", {**NO_ETCD, "etcd_password": "p"}, agents)
        assert (target.job_id, target.endpoints) == ("a", ("127.0.0.1:1",))
        assert (target.tls_ca, target.user, target.password) == ("/ca", "me", "p")
    assert find_target("b", None, NO_ETCD, [entry("a"), entry("b")]).job_id == "b"


@pytest.mark.parametrize(
    ("job_id", "jobs", "message"),
    [
        (None, [], r"^no job runs on this machine: name one: frun status JOB, or --rdzv-endpoint"),
        (None, [entry("a"), entry("b")], r"^several jobs run on this machine \(a, b\): name one"),
        ("c", [entry("a")], r"^no job 'c' on this machine \(there is: a\): name one"),
        ("a", [entry("a"), entry("a", "x:2")], r"add --rdzv-endpoint 127.0.0.1:1 or x:2$"),
    ],
)
def test_unclear_means_how_to_name_one(
    job_id: str | None, jobs: list[JobEntry], message: str
) -> None:
    """When it is not clear which job is meant the error says how to name one."""
    with pytest.raises(UsageError, match=message):
        find_target(job_id, None, NO_ETCD, jobs)


def test_endpoint_is_used_when_this_machine_knows_no_such_job() -> None:
    """An endpoint, typed or from the environment, and an id reach a job elsewhere."""
    target = find_target("c", "https://e1,https://[::1]:9", NO_ETCD, [entry("a")])
    assert (target.endpoints, target.tls) == (("e1:2379", "[::1]:9"), True)
