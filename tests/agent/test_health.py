"""What an agent does about the facts that the checks of its host report."""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from frun import procfs
from frun.agent.health import HealthWatch
from frun.clock import SystemClock
from frun.devices import text
from frun.events import Event, HealthChanged
from frun.protocol.classes import FaultClass
from frun.protocol.health import Fact, Severity
from tests.devices.build import HandClock

PATIENCE_S = 60.0
FAULT = Fact(
    check="gpu", name="ecc", severity=Severity.FAULT, fault_class=FaultClass.DEVICE,
    reason="an error", device=1,
)  # fmt: skip


class Story:
    """A watch, and in which order it did what."""

    def __init__(self, command: list[str], clock: HandClock | None = None) -> None:
        self.did: list[str] = []
        self.changed = asyncio.Event()
        self.watch = HealthWatch(command, {}, 2, self, self.emit, clock or SystemClock())
        self.watch.tell(self.amend)
        del self.did[:]

    def strike(self, local_rank: int, fact: Fact) -> None:
        """Note whose worker is killed."""
        self.did.append(f"kill {local_rank}")

    def emit(self, event: Event, generation: int) -> None:
        """Note an event."""
        assert isinstance(event, HealthChanged)
        self.did.append(f"{event.name} {'holds' if event.holds else 'is over'}")

    def amend(self, facts: tuple[Fact, ...]) -> None:
        """Note what goes into the record."""
        self.did.append(f"record {[fact.name for fact in facts]}")
        self.changed.set()

    async def until(self, reached: Callable[[], bool]) -> None:
        """Wait for a change after which this is so."""
        async with asyncio.timeout(PATIENCE_S):
            while not reached():
                self.changed.clear()
                await self.changed.wait()


def test_the_record_is_written_before_a_worker_is_killed() -> None:
    """Once for a fault that stays; when it is over the record says so as well."""

    async def story() -> None:
        clock = HandClock()
        one = Story([], clock)
        for _ in range(3):
            one.watch.take([FAULT])
            clock.now += 1
        assert one.did == ["ecc holds", "record ['ecc']", "kill 1"]
        assert 0 < one.watch.calm_in_s(1) < 5
        assert one.watch.calm_in_s(0) == 0
        async with asyncio.timeout(PATIENCE_S):
            await one.watch.saw("ecc")
        clock.now += 10
        one.watch.take([])
        assert one.did[3:] == ["ecc is over", "record []"]

    asyncio.run(story())


def line(*facts: Fact) -> str:
    """Return what the checks say."""
    return json.dumps({"checks": {"gpu": [text.written(fact) for fact in facts]}, "absent": []})


def test_checks_that_end_are_started_again(tmp_path: Path) -> None:
    """That they ended is a warning; what they had said holds on, and nobody is killed again for it."""

    async def story() -> None:
        program = tmp_path / "checks.py"
        program.write_text(
            "import os, pathlib, sys\n"
            f"here = pathlib.Path({str(tmp_path)!r})\n"
            "first = not (here / 'started').exists()\n"
            "(here / 'started').touch()\n"
            f"print({line(FAULT)!r}, flush=True)\n"
            "if first: os._exit(9)\n"
            f"print({line()!r}, flush=True)\n"
            "sys.stdin.read()\n"
        )
        one = Story([sys.executable, str(program)])
        one.watch.start()
        await one.until(lambda: "record ['ecc', 'broken']" in one.did)
        assert one.did[:3] == ["ecc holds", "record ['ecc']", "kill 1"]
        async with asyncio.timeout(PATIENCE_S):
            while one.watch._reported:
                await asyncio.sleep(0.05)
        await one.watch.close()
        assert one.did.count("kill 1") == 1

    asyncio.run(story())


def test_checks_that_stand_still_are_started_again(tmp_path: Path) -> None:
    """A stopped process says nothing and does not end: it is killed, and what follows it is heard."""

    async def story() -> None:
        program = tmp_path / "checks.py"
        program.write_text(
            "import os, pathlib, signal, sys\n"
            f"here = pathlib.Path({str(tmp_path)!r})\n"
            "first = not (here / 'pid').exists()\n"
            "if first: (here / 'pid').write_text(str(os.getpid()))\n"
            f"print({line()!r} if first else {line(FAULT)!r}, flush=True)\n"
            "if first: os.kill(os.getpid(), signal.SIGSTOP)\n"
            "sys.stdin.read()\n"
        )
        one = Story([sys.executable, str(program)])
        one.watch.silent_s = 5.0
        one.watch.start()
        async with asyncio.timeout(PATIENCE_S):
            while "kill 1" not in one.did:
                await asyncio.sleep(0.05)
        await one.watch.close()
        assert "record ['broken']" in one.did
        stopped = procfs.read(int((tmp_path / "pid").read_text()))
        assert stopped is None or not stopped.running

    asyncio.run(story())


def test_words_that_no_agent_reads_are_a_warning(tmp_path: Path) -> None:
    """A line that is no JSON, or not the facts of checks; also a program that is not there."""

    async def broken(command: list[str]) -> Any:
        one = Story(command)
        one.watch.start()
        await one.until(lambda: "record ['broken']" in one.did)
        await one.watch.close()

    for said in ("nonsense", "[]", '{"checks": {"gpu": [7]}}'):
        asyncio.run(broken([sys.executable, "-c", f"print({said!r})"]))
    asyncio.run(broken([str(tmp_path / "none")]))
