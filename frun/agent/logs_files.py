"""Owns writing captured output to files whose disk may be full, read-only or gone.

Nothing here raises: what can't be written is dropped, counted, and said once.
"""

import contextlib
import errno
import logging
import os

logger = logging.getLogger(__name__)


class LogFile:
    """A log file that is only ever appended to, and whose trouble is not the writer's."""

    def __init__(self, path: str, trouble: "DiskTrouble") -> None:
        """Open it; if that fails everything written is dropped."""
        self.path = path
        self.users = 0  # streams that share it, under the pump's lock
        self._trouble = trouble
        self._fd: int | None = None
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(path, flags, 0o666)
        except OSError as error:
            trouble.report(path, error)

    def write(self, data: bytes) -> None:
        """Write all of it or drop the rest. The next call tries again: a disk may get room."""
        if self._fd is None:
            self._trouble.dropped += len(data)
            return
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            self._trouble.dropped += len(view)
            self._trouble.report(self.path, error)

    def close(self) -> None:
        """Close it. Safe to call twice."""
        if self._fd is not None:
            # Some file systems report a full disk or quota only here.
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = None


class DiskTrouble:
    """Says once per kind of fault that output can't be written, and at the end how much."""

    def __init__(self) -> None:
        self.dropped = 0
        """Bytes."""
        self._known: set[int] = set()

    def report(self, path: str, error: OSError) -> None:
        """Warn, unless this kind of fault was warned of before."""
        code = error.errno or errno.EIO
        if code in self._known:
            return
        self._known.add(code)
        logger.warning(
            "%s can not be written (%s): workers go on, this output is dropped",
            path,
            error.strerror or error,
        )

    def summarize(self) -> None:
        """Say how much was lost, if anything was."""
        if self.dropped:
            logger.warning("%d bytes of workers' output could not be written", self.dropped)
