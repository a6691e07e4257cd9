"""When the agent or the zygote dies, however it dies, nothing of theirs lives on."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from frun import procfs
from frun.errors import LaunchError
from tests.worker.families import FAMILY
from tests.zygotes import Rig, environment, gone, with_rig

ROOT = str(Path(__file__).parents[2])
AGENT = """\
import asyncio, json, sys
from tests.zygotes import running

async def main():
    async with running() as rig:
        pids = [rig.zygote.pid]
        for kinds in json.loads(sys.argv[1]):
            pid, line = await rig.hear(["family.py", *kinds])
            pids += json.loads(line)
        print(json.dumps(pids), flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""
KINDS = [["child", "session", "daemon"], ["ignore", "child"], ["exit", "child", "session"]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with the scripts."""
    (tmp_path / "family.py").write_text(FAMILY)
    (tmp_path / "agent.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("freeze", [False, True])
def test_the_death_of_the_agent_ends_everything(freeze: bool) -> None:
    """SIGKILL to the agent is the end of its zygote, its workers and their children."""
    agent = subprocess.Popen(
        [sys.executable, "agent.py", json.dumps(KINDS)],
        env=environment(PYTHONPATH=ROOT),
        stdout=subprocess.PIPE,
    )
    try:
        assert agent.stdout is not None
        pids = json.loads(agent.stdout.readline())
        assert len(pids) == 1 + 4 + 2 + 3
        if freeze:
            os.kill(pids[1], signal.SIGSTOP)
    finally:
        agent.kill()
        agent.wait()
        agent.communicate()
    assert asyncio.run(gone(pids[:7] + pids[8:], 20.0)) == []


def test_the_death_of_the_agent_during_the_imports_ends_the_zygote() -> None:
    """A zygote that is importing does not finish it."""
    Path("slow.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    Path("early.py").write_text(
        "import asyncio\nfrom tests.zygotes import environment, running\n"
        "async def main():\n"
        f"    env = environment(PYTHONPATH='.:{ROOT}')\n"
        "    async with running(preload=['slow'], env=env) as rig:\n"
        "        print(rig.zygote.pid, flush=True)\n"
        "        await rig.zygote.ready(60)\n"
        "asyncio.run(main())\n"
    )
    agent = subprocess.Popen(
        [sys.executable, "early.py"], env=environment(PYTHONPATH=ROOT), stdout=subprocess.PIPE
    )
    try:
        assert agent.stdout is not None
        lines = {agent.stdout.readline(), agent.stdout.readline()} - {b"importing\n"}
        pid = int(lines.pop())
    finally:
        agent.kill()
        agent.communicate()
    assert asyncio.run(gone([pid], 20.0)) == []


def test_the_death_of_the_zygote_is_told_and_ends_the_workers() -> None:
    """The agent hears of the zygote's death first, then of each worker's end."""

    async def story(rig: Rig) -> None:
        pids = []
        for kinds in (["child"], ["ignore", "child"], ["child"]):
            pids.append(json.loads((await rig.hear(["family.py", *kinds]))[1]))
        os.kill(pids[2][0], signal.SIGSTOP)
        waiting = asyncio.create_task(rig.zygote.stop([pids[0][0]], signal.SIGCONT, 600.0))
        await asyncio.sleep(0)
        os.kill(rig.zygote.pid, signal.SIGKILL)
        ends = [await rig.ended(family[0], 20.0) for family in pids]
        assert ends == [-signal.SIGKILL] * 3
        assert rig.deaths == ["the zygote was ended by SIGKILL"]
        assert await waiting == ()
        assert await gone([pid for family in pids for pid in family], 0.0) == []
        with pytest.raises(LaunchError):
            await rig.spawn(["family.py"])

    with_rig(story)


def test_a_stray_signal_does_not_end_the_zygote() -> None:
    """Signals that somebody sends to all processes of frun are the agent's to act on."""

    async def story(rig: Rig) -> None:
        await rig.zygote.ready(20.0)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            os.kill(rig.zygote.pid, signum)
        assert (await rig.run(["family.py", "exit"])).returncode == 3
        assert rig.deaths == []

    with_rig(story)


def test_close_ends_everything_at_once() -> None:
    """Close leaves no worker and no descendant, whatever they ignore."""
    pids: list[int] = []

    async def story(rig: Rig) -> None:
        for kinds in KINDS:
            pids.extend(json.loads((await rig.hear(["family.py", *kinds]))[1]))
        pids.append(rig.zygote.pid)

    with_rig(story)
    assert asyncio.run(gone(pids, 0.0)) == []
    assert procfs.read(pids[-1]) is None
