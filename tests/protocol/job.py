"""A whole job made of the pure functions only: `decide` for the leader, `converge` for every host.

Owns a make-believe etcd (a dictionary and a revision), hosts that carry actions out at once, and the laws,
which are checked at every write. What shells do (leases, watches, transactions) is simulated in `tests/sim`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from frun.protocol import wire
from frun.protocol.converge import (
    Action,
    Leave,
    LocalHost,
    PauseWorkers,
    Prepare,
    StartWorkers,
    StopWorkers,
    converge,
    report,
)
from frun.protocol.decide import decide
from frun.protocol.policy import Decision, Policy, Seen
from frun.protocol.records import (
    Failure,
    HostRecord,
    HostReport,
    Phase,
    RankTable,
    View,
    WorkerReport,
    WorkerState,
)
from tests.protocol.build import host as make_host

ALIVE = (WorkerState.STARTING, WorkerState.RUNNING)
_ORDER = [Phase.GATHER, Phase.RECOVER, Phase.RUN, Phase.DONE]


@dataclass(slots=True, kw_only=True)
class Member:
    """One agent and what it knows."""

    record: HostRecord
    local: LocalHost
    table: RankTable | None = None
    """The stored table as it last saw it."""
    frozen: bool = False
    """Does nothing, and has lost its lease."""


def check_laws(old: RankTable | None, new: RankTable, policy: Policy) -> None:
    """Assert what holds for every pair of tables that follow each other."""
    assert new.reason
    assert 0 <= new.restarts <= policy.max_restarts
    members = [slot.host for slot in new.slots if slot.host]
    assert len(set(members)) == len(members), "a host has two places"
    assert not set(members) & set(new.dropped), "a dropped host is in"
    assert len(new.slots) <= policy.max_hosts
    if new.phase in (Phase.RECOVER, Phase.RUN, Phase.DONE):
        assert len(members) == len(new.slots), "a place is vacant"
        assert len(members) >= policy.min_hosts
        ranks = [slot.first_rank + local for slot in new.slots for local in range(slot.nproc)]
        assert ranks == list(range(new.world_size)), "ranks are not dense"
        for slot in new.slots:
            assert len(slot.incarnations) == slot.nproc
            assert all(0 < one <= new.generation for one in slot.incarnations)
    if new.phase is Phase.RUN:
        assert new.master_addr == new.slots[0].address
    if old is None:
        assert (new.generation, new.phase) == (1, Phase.GATHER)
        return
    assert not old.phase.is_final, "something follows the end"
    assert new != old, "a write without a change"
    assert new.restarts in (old.restarts, old.restarts + 1)
    assert new.dropped[: len(old.dropped)] == old.dropped
    _check_kept(old, new)
    if new.generation == old.generation:
        assert (new.restarts, new.recoveries) == (old.restarts, old.recoveries)
        if new.phase is not Phase.FAILED:
            step = _ORDER.index(new.phase) - _ORDER.index(old.phase)
            assert step == 1 or (step == 0 and new.phase is Phase.GATHER), (old.phase, new.phase)
    else:
        assert new.generation == old.generation + 1, "a generation is skipped or falls"
        assert new.phase in (Phase.GATHER, Phase.RECOVER)
        assert old.phase in (Phase.RECOVER, Phase.RUN)
        kept = [slot.host for slot in new.slots[: len(old.slots)]]
        for slot, now_there in zip(old.slots, kept, strict=True):
            assert now_there == slot.host or slot.host not in members, "a survivor changed places"


def _kept(table: RankTable) -> dict[tuple[str, int], int]:
    """Return the processes that go on into this generation, and where they were started."""
    return {
        (slot.host, local_rank): incarnation
        for slot in table.slots
        for local_rank, incarnation in enumerate(slot.incarnations)
        if 0 < incarnation < table.generation
    }


def _check_kept(old: RankTable, new: RankTable) -> None:
    """Who goes on was there before: the same process on the same host."""
    before = {
        (slot.host, local_rank): incarnation
        for slot in old.slots
        for local_rank, incarnation in enumerate(slot.incarnations)
    }
    for place, incarnation in _kept(new).items():
        assert before.get(place) == incarnation, f"{place} goes on and was not there"
    if new.generation > old.generation:
        assert new.recoveries == old.recoveries + (1 if _kept(new) else 0)


class Job:
    """Hosts, a leader and the stored documents. Nothing happens unless a method is called."""

    def __init__(self, policy: Policy, *, resumable: bool = False) -> None:
        """With `resumable` the script's processes can live through others' deaths."""
        self.policy = policy
        self.resumable = resumable
        self.now = 100.0
        self.hosts: dict[str, Member] = {}
        self.joined: dict[str, int] = {}
        self.reports: dict[str, HostReport] = {}
        self.table: RankTable | None = None
        self.writes: list[RankTable] = []
        self.exits: dict[str, int] = {}
        self.decision: Decision | None = None
        self.after_write: Callable[[], None] = lambda: None
        """Called after every write: where a leader can be made to die."""
        self._revision = 1
        self._seen = Seen()
        self._gone: set[str] = set()
        self._watching_since = self.now - 1000.0

    # -- what happens to a job -------------------------------------------------------------------

    def join(self, name: str, *, nproc: int = 1) -> None:
        """Let an agent register."""
        record = make_host(name, nproc=nproc)
        self.hosts[name] = Member(record=record, local=LocalHost(host=name))
        self._register(name)

    def vanish(self, name: str) -> None:
        """Let an agent die with its host: its lease ends and its workers are no more."""
        del self.hosts[name]
        self._lease_ends(name)

    def freeze(self, name: str) -> None:
        """Stop a host for so long that its lease ends; its workers stay as they are."""
        self.hosts[name].frozen = True
        self._lease_ends(name)

    def thaw(self, name: str) -> None:
        """Let a frozen host go on: it registers again under its old id."""
        self.hosts[name].frozen = False
        self._register(name)

    def fail(self, name: str, cause: Failure) -> bool:
        """Let a host's first running worker fail; say whether there was one."""
        return self._end_worker(name, WorkerState.FAILED, cause)

    def succeed(self, name: str) -> bool:
        """Let a host's first running worker end with 0; say whether there was one."""
        return self._end_worker(name, WorkerState.SUCCEEDED, None)

    def progress(self, name: str) -> None:
        """Let a worker of a host complete a step, if the host's table is in RUN."""
        member = self.hosts.get(name)
        if member is None or member.frozen or member.table is None:
            return
        running = any(worker.state is WorkerState.RUNNING for worker in member.local.workers)
        if running and member.table.phase is Phase.RUN:
            member.local = replace(member.local, progress=member.table.generation)

    def change_leader(self) -> None:
        """Replace the leader by one that knows nothing but what is stored."""
        self._seen = Seen()
        self._gone = set()
        self._watching_since = self.now

    # -- what the parts do -----------------------------------------------------------------------

    def host_turn(self, name: str) -> bool:
        """Let one host look at the stored table and do the next thing; say whether it did any."""
        member = self.hosts.get(name)
        if member is None or member.frozen:
            return False
        changed = member.table != self.table
        member.table = self.table
        actions = converge(member.table, member.local)
        if actions:
            changed = True
            self._act(member, actions[0])
            if isinstance(actions[0], Leave):
                return True
        said = report(member.table, member.local)
        if said is not None and said != self.reports.get(name):
            changed = True
            self.reports.pop(name, None)
            self.reports[name] = said
        return changed

    def leader_turn(self) -> bool:
        """Let the leader decide once; say whether it wrote anything."""
        decision = decide(self.view(), self._seen, self.policy, self.now)
        assert decision.reason
        self._seen = decision.seen
        self.decision = decision
        if decision.table is None:
            return False
        self._write(decision.table)
        self._check_stable()
        self.after_write()
        return True

    def settle(self) -> None:
        """Let everybody act until nobody has anything to do. Time stands still."""
        for _ in range(200):
            busy = [self.host_turn(name) for name in list(self.hosts)]
            if not self.leader_turn() and not any(busy):
                return
        raise AssertionError("the job does not come to rest")

    def finish(self) -> Phase:
        """Let the job come to its end: hosts answer, healthy workers end with 0, time passes."""
        for _ in range(100):
            self.settle()
            assert self.table is not None
            if self.table.phase.is_final:
                return self.table.phase
            ended = [
                self.succeed(name)
                for name, member in list(self.hosts.items())
                for _ in member.local.workers
            ]
            if not any(ended):
                assert self.decision is not None
                assert self.decision.wake_at is not None, f"nobody ever asks again: {self.table}"
                self.now = max(self.now, self.decision.wake_at)
        raise AssertionError(f"the job does not end: {self.table}")

    def view(self) -> View:
        """Return what the leader sees."""
        present = {n: m.record for n, m in self.hosts.items() if n in self.joined}
        return View(
            hosts=present,
            joined=dict(self.joined),
            reports=dict(self.reports),
            table=self.table,
            gone=frozenset(self._gone - present.keys()),
            watching_since=self._watching_since,
        )

    # -- inside ----------------------------------------------------------------------------------

    def _register(self, name: str) -> None:
        self._revision += 1
        self.joined[name] = self._revision

    def _lease_ends(self, name: str) -> None:
        self.joined.pop(name, None)
        self.reports.pop(name, None)
        self._gone.add(name)

    def _end_worker(self, name: str, state: WorkerState, cause: Failure | None) -> bool:
        member = self.hosts.get(name)
        if member is None or member.frozen:
            return False
        workers = list(member.local.workers)
        for index, worker in enumerate(workers):
            if worker.state is WorkerState.RUNNING:
                workers[index] = replace(worker, state=state, failure=cause)
                member.local = replace(member.local, workers=tuple(workers))
                return True
        return False

    def _act(self, member: Member, action: Action) -> None:
        local = member.local
        alive = {worker.local_rank for worker in local.workers if worker.state in ALIVE}
        match action:
            case StopWorkers(local_ranks=local_ranks, reason=reason):
                assert reason
                workers = tuple(
                    replace(worker, state=WorkerState.STOPPED)
                    if worker.local_rank in local_ranks
                    else worker
                    for worker in local.workers
                )
                member.local = replace(local, workers=workers)
            case PauseWorkers(table=table, local_ranks=local_ranks):
                assert alive >= set(local_ranks)
                assert local.paused < table.generation
                member.local = replace(local, paused=table.generation)
            case Prepare(table=table):
                assert not self._stale(member, table)
                member.local = replace(local, prepared=table.generation, master_port=29000)
            case StartWorkers(table=table, local_ranks=local_ranks, resume=resume):
                assert not alive & set(local_ranks)
                assert alive >= set(resume)
                assert not self._stale(member, table)
                assert not resume or local.paused == table.generation
                self._start(member, table, local_ranks)
            case Leave(exit_code=exit_code, reason=reason):
                assert reason
                self.exits[local.host] = exit_code
                self.vanish(local.host)

    def _start(self, member: Member, table: RankTable, local_ranks: tuple[int, ...]) -> None:
        others = [w for w in member.local.workers if w.local_rank not in local_ranks]
        started = [
            WorkerReport(
                local_rank=local_rank,
                incarnation=table.generation,
                state=WorkerState.RUNNING,
                pid=1,
                resumable=self.resumable,
            )
            for local_rank in local_ranks
        ]
        workers = tuple(sorted(others + started, key=lambda worker: worker.local_rank))
        member.local = replace(member.local, workers=workers, resumed=table.generation)

    @staticmethod
    def _stale(member: Member, table: RankTable) -> bool:
        """Return True if a live worker here is none that the table names."""
        place = table.slot_of(member.local.host)
        assert place is not None
        return any(
            worker.state in ALIVE and place[1].incarnations[worker.local_rank] != worker.incarnation
            for worker in member.local.workers
        )

    def _write(self, table: RankTable) -> None:
        old, snapshot = self.table, self.view()
        check_laws(old, table, self.policy)
        assert wire.decode_table(wire.encode(table)) == table
        if old is not None:
            self._check_put_out(old, table, snapshot)
        if table.phase is Phase.RUN:
            for slot in table.slots:
                member = self.hosts.get(slot.host)
                if member is None or member.frozen:
                    continue
                assert member.local.prepared == table.generation
                assert not self._stale(member, table)
        if table.phase is Phase.DONE:
            for slot in table.slots:
                done = self.reports[slot.host]
                assert done.generation == table.generation
                assert all(worker.state is WorkerState.SUCCEEDED for worker in done.workers)
        if old is not None and table.restarts > old.restarts:
            told = [w.failure for each in self.reports.values() for w in each.workers if w.failure]
            assert table.failure is not None or not told
            assert table.generation == old.generation + 1
        self.table = table
        self.writes.append(table)

    def _check_put_out(self, old: RankTable, new: RankTable, snapshot: View) -> None:
        """Only what is certainly dead (law 7) or was dropped for its failures loses its place."""
        members = {slot.host for slot in new.slots}
        certain = self.now >= self._watching_since + self.policy.lease_ttl_s
        for slot in old.slots:
            if not slot.host or slot.host in members or slot.host in new.dropped:
                continue
            assert slot.host not in snapshot.hosts, f"live host {slot.host} was put out"
            assert certain or slot.host in snapshot.gone, f"{slot.host} was put out too soon"

    def _check_stable(self) -> None:
        """Deciding again on what was just written, with no news, comes to rest at once."""
        seen, stored = self._seen, self.table
        for _ in range(3):
            decision = decide(replace(self.view(), table=stored), seen, self.policy, self.now)
            if decision.table is None:
                return
            check_laws(stored, decision.table, self.policy)
            seen, stored = decision.seen, decision.table
        raise AssertionError("the leader writes without end")
