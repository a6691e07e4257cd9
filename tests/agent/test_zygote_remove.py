"""Folders that go with the zygote, however its agent ended."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import wait_gone

_AGENT = """
import asyncio, sys
from frun.agent.zygote import Zygote

async def main():
    zygote = Zygote(
        python=sys.executable, env=dict(PATH="/usr/bin:/bin", PYTHONPATH=sys.argv[3]), warm=False,
        remove=[sys.argv[1]], on_exit=lambda pid, code: None, on_death=print,
    )
    await zygote.start()
    if sys.argv[2] == "ready":
        await zygote.ready(60)
    print(zygote.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("when", ["at once", "ready"])
def test_a_folder_goes_with_a_killed_agent(tmp_path: Path, when: str) -> None:
    """SIGKILL of the agent, while the zygote starts or later, leaves no folder behind."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "socket").touch()
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", _AGENT, str(folder), when, root], stdout=subprocess.PIPE, text=True
    ) as agent:
        assert agent.stdout is not None
        zygote = int(agent.stdout.readline())
        os.kill(agent.pid, signal.SIGKILL)
    assert not wait_gone([zygote], 20)
    assert not folder.exists()
