"""Owns what an agent is made of and how it ended: the data between `launch`, which builds, and `agent`.

No behaviour.
"""

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from frun.agent.groupstore import GroupStore
from frun.agent.masterport import MasterPort
from frun.agent.workers import LocalWorkers
from frun.clock import Clock
from frun.events import Event
from frun.protocol.keys import Keys
from frun.protocol.policy import Policy
from frun.protocol.records import HostRecord, RankTable, Slot
from frun.rendezvous.membership import Membership
from frun.rendezvous.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How long this agent waits for what. Seconds."""

    shutdown_s: float
    """Grace between the soft signal and SIGKILL, in every stop."""
    store_s: float
    """Longest wait for etcd when a decision of the leader is needed to go on."""
    farewell_s: float
    """Longest wait for other hosts to see the job's end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How this host's part ended."""

    exit_code: int
    reason: str
    table: RankTable | None
    """The last rank table seen."""
    host: str = ""
    spare: bool = False
    """This host was in no slot when it ended."""
    stopped: bool = False
    """A signal ended it."""
    error_files: Mapping[int, str] = field(default_factory=dict)
    """Per local rank, where its worker writes why it failed; empty texts if nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What an agent is made of; `launch` builds the real ones."""

    record: HostRecord
    store: Store
    keys: Keys
    membership: Membership
    policy: Policy
    bounds: Bounds
    workers: LocalWorkers
    groups: GroupStore
    hold_master_port: Callable[[], Coroutine[Any, Any, tuple[MasterPort, int]]]
    """Returns the holder of MASTER_PORT and the port that workers are told."""
    free_master_port: bool
    """Let MASTER_PORT go just before workers start, since they host the TCPStore themselves."""
    clock: Clock
    answers: Callable[[Slot], Awaitable[bool]]
    """Asks the agent of another host, at its address, if it lives; for leaders."""
    emit: Callable[[Event, int], None]
    """Takes events with their generation."""
