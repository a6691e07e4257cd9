"""A whole job in one process: real agents, elections, controllers and memberships on a make-believe etcd.

Only processes, sockets and time are simulated. Faults are put where a test says; every rank table that is
written is checked against the laws.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from frun.agent.agent import Agent
from frun.agent.groupstore import GroupStore
from frun.agent.masterport import MasterPort
from frun.agent.parts import Bounds, Outcome, Parts
from frun.agent.workers import LocalWorkers
from frun.errors import FrunError
from frun.events import Event
from frun.protocol import wire
from frun.protocol.incidents import IncidentRecord
from frun.protocol.keys import Keys
from frun.protocol.policy import Policy
from frun.protocol.records import HostRecord, JobSpec, Phase, RankTable, Slot
from frun.rendezvous.membership import JOB_LEASE_TTL_S, Membership
from frun.rendezvous.store import Batch, Compare, Delete, Put
from tests.fakes.memory_store import MemoryCluster, MemoryStore
from tests.protocol.job import check_laws
from tests.sim import virtual
from tests.sim.training import Groups, Master, Training, Workers

TTL_S = 3
_TICK_S = 0.05
"""Step of etcd's clock."""
LIMIT_S = 1500.0
"""Simulated seconds within which every job must have ended."""


class HostStore(MemoryStore):
    """One host's way to etcd: with latency, a freeze, and points at which the host can be killed."""

    def __init__(self, sim: "Sim", host: "Host") -> None:
        super().__init__(sim.etcd)
        self._sim = sim
        self._host = host

    async def commit(self, compares: Sequence[Compare], ops: Sequence[Put | Delete]) -> int | None:
        """Apply all `ops`, unless the host is killed just before or after."""
        number = self._sim.count_commit()
        if number in self._sim.kill_before:
            await self._perish()
        try:
            revision = await super().commit(compares, ops)
        finally:
            # Also when its answer gets lost: what is stored is checked.
            self._sim.look(self._host, ops)
        if number in self._sim.kill_after:
            await self._perish()
        await self._sim.latency()
        return revision

    async def watch(self, prefix: str, after: int) -> AsyncGenerator[Batch, None]:
        """Yield changes, late."""
        async with contextlib.aclosing(super().watch(prefix, after)) as batches:
            async for batch in batches:
                await self._sim.latency()
                await self._host.thawed()
                yield batch

    async def _reach(self) -> None:
        await self._sim.latency()
        await self._host.thawed()
        await super()._reach()

    async def _perish(self) -> None:
        self._sim.kill(self._host.name)
        await asyncio.get_running_loop().create_future()


