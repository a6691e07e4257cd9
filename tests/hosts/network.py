"""Hosts on one machine: network namespaces that are plugged into one bridge, and what can befall them.

Owns namespaces, links and the processes inside. What runs there is the business of others. The bridge
has a namespace of its own, so nothing of it is seen by the machine or by another run of the tests.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_RUN = Path("/run/netns")
_PREFIX = "frunt"
_CLONE_NEWNET = 0x40000000
_TURN = threading.Event()
"""Never set: to wait a moment for what has no event."""


def missing() -> str:
    """Return why hosts can't be made here; empty when they can."""
    if os.geteuid() != 0:
        return "hosts need root"
    if shutil.which("ip") is None:
        return "hosts need the program `ip`: apt-get install iproute2"
    return ""


def until(done: Callable[[], object], *, within_s: float, what: Callable[[], str] | str) -> None:
    """Ask again and again until `done()` is true. Raises AssertionError with `what` when time is up."""
    deadline = time.monotonic() + within_s
    while not done():
        if time.monotonic() > deadline:
            text = what if isinstance(what, str) else what()
            raise AssertionError(f"not within {within_s:g} s: {text}")
        _TURN.wait(0.02)


@dataclass(slots=True, kw_only=True)
class Host:
    """One machine: a namespace with one card `eth0`."""

    name: str
    """Name in this run, also the machine's own name."""
    address: str
    """What others reach it at."""
    second: str
    """A second address on the same card."""
    space: str
    """Name of the namespace."""
    switch: str
    """Namespace of the bridge."""
    port: str
    """This host's port there."""
    ends: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        output: Path,
        etc_hosts: str | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a program on this host; what it writes is appended to `output`.

        With `etc_hosts` it sees that text as /etc/hosts, and a name server that never answers.
        """
        prepare = 'hostname "$1"; shift; '
        if etc_hosts is not None:
            files = output.with_suffix(".hosts"), output.with_suffix(".resolv")
            files[0].write_text(etc_hosts)
            files[1].write_text(f"nameserver {self.address.rpartition('.')[0]}.250\n")
            prepare += (
                f"mount --bind {files[0]} /etc/hosts; mount --bind {files[1]} /etc/resolv.conf; "
            )
        shell = ["sh", "-c", prepare + 'exec "$@"', "sh", self.name, *command]
        with output.open("ab") as out:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.space, "unshare", "-u", "-m", *shell],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.ends.append(process)
        return process

    def pids(self) -> list[int]:
        """Return every living process of this host."""
        wanted = os.stat(_RUN / self.space).st_ino
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    if os.stat(f"/proc/{entry}/ns/net").st_ino == wanted:
                        found.append(int(entry))
        return found

    def unplug(self) -> None:
        """Pull the cable: the card loses its carrier."""
        _ip("-n", self.switch, "link", "set", self.port, "down")

    def cut(self) -> None:
        """Lose every packet, both ways, while the card sees nothing wrong."""
        _ip("-n", self.switch, "link", "set", self.port, "nomaster")

    def mend(self) -> None:
        """Undo `unplug` and `cut`."""
        _ip("-n", self.switch, "link", "set", self.port, "master", "br0", "up")

    def freeze(self) -> None:
        """Stop every process, as a machine that hangs."""
        self._signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them go on."""
        self._signal_all(signal.SIGCONT)

    def kill(self, *, silently: bool = True) -> None:
        """Lose the machine: every process at once; peers hear nothing of it if `silently`."""
        if silently:
            self.cut()
        self._signal_all(signal.SIGSTOP)  # nobody cleans up
        self._signal_all(signal.SIGKILL)
        until(lambda: not self.pids(), within_s=5, what=lambda: f"{self.name} runs {self.pids()}")
        self.reap()

    def reap(self) -> None:
        """Collect the exit statuses of what was started here and has ended."""
        for process in self.ends:
            process.poll()

    def connect(self, address: str, port: int, timeout_s: float = 2.0) -> socket.socket:
        """Return a connection as made from this host."""
        made: list[socket.socket | OSError] = []

        def inside() -> None:
            libc = ctypes.CDLL(None, use_errno=True)
            with (_RUN / self.space).open() as space:
                if libc.setns(space.fileno(), _CLONE_NEWNET) != 0:
                    made.append(OSError(ctypes.get_errno(), "setns"))
                    return
            try:
                made.append(socket.create_connection((address, port), timeout_s))
            except OSError as error:
                made.append(error)

        thread = threading.Thread(target=inside)  # the namespace is the thread's alone
        thread.start()
        thread.join()
        if isinstance(made[0], OSError):
            raise made[0]
        return made[0]

    def _signal_all(self, signum: int) -> None:
        """Signal all processes, and those that were made meanwhile."""
        known: set[int] = set()
        while new := set(self.pids()) - known:
            for pid in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)
            known |= new


