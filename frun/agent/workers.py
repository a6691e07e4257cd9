"""Owns this host's workers: starts and stops them, and knows what became of each.

It acts on orders (`start`, `stop`) and reports facts (`reports`, `on_change`). Whether to start or stop is
`converge`'s business, what a failure means to the job is the leader's.
"""

import asyncio
import logging
import signal
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from frun import procfs
from frun.agent import environment, failures, stacks, starting, told
from frun.agent.channel import Channel
from frun.agent.logs import LogPump
from frun.agent.orders import Orders
from frun.agent.pulse import Pulse
from frun.agent.recovery import RecoveryTimer
from frun.agent.spy import Spy
from frun.agent.worker import Worker, WorkerSettings
from frun.agent.zygote import Stuck, Zygote
from frun.clock import Clock
from frun.errors import LaunchError
from frun.events import (
    Event,
    FaultNoticed,
    WorkerStarted,
    ZygoteLost,
    ZygoteReady,
)
from frun.protocol import classify
from frun.protocol.channel import (
    Beat,
    FirstStep,
    Hello,
    Message,
    Out,
    Pause,
    Raised,
    Restored,
    Resume,
    Stacks,
)
from frun.protocol.hangs import Standing
from frun.protocol.health import Fact
from frun.protocol.records import Failure, RankTable, WorkerReport, WorkerState
from frun.protocol.stragglers import Work

logger = logging.getLogger(__name__)

_ENDED_PAUSED = "ended with status 0, its training over, when another worker had died and needed it"
_DRAIN_S = 1.0
_ALIVE = (WorkerState.STARTING, WorkerState.RUNNING)


