"""Owns the copying of workers' lines to one console stream, in a thread that may block.

A console can be slow (a pager, a stopped terminal) or gone (`| head -1`). Neither may reach the files
or the workers, so lines wait in a bounded buffer here; what does not fit is left out and counted.
"""

import errno
import logging
import os
import select
import threading
import time
from collections import deque

logger = logging.getLogger(__name__)

MAX_WAITING = 16 * 1024 * 1024
"""Bytes that wait for a slow console before lines are left out."""
_WRITE_SIZE = 16 * 1024
_PATIENCE = 10


class ConsoleWriter:
    """Writes whole lines to a file descriptor from a thread of its own. Never closes it."""

    def __init__(self, name: str, fd: int, *, max_waiting: int = MAX_WAITING) -> None:
        """`name` is `stdout` or `stderr`, for the messages; `max_waiting` is in bytes."""
        self._name = name
        self._fd = fd
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._left_out = 0
        self._gone = False
        self._closing = False
        self._taken = 0  # bytes; only the thread writes it
        self._thread = threading.Thread(target=self._run, name=f"frun-console-{name}", daemon=True)
        self._thread.start()

    def put(self, lines: bytes, count: int) -> None:
        """Queue `count` complete lines. Never blocks; leaves them out when the buffer is full."""
        with self._changed:
            if self._gone or self._closing:
                return
            # A single block larger than the buffer is still shown when nothing else waits.
            if self._waiting and self._size + len(lines) > self._max_waiting:
                self._left_out += count
                return
            if self._left_out:
                self._append(self._notice())
            self._append(lines)
            self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """Write what waits and end the thread; give up when nothing is taken for `timeout_s`.

        A console that is slow but goes on reading gets everything, within _PATIENCE times that.
        """
        latest = time.monotonic() + _PATIENCE * timeout_s
        with self._changed:
            if self._left_out:
                self._append(self._notice())
            self._closing = True
            self._changed.notify()
        taken = -1
        while self._thread.is_alive() and taken != self._taken and time.monotonic() < latest:
            taken = self._taken
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            # The thread stops after the write that it is stuck in: the caller may close the
            # descriptor from here on, and its number may soon be somebody else's.
            self._gone = True
            logger.warning("console %s did not take the last lines of the workers", self._name)

    def _append(self, data: bytes) -> None:
        self._waiting.append(data)
        self._size += len(data)

    def _notice(self) -> bytes:
        count, self._left_out = self._left_out, 0
        return f"[frun]: {count} lines left out here, the console was too slow\n".encode()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if self._gone or not self._waiting:
                    return
                data = self._waiting.popleft()
                self._size -= len(data)
            try:
                self._write(data)
            except OSError as error:
                self._give_up(error)
                return

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view and not self._gone:
            try:
                count = os.write(self._fd, view[:_WRITE_SIZE])
                self._taken += count
                view = view[count:]
            except BlockingIOError:
                # Whoever shares the terminal made it non-blocking: wait for room. Level-triggered
                # and bounded, so that `close` is never waited for by a dead poll.
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll(1000)

    def _give_up(self, error: OSError) -> None:
        with self._changed:
            self._gone = True
            self._waiting.clear()
            self._size = 0
        why = "is closed" if error.errno in (errno.EPIPE, errno.EIO) else f"fails ({error})"
        logger.warning(
            "console %s %s: workers' lines are no longer copied to it, the workers go on",
            self._name,
            why,
        )
