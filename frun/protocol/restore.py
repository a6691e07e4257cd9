"""Who goes on, who copies from whom, and from which step all of them train: the plan of one restore. Pure.

Every rank calls `plan` on the same list and so comes to the same answer without a coordinator. How states
travel, and what an update is, is left to the worker.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_FAR, _VERY_FAR = 0.2, 0.5
"""Share of a value by which another one is far from it; the same with an update between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What one rank says of itself when all ranks of a generation have met."""

    rank: int
    host: str
    step: int
    """Completed updates; 0 for a newcomer."""
    has_state: bool
    """It holds the state after `step` updates; a newcomer, or one whose copy was cut, does not."""
    cut: bool = False
    """Its copy was cut since the donor died: what it held after `step` updates is gone."""
    torn: bool = False
    """An update was cut in the middle: its state is of no step."""
    diverged: bool = False
    """It holds something else than most of its replicas."""
    replica: str = ""
    """Ranks with the same key hold the same part of the state; plain data parallelism has one key. Ranks of
    different keys are at the same step, since they make each update together (`frun.worker.commit`)."""
    sample: tuple[float, ...] = ()
    """A few values of its parameters, the same ones on every rank."""

    @property
    def sound(self) -> bool:
        """Whether its state may be used."""
        return self.has_state and not (self.torn or self.diverged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Already at the target."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive:
    """Take everything from a rank that is at the target and holds the same part."""

    rank: int
    donor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Begin with what the script built: no update was completed anywhere."""

    rank: int


Action = Keep | Receive | Start


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What each rank does, in order of ranks, so that all of them are at `target`."""

    target: int
    """Completed updates of everybody afterwards."""
    actions: tuple[Action, ...]
    reason: str

    def of(self, rank: int) -> Action:
        """Return the action of a rank. Raises KeyError for a rank that is not in the plan."""
        for action in self.actions:
            if action.rank == rank:
                return action
        raise KeyError(rank)

    def donor_of(self, rank: int) -> int | None:
        """Return whom this rank copies from, if it does."""
        action = self.of(rank)
        return action.donor if isinstance(action, Receive) else None

    def receivers_of(self, rank: int) -> tuple[int, ...]:
        """Return who copies from this rank, in order."""
        return tuple(a.rank for a in self.actions if isinstance(a, Receive) and a.donor == rank)

    @property
    def copies(self) -> int:
        """Number of ranks that receive."""
        return sum(isinstance(action, Receive) for action in self.actions)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoDonor:
    """A part of the state exists nowhere any more: the ladder's next rung is due."""

    replica: str
    target: int
    reason: str


def homes(states: Iterable[RankState], replica: str) -> int:
    """Return on how many hosts a part of the state is once all ranks are at the target."""
    return len({state.host for state in states if state.replica == replica})


def plan(states: Iterable[RankState]) -> Plan | NoDonor:
    """Return each rank's action, the same for everybody who calls it, or what is lost.

    The target is the highest completed step of a sound state. A rank that is behind copies from a replica
    at the target, as a new one does: one way that is used often is better than two.
    """
    ordered = sorted(states, key=lambda state: state.rank)
    sound = [state for state in ordered if state.sound]
    torn = [state.rank for state in ordered if state.has_state and state.torn]
    target = max((state.step for state in sound), default=0)
    if not sound and torn:
        return NoDonor(
            replica=next(s.replica for s in ordered if s.rank == torn[0]),
            target=target,
            reason=f"no rank has a whole state: the update of {ranks_in_words(torn)} was cut in the middle",
        )
    cut = [state for state in ordered if state.cut and state.step]
    if not sound and cut:
        # Not a beginning: steps were completed, and the last ranks that knew their result are gone.
        return NoDonor(
            replica=cut[0].replica,
            target=max(state.step for state in cut),
            reason="no rank has a state: the donor died while it was copied to "
            + ranks_in_words([state.rank for state in cut]),
        )
    begun = any(state.step for state in ordered)
    actions: list[Action] = []
    for replica in sorted({state.replica for state in ordered}):
        members = [state for state in ordered if state.replica == replica]
        chosen = _replica(members, target, begun=begun)
        if isinstance(chosen, NoDonor):
            return chosen
        actions += chosen
    actions.sort(key=lambda action: action.rank)
    return Plan(
        target=target,
        actions=tuple(actions),
        reason=_reason(actions, target),
    )


