"""The log pump with real pipes, real processes and a real full disk."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from frun.agent.logfolder import make_log_folder
from frun.agent.logs import LogPump, WorkerStreams
from frun.agent.logs_console import ConsoleWriter
from frun.config import LogConfig, Std

ODD = b"\xe9\xff\0\rlone return\nhalf"


def config(**changes: object) -> LogConfig:
    """Return a LogConfig of four workers whose output is not touched, with changes."""
    values: dict[str, object] = {
        "log_dir": None,
        "redirects": (Std.NONE,) * 4,
        "tee": (Std.NONE,) * 4,
        "local_ranks_filter": None,
        "stdout_filters": (),
        "stderr_filters": (),
        "prefix_template": None,
        "error_file": None,
    }
    return LogConfig(**{**values, **changes})  # type: ignore[arg-type]


class Rig:
    """A pump whose consoles are pipes that the test reads to their end."""

    def __init__(self, log_dir: str, settings: LogConfig, *, read_console: bool = True) -> None:
        self.folder = make_log_folder(log_dir, "job")
        self._reads: list[int] = []
        self._writes: list[int] = []
        for _ in range(2):
            read, write = os.pipe()
            self._reads.append(read)
            self._writes.append(write)
        self.console: dict[int, bytes] = {1: b"", 2: b""}
        self.seen = threading.Condition()
        self._readers = [
            threading.Thread(target=self._copy, args=(std, fd))
            for std, fd in zip((1, 2), self._reads, strict=True)
        ]
        self._reading = read_console
        if read_console:
            for reader in self._readers:
                reader.start()
        self.pump = LogPump(
            config=settings,
            folder=self.folder,
            host="node-a",
            console_fds=(self._writes[0], self._writes[1]),
        )

    def _copy(self, std: int, fd: int) -> None:
        while chunk := os.read(fd, 65536):
            with self.seen:
                self.console[std] += chunk
                self.seen.notify_all()

    def drop_console(self) -> None:
        for fd in self._reads:
            os.close(fd)
        self._reads = []

    def read_console(self, lines: int) -> bytes:
        """Read this many lines of stdout, at the console's own pace."""
        shown = b""
        while shown.count(b"\n") < lines:
            shown += os.read(self._reads[0], 4096)
        return shown

    def open(self, local_rank: int = 0, generation: int = 1) -> WorkerStreams:
        return self.pump.open(
            generation=generation, local_rank=local_rank, rank=local_rank + 10, role_name="default"
        )

    def run(self, script: str, local_rank: int = 0, generation: int = 1) -> WorkerStreams:
        """Run Python code as a worker to its end, and drain what it wrote."""
        streams = self.open(local_rank, generation)
        process = spawn(script, streams)
        assert process.wait(20) == 0
        assert self.pump.drain([local_rank], 20)
        return streams

    def file(self, name: str = "stdout.log", local_rank: int = 0, generation: int = 1) -> bytes:
        return Path(self.folder.worker(generation, local_rank), name).read_bytes()

    def close(self) -> None:
        self.pump.close(0.5)
        # A writer that was stuck holds a number that is about to be another pipe's.
        for thread in threading.enumerate():
            if thread.name.startswith("frun-console"):
                thread.join(10)
        for fd in self._writes:
            os.close(fd)
        if self._reading:
            for reader in self._readers:
                reader.join(10)
        for fd in self._reads:
            os.close(fd)
        self._reads, self._writes = [], []


def spawn(script: str, streams: WorkerStreams) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", f"import os, sys\n{script}"],
        stdout=streams.stdout_fd,
        stderr=streams.stderr_fd,
    )
    streams.close_fds()
    return process


@contextlib.contextmanager
def rig(log_dir: Path, *, read_console: bool = True, **changes: object) -> Iterator[Rig]:
    made = Rig(str(log_dir), config(**changes), read_console=read_console)
    try:
        yield made
    finally:
        made.close()
    left = [
        t.name for t in threading.enumerate() if t.name.startswith(("frun-logs", "frun-console"))
    ]
    assert not left


def test_redirect_writes_bytes_as_they_came(tmp_path: Path) -> None:
    """A redirected stream's file is the worker's output byte for byte, and the console stays empty."""
    with rig(tmp_path, redirects=(Std.ALL,)) as r:
        r.run(f"os.write(1, {ODD!r}); os.write(2, b'err')")
        assert r.file() == ODD
        assert r.file("stderr.log") == b"err"
    assert r.console == {1: b"", 2: b""}


def test_tee_prefixes_whole_lines_and_replaces_odd_bytes(tmp_path: Path) -> None:
    """The console gets every line with its prefix; a lone return ends a line; the half line too."""
    with rig(tmp_path, tee=(Std.ALL,)) as r:
        r.run(f"os.write(1, {ODD!r}); os.write(2, b'warn\\n')")
        assert r.file() == ODD
    shown = "[default0]:\ufffd\ufffd\0\n[default0]:lone return\n[default0]:half\n"
    assert r.console == {1: shown.encode(), 2: b"[default0]:warn\n"}


