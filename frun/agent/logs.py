"""Owns the pipes of workers whose output is redirected or tee'd, and the files it goes to.

Starting and stopping workers belongs to the supervisor, folders to `logfolder`, the console to
`logs_console`. A worker never writes to a file itself: a full disk, a closed console or a slow one
must not reach it. One thread, `frun-logs`, reads all pipes; the event loop takes no part.
"""

import contextlib
import fcntl
import logging
import os
import selectors
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from frun.agent.logfolder import LogFolder
from frun.agent.logs_console import ConsoleWriter
from frun.agent.logs_files import DiskTrouble, LogFile
from frun.agent.logs_lines import LineSplitter, line_prefix, printable
from frun.config import LogConfig, Std

logger = logging.getLogger(__name__)

TAIL_LINES = 20
_TAIL_LINE_BYTES = 2000
_READ_SIZE = 64 * 1024
_PIPE_SIZE = 256 * 1024  # lets a worker run on while one write to a slow disk takes its time


@dataclass(slots=True, kw_only=True)
class WorkerStreams:
    """What a new worker process is given. The caller closes the descriptors after the spawn."""

    stdout_fd: int | None
    """Write end for descriptor 1; None: inherit the console."""
    stderr_fd: int | None
    """Write end for descriptor 2; None: inherit the console."""
    folder: str
    """Absolute path of this worker's log folder; empty when files are off."""
    error_file: str
    """Value of TORCHELASTIC_ERROR_FILE; empty when files are off."""

    def close_fds(self) -> None:
        """Close this process's copies of the write ends. Safe to call twice."""
        for fd in (self.stdout_fd, self.stderr_fd):
            if fd is not None:
                os.close(fd)
        self.stdout_fd = self.stderr_fd = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """The last lines a worker wrote, oldest first; empty for a stream that is not captured."""

    stdout: tuple[str, ...] = ()
    stderr: tuple[str, ...] = ()


