"""Orders reach a worker that has not connected yet, in their order; one that can get none is replaced."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from frun.agent.channel import Channel
from frun.agent.logfolder import make_log_folder
from frun.agent.logs import LogPump
from frun.agent.worker import WorkerSettings
from frun.agent.workers import LocalWorkers
from frun.agent.zygote import Zygote
from frun.clock import SystemClock
from frun.protocol.records import Phase, RankTable, Slot, WorkerState
from tests.cli.tools import configure
from tests.zygotes import environment

LIMIT_S = 60.0
ROOT = str(Path(__file__).parents[2])
SCRIPT = """\
import json, os, select, socket, sys
sys.path.insert(0, sys.argv[3])
from frun.protocol.channel import Frames, Hello, encode

test = socket.socket(socket.AF_UNIX)
test.connect(sys.argv[2])
assert test.recv(1)  # the test lets it connect
agent = socket.socket(socket.AF_UNIX)
agent.connect(sys.argv[1])
agent.sendall(encode(Hello(rank=0, generation=1)))
frames = Frames()
while True:
    ready, _, _ = select.select([test, agent], [], [])
    if test in ready:
        word = test.recv(1)
        if word == b"c":
            agent.shutdown(socket.SHUT_RDWR)
            agent.close()
            agent = test
        elif word == b"d":
            os.kill(os.getpid(), 9)
        elif not word:
            os._exit(0)
    else:
        for order in frames.feed(agent.recv(65536)):
            told = [type(order).__name__, order.generation]
            test.sendall(json.dumps(told).encode() + b"\\n")
"""
FIRST = RankTable(
    generation=1,
    phase=Phase.RUN,
    reason="",
    slots=(Slot(host="h", address="127.0.0.1", port=0, first_rank=0, nproc=1, incarnations=(1,)),),
    master_addr="127.0.0.1",
    master_port=29500,
)
SECOND, THIRD = replace(FIRST, generation=2), replace(FIRST, generation=3)


@dataclass(slots=True, kw_only=True)
class Rig:
    """One worker of real parts, which connects to its agent when the test lets it."""

    workers: LocalWorkers
    changed: asyncio.Event
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def connect(self) -> int:
        """Let the worker connect; return its pid when it has."""
        self.writer.write(b"h")
        pid = self.workers.reports[0].pid
        while pid not in self.workers.connected():
            await asyncio.sleep(0.002)
        return pid

    async def failed(self) -> str:
        """Wait until the worker has failed; return why."""
        await self.until(lambda: self.state is WorkerState.FAILED)
        failure = self.workers.reports[0].failure
        assert failure is not None
        return failure.message

    async def heard(self) -> list[object]:
        """Return the next order that the worker heard."""
        found: list[object] = json.loads(await self.reader.readline())
        return found

    async def until(self, done: Callable[[], bool]) -> None:
        """Wait for a change after which this holds."""
        while not done():
            self.changed.clear()
            await self.changed.wait()

    @property
    def state(self) -> WorkerState:
        """How the worker stands."""
        return self.workers.reports[0].state


@asynccontextmanager
async def rig(folder: Path) -> AsyncIterator[Rig]:
    """Start a worker that waits for a word of the test before it connects."""
    met: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Future()
    (folder / "late.py").write_text(SCRIPT)
    channel, server_path = Channel(str(folder / "agent")), str(folder / "test")
    server = await asyncio.start_unix_server(lambda *ends: met.set_result(ends), server_path)
    args = (str(folder / "late.py"), channel.path, server_path, ROOT)
    config = configure("--no-python", "--log-dir", str(folder), sys.executable, *args)
    logs = LogPump(config=config.logs, folder=make_log_folder(str(folder), "j"), host="h")
    workers = LocalWorkers(
        WorkerSettings(
            config=config,
            job_id="j",
            host="h",
            base_environment=environment(),
            store_path=str(folder / "store"),
            channel_path=channel.path,
            rules=(),
        ),
        channel=channel,
        logs=logs,
        make_zygote=lambda on_exit, on_death: Zygote(
            python=sys.executable,
            env=environment(),
            warm=False,
            on_exit=on_exit,
            on_death=on_death,
        ),
        emit=lambda event, generation: None,
        clock=SystemClock(),
    )
    changed = asyncio.Event()
    workers.on_change = changed.set
    try:
        async with asyncio.timeout(LIMIT_S):
            await workers.start(FIRST, [0])
            reader, writer = await met
            yield Rig(workers=workers, changed=changed, reader=reader, writer=writer)
    finally:
        await workers.close()
        server.close()
        channel.close()
        await asyncio.to_thread(logs.close)
        if met.done():
            met.result()[1].close()


def test_orders_wait_for_the_connection(tmp_path: Path) -> None:
    """A worker that runs and has not connected yet gets the pause and the order to go on when it has."""

    async def story() -> None:
        async with rig(tmp_path) as one:
            one.workers.pause(2, [0])
            one.workers.resume(SECOND, [0])
            one.writer.write(b"h")
            assert [await one.heard(), await one.heard()] == [["Pause", 2], ["Resume", 2]]
            one.workers.pause(3, [0])
            assert await one.heard() == ["Pause", 3]
            assert one.state is WorkerState.RUNNING

    asyncio.run(story())


def test_a_newer_pause_ends_older_orders(tmp_path: Path) -> None:
    """What was ordered before the latest pause is not sent any more."""

    async def story() -> None:
        async with rig(tmp_path) as one:
            one.workers.pause(2, [0])
            one.workers.resume(SECOND, [0])
            one.workers.pause(3, [0])
            one.writer.write(b"h")
            assert await one.heard() == ["Pause", 3]
            one.workers.resume(THIRD, [0])
            assert await one.heard() == ["Resume", 3]

    asyncio.run(story())


@pytest.mark.parametrize("order", ["pause", "go on"])
def test_a_worker_that_left_the_channel_is_replaced(order: str, tmp_path: Path) -> None:
    """It lives and can be told nothing: that is the end of it, and its failure says so."""

    async def story() -> None:
        async with rig(tmp_path) as one:
            pid = await one.connect()
            one.writer.write(b"c")
            while pid in one.workers.connected():
                await asyncio.sleep(0.002)
            if order == "pause":
                one.workers.pause(2, [0])
            else:
                one.workers.resume(SECOND, [0])
            assert await one.failed() == f"could not be told to {order}, and was killed"

    asyncio.run(story())


def test_a_dead_worker_keeps_its_own_reason(tmp_path: Path) -> None:
    """Its death is known a moment after its silence: what is ordered in between does not explain it."""

    async def story() -> None:
        async with rig(tmp_path) as one:
            pid = await one.connect()
            one.writer.write(b"d")
            while pid in one.workers.connected():
                await asyncio.sleep(0)  # its connection ends before it does: that is the moment
            one.workers.resume(SECOND, [0])
            assert "could not be told" not in await one.failed()

    asyncio.run(story())


def test_a_worker_without_its_channel_is_replaced(tmp_path: Path) -> None:
    """One that never connects does not pause either: it is killed in time."""

    async def story() -> None:
        async with rig(tmp_path) as one:
            one.workers.out_within_s = 0.2
            one.workers.pause(2, [0])
            one.workers.resume(SECOND, [0])
            assert await one.failed() == "did not leave its step within 0.2 s, and was killed"

    asyncio.run(story())