def test_long_line_then_many_good_ones(tmp_path: Path) -> None:
    """A line of 5 MB is exact in the file, and all later lines reach the console (R42)."""
    script = "sys.stdout.write('x' * 5_000_000 + '\\n')\nfor i in range(100): print('good', i)"
    with rig(tmp_path, tee=(Std.OUT,)) as r:
        r.run(script)
        assert len(r.file()) == 5_000_001 + sum(len(f"good {i}\n") for i in range(100))
    lines = r.console[1].splitlines()
    assert lines[-100:] == [f"[default0]:good {i}".encode() for i in range(100)]
    assert sum(line.count(b"x") for line in lines) == 5_000_000


def test_half_line_waits_for_its_end(tmp_path: Path) -> None:
    """Two workers' halves never meet on one console line."""
    with rig(tmp_path, tee=(Std.OUT, Std.OUT)) as r:
        first, second = r.open(0), r.open(1)
        assert first.stdout_fd is not None
        assert second.stdout_fd is not None
        os.write(first.stdout_fd, b"fir")
        os.write(second.stdout_fd, b"second\n")
        with r.seen:
            assert r.seen.wait_for(lambda: r.console[1] == b"[default1]:second\n", 10)
        os.write(first.stdout_fd, b"st\n")
        first.close_fds()
        second.close_fds()
        assert r.pump.drain([0, 1], 10)
    assert r.console[1] == b"[default1]:second\n[default0]:first\n"


def test_prefix_template_knows_rank_host_and_leaves_unknown_names(tmp_path: Path) -> None:
    """The template's names are replaced with current values, unknown ones stay (R39)."""
    template = "${role_name} ${rank}/${local_rank}@${host} ${nonsense} $$ $: "
    with rig(tmp_path, tee=(Std.OUT,), prefix_template=template) as r:
        r.run("print('hi')")
    assert r.console[1] == b"default 10/0@node-a ${nonsense} $ $: hi\n"


def test_filter_hides_from_the_console_only(tmp_path: Path) -> None:
    """With --local-ranks-filter the files of all workers are complete, the console has one (R41)."""
    with rig(tmp_path, tee=(Std.OUT, Std.OUT), local_ranks_filter=frozenset({0, 7})) as r:
        r.run("print('zero')", 0)
        r.run("print('one')", 1)
        assert r.file(local_rank=1) == b"one\n"
    assert r.console[1] == b"[default0]:zero\n"


def test_filter_without_tee_sends_the_others_to_the_null_device(tmp_path: Path) -> None:
    """A worker outside the filter writes to the null device, one inside inherits the console."""
    with rig(tmp_path, local_ranks_filter=frozenset({0})) as r:
        inside, outside = r.open(0), r.open(1)
        assert (inside.stdout_fd, inside.stderr_fd) == (None, None)
        assert outside.stdout_fd is not None
        assert os.fstat(outside.stdout_fd).st_rdev == os.stat(os.devnull).st_rdev
        outside.close_fds()
        outside.close_fds()


def test_matching_lines_are_copied_once_per_attempt(tmp_path: Path) -> None:
    """Lines with a wanted word go to filtered_stdout.log, of all tee'd workers and with prefix."""
    with rig(
        tmp_path,
        tee=(Std.ALL, Std.OUT),
        stdout_filters=("loss", "ac,c"),
        stderr_filters=("Error",),
    ) as r:
        r.run("print('loss 1'); print('noise'); print('ValueError', file=sys.stderr)", 0)
        r.run("print('ac,c 2'); print('ValueError', file=sys.stderr)", 1)
        attempt = Path(r.folder.attempt(1))
    assert (attempt / "filtered_stdout.log").read_bytes() == (
        b"[default0]:loss 1\n[default1]:ac,c 2\n"
    )
    assert (attempt / "filtered_stderr.log").read_bytes() == b"[default0]:ValueError\n"


def test_each_generation_keeps_its_files(tmp_path: Path) -> None:
    """A restart makes a new attempt folder and leaves the old one alone (S03)."""
    with rig(tmp_path, redirects=(Std.OUT,)) as r:
        r.run("print('first')", generation=1)
        r.run("print('second')", generation=2)
        r.run("print('again')", generation=2)
        assert r.file(generation=1) == b"first\n"
        assert r.file(generation=2) == b"second\nagain\n"
        assert Path(r.folder.attempt(1)).name == "attempt_0"


def test_restarts_leak_no_descriptors(tmp_path: Path) -> None:
    """After many generations the pump holds what it held after the first."""
    with rig(tmp_path, tee=(Std.ALL,), stdout_filters=("x",)) as r:
        counts = []
        for generation in range(1, 21):
            streams = r.open(generation=generation)
            assert streams.stdout_fd is not None
            os.write(streams.stdout_fd, b"x\n")
            streams.close_fds()
            assert r.pump.drain([0], 10)
            counts.append(len(os.listdir("/proc/self/fd")))
        assert counts[0] == counts[-1]