class LogPump:
    """Moves workers' output from pipes to files and console.

    Bytes reach the files as they came. Lines reach the console whole and prefixed. Public methods may
    be called from any thread.
    """

    def __init__(
        self,
        *,
        config: LogConfig,
        folder: LogFolder,
        host: str,
        console_fds: tuple[int, int] = (1, 2),
    ) -> None:
        """Start the thread. `host` is the name that `${host}` in a prefix template stands for."""
        self._config = config
        self._folder = folder
        self._host = host
        self._lock = threading.Lock()
        self._newest: dict[tuple[int, Std], _Stream] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._trouble = DiskTrouble()
        self._filtered: dict[str, LogFile] = {}
        self._stopping = False
        self._closed = False
        self._consoles = {
            std: ConsoleWriter(_NAMES[std], fd)
            for std, fd in zip((Std.OUT, Std.ERR), console_fds, strict=True)
            if folder.on and any(bits & std for bits in config.tee)
        }
        self._thread = threading.Thread(target=self._run, name="frun-logs", daemon=True)
        self._thread.start()

    def open(self, *, generation: int, local_rank: int, rank: int, role_name: str) -> WorkerStreams:
        """Prepare folder, files and pipes for one worker of one generation.

        Trouble with the disk is a warning, never an error. Touches the disk. Raises OSError only
        when the process has no descriptors left.
        """
        folder = self._folder.worker(generation, local_rank)
        if folder:
            try:
                os.makedirs(folder, exist_ok=True)
            except OSError as error:
                self._trouble.report(folder, error)
        prefix = line_prefix(
            self._config.prefix_template,
            role_name=role_name,
            rank=rank,
            local_rank=local_rank,
            host=self._host,
        )
        fds: list[int | None] = []
        try:
            for std in (Std.OUT, Std.ERR):
                fds.append(self._open_stream(std, generation, local_rank, prefix))
        except OSError:
            for fd in fds:
                if fd is not None:
                    os.close(fd)
            raise
        return WorkerStreams(
            stdout_fd=fds[0],
            stderr_fd=fds[1],
            folder=folder,
            error_file=self._folder.error_file(generation, local_rank),
        )

    def note(self, generation: int, name: str, text: str) -> str:
        """Add to a file in a generation's folder; return its path, empty if there is none.

        Touches the disk; trouble with it is a warning.
        """
        folder = self._folder.attempt(generation)
        if not folder:
            return ""
        path = os.path.join(folder, name)
        try:
            os.makedirs(folder, exist_ok=True)
            with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
        except OSError as error:
            self._trouble.report(path, error)
            return ""
        return path

    def tail(self, local_rank: int) -> Tail:
        """Return the last lines of the newest worker at this local rank."""
        with self._lock:
            out = self._newest.get((local_rank, Std.OUT))
            err = self._newest.get((local_rank, Std.ERR))
        return Tail(
            stdout=out.tail() if out is not None else (),
            stderr=err.tail() if err is not None else (),
        )

    def drain(self, local_ranks: Iterable[int], timeout_s: float) -> bool:
        """Move everything that these workers, now dead, had written.

        Doesn't wait for the end of the pipes, which a grandchild may hold for long, nor for the
        console (`close` does). Returns False if a disk took more than `timeout_s` seconds.
        """
        ranks = frozenset(local_ranks)
        done = threading.Event()

        def command() -> None:
            for stream in self._streams():
                if stream.local_rank in ranks:
                    self._read_out(stream)
            done.set()

        return not self._submit(command) or done.wait(timeout_s)

    def close(self, timeout_s: float = 2.0) -> None:
        """Move what is left, close the files, end the threads. May be called twice.

        Gives up on a disk, and on a console that reads nothing, after `timeout_s` seconds each.
        """
        if self._closed:
            return

        def command() -> None:
            for stream in self._streams():
                self._read_out(stream)
            self._stopping = True

        self._submit(command)
        self._closed = True
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("log files did not take the last output within %.1f s", timeout_s)
        for console in self._consoles.values():
            console.close(timeout_s)
        self._trouble.summarize()

    def _open_stream(self, std: Std, generation: int, local_rank: int, prefix: bytes) -> int | None:
        config = self._config
        tee = bool(_bits(config.tee, local_rank) & std)
        captured = tee or bool(_bits(config.redirects, local_rank) & std)
        on_console = config.local_ranks_filter is None or local_rank in config.local_ranks_filter
        if not captured or not self._folder.on:
            # As under torchrun, --log-dir /dev/null turns redirection off with the files.
            return None if on_console else os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        attempt = self._folder.attempt(generation)
        name = _NAMES[std]
        words = config.stdout_filters if std is Std.OUT else config.stderr_filters
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        with contextlib.suppress(OSError):  # a limit on pipe memory: the default size works too
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
        worker = self._folder.worker(generation, local_rank)
        stream = _Stream(
            fd=read_end,
            local_rank=local_rank,
            prefix=prefix,
            file=LogFile(os.path.join(worker, f"{name}.log"), self._trouble),
            console=self._consoles.get(std) if tee and on_console else None,
            words=tuple(words) if tee else (),
            filtered=self._filtered_file(attempt, name) if tee and words else None,
        )
        with self._lock:
            self._newest[local_rank, std] = stream
        self._submit(lambda: self._add(stream))
        return write_end

    def _filtered_file(self, attempt: str, name: str) -> LogFile:
        path = os.path.join(attempt, f"filtered_{name}.log")
        with self._lock:
            file = self._filtered.get(path)
            if file is None:
                file = self._filtered[path] = LogFile(path, self._trouble)
            file.users += 1
            return file

    def _submit(self, command: Callable[[], None]) -> bool:
        with self._lock:
            if self._closed:
                return False
            self._commands.append(command)
            os.eventfd_write(self._wake, 1)
        return True

    def _run(self) -> None:
        """Serve pipes and commands until closed. Runs in the pump's thread, as all below."""
        while not self._stopping:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._read(key.data)
                    continue
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            while self._commands:
                self._commands.popleft()()
        for stream in self._streams():
            self._end(stream)
        with self._lock:
            self._selector.close()
            os.close(self._wake)

    def _streams(self) -> list["_Stream"]:
        return [key.data for key in self._selector.get_map().values() if key.data is not None]

    def _add(self, stream: "_Stream") -> None:
        self._selector.register(stream.fd, selectors.EVENT_READ, stream)

    def _read(self, stream: "_Stream") -> int:
        """Read once; return the number of bytes, 0 when nothing is there or the pipe has ended."""
        try:
            chunk = os.read(stream.fd, _READ_SIZE)
        except BlockingIOError:
            return 0
        if not chunk:
            self._end(stream)
            return 0
        try:
            stream.take(chunk)
        except Exception:  # a fault in here must not block a worker that goes on writing
            logger.exception("a worker's output was lost (local rank %d)", stream.local_rank)
        return len(chunk)

    def _read_out(self, stream: "_Stream") -> None:
        """Read what a dead worker can have left: never more than the pipe holds."""
        left = fcntl.fcntl(stream.fd, fcntl.F_GETPIPE_SZ)
        while left > 0 and not stream.ended:
            count = self._read(stream)
            if count == 0:
                break
            left -= count
        stream.flush()

    def _end(self, stream: "_Stream") -> None:
        if stream.ended:
            return
        self._selector.unregister(stream.fd)
        stream.end()
        if stream.filtered is not None:
            with self._lock:
                stream.filtered.users -= 1
                if not stream.filtered.users:
                    self._filtered.pop(stream.filtered.path).close()


