"""The files by which commands find the jobs of this machine."""

import json
import logging
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from frun.registry import (
    JobEntry,
    current_place,
    live_jobs,
    process_started,
    register,
    unregister,
)


def entry(job_id: str = "job", pid: int | None = None) -> JobEntry:
    """Return an entry of this process, or of another."""
    pid = os.getpid() if pid is None else pid
    return JobEntry(
        job_id=job_id,
        endpoints=("127.0.0.1:2379", "[::1]:2379"),
        user="me",
        host="node-a-12",
        pid=pid,
        pid_started=process_started(pid) or 0,
        place=current_place(),
        started_at=12.5,
        log_folder="/logs/job_x",
    )


def test_round_trip_and_modes(tmp_path: Path) -> None:
    """A registered job is found as it was written; file and folder are for its owner only."""
    state = tmp_path / "state"
    path = register(str(state), entry())
    assert path is not None
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(state / "jobs").st_mode) == 0o700
    assert "password" not in Path(path).read_text()
    assert live_jobs(str(state)) == [entry()]
    unregister(path)
    unregister(path)
    unregister(None)
    assert live_jobs(str(state)) == []
    assert os.listdir(state / "jobs") == []


@pytest.mark.parametrize("job_id", ["a/b", "..", "x" * 300, "\u00e9\n", ""])
def test_any_job_id(tmp_path: Path, job_id: str) -> None:
    """Whatever the id is, the file is inside the folder and the id comes back whole."""
    path = register(str(tmp_path), entry(job_id))
    assert path is not None
    assert Path(path).parent == tmp_path / "jobs"
    assert [job.job_id for job in live_jobs(str(tmp_path))] == [job_id]


def test_dead_agents_are_dropped(tmp_path: Path) -> None:
    """Files of processes that ended, or whose id was used again, go when they are read."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    dead = entry("dead", process.pid)
    process.communicate()
    register(str(tmp_path), dead)
    register(str(tmp_path), replace(entry("reused"), pid_started=1))
    register(str(tmp_path), entry("alive"))
    assert [job.job_id for job in live_jobs(str(tmp_path))] == ["alive"]
    assert len(os.listdir(tmp_path / "jobs")) == 1


def test_a_zombie_is_dead() -> None:
    """An agent that ended and was not waited for does not count."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process_started(process.pid) is None
    process.wait()


def test_other_machines_files_are_left_alone(tmp_path: Path) -> None:
    """In a shared home another machine's job is neither shown nor removed; an old boot's is removed."""
    place = current_place()
    there = replace(entry("there"), place=replace(place, machine="other", boot="b"))
    container = replace(entry("container"), place=replace(place, namespace="pid:[1]"))
    before = replace(entry("before"), place=replace(place, boot="earlier"))
    for job in (there, container, before):
        register(str(tmp_path), job)
    assert live_jobs(str(tmp_path)) == []
    left = [json.loads(p.read_text())["job_id"] for p in (tmp_path / "jobs").iterdir()]
    assert sorted(left) == ["container", "there"]


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"schema": 1}', '{"schema": 2, "pid": 1}'])
def test_foreign_files_are_ignored(tmp_path: Path, content: str) -> None:
    """A file that is not ours, or of a later version, is left alone."""
    (tmp_path / "jobs").mkdir()
    file = tmp_path / "jobs" / "x-1.json"
    file.write_text(content)
    assert live_jobs(str(tmp_path)) == []
    assert file.exists()


def test_unwritable_state_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where the state folder can't be made the job goes on, with one warning that names the way out."""
    file = tmp_path / "file"
    file.touch()
    with caplog.at_level(logging.WARNING):
        assert register(str(file), entry()) is None
    assert len(caplog.records) == 1
    assert "--state-dir" in caplog.records[0].message
    assert live_jobs(str(file)) == []
