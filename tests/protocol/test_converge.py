"""One host's part: from the stored table and the local facts to the next actions."""

import itertools
from dataclasses import replace

import pytest

from frun.protocol.converge import (
    Action,
    Leave,
    LocalHost,
    PauseWorkers,
    Prepare,
    StartWorkers,
    StopWorkers,
    converge,
    report,
)
from frun.protocol.records import Phase, RankTable, WorkerReport, WorkerState
from tests.protocol.build import failure, table

ALIVE = (WorkerState.STARTING, WorkerState.RUNNING)


def local(
    workers: str = "",
    *,
    incarnation: int = 1,
    paused: int = 0,
    resumed: int = 0,
    prepared: int = 0,
    stopping: bool = False,
) -> LocalHost:
    """Return host b with one worker per letter: s r o f x, as in `build.report`."""
    states = dict(zip("srofx", WorkerState, strict=True))
    return LocalHost(
        host="b",
        workers=tuple(
            WorkerReport(local_rank=index, incarnation=incarnation, state=states[letter], pid=7)
            for index, letter in enumerate(workers)
        ),
        paused=paused,
        resumed=resumed,
        prepared=prepared,
        master_port=29000,
        stopping=stopping,
    )


def keeping(stored: RankTable, *incarnations: int) -> RankTable:
    """Return the table with these processes on host b: older generations go on."""
    return replace(
        stored,
        slots=tuple(
            replace(slot, incarnations=incarnations) if slot.host == "b" else slot
            for slot in stored.slots
        ),
    )


GATHER = table(Phase.GATHER, generation=2)
RECOVER = table(Phase.RECOVER, generation=2)
RUN = table(Phase.RUN, generation=2)
DONE = table(Phase.DONE, generation=2)
FAILED = table(Phase.FAILED, generation=2)
KEEP_ONE = keeping(RECOVER, 1, 2)
KEEP_BOTH = keeping(RECOVER, 1, 1)
RUN_ONE = keeping(RUN, 1, 2)
RUN_BOTH = keeping(RUN, 1, 1)
VACANT = keeping(table(Phase.GATHER, "a b -", generation=2), 1, 0)
WITHOUT_B = table(Phase.RUN, "a c", generation=2)
DROPPED = replace(WITHOUT_B, failure=failure("b"), dropped=("b",))


def mixed(states: str, *incarnations: int, **facts: int) -> LocalHost:
    """Return host b with workers of different generations."""
    here = local(states, **facts)  # type: ignore[arg-type]
    return replace(
        here,
        workers=tuple(
            replace(worker, incarnation=incarnation)
            for worker, incarnation in zip(here.workers, incarnations, strict=True)
        ),
    )


def stop(*local_ranks: int) -> tuple[Action, ...]:
    """Return the order to stop these workers, for the table's reason."""
    return (StopWorkers("because", local_ranks),)


def start(stored: RankTable, *local_ranks: int, resume: tuple[int, ...] = ()) -> tuple[Action, ...]:
    """Return the order to start these workers and to let those go on."""
    return (StartWorkers(stored, local_ranks, resume),)


