"""This host: what it is and what it allows. `look` reads, `judge` decides and is pure."""

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from frun.agent.localsize import ask_torch, cpu_allowance
from frun.config import LaunchConfig
from frun.doctor.findings import Finding, failure, note, ok, warning
from frun.errors import LaunchError
from frun.version import __version__

GIB = 1 << 30
_FDS = 64
"""Descriptors of an agent with neither workers nor peers."""
_FDS_PER_WORKER, _FDS_PER_HOST = 16, 4
_THREADS_PER_WORKER = 64
"""torch's own, the data loader's, and a margin."""
_SHM_LEAST = 64 << 20
"""What a container gets by default: too little for data loaders that share batches."""
UNLIMITED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What was read of this host. Sizes in bytes."""

    description: str
    torch: str
    """Version of torch in the workers' interpreter's environment; empty if it is not known here."""
    devices: tuple[str, int] | None
    """Kind and number of accelerators that the workers' torch sees; None: none."""
    torch_trouble: str
    """Why the workers' interpreter can not be used; empty if it can."""
    cpus: int
    fds: int
    """Soft limit of open files; UNLIMITED."""
    tasks_left: int
    """Processes and threads that may still be made; UNLIMITED."""
    shm_total: int
    memory_left: int
    log_folder: str
    log_left: int
    log_writable: bool
    temp_folder: str
    temp_left: int
    state_folder: str
    state_writable: bool
    busy_ports: tuple[tuple[str, int], ...] = ()
    """Flag and number of the ports that this agent is to listen at and that are taken."""


def look(config: LaunchConfig, environment: Mapping[str, str], *, listens: bool) -> HostFacts:
    """Read this host. Asks the workers' torch for devices, which takes seconds.

    `listens`: this host is the one that listens at --master-port.
    """
    workers = config.workers
    devices, trouble = None, ""
    try:
        devices = ask_torch("auto", python=workers.python, environment=environment)
    except LaunchError as error:
        trouble = str(error)
    log_folder = config.logs.log_dir or tempfile.gettempdir()
    return HostFacts(
        description=(
            f"{platform.node()}: {platform.system()} {platform.release()}, Python"
            f" {platform.python_version()}, frun {__version__}"
        ),
        torch=_version("torch"),
        devices=devices,
        torch_trouble=trouble,
        cpus=cpu_allowance(),
        fds=_limit(resource.RLIMIT_NOFILE),
        tasks_left=_tasks_left(Path("/sys/fs/cgroup"), Path("/proc/self")),
        shm_total=_total("/dev/shm"),
        memory_left=_memory_left(Path("/proc/meminfo")),
        log_folder=log_folder,
        log_left=_left(log_folder),
        log_writable=_writable(log_folder),
        temp_folder=tempfile.gettempdir(),
        temp_left=_left(tempfile.gettempdir()),
        state_folder=config.job.state_dir,
        state_writable=_writable(config.job.state_dir),
        busy_ports=tuple(_busy_ports(config, listens=listens)),
    )


def judge(facts: HostFacts, config: LaunchConfig) -> list[Finding]:
    """Return what these facts mean for this job."""
    return [
        ok("host", f"{facts.description}, {facts.cpus} usable cpus"),
        *_torch(facts, config),
        *_limits(facts, config),
        *_space(facts, config),
        *(
            failure("port", f"{flag} {port} is in use on this host: give another one")
            for flag, port in facts.busy_ports
        ),
    ]


def _torch(facts: HostFacts, config: LaunchConfig) -> Iterator[Finding]:
    nproc = config.workers.nproc
    if facts.torch_trouble:
        yield failure("torch", facts.torch_trouble)
        return
    yield ok("torch", f"{facts.torch or 'found'}, with {config.workers.python}")
    if facts.devices is None:
        if nproc > facts.cpus:
            yield warning("devices", f"no accelerator, and {nproc} workers on {facts.cpus} cpus")
        else:
            yield ok("devices", f"no accelerator: {nproc} workers on {facts.cpus} cpus")
        return
    kind, count = facts.devices
    text = f"{count} {kind} for {nproc} workers"
    yield warning("devices", f"{text}: several share one") if nproc > count else ok("devices", text)


