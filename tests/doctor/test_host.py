"""What facts of a host mean for a job."""

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from frun.doctor import host
from frun.doctor.findings import Level, failed
from frun.doctor.host import GIB, UNLIMITED, HostFacts, judge, look
from tests.cli.tools import configure

GOOD = HostFacts(
    description="node-a: Linux",
    torch="2.13.0",
    devices=("cuda", 8),
    torch_trouble="",
    cpus=64,
    fds=1 << 20,
    tasks_left=UNLIMITED,
    shm_total=64 * GIB,
    memory_left=512 * GIB,
    log_folder="/logs",
    log_left=100 * GIB,
    log_writable=True,
    temp_folder="/tmp",
    temp_left=100 * GIB,
    state_folder="/state",
    state_writable=True,
)
CONFIG = configure("--nproc-per-node=8")


def test_a_good_host() -> None:
    """Nothing but ok."""
    assert {finding.level for finding in judge(GOOD, CONFIG)} == {Level.OK}


BAD = {
    "torch": ({"torch_trouble": "python3 has no torch"}, Level.FAILURE, "has no torch"),
    "few devices": ({"devices": ("cuda", 4)}, Level.WARNING, "4 cuda for 8 workers: several share"),
    "few cpus": ({"devices": None, "cpus": 2}, Level.WARNING, "8 workers on 2 cpus"),
    "files": ({"fds": 100}, Level.FAILURE, "100 open files, the agent needs about 196: ulimit -n"),
    "processes": ({"tasks_left": 100}, Level.WARNING, "pids.max"),
    "shared memory": ({"shm_total": 64 << 20}, Level.WARNING, "64 MiB: data loaders may end"),
    "memory": ({"memory_left": GIB}, Level.WARNING, "1.0 GiB of memory for 8 workers"),
    "disk": ({"log_left": 1 << 20}, Level.WARNING, "/logs has 1 MiB left"),
    "no logs": ({"log_writable": False}, Level.FAILURE, "/logs can not be written to"),
    "no registry": ({"state_writable": False}, Level.NOTE, "frun status needs"),
    "port": (
        {"busy_ports": (("--metrics-port", 9100),)},
        Level.FAILURE,
        "--metrics-port 9100 is in",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_bad_is_said_once(name: str) -> None:
    """One line that is not ok, with the value and what to do."""
    changes, level, text = BAD[name]
    found = judge(replace(GOOD, **changes), CONFIG)  # type: ignore[arg-type]
    (bad,) = [finding for finding in found if finding.level is not Level.OK]
    assert bad.level is level
    assert text in bad.text
    assert failed(found) == (level is Level.FAILURE)


def test_this_host(tmp_path: Path) -> None:
    """The facts are read, a port that is taken is seen, and a folder that is not there yet is no trouble."""
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        config = configure(
            f"--metrics-port={port}", f"--log-dir={tmp_path}/a/b", f"--state-dir={tmp_path}/s"
        )
        config = replace(config, workers=replace(config.workers, python="/nowhere/python"))
        facts = look(config, os.environ, listens=False)
    assert facts.busy_ports == (("--metrics-port", port),)
    assert "/nowhere/python" in facts.torch_trouble
    assert facts.cpus >= 1
    assert facts.memory_left > 0
    assert facts.log_left > 0
    assert facts.log_writable
    assert os.listdir(tmp_path) == []


def test_what_control_groups_leave(tmp_path: Path) -> None:
    """The tightest group counts, with what it has used already."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cgroup").write_text("0::/a/b\n")
    for folder, most, used in (("a", "100", "30"), ("a/b", "max", "10")):
        (tmp_path / "groups" / folder).mkdir(parents=True)
        (tmp_path / "groups" / folder / "pids.max").write_text(most + "\n")
        (tmp_path / "groups" / folder / "pids.current").write_text(used + "\n")
    left = host._tasks_left(tmp_path / "groups", tmp_path / "proc")
    assert left == 70 or (os.geteuid() != 0 and left < 70)
