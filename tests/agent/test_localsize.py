"""How many workers a machine may run (R09), with made-up control groups and devices."""

import os
import sys
from pathlib import Path

import pytest

from frun.agent.localsize import (
    ask_torch,
    cgroup_quota,
    cpu_allowance,
    visible_count,
    worker_count,
)
from frun.errors import LaunchError, UsageError

NO_DEVICES = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


def groups(folder: Path, member: str, files: dict[str, str]) -> tuple[Path, Path]:
    """Make a proc folder and a tree of control groups; return both."""
    proc, root = folder / "proc", folder / "cgroup"
    proc.mkdir()
    (proc / "cgroup").write_text(member)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return proc, root


@pytest.mark.parametrize(
    ("member", "files", "quota"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/cpu.max": "100000 100000\n", "a/b/cpu.max": "max 100000\n"}, 1),
        ("0::/a/b\n", {"cpu.max": "50000 100000\n", "a/b/cpu.max": "200000 100000\n"}, 0.5),
        ("0::/\n", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/gone\n", {"cpu.max": "max 100000\n"}, None),
        (
            "5:cpu,cpuacct:/a\n1:name=systemd:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "250000\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            2.5,
        ),
        (
            "5:cpu:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            None,
        ),
        ("", {}, None),
    ],
)
def test_the_quota_of_control_groups(
    tmp_path: Path, member: str, files: dict[str, str], quota: float | None
) -> None:
    """The smallest quota on the way up counts; what is not visible does not."""
    assert cgroup_quota(*groups(tmp_path, member, files)) == quota


@pytest.mark.parametrize(("quota", "most"), [("50000", 1), ("100000", 1), ("100000000", 4096)])
def test_affinity_and_quota_bound_the_workers(tmp_path: Path, quota: str, most: int) -> None:
    """Never more than either, never less than one."""
    proc, root = groups(tmp_path, "0::/\n", {"cpu.max": f"{quota} 100000\n"})
    assert cpu_allowance(proc, root) == min(most, len(os.sched_getaffinity(0)))


def test_affinity_is_obeyed() -> None:
    """Bound to one processor, `cpu` and `auto` mean one worker."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert cpu_allowance() == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("devices", "count"),
    [
        (None, 4),
        ("", 0),
        ("0,1", 2),
        ("3", 1),
        ("0,9,1", 1),
        ("-1", 0),
        ("0,-1,2", 1),
        ("GPU-8932,MIG-1", 2),
        (" 1 , 2", 2),
    ],
)
def test_visible_devices(devices: str | None, count: int) -> None:
    """CUDA's rule: the list ends at the first name that is no device."""
    assert visible_count(devices, 4) == count


def test_a_device_backend_that_is_not_installed_is_refused() -> None:
    """A typing error in --nproc-per-node is told with what could stand there."""
    with pytest.raises(UsageError, match=r"PET_NPROC_PER_NODE: 'gpus'.*auto, cpu, gpu, xpu"):
        worker_count(
            "gpus", source="PET_NPROC_PER_NODE", python=sys.executable, environment=NO_DEVICES
        )


def test_an_interpreter_that_can_not_answer_is_named(tmp_path: Path) -> None:
    """No such program, and one that fails."""
    with pytest.raises(LaunchError, match="/no/python"):
        ask_torch("auto", python="/no/python", environment={})
    with pytest.raises(LaunchError, match="could not count devices"):
        ask_torch("auto", python=sys.executable, environment={"PYTHONHOME": str(tmp_path)})
