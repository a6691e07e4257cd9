"""A corner of this machine for one test: launchers run in it as real processes, and must leave nothing.

Every process started here carries a token in its environment, so what is left is found wherever it hides.
Temporary and state folders are private. Nothing is mocked, every wait has a deadline.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self

from frun import registry
from tests.account.adds_up import adds_up

ROOT = Path(__file__).parents[2]
FRUN = (sys.executable, "-m", "frun")
TORCHRUN = (sys.executable, "-W", "ignore", "-m", "torch.distributed.run")
LIMIT_S = 180.0
GONE_S = 20.0
_TOKEN = "FRUN_TEST_SITE"
# With -u, print writes a line in pieces, and pieces of several workers mix on one pipe.
_PRINT = """\
def print(*words, file=None, flush=True):
    line = " ".join(map(str, words)) + "\\n"
    __import__("os").write(1 if file is None else file.fileno(), line.encode())
"""
_PREFIXES = (
    "PET_",
    "FRUN_",
    "GRPC_",
    "TORCHELASTIC_",
    "OMP_",
    "MASTER_",
    "PYTHON",
    "XDG_",
    "CUDA_",
)
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOGLEVEL", "TMPDIR", "LANG", "LC_ALL")


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How a launcher ended. A negative code is a signal."""

    code: int
    out: str
    err: str
    wall_s: float

    def lines(self) -> list[str]:
        """What was written to stdout, sorted, since workers write in any order."""
        return sorted(self.out.splitlines())

    def said(self, pattern: str) -> list[str]:
        """All matches of a pattern in stdout."""
        return re.findall(pattern, self.out)


