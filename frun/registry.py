"""Owns the files by which commands on this machine find the jobs that run on it, and the latest that ended.

One file per agent in `<state dir>/jobs`. It holds how to reach the job's etcd, never a password. When an
agent ends its file moves to `<state dir>/ended`, with a copy of its event log if that goes with a temporary
log folder; the latest ones stay. An agent that was killed leaves its file; whoever reads it notices and
moves it. The state folder may be in a home that several machines or containers share: each moves and
removes its own files only.
"""

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from urllib.parse import quote

logger = logging.getLogger(__name__)

SCHEMA = 1
KEPT_AGENTS = 50
"""How many agents that ended are remembered, the latest ones."""
KEPT_BYTES = 64 << 20
"""What their copied event logs may take together; the latest is kept whatever its size."""
_LIVE, _ENDED = "jobs", "ended"
_MAX_QUOTED = 120  # bytes of a file name; the id itself is inside the file


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a process id means something."""

    machine: str
    """The machine's (or container's) own name."""
    boot: str
    """The kernel's id of this boot; empty if it does not say."""
    namespace: str
    """The process id namespace; empty if the kernel does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEntry:
    """One agent of one job on this machine."""

    job_id: str
    endpoints: tuple[str, ...]
    """etcd endpoints as `host:port` or URL."""
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    user: str | None = None
    """etcd user; the password is never stored."""
    host: str = ""
    """Host id of the agent."""
    pid: int
    """The agent."""
    pid_started: int
    """Its start in the kernel's clock ticks since boot: a pid alone may be used again."""
    place: Place
    started_at: float
    """Wall clock, seconds since 1970, for people."""
    log_folder: str = ""
    events_file: str = ""
    """Copy of the event log, for an agent that ended and whose log folder went; else empty."""


def register(state_dir: str, entry: JobEntry) -> str | None:
    """Write the agent's file and return its path; on trouble warn and return None.

    A job doesn't depend on it: only commands without endpoint and id do.
    """
    folder = os.path.join(os.path.abspath(state_dir), _LIVE)
    name = quote(entry.job_id, safe="").replace(".", "%2E")[:_MAX_QUOTED]
    path = os.path.join(folder, f"{name}-{entry.pid}{_machine_suffix(entry.place)}")
    try:
        _write(path, entry)
    except OSError as error:
        logger.warning(
            "the job is not listed in %s (%s): name it to `frun status` by --rdzv-endpoint and"
            " --job-id, or give a --state-dir that can be written",
            folder,
            error.strerror,
        )
        return None
    return path


def unregister(path: str | None) -> None:
    """Remove the agent's file. One that is gone already, or None, is fine."""
    if path is not None:
        with contextlib.suppress(OSError):
            os.unlink(path)


def conclude(path: str | None) -> str | None:
    """Remember the agent as one that has ended, instead of as one that lives; return where. Never raises.

    The oldest ones beyond the bounds are forgotten.
    """
    entry = None if path is None else _read(path)
    if path is None or entry is None:
        return None
    folder = os.path.join(os.path.dirname(os.path.dirname(path)), _ENDED)
    name = os.path.basename(path).removesuffix(_machine_suffix(entry.place))
    # A pid comes again, and what ended earlier under it must stay.
    kept = os.path.join(folder, f"{name}-{entry.pid_started}{_machine_suffix(entry.place)}")
    try:
        _write(kept, entry)
        _forget_old(folder, _machine_suffix(entry.place))
    except OSError as error:
        logger.warning("the job that ended here is not remembered: %s", error)
        return None
    finally:
        unregister(path)
    return kept


def keep_events(path: str | None, events_file: str) -> None:
    """Copy the event log of an agent that has ended, since its log folder is about to go. Never raises."""
    entry = None if path is None else _read(path)
    if path is None or entry is None:
        return
    copy = _copy_of(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        with open(events_file, "rb") as source, open(os.open(copy, flags, 0o600), "wb") as file:
            shutil.copyfileobj(source, file)
        _write(path, replace(entry, events_file=copy))
        _forget_old(os.path.dirname(path), _machine_suffix(entry.place))
    except OSError as error:
        logger.warning("the event log of the job that ended here is not kept: %s", error)


def _copy_of(path: str) -> str:
    return f"{path.removesuffix('.json')}.jsonl"


def live_jobs(state_dir: str) -> list[JobEntry]:
    """Return the entries of agents that live, the oldest first; dead ones are moved to those that ended."""
    here = current_place()
    entries = []
    for path, entry in _entries(state_dir, _LIVE):
        if entry.place == here:
            if process_started(entry.pid) == entry.pid_started:
                entries.append(entry)
            else:
                conclude(path)
        elif entry.place.machine == here.machine and entry.place.boot != here.boot:
            conclude(path)  # this machine has booted since
    return sorted(entries, key=_by_age)


def ended_jobs(state_dir: str) -> list[JobEntry]:
    """Return the entries of agents that ended, the oldest first, of all machines that share the folder."""
    return sorted((entry for _, entry in _entries(state_dir, _ENDED)), key=_by_age)


def _by_age(entry: JobEntry) -> tuple[float, int]:
    return entry.started_at, entry.pid


def _entries(state_dir: str, kind: str) -> Iterator[tuple[str, JobEntry]]:
    folder = os.path.join(os.path.abspath(state_dir), kind)
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        if name.endswith(".json"):
            path = os.path.join(folder, name)
            entry = _read(path)
            if entry is not None:
                yield path, entry


def _machine_suffix(place: Place) -> str:
    return f"@{quote(place.machine, safe='')}.json"


def _write(path: str, entry: JobEntry) -> None:
    """Write a file at once, for its owner only."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with open(os.open(temporary, flags, 0o600), "w", encoding="utf-8") as file:
            json.dump({"schema": SCHEMA, **asdict(entry)}, file)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _forget_old(folder: str, suffix: str) -> None:
    """Remove what is beyond the bounds, the oldest first."""
    ended = []
    for name in os.listdir(folder):
        if name.endswith(suffix):
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                ended.append((os.stat(path).st_mtime_ns, path))
    total = 0
    for index, (_, path) in enumerate(sorted(ended, reverse=True)):
        copy = _copy_of(path)
        with contextlib.suppress(OSError):
            total += os.stat(copy).st_size
        if index and (index >= KEPT_AGENTS or total > KEPT_BYTES):
            for each in (path, copy):
                with contextlib.suppress(OSError):
                    os.unlink(each)


def process_started(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if there is no such process.

    A zombie counts as none: nobody works in it any more.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            data = file.read()
    except OSError:
        return None
    # The name, in parentheses, may hold anything: fields are counted from its end.
    fields = data[data.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def current_place() -> Place:
    """Return the place that this process's own id belongs to."""
    boot = namespace = ""
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return Place(machine=os.uname().nodename, boot=boot, namespace=namespace)


def _read(path: str) -> JobEntry | None:
    """Return one file's entry; None if it can't be read or is from another version."""
    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
        if document.get("schema") != SCHEMA:
            return None
        known = {name: document[name] for name in JobEntry.__slots__ if name in document}
        known["endpoints"] = tuple(_texts(known["endpoints"]))
        known["place"] = Place(**known["place"])
        entry = JobEntry(**known)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.debug("registry file %s can not be read: %s", path, error)
        return None
    return entry if isinstance(entry.pid, int) and isinstance(entry.job_id, str) else None


def _texts(values: Sequence[object]) -> list[str]:
    return [str(value) for value in values]
