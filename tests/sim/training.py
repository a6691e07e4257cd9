"""What the simulated workers do: meet in a generation, train for a while, break when a peer goes.

Stands in for the processes, and for the group store's and MASTER_PORT's I/O, of one host or all. A
generation's training ends well when all its ranks were together for `work_s` seconds.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from frun.agent.recovery import RecoveryTimer
from frun.protocol.channel import FirstStep
from frun.protocol.records import Failure, RankTable, WorkerReport, WorkerState
from tests.protocol.build import VICTIM

ALIVE = (WorkerState.STARTING, WorkerState.RUNNING)
BREAK_S = 0.02
"""Seconds until a peer's death reaches the others' collectives."""
SPAWN_S = 0.05
STOP_S = 0.1
STEP_S = 0.2
"""Seconds until a complete world completes a step."""


@dataclass(slots=True)
class _World:
    """The workers of one generation."""

    size: int
    inside: dict[int, "Workers"] = field(default_factory=dict)
    """Rank to its host's workers."""
    broken: bool = False


class Training:
    """All workers of a job, across hosts."""

    def __init__(self, work_s: float, *, resumable: bool) -> None:
        self.work_s = work_s
        self.resumable = resumable
        self.completed = 0
        """Generation whose training ended well; 0 for none."""
        self._worlds: dict[int, _World] = {}
        self._started: set[tuple[int, int]] = set()

    def begin_job(self) -> None:
        """Forget the generations of a job that is over."""
        self._worlds.clear()
        self._started.clear()

    def enter(self, table: RankTable, rank: int, workers: "Workers") -> None:
        """Let a worker meet the others of its generation."""
        generation = table.generation
        assert (generation, rank) not in self._started, f"rank {rank} twice in {generation}"
        self._started.add((generation, rank))
        for older, world in self._worlds.items():
            if older < generation:
                still = {w.host for w in world.inside.values() if table.slot_of(w.host)}
                assert not still, f"{still} still train in {older}, {generation} has begun"
        world = self._worlds.setdefault(generation, _World(table.world_size))
        world.inside[rank] = workers
        if world.broken:
            self._later(BREAK_S, self._break, generation)
        elif len(world.inside) == world.size:
            self._later(STEP_S, self._step, generation)
            self._later(self.work_s, self._complete, generation)

    def leave(self, workers: "Workers", generation: int, rank: int) -> None:
        """Take a worker out: it was stopped, paused, or died. Its peers' collectives break."""
        world = self._worlds.get(generation)
        if world is not None and world.inside.get(rank) is workers:
            del world.inside[rank]
            world.broken = True
            self._later(BREAK_S, self._break, generation)

    def _later(self, delay_s: float, call: Callable[[int], None], generation: int) -> None:
        asyncio.get_running_loop().call_later(delay_s, call, generation)

    def _break(self, generation: int) -> None:
        """Peers fail; those of a resumable script wait for news instead."""
        if self.resumable:
            return
        world = self._worlds.get(generation)
        if world is None:
            return
        for rank, workers in list(world.inside.items()):
            if not workers.frozen:
                workers.end(rank, message=VICTIM, exit_code=1, recorded=True)

    def _step(self, generation: int) -> None:
        world = self._worlds.get(generation)
        if world is not None and not world.broken:
            for rank, workers in list(world.inside.items()):
                workers.stepped(generation, rank, STEP_S)

    def _complete(self, generation: int) -> None:
        world = self._worlds.get(generation)
        if world is None or world.broken or len(world.inside) < world.size:
            return
        if any(workers.frozen for workers in world.inside.values()):
            self._later(0.5, self._complete, generation)
            return
        self.completed = generation
        ended = list(world.inside.items())
        world.inside.clear()
        for rank, workers in ended:
            workers.end(rank, exit_code=0)


@dataclass(slots=True)
class _Process:
    report: WorkerReport
    rank: int
    generation: int
    """Generation it is in; its report tells where it was started."""


class Still:
    """Hears no beats."""

    async def watch(self) -> None:
        """Wait for ever."""
        await asyncio.Event().wait()


