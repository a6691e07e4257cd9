"""Workers that set themselves limits with torch's own client, under a real frun."""

import os
import platform
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

CLIENT = """
import os, signal, sys
from torch.distributed.elastic import timer
from torch.distributed.elastic.timer import FileTimerClient
path = os.environ["TORCHELASTIC_TIMER_FILE"]
"""


def frun(folder: Path, script: str, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `script` with torch's client at hand, file timers on."""
    (folder / "s.py").write_text(CLIENT + textwrap.dedent(script), encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", "frun", *flags, "s.py"],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "TORCHELASTIC_ENABLE_FILE_TIMER": "1",
            "XDG_STATE_HOME": str(folder / "state"),
            "OMP_NUM_THREADS": "1",
            **env,
        },
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_a_worker_over_its_limit_fails(tmp_path: Path) -> None:
    """The signal is the one asked for; limits that are kept do nothing; the pipe goes at the end."""
    done = frun(
        tmp_path,
        """
        timer.configure(FileTimerClient(path, signal=signal.SIGUSR1))
        with timer.expires(after=30, scope="kept"):
            print("path", path, flush=True)
        if os.environ["RANK"] == "1":
            with timer.expires(after=0.2, scope="step\\n7"):
                signal.pause()
        signal.pause()
        """,
        "--nproc-per-node=2",
        TORCHELASTIC_TIMER_FILE="limits",
    )
    assert done.returncode == 1
    assert "rank 1" in done.stderr
    assert "SIGUSR1 (10)" in done.stderr
    assert "failed (timer step 7 expired)" in done.stderr
    assert done.stdout.split() == ["path", str(tmp_path / "limits")] * 2
    assert not (tmp_path / "limits").exists()


def test_a_signal_that_is_caught_is_no_way_out(tmp_path: Path) -> None:
    """Status 0 after a limit was over is a failure; so is a parent that would wait for ever."""
    done = frun(
        tmp_path,
        """
        timer.configure(FileTimerClient(path, signal=signal.SIGTERM))
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        with timer.expires(after=0.2, scope="a"):
            signal.pause()
        """,
    )
    assert done.returncode == 1
    assert "failed (timer a expired)" in done.stderr


def test_a_limit_in_a_child_is_its_workers(tmp_path: Path) -> None:
    """The child gets its signal; a worker that goes on without it gets SIGKILL after the grace."""
    done = frun(
        tmp_path,
        """
        if os.fork() == 0:
            os.setsid()
            timer.configure(FileTimerClient(path))
            with timer.expires(after=0.2, scope="child"):
                signal.pause()
        pid, status = os.wait()
        print("child", os.waitstatus_to_exitcode(status), flush=True)
        signal.pause()
        """,
        "--shutdown-timeout=1",
    )
    assert done.stdout.split() == ["child", "-9"]
    assert done.returncode == 1
    assert "failed (timer child expired)" in done.stderr


def test_strangers_are_never_signalled(tmp_path: Path) -> None:
    """Whatever is written to the pipe, only processes of workers can be meant; the job goes on."""
    with subprocess.Popen(["sleep", "60"]) as stranger:
        done = frun(
            tmp_path,
            """
            client = FileTimerClient(path)
            with open(path, "w") as pipe:
                pipe.write("nonsense\\n")
            os.getpid = lambda: int(os.environ["STRANGER"])
            client.acquire("x", 1.0)
            """,
            STRANGER=str(stranger.pid),
        )
        assert stranger.poll() is None
        stranger.kill()
    assert done.returncode == 0, done.stderr
    assert f"pid {stranger.pid} belongs to no worker here" in done.stderr
    assert "a line that is no timer: b'nonsense'" in done.stderr


def test_nothing_is_made_unless_asked_for(tmp_path: Path) -> None:
    """Without the switch the variable goes through as it is, as in torchrun."""
    done = frun(
        tmp_path, "print(path)", TORCHELASTIC_ENABLE_FILE_TIMER="0", TORCHELASTIC_TIMER_FILE="mine"
    )
    assert done.stdout.split() == ["mine"], done.stderr
    assert not (tmp_path / "mine").exists()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of a system call")
def test_a_worker_stuck_in_the_kernel_costs_the_host(tmp_path: Path) -> None:
    """A parent whose child began as vfork's sleeps in state D until that child executes something."""
    done = frun(
        tmp_path,
        """
        import ctypes
        clone, vfork = 56, 0x4000
        if ctypes.CDLL(None).syscall(clone, vfork | signal.SIGCHLD, 0, 0, 0, 0) == 0:
            signal.pause()
        """,
        TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT="0.5",
    )
    assert done.returncode == 1
    found = r"worker pid \d+ did not leave the kernel \(state D\) for 0.5 s: this host is not fit"
    assert re.search(found, done.stderr), done.stderr