@dataclass(slots=True, eq=False)
class Host:
    """One simulated machine."""

    name: str
    workers: Workers
    dead: bool = False
    frozen: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it runs."""
    store: HostStore | None = None
    agent: Agent | None = None
    task: "asyncio.Task[None] | None" = None
    outcome: Outcome | None = None
    error: FrunError | None = None

    @property
    def client(self) -> HostStore:
        """Its client of etcd, once it was started."""
        assert self.store is not None
        return self.store

    async def thawed(self) -> None:
        """Wait while this host is frozen."""
        if not self.dead:
            await self.frozen.wait()


class Sim:
    """One job and its etcd."""

    def __init__(
        self,
        policy: Policy,
        *,
        work_s: float = 20.0,
        resumable: bool = False,
        seed: int = 0,
        latency_s: float = 0.0,
    ) -> None:
        self.policy = policy
        self.etcd = MemoryCluster()
        self.training = Training(work_s, resumable=resumable)
        self.hosts: dict[str, Host] = {}
        self.tables: list[RankTable] = []
        """Every rank table of the job that was stored, in order."""
        self.times: list[float] = []
        """When each of them was."""
        self.events: list[tuple[float, str, Event]] = []
        self.kill_before: set[int] = set()
        """Numbers of commits before which the host that asks for them dies."""
        self.kill_after: set[int] = set()
        """Numbers of commits after which the host that asked for them dies."""
        self.commits = 0
        self.wiped = False
        self.jobs = 0
        """Jobs that were begun under this id; one whose hosts are all gone is over."""
        self.random = random.Random(seed)
        self._latency_s = latency_s
        self._uid = ""
        self._revision = 0
        self._keys = Keys("sim")
        self._clock = virtual.VirtualClock()

    # -- what a test does ------------------------------------------------------------------------

    @property
    def incidents(self) -> list[IncidentRecord]:
        """The accounts of faults in etcd, in order."""
        prefix = self._keys.incidents
        items = self.etcd.read(prefix).items.values()
        return [wire.decode_incident(kv.value) for kv in items]

    @property
    def now(self) -> float:
        """Simulated seconds since the beginning."""
        return self._clock.monotonic()

    @property
    def table(self) -> RankTable | None:
        """The rank table in etcd."""
        stored = self.etcd.items.get(self._keys.ranktable)
        return None if stored is None else wire.decode_table(stored.value)

    @property
    def leader(self) -> str:
        """The host that holds the leader key; empty if none does."""
        stored = self.etcd.items.get(self._keys.leader)
        return "" if stored is None else stored.value.decode()

    @property
    def registered(self) -> set[str]:
        """Hosts with a record in etcd."""
        prefix = self._keys.hosts
        return {key[len(prefix) :] for key in self.etcd.items if key.startswith(prefix)}

    def add(self, *names: str, nproc: int = 2, stop_s: float = 0.1) -> None:
        """Start agents."""
        for name in names:
            assert name not in self.hosts
            host = Host(name, Workers(name, self.training, stop_s=stop_s))
            host.frozen.set()
            self.hosts[name] = host
            host.task = asyncio.create_task(self._live(host, nproc), name=f"host {name}")

    def kill(self, name: str) -> None:
        """Switch a machine off."""
        host = self.hosts[name]
        if host.dead or host.task is None or host.task.done():
            return
        host.dead = True
        host.frozen.set()
        host.workers.die()
        if host.store is not None:
            host.store.cut = True
            self.etcd.break_watches("this machine is off", host.store)
        asyncio.get_running_loop().call_soon(host.task.cancel)

    def freeze(self, name: str) -> None:
        """Stop a machine in time: nothing it does reaches anybody."""
        self.hosts[name].frozen.clear()
        self.hosts[name].workers.frozen = True

    def thaw(self, name: str) -> None:
        """Let a frozen machine go on."""
        self.hosts[name].frozen.set()
        self.hosts[name].workers.frozen = False

    @contextlib.asynccontextmanager
    async def outage(self) -> AsyncGenerator[None, None]:
        """Stop etcd for the duration of a block; leases start anew after it."""
        with self.etcd.outage():
            yield

    @contextlib.contextmanager
    def cut_off(self, *names: str) -> Any:
        """Cut hosts off from etcd, and only from it, for the duration of a block."""
        with contextlib.ExitStack() as stack:
            for name in names:
                stack.enter_context(self.hosts[name].client.outage())
            yield

    def wipe(self) -> None:
        """Let etcd lose all its data."""
        self.wiped = True
        self.etcd.wipe()

    async def until(self, condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        """Wait until something holds; fail when it does not within a time."""
        end = self.now + limit_s
        while not condition():
            assert self.now < end, f"waited {limit_s:g} s in vain; {self.story()}"
            await asyncio.sleep(0.01)

    async def running(self, generation: int) -> None:
        """Wait until a generation's workers all train."""
        await self.until(
            lambda: (
                self.table is not None
                and self.table.generation == generation
                and self.table.phase is Phase.RUN
                and all(
                    self.hosts[slot.host].workers.progress == generation
                    for slot in self.table.slots
                )
            )
        )

    async def end(self) -> Phase:
        """Wait until every agent has ended; check what holds for every end; return the phase."""
        tasks = [host.task for host in self.hosts.values() if host.task is not None]
        await self.until(lambda: all(task.done() for task in tasks))
        for host in self.hosts.values():
            if host.task is not None and not host.dead:
                host.task.result()
            assert not host.workers.alive, f"workers of {host.name} were left behind"
        await asyncio.sleep(JOB_LEASE_TTL_S + 1.0)
        assert not self.etcd.items, f"left in etcd: {list(self.etcd.items)}"
        assert self.etcd.open_watches == 0
        return self.tables[-1].phase

    def exits(self) -> dict[str, int]:
        """Return the exit status of every agent that ended by itself."""
        ended = {n: h.outcome.exit_code for n, h in self.hosts.items() if h.outcome is not None}
        refused = {n: h.error.exit_code for n, h in self.hosts.items() if h.error is not None}
        return ended | refused

    def story(self) -> str:
        """Return the job's tables as lines."""
        lines = [
            f"{when:8.3f}  gen {table.generation} {table.phase.value:8}"
            f" [{' '.join(slot.host or '-' for slot in table.slots)}] {table.reason}"
            for when, table in zip(self.times, self.tables, strict=True)
        ]
        return "\n".join([f"now {self.now:.3f}, exits {self.exits()}", *lines])

    # -- what the parts call ---------------------------------------------------------------------

    async def latency(self) -> None:
        """Take as long as a message does."""
        if self._latency_s:
            await asyncio.sleep(self.random.uniform(0.1, 1.0) * self._latency_s)

    def count_commit(self) -> int:
        """Number a commit."""
        self.commits += 1
        return self.commits

    def look(self, host: Host, ops: Sequence[Put | Delete]) -> None:
        """See what a commit of a host has changed: check and keep a rank table that is new."""
        spec = self.etcd.items.get(self._keys.spec)
        uid = "" if spec is None else wire.decode_spec(spec.value).uid
        if uid and uid != self._uid:
            self._uid = uid
            self.jobs += 1
            self.training.begin_job()
            self.tables, self.times = [], []
        stored = self.etcd.items.get(self._keys.ranktable)
        if stored is None or stored.mod_revision == self._revision:
            return
        self._revision = stored.mod_revision
        assert not host.dead
        assert any(op.key == self._keys.ranktable for op in ops)
        table = wire.decode_table(stored.value)
        if not (self.wiped and table in self.tables):  # else it was written back
            check_laws(self.tables[-1] if self.tables else None, table, self.policy)
        self.tables.append(table)
        self.times.append(self.now)

    # -- inside ----------------------------------------------------------------------------------

    async def tick(self) -> None:
        """Move etcd's clock with the loop's."""
        while True:
            await asyncio.sleep(_TICK_S)
            self.etcd.advance(_TICK_S)

    async def _live(self, host: Host, nproc: int) -> None:
        """Run one agent as `launch` does, to its end."""
        store = host.store = HostStore(self, host)
        record = HostRecord(
            host=host.name,
            name=host.name,
            address=f"10.0.0.{len(self.hosts)}",
            port=4000,
            nproc=nproc,
        )
        spec = JobSpec(
            job_id="sim",
            uid=f"uid-{host.name}",
            min_hosts=self.policy.min_hosts,
            max_hosts=self.policy.max_hosts,
            max_restarts=self.policy.max_restarts,
            entry="train.py",
            version="1",
        )
        membership = Membership(store, self._keys, record, TTL_S, self._clock)
        try:
            await membership.join(spec)
            host.agent = Agent(
                self._parts(host, record, store, membership),
                on_table=lambda _: None,
                on_decision=lambda decision: self._decided(decision.reason),
                on_incident=lambda _: None,
            )
            host.workers.on_change = host.agent.wake
            host.outcome = await host.agent.run()
        except FrunError as error:
            host.error = error
        finally:
            host.workers.die()
            await store.close()

    def _parts(
        self, host: Host, record: HostRecord, store: HostStore, membership: Membership
    ) -> Parts:
        async def hold() -> tuple[MasterPort, int]:
            return cast("MasterPort", Master()), 29500

        return Parts(
            record=record,
            store=store,
            keys=self._keys,
            membership=membership,
            policy=self.policy,
            bounds=Bounds(shutdown_s=5.0, store_s=60.0, farewell_s=TTL_S + 2.0),
            workers=cast("LocalWorkers", host.workers),
            groups=cast("GroupStore", Groups()),
            hold_master_port=hold,
            free_master_port=False,
            clock=self._clock,
            answers=self._answers,
            emit=lambda event, _: self.events.append((self.now, host.name, event)),
        )

    async def _answers(self, slot: Slot) -> bool:
        await self.latency()
        host = self.hosts[slot.host]
        return not host.dead and host.frozen.is_set()

    @staticmethod
    def _decided(reason: str) -> None:
        assert reason


def play(sim: Sim, story: Callable[[Sim], Awaitable[None]]) -> Sim:
    """Run a story on simulated time; on failure show the tables."""

    async def main() -> None:
        ticking = asyncio.create_task(sim.tick())
        try:
            await story(sim)
        finally:
            for host in sim.hosts.values():
                sim.kill(host.name)
            await asyncio.sleep(0.1)
            ticking.cancel()

    # The mirror spreads its retries by chance; a story must be told the same way each time.
    random.seed(sim.random.random())
    try:
        virtual.run(main())
    except BaseException as error:
        error.add_note(f"{len(sim.tables)} tables were written:")
        for line in zip(sim.times, sim.tables, strict=True):
            table = line[1]
            places = " ".join(slot.host or "-" for slot in table.slots)
            error.add_note(
                f"{line[0]:8.3f} gen {table.generation} {table.phase.value} [{places}] {table.reason}"
            )
        raise
    return sim
