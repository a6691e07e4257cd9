"""Does the faults that are asked of one host: takes commands from etcd, says what became of them.

Runs only where the job allows drills. A fault inside a worker's process is passed on to it over its channel.
"""

import asyncio
import contextlib
import functools
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from frun.agent.channel import Channel
from frun.agent.health import HealthWatch
from frun.agent.workers import LocalWorkers
from frun.drills import devicefaults, hostfaults
from frun.drills.catalogue import CATALOGUE, Scope
from frun.drills.hostfaults import Refused
from frun.errors import StoreUnavailable, WireError
from frun.events import Event, FaultInjected
from frun.protocol import wire
from frun.protocol.channel import Hello, Inject, Injected, Message, Ready, Withdraw
from frun.protocol.faults import Command, CommandState, Fault, FaultKind
from frun.protocol.keys import Keys
from frun.rendezvous.mirror import Mirror
from frun.rendezvous.store import Compare, KeyValue, Put, Store

logger = logging.getLogger(__name__)

_ANSWER_S = 5.0
"""Longest wait for a worker that is to break itself as soon as possible."""
_SIGNALS = {FaultKind.KILL: signal.SIGKILL, FaultKind.STOP: signal.SIGSTOP}


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the faults of a host are done to."""

    host: str
    address: str
    """That this host publishes."""
    uid: str
    """The job's."""
    store: Store
    keys: Keys
    channel: Channel
    workers: LocalWorkers
    health: HealthWatch
    emit: Callable[[Event, int], None]
    """Takes events with their generation."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A fault that a worker was told to do, and has not done yet."""

    rank: int
    order: Inject
    said: asyncio.Future[Injected]


@dataclass(frozen=True, slots=True)
class _Done:
    """A command with what was done, and what is to follow when that is written down."""

    command: Command
    then: hostfaults.Deed | None = None


def _killing(pid: int) -> hostfaults.Deed:
    return functools.partial(os.kill, pid, signal.SIGKILL)


