"""Many hosts in one process, for `benchmarks.scale`: real agents, whose workers are simulated.

Each host has an agent, a membership, an election, a client of etcd on a connection of its own and a
listening group store, as under `frun`. Its workers are `tests.sim.training`'s: they start and pause at once.
Takes orders as JSON lines on stdin, answers each with one on stdout.
"""

import asyncio
import contextlib
import gc
import json
import logging
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from frun.agent.agent import Agent
from frun.agent.groupstore import GroupStore
from frun.agent.masterport import MasterPort
from frun.agent.parts import Bounds, Parts
from frun.agent.sentry import answers
from frun.agent.workers import LocalWorkers
from frun.clock import SystemClock
from frun.errors import FrunError, StoreUnavailable
from frun.events import Event, GenerationStarted, PhaseSeen, TableDecided, WorkersPrepared
from frun.protocol.keys import Keys
from frun.protocol.policy import Policy
from frun.protocol.records import HostRecord, JobSpec, RankTable
from frun.protocol.storeframe import hello_blobs
from frun.rendezvous.etcd import EtcdStore
from frun.rendezvous.membership import Membership
from tests.sim.training import Master, Training, Workers

ADDRESS = "127.0.0.1"
TOGETHER = 24
"""Hosts of one process that register at the same time."""
REQUEST_S = 60.0
"""Bound of a request: thousands of clients on two cores are slow, and that is no outage."""
QUIET_S = 2.0
"""Seconds between signs of life of a watch, for every lease time of 3 seconds, which is stretched too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What all hosts of one run agree on."""

    endpoint: str
    hosts: int
    nproc: int
    ttl_s: int

    @property
    def policy(self) -> Policy:
        """The leader's, with bounds that a crowded machine does not reach."""
        return Policy(
            min_hosts=self.hosts,
            max_hosts=self.hosts,
            max_restarts=9,
            join_timeout_s=3600.0,
            lease_ttl_s=self.ttl_s,
            prepare_timeout_s=900.0,
        )


class Marks:
    """When the hosts of this process reached each point of each generation."""

    def __init__(self) -> None:
        self._at: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._seen: set[tuple[str, str, int]] = set()

    def note(self, host: str, mark: str, generation: int) -> None:
        """Note a point; only its first time counts."""
        if (host, mark, generation) not in self._seen:
            self._seen.add((host, mark, generation))
            self._at[generation][mark].append(time.monotonic())

    def of(self, generation: int) -> dict[str, tuple[int, float, float]]:
        """Return per point how many hosts reached it, the first time and the last."""
        return {
            mark: (len(times), min(times), max(times))
            for mark, times in self._at[generation].items()
        }


class Alone(Training):
    """Training of hosts that don't simulate each other: a step is done as soon as a host is in."""

    def __init__(self) -> None:
        super().__init__(0.0, resumable=True)

    def enter(self, table: RankTable, rank: int, workers: Workers) -> None:
        """Complete the worker's first step on the loop's next turn."""
        asyncio.get_running_loop().call_soon(workers.stepped, table.generation, rank, 0.0)

    def leave(self, workers: Workers, generation: int, rank: int) -> None:
        """Others are not told: each host hears of it from the rank table."""


class MarkedWorkers(Workers):
    """Simulated workers that note when they pause."""

    def __init__(self, host: str, training: Training, marks: Marks) -> None:
        super().__init__(host, training, stop_s=0.0, spawn_s=0.0)
        self._marks = marks

    def pause(self, generation: int, local_ranks: Sequence[int]) -> None:
        """Pause at once, and note it."""
        super().pause(generation, local_ranks)
        self._marks.note(self.host, "paused", generation)