def test_null_device_turns_files_off(tmp_path: Path) -> None:
    """With --log-dir /dev/null nothing is captured and the error file is empty text."""
    with rig(Path(os.devnull), tee=(Std.ALL,), redirects=(Std.ALL,)) as r:
        streams = r.open()
        assert (streams.stdout_fd, streams.stderr_fd) == (None, None)
        assert (streams.folder, streams.error_file) == ("", "")


def test_tail_keeps_the_last_lines_and_a_half_one(tmp_path: Path) -> None:
    """The last 20 lines of each captured stream can be read, the unfinished one included."""
    with rig(tmp_path, redirects=(Std.OUT,)) as r:
        r.run("for i in range(30): print(i)\nprint('no end', end='')")
        tail = r.pump.tail(0)
        assert tail.stdout == (*(str(i) for i in range(11, 30)), "no end")
        assert tail.stderr == ()
        assert r.pump.tail(3).stdout == ()


def test_drain_does_not_wait_for_a_grandchild(tmp_path: Path) -> None:
    """A grandchild that holds the pipe delays nothing, and the dead worker's half line is shown."""
    script = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
os.write(1, f"{child.pid}\\nhalf".encode())
"""
    with rig(tmp_path, tee=(Std.OUT,)) as r:
        r.run(script)
        pid, half = r.pump.tail(0).stdout
        os.kill(int(pid), signal.SIGKILL)  # it was alive all the time
        assert half == "half"
    assert r.console[1].endswith(b"[default0]:half\n")


def test_closed_console_stops_only_the_copying(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """When the console's reader has gone workers go on, files are complete, one warning (S14)."""
    with rig(tmp_path, tee=(Std.OUT,), read_console=False) as r:
        r.drop_console()
        with caplog.at_level(logging.WARNING):
            r.run("for i in range(10000): print('line', i)")
            r.run("print('later')", generation=2)
        assert r.file().count(b"\n") == 10000
    assert [rec.message for rec in caplog.records] == [
        "console stdout is closed: workers' lines are no longer copied to it, the workers go on"
    ]


def test_stuck_console_blocks_neither_files_nor_workers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A console that nobody reads (a pager, a stopped terminal) holds nothing back."""
    with rig(tmp_path, tee=(Std.OUT, Std.OUT), read_console=False) as r:
        streams = r.open()
        process = spawn("for i in range(2000): print('x' * 1000)", streams)
        assert process.wait(20) == 0
        assert r.pump.drain([0], 20)
        assert r.file() == (b"x" * 1000 + b"\n") * 2000
        with caplog.at_level(logging.WARNING):
            r.pump.close(0.2)
        assert [rec.message for rec in caplog.records] == [
            "console stdout did not take the last lines of the workers"
        ]
        r.drop_console()


def test_slow_console_gets_everything_at_the_end(tmp_path: Path) -> None:
    """Closing waits for a console that goes on reading, longer than for one that does not."""
    with rig(tmp_path, tee=(Std.OUT,), read_console=False) as r:
        r.run("for i in range(2000): print('x' * 1000)")
        closing = threading.Thread(target=r.pump.close, args=(0.5,))
        closing.start()
        shown = r.read_console(2000)
        closing.join(20)
        assert shown == (b"[default0]:" + b"x" * 1000 + b"\n") * 2000


def test_lines_beyond_the_buffer_are_counted() -> None:
    """What a stuck console can't take is left out in whole lines, and said when it reads again."""
    read, write = os.pipe()
    console = ConsoleWriter("stdout", write, max_waiting=100)
    filler = b"f" * 200_000 + b"\n"  # more than a pipe holds: the writer is stuck in it
    console.put(filler, 1)
    got = os.read(read, 1)
    for _ in range(5):
        console.put(b"l" * 49 + b"\n", 1)
    with open(read, "rb") as file:
        closing = threading.Thread(target=console.close, args=(5.0,))
        closing.start()
        lines = [file.readline() for _ in range(4)]
        closing.join(10)
    os.close(write)
    assert got + lines[0] == filler
    assert lines[1:3] == [b"l" * 49 + b"\n"] * 2
    assert lines[3] == b"[frun]: 3 lines left out here, the console was too slow\n"


def test_full_disk_is_one_warning(
    small_disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On a full disk workers run to their end, the console has every line, one warning (R43)."""
    with rig(small_disk, tee=(Std.ALL, Std.ALL)) as r, caplog.at_level(logging.WARNING):
        r.run("for i in range(3000): print('x' * 1000)", 0)
        r.run("print('from the second'); os.write(2, b'e' * 100000)", 1)
        r.run("print('next generation')", 0, generation=2)
    assert r.console[1].count(b"\n") == 3002
    assert [rec.message.split(" (")[-1] for rec in caplog.records[:1]] == [
        "No space left on device): workers go on, this output is dropped"
    ]
    assert [rec.message.split(" ", 1)[1] for rec in caplog.records[1:]] == [
        "bytes of workers' output could not be written"
    ]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)])
    if done.returncode:
        pytest.skip("mount is not allowed here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)
