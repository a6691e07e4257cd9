"""What is wrong with ranks of a running job now, as the reports of their hosts tell it. Pure.

The events say when each was noticed first; this says what still is so.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from frun.protocol import stragglers
from frun.protocol.hangs import Standing
from frun.protocol.records import HostReport, Slot, WorkerReport, WorkerState
from frun.protocol.stragglers import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One thing that is wrong with a rank."""

    source: str
    """What noticed it, as in the event `fault_noticed`."""
    rank: int
    host: str
    text: str


def works(slots: Iterable[Slot], reports: Mapping[str, HostReport]) -> dict[int, Work]:
    """Return what is known of each rank's own part of a step."""
    return {
        rank: worker.work
        for rank, _, worker in _workers(slots, reports)
        if worker.work is not None and worker.state is WorkerState.RUNNING
    }


def noticed(slots: Iterable[Slot], reports: Mapping[str, HostReport]) -> list[Notice]:
    """Return what is wrong, by rank."""
    places = tuple(slots)
    slow = stragglers.compare(works(places, reports), ())
    return [
        Notice(source=source, rank=rank, host=host, text=text)
        for rank, host, worker in _workers(places, reports)
        if worker.state is WorkerState.RUNNING
        for source, text in _of(rank, worker, slow.get(rank, ""))
    ]


def _of(rank: int, worker: WorkerReport, slow: str) -> Iterator[tuple[str, str]]:
    if worker.standing is not None:
        yield "hang", _stands(rank, worker.standing)
    if worker.diverged:
        yield "replicas", f"rank {rank} holds other parameters than most of its replicas"
    if worker.odd:
        yield "numbers", f"rank {rank}: {worker.odd}"
    if slow:
        yield "straggler", slow


def _stands(rank: int, standing: Standing) -> str:
    at = f", at {standing.where}" if standing.where else ""
    return f"rank {rank} stands still in the {standing.place} of step {standing.step}{at}"


def _workers(
    slots: Iterable[Slot], reports: Mapping[str, HostReport]
) -> Iterator[tuple[int, str, WorkerReport]]:
    for slot in slots:
        report = reports.get(slot.host)
        for worker in report.workers if report is not None else ():
            yield slot.first_rank + worker.local_rank, slot.host, worker