class Workers:
    """The workers of one host, as the agent knows them (`frun.agent.workers.LocalWorkers`)."""

    def __init__(
        self, host: str, training: Training, *, stop_s: float = STOP_S, spawn_s: float = SPAWN_S
    ) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.host = host
        self.frozen = False
        self.timer = RecoveryTimer()
        self.pulse = Still()
        self.progress = 0
        self.starts = 0
        """Processes that were started here."""
        self._training = training
        self._stop_s = stop_s
        self._spawn_s = spawn_s
        self._processes: dict[int, _Process] = {}
        self._failures = 0

    @property
    def reports(self) -> tuple[WorkerReport, ...]:
        """What is known of each worker."""
        return tuple(process.report for process in self._processes.values())

    @property
    def alive(self) -> bool:
        """True while any process exists."""
        return any(report.state in ALIVE for report in self.reports)

    @property
    def error_files(self) -> Mapping[int, str]:
        """No files in a simulation."""
        return {}

    def expect(self, table: RankTable) -> None:
        """Nothing stands still in a simulation."""

    async def start(self, table: RankTable, local_ranks: Sequence[int]) -> None:
        """Start processes, which takes a moment."""
        place = table.slot_of(self.host)
        assert place is not None
        self._failures = 0
        started = []
        for local_rank in local_ranks:
            old = self._processes.get(local_rank)
            assert old is None or old.report.state not in ALIVE, "started beside a live process"
            report = WorkerReport(
                local_rank=local_rank,
                incarnation=table.generation,
                state=WorkerState.STARTING,
                resumable=self._training.resumable,
            )
            rank = place[1].first_rank + local_rank
            process = _Process(report, rank, table.generation)
            self._processes[local_rank] = process
            started.append(process)
        await asyncio.sleep(self._spawn_s)
        for process in started:
            if process.report.state is WorkerState.STARTING:
                self.starts += 1
                process.report = replace(process.report, state=WorkerState.RUNNING, pid=1000)
                self._training.enter(table, process.rank, self)
        self.on_change()

    def pause(self, generation: int, local_ranks: Sequence[int]) -> None:
        """Take processes out of their generation; they stay alive."""
        for local_rank in local_ranks:
            process = self._processes[local_rank]
            assert process.generation < generation
            self._training.leave(self, process.generation, process.rank)

    def resume(self, table: RankTable, local_ranks: Sequence[int]) -> None:
        """Let paused processes meet in the new generation."""
        place = table.slot_of(self.host)
        assert place is not None
        for local_rank in local_ranks:
            process = self._processes[local_rank]
            process.rank = place[1].first_rank + local_rank
            process.generation = table.generation
            self._training.enter(table, process.rank, self)

    async def stop(
        self, signum: int, grace_s: float, local_ranks: Collection[int] | None = None
    ) -> tuple[object, ...]:
        """Stop processes, which takes a moment."""
        assert signum
        chosen = [
            process
            for local_rank, process in self._processes.items()
            if local_ranks is None or local_rank in local_ranks
        ]
        if any(process.report.state in ALIVE for process in chosen):
            await asyncio.sleep(min(self._stop_s, grace_s))
        for process in chosen:
            self._training.leave(self, process.generation, process.rank)
            process.report = replace(process.report, state=WorkerState.STOPPED)
        self.on_change()
        return ()

    def end(
        self,
        rank: int,
        *,
        exit_code: int,
        message: str = "",
        recorded: bool = False,
        kind: str = "",
    ) -> None:
        """Let the process of a rank end by itself."""
        for process in self._processes.values():
            if process.rank != rank or process.report.state is not WorkerState.RUNNING:
                continue
            failure = None
            if exit_code:
                failure = Failure(
                    rank=rank,
                    local_rank=process.report.local_rank,
                    host=self.host,
                    exit_code=exit_code,
                    message=message,
                    recorded=recorded,
                    kind=kind,
                    order=self._failures,
                )
                self._failures += 1
            state = WorkerState.FAILED if exit_code else WorkerState.SUCCEEDED
            process.report = replace(process.report, state=state, failure=failure)
            self._training.leave(self, process.generation, process.rank)
            self.on_change()

    def kill_one(self, *, message: str = "", recorded: bool = False, kind: str = "") -> bool:
        """Let the first running process fail; say whether there was one."""
        for process in self._processes.values():
            if process.report.state is WorkerState.RUNNING:
                exit_code = 1 if recorded else -9
                self.end(
                    process.rank,
                    exit_code=exit_code,
                    message=message,
                    recorded=recorded,
                    kind=kind,
                )
                return True
        return False

    def die(self) -> None:
        """End everything at once and without a word, as with the machine."""
        for process in self._processes.values():
            self._training.leave(self, process.generation, process.rank)
        self._processes.clear()

    def stepped(self, generation: int, rank: int, took_s: float) -> None:
        """Let a worker complete its first step of a generation."""
        step = FirstStep(generation=generation, step=1, took_s=took_s)
        now = asyncio.get_running_loop().time()
        self.timer.first_step(rank % len(self.reports), step, now)
        self.progressed(generation)

    def progressed(self, generation: int) -> None:
        """Note a completed step."""
        self.progress = generation
        self.on_change()


class Groups:
    """The host's part of the group store: generations only grow."""

    def __init__(self) -> None:
        self.generation = 0

    def begin(self, generation: int, shards: Sequence[object], index: int) -> None:
        """Begin a generation's store."""
        assert generation > self.generation
        assert 0 <= index < len(shards)
        self.generation = generation


class Master:
    """The holder of MASTER_PORT."""

    async def close(self) -> None:
        """Let go."""