@pytest.mark.parametrize(
    ("stored", "here", "expected"),
    [
        pytest.param(None, local("rr"), (), id="no-table"),
        pytest.param(GATHER, local(), (), id="gather-waits"),
        pytest.param(GATHER, local("rr"), stop(0, 1), id="gather-stops"),
        pytest.param(GATHER, local("xx"), (), id="gather-stopped"),
        pytest.param(RECOVER, local("rr"), stop(0, 1), id="recover-stops-first"),
        pytest.param(RECOVER, local("rr", stopping=True), (), id="recover-is-stopping"),
        pytest.param(RECOVER, local("ff"), stop(0, 1), id="recover-cleans-up-after-the-dead"),
        pytest.param(RECOVER, local("xf"), stop(1), id="recover-cleans-up-once"),
        pytest.param(RECOVER, local("xx"), (Prepare(RECOVER),), id="recover-prepares"),
        pytest.param(RECOVER, local(), (Prepare(RECOVER),), id="recover-first"),
        pytest.param(RECOVER, local(prepared=1), (Prepare(RECOVER),), id="recover-prepares-anew"),
        pytest.param(RECOVER, local(prepared=2), (), id="recover-ready"),
        pytest.param(RUN, local(prepared=2), start(RUN, 0, 1), id="run-starts"),
        pytest.param(RUN, local("xx", prepared=2), start(RUN, 0, 1), id="run-starts-again"),
        pytest.param(RUN, local("rr", prepared=2), stop(0, 1), id="run-stops-old"),
        pytest.param(RUN, local("rr", incarnation=2, prepared=2), (), id="run-runs"),
        pytest.param(RUN, local("ss", incarnation=2, prepared=2), (), id="run-starting"),
        pytest.param(RUN, local("oo", incarnation=2, prepared=2), (), id="run-ended"),
        pytest.param(RUN, local("fr", incarnation=2, prepared=2), (), id="run-failed-waits"),
        pytest.param(RUN, local(prepared=0), (), id="run-not-prepared"),
        pytest.param(
            KEEP_ONE, local("rf"), (PauseWorkers(KEEP_ONE, (0,)),), id="survivor-pauses-first"
        ),
        pytest.param(KEEP_ONE, local("rf", paused=2), stop(1), id="then-the-dead-is-cleaned-away"),
        pytest.param(
            KEEP_ONE, local("rx", paused=2), (Prepare(KEEP_ONE),), id="then-the-host-prepares"
        ),
        pytest.param(KEEP_ONE, local("rx", paused=2, prepared=2), (), id="paused-and-ready"),
        pytest.param(
            RUN_ONE,
            local("rx", paused=2, prepared=2),
            start(RUN_ONE, 1, resume=(0,)),
            id="newcomer-starts-and-survivor-goes-on",
        ),
        pytest.param(
            RUN_ONE,
            mixed("rr", 1, 2, paused=2, resumed=2, prepared=2),
            (),
            id="survivor-and-newcomer-run",
        ),
        pytest.param(
            RUN_BOTH,
            local("rr", paused=2, prepared=2),
            start(RUN_BOTH, resume=(0, 1)),
            id="all-of-this-host-go-on",
        ),
        pytest.param(
            RUN_BOTH, local("rr", paused=2, resumed=2, prepared=2), (), id="all-went-on-already"
        ),
        pytest.param(
            KEEP_BOTH,
            local("rf", paused=2, prepared=2),
            (),
            id="a-survivor-that-died-is-the-leader's-business",
        ),
        pytest.param(
            VACANT, local("rr"), (PauseWorkers(VACANT, (0,)),), id="survivors-pause-while-waiting"
        ),
        pytest.param(VACANT, local("rr", paused=2), stop(1), id="what-is-not-kept-is-stopped"),
        pytest.param(VACANT, local("rx", paused=2), (), id="survivors-wait"),
        pytest.param(DONE, local("oo", incarnation=2), (Leave(0, "because"),), id="done"),
        pytest.param(FAILED, local("rr", incarnation=2), stop(0, 1), id="failed"),
        pytest.param(FAILED, local("xx", incarnation=2), (Leave(1, "because"),), id="failed-ends"),
        pytest.param(
            replace(FAILED, exit_code=93),
            local(),
            (Leave(93, "because"),),
            id="the-breaker's-status",
        ),
        pytest.param(
            WITHOUT_B,
            local("rr"),
            (StopWorkers("generation 2 does not name this host", (0, 1)),),
            id="not-named-stops-at-once",
        ),
        pytest.param(WITHOUT_B, local("xx"), (), id="not-named-waits-as-a-spare"),
        pytest.param(WITHOUT_B, local(), (), id="spare"),
        pytest.param(
            DROPPED,
            local("fr"),
            (StopWorkers("generation 2 does not name this host", (1,)),),
            id="dropped-stops",
        ),
        pytest.param(DROPPED, local("fx"), (Leave(1, "because"),), id="dropped-leaves"),
        pytest.param(
            replace(DROPPED, generation=5, failure=failure("c")),
            local("fx"),
            (
                Leave(
                    1,
                    "a worker of this host failed when no restart was left, and the job went on"
                    " without it",
                ),
            ),
            id="dropped-earlier-leaves",
        ),
        pytest.param(
            replace(WITHOUT_B, failure=failure("b")),
            local("xx"),
            (),
            id="failed-within-the-budget-and-lost-is-a-spare",
        ),
        pytest.param(
            replace(WITHOUT_B, phase=Phase.DONE),
            local(),
            (Leave(0, "the job ended well; this spare was not needed"),),
            id="spare-of-a-good-job-ends-with-0",
        ),
        pytest.param(
            replace(WITHOUT_B, phase=Phase.FAILED),
            local(),
            (Leave(1, "because"),),
            id="spare-of-a-failed-job",
        ),
    ],
)
def test_next_actions(
    stored: RankTable | None, here: LocalHost, expected: tuple[Action, ...]
) -> None:
    """Each phase, as member, spare and dropped host."""
    assert converge(stored, here) == expected


TABLES = [
    keeping(replace(table(phase, hosts, generation=2), dropped=dropped), *incarnations)
    for phase in Phase
    for hosts in ("a b c", "a c", "a - c", "")
    for dropped in ((), ("b",))
    for incarnations in ((2, 2), (1, 2), (1, 1), ())
]
LOCALS = [
    mixed(workers, *incarnations, paused=paused, prepared=prepared)
    for workers in ("rr", "ro", "fr", "of", "sx", "xx")
    for incarnations in ((1, 1), (1, 2), (2, 2))
    for paused in (0, 2)
    for prepared in (0, 1, 2)
] + [local(prepared=prepared) for prepared in (0, 1, 2)]


