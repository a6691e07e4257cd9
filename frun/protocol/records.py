"""The documents of the protocol: what hosts say, what the leader wrote. Frozen, plain, complete.

Nothing here does I/O or reads a clock; `wire` turns these to JSON and back.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from frun.protocol.classes import FaultClass
from frun.protocol.hangs import Standing
from frun.protocol.health import Fact
from frun.protocol.stragglers import Work

SCHEMA = 1


class Phase(StrEnum):
    """Where a generation stands. Only `decide` moves a job from one to the next."""

    GATHER = "gather"
    """The world is not complete: waiting for hosts. Entered first, and when a slot is vacant."""
    RECOVER = "recover"
    """Membership is fixed; members stop what is old and prepare the group store. Then RUN."""
    RUN = "run"
    """Workers of this generation run. Leaves to DONE, FAILED, or RECOVER/GATHER of the next one."""
    DONE = "done"
    """Every worker ended with 0. Final."""
    FAILED = "failed"
    """The job gave up; `reason` and `failure` say why. Final."""

    @property
    def is_final(self) -> bool:
        """True when nothing may follow."""
        return self in (Phase.DONE, Phase.FAILED)


class WorkerState(StrEnum):
    """What an agent knows of one of its workers."""

    STARTING = "starting"
    """Asked for, no process id yet."""
    RUNNING = "running"
    """The process exists."""
    SUCCEEDED = "succeeded"
    """Ended with exit status 0, by itself."""
    FAILED = "failed"
    """Ended by itself, by a signal, or could not be started."""
    STOPPED = "stopped"
    """Ended because the agent stopped it; not a failure whatever its status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How one worker failed, as its agent saw it."""

    rank: int
    local_rank: int
    host: str
    exit_code: int
    """Exit status; negative is the number of the signal that ended it (as in `subprocess`)."""
    pid: int = 0
    message: str = ""
    """Type and text of the exception if one was recorded, else what the exit status means."""
    traceback: str = ""
    log: str = ""
    """Path on `host` of the worker's log folder or error file; empty if nothing is kept."""
    recorded: bool = False
    """The worker itself said why (error file or worker channel), so `message` is the user's."""
    kind: str = ""
    """What frun's own part of the worker called it (`no_donor`, `state_mismatch`); else empty."""
    order: int = 0
    """Place in the order in which this host's agent saw failures in this generation (0 first)."""
    fault_class: FaultClass = FaultClass.UNKNOWN
    evidence: str = ""
    """What speaks for that class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRecord:
    """`hosts/<host>`, under the agent's lease: this host exists and can take workers."""

    host: str
    """Unique per agent: the machine's name and a random part."""
    name: str
    """The machine's name (or --local-addr), for people and for the order of ranks."""
    address: str
    """Address literal at which other hosts reach this one."""
    port: int
    """TCP port of this agent's part of the group store."""
    nproc: int
    """Workers this host runs (local world size)."""
    node_rank: int | None = None
    """The order its user asked for, or None."""
    pid: int = 0
    version: str = ""
    keeps_store: bool = False
    """The embedded etcd of the job runs here, so this host leaves last."""
    term: int = 0
    """The store's own term when its lease was asked for; 0: not known."""
    cut_off_s: float = 0.0
    """How long etcd had been out of its agent's reach when its last lease was found to have ended; 0: it
    was not, or no lease ever ended."""
    health: tuple[Fact, ...] = ()
    """What is wrong with its devices, or with the host, as its checks say."""

    @property
    def unfit(self) -> Fact | None:
        """The fault that keeps it from work, if there is one."""
        return next((fact for fact in self.health if fact.forbids), None)

    @property
    def foretold(self) -> Fact | None:
        """The warning for which it should be left before it fails, if there is one."""
        return next((fact for fact in self.health if fact.foretells), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """One worker in its host's report."""

    local_rank: int
    incarnation: int
    """Generation in which this process was started."""
    state: WorkerState
    pid: int = 0
    failure: Failure | None = None
    resumable: bool = False
    """Its script has a resumable function: the process can live through others' deaths."""
    has_state: bool = False
    """It restored or began a state, so others could copy it."""
    homes: int = 0
    """On how many hosts its part of the state was when its generation had restored it; 0: it did not yet."""
    standing: Standing | None = None
    """It has not moved for longer than it should; set and taken back, but not kept up to date."""
    diverged: bool = False
    """It holds other parameters than most of its replicas."""
    odd: str = ""
    """The first figure of its steps that was not as it should be; empty once all are right for long."""
    work: Work | None = None
    """How long its own part of a step takes; reported when that has changed, not kept up to date."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """How long one host needed to get its workers into a generation. Seconds on that host's clock.

    The phases are those of the paper's table in finer steps; each is the longest of the host's workers.
    """

    detect_s: float = 0.0
    """From the end of a worker here to the sight of the new table; 0 where nothing ended."""
    pause_s: float = 0.0
    """From the table to the last survivor out of its old groups, or to the last worker stopped."""
    respawn_s: float = 0.0
    """From the RUN phase to the last newcomer's start."""
    rebuild_s: float = 0.0
    """Making process groups."""
    agree_s: float = 0.0
    copy_s: float = 0.0
    first_step_s: float = 0.0
    """From the restored state to the first completed step."""
    total_s: float = 0.0
    """From the table to the first completed step (to the start where no step is told), plus detect."""
    copied_bytes: int = 0
    step: int = 0
    """Step at which training went on."""
    steps_lost: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """`reports/<host>`, under the agent's lease: where this host stands in the stored table."""

    host: str
    generation: int
    """The generation this report is about; anything but the table's own is old news."""
    prepared: bool = False
    """Nothing of an earlier generation is alive here and the store of this one is ready."""
    master_port: int = 0
    """Port that this agent holds for MASTER_PORT, should it be the first host of this generation."""
    workers: tuple[WorkerReport, ...] = ()
    progress: bool = False
    """A worker here completed a step in this generation."""
    recovery: Recovery | None = None
    """Set once all workers here are in this generation."""
    at_work: bool = field(init=False, repr=False, compare=False)
    """All workers run and move, so that there is nothing to look at; told from them, not stored."""

    def __post_init__(self) -> None:
        """Look at the workers once: a leader looks at the reports of thousands of hosts again and again."""
        quiet = all(
            worker.state is WorkerState.RUNNING and worker.standing is None
            for worker in self.workers
        )
        object.__setattr__(self, "at_work", bool(self.workers) and quiet)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One place in the world. Ranks `first_rank` .. `first_rank + nproc - 1` live here."""

    host: str
    """Host id, or empty while the place is vacant."""
    address: str
    port: int
    first_rank: int
    nproc: int
    incarnations: tuple[int, ...] = ()
    """Per local rank, the generation in which its process was started: the table's own for a newcomer,
    an older one for a survivor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One fault and what was done about it."""

    cause: str
    kind: str
    """`process`, `user`, `hang`, `host`, `device`, `drain`, `link` or `membership`."""
    action: str
    """`replace-worker`, `replace-host`, `wait`, `shrink`, `grow`, `restart-all` or `retry`."""
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    fault_class: FaultClass | None = None
    """None: nothing was wrong."""
    evidence: str = ""
    """What speaks for that class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTable:
    """`ranktable`: the world as the leader last decided it. The controller's only effect."""

    generation: int
    phase: Phase
    reason: str
    restarts: int = 0
    """Failures of workers that the job has paid for with its --max-restarts."""
    recoveries: int = 0
    """Generations in which processes of the one before went on."""
    barren: int = 0
    """Generations in a row, before this one, that ended without a completed step."""
    unformed: int = 0
    """Of those, the ones that ended since a survivor died before the world ran: no new try has failed."""
    resumable: bool = False
    """A worker of a generation before this one said that the script, which stays the same, is resumable."""
    slots: tuple[Slot, ...] = ()
    master_addr: str = ""
    master_port: int = 0
    failure: Failure | None = None
    """The failure that led here: the root cause when `phase` is FAILED."""
    incident: Incident | None = None
    """What this generation was made for; None for the first."""
    exit_code: int = 1
    """Status of every agent when the phase is FAILED; 93 means that a requeue would not help."""
    dropped: tuple[str, ...] = ()
    """Hosts the job went on without because they failed when no restart was left; never let in again."""
    _places: Mapping[str, int] = field(init=False, repr=False, compare=False)
    """Host to its place, not stored: thousands of slots are not searched one by one."""
    world_size: int = field(init=False, repr=False, compare=False)
    """Number of ranks, vacant places included; not stored, and not counted again by each who asks."""

    def __post_init__(self) -> None:
        """Note who has which place, of several vacant ones the first, and how many ranks there are."""
        places = {slot.host: index for index, slot in reversed(tuple(enumerate(self.slots)))}
        object.__setattr__(self, "_places", places)
        object.__setattr__(self, "world_size", sum(slot.nproc for slot in self.slots))

    def __hash__(self) -> int:
        """Return something cheap, not of thousands of slots; equality is decided by all fields."""
        return hash((self.generation, self.phase, len(self.slots)))

    def slot_of(self, host: str) -> tuple[int, Slot] | None:
        """Return (group rank, slot) of a host, or None if it is not a member."""
        index = self._places.get(host)
        return None if index is None else (index, self.slots[index])


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """`spec`, create-only: what must agree on all hosts."""

    job_id: str
    uid: str
    """Random per job, so that a second job of the same id is never taken for the first; it is also the
    secret of the job's group store, which refuses strangers."""
    min_hosts: int
    max_hosts: int
    max_restarts: int
    entry: str
    """The script, module or program as typed, without its arguments."""
    version: str
    drills: bool = False
    """Faults may be injected on purpose."""
    lease: int = 0
    """Lease of the job's own keys; each agent refreshes it, so nothing outlives the last one."""

    COMPARED = ("min_hosts", "max_hosts", "max_restarts", "entry", "version", "drills")


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One snapshot of the job's keys, as `decide` reads it."""

    hosts: Mapping[str, HostRecord] = field(default_factory=dict)
    joined: Mapping[str, int] = field(default_factory=dict)
    """Create revision of each host's record: the order in which they came."""
    reports: Mapping[str, HostReport] = field(default_factory=dict)
    """In the order in which their last versions were written."""
    table: RankTable | None = None
    gone: frozenset[str] = frozenset()
    """Hosts whose record was seen to vanish while this leader watched, and has not come back."""
    answering: frozenset[str] = frozenset()
    """Those of `gone` whose agents answer, or have not been asked for long enough."""
    watching_since: float = 0.0
    """Monotonic time of this leader since when it has watched without a break (law 7)."""