class _Stream:
    """One captured stream of one worker. Used by the pump's thread, except for `tail`."""

    def __init__(
        self,
        *,
        fd: int,
        local_rank: int,
        prefix: bytes,
        file: LogFile,
        console: ConsoleWriter | None,
        words: tuple[str, ...],
        filtered: LogFile | None,
    ) -> None:
        self.fd = fd
        self.local_rank = local_rank
        self.ended = False
        self._prefix = prefix
        self._file = file
        self._console = console
        self._words = words
        self.filtered = filtered
        self._lines = LineSplitter()
        self._last: tuple[bytes, ...] = ()

    def take(self, chunk: bytes) -> None:
        self._file.write(chunk)
        self._give_out(self._lines.feed(chunk))

    def flush(self) -> None:
        self._give_out(self._lines.flush())

    def end(self) -> None:
        self.ended = True
        self.flush()
        self._file.close()
        os.close(self.fd)

    def tail(self) -> tuple[str, ...]:
        half = self._lines.pending()
        lines = (*self._last, half) if half else self._last
        return tuple(
            line[:_TAIL_LINE_BYTES].decode("utf-8", "replace") for line in lines[-TAIL_LINES:]
        )

    def _give_out(self, lines: list[bytes]) -> None:
        if not lines:
            return
        # Replaced, never changed: `tail` reads it from another thread.
        self._last = (*self._last, *lines[-TAIL_LINES:])[-TAIL_LINES:]
        if self._console is None and self.filtered is None:
            return
        shown = [self._prefix + printable(line) + b"\n" for line in lines]
        if self._console is not None:
            self._console.put(b"".join(shown), len(shown))
        if self.filtered is not None:
            matching = [
                line
                for line in shown
                if any(word in line[len(self._prefix) :].decode() for word in self._words)
            ]
            if matching:
                self.filtered.write(b"".join(matching))


_NAMES = {Std.OUT: "stdout", Std.ERR: "stderr"}


def _bits(per_rank: Sequence[Std], local_rank: int) -> Std:
    return per_rank[local_rank] if local_rank < len(per_rank) else Std.NONE
