"""Reads the kernel's process table and signals processes without hitting a stranger.

Owns `/proc/<pid>/stat` and pidfds, for the agent and the zygote alike; who is to be signalled is theirs.
"""

import os
import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_GONE = "ZX"


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process as the kernel showed it at one moment."""

    pid: int
    state: str
    """The kernel's letter: R, S, D, T, t, Z ..."""
    parent: int
    group: int
    session: int
    started: int
    """Clock ticks since boot; with the pid it names a process for ever."""

    @property
    def running(self) -> bool:
        """False for what only waits to be reaped."""
        return self.state not in _GONE


def read(pid: int) -> Process | None:
    """Return the process of this pid, None when there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = _fields(file.read())
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return Process(
        pid=pid,
        state=fields[0].decode("ascii"),
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        started=int(fields[19]),
    )


def oom_kills() -> int:
    """Return how many processes the kernel has killed for want of memory since boot; 0 if it does not say."""
    try:
        with open("/proc/vmstat", "rb") as file:
            found = re.search(rb"^oom_kill (\d+)$", file.read(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def activity(pid: int) -> tuple[str, float]:
    """Return the state letter of each thread of a process, and the CPU seconds that all have used."""
    states, ticks = [], 0
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
                states.append(_fields(file.read())[0].decode("ascii"))
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = _fields(file.read())
            ticks = int(fields[11]) + int(fields[12])
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return "".join(states), 0.0
    return "".join(states), ticks / os.sysconf("SC_CLK_TCK")


def _fields(stat: bytes) -> list[bytes]:
    # The name comes in brackets and may hold anything, brackets too.
    return stat[stat.rindex(b")") + 2 :].split()


def table() -> dict[int, Process]:
    """Return all processes that can be seen. Not a snapshot: it is read one by one."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    return {process.pid: process for process in map(read, pids) if process is not None}


def descendants(root: int, processes: Mapping[int, Process]) -> list[Process]:
    """Return the processes below `root`, each after its parent; `root` itself is left out."""
    children: dict[int, list[Process]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process)
    found = list(children.get(root, ()))
    for process in found:
        found.extend(children.get(process.pid, ()))
    return found


def is_alive(process: Process) -> bool:
    """Tell whether this very process still runs."""
    now = read(process.pid)
    return now is not None and now.started == process.started and now.running


def send(process: Process, signum: int) -> None:
    """Signal this very process; nothing happens when it is gone or its number was given away."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        # The descriptor may already be that of a successor: look again now that it is held.
        if is_alive(process):
            signal.pidfd_send_signal(pidfd, signum)
    except (ProcessLookupError, PermissionError):
        return  # gone, or a set-user-id program that is not ours to signal
    finally:
        os.close(pidfd)


def send_all(processes: Iterable[Process], signum: int) -> None:
    """Signal each of these processes."""
    for process in processes:
        send(process, signum)
