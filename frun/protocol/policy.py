"""What a decision is made by and what it is: the user's bounds, the leader's stopwatches, the outcome."""

from dataclasses import dataclass

from frun.protocol.records import Phase, RankTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the user asked for, and the bounds of every wait. Times are seconds."""

    min_hosts: int
    max_hosts: int
    max_restarts: int
    join_timeout_s: float = 600.0
    """Longest wait for `min_hosts`, at the start and after a loss."""
    last_call_s: float = 30.0
    """Extra wait for more hosts once `min_hosts` are there."""
    replace_timeout_s: float = 600.0
    """Longest wait for a host that takes a lost one's ranks, before the world shrinks or gives up."""
    lease_ttl_s: float = 3.0
    """A host is lost this long after its last sign of life."""
    prepare_timeout_s: float = 90.0
    """Longest wait for a member to stop old workers and prepare; above its own stop bound."""
    settle_s: float = 0.3
    """Wait for the cause when all that is known are failures that look like victims'."""
    max_recoveries: int | None = None
    """Generations in which processes of the one before may go on; None: any number."""
    breaker: int = 5
    """Generations in a row without one completed step that end a resumable job."""
    hang_s: float = 2.0
    """Least time after which a rank that stands still hangs; 0: never."""
    join_settle_s: float = 1.0
    """Hosts that come within this time of each other join a running job together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A leader's stopwatches: its own monotonic times of when it first saw things stand so.

    They are not stored. A new leader starts them anew, which can only lengthen a wait.
    """

    generation: int = -1
    phase: Phase | None = None
    since: float = 0.0
    """When this leader first saw this generation in this phase."""
    enough_since: float | None = None
    """When `min_hosts` were first there."""
    failure_since: float | None = None
    """When the first failure of this generation was seen."""
    stall_since: float | None = None
    """When all ranks were first seen to wait for each other."""
    joiner_since: float | None = None
    """When a host that could enlarge the world was first seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to write (None: nothing), why, and when to ask again at the latest."""

    table: RankTable | None
    seen: Seen
    reason: str
    wake_at: float | None = None