def _limits(facts: HostFacts, config: LaunchConfig) -> Iterator[Finding]:
    nproc, hosts = config.workers.nproc, config.job.max_hosts
    need = _FDS + _FDS_PER_WORKER * nproc + _FDS_PER_HOST * hosts
    text = f"{_amount(facts.fds)} open files, the agent needs about {need}"
    enough = facts.fds == UNLIMITED or facts.fds >= need
    yield ok("limits", text) if enough else failure("limits", f"{text}: ulimit -n")
    need = _THREADS_PER_WORKER * nproc
    text = f"{_amount(facts.tasks_left)} more processes and threads, workers may need {need}"
    enough = facts.tasks_left == UNLIMITED or facts.tasks_left >= need
    yield ok("limits", text) if enough else warning("limits", f"{text}: ulimit -u, pids.max")


def _space(facts: HostFacts, config: LaunchConfig) -> Iterator[Finding]:
    shm = f"/dev/shm has {_size(facts.shm_total)}"
    if facts.shm_total <= _SHM_LEAST:
        yield warning(
            "shared memory", f"{shm}: data loaders may end with SIGBUS (docker --shm-size)"
        )
    else:
        yield ok("shared memory", shm)
    memory = f"{_size(facts.memory_left)} of memory for {config.workers.nproc} workers"
    short = facts.memory_left < GIB // 2 * config.workers.nproc
    yield (
        warning("memory", f"{memory}: torch alone takes half a GiB each")
        if short
        else ok("memory", memory)
    )
    for check, folder, left, writable in (
        ("logs", facts.log_folder, facts.log_left, facts.log_writable),
        ("temporary", facts.temp_folder, facts.temp_left, True),
    ):
        if not writable:
            yield failure(
                check, f"{folder} can not be written to: name another folder with --log-dir"
            )
        elif left < GIB:
            yield warning(check, f"{folder} has {_size(left)} left")
        else:
            yield ok(check, f"{folder} has {_size(left)} left")
    if not facts.state_writable:
        yield note(
            "registry",
            f"{facts.state_folder} can not be written to: frun status needs --rdzv-endpoint and"
            " --job-id, and nothing is kept for frun report",
        )


def _busy_ports(config: LaunchConfig, *, listens: bool) -> Iterator[tuple[str, int]]:
    wanted = []
    if listens and config.rendezvous.master_port:
        wanted.append(("--master-port", config.rendezvous.master_port))
    if config.job.metrics_port is not None:
        wanted.append(("--metrics-port", config.job.metrics_port))
    for flag, port in wanted:
        try:
            socket.create_server(("", port)).close()
        except OSError:
            yield flag, port


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _limit(kind: int) -> int:
    soft, _ = resource.getrlimit(kind)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _tasks_left(groups: Path, proc: Path) -> int:
    """Return what the tightest control group leaves; the user's own limit counts its processes elsewhere."""
    left = []
    group = _read(proc / "cgroup").strip().rpartition(":")[2].lstrip("/")
    for folder in (groups / group, *(groups / group).parents):
        if not folder.is_relative_to(groups):
            break
        most, used = _read(folder / "pids.max").strip(), _read(folder / "pids.current").strip()
        if most.isdecimal() and used.isdecimal():
            left.append(int(most) - int(used))
    soft = _limit(resource.RLIMIT_NPROC)
    if soft != UNLIMITED and os.geteuid() != 0:
        left.append(soft)
    return min(left, default=UNLIMITED)


def _memory_left(path: Path) -> int:
    for line in _read(path).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _total(folder: str) -> int:
    try:
        return shutil.disk_usage(folder).total
    except OSError:
        return 0


def _left(folder: str) -> int:
    try:
        return shutil.disk_usage(_existing(folder)).free
    except OSError:
        return 0


def _writable(folder: str) -> bool:
    return os.access(_existing(folder), os.W_OK | os.X_OK)


def _existing(folder: str) -> str:
    """Return the folder, or the nearest one above it that exists."""
    path = os.path.abspath(folder)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _amount(limit: int) -> str:
    return "any number of" if limit == UNLIMITED else str(limit)


def _size(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / (1 << 20):.0f} MiB"