class SimulatedHost:
    """One agent and what it is made of."""

    def __init__(self, name: str, job: Job, marks: Marks) -> None:
        self.name = name
        self.workers = MarkedWorkers(name, Alone(), marks)
        self._job = job
        self._marks = marks
        self._store = EtcdStore(
            (job.endpoint,), request_timeout_s=REQUEST_S, quiet_s=QUIET_S * job.ttl_s / 3
        )
        self._groups = GroupStore(token="", job="scale")
        self._task: asyncio.Task[object] | None = None

    async def join(self) -> None:
        """Register, and run the agent from then on."""
        clock, keys, groups = SystemClock(), Keys("scale"), self._groups
        record = HostRecord(
            host=self.name,
            name=self.name,
            address=ADDRESS,
            port=await self._groups.listen_tcp(ADDRESS),
            nproc=self._job.nproc,
            pid=os.getpid(),
            version="scale",
        )
        spec = JobSpec(
            job_id="scale",
            uid="scale",
            min_hosts=self._job.hosts,
            max_hosts=self._job.hosts,
            max_restarts=9,
            entry="scale.py",
            version="scale",
        )
        membership = Membership(self._store, keys, record, self._job.ttl_s, clock)
        await membership.join(spec, 600.0)

        async def hold() -> tuple[MasterPort, int]:
            return cast("MasterPort", Master()), 29500

        agent = Agent(
            Parts(
                record=record,
                store=self._store,
                keys=keys,
                membership=membership,
                policy=self._job.policy,
                bounds=Bounds(shutdown_s=5.0, store_s=600.0, farewell_s=1.0),
                workers=cast("LocalWorkers", self.workers),
                groups=self._groups,
                hold_master_port=hold,
                free_master_port=False,
                clock=clock,
                answers=lambda slot: answers(slot, hello_blobs(groups.job, groups.token)),
                emit=self._emit,
            ),
            on_table=lambda _: None,
            on_decision=lambda _: None,
            on_incident=lambda record: self._marks.note(self.name, "closed", record.generation),
        )
        self.workers.on_change = agent.wake
        self._task = asyncio.create_task(agent.run(), name=self.name)

    def _emit(self, event: Event, generation: int) -> None:
        match event:
            case TableDecided():
                self._marks.note(self.name, f"decided {event.phase}", generation)
            case PhaseSeen(phase="run"):
                self._marks.note(self.name, "run", generation)
            case PhaseSeen():
                self._marks.note(self.name, "saw", generation)
            case WorkersPrepared():
                self._marks.note(self.name, "prepared", generation)
            case GenerationStarted():
                self._marks.note(self.name, "started", generation)
            case _:
                pass

    async def die(self) -> None:
        """Go as a machine that loses its power: nothing is said to etcd any more."""
        await self._store.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._groups.close()


class Crowd:
    """The hosts of this process."""

    def __init__(self) -> None:
        self._hosts: dict[str, SimulatedHost] = {}
        self._marks = Marks()

    async def obey(self, order: dict[str, Any]) -> object:
        """Carry out one order; return the answer."""
        match order.pop("do"):
            case "start":
                return await self._start(order["names"], Job(**order["job"]))
            case "fail":
                return self._fail(order["name"], kind=order["kind"])
            case "die":
                at = time.monotonic()
                await self._hosts.pop(order["name"]).die()
                return at
            case "marks":
                return self._marks.of(order["generation"])
            case "usage":
                used = resource.getrusage(resource.RUSAGE_SELF)
                return used.ru_utime + used.ru_stime
            case unknown:
                raise ValueError(f"unknown order {unknown!r}")

    async def _start(self, names: Sequence[str], job: Job) -> int:
        gate = asyncio.Semaphore(TOGETHER)

        async def join(name: str) -> None:
            async with gate:
                host = self._hosts[name] = SimulatedHost(name, job, self._marks)
                while True:
                    with contextlib.suppress(StoreUnavailable):
                        return await host.join()

        await asyncio.gather(*map(join, names))
        # A collection would look at all hosts' objects; on a machine of its own an agent has a thousandth.
        gc.collect()
        gc.freeze()
        return len(self._hosts)

    def _fail(self, name: str, *, kind: str) -> float:
        """Let the first worker of a host die; `kind` as frun's part of the worker would call it."""
        at = time.monotonic()
        message = "no process has the state any more" if kind else "SIGKILL"
        if not self._hosts[name].workers.kill_one(message=message, recorded=bool(kind), kind=kind):
            raise ValueError(f"no worker of {name} runs")
        return at


async def main() -> None:
    """Obey until stdin ends."""
    logging.basicConfig(level=logging.ERROR)
    crowd = Crowd()
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        try:
            answer = {"answer": await crowd.obey(json.loads(line))}
        except FrunError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)
    os._exit(0)  # thousands of connections need no farewell: etcd goes next


if __name__ == "__main__":
    asyncio.run(main())
