"""Ends what is left of workers when the zygote, which else does this, is dead itself.

Owns only that. How workers are stopped in the ordinary case is `frun.worker.stopping`'s, inside the zygote.
"""

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from frun import procfs
from frun.procfs import Process


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """A process that SIGKILL did not end in time."""

    pid: int
    state: str
    """The kernel's letter; D: in the kernel, uninterruptible."""

    def __str__(self) -> str:
        """Say it in words."""
        return f"pid {self.pid} (state {self.state})"


def left_behind(workers: Mapping[int, int]) -> list[Process]:
    """Return the processes that still run in the sessions of these workers, and below them.

    `workers` maps each worker's pid to its start time, so that a stranger that was given a worker's
    number in the meantime is told apart. A child with a session of its own is found only while its
    parent lives.
    """
    processes = procfs.table()
    own = set()
    for pid, started in workers.items():
        leader = processes.get(pid)
        if leader is None or leader.started == started:
            own.add(pid)
    found = {p.pid: p for p in processes.values() if p.session in own}
    for process in list(found.values()):
        found |= {p.pid: p for p in procfs.descendants(process.pid, processes)}
    return [process for process in found.values() if process.running]


def kill_left_behind(workers: Mapping[int, int]) -> list[Process]:
    """Send SIGKILL to what `left_behind` finds; return it."""
    found = left_behind(workers)
    procfs.send_all(found, signal.SIGKILL)
    return found