class LocalWorkers:
    """The workers of one host. All methods run on the agent's event loop."""

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        channel: Channel,
        logs: LogPump,
        make_zygote: Callable[[Callable[[int, int], None], Callable[[str], None]], Zygote],
        emit: Callable[[Event, int], None],
        clock: Clock,
    ) -> None:
        """`make_zygote(on_exit, on_death)` returns a zygote that is not started yet.

        `emit` takes events with their generation.
        """
        self.on_change: Callable[[], None] = lambda: None
        """Called after every change of `reports`."""
        self.out_within_s = settings.config.workers.pause_timeout_s
        """Seconds that a survivor has to leave its groups; then it is killed and replaced."""
        self.timer = RecoveryTimer()
        limits = settings.config.workers
        beat_s, hang_s = limits.beat_timeout_s, limits.hang_timeout_s
        self.pulse = Pulse(self, channel, beat_s, hang_s, clock, Spy(settings.py_spy))
        self._stacks = stacks.StackFiles(self.pulse, logs, emit)
        self.progress = 0
        """Latest generation in which a worker here completed a step."""
        self._settings = settings
        self._config = settings.config
        self._host = settings.host
        self._channel = channel
        channel.on_message = self._heard
        self._orders = Orders(channel, self._end)
        self._logs = logs
        self._make_zygote = make_zygote
        self._emit = emit
        self._clock = clock
        self._zygote: Zygote | None = None
        self._making_zygote = asyncio.Lock()
        self._workers: dict[int, Worker] = {}
        self._by_pid: dict[int, Worker] = {}
        self._unclaimed: dict[int, int] = {}
        self._early: dict[int, list[Message]] = {}
        self._generation = 0
        self._failures = 0
        self._tasks: set[asyncio.Future[object]] = set()

    @property
    def reports(self) -> tuple[WorkerReport, ...]:
        """What is known of each worker of the latest generation that ran here."""
        return tuple(worker.report for worker in self._workers.values())

    def pid_of(self, rank: int) -> int:
        """Return the process id of a live worker by its rank; 0 if it is not here."""
        found = (each.report.pid for each in self._by_pid.values() if each.rank == rank)
        return next(found, 0)

    @property
    def alive(self) -> bool:
        """True while any worker process exists or is being made."""
        return any(worker.report.state in _ALIVE for worker in self._workers.values())

    @property
    def error_files(self) -> dict[int, str]:
        """Per local rank, the error file of the latest worker there; empty text if none."""
        return {
            local_rank: worker.streams.error_file if worker.streams is not None else ""
            for local_rank, worker in self._workers.items()
        }

    async def ready_zygote(self) -> Zygote:
        """Return a live zygote, made anew if the last one died. Raises LaunchError."""
        async with self._making_zygote:
            if self._zygote is None:
                zygote = self._make_zygote(self._exited, self._zygote_died)
                zygote.on_ready = self._zygote_ready
                await zygote.start()
                self._zygote = zygote
            return self._zygote

    async def start(self, table: RankTable, local_ranks: Sequence[int]) -> None:
        """Start workers of the table's generation; a failed start is a failed worker."""
        place = table.slot_of(self._host)
        if place is None:
            return
        group_rank, slot = place
        self._begin(table.generation)
        started, killed = [], procfs.oom_kills()
        for local_rank in local_ranks:
            self._forget(local_rank)
            report = WorkerReport(
                local_rank=local_rank,
                incarnation=table.generation,
                state=WorkerState.STARTING,
            )
            rank = slot.first_rank + local_rank
            worker = Worker(rank=rank, report=report, oom_kills=killed)
            self._workers[local_rank] = worker
            started.append(worker)
        await asyncio.gather(*(self._start_one(worker, table, group_rank) for worker in started))
        self.on_change()

    def pause(self, generation: int, local_ranks: Sequence[int]) -> None:
        """Tell live workers to leave their groups; one that does not in time is killed."""
        self._begin(generation)
        for local_rank in local_ranks:
            worker = self._workers[local_rank]
            worker.pausing = generation
            worker.report = replace(worker.report, standing=None)
            self._orders.give(worker, Pause(generation=generation))
        loop = asyncio.get_running_loop()
        loop.call_later(self.out_within_s, self._end_stuck, generation)

    def resume(self, table: RankTable, local_ranks: Sequence[int]) -> None:
        """Let paused workers go on in the table's generation."""
        place = table.slot_of(self._host)
        if place is None:
            return
        group_rank, slot = place
        for local_rank in local_ranks:
            worker = self._workers[local_rank]
            worker.rank = slot.first_rank + local_rank
            env = starting.environment_of(
                self._settings, table, group_rank, local_rank, error_file=""
            )
            changed = {name: env[name] for name in environment.RANK_VARIABLES if name in env}
            self._orders.give(worker, Resume(generation=table.generation, env=changed))

    def _begin(self, generation: int) -> None:
        """Count the failures of a generation from its first order on."""
        if generation != self._generation:
            self._generation = generation
            self._failures = 0
            self._unclaimed = {}
            self._early = {}

    def _forget(self, local_rank: int) -> None:
        """Drop what is known of the process that had this local rank before."""
        old = self._workers.pop(local_rank, None)
        if old is not None:
            self._by_pid.pop(old.report.pid, None)

    def _end_stuck(self, generation: int) -> None:
        """Kill workers that were to pause for this generation and are not out yet."""
        for worker in self._workers.values():
            alive = worker.report.state in _ALIVE
            if alive and worker.pausing == generation and worker.out < generation:
                self._end(worker, f"did not leave its step within {self.out_within_s:g} s")

    def _end(self, worker: Worker, why: str) -> None:
        """Kill one worker; its failure says why frun did so."""
        worker.ended_because = f"{why}, and was killed"
        if self._zygote is not None:
            self._in_background(self._zygote.stop([worker.report.pid], signal.SIGKILL, 0.0))

    def connected(self) -> Collection[int]:
        """Return the pids of live workers that have a channel to this agent."""
        return [pid for pid in self._by_pid if self._channel.reaches(pid)]

    def give_up(self, pid: int, why: str, since_s: float, source: str = "beat") -> None:
        """Kill a worker that has been of no use for so long; its failure says why."""
        worker = self._by_pid[pid]
        event = FaultNoticed(source=source, rank=worker.rank, reason=why, since_s=since_s)
        self._emit(event, self._generation)
        self.timer.ended(self._clock.monotonic() - since_s)
        self._stacks.silent(worker.rank, pid, why, self._generation)
        self._end(worker, why)

    def strike(self, local_rank: int, fact: Fact) -> None:
        """Kill the worker whose device is of no use any more, if it runs; its failure has that class."""
        worker = self._workers.get(local_rank)
        if worker is not None and worker.report.pid in self._by_pid:
            worker.found = classify.of_fact(fact)
            self.give_up(worker.report.pid, str(fact), 0.0, "device")

    def stands(self, pid: int, standing: Standing | None, generation: int) -> None:
        """Report that a worker has not moved for too long in this generation; None: it moves."""
        worker = self._by_pid.get(pid)
        if worker is None or (generation != self._generation and standing is not None):
            return
        if (standing is None) is not (worker.report.standing is None):
            worker.report = replace(worker.report, standing=standing)
            self.on_change()

    def takes(self, works: Mapping[int, Work]) -> None:
        """Report how long workers take for their own part of a step, by pid."""
        for pid, work in works.items():
            if (worker := self._by_pid.get(pid)) is not None:
                worker.report = replace(worker.report, work=work)
        self.on_change()

    def expect(self, table: RankTable) -> None:
        """Take note of a new generation, and write down what was done here if ranks hung in the last one."""
        self.pulse.barren = table.barren
        incident, place = table.incident, table.slot_of(self._host)
        if incident is None or place is None or incident.kind not in stacks.KINDS:
            return
        pids = {worker.rank: worker.report.pid for worker in self._workers.values()}
        since_s = self._stacks.hung(incident, pids, self._generation, first=place[0] == 0)
        if since_s is not None:
            self.timer.ended(self._clock.monotonic() - since_s)

    def condemn(self, pid: int, why: str) -> None:
        """Note why this worker is about to be ended by others: it failed then, whatever its exit."""
        if (worker := self._by_pid.get(pid)) is not None:
            worker.ended_because = why

    def _in_background(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start_one(self, worker: Worker, table: RankTable, group_rank: int) -> None:
        local_rank = worker.report.local_rank
        try:
            streams = self._logs.open(
                generation=table.generation,
                local_rank=local_rank,
                rank=worker.rank,
                role_name=self._config.workers.role,
            )
            worker.streams = streams
            worker.captured = streams.stderr_fd is not None
            try:
                zygote = await self.ready_zygote()
                pid = await zygote.spawn(
                    starting.launch_of(self._settings, worker, table, group_rank, streams)
                )
            finally:
                streams.close_fds()
        except (LaunchError, OSError) as error:
            failure = self._failure(worker, 127, message=f"could not be started: {error}")
            worker.report = replace(worker.report, state=WorkerState.FAILED, failure=failure)
            return
        worker.report = replace(worker.report, state=WorkerState.RUNNING, pid=pid)
        self._by_pid[pid] = worker
        self._emit(
            WorkerStarted(rank=worker.rank, local_rank=local_rank, pid=pid), table.generation
        )
        for message in self._early.pop(pid, ()):
            self._heard(pid, message)
        early = self._unclaimed.pop(pid, None)
        if early is not None:
            self._exited(pid, early)
        elif worker.stopped_by_us:
            # A stop came while the process was being made: it must not outlive it.
            await zygote.stop([pid], 9, 0.0)

    async def stop(
        self, signum: int, grace_s: float, local_ranks: Collection[int] | None = None
    ) -> tuple[Stuck, ...]:
        """Stop workers (None: all) and all their descendants; return what the kernel will not end.

        Children of workers that are dead already are stopped as well.
        """
        chosen = [
            worker
            for local_rank, worker in self._workers.items()
            if local_ranks is None or local_rank in local_ranks
        ]
        alive = [worker.report.pid for worker in chosen if worker.report.state in _ALIVE]
        dead = [worker.report.pid for worker in chosen if worker.report.state not in _ALIVE]
        for worker in chosen:
            worker.stopped_by_us = worker.report.state in _ALIVE
        stuck: list[Stuck] = []
        if self._zygote is not None:
            # What a dead worker left behind serves nobody and must not hold up a recovery.
            for found in await asyncio.gather(
                self._zygote.stop([pid for pid in alive if pid], signum, grace_s),
                self._zygote.stop([pid for pid in dead if pid], signal.SIGKILL, 0.0),
            ):
                stuck += found
            drained = [worker.report.local_rank for worker in chosen]
            await asyncio.to_thread(self._logs.drain, drained, _DRAIN_S)
        for worker in chosen:
            worker.report = replace(worker.report, state=WorkerState.STOPPED)
        self.timer.stopped(self._clock.monotonic())
        self.on_change()
        return tuple(stuck)

    async def close(self) -> None:
        """End the zygote and with it whatever is left of the workers."""
        if self._zygote is not None:
            zygote, self._zygote = self._zygote, None
            await zygote.close()

    def _exited(self, pid: int, returncode: int) -> None:
        """A worker process ended: note how. Called by the zygote's client."""
        if pid not in self._by_pid:
            self._unclaimed[pid] = returncode
            return
        self._channel.drain(pid)
        worker = self._by_pid.pop(pid)
        if not worker.stopped_by_us:
            self.timer.ended(self._clock.monotonic())
        if returncode != 0 and not worker.stopped_by_us and worker.captured:
            # Its last lines may say why; they are still on their way through the pump.
            order, self._failures = self._failures, self._failures + 1
            self._in_background(self._conclude(worker, returncode, order))
        else:
            self._note_end(worker, returncode)

    async def _conclude(self, worker: Worker, returncode: int, order: int) -> None:
        local_rank = worker.report.local_rank
        await asyncio.to_thread(self._logs.drain, [local_rank], _DRAIN_S)
        worker.last_lines = self._logs.tail(local_rank).stderr
        self._note_end(worker, returncode, order)

    def _note_end(self, worker: Worker, returncode: int, order: int | None = None) -> None:
        state = WorkerState.STOPPED
        failure = None
        if not worker.stopped_by_us:
            if returncode == 0 and worker.pausing > worker.out:
                # Its peers are to go on from its state, and wait for it.
                worker.ended_because = worker.ended_because or _ENDED_PAUSED
            fine = returncode == 0 and not worker.ended_because
            state = WorkerState.SUCCEEDED if fine else WorkerState.FAILED
            if not fine:
                failure = self._failure(worker, returncode, worker.ended_because, order=order)
            else:
                self.timer.over(worker.report.local_rank, self._clock.monotonic())
        worker.report = replace(worker.report, state=state, failure=failure)
        event = told.exited(worker.rank, worker.report, returncode)
        self._emit(event, worker.report.incarnation)
        self.on_change()

    def _heard(self, pid: int, message: Message) -> None:
        """Note a fact that a worker told. One may speak before its birth is known here."""
        worker = self._by_pid.get(pid)
        if worker is None:
            self._early.setdefault(pid, []).append(message)
            return
        now = self._clock.monotonic()
        match message:
            case Hello():
                self._orders.connected(worker)
            case Raised():
                worker.raised = message
            case Beat() | Stacks():
                self.pulse.heard(pid, message)
            case Out():
                worker.out = max(worker.out, message.generation)
                self.timer.stopped(now)
            case Restored():
                self.timer.restored(message)
            case FirstStep():
                self.pulse.stepped(pid)
                self.progress = max(self.progress, message.generation)
                self.timer.first_step(worker.report.local_rank, message, now)
                self.on_change()
            case _:
                pass  # for the event log, or an order, which only goes down
        report = told.reported(worker.report, message, worker.rank)
        if report != worker.report:
            worker.report = report
            self.on_change()
        for event, generation in told.events_of(message, worker.rank, worker.report.local_rank):
            self._emit(event, generation)

    def _zygote_ready(self, took_s: float) -> None:
        pid = self._zygote.pid if self._zygote is not None else 0
        self._emit(ZygoteReady(pid=pid, took_s=took_s), 0)

    def _zygote_died(self, text: str) -> None:
        """The zygote is gone and every worker with it; the next start makes a new one."""
        logger.error("the zygote of host %s died: %s", self._host, text)
        self._emit(ZygoteLost(reason=text), 0)
        self._zygote = None
        for worker in self._workers.values():
            if worker.report.state in _ALIVE and worker.report.pid == 0:
                failure = self._failure(worker, -9, message=f"the zygote died: {text}")
                worker.report = replace(worker.report, state=WorkerState.FAILED, failure=failure)
        self.on_change()

    def _failure(
        self, worker: Worker, returncode: int, message: str = "", order: int | None = None
    ) -> Failure:
        if order is None:
            order, self._failures = self._failures, self._failures + 1
        rules = self._settings.rules
        return failures.of_worker(worker, returncode, self._host, order, rules, message)
