"""One host's part: from the stored rank table and what runs here to the next actions.

Pure and level-triggered like `decide`. Called again after every change; on a host that already is as the
table wants it returns nothing, so a repeated or late table does no harm.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from frun.protocol.records import (
    HostReport,
    Phase,
    RankTable,
    Recovery,
    Slot,
    WorkerReport,
    WorkerState,
)

_ALIVE = (WorkerState.STARTING, WorkerState.RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalHost:
    """What one agent knows of its own host."""

    host: str
    workers: tuple[WorkerReport, ...] = ()
    """The latest worker of each local rank; a stopped or ended one stays until the next."""
    paused: int = 0
    """Generation for which the workers that go on were told to pause; 0 for none."""
    resumed: int = 0
    """Generation in which they were told to go on; 0 for none."""
    prepared: int = 0
    """Generation whose group store is ready here; 0 for none."""
    master_port: int = 0
    """Port held for MASTER_PORT of the prepared generation."""
    stopping: bool = False
    """A stop of workers is under way."""
    progress: int = 0
    """Latest generation in which a worker here completed a step."""
    recovery: tuple[int, Recovery] | None = None
    """Generation, and how long this host took to get into it, once it is."""


@dataclass(frozen=True, slots=True)
class StopWorkers:
    """Stop the workers of these local ranks, and whatever is left of those that are dead."""

    reason: str
    local_ranks: tuple[int, ...]
    at_once: bool = False
    """They hang: a soft signal is lost on them."""


@dataclass(frozen=True, slots=True)
class PauseWorkers:
    """Tell these workers to leave their groups and wait: the table's generation is being made."""

    table: RankTable
    local_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prepare:
    """Begin the group store of the table's generation and hold a port for MASTER_PORT."""

    table: RankTable


@dataclass(frozen=True, slots=True)
class StartWorkers:
    """Start the workers of these local ranks, and let those that are paused go on."""

    table: RankTable
    local_ranks: tuple[int, ...]
    resume: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Leave:
    """This agent is finished: leave the job with this exit status, saying so."""

    exit_code: int
    reason: str


Action = StopWorkers | PauseWorkers | Prepare | StartWorkers | Leave


def converge(table: RankTable | None, local: LocalHost) -> tuple[Action, ...]:
    """Return what this host must do now. Empty when it is where the table wants it, or must wait."""
    if table is None or local.stopping:
        return ()
    place = table.slot_of(local.host)
    if place is None:
        return _not_a_member(table, local)
    slot = place[1]
    match table.phase:
        case Phase.GATHER:
            # The pause comes first: it only sends a message, and survivors can leave their groups
            # while what is dead is cleaned away.
            return _pause(table, slot, local) or _stop_stale(table, slot, local)
        case Phase.RECOVER:
            before = _pause(table, slot, local) or _stop_stale(table, slot, local)
            prepared = local.prepared == table.generation
            return before or (() if prepared else (Prepare(table),))
        case Phase.RUN:
            return _stop_stale(table, slot, local) or _start(table, slot, local)
        case Phase.DONE:
            return (Leave(0, table.reason),)
        case Phase.FAILED:
            alive = _alive(local.workers)
            if alive:
                return (StopWorkers(table.reason, alive),)
            return (Leave(table.exit_code, table.reason),)


def report(table: RankTable | None, local: LocalHost) -> HostReport | None:
    """Return what this host has to say about the stored generation; None if there is nothing to say.

    A member that gets ready, and of whose processes none has ended, is what the table says it is: it
    speaks when it is prepared. More words of 2,048 hosts would keep etcd from what all wait for.
    """
    place = None if table is None else table.slot_of(local.host)
    if table is None or place is None:
        return None
    wanted = _incarnations(table, place[1])
    workers = tuple(w for w in local.workers if wanted.get(w.local_rank) == w.incarnation)
    prepared = local.prepared == table.generation
    if table.phase is Phase.RECOVER and not prepared and all(w.state in _ALIVE for w in workers):
        return None
    recovery = local.recovery
    return HostReport(
        host=local.host,
        generation=table.generation,
        prepared=prepared,
        master_port=local.master_port if prepared else 0,
        workers=workers,
        progress=local.progress == table.generation,
        recovery=recovery[1] if recovery and recovery[0] == table.generation else None,
    )


def _incarnations(table: RankTable, slot: Slot) -> dict[int, int]:
    """Return per local rank the generation in which its process must have been started.

    In a world that is not complete a slot without marks keeps nothing.
    """
    if slot.incarnations:
        return dict(enumerate(slot.incarnations))
    return dict.fromkeys(range(slot.nproc), table.generation)


def _stop_stale(table: RankTable, slot: Slot, local: LocalHost) -> tuple[Action, ...]:
    """Stop what must not go on. Dead workers count until their leftovers were cleaned away."""
    wanted = _incarnations(table, slot)
    stale = tuple(
        worker.local_rank
        for worker in local.workers
        if wanted.get(worker.local_rank) != worker.incarnation
        and worker.state is not WorkerState.STOPPED
    )
    return (StopWorkers(table.reason, stale, _hang(table)),) if stale else ()


def _hang(table: RankTable) -> bool:
    """Tell whether the workers that do not go on into this generation hang."""
    return table.incident is not None and table.incident.kind == "hang"


def _kept(table: RankTable, slot: Slot, local: LocalHost) -> tuple[int, ...]:
    """Return local ranks of live processes that go on from an older generation."""
    wanted = _incarnations(table, slot)
    return tuple(
        worker.local_rank
        for worker in local.workers
        if worker.state in _ALIVE
        and worker.incarnation < table.generation
        and wanted.get(worker.local_rank) == worker.incarnation
    )


def _pause(table: RankTable, slot: Slot, local: LocalHost) -> tuple[Action, ...]:
    kept = _kept(table, slot, local)
    if not kept or local.paused >= table.generation:
        return ()
    return (PauseWorkers(table, kept),)


def _start(table: RankTable, slot: Slot, local: LocalHost) -> tuple[Action, ...]:
    if local.prepared != table.generation:
        # The leader saw this host prepared; an agent that is not has nothing to go on from.
        return ()
    have = {worker.local_rank: worker.incarnation for worker in local.workers}
    wanted = _incarnations(table, slot)
    missing = tuple(
        local_rank
        for local_rank, incarnation in wanted.items()
        if incarnation == table.generation and have.get(local_rank) != incarnation
    )
    resume = () if local.resumed >= table.generation else _kept(table, slot, local)
    return (StartWorkers(table, missing, resume),) if missing or resume else ()


def _not_a_member(table: RankTable, local: LocalHost) -> tuple[Action, ...]:
    """Stop at once what the table no longer names; then wait as a spare or leave."""
    alive = _alive(local.workers)
    if alive:
        reason = f"generation {table.generation} does not name this host"
        return (StopWorkers(reason, alive),)
    if local.host in table.dropped:
        return (Leave(1, _why_dropped(table, local.host)),)
    match table.phase:
        case Phase.DONE:
            return (Leave(0, "the job ended well; this spare was not needed"),)
        case Phase.FAILED:
            return (Leave(table.exit_code, table.reason),)
        case Phase.GATHER | Phase.RECOVER | Phase.RUN:
            return ()


def _alive(workers: Iterable[WorkerReport]) -> tuple[int, ...]:
    return tuple(worker.local_rank for worker in workers if worker.state in _ALIVE)


def _why_dropped(table: RankTable, host: str) -> str:
    if table.failure is not None and table.failure.host == host:
        return table.reason
    return "a worker of this host failed when no restart was left, and the job went on without it"