def _act(action: Action, here: LocalHost) -> LocalHost | None:
    """Carry an action out at once, as an agent does; None when the host has left."""
    match action:
        case StopWorkers(local_ranks=local_ranks):
            stopped = tuple(
                replace(worker, state=WorkerState.STOPPED)
                if worker.local_rank in local_ranks
                else worker
                for worker in here.workers
            )
            return replace(here, workers=stopped)
        case PauseWorkers(table=stored):
            return replace(here, paused=stored.generation)
        case Prepare(table=stored):
            return replace(here, prepared=stored.generation)
        case StartWorkers(table=stored, local_ranks=local_ranks):
            others = tuple(w for w in here.workers if w.local_rank not in local_ranks)
            started = tuple(
                WorkerReport(
                    local_rank=local_rank,
                    incarnation=stored.generation,
                    state=WorkerState.RUNNING,
                    pid=8,
                )
                for local_rank in local_ranks
            )
            return replace(here, workers=others + started, resumed=stored.generation)
        case Leave():
            return None


def _settle(stored: RankTable, here: LocalHost) -> tuple[LocalHost | None, list[Action]]:
    done: list[Action] = []
    host: LocalHost | None = here
    while host is not None and (actions := converge(stored, host)):
        done.append(actions[0])
        assert len(done) <= 4, done
        host = _act(actions[0], host)
    return host, done


def _stale(stored: RankTable, here: LocalHost) -> list[WorkerReport]:
    """Return live workers that the table does not want here."""
    place = stored.slot_of("b")
    alive = [worker for worker in here.workers if worker.state in ALIVE]
    if place is None:
        return alive
    marks = place[1].incarnations or (stored.generation,) * place[1].nproc
    return [worker for worker in alive if worker.incarnation != marks[worker.local_rank]]


def test_every_state_settles() -> None:
    """From every table and every local state at most four actions lead to rest or to the end."""
    for stored, here in itertools.product(TABLES, LOCALS):
        settled, _ = _settle(stored, here)
        if settled is None:
            assert stored.phase.is_final or "b" in stored.dropped
            continue
        assert converge(stored, settled) == ()
        assert not _stale(stored, settled), "workers of another generation are left running"


def test_nothing_is_started_beside_what_must_stop() -> None:
    """Workers start only in RUN, on a prepared member, when nothing that must stop runs here."""
    for stored, here in itertools.product(TABLES, LOCALS):
        for action in converge(stored, here):
            match action:
                case StartWorkers(local_ranks=local_ranks, resume=resume):
                    assert stored.phase is Phase.RUN
                    assert here.prepared == stored.generation
                    assert not _stale(stored, here)
                    alive = {w.local_rank for w in here.workers if w.state in ALIVE}
                    assert not alive & set(local_ranks)
                    assert alive >= set(resume)
                case Prepare():
                    assert stored.phase is Phase.RECOVER
                    assert not _stale(stored, here)
                case PauseWorkers(local_ranks=local_ranks):
                    stale = {worker.local_rank for worker in _stale(stored, here)}
                    assert not stale & set(local_ranks)
                case Leave():
                    alive = {w.local_rank for w in here.workers if w.state in ALIVE}
                    assert stored.phase is Phase.DONE or not alive
                case StopWorkers(local_ranks=local_ranks):
                    assert local_ranks


def test_nothing_is_done_while_a_stop_is_under_way() -> None:
    """One action at a time: what follows is decided from the state after it."""
    for stored, here in itertools.product(TABLES, LOCALS):
        assert converge(stored, replace(here, stopping=True)) == ()


def test_every_action_has_a_reason() -> None:
    """Whoever is stopped or leaves is told why."""
    for stored, here in itertools.product(TABLES, LOCALS):
        for action in converge(stored, here):
            if isinstance(action, StopWorkers | Leave):
                assert action.reason


def test_a_report_speaks_of_the_stored_generation_only() -> None:
    """No report without a place; older workers and an older store are not mentioned."""
    assert report(None, local("rr")) is None
    assert report(WITHOUT_B, local("rr")) is None
    old = report(GATHER, local("rr", incarnation=1, prepared=1))
    assert old is not None
    assert (old.generation, old.prepared, old.master_port, old.workers) == (2, False, 0, ())
    here = local("rf", incarnation=2, prepared=2)
    new = report(RUN, here)
    assert new is not None
    assert (new.prepared, new.master_port, new.workers) == (True, 29000, here.workers)


def test_who_gets_ready_speaks_when_it_is() -> None:
    """Until then there is nothing to say, unless a process that was to go on has ended."""
    assert report(RECOVER, local("rr", incarnation=1)) is None
    assert report(KEEP_BOTH, mixed("rr", 1, 1)) is None
    ready = report(KEEP_BOTH, mixed("rr", 1, 1, prepared=2))
    assert ready is not None
    assert ready.prepared
    for dead in "ofx":
        said = report(KEEP_BOTH, mixed("r" + dead, 1, 1))
        assert said is not None
        assert not said.prepared
        assert len(said.workers) == 2


def test_a_report_shows_survivors_beside_newcomers() -> None:
    """Who goes on from an older generation is reported as long as the table wants that process."""
    here = mixed("rr", 1, 2, prepared=2)
    said = report(RUN_ONE, here)
    assert said is not None
    assert said.workers == here.workers
    said = report(RUN_BOTH, here)
    assert said is not None
    assert said.workers == here.workers[:1]
