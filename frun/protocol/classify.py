"""Names the class of a fault, with the evidence. Pure.

A failed worker is judged by its own agent, which has its exit, its words and its last lines; hangs and lost
hosts by the leader, which sees all ranks.
"""

from collections.abc import Iterable, Sequence

from frun.protocol import blame, survival
from frun.protocol.classes import FaultClass, Finding, Rule
from frun.protocol.hangs import Hang, Place
from frun.protocol.health import Fact
from frun.protocol.records import Failure

LOST_HOST = Finding(fault_class=FaultClass.HOST, evidence="its lease in etcd ended")
"""Off, frozen, without its agent, or cut off: those that are left see no difference until it is back."""
DEAD_WHILE_PAUSED = Finding(
    fault_class=FaultClass.PROCESS, evidence="the process ended while it waited for the others"
)
_UNSTARTED = 127
_SIGKILL, _SIGBUS = -9, -7
_BY_SHELL = 128
"""A shell ends with this and the signal's number when a signal ended what it ran."""
_TRACEBACK = "Traceback (most recent call last)"
_MAX_EVIDENCE = 300


def of_failure(
    failure: Failure, rules: Sequence[Rule], *, ended_because: str = "", oom_kills: int = 0
) -> Finding:
    """Return the class of a failed worker.

    `ended_because` says why frun killed it, if it did. `oom_kills` is how many processes of the machine the
    kernel killed for want of memory while this worker ran.
    """
    if failure.exit_code == _UNSTARTED and not failure.pid:
        found = _matching([failure.message], rules)
        return found or _finding(FaultClass.HOST, failure.message)
    if ended_because:
        return _finding(FaultClass.PROCESS, ended_because)
    lines = _telling_lines(failure)
    found = _matching(lines, rules)
    if found is not None:
        return found
    if failure.kind == survival.NO_DONOR:
        return _finding(FaultClass.UNKNOWN, failure.message)
    if failure.recorded:
        users = blame.is_clear(failure)
        return _finding(FaultClass.USER if users else FaultClass.NETWORK, failure.message)
    return _of_exit(failure, lines, oom_kills)


def of_fact(fact: Fact) -> Finding:
    """Return the class of what is done for a fault of a device: its check knows."""
    return _finding(fact.fault_class, str(fact))


def of_cut_off(cut_off_s: float) -> Finding:
    """Return the class of a host that was lost and is back, whose agent lived and did not reach etcd."""
    return _finding(
        FaultClass.NETWORK,
        f"it is back: its agent lived, and did not reach etcd for {cut_off_s:.1f} s",
    )


def of_hang(hang: Hang) -> Finding:
    """Return the class of a job that stands still, from where those at fault stand."""
    match hang.place:
        case None:
            return _finding(FaultClass.NETWORK, "all ranks wait in a collective, nobody is ahead")
        case Place.LOADER:
            return _finding(FaultClass.STORAGE, "a rank waits for data, and the others for it")
        case Place.SCRIPT if not hang.where:
            # It is in frun's own code: the script's function has raised that a peer is gone.
            return _finding(FaultClass.NETWORK, "a rank lost a peer that nobody else misses")
        case Place.SCRIPT:
            return _finding(FaultClass.USER, "a rank stands in the script, and the others wait")
        case _:
            return _finding(FaultClass.PROCESS, "a rank stands in its update, and the others wait")


def _of_exit(failure: Failure, lines: Sequence[str], oom_kills: int) -> Finding:
    """Judge by the exit alone: the worker said nothing, or nothing that any rule knows."""
    code, words = failure.exit_code, failure.message
    if code > _BY_SHELL:
        code = _BY_SHELL - code
    if code == _SIGKILL and oom_kills > 0:
        return _finding(
            FaultClass.HOST, f"{words}, and the kernel killed processes for want of memory"
        )
    if code == _SIGBUS:
        return _finding(FaultClass.HOST, f"{words}: mapped memory was gone, as when shm is full")
    if code < 0 or code > 1:
        return _finding(FaultClass.PROCESS, words)
    if any(line.startswith(_TRACEBACK) for line in lines):
        return _finding(FaultClass.USER, f"{words}: {lines[0]}")
    return _finding(FaultClass.UNKNOWN, f"{words}, without a word")


def _telling_lines(failure: Failure) -> list[str]:
    """Return what may tell a class, the most telling first.

    The last line is said last. Of a traceback the exceptions alone: its indented lines are code, which may
    contain any word.
    """
    lines = [line for line in failure.traceback.splitlines()[::-1] if line.strip()]
    if failure.recorded or any(line.startswith(_TRACEBACK) for line in lines):
        lines = [line for line in lines if not line[0].isspace()]
    return [failure.message, *lines] if failure.recorded else lines


def _matching(lines: Iterable[str], rules: Sequence[Rule]) -> Finding | None:
    for line in lines:
        for rule in rules:
            if rule.pattern.search(line):
                return _finding(rule.fault_class, line)
    return None


def _finding(fault_class: FaultClass, evidence: str) -> Finding:
    line = " ".join(evidence.split())
    short = line if len(line) <= _MAX_EVIDENCE else line[: _MAX_EVIDENCE - 3] + "..."
    return Finding(fault_class=fault_class, evidence=short)