class HostDrills:
    """The drills of one agent. All methods run on its event loop."""

    def __init__(self, around: Surroundings) -> None:
        """Listen to what workers say of faults; all else they say goes where it went."""
        self._around = around
        self._waiting: dict[int, _Waiting] = {}
        """By command."""
        self._ranks: dict[int, int] = {}
        """By process id, who has said hello and may become resumable."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._facts = devicefaults.Facts(around.health)
        self._pass_on = around.channel.on_message
        around.channel.on_message = self._heard

    def start(self) -> None:
        """Do from now on what is asked."""
        self._in_background(self._watch())

    async def close(self) -> None:
        """Do nothing more; what lasts, and can end, ends."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self) -> None:
        seen: set[str] = set()
        async with Mirror(self._around.store, self._around.keys.commands) as mirror:
            version = 0
            while True:
                version = await mirror.wait_changed(version, None)
                for key in sorted(mirror.items.keys() - seen):
                    self._take(mirror.items[key])
                for key in seen - mirror.items.keys():
                    self._withdraw(int(key.rpartition("/")[2]))
                seen = set(mirror.items)

    def _take(self, kv: KeyValue) -> None:
        try:
            command = wire.decode_command(kv.value)
        except WireError as error:
            logger.warning("ignoring %s: %s", kv.key, error)
            return
        mine = (command.host, command.uid) == (self._around.host, self._around.uid)
        if mine and command.state is CommandState.ASKED:
            self._in_background(self._do(command, kv))

    def _withdraw(self, number: int) -> None:
        """Forget a fault that nobody wants any more."""
        waiting = self._waiting.get(number)
        if waiting is not None:
            self._around.channel.send(
                self._around.workers.pid_of(waiting.rank), Withdraw(id=number)
            )
            waiting.said.cancel()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _do(self, command: Command, kv: KeyValue) -> None:
        try:
            if not await self._note(command, kv, CommandState.TAKEN):
                return  # withdrawn
            try:
                done = await self._perform(command)
            except Refused as error:
                refused = replace(command, text=str(error))
                await self._note(refused, kv, CommandState.REFUSED)
                return
            event = FaultInjected(fault=str(command.fault), rank=command.rank)
            self._around.emit(event, done.command.generation)
            await self._note(done.command, kv, CommandState.DONE)
            if done.then is not None:
                with contextlib.suppress(ProcessLookupError):
                    done.then()
        except StoreUnavailable as error:
            logger.warning("drill %d: etcd does not answer: %s", command.id, error)

    async def _note(self, command: Command, kv: KeyValue, state: CommandState) -> bool:
        """Write how far a command is; False if its key is gone."""
        value = wire.encode(replace(command, state=state))
        exists = Compare(key=kv.key, revision=kv.create_revision, created=True)
        put = Put(key=kv.key, value=value, lease=kv.lease)
        return await self._around.store.commit([exists], [put]) is not None

    async def _perform(self, command: Command) -> _Done:
        """Do it; return what was done. Raises Refused."""
        if CATALOGUE[command.fault.kind].scope is not Scope.WORKER:
            return await self._of_host(command)
        fault = command.fault
        if fault.kind is FaultKind.DEVICE:
            return await self._of_device(command)
        signum = _SIGNALS.get(fault.kind)
        if signum is None or fault.place is not None or fault.at_step >= 0:
            done = await self._inject(command)
        else:
            pid = self._pid_of(command.rank)
            os.kill(pid, signum)
            done = replace(command, text=f"{signum.name} to pid {pid}")
        if fault.kind is FaultKind.STOP and fault.duration_s:
            self._in_background(self._go_on(command))
        return _Done(done)

    async def _of_host(self, command: Command) -> _Done:
        """The same for a fault of this host. What may keep this agent from saying so comes last."""
        fault = command.fault
        match fault.kind:
            case FaultKind.HOST:
                text, then = "SIGKILL to everything", hostfaults.end_host
            case FaultKind.AGENT | FaultKind.LEADER:
                text, then = f"SIGKILL to the agent, pid {os.getpid()}", hostfaults.end_agent
            case FaultKind.ZYGOTE:
                pids = [each.pid for each in self._around.workers.reports if each.pid]
                zygote = hostfaults.zygote_of(pids[0] if pids else 0)
                text, then = f"SIGKILL to the zygote, pid {zygote}", _killing(zygote)
            case FaultKind.ETCD:
                text, then = self._of_etcd(hostfaults.embedded_etcd(), fault)
            case FaultKind.NETWORK:
                text, helper = await hostfaults.network(fault, self._around.address)
                then = functools.partial(self._run, helper)
            case FaultKind.DISK_FULL:
                text = f"no file grows for {fault.duration_s:g} s"
                then = functools.partial(self._fill_disk, fault.duration_s)
            case _:
                raise Refused(f"{fault} is not done to a host")
        return _Done(replace(command, text=text), then)

    async def _of_device(self, command: Command) -> _Done:
        """The same for the device of a worker: a fact that a check finds in a file."""
        facts, pid = self._facts, self._pid_of(command.rank)
        if not facts.are_read:
            raise Refused("no check looks at devices: --device-checks none")
        local_rank = next(w.local_rank for w in self._around.workers.reports if w.pid == pid)
        fact = devicefaults.fact_of(command, local_rank)
        await facts.wait_until_new(fact, local_rank)

        def tell() -> None:
            self._in_background(facts.tell(fact, command.fault.duration_s))

        text = f"a {fact.severity.value} of device {local_rank} is reported"
        return _Done(replace(command, text=text), tell)

    def _of_etcd(self, pid: int, fault: Fault) -> tuple[str, hostfaults.Deed]:
        if not fault.duration_s:
            return f"SIGKILL to etcd, pid {pid}", _killing(pid)

        def freeze() -> None:
            os.kill(pid, signal.SIGSTOP)
            thaw = functools.partial(os.kill, pid, signal.SIGCONT)
            self._in_background(self._later(fault.duration_s, thaw))

        return f"SIGSTOP to etcd, pid {pid}, for {fault.duration_s:g} s", freeze

    def _fill_disk(self, seconds: float) -> None:
        self._in_background(self._later(seconds, hostfaults.fill_disk()))

    async def _later(self, seconds: float, then: hostfaults.Deed) -> None:
        """End a fault that lasts: after its time, or with the job."""
        try:
            await asyncio.sleep(seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                then()

    def _run(self, command: Sequence[str]) -> None:
        async def wait() -> None:
            # In a session of its own: it ends the fault even if this agent does not live that long.
            process = await asyncio.create_subprocess_exec(*command, start_new_session=True)
            await process.wait()

        self._in_background(wait())

    async def _go_on(self, command: Command) -> None:
        pid = self._pid_of(command.rank)
        await asyncio.sleep(command.fault.duration_s)
        if pid == self._around.workers.pid_of(command.rank):
            os.kill(pid, signal.SIGCONT)

    async def _inject(self, command: Command) -> Command:
        """Pass the fault on to its worker, and wait until that says that it happens.

        Whoever has the rank when it comes to the place is hit: a newcomer gets the order as well.
        """
        fault = command.fault
        order = Inject(
            id=command.id,
            kind=fault.kind.value,
            argument=fault.argument,
            step=fault.at_step,
            place=fault.place.value if fault.place is not None else "",
            duration_s=fault.duration_s,
        )
        waits = fault.place is not None or fault.at_step >= 0 or CATALOGUE[fault.kind].in_script
        waiting = _Waiting(command.rank, order, asyncio.get_running_loop().create_future())
        self._waiting[command.id] = waiting
        try:
            pid = self._pid_of(command.rank)
            if not self._around.channel.send(pid, order):
                raise Refused(f"pid {pid} has no channel to its agent: it was executed, not forked")
            async with asyncio.timeout(None if waits else _ANSWER_S):
                said = await waiting.said
        except TimeoutError:
            raise Refused(f"rank {command.rank} did not answer within {_ANSWER_S:g} s") from None
        finally:
            del self._waiting[command.id]
        if said.problem:
            raise Refused(said.problem)
        text = f"{fault} in rank {command.rank}, which was at step {said.step}"
        return replace(command, text=text, generation=said.generation)

    def _heard(self, pid: int, message: Message) -> None:
        if isinstance(message, Hello):
            self._ranks[pid] = message.rank
        elif isinstance(message, Ready):
            rank = self._ranks.pop(pid, -1)
            for each in self._waiting.values():
                if each.rank == rank:
                    self._around.channel.send(pid, each.order)
        if not isinstance(message, Injected):
            self._pass_on(pid, message)
            return
        waiting = self._waiting.get(message.id)
        if waiting is not None and not waiting.said.done():
            waiting.said.set_result(message)

    def _pid_of(self, rank: int) -> int:
        pid = self._around.workers.pid_of(rank)
        if pid == 0:
            raise Refused(f"rank {rank} does not run on {self._around.host} any more")
        return pid
