"""Faults that an operator asks for, and the commands that carry them. Pure.

A command is one key, `commands/<n>`: written by whoever asks, then by the agent of the host that it names.
"""

from dataclasses import dataclass
from enum import StrEnum

KEPT = 100
"""Commands that stay in etcd; the event logs hold all."""


class FaultKind(StrEnum):
    """What is broken. `frun.drills.catalogue` says what each means and what must follow."""

    KILL = "kill"
    EXIT = "exit"
    SEGFAULT = "segfault"
    OOM = "oom"
    EXCEPTION = "exception"
    STOP = "stop"
    HANG = "hang"
    GIL = "gil"
    SLOW = "slow"
    NAN = "nan"
    BITFLIP = "bitflip"
    HOST = "host"
    AGENT = "agent"
    LEADER = "leader"
    ZYGOTE = "zygote"
    NETWORK = "network"
    ETCD = "etcd"
    DISK_FULL = "disk-full"
    DEVICE = "device"


class Place(StrEnum):
    """Where in a step, or in a recovery, a worker is when it is hit."""

    LOAD = "load"
    """Before a batch of `session.batches` is taken."""
    FORWARD = "forward"
    """Before the forward pass of a model that is registered."""
    BACKWARD = "backward"
    """When the gradient of one of its parameters was computed."""
    GATE = "gate"
    """Before an optimizer's step: the gradients of all ranks are there."""
    UPDATE = "update"
    """When parameters have changed and the step does not count yet."""
    REBUILD = "rebuild"
    """When the default process group is made."""
    COPY = "copy"
    """When state is about to be copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, without its victim."""

    kind: FaultKind
    argument: str = ""
    """What stands behind the colon: the status of `exit:3`."""
    at_step: int = -1
    """Number of completed updates when it happens; -1: as soon as possible."""
    place: Place | None = None
    """None: wherever the worker is, or where the kind is usually done."""
    duration_s: float = 0.0
    """Seconds after which it ends by itself; 0: never."""

    def __str__(self) -> str:
        text = f"{self.kind.value}:{self.argument}" if self.argument else self.kind.value
        step = f" at step {self.at_step}" if self.at_step >= 0 else ""
        return f"{text}{step}{f' in {self.place.value}' if self.place is not None else ''}"


class CommandState(StrEnum):
    """How far a command is."""

    ASKED = "asked"
    TAKEN = "taken"
    """Its host has seen it, and it is not done yet."""
    DONE = "done"
    """The fault has happened; or it happens now, if it ends the agent that says so."""
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """`commands/<n>`: a fault for one host, under the job's lease."""

    id: int
    uid: str
    """Of the job that is meant: one that has its id later must not be hit."""
    host: str
    rank: int = -1
    """The worker that is hit; -1: the host itself."""
    fault: Fault
    state: CommandState = CommandState.ASKED
    generation: int = 0
    """In which it happened, as far as its worker said so."""
    text: str = ""
    """What was done, or why it was not."""
