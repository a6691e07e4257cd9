"""One host's agent: keeps the host in the job and makes it what the rank table says.

A boring shell. `converge` says what to do from the stored table and the local facts, `decide` (only while
this host leads) says what the table should be; this module connects them to etcd, the group store and the
workers, and ends the host's part when it is over.
"""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Any

from frun.agent import farewell
from frun.agent.laggards import Laggards
from frun.agent.masterport import MasterPort
from frun.agent.parts import Outcome, Parts
from frun.agent.peers import Peers
from frun.controller.loop import Controller
from frun.errors import StoreUnavailable
from frun.events import (
    Event,
    GenerationStarted,
    IncidentClosed,
    IncidentRenamed,
    LeaderElected,
    LeaseLost,
    PhaseSeen,
    SignalReceived,
    StoreBack,
    StoreLost,
    TableDecided,
    WorkersPrepared,
    WorkersStopping,
)
from frun.protocol import survival
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
from frun.protocol.incidents import IncidentRecord
from frun.protocol.policy import Decision
from frun.protocol.records import Phase, RankTable, View, WorkerState
from frun.rendezvous.election import Election, Term
from frun.rendezvous.table import TableFollower


class Agent:
    """Runs one host's part of a job from registration to the end."""

    def __init__(
        self,
        parts: Parts,
        *,
        on_table: Callable[[RankTable], None],
        on_decision: Callable[[Decision], None],
        on_incident: Callable[[IncidentRecord], None],
    ) -> None:
        """`parts.membership` has joined already. The callbacks are told of news once each."""
        self._parts = parts
        self._host = parts.record.host
        self._membership = parts.membership
        self._workers = parts.workers
        self._bounds = parts.bounds
        self._on_table = on_table
        self._on_decision = on_decision
        self._on_incident = on_incident
        self._table: RankTable | None = None
        self._table_since = 0.0
        self._paused = 0
        self._resumed = 0
        self._prepared = 0
        self._master: MasterPort | None = None
        self._master_port = 0
        self._doing: asyncio.Task[None] | None = None
        self._away_since: float | None = None
        self._losses = 0
        self._unfit = ""
        self._broken: BaseException | None = None
        self._signal: int | None = None
        self._wake = asyncio.Event()
        self._follower = TableFollower(
            parts.store, parts.keys, self._take_table, parts.membership.reassert
        )
        self.election = Election(
            *(parts.store, parts.keys, parts.membership, self._host, self._lead),
            known=lambda: self._table,
            clock=parts.clock,
        )

    def wake(self) -> None:
        """Look again: something local changed."""
        self._wake.set()

    def leave_unfit(self, why: str) -> None:
        """Leave the job with status 1, because no worker can be trusted to run on this host."""
        self._unfit = self._unfit or why
        self._wake.set()

    def interrupt(self, signum: int) -> None:
        """Leave the job because of a signal; a second one doesn't lengthen anything."""
        if self._signal is None:
            self._signal = signum
            self._wake.set()

    async def run(self) -> Outcome:
        """Take part until the job ends, this host is to leave, or a signal comes.

        Raises what made this agent unable to go on (LaunchError, StoreRefused); it has left the job then.
        """
        self._membership.on_change = self._store_changed
        keep = self._in_background(self._membership.keep(), "membership")
        others = [
            self._in_background(self._follower.run(), "table"),
            self._in_background(self.election.run(), "election"),
            self._in_background(self._workers.pulse.watch(), "beats"),
        ]
        last = False
        try:
            outcome = await self._turns()
            last = self._signal is None and await self._farewell(outcome)
        finally:
            # First of all nothing may register this host again, or decide, while it leaves.
            for task in (keep, *others):
                task.cancel()
            await asyncio.gather(keep, *others, return_exceptions=True)
            if self._doing is not None:
                self._doing.cancel()
            spec = self._membership.spec
            if last and spec is not None:
                with contextlib.suppress(StoreUnavailable):
                    await farewell.clear(self._parts.store, self._parts.keys, spec.uid)
            await self._membership.leave()
            await self._close_master()
        return outcome

    def _store_changed(self) -> None:
        """etcd was lost or is back, or this host has a new lease."""
        away_since = self._membership.unreachable_since
        now = self._parts.clock.monotonic()
        if self._membership.losses > self._losses:
            self._losses = self._membership.losses
            self._emit(LeaseLost(reason="it was not refreshed in time"))
        if away_since is not None and self._away_since is None:
            self._emit(StoreLost(reason="no answer to the last request"))
        elif away_since is None and self._away_since is not None:
            self._emit(StoreBack(outage_s=now - self._away_since))
        self._away_since = away_since
        self._wake.set()

    def _in_background(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` beside the turns; its failure ends them."""
        task = asyncio.create_task(work, name=name)

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._broken = self._broken or error
                self._wake.set()

        task.add_done_callback(ended)
        return task

    async def _turns(self) -> Outcome:
        """After every change do the next thing that is due, one at a time, until it is over."""
        while True:
            self._wake.clear()
            if self._broken is not None:
                raise self._broken
            if self._signal is not None:
                return await self._leave_on_signal(self._signal)
            if self._unfit:
                return self._outcome(1, f"{self._unfit}: this host is not fit")
            if self._doing is None:
                actions = converge(self._table, self._local())
                if actions and isinstance(actions[0], Leave):
                    return self._outcome(actions[0].exit_code, actions[0].reason)
                if actions:
                    self._doing = self._in_background(self._act(actions[0]), "action")
                    self._doing.add_done_callback(self._done)
            self._membership.publish(report(self._table, self._local()))
            timeout = self._patience()
            if timeout is not None and timeout <= 0:
                return await self._give_up_on_store()
            # Not `wait_for`: before Python 3.12 that loses a cancellation that comes with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._wake.wait()

    def _done(self, _: asyncio.Task[None]) -> None:
        self._doing = None
        self._wake.set()

    def _local(self) -> LocalHost:
        return LocalHost(
            host=self._host,
            workers=self._workers.reports,
            paused=self._paused,
            resumed=self._resumed,
            prepared=self._prepared,
            master_port=self._master_port,
            stopping=self._doing is not None,
            progress=self._workers.progress,
            recovery=self._workers.timer.result,
        )

    async def _act(self, action: Action) -> None:
        match action:
            case StopWorkers(reason=reason, local_ranks=local_ranks, at_once=at_once):
                signum = signal.SIGKILL if at_once else signal.SIGTERM
                self._emit(WorkersStopping(signal=signum.name, reason=reason))
                grace_s = 0.0 if at_once else self._bounds.shutdown_s
                stuck = await self._workers.stop(signum, grace_s, local_ranks)
                if stuck:
                    self.leave_unfit(f"the kernel does not end {', '.join(map(str, stuck))}")
            case Prepare(table=table):
                await self._prepare(table)
            case PauseWorkers(table=table, local_ranks=local_ranks):
                self._paused = table.generation
                self._workers.pause(table.generation, local_ranks)
            case StartWorkers(table=table, local_ranks=local_ranks, resume=resume):
                if self._parts.free_master_port:
                    await self._close_master()
                await self._start(table, local_ranks, resume)
            case Leave():
                pass  # ends the turns; nothing to do beside them

    async def _start(
        self, table: RankTable, local_ranks: tuple[int, ...], resume: tuple[int, ...]
    ) -> None:
        """Start newcomers and let survivors go on; both meet in the generation's store."""
        clock, timer = self._parts.clock, self._workers.timer
        timer.run({*local_ranks, *resume}, clock.monotonic())
        self._resumed = table.generation
        self._workers.resume(table, resume)
        await self._workers.start(table, local_ranks)
        timer.started(clock.monotonic())
        if not survival.has_survivors(table):
            timer.whole(clock.monotonic())
        place = table.slot_of(self._host)
        self._emit(
            GenerationStarted(
                group_rank=place[0] if place is not None else -1,
                world_size=table.world_size,
                took_s=clock.monotonic() - self._table_since,
            )
        )

    async def _prepare(self, table: RankTable) -> None:
        """Begin this host's part of the group store, and hold MASTER_PORT on the first host."""
        place = table.slot_of(self._host)
        if place is None:
            return
        index, _ = place
        self._parts.groups.begin(table.generation, table.slots, index)
        await self._close_master()
        if index == 0:
            self._master, self._master_port = await self._parts.hold_master_port()
        self._prepared = table.generation
        self._emit(WorkersPrepared(took_s=self._parts.clock.monotonic() - self._table_since))

    async def _close_master(self) -> None:
        if self._master is not None:
            master, self._master = self._master, None
            await master.close()

    def _take_table(self, table: RankTable) -> None:
        """Act on this table from now on, unless it is an older one."""
        known = self._table
        if known is not None and table.generation < known.generation:
            return
        if table != known:
            if known is None or table.generation != known.generation:
                self._table_since = self._parts.clock.monotonic()
                self._workers.expect(table)
                self._workers.timer.table(table.generation, self._table_since)
            self._table = table
            self._on_table(table)
            place = table.slot_of(self._host)
            self._emit(
                PhaseSeen(
                    phase=table.phase.value,
                    reason=table.reason,
                    world_size=table.world_size,
                    hosts=len(table.slots),
                    group_rank=place[0] if place is not None else None,
                )
            )
            self._wake.set()

    async def _lead(self, term: Term) -> None:
        parts = self._parts
        peers, laggards = Peers(self._emit), Laggards(self._emit)

        def look(view: View, now: float) -> float | None:
            peers.look(view.hosts)
            return laggards.look(view, now)

        controller = Controller(
            parts.store,
            parts.keys,
            parts.membership,
            parts.policy,
            parts.clock,
            parts.answers,
            on_decision=self._decided,
            on_incident=self._incident,
            on_renamed=self._renamed,
            on_look=look,
        )
        self._emit(LeaderElected(peer=self._host))
        await controller.run(term, lambda: self._table)

    def _decided(self, decision: Decision) -> None:
        if decision.table is not None:
            table = decision.table
            self._emit(
                TableDecided(
                    phase=table.phase.value,
                    reason=decision.reason,
                    world_size=table.world_size,
                    restarts=table.restarts,
                )
            )
        self._on_decision(decision)

    def _incident(self, record: IncidentRecord) -> None:
        fields = asdict(record)
        generation = fields.pop("generation")
        self._parts.emit(IncidentClosed(**fields), generation)
        self._on_incident(record)

    def _renamed(self, record: IncidentRecord) -> None:
        named = IncidentRenamed(
            id=record.id, fault_class=str(record.fault_class), evidence=record.evidence
        )
        self._parts.emit(named, record.generation)

    def _patience(self) -> float | None:
        """Return the seconds this host still waits for etcd; None while it need not wait.

        Running workers need no decision, so an outage alone never ends them.
        """
        away_since = self._membership.unreachable_since
        if away_since is None:
            return None
        settled = self._table is not None and self._table.phase is Phase.RUN
        if settled and all(w.state is WorkerState.RUNNING for w in self._workers.reports):
            return None
        return away_since + self._bounds.store_s - self._parts.clock.monotonic()

    async def _give_up_on_store(self) -> Outcome:
        await self._workers.stop(signal.SIGTERM, self._bounds.shutdown_s)
        return self._outcome(
            1,
            f"etcd did not answer for {self._bounds.store_s:g} s (read_timeout) while this host needed a"
            " decision",
        )

    async def _leave_on_signal(self, signum: int) -> Outcome:
        """Give up this host's place at once, so that others go on, then stop its workers."""
        name = signal.Signals(signum).name
        self._emit(SignalReceived(signal=name))
        await self._membership.leave()
        doing = self._doing
        if doing is not None:
            # A stop that is under way has its own bound: a signal never lengthens it.
            await asyncio.wait({doing})
        if self._workers.alive:
            await self._workers.stop(signum, self._bounds.shutdown_s)
        return self._outcome(1, f"stopped by {name}", stopped=True)

    async def _farewell(self, outcome: Outcome) -> bool:
        """Stay as long as others need what is here: the leader's last word, or the embedded etcd.

        Returns True if nothing of the job may stay in etcd and this host is the one to see to it.
        """
        over = outcome.table is None or outcome.table.phase.is_final
        leads = self.election.leader == self._host
        if not (self._parts.record.keeps_store or (leads and over)):
            return False
        timeout_s = self._bounds.farewell_s if over else None
        alone = farewell.until_alone(self._parts.store, self._parts.keys, self._host)
        with contextlib.suppress(StoreUnavailable, TimeoutError):
            await self._unless_signalled(alone, timeout_s)
        return over

    async def _unless_signalled(
        self, work: Coroutine[Any, Any, None], timeout_s: float | None
    ) -> None:
        """Await `work`, at most for a time; a signal ends it early."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self._wake.set())
        try:
            async with asyncio.timeout(timeout_s):
                while not task.done() and self._signal is None:
                    self._wake.clear()
                    await self._wake.wait()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _outcome(self, exit_code: int, reason: str, *, stopped: bool = False) -> Outcome:
        table = self._table
        return Outcome(
            exit_code=exit_code,
            reason=reason,
            table=table,
            host=self._host,
            spare=table is not None and table.slot_of(self._host) is None,
            stopped=stopped,
            error_files=self._workers.error_files,
        )

    def _emit(self, event: Event) -> None:
        self._parts.emit(event, self._table.generation if self._table is not None else 0)
