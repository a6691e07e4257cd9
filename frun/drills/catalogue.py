"""Every kind of fault: what it does, who is hit, what must follow. And how it is spelled: `exit:3`.

Pure. How a fault is done is `host`'s and the worker's.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from frun.errors import UsageError
from frun.protocol.faults import Fault, FaultKind, Place


class Scope(StrEnum):
    """Who is hit."""

    WORKER = "worker"
    HOST = "host"
    LEADER = "leader"
    """The host that leads, be it a member or a spare."""
    STORE = "store"
    """The host that keeps the job's etcd."""


class Outcome(StrEnum):
    """What became of a job after a fault."""

    RECOVERED = "recovered"
    """What was lost was replaced, the others lived on."""
    RESTARTED = "restarted"
    """All workers were started again."""
    UNHARMED = "unharmed"
    """Nothing had to be done, and training went on."""
    FAILED = "failed"
    """The job ended without success."""
    ENDED = "ended"
    """The job came to its own end before anything else was seen."""
    REFUSED = "refused"
    """The fault did not happen."""
    OPEN = "open"
    """It was not over in time."""

    @property
    def is_end(self) -> bool:
        """True when there is no job any more."""
        return self in (Outcome.FAILED, Outcome.ENDED)


LIVES = frozenset({Outcome.RECOVERED, Outcome.RESTARTED, Outcome.UNHARMED})
"""The job took the fault and goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One kind of fault."""

    scope: Scope
    text: str
    """What it does, in a sentence for `--list`."""
    expects: frozenset[Outcome] = frozenset({Outcome.RECOVERED})
    """What must follow in a job whose script is resumable."""
    argument: str = ""
    """Name of what stands behind the colon; empty: nothing does."""
    in_script: bool = False
    """The script's own thread does it, at a place: the script must be resumable."""
    must_end: bool = False
    """It needs a duration: nobody could end it afterwards."""
    lasts: bool = False
    """It is a state that may end by itself, so it can be given a duration."""


CATALOGUE: Mapping[FaultKind, Entry] = {
    FaultKind.KILL: Entry(
        scope=Scope.WORKER, text="SIGKILL to the worker: as by an operator, or by the kernel."
    ),
    FaultKind.EXIT: Entry(
        scope=Scope.WORKER,
        text="The worker leaves at once with status N, as a library that gives up on its device does.",
        argument="N",
    ),
    FaultKind.SEGFAULT: Entry(
        scope=Scope.WORKER, text="The worker reads at address 0 and is ended by SIGSEGV."
    ),
    FaultKind.OOM: Entry(
        scope=Scope.WORKER,
        text="The worker takes memory until the kernel, a cgroup or a limit ends it. Without a cgroup the"
        " whole machine runs short of memory for a moment.",
    ),
    FaultKind.EXCEPTION: Entry(
        scope=Scope.WORKER,
        text="An exception in the script, as of a mistake in it: costs one of --max-restarts.",
        expects=frozenset({Outcome.RECOVERED, Outcome.FAILED}),
        in_script=True,
    ),
    FaultKind.STOP: Entry(
        scope=Scope.WORKER,
        text="SIGSTOP to the worker: it lives and does nothing, as in swap or in a driver.",
        lasts=True,
    ),
    FaultKind.HANG: Entry(
        scope=Scope.WORKER,
        text="The script's own thread waits for ever, between two collectives; other threads go on.",
        lasts=True,
        in_script=True,
    ),
    FaultKind.GIL: Entry(
        scope=Scope.WORKER,
        text="The worker keeps Python's global lock: none of its threads runs.",
        lasts=True,
    ),
    FaultKind.SLOW: Entry(
        scope=Scope.WORKER,
        text="Each step of the worker takes S seconds longer (1 by default).",
        expects=frozenset({Outcome.UNHARMED}),
        argument="[:S]",
        lasts=True,
        in_script=True,
    ),
    FaultKind.NAN: Entry(
        scope=Scope.WORKER,
        text="One gradient of the worker becomes NaN, which all ranks then get. Spoils the run.",
        expects=frozenset({Outcome.UNHARMED}),
        in_script=True,
    ),
    FaultKind.BITFLIP: Entry(
        scope=Scope.WORKER,
        text="One bit of one parameter of the worker is flipped: replicas differ. Spoils the run.",
        expects=frozenset({Outcome.UNHARMED}),
        in_script=True,
    ),
    FaultKind.HOST: Entry(
        scope=Scope.HOST,
        text="SIGKILL to all that the host runs for the job, as when a machine loses power.",
    ),
    FaultKind.AGENT: Entry(
        scope=Scope.HOST, text="SIGKILL to the host's agent; its workers end with it."
    ),
    FaultKind.LEADER: Entry(
        scope=Scope.LEADER,
        text="SIGKILL to the leader's agent; its workers end with it.",
        expects=frozenset({Outcome.RECOVERED, Outcome.UNHARMED}),
    ),
    FaultKind.ZYGOTE: Entry(
        scope=Scope.HOST,
        text="SIGKILL to the process that forks the host's workers; they end with it.",
        expects=frozenset({Outcome.RECOVERED, Outcome.RESTARTED}),
    ),
    FaultKind.NETWORK: Entry(
        scope=Scope.HOST,
        text="The interface of the host's address goes down for --duration; or its packets come late or"
        " get lost (tc netem). Needs the rights to do so.",
        expects=frozenset({Outcome.RECOVERED, Outcome.UNHARMED}),
        argument="[:delay=MS,loss=PERCENT]",
        lasts=True,
        must_end=True,
    ),
    FaultKind.ETCD: Entry(
        scope=Scope.STORE,
        text="SIGKILL to the etcd that frun started for the job; with --duration it is frozen instead.",
        expects=frozenset({Outcome.UNHARMED}),
        lasts=True,
    ),
    FaultKind.DISK_FULL: Entry(
        scope=Scope.HOST,
        text="No file that the host's agent writes (logs, events) can grow, as on a full disk.",
        expects=frozenset({Outcome.UNHARMED}),
        lasts=True,
        must_end=True,
    ),
    FaultKind.DEVICE: Entry(
        scope=Scope.WORKER,
        text="A check reports a fault of the worker's device; with --duration one that lasts, so that its"
        " host is not fit for work meanwhile. Or a warning; one that lasts foretells a fault, so that a spare"
        " takes the host's place.",
        argument="[:warning]",
        lasts=True,
    ),
}


