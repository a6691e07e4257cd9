"""Which processes go on into the next generation, and when the job has stopped making progress.

Part of `decide`, apart because it is the heart of the paper: healthy processes never exit. A process goes
on if it runs and its script is resumable; all workers run the same script, so one that ever said so, also one
that died, speaks for those that are still loading.
"""

from collections.abc import Iterable, Sequence

from frun.protocol import blame
from frun.protocol.ranks import Kept
from frun.protocol.records import Failure, HostReport, RankTable, WorkerReport, WorkerState

NO_DONOR = "no_donor"
"""Kind of failure: no live replica has the state that is needed, so survivors are of no use."""
EXIT_NO_PROGRESS = 93
"""Exit status when generations pass without one completed step: a requeue would not help."""


def is_resumable(table: RankTable, reports: Iterable[HostReport]) -> bool:
    """Return whether any worker of this or an earlier generation said that the script is resumable."""
    return table.resumable or any(
        worker.resumable for report in reports for worker in report.workers
    )


def survivors(reports: Iterable[HostReport], lost: Iterable[str] = ()) -> Kept:
    """Return the processes of a resumable script that can go on."""
    gone = set(lost)
    return {
        (report.host, worker.local_rank): worker.incarnation
        for report in reports
        if report.host not in gone
        for worker in report.workers
        if worker.state is WorkerState.RUNNING
    }


def state_is_gone(table: RankTable, reports: Iterable[HostReport], kept: Kept) -> bool:
    """Return whether steps were completed and none of these processes has their result.

    A process that began after the last completed step has it only if it got it from another.
    """
    known = tuple(reports)
    progressed = any(report.progress for report in known)
    newest = table.generation if progressed else table.generation - 1 - table.barren
    if newest <= 0 or any(incarnation <= newest for incarnation in kept.values()):
        return False
    return not any(
        worker.has_state and (report.host, worker.local_rank) in kept
        for report in known
        for worker in report.workers
    )


def is_users(cause: Failure) -> bool:
    """Return True for a failure of the user's code: a recorded exception that is no lost peer's."""
    return cause.recorded and blame.is_clear(cause)


def dead_survivors(table: RankTable, reports: Sequence[HostReport]) -> list[tuple[str, int]]:
    """Return (host, local rank) of processes that were to go on in this generation and ended."""
    return [
        (report.host, worker.local_rank)
        for report in reports
        if not report.at_work
        for worker in report.workers
        if worker.state is not WorkerState.RUNNING and _was_to_go_on(table, report.host, worker)
    ]


def _was_to_go_on(table: RankTable, host: str, worker: WorkerReport) -> bool:
    place = table.slot_of(host)
    incarnations = place[1].incarnations if place is not None else ()
    return (
        worker.local_rank < len(incarnations)
        and 0 < worker.incarnation < table.generation
        and incarnations[worker.local_rank] == worker.incarnation
    )


def kept_of(table: RankTable) -> Kept:
    """Return the processes that the table says go on."""
    return {
        (slot.host, local_rank): incarnation
        for slot in table.slots
        for local_rank, incarnation in enumerate(slot.incarnations)
        if 0 < incarnation < table.generation
    }


def has_survivors(table: RankTable) -> bool:
    """Return whether any process goes on; cheaper than `kept_of` for all of them."""
    return any(0 < n < table.generation for slot in table.slots for n in slot.incarnations)


def barren_after(table: RankTable, reports: Iterable[HostReport]) -> int:
    """Return how many generations in a row, this one included, ended without a completed step."""
    return 0 if any(report.progress for report in reports) else table.barren + 1
