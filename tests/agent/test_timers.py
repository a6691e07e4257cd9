"""Limits that workers set themselves through a named pipe, as torch's own client does."""

import array
import asyncio
import contextlib
import fcntl
import json
import logging
import os
import stat
import subprocess
import termios
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from frun.agent import timers
from frun.agent.timers import Expired, Request, Timers
from frun.clock import SystemClock
from frun.errors import LaunchError
from frun.procfs import Process

SOON_S = 20.0


def line(**changes: object) -> bytes:
    """Return a line as the client writes it, with changes."""
    fields = {"version": 1, "pid": 7, "scope_id": "step", "expiration_time": 5.5, "signal": 9}
    return json.dumps({**fields, **changes}).encode()


def test_a_line_is_read() -> None:
    """Fields of later versions are no trouble, and a negative signal is none."""
    assert timers.parse(line(new=1)) == Request(pid=7, scope="step", expires_s=5.5, signum=9)
    assert timers.parse(line(signal=-1, expiration_time=-1)) == Request(
        pid=7, scope="step", expires_s=-1.0, signum=0
    )


@pytest.mark.parametrize(
    "broken",
    [
        b"", b"{", b"7", b"[]", b"null", b"\xff", b"{}", line()[:-1],
        line(pid="7"), line(pid=0), line(pid=-1), line(pid=True), line(pid=7.0),
        line(scope_id=3), line(expiration_time="x"), line(expiration_time=float("nan")),
        line(signal=65), line(signal=9.5), line(signal=None), b"[" * 5000,
    ],
)  # fmt: skip
def test_anything_else_is_no_line(broken: bytes) -> None:
    """Nothing in the pipe can make frun signal a process by mistake."""
    assert timers.parse(broken) is None


def test_the_first_limit_with_a_signal_counts() -> None:
    """One verdict per process; limits without a signal only count where there is no other."""
    one, two = (
        Process(pid=pid, state="S", parent=1, group=1, session=1, started=1) for pid in (1, 2)
    )

    def limit(
        process: Process, scope: str, expires_s: float, signum: int
    ) -> tuple[Process, Request]:
        return process, Request(pid=process.pid, scope=scope, expires_s=expires_s, signum=signum)

    given = [
        limit(one, "late", 4.0, 9),
        limit(one, "mute", 1.0, 0),
        limit(one, "early", 3.0, 15),
        limit(one, "far", 9.0, 9),
        limit(two, "mute", 5.0, 0),
    ]
    assert timers.first_over(given, 5.0) == (
        Expired(process=one, scope="early", signum=15),
        Expired(process=two, scope="mute", signum=0),
    )
    assert timers.first_over(given, 0.5) == ()


class Wall:
    """A wall clock that the test sets."""

    now = 100.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


@contextlib.asynccontextmanager
async def pipe(
    path: Path, wall: Callable[[], float]
) -> AsyncIterator[tuple[Timers, "asyncio.Queue[Expired]"]]:
    """Open the timers at `path`; what expires is put in the queue."""
    found: asyncio.Queue[Expired] = asyncio.Queue()
    opened = Timers(str(path), wall)
    opened.on_expired = found.put_nowait
    try:
        yield opened, found
    finally:
        opened.close()
    assert not path.exists()


@pytest.fixture
def sleeper() -> Iterator[int]:
    """A process to set limits for."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


def write(path: Path, *lines: bytes) -> None:
    """Write lines at once, as a client does."""
    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    with os.fdopen(fd, "wb") as file:
        file.write(b"".join(each + b"\n" for each in lines))


def test_a_limit_that_is_over_is_told_once(tmp_path: Path, sleeper: int) -> None:
    """Set, set anew, released: what is left runs out, and the process has no limits after that."""

    async def main() -> None:
        async with pipe(tmp_path / "p", Wall()) as (_, found):
            assert stat.S_IMODE((tmp_path / "p").stat().st_mode) == 0o600
            write(tmp_path / "p", line(pid=sleeper, scope_id="a", expiration_time=100.1))
            write(tmp_path / "p", line(pid=sleeper, scope_id="a", expiration_time=1e9))
            write(tmp_path / "p", line(pid=sleeper, scope_id="b", expiration_time=100.1))
            write(tmp_path / "p", line(pid=sleeper, scope_id="b", expiration_time=-1, signal=0))
            write(tmp_path / "p", line(pid=sleeper, scope_id="c", expiration_time=99))
            write(tmp_path / "p", line(pid=sleeper, scope_id="d", expiration_time=99.5))
            expired = await asyncio.wait_for(found.get(), SOON_S)
            assert (expired.process.pid, expired.scope, expired.signum) == (sleeper, "c", 9)
            assert found.empty()

    asyncio.run(main())


def test_a_limit_in_the_future_comes_by_itself(tmp_path: Path, sleeper: int) -> None:
    """No further line is needed."""

    clock = SystemClock()

    async def main() -> None:
        async with pipe(tmp_path / "p", clock.wall) as (_, found):
            began = clock.monotonic()
            write(tmp_path / "p", line(pid=sleeper, expiration_time=clock.wall() + 0.2))
            await asyncio.wait_for(found.get(), SOON_S)
            assert clock.monotonic() - began > 0.15

    asyncio.run(main())


def test_the_dead_are_left_alone(tmp_path: Path) -> None:
    """A limit of a process that ended is nobody's: its number may be a stranger's by now."""

    async def main() -> None:
        wall = Wall()
        async with pipe(tmp_path / "p", wall) as (_, found):
            with (
                subprocess.Popen(["sleep", "60"]) as gone,
                subprocess.Popen(["sleep", "60"]) as here,
            ):
                write(tmp_path / "p", line(pid=gone.pid, expiration_time=101))
                write(tmp_path / "p", line(pid=here.pid, expiration_time=1e9))
                await _until_read(tmp_path / "p")
                gone.kill()
                gone.wait()
                wall.now = 200.0
                write(tmp_path / "p", line(pid=here.pid, expiration_time=102))
                assert (await asyncio.wait_for(found.get(), SOON_S)).process.pid == here.pid
                assert found.empty()
                here.kill()

    asyncio.run(main())


def test_broken_lines_are_said_once(
    tmp_path: Path, sleeper: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Noise of any length costs one warning; lines behind it are read."""

    async def main() -> None:
        async with pipe(tmp_path / "p", Wall()) as (_, found):
            for _ in range(3):
                write(tmp_path / "p", b"x" * 50_000, b"{}")
                await _until_read(tmp_path / "p")
            write(tmp_path / "p", b"", line(pid=sleeper, expiration_time=1))
            await asyncio.wait_for(found.get(), SOON_S)

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert len(caplog.records) == 1
    assert "a line that is no timer" in caplog.text


def test_an_old_pipe_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    """A pipe may be left of a killed agent; a file may be somebody's work."""

    async def main() -> None:
        path = tmp_path / "p"
        os.mkfifo(path)
        async with pipe(path, Wall()):
            pass
        path.write_text("precious")
        with pytest.raises(LaunchError, match="is there and no named pipe"):
            Timers(str(path), Wall())
        assert path.read_text() == "precious"
        with pytest.raises(LaunchError, match=r"no pipe can be made at .*/no/p: No such file"):
            Timers(str(tmp_path / "no" / "p"), Wall())

    asyncio.run(main())


async def _until_read(path: Path) -> None:
    """Wait until nothing is left in the pipe."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    left = array.array("i", [1])
    try:
        async with asyncio.timeout(SOON_S):
            while left[0]:
                await asyncio.sleep(0)
                fcntl.ioctl(fd, termios.FIONREAD, left)
    finally:
        os.close(fd)