class Network:
    """A bridge and the hosts at it. Use as a context manager: nothing of it stays, however it ends."""

    def __init__(self, names: Iterable[str], *, ipv6: bool = False) -> None:
        """`ipv6`: the hosts have IPv6 addresses only."""
        self._ipv6 = ipv6
        self._token = f"{_PREFIX}{os.getpid()}-{os.urandom(2).hex()}"
        self._switch = f"{self._token}-sw"
        self.hosts: dict[str, Host] = {}
        self._names = tuple(names)

    def __getitem__(self, name: str) -> Host:
        """Return a host by name."""
        return self.hosts[name]

    def __enter__(self) -> "Network":
        """Make it."""
        try:
            _ip("netns", "add", self._switch)
            _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "br0", "up")
            for number, name in enumerate(self._names, start=1):
                self.hosts[name] = self._plug_in(name, number)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Remove it; fail if anything still runs there."""
        left = self._remove()
        assert not left, f"processes were left behind: {left}"

    def _plug_in(self, name: str, number: int) -> Host:
        space, port = f"{self._token}-{name}", f"v{number}"
        _ip("netns", "add", space)
        host = Host(
            name=name,
            address=f"fd09::{number:x}" if self._ipv6 else f"10.9.0.{number}",
            second=f"fd09::1:{number:x}" if self._ipv6 else f"10.9.1.{number}",
            space=space,
            switch=self._switch,
            port=port,
        )
        _ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "eth0", "netns", space)
        for address in (host.address, host.second):
            length = ["/64", "nodad"] if self._ipv6 else ["/16"]
            _ip("-n", space, "addr", "add", f"{address}{length[0]}", "dev", "eth0", *length[1:])
        _ip("-n", space, "link", "set", "lo", "up")
        _ip("-n", space, "link", "set", "eth0", "up")
        host.mend()
        return host

    def _remove(self) -> list[str]:
        left = []
        for host in self.hosts.values():
            for pid in host.pids():
                left.append(f"{host.name}: {pid} {_command(pid)}")
            host.kill(silently=False)
            for process in host.ends:
                process.wait(5)
        for space in [path.name for path in _RUN.glob(f"{self._token}-*")]:
            _ip("netns", "del", space)
        return left


def sweep() -> None:
    """Remove what tests that were killed themselves have left: processes, namespaces, folders."""
    for path in _abandoned(_RUN):
        Host(name="", address="", second="", space=path.name, switch="", port="").kill(
            silently=False
        )
        _ip("netns", "del", path.name)
    for path in _abandoned(Path(tempfile.gettempdir())):
        shutil.rmtree(path)


def _abandoned(folder: Path) -> list[Path]:
    """Return what has the number of a dead process in its name."""
    owners = {
        path: path.name[len(_PREFIX) :].partition("-")[0] for path in folder.glob(f"{_PREFIX}*-*")
    }
    return [
        path
        for path, owner in owners.items()
        if owner.isdigit() and not Path(f"/proc/{owner}").exists()
    ]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    except OSError:
        return "(gone)"


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
