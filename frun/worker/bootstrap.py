"""Turns a child that was just forked from the zygote into what `python -u script args` would be.

Owns the child's session, signals, streams, environment and `__main__`, and the choice between running
in the fork and executing a fresh interpreter. Which processes exist, and for how long, is the zygote's.
"""

import ctypes
import importlib
import json
import os
import pkgutil
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.machinery import all_suffixes
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from frun.protocol.channel import WORKER_VARIABLES
from frun.worker import runtime
from frun.worker.channel import open_channel

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36

_RESTORED_BY_EXEC = (signal.SIGPIPE, signal.SIGXFSZ)
told: list[Callable[[BaseException, TracebackType | None], None]] = []
"""Who is told of an exception that leaves the script. A process has one bottom of its stack."""


def prctl(option: int, value: int | bytes) -> None:
    """Call prctl(2). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    argument = value if isinstance(value, bytes) else ctypes.c_ulong(value)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def die_with_parent(parent: int, signum: int) -> None:
    """Have the kernel send `signum` when the parent dies; end now if it is dead already."""
    prctl(PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(1)


@dataclass(slots=True, kw_only=True)
class Origin:
    """What the zygote was before it changed anything, for its children to go back to."""

    bare: frozenset[str]
    """Modules of a fresh interpreter: a script's folder can't shadow those."""
    python: str
    handlers: Mapping[int, Any]
    ignored: frozenset[int]
    environment: Mapping[str, str]
    comm: bytes
    forkable: bool = True
    why: str = ""
    """Why workers can't be forked."""

    @classmethod
    def take(cls, bare: frozenset[str]) -> "Origin":
        """Look at this process."""
        handlers = {
            int(number): signal.getsignal(number)
            for number in signal.valid_signals()
            if number not in (signal.SIGKILL, signal.SIGSTOP)
        }
        with open("/proc/self/comm", "rb") as file:
            comm = file.read().rstrip(b"\n")
        return cls(
            bare=bare,
            python=sys.orig_argv[0],
            handlers=handlers,
            ignored=frozenset(n for n, h in handlers.items() if h is signal.SIG_IGN),
            environment=dict(os.environ),
            comm=comm,
        )


@dataclass(slots=True, kw_only=True)
class Launch:
    """What a child shall become."""

    mode: str
    """`script`, `module`, `program`, `run_path`, or `call`: a function of ours."""
    entry: str
    args: tuple[Any, ...]
    python: str
    env: Mapping[str, str]
    stdin: str
    exec_: bool
    prefix: tuple[str, ...]
    fds: tuple[int, ...]
    """Descriptors that came with it; stdout and stderr are taken from these."""
    out: int | None = None
    err: int | None = None
    folder: str | None = None
    """What goes to the front of sys.path."""
    is_folder: bool = False
    """The entry is a folder with a `__main__.py`."""

    @classmethod
    def parse(cls, data: bytes, fds: tuple[int, ...]) -> "Launch":
        """Read what the agent wrote; `out` and `err` are places in `fds`."""
        fields = json.loads(data)
        for name in ("out", "err"):
            if fields[name] is not None:
                fields[name] = fds[fields[name]]
        fields["args"] = tuple(fields["args"])
        fields["prefix"] = tuple(fields["prefix"])
        return cls(**fields, fds=fds)

    def command(self) -> list[str]:
        """Return the command line of a fresh process."""
        flag = ["-m"] if self.mode == "module" else []
        python = [] if self.mode == "program" else [self.python, "-u", *flag]
        return [*self.prefix, *python, self.entry, *self.args]


def begin(
    launch: Launch, origin: Origin, inject: ModuleType | None, *, parent: int, tell: int
) -> None:
    """Make this child a worker, or execute one. Returns only if it goes on in this process.

    `tell` gets JSON lines for the zygote: how the worker starts, or why it does not.
    """
    try:
        os.setsid()
        die_with_parent(parent, signal.SIGKILL)
        _streams(launch)
        if launch.mode == "call":
            _signals(origin, fresh=False)
            prctl(PR_SET_NAME, b"frun-helper")
            _say(tell, how="call")
            os.close(tell)
            _call(launch)
        how, why = choose(launch, origin)
        _signals(origin, fresh=how == "exec")
        _say(tell, how=how, why=why)
        if how == "exec":
            _execute(launch, tell)
        os.close(tell)
        prctl(PR_SET_NAME, origin.comm)
        set_title(" ".join(launch.command()))
        _environment(launch, origin)
        _like_new(launch, origin)
        rendezvous = inject.install(os.environ) if inject is not None else None
        channel = open_channel(os.environ)
        if channel is not None:
            told.append(channel.raised)
            if rendezvous is not None:
                folder = os.path.dirname(os.environ["FRUN_CHANNEL"])
                mine = runtime.Runtime(channel, rendezvous, os.environ, folder)
                runtime.started.append(mine)
                if "FRUN_DRILLS" in os.environ:
                    mine.allow_drills()
                mine.compare_every = int(os.environ.get("FRUN_COMPARE_REPLICAS", "0"))
                mine.check_gradients = os.environ.get("FRUN_CHECK_GRADIENTS", "")
        for name in WORKER_VARIABLES:
            os.environ.pop(name, None)
    except Exception as error:  # noqa: BLE001 - top of the child: reported, then it ends
        _fail(tell, f"{type(error).__name__}: {error}")


