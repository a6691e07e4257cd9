"""A wall clock that can be set for some processes only: the machine's own is never touched.

A library is compiled and preloaded that adds to what the C library says. Programs that ask the kernel
themselves (etcd) see the machine's clock.
"""

import shutil
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("wallclock.c")


class WallClock:
    """The clock of the processes that have its `environment`."""

    def __init__(self, folder: Path) -> None:
        """Compile the library into a folder. Where there is no C compiler `environment` is empty."""
        self._file = folder / "clock"
        self._file.write_bytes(bytes(8))
        self.environment: dict[str, str] = {}
        compiler = shutil.which("cc")
        if compiler is not None:
            library = folder / "wallclock.so"
            command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(_SOURCE)]
            subprocess.run(command, check=True, timeout=60)
            self.environment = {"LD_PRELOAD": str(library), "NOISE_CLOCK": str(self._file)}

    def set(self, ahead_s: int) -> None:
        """Let it be so far ahead of the machine's, at once."""
        with self._file.open("r+b") as file:
            file.write((ahead_s * 1_000_000_000).to_bytes(8, "little", signed=True))
