"""Looks at the host itself: memory, the disk of the logs, the clock. All it has are warnings.

Training goes on without room for logs and in spite of a clock that is set; what the lack of memory ends, the
kernel ends.
"""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from frun.devices.contract import Fact, FaultClass, Surroundings
from frun.protocol.health import warning

_STALLED = 10.0
"""Per cent of the last ten seconds in which nothing ran for want of memory."""
_LEAST_MEMORY = 0.02
"""Share of the memory that should be available."""
_LEAST_DISK = 64 << 20
"""Bytes that should be free where the logs are."""
_STEP_S = 1.0
"""A clock that moves by more against the one that never steps was set."""


class Host:
    """What the kernel says."""

    def __init__(self, around: Surroundings, root: Path = Path("/")) -> None:
        """`root` is where `proc` and `sys` are found."""
        self._clock = around.clock
        self._logs = around.log_folder
        self._proc = root / "proc"
        self._pressure = _own_group(root) or self._proc / "pressure" / "memory"
        self._offset: float | None = None

    def poll(self) -> Iterable[Fact]:
        """Return what is short or odd; see `Plugin`."""
        return (*self._memory(), *self._disk(), *self._steps())

    def _memory(self) -> Iterator[Fact]:
        stalled = re.search(r"^full avg10=([\d.]+)", _read(self._pressure), re.MULTILINE)
        if stalled and float(stalled[1]) >= _STALLED:
            text = f"everything stood still for {stalled[1]} % of the last 10 s for want of memory"
            yield warning("memory", text, FaultClass.HOST)
        sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB", _read(self._proc / "meminfo"), re.MULTILINE))
        left, total = int(sizes.get("MemAvailable", 0)), int(sizes.get("MemTotal", 0))
        if "MemAvailable" in sizes and left < _LEAST_MEMORY * total:
            text = f"{left // 1024} MiB of {total // 1024} MiB of memory are left"
            yield warning("memory-left", text, FaultClass.HOST)

    def _disk(self) -> Iterator[Fact]:
        try:
            found = os.statvfs(self._logs)
        except OSError as error:
            text = f"the log folder {self._logs} can not be looked at: {error.strerror}"
            yield warning("disk", text, FaultClass.STORAGE)
            return
        left = found.f_bavail * found.f_frsize
        if left < _LEAST_DISK:
            text = f"{left >> 20} MiB are left for the log folder {self._logs}"
            yield warning("disk", text, FaultClass.STORAGE)

    def _steps(self) -> Iterator[Fact]:
        offset = self._clock.wall() - self._clock.monotonic()
        before, self._offset = self._offset, offset
        if before is not None and abs(offset - before) > _STEP_S:
            text = f"the clock was set by {offset - before:+.1f} s"
            yield warning("clock", text, FaultClass.HOST)


def plugin(around: Surroundings) -> Host:
    """Make it; every host has one."""
    return Host(around)


def _own_group(root: Path) -> Path | None:
    """Return where the control group of this process tells its pressure, if it does."""
    for line in _read(root / "proc" / "self" / "cgroup").splitlines():
        number, _, name = line.split(":", 2)
        path = root / "sys" / "fs" / "cgroup" / name.lstrip("/") / "memory.pressure"
        if number == "0" and path.exists():
            return path
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
