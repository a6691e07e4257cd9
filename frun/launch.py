"""The composition root: builds the real parts of one agent, runs it, and takes everything down again.

The only place besides the worker that reads the process's environment and clock, and the only one that
knows all parts. What happens in between is `Agent`'s.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from frun import fault_patterns, introduction, registry
from frun.agent import addresses, environment, failures, numa
from frun.agent.agent import Agent
from frun.agent.bounds import bounds_of, policy_of
from frun.agent.channel import Channel
from frun.agent.groupstore import GroupStore, Shard
from frun.agent.health import HealthWatch, begin_watch
from frun.agent.logfolder import LogFolder, is_worthless, make_log_folder
from frun.agent.logfolder import remove as remove_log_folder
from frun.agent.logs import LogPump
from frun.agent.masterport import MasterPort, Service, SharedPort
from frun.agent.narrator import Narrator
from frun.agent.parts import Outcome, Parts
from frun.agent.rundir import make_run_dir
from frun.agent.sentry import Sentry, answers
from frun.agent.timers import Timers
from frun.agent.watchdog import Watchdog
from frun.agent.worker import WorkerSettings
from frun.agent.workers import LocalWorkers
from frun.agent.zygote import Zygote
from frun.clock import SystemClock
from frun.config import EntryMode, LaunchConfig, StartMethod
from frun.devices import loading
from frun.errors import FrunError, JobFailed
from frun.event_sinks import FanOut, Origin
from frun.events import Event, FaultNoticed, JobEnded
from frun.meeting import LOOPBACK, Meeting, meet, own_address
from frun.protocol.keys import Keys
from frun.protocol.records import HostRecord, JobSpec, RankTable
from frun.protocol.storeframe import hello_blobs
from frun.rendezvous.membership import Membership
from frun.version import __version__

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CLOSE_S = 2.0
"""Longest wait for a disk to take the last events."""
_SOCKET = "store.sock"
_TIMERS = "timers"


class _Interrupted(Exception):
    """A signal came before there was an agent to leave the job."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


def run(config: LaunchConfig) -> int:
    """Run this host's part of the job; return the exit status. Raises FrunError with one clear line."""
    base = dict(os.environ)
    loading.refuse_unknown(config.workers.device_checks)
    return asyncio.run(_Launch(config, base).run())


