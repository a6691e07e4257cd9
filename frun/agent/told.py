"""Turns what a worker told of its way through a generation, and its end, into events."""

from collections.abc import Iterator
from dataclasses import asdict, replace

from frun.events import (
    Event,
    FaultNoticed,
    FirstStepCompleted,
    StepsCompleted,
    WorkerExited,
    WorkerOut,
    WorkerPaused,
    WorkerPhaseEnded,
    WorkerRestored,
)
from frun.protocol.channel import (
    Diverged,
    FirstStep,
    Message,
    Odd,
    Out,
    Paused,
    PhaseEnded,
    Progress,
    Ready,
    Restored,
)
from frun.protocol.records import WorkerReport


def reported(report: WorkerReport, message: Message, rank: int) -> WorkerReport:
    """Return the report of a worker of this rank after what it told."""
    match message:
        case Ready():
            return replace(report, resumable=True)
        case Restored(homes=homes):
            return replace(report, has_state=True, diverged=False, homes=homes)
        case Diverged(rank=odd) if odd == rank:
            return replace(report, diverged=True)
        case Odd(reason=reason) if not (reason and report.odd):
            return replace(report, odd=reason)
        case _:
            return report


def events_of(message: Message, rank: int, local_rank: int) -> Iterator[tuple[Event, int]]:
    """Yield the event that a message is worth, if any, with its generation."""
    match message:
        case Paused(generation=generation, step=step, in_update=in_update, took_s=took_s):
            yield WorkerPaused(rank=rank, step=step, in_update=in_update, took_s=took_s), generation
        case Out(generation=generation, step=step):
            yield WorkerOut(rank=rank, step=step), generation
        case Restored(generation=generation):
            fields = asdict(message)
            del fields["generation"]
            yield WorkerRestored(rank=rank, **fields), generation
        case FirstStep(generation=generation, step=step, took_s=took_s):
            yield FirstStepCompleted(rank=rank, step=step, took_s=took_s), generation
        case Progress(generation=generation, step=step) if local_rank == 0:
            yield StepsCompleted(rank=rank, step=step), generation
        case PhaseEnded(generation=generation, phase=phase, took_s=took_s):
            yield WorkerPhaseEnded(rank=rank, phase=phase, took_s=took_s), generation
        case Odd(generation=generation, reason=reason) if reason:
            yield FaultNoticed(source="numbers", rank=rank, reason=reason, since_s=0.0), generation
        case Diverged(generation=generation, rank=odd, reason=reason):
            yield FaultNoticed(source="replicas", rank=odd, reason=reason, since_s=0.0), generation
        case _:
            pass


def exited(rank: int, report: WorkerReport, exit_code: int) -> WorkerExited:
    """Return the event of a worker's end, which its report tells already."""
    failure = report.failure
    return WorkerExited(
        rank=rank,
        local_rank=report.local_rank,
        pid=report.pid,
        state=report.state.value,
        exit_code=exit_code,
        message=failure.message if failure is not None else "",
        fault_class=failure.fault_class.value if failure is not None else "",
        evidence=failure.evidence if failure is not None else "",
    )
