"""Builders of the protocol's documents with good defaults, so that a test names only what matters to it."""

from collections.abc import Iterable, Mapping

from frun.protocol.decide import Policy
from frun.protocol.records import (
    Failure,
    HostRecord,
    HostReport,
    Phase,
    RankTable,
    Slot,
    View,
    WorkerReport,
    WorkerState,
)

POLICY = Policy(
    min_hosts=3,
    max_hosts=3,
    max_restarts=0,
    join_timeout_s=600.0,
    last_call_s=30.0,
    replace_timeout_s=60.0,
    lease_ttl_s=3.0,
    prepare_timeout_s=90.0,
    settle_s=0.3,
    join_settle_s=1.0,
)
"""Three hosts, no more and no less, no restarts."""

ELASTIC = Policy(
    min_hosts=1,
    max_hosts=4,
    max_restarts=0,
    join_timeout_s=600.0,
    last_call_s=30.0,
    replace_timeout_s=5.0,
)
"""One to four hosts, no restarts."""

_STATES = {
    "s": WorkerState.STARTING,
    "r": WorkerState.RUNNING,
    "o": WorkerState.SUCCEEDED,
    "f": WorkerState.FAILED,
    "x": WorkerState.STOPPED,
}


def host(name: str, *, nproc: int = 2, node_rank: int | None = None, label: str = "") -> HostRecord:
    """Return a host's record; `label` is the machine's name if it isn't the host's id."""
    return HostRecord(
        host=name,
        name=label or name,
        address=f"10.0.0.{name}",
        port=4000,
        nproc=nproc,
        node_rank=node_rank,
    )


def failure(
    where: str, *, exit_code: int = 3, message: str = "", recorded: bool = False, order: int = 0
) -> Failure:
    """Return the failure of local rank 0 of a host; an exit status chosen by the script."""
    return Failure(
        rank=0,
        local_rank=0,
        host=where,
        exit_code=exit_code,
        message=message,
        recorded=recorded,
        order=order,
    )


VICTIM = "RuntimeError: Connection closed by peer [10.0.0.2]:4711"
"""What gloo raises in the peers of a rank that died."""


def victim(where: str) -> Failure:
    """Return what the peer of a dead rank leaves: a recorded connection error."""
    return failure(where, exit_code=1, message=VICTIM, recorded=True)


def report(
    name: str,
    workers: str = "",
    *,
    generation: int = 1,
    prepared: bool = True,
    port: int = 0,
    cause: Failure | None = None,
) -> HostReport:
    """Return a host's report; one letter per worker: s(tarting) r(unning) o(k) f(ailed) x (stopped)."""
    return HostReport(
        host=name,
        generation=generation,
        prepared=prepared,
        master_port=port,
        workers=tuple(
            WorkerReport(
                local_rank=local_rank,
                incarnation=generation,
                state=_STATES[letter],
                pid=100 + local_rank,
                failure=(cause or failure(name)) if letter == "f" else None,
            )
            for local_rank, letter in enumerate(workers)
        ),
    )


def table(
    phase: Phase,
    hosts: str = "a b c",
    *,
    generation: int = 1,
    nproc: int = 2,
    restarts: int = 0,
    reason: str = "because",
    cause: Failure | None = None,
    dropped: Iterable[str] = (),
) -> RankTable:
    """Return a rank table with one slot per word; `-` is a vacant one."""
    names = hosts.split()
    return RankTable(
        generation=generation,
        phase=phase,
        reason=reason,
        restarts=restarts,
        slots=tuple(
            Slot(
                host="" if name == "-" else name,
                address="" if name == "-" else f"10.0.0.{name}",
                port=0 if name == "-" else 4000,
                first_rank=index * nproc,
                nproc=nproc,
                incarnations=() if name == "-" else (generation,) * nproc,
            )
            for index, name in enumerate(names)
        ),
        failure=cause,
        dropped=tuple(dropped),
    )


def view(
    hosts: str | Iterable[HostRecord] = "a b c",
    *,
    table: RankTable | None = None,
    reports: Iterable[HostReport] = (),
    gone: str = "",
    answering: str = "",
    watching_since: float = -1000.0,
    joined: Mapping[str, int] | None = None,
) -> View:
    """Return a snapshot as an old leader sees it; hosts came in the order given."""
    records = [host(name) for name in hosts.split()] if isinstance(hosts, str) else list(hosts)
    return View(
        hosts={record.host: record for record in records},
        joined=joined or {record.host: 10 + index for index, record in enumerate(records)},
        reports={one.host: one for one in reports},
        table=table,
        gone=frozenset(gone.split()),
        answering=frozenset(answering.split()),
        watching_since=watching_since,
    )


def placed(table: RankTable) -> str:
    """Return the hosts of a table's slots in the form that `table` takes."""
    return " ".join(slot.host or "-" for slot in table.slots)
