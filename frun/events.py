"""Owns the events of a job: a closed set of records.

Who notices something makes the event; the sink adds job, host, generation and the two clocks. Logs for
people are written elsewhere; figures such as recovery times are computed from these records.
"""

import re
from dataclasses import dataclass

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events. The name in the file is the class's, in snake case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStarted(Event):
    """This agent began to work for the job."""

    entry: str
    version: str
    nproc: int
    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRegistered(Event):
    """This host's record is in etcd: it takes part, as a member or a spare."""

    run: str
    """The same on all hosts of one run, and different for the next job of the same id."""
    name: str
    """The machine's name."""
    address: str
    nproc: int
    lease_ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ZygoteReady(Event):
    """Workers can be forked from now on."""

    pid: int
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ZygoteLost(Event):
    """The zygote ended, and every worker of this host with it."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostJoined(Event):
    """This host, as leader, saw a host's record appear."""

    peer: str
    """Id of the host that the event is about; `host` is the one that writes."""
    address: str
    nproc: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLeft(Event):
    """This host, as leader, saw a host's record go: it said goodbye, or its lease ended."""

    peer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderElected(Event):
    """A host became leader, as this host saw it."""

    peer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDecided(Event):
    """This host, as leader, wrote the rank table."""

    phase: str
    reason: str
    world_size: int
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSeen(Event):
    """This host saw the table enter a phase."""

    phase: str
    reason: str
    world_size: int
    hosts: int = 0
    """Places in the table; 0: not said."""
    group_rank: int | None = None
    """Place of this host among them; None: it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersPrepared(Event):
    """Nothing of an older generation is alive here and the group store is ready."""

    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStarted(Event):
    """All workers of this host were started, or went on, in this generation."""

    group_rank: int
    world_size: int
    took_s: float
    """From the table's first sight to the last worker's start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStarted(Event):
    """A worker process exists."""

    rank: int
    local_rank: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited(Event):
    """A worker process ended."""

    rank: int
    local_rank: int
    pid: int
    state: str
    """`succeeded`, `failed` or `stopped` (by its agent)."""
    exit_code: int
    """Negative: the number of the signal."""
    message: str = ""
    fault_class: str = ""
    """Of a failure: `user`, `process`, `device`, `host`, `network`, `storage` or `unknown`."""
    evidence: str = ""
    """What speaks for that class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPaused(Event):
    """A survivor closed its update gate and released what it was blocked in."""

    rank: int
    step: int
    """Completed updates."""
    in_update: bool
    """An update did not end within its bound: this worker's state can not be trusted."""
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOut(Event):
    """A survivor has left the script's function and its old groups."""

    rank: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRestored(Event):
    """A worker has agreed with all ranks on the step, and has its state."""

    rank: int
    step: int
    steps_lost: int
    rebuild_s: float
    """Making process groups; on a newcomer since its process began its script."""
    agree_s: float
    copy_s: float
    copied_bytes: int
    homes: int
    """On how many hosts its part of the state is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStepCompleted(Event):
    """A worker completed its first step of this generation."""

    rank: int
    step: int
    took_s: float
    """Since its state was restored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsCompleted(Event):
    """How far a worker is: told now and then, by the first worker of a host only."""

    rank: int
    step: int
    """Completed updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPhaseEnded(Event):
    """A worker is through with what its script had declared by `session.phase`."""

    rank: int
    phase: str
    """The script's word; the time of `checkpoint` is a bucket of its own in the account of the job."""
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultNoticed(Event):
    """Something is not as it should be, before anything has ended of itself."""

    source: str
    """What noticed it: `beat` (a frozen process), `hang` (a rank that others wait for), `peer`
    (a host whose agent is gone), `numbers` (a figure that the script reported, or the norm
    of its gradients), `replicas` (one that does not hold what the others do), `straggler` (a rank that is
    slower than its peers), `device` (a check of the host)."""
    rank: int
    """The rank at fault; -1: none."""
    reason: str
    since_s: float
    """How long it had been so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthChanged(Event):
    """What a check says of this host is new, or holds no longer."""

    check: str
    """Who looked: `host`, `nvidia`, `ascend`, `file`, one of another package, or `checks` itself."""
    name: str
    severity: str
    """`warning` or `fault`."""
    fault_class: str
    """See `WorkerExited`."""
    device: int
    """That of this local rank; -1: the whole host."""
    lasting: bool
    """The host is not fit for work until this is over."""
    reason: str
    holds: bool
    """False: it is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StacksWritten(Event):
    """All ranks stood still: what the threads of this host's workers did is in a file."""

    path: str
    """Empty where no files are kept."""
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersStopping(Event):
    """The agent began to stop its workers."""

    signal: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalReceived(Event):
    """The agent itself was told to stop."""

    signal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLost(Event):
    """This host's lease ended although its agent lives."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLost(Event):
    """etcd does not answer any more."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBack(Event):
    """etcd answers again."""

    outage_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentClosed(Event):
    """This host, as leader, closed the account of a fault; the fields are those of the record."""

    id: int
    cause: str
    kind: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    action: str
    detect_s: float
    pause_s: float
    respawn_s: float
    rebuild_s: float
    agree_s: float
    copy_s: float
    first_step_s: float
    total_s: float
    copied_bytes: int
    steps_lost: int
    resumed_at_step: int
    fault_class: str | None = None
    """See `WorkerExited`; None: nothing was wrong."""
    evidence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentRenamed(Event):
    """This host, as leader, learned what a fault was after its account was closed: a lost host came back."""

    id: int
    fault_class: str
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultInjected(Event):
    """This host did a fault on purpose, as an operator asked."""

    fault: str
    rank: int
    """The worker that was hit; -1: the host itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnded(Event):
    """This host's part is over."""

    exit_code: int
    reason: str


KINDS: tuple[type[Event], ...] = (
    JobStarted,
    HostRegistered,
    ZygoteReady,
    ZygoteLost,
    HostJoined,
    HostLeft,
    LeaderElected,
    TableDecided,
    PhaseSeen,
    WorkersPrepared,
    GenerationStarted,
    WorkerStarted,
    WorkerExited,
    WorkerPaused,
    WorkerOut,
    WorkerRestored,
    FirstStepCompleted,
    StepsCompleted,
    WorkerPhaseEnded,
    FaultNoticed,
    HealthChanged,
    StacksWritten,
    WorkersStopping,
    SignalReceived,
    LeaseLost,
    StoreLost,
    StoreBack,
    IncidentClosed,
    IncidentRenamed,
    FaultInjected,
    JobEnded,
)
"""Every event there is. Not `Event.__subclasses__()`: `slots=True` makes each class anew, and the one it was
made from may live on beside it."""


def event_name(kind: type[Event]) -> str:
    """Return the name of an event in the file: `WorkerExited` is `worker_exited`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()