def strangers(states: Iterable[RankState]) -> tuple[int, int] | None:
    """Return two ranks that are taken for replicas and can't be: most of their values are far apart.

    Ranks that hold different parts in plain tensors look like replicas to anybody who compares shapes. Values
    of real replicas may drift a little (processors of different make), differ by an update (the first one can
    take a value from zero to anywhere), and need not be equal before the first one.
    """
    first: dict[str, RankState] = {}
    for state in sorted(states, key=lambda state: state.rank):
        if not state.sound or state.step == 0 or not state.sample:
            continue
        other = first.setdefault(state.replica, state)
        if _are_far(other, state):
            return other.rank, state.rank
    return None


def _are_far(one: RankState, two: RankState) -> bool:
    pairs = list(zip(one.sample, two.sample, strict=False))
    alike = one.step == two.step
    share = _FAR if alike else _VERY_FAR
    far = sum(abs(a - b) > share * max(abs(a), abs(b)) for a, b in pairs if alike or (a and b))
    return 2 * far > len(pairs)


def _replica(members: Sequence[RankState], target: int, *, begun: bool) -> list[Action] | NoDonor:
    """Return the actions of the ranks that hold the same state.

    `begun` tells that some rank, sound or not, knows of a completed update.
    """
    actions: dict[int, Action] = {
        state.rank: Keep(rank=state.rank)
        for state in members
        if state.sound and state.step == target
    }
    missing = [state for state in members if state.rank not in actions]
    if not actions:
        if not begun and not any(state.has_state for state in members):
            return [Start(rank=state.rank) for state in missing]
        reason = _no_donor(members, target)
        return NoDonor(replica=members[0].replica, target=target, reason=reason)
    donors = [state for state in members if state.rank in actions]
    load: Counter[int] = Counter()
    for state in missing:
        donor = min(donors, key=lambda d: (load[d.rank], d.host != state.host, d.rank))
        load[donor.rank] += 1
        actions[state.rank] = Receive(rank=state.rank, donor=donor.rank)
    return list(actions.values())


def _no_donor(members: Sequence[RankState], target: int) -> str:
    name = f" {members[0].replica!r}" if members[0].replica else ""
    said = []
    for state in members:
        if state.cut:
            said.append(f"the copy to rank {state.rank} was cut")
        elif not state.has_state:
            said.append(f"rank {state.rank} is new")
        elif state.torn:
            said.append(f"rank {state.rank} was cut inside an update")
        elif state.diverged:
            said.append(f"rank {state.rank} differed from its replicas")
        else:
            said.append(f"rank {state.rank} is at step {state.step}")
    more = f" and {len(said) - 8} more" if len(said) > 8 else ""
    return f"no replica{name} has the state of step {target}: " + ", ".join(said[:8]) + more


def _reason(actions: Sequence[Action], target: int) -> str:
    receive = [action for action in actions if isinstance(action, Receive)]
    start = [action.rank for action in actions if isinstance(action, Start)]
    parts = []
    if receive:
        pairs = ", ".join(f"{a.rank} from {a.donor}" for a in receive[:8])
        more = f" and {len(receive) - 8} more" if len(receive) > 8 else ""
        parts.append(f"{len(receive)} copy ({pairs}{more})")
    if start:
        parts.append(f"{ranks_in_words(start)} start")
    return f"step {target}: " + ("; ".join(parts) or "everybody has the state")


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return `rank 3` or `ranks 0, 1, 2`, of many the first ones and how many more."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"
