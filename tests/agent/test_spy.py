"""What is seen of a worker from outside, with a program in place of py-spy."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from frun.agent.pulse import Pulse
from frun.agent.spy import LIMIT_S, Spy
from frun.clock import SystemClock
from frun.protocol.liveness import TURN_S
from tests.agent.test_pulse import Workers, beat

LIMIT = 20.0


def program(folder: Path, text: str) -> str:
    """Write a program that is called as py-spy is; return its path."""
    path = folder / "py-spy"
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="ascii")
    path.chmod(0o755)
    return str(path)


async def until(done: Callable[[], bool]) -> None:
    """Wait for something that happens beside."""
    async with asyncio.timeout(LIMIT):
        while not done():
            await asyncio.sleep(0.01)


def seen(folder: Path, text: str, look: Callable[[Spy], Awaitable[None]]) -> Spy:
    """Let a spy with such a program look; return it when `look` is done."""

    async def run() -> Spy:
        spy = Spy(program(folder, text))
        await look(spy)
        return spy

    return asyncio.run(run())


def test_python_first_then_the_frames_of_c(tmp_path: Path) -> None:
    """What is quick and stops nobody counts at once, the whole when it is there."""

    async def look(spy: Spy) -> None:
        spy.look(7, LIMIT)
        await until(lambda: spy.text(7) == "dump --nonblocking --pid 7\n")
        (tmp_path / "go").touch()
        await until(lambda: spy.text(7) == "dump --native --pid 7\n")
        assert spy.text(8) == ""
        spy.forget(7)
        assert spy.text(7) == ""

    wait = f'[ $2 = --nonblocking ] || while [ ! -e {tmp_path}/go ]; do sleep 0.01; done; echo "$@"'
    seen(tmp_path, wait, look)


@pytest.mark.parametrize(
    "text",
    [
        "[ $2 = --nonblocking ] && echo seen || exit 1",
        "[ $2 = --nonblocking ] && echo seen || exec sleep 60",
    ],
)
def test_what_fails_or_takes_too_long_takes_nothing_away(tmp_path: Path, text: str) -> None:
    """The program is ended in time, and what was seen before stays."""
    began = time.monotonic()

    async def look(spy: Spy) -> None:
        spy.look(7, 1.0)
        await until(lambda: spy.text(7) == "seen\n")

    assert seen(tmp_path, text, look).text(7) == "seen\n"
    assert time.monotonic() - began < LIMIT_S + LIMIT


def test_without_the_program_nobody_looks() -> None:
    """Nor where it can't be executed."""

    async def run() -> None:
        for path in (None, "/no/such/py-spy"):
            spy = Spy(path)
            spy.look(7, 1.0)
            await asyncio.sleep(0)
            assert spy.text(7) == ""

    asyncio.run(run())


def test_a_silent_worker_is_looked_at_before_the_verdict(tmp_path: Path) -> None:
    """After half of the time; a beat ends the matter, and the next silence begins it anew."""

    async def look(spy: Spy) -> None:
        workers = Workers(7)
        pulse = Pulse(workers, workers, 2.0, 2.0, SystemClock(), spy)
        for _ in range(2):
            pulse.heard(7, beat())
            for _ in range(3):
                pulse.turn(TURN_S)
            await asyncio.sleep(0)
            assert pulse.spied(7) == ""
            pulse.turn(TURN_S)
            await until(lambda: pulse.spied(7) == "seen\n")
            assert pulse.explained({0: 7}) == {0: "seen\n"}
        pulse.heard(7, beat())
        assert pulse.spied(7) == ""

    seen(tmp_path, "echo seen", look)