class Running:
    """A launcher that runs; its output is read all the time."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.pid = process.pid
        self.started = time.monotonic()
        self._texts = {"out": bytearray(), "err": bytearray()}
        self._news = threading.Condition()
        self._threads = [
            threading.Thread(target=self._read, args=(name, stream), daemon=True)
            for name, stream in (("out", process.stdout), ("err", process.stderr))
            if stream is not None
        ]
        for thread in self._threads:
            thread.start()

    @property
    def out(self) -> str:
        """stdout so far."""
        return self._text("out")

    @property
    def err(self) -> str:
        """stderr so far."""
        return self._text("err")

    def expect(
        self, pattern: str, count: int = 1, *, limit_s: float = LIMIT_S, stream: str = "out"
    ) -> list[str]:
        """Wait until the pattern was found `count` times; return the matches."""
        deadline = time.monotonic() + limit_s
        with self._news:
            while len(found := re.findall(pattern, self._text(stream))) < count:
                left = deadline - time.monotonic()
                ended = not any(thread.is_alive() for thread in self._threads)
                if left <= 0 or ended:
                    raise AssertionError(
                        f"{pattern!r} seen {len(found)} of {count} times, "
                        f"{'it ended' if ended else f'in {limit_s:g} s'}\n"
                        f"--- stdout\n{self.out[-4000:]}\n--- stderr\n{self.err[-4000:]}"
                    )
                self._news.wait(min(left, 0.2))
        return found

    def send(self, signum: int) -> None:
        """Send a signal to the launcher only."""
        self.process.send_signal(signum)

    def wait(self, limit_s: float = LIMIT_S) -> Done:
        """Wait for its end. A launcher that doesn't end in time is killed, and the test fails."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(30)
            raise AssertionError(
                f"did not end within {limit_s:g} s: {self.process.args!r}\n"
                f"--- stdout\n{self.out[-4000:]}\n--- stderr\n{self.err[-4000:]}"
            ) from None
        wall_s = time.monotonic() - self.started
        for thread in self._threads:
            thread.join(5.0)  # a leftover process may hold the pipe: `Site.close` names it
        return Done(code=code, out=self.out, err=self.err, wall_s=wall_s)

    def close(self) -> None:
        """Kill it if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)
        for thread in self._threads:
            thread.join(5.0)

    def _text(self, name: str) -> str:
        return self._texts[name].decode(errors="replace")

    def _read(self, name: str, stream: IO[bytes]) -> None:
        while chunk := os.read(stream.fileno(), 65536):
            with self._news:
                self._texts[name] += chunk
                self._news.notify_all()
        with self._news:
            self._news.notify_all()
        stream.close()


@dataclass(slots=True)
class Site:
    """Folders, environment and processes of one test. Its end asserts that nothing is left."""

    cwd: Path
    """Where launchers are started."""
    temp: Path = field(init=False)
    """TMPDIR of all that runs here; short, since sockets are made in it."""
    state: Path = field(init=False)
    """XDG_STATE_HOME: the registry is below it."""
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    running: list[Running] = field(default_factory=list)
    keeps: tuple[str, ...] = ()
    """Patterns of names that may be left in the temporary folder. Logs of a job that failed always may."""

    def __enter__(self) -> Self:
        self.temp = Path(tempfile.mkdtemp(prefix="fe2e"))
        self.state = self.cwd / "state"
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        for each in self.running:
            each.close()
        left = self.left_processes(0.0 if kind else GONE_S)
        self.kill_left()
        found = [] if kind else self.left_files()
        shutil.rmtree(self.temp, ignore_errors=True)
        if kind is None:
            assert not left, f"processes left: {left}"
            assert not found, f"files left: {found}"
            adds_up(self.cwd)

    def script(self, name: str, source: str) -> str:
        """Write a script into the working folder; return its name. `print` is one write in it."""
        path = self.cwd / name
        path.parent.mkdir(parents=True, exist_ok=True)
        prelude = _PRINT if name.endswith(".py") and "print(" in source else ""
        path.write_text(prelude + textwrap.dedent(source), encoding="utf-8")
        return name

    def environment(self, more: Mapping[str, str | None] | None = None) -> dict[str, str]:
        """Return this process's environment without what launchers read, and with what is private."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_PREFIXES) and name not in _NAMES
        }
        env: dict[str, str | None] = {
            **kept,
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(self.temp),
            "XDG_STATE_HOME": str(self.state),
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            _TOKEN: self.token,
            **(more or {}),
        }
        return {name: value for name, value in env.items() if value is not None}

    def start(
        self,
        *args: str,
        env: Mapping[str, str | None] | None = None,
        program: Sequence[str] = FRUN,
        stdin: IO[bytes] | int = subprocess.DEVNULL,
        cwd: Path | None = None,
        prefix: Sequence[str] = (),
    ) -> Running:
        """Start a launcher. A variable that is None in `env` is not set. `prefix` goes in front."""
        process = subprocess.Popen(
            [*prefix, *program, *args],
            cwd=cwd or self.cwd,
            env=self.environment(env),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        job = Running(process)
        self.running.append(job)
        return job

    def run(
        self,
        *args: str,
        limit_s: float = LIMIT_S,
        env: Mapping[str, str | None] | None = None,
        program: Sequence[str] = FRUN,
        stdin: IO[bytes] | int = subprocess.DEVNULL,
        cwd: Path | None = None,
        prefix: Sequence[str] = (),
    ) -> Done:
        """Run a launcher to its end."""
        job = self.start(*args, env=env, program=program, stdin=stdin, cwd=cwd, prefix=prefix)
        return job.wait(limit_s)

    def left_processes(self, limit_s: float = GONE_S) -> list[str]:
        """Wait until no process of this site runs; return those that do after the limit."""
        deadline = time.monotonic() + limit_s
        while found := self.processes():
            if time.monotonic() >= deadline:
                return [f"{pid}: {command}" for pid, command in found.items()]
            threading.Event().wait(0.02)
        return []

    def processes(self) -> dict[int, str]:
        """Every live process that was started in this site, zombies left out, by pid."""
        wanted = f"{_TOKEN}={self.token}".encode()
        found: dict[int, str] = {}
        for name in os.listdir("/proc"):
            if not name.isdecimal():
                continue
            try:
                base = Path("/proc", name)
                if wanted not in (base / "environ").read_bytes():
                    continue
                if (base / "stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X"):
                    continue
                command = (base / "cmdline").read_bytes().replace(b"\0", b" ").strip()
            except OSError:
                continue
            found[int(name)] = command.decode(errors="replace")[:200]
        return found

    def kill_left(self) -> None:
        """End what is left, so that one failure doesn't become many."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def allow_remains_of_a_kill(self) -> None:
        """Let a killed agent's folders stay; the next reader of the registry removes its file there."""
        self.keeps = (r"frun_.*",)
        assert registry.live_jobs(str(self.state / "frun")) == []

    def left_files(self) -> list[str]:
        """What is left in the temporary folder (but `keeps`) and in the registry of jobs."""
        failed = any(each.process.returncode for each in self.running)
        keeps = (*self.keeps, *((r"frun_(?!run_).*",) if failed else ()))
        found = [
            name
            for name in sorted(os.listdir(self.temp))
            if not any(re.fullmatch(pattern, name) for pattern in keeps)
            and not name.startswith("torch")  # torchrun's leftovers, torch's compiler cache
        ]
        jobs = self.state / "frun" / "jobs"
        if jobs.is_dir():
            found += [f"jobs/{name}" for name in sorted(os.listdir(jobs))]
        return found


def is_alive(pid: int) -> bool:
    """True while a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def wait_gone(pids: Sequence[int], limit_s: float) -> list[int]:
    """Wait until none of these processes runs; return those that still do after the limit."""
    deadline = time.monotonic() + limit_s
    while left := [pid for pid in pids if is_alive(pid)]:
        if time.monotonic() >= deadline:
            return left
        threading.Event().wait(0.02)
    return []