def choose(launch: Launch, origin: Origin) -> tuple[str, str]:
    """Return `fork` or `exec`, and why it is exec although fork was asked for."""
    if launch.exec_ or launch.mode == "program" or launch.prefix:
        return "exec", ""
    if not origin.forkable:
        return "exec", origin.why
    if launch.python != origin.python:
        return "exec", f"{launch.python} is not the zygote's interpreter, {origin.python}"
    changed = _python_variables(launch.env) ^ _python_variables(origin.environment)
    if changed:
        return "exec", f"{min(changed)[0]} differs from the zygote's"
    if launch.mode == "module":
        launch.folder = None if sys.flags.safe_path else os.getcwd()
    else:
        try:
            kind = os.stat(launch.entry).st_mode
            readable = os.access(launch.entry, os.R_OK)
        except OSError:
            return "exec", f"{launch.entry} can't be opened"
        packed = pkgutil.get_importer(absolute(launch.entry)) is not None
        if packed and stat.S_ISDIR(kind):
            launch.folder, launch.is_folder = absolute(launch.entry), True
        elif packed or not readable or not stat.S_ISREG(kind):
            return "exec", f"{launch.entry} is not a readable script"
        elif not sys.flags.safe_path:
            launch.folder = os.path.dirname(os.path.realpath(launch.entry))
    shadow = shadowed(launch.folder, origin.bare) if launch.folder else None
    if shadow:
        return "exec", f"{shadow} hides a module that is already imported"
    return "fork", ""


def shadowed(folder: str, bare: Iterable[str]) -> str | None:
    """Return the path in `folder` that would be imported in place of a module that is loaded.

    A fresh interpreter would find it first, since `folder` is first on its path. Modules in `bare` are
    loaded before that in every interpreter.
    """
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    suffixes = sorted(all_suffixes(), key=len, reverse=True)
    for name in names:
        path = os.path.join(folder, name)
        suffix = next((s for s in suffixes if name.endswith(s)), "")
        module = name.removesuffix(suffix)
        loaded = sys.modules.get(module)
        if loaded is None or module in bare or module == "__main__":
            continue
        if not suffix:
            inits = (os.path.join(path, "__init__" + s) for s in suffixes)
            path = next((init for init in inits if os.path.exists(init)), "")
        file = getattr(loaded, "__file__", None)
        if path and (file is None or os.path.realpath(file) != os.path.realpath(path)):
            return path
    return None


def _python_variables(env: Mapping[str, str]) -> set[tuple[str, str]]:
    return {(name, value) for name, value in env.items() if name.startswith("PYTHON")}


def absolute(path: str) -> str:
    """Put the working folder in front, as the interpreter does for a script: nothing is normalised."""
    return os.path.join(os.getcwd(), path)


def _say(tell: int, **words: str) -> None:
    os.write(tell, json.dumps(words).encode() + b"\n")


def _fail(tell: int, text: str) -> NoReturn:
    try:
        _say(tell, error=text)
    except OSError:
        # It was told already that the worker runs: then the worker's own stderr is the place.
        os.write(2, f"frun: the worker could not be started: {text}\n".encode(errors="replace"))
    os._exit(127)


def _streams(launch: Launch) -> None:
    if launch.stdin == "null":
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
    for fd, target in ((launch.out, 1), (launch.err, 2)):
        if fd is not None:
            os.dup2(fd, target)
    if launch.mode != "call":
        for fd in launch.fds:
            os.close(fd)


def _signals(origin: Origin, *, fresh: bool) -> None:
    """Go back to the handlers and mask of a new process; ignored at the start stays ignored."""
    signal.set_wakeup_fd(-1)
    for number, handler in origin.handlers.items():
        if fresh and number in _RESTORED_BY_EXEC:
            signal.signal(number, signal.SIG_DFL)
        elif handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _execute(launch: Launch, tell: int) -> NoReturn:
    # The streams are in place; all else that is open belongs to the zygote or its libraries.
    os.closerange(3, tell)
    os.closerange(tell + 1, 1 << 20)
    command = launch.command()
    try:
        os.execvpe(command[0], command, plain_environment(launch))
    except OSError as error:
        _fail(tell, f"can't run {command[0]!r}: {error.strerror}")


def plain_environment(launch: Launch) -> dict[str, str]:
    """Return the environment for a program that has nothing of frun inside."""
    return {name: value for name, value in launch.env.items() if name not in WORKER_VARIABLES}


def _call(launch: Launch) -> NoReturn:
    """Run a function of ours in this child and end with it."""
    status = 1
    try:
        name, _, function = launch.entry.partition(":")
        getattr(importlib.import_module(name), function)(launch.fds, *launch.args)
        status = 0
    finally:
        if status:
            sys.excepthook(*sys.exc_info())
        os._exit(status)


def _environment(launch: Launch, origin: Origin) -> None:
    os.environ.clear()
    os.environ.update(launch.env)
    if launch.env.get("TZ") != origin.environment.get("TZ"):
        time.tzset()


def _like_new(launch: Launch, origin: Origin) -> None:
    """Draw anew what a process draws when it starts."""
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
    threads = launch.env.get("OMP_NUM_THREADS", "")
    if torch is not None and threads != origin.environment.get("OMP_NUM_THREADS", ""):
        # OpenMP has read the zygote's value when torch was imported.
        torch.set_num_threads(int(threads) if threads.isdecimal() else os.cpu_count() or 1)


def set_title(title: str) -> None:
    """Show `title` in ps, cut to the room that the command line had. Does nothing where it can't."""
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46])
    except (OSError, IndexError, ValueError):
        return
    room = end - start
    if room < 2:
        return
    text = os.fsencode(title)[: room - 2]
    # Another last byte than zero tells the kernel that the title is text up to the first zero.
    ctypes.memmove(start, text + b"\0" * (room - len(text) - 1) + b" ", room)