_NETWORK = re.compile(r"delay=\d+(,loss=\d{1,2})?|loss=\d{1,2}")


def fault(
    text: str, *, duration_s: float = 0.0, at_step: int = -1, place: Place | None = None
) -> Fault:
    """Read `KIND` or `KIND:ARGUMENT`. Raises UsageError naming what is wrong."""
    name, colon, argument = text.partition(":")
    try:
        kind = FaultKind(name)
    except ValueError:
        names = ", ".join(spelled(each) for each in FaultKind)
        raise UsageError(f"no such kind of fault: {name!r}; there are {names}") from None
    entry = CATALOGUE[kind]
    argument = _argument(kind, argument)
    if colon and not entry.argument:
        raise UsageError(f"{name} takes nothing behind a colon, but {argument!r} was given")
    if duration_s and not entry.lasts:
        raise UsageError(f"{name} happens at a moment and has no duration")
    if entry.must_end and not duration_s:
        raise UsageError(f"{name} needs --duration: nobody could end it afterwards")
    if entry.scope is not Scope.WORKER and (place is not None or at_step >= 0):
        raise UsageError(f"{name} is done to a host, which has no step and no place in it")
    if kind is FaultKind.DEVICE and (place is not None or at_step >= 0):
        raise UsageError("device is done to a device, which has no step and no place in it")
    if place in (Place.REBUILD, Place.COPY) and at_step >= 0:
        raise UsageError(f"{place.value} is a part of a recovery, which is in no step")
    if kind is FaultKind.NAN and place not in (None, Place.BACKWARD, Place.GATE):
        raise UsageError("nan is put into a gradient: its place is backward or gate")
    return Fault(
        kind=kind,
        argument=argument,
        duration_s=duration_s,
        at_step=at_step,
        place=place,
    )


def spelled(kind: FaultKind) -> str:
    """Return a kind as it is typed."""
    entry = CATALOGUE[kind]
    optional = entry.argument.startswith("[")
    colon = "" if optional or not entry.argument else ":"
    return f"{kind.value}{colon}{entry.argument}"


def expected(fault: Fault) -> frozenset[Outcome]:
    """Return what may follow from a fault in a job whose script is resumable."""
    outcomes = CATALOGUE[fault.kind].expects
    if fault.kind is FaultKind.DEVICE and fault.argument:
        drained = {Outcome.RECOVERED} if fault.duration_s else set()
        return frozenset({Outcome.UNHARMED, *drained})
    # One that is over soon may be over before anybody has to do something.
    return outcomes | {Outcome.UNHARMED} if fault.duration_s else outcomes


def _argument(kind: FaultKind, text: str) -> str:
    if kind is FaultKind.EXIT and not (text.isdecimal() and 0 < int(text) < 256):
        raise UsageError(f"exit:N needs a status from 1 to 255, not {text!r}")
    if kind is FaultKind.SLOW and text and not _is_seconds(text):
        raise UsageError(f"slow:S needs seconds, not {text!r}")
    if kind is FaultKind.DEVICE and text not in ("", "warning"):
        raise UsageError(f"device:warning is all that can stand behind the colon, not {text!r}")
    if kind is FaultKind.NETWORK and text and not _NETWORK.fullmatch(text):
        raise UsageError(f"network:delay=MS,loss=PERCENT takes numbers, not {text!r}")
    return text


def _is_seconds(text: str) -> bool:
    try:
        return 0 < float(text) < 1e6
    except ValueError:
        return False
