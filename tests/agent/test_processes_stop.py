"""Stopping workers ends them and everything that came from them, and nothing else."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from frun import procfs
from tests.worker.families import FAMILY
from tests.zygotes import Rig, gone, with_rig


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with the script."""
    (tmp_path / "family.py").write_text(FAMILY)
    monkeypatch.chdir(tmp_path)


async def family(rig: Rig, *kinds: str, **more: object) -> list[int]:
    """Start a worker with children of these kinds; return all pids, the worker's first."""
    pid, line = await rig.hear(["family.py", *kinds], **more)
    pids: list[int] = json.loads(line)
    assert pids[0] == pid
    return pids


async def frozen(pid: int) -> None:
    """Freeze a process and wait until it is."""
    os.kill(pid, signal.SIGSTOP)
    async with asyncio.timeout(5.0):
        while (process := procfs.read(pid)) is not None and process.state != "T":
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    "kinds",
    [
        ["child", "child"],
        ["session"],
        ["daemon", "child", "session"],
        ["ignore", "child", "session", "daemon"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("exec_", [False, True])
def test_a_worker_goes_with_all_its_descendants(kinds: list[str], exec_: bool) -> None:
    """Children, children with a session of their own and daemons end with the worker."""

    async def story(rig: Rig) -> None:
        pids = await family(rig, *kinds, exec_=exec_)
        ignored = "ignore" in kinds
        stuck = await rig.zygote.stop(pids[:1], signal.SIGTERM, 0.2 if ignored else 60.0)
        assert stuck == ()
        assert await rig.ended(pids[0]) == (-signal.SIGKILL if ignored else -signal.SIGTERM)
        assert await gone(pids, 0.0) == []

    with_rig(story)


def test_children_of_a_dead_worker_are_stopped() -> None:
    """A worker that has died is named in a stop for the sake of what it left."""

    async def story(rig: Rig) -> None:
        pids = await family(rig, "exit", "child", "session", "daemon")
        assert await rig.ended(pids[0]) == 3
        assert len(await gone(pids, 0.0)) == 3
        assert await rig.zygote.stop(pids[:1], signal.SIGTERM, 5.0) == ()
        assert await gone(pids, 0.0) == []

    with_rig(story)


def test_other_workers_and_strangers_are_left_alone() -> None:
    """A stop of one worker, dead or alive, touches neither another one nor a stranger."""

    async def story(rig: Rig) -> None:
        stranger = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        try:
            others = await family(rig, "child", "session")
            dead = await family(rig, "exit", "child")
            mine = await family(rig, "child", "session")
            pids = [mine[0], dead[0], stranger.pid, os.getpid()]
            assert await rig.zygote.stop(pids, signal.SIGKILL, 0) == ()
            assert await gone([*mine, *dead], 0.0) == []
            assert await gone(others, 0.0) == others
            assert stranger.poll() is None
        finally:
            stranger.kill()
            stranger.wait()

    with_rig(story)


def test_a_frozen_worker_is_killed() -> None:
    """A worker stopped by SIGSTOP does not act on the soft signal, but dies after the grace."""

    async def story(rig: Rig) -> None:
        pids = await family(rig, "child")
        await frozen(pids[0])
        assert await rig.zygote.stop(pids[:1], signal.SIGTERM, 0.1) == ()
        assert await rig.ended(pids[0]) == -signal.SIGKILL
        assert await gone(pids, 0.0) == []

    with_rig(story)


def test_a_stop_can_be_hurried_and_repeated() -> None:
    """Hurry ends a long grace; a second stop of the same worker ends with the first."""

    async def story(rig: Rig) -> None:
        pids = await family(rig, "ignore", "child")
        started = time.monotonic()
        first = asyncio.create_task(rig.zygote.stop(pids[:1], signal.SIGTERM, 600.0))
        second = asyncio.create_task(rig.zygote.stop(pids[:1], signal.SIGTERM, 600.0))
        done, _ = await asyncio.wait([first, second], timeout=0.1)
        assert not done
        rig.zygote.hurry()
        assert await first == await second == ()
        assert time.monotonic() - started < 60.0
        assert await gone(pids, 0.0) == []

    with_rig(story)


def test_a_worker_may_use_its_grace() -> None:
    """A worker that ends by itself within the grace keeps its own exit status."""
    Path("tidy.py").write_text(
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *a: sys.exit(5))\n"
        "print(flush=True)\nwhile True: signal.pause()\n"
    )

    async def story(rig: Rig) -> None:
        pid, _ = await rig.hear(["tidy.py"])
        assert await rig.zygote.stop([pid], signal.SIGTERM, 30.0) == ()
        assert await rig.ended(pid) == 5

    with_rig(story)