class _Launch:
    """One run. Every part that was started is on `_stack` and goes in reverse order, however it ends."""

    def __init__(self, config: LaunchConfig, base: dict[str, str]) -> None:
        self._config = config
        self._base = base
        self._rules = fault_patterns.load(config.workers.fault_patterns)
        self._clock = SystemClock()
        self._stack = contextlib.AsyncExitStack()
        self._signals: list[int] = []
        self._signalled = asyncio.Event()
        self._agent: Agent | None = None
        self._sink = FanOut(())
        self._failed = True
        self._ended_entry: str | None = None
        self._prefixes: tuple[tuple[str, ...], ...] = ()
        self._workers: LocalWorkers
        self._channel: Channel
        self._health: HealthWatch

    async def run(self) -> int:
        """Build, run, take down; return the exit status."""
        self._catch_signals()
        try:
            async with self._stack:
                return await self._run()
        except _Interrupted as stop:
            self._note_in_error_file(stop)
            _say(f"frun: {stop} before the job began")
            return 1
        except FrunError as error:
            self._note_in_error_file(error)
            raise

    def _note_in_error_file(self, error: Exception) -> None:
        if target := self._config.logs.error_file:
            failures.write_agent_exception(target, error, now=self._clock.wall())

    async def _run(self) -> int:
        config = self._config
        binding = config.workers.numa_binding
        if binding is not None:
            self._prefixes = await self._unless_interrupted(
                asyncio.to_thread(numa.prefixes, binding, config.workers.nproc, self._base)
            )
        job_id = config.job.job_id or f"frun-{secrets.token_hex(4)}"
        name = config.rendezvous.local_addr or addresses.machine_name()
        host = f"{name}-{secrets.token_hex(3)}"
        run_dir = make_run_dir()
        self._stack.callback(shutil.rmtree, run_dir, ignore_errors=True)
        folder = make_log_folder(config.logs.log_dir, job_id)
        self._stack.callback(self._put_away, folder)
        self._begin_events(job_id, host, folder)
        logs = LogPump(config=config.logs, folder=folder, host=name)
        self._stack.callback(logs.close)

        channel = self._channel = Channel(os.path.join(run_dir, "agent.sock"))
        self._stack.callback(channel.close)
        workers = self._workers = self._make_workers(job_id, host, run_dir, channel, logs)
        self._stack.push_async_callback(workers.close)
        self._watch(workers, run_dir)
        # The zygote imports torch while the rest is being set up.
        await workers.ready_zygote()
        self._begin_checks(run_dir, folder)
        meeting = await self._unless_interrupted(
            meet(config.rendezvous, self._stack, single_host=config.job.max_hosts == 1)
        )
        address = await self._unless_interrupted(own_address(config.rendezvous, meeting))
        groups = GroupStore(token="", job=job_id)
        self._stack.push_async_callback(groups.close)
        await groups.listen_unix(os.path.join(run_dir, _SOCKET))
        record = HostRecord(
            host=host,
            name=name,
            address=address,
            port=await groups.listen_tcp(address),
            nproc=config.workers.nproc,
            node_rank=config.rendezvous.node_rank,
            pid=os.getpid(),
            version=__version__,
            keeps_store=meeting.keeps_store,
        )
        keys, times = Keys(job_id), config.rendezvous
        membership = Membership(meeting.store, keys, record, times.lease_ttl_s, self._clock)
        self._stack.push_async_callback(membership.leave)
        self._health.tell(membership.amend)
        if await self._unless_interrupted(membership.finds_training()):
            # Once registered this host may be taken in, and a world must not stand still for imports.
            zygote = await workers.ready_zygote()
            await self._unless_interrupted(zygote.ready(times.join_timeout_s))
        joining = membership.join(introduction.job_spec(config, job_id), times.join_timeout_s)
        spec = await self._unless_interrupted(joining)
        groups.token = spec.uid
        if config.job.spares is not None and await self._unless_interrupted(
            membership.is_surplus(config.job.max_hosts + config.job.spares)
        ):
            self._failed = False
            _say(
                f"frun: not needed: {config.job.max_hosts} hosts and {config.job.spares} spares"
                " (--spares) are here already"
            )
            return 0
        self._register(record, spec, meeting, folder)
        agent = self._agent = self._make_agent(membership, keys, meeting, groups, record)
        for signum in self._signals:
            agent.interrupt(signum)
        outcome = await agent.run()
        return await self._end(outcome, logs)

    def _begin_checks(self, run_dir: str, folder: LogFolder) -> None:
        """Begin to look at this host's devices, unless nobody is to."""
        self._health = begin_watch(
            self._config, self._base, run_dir, folder.path, self._workers, self._emit, self._clock
        )
        self._stack.push_async_callback(self._health.close)

    def _make_agent(
        self,
        membership: Membership,
        keys: Keys,
        meeting: Meeting,
        groups: GroupStore,
        record: HostRecord,
    ) -> Agent:
        config = self._config
        narrator = Narrator(several_hosts=config.job.max_hosts > 1, write=_say)
        sentry = Sentry(
            meeting.store,
            keys,
            record.host,
            lambda: (groups.job, groups.token),
            self._clock,
            self._peer_gone,
            config.rendezvous.lease_ttl_s,
        )
        self._stack.push_async_callback(sentry.close)

        def seen(table: RankTable) -> None:
            narrator.table(table)
            sentry.look(table)

        agent = Agent(
            Parts(
                record=record,
                store=meeting.store,
                keys=keys,
                membership=membership,
                policy=policy_of(config),
                bounds=bounds_of(config),
                workers=self._workers,
                groups=groups,
                hold_master_port=lambda: self._hold_master_port(record.address, meeting.shared),
                free_master_port=not config.workers.agent_store,
                clock=self._clock,
                answers=lambda slot: answers(slot, hello_blobs(groups.job, groups.token)),
                emit=self._emit,
            ),
            on_table=seen,
            on_decision=narrator.decision,
            on_incident=narrator.incident,
        )
        self._workers.on_change = agent.wake
        if config.job.allow_drills and membership.spec is not None:
            self._allow_drills(membership.spec.uid, record, keys, meeting)
        return agent

    def _allow_drills(self, uid: str, record: HostRecord, keys: Keys, meeting: Meeting) -> None:
        from frun.drills.host import HostDrills, Surroundings

        around = Surroundings(
            host=record.host,
            address=record.address,
            uid=uid,
            store=meeting.store,
            keys=keys,
            channel=self._channel,
            workers=self._workers,
            health=self._health,
            emit=self._emit,
        )
        drills = HostDrills(around)
        drills.start()
        self._stack.push_async_callback(drills.close)

    def _begin_events(self, job_id: str, host: str, folder: LogFolder) -> None:
        clock = self._clock
        origin = Origin(job=job_id, host=host, monotonic=clock.monotonic, wall=clock.wall)
        self._sink = introduction.sinks(self._config, origin, folder.events_file)
        self._stack.callback(self._sink.close, _CLOSE_S)
        self._emit(introduction.started(self._config), 0)

    def _emit(self, event: Event, generation: int) -> None:
        self._sink.emit(event, generation=generation)

    def _peer_gone(self, table: RankTable, peer: Shard, why: str, since_s: float) -> None:
        """Note that the agent of another host is gone; its lease was ended."""
        slot = next(slot for slot in table.slots if slot.host == peer.host)
        reason = f"the agent of {peer} {why}"
        self._workers.timer.ended(self._clock.monotonic() - since_s)
        self._emit(
            FaultNoticed(source="peer", rank=slot.first_rank, reason=reason, since_s=since_s),
            table.generation,
        )

    async def _end(self, outcome: Outcome, logs: LogPump) -> int:
        """Say how it ended, with the cause on top; return the exit status."""
        self._failed = outcome.exit_code != 0
        generation = outcome.table.generation if outcome.table is not None else 0
        self._emit(JobEnded(exit_code=outcome.exit_code, reason=outcome.reason), generation)
        await asyncio.to_thread(logs.close)  # the workers' last words come before frun's
        if outcome.exit_code == 0:
            if outcome.spare:
                _say(f"frun: {outcome.reason}")
            return 0
        root = outcome.table.failure if outcome.table is not None else None
        if root is None or outcome.stopped:
            self._note_in_error_file(JobFailed(outcome.reason))
            _say(f"frun: {outcome.reason}")
            return outcome.exit_code
        sys.stderr.write(
            failures.failure_summary(
                entry=self._config.workers.entry,
                root=root,
                did=f"gave up: {outcome.reason}",
                failed_at=self._clock.wall(),
            )
        )
        if self._config.logs.error_file:
            here = root.host == outcome.host
            source = outcome.error_files.get(root.local_rank, "") if here else ""
            failures.write_agent_error_file(
                self._config.logs.error_file, root, now=self._clock.wall(), source=source
            )
        return outcome.exit_code

    def _make_workers(
        self, job_id: str, host: str, run_dir: str, channel: Channel, logs: LogPump
    ) -> LocalWorkers:
        config = self._config
        warm = (
            config.workers.start_method is StartMethod.FORK
            and config.workers.mode is not EntryMode.PROGRAM
        )

        def make_zygote(
            on_exit: Callable[[int, int], None], on_death: Callable[[str], None]
        ) -> Zygote:
            return Zygote(
                python=config.workers.python,
                env=environment.zygote_environment(self._base, config),
                preload=config.workers.preload,
                warm=warm,
                title_args=(config.workers.entry, *config.workers.args),
                remove=(run_dir,),
                on_exit=on_exit,
                on_death=on_death,
            )

        return LocalWorkers(
            WorkerSettings(
                config=config,
                job_id=job_id,
                host=host,
                base_environment=self._base,
                store_path=os.path.join(run_dir, _SOCKET),
                channel_path=channel.path,
                rules=self._rules,
                py_spy=shutil.which("py-spy", path=self._base.get("PATH")),
                prefixes=self._prefixes,
            ),
            channel=channel,
            logs=logs,
            make_zygote=make_zygote,
            emit=self._emit,
            clock=self._clock,
        )

    def _watch(self, workers: LocalWorkers, run_dir: str) -> None:
        """Begin the watches over workers that torchrun's variables ask for."""
        config = self._config.workers
        watchdog = Watchdog(workers, config.shutdown_timeout_s)
        if config.kernel_limit_s is not None:
            watching = asyncio.create_task(
                watchdog.watch_kernel(config.kernel_limit_s, self._clock, self._leave_unfit)
            )
            self._stack.callback(watching.cancel)
        if config.file_timer:
            timers = Timers(config.timer_file or os.path.join(run_dir, _TIMERS), self._clock.wall)
            self._stack.callback(timers.close)
            timers.on_expired = watchdog.timer_expired
            self._base["TORCHELASTIC_TIMER_FILE"] = timers.path

    def _leave_unfit(self, why: str) -> None:
        if self._agent is not None:
            self._agent.leave_unfit(why)

    async def _hold_master_port(
        self, address: str, shared: SharedPort | None
    ) -> tuple[MasterPort, int]:
        if shared is not None:
            master = MasterPort(LOOPBACK, self._serve_tcpstore)
            shared.lead_to(Service.STORE, master.port)
            return master, shared.port
        wanted = self._config.rendezvous.master_port or 0
        master = MasterPort(address, self._serve_tcpstore, wanted)
        return master, master.port

    async def _serve_tcpstore(self, sock: socket.socket) -> int:
        zygote = await self._workers.ready_zygote()
        return await zygote.call("frun.worker.tcpstore:serve", [sock.fileno()])

    def _register(
        self, record: HostRecord, spec: JobSpec, meeting: Meeting, folder: LogFolder
    ) -> None:
        """List the job on this machine, for commands that are given no endpoint and id."""
        ttl_s, now = self._config.rendezvous.lease_ttl_s, self._clock.wall()
        self._emit(introduction.registered(record, spec, ttl_s), 0)
        entry = introduction.job_entry(
            self._config, spec.job_id, record.host, meeting.endpoints, folder.path, now
        )
        path = registry.register(self._config.job.state_dir, entry)
        self._stack.callback(self._conclude, path)

    def _conclude(self, path: str | None) -> None:
        self._ended_entry = registry.conclude(path)

    def _put_away(self, folder: LogFolder) -> None:
        """Remove the log folder if nobody will look for it; what `frun report` needs stays."""
        if is_worthless(folder, keep_events=self._failed):
            registry.keep_events(self._ended_entry, folder.events_file)
            remove_log_folder(folder)

    def _catch_signals(self) -> None:
        """Handle the signals of --signals-to-handle, from the very start on.

        One that was ignored when frun started (nohup, `trap ''`) stays ignored. One that the parent
        had blocked is not: it would never come, and the job could not be stopped.
        """
        loop = asyncio.get_running_loop()
        handled = []
        for name in self._config.workers.signals:
            signum = signal.Signals[name]
            if signal.getsignal(signum) is not signal.SIG_IGN:
                loop.add_signal_handler(signum, self._on_signal, signum)
                handled.append(signum)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)

    def _on_signal(self, signum: int) -> None:
        self._signals.append(signum)
        self._signalled.set()
        if self._agent is not None:
            self._agent.interrupt(signum)

    async def _unless_interrupted(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`; a signal ends it at once. Raises _Interrupted then."""
        task = asyncio.ensure_future(work)
        waiting = asyncio.ensure_future(self._signalled.wait())
        try:
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise _Interrupted(self._signals[0])
        finally:
            for pending in (task, waiting):
                pending.cancel()
            await asyncio.gather(task, waiting, return_exceptions=True)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
