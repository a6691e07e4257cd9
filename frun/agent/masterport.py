"""MASTER_PORT: the socket at which a plain TCPStore answers, and one port for two services.

Owns listening sockets and bytes in transit. The TCPStore itself is torch's and runs in a process
that the zygote forks (`frun.worker.tcpstore`); etcd is run by `frun.rendezvous`.
"""

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from enum import StrEnum

from frun.errors import LaunchError

logger = logging.getLogger(__name__)

Serve = Callable[[socket.socket], Awaitable[int]]

FIRST_BYTES_S = 15.0
"""Seconds for a connection to say which service it wants; both kinds of client speak at once."""
TARGET_S = 60.0
"""Seconds that a connection waits for its service to be there."""
START_S = 10.0
"""Seconds that `MasterPort.close` gives a server that is just being started."""
_BACKLOG = 4096
_PIECE = 1 << 16


class PortInUse(LaunchError):
    """Another program listens at the wanted address and port."""


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens on all interfaces, of the family of an address literal.

    A loopback address is taken as it is. Port 0 takes a free one.

    Raises:
        PortInUse: another program has the port.
        LaunchError: it can't be listened on for another reason.
    """
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        raise LaunchError(f"{address!r} is no address literal to listen on") from None
    v6 = parsed.version == 6
    where = str(parsed) if parsed.is_loopback else ("::" if v6 else "0.0.0.0")
    sock = socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if v6 and not parsed.is_loopback:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((where, port))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"port {port} at {where} is in use by another program; "
                "free it or choose another --master-port"
            ) from error
        raise LaunchError(f"can not listen on {where} port {port}: {error}") from error
    return sock


class MasterPort:
    """Holds the port of one generation's TCPStore, and starts that store when it is wanted.

    Nothing is accepted here: the first connection waits in the kernel's queue until the process
    that `serve` starts accepts it. From then on the socket is that process's.
    """

    def __init__(self, address: str, serve: Serve, port: int = 0) -> None:
        """Listen at once, see `listen`; needs a running event loop.

        `serve` gets the listening socket, which it must not close, and returns the process id of
        who serves it.

        Raises:
            PortInUse: another program has the port.
            LaunchError: it can't be listened on for another reason.
        """
        self._loop = asyncio.get_running_loop()
        self._serve = serve
        self._socket: socket.socket | None = listen(address, port)
        self.port: int = self._socket.getsockname()[1]
        self._starting: asyncio.Task[None] | None = None
        self._pidfd: int | None = None
        self._loop.add_reader(self._socket, self._wanted)

    @property
    def is_served(self) -> bool:
        """True while a process serves the port."""
        return self._pidfd is not None

    async def close(self) -> None:
        """Let the port go and end the process that serves it. Can be repeated."""
        if self._starting is not None and not self._starting.done():
            # a process that is being forked must be known before it can be ended
            await asyncio.wait({self._starting}, timeout=START_S)
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        self._release()
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            self._forget()

    def _wanted(self) -> None:
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._starting = self._loop.create_task(self._start(self._socket))

    async def _start(self, sock: socket.socket) -> None:
        try:
            pid = await self._serve(sock)
            self._pidfd = os.pidfd_open(pid)
        except (LaunchError, OSError) as error:
            logger.error("no TCPStore at MASTER_PORT %s: %s", self.port, error)  # noqa: TRY400
        else:
            self._loop.add_reader(self._pidfd, self._died)
        finally:
            # without our copy a client is refused at once when the process that serves is gone
            self._release()

    def _died(self) -> None:
        logger.warning("the TCPStore at MASTER_PORT %s ended", self.port)
        self._forget()

    def _release(self) -> None:
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    def _forget(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None


class Service(StrEnum):
    """Who is behind a shared port."""

    ETCD = "etcd"
    """Speaks gRPC (HTTP/2) or TLS, and HTTP/1 for its health page."""
    STORE = "TCPStore"
    """Speaks torch's own protocol."""


def service_of(first: bytes) -> Service | None:
    """Tell which service a connection wants from its first bytes; None if more are needed."""
    if first[:1] == b"\x16":
        return Service.ETCD
    for start in (b"PRI ", b"GET ", b"POST "):
        if first.startswith(start):
            return Service.ETCD
        if start.startswith(first):
            return None
    return Service.STORE


class SharedPort:
    """One known port for the embedded etcd and the workers' TCPStore: reads which, and relays."""

    def __init__(self, address: str, port: int) -> None:
        """Listen at once, see `listen`; needs a running event loop.

        Raises:
            PortInUse: another program has the port.
            LaunchError: it can't be listened on for another reason.
        """
        self._loop = asyncio.get_running_loop()
        self._socket = listen(address, port)
        self.port: int = self._socket.getsockname()[1]
        self._targets: dict[Service, tuple[str, int]] = {}
        self._changed = asyncio.Event()
        self._relays: set[asyncio.Task[None]] = set()
        self._accepting = self._loop.create_task(self._accept())

    def lead_to(self, service: Service, port: int, host: str = "127.0.0.1") -> None:
        """Relay new connections for `service` to `host` and `port`; port 0: let them wait."""
        if port:
            self._targets[service] = (host, port)
        else:
            self._targets.pop(service, None)
        self._changed.set()
        self._changed = asyncio.Event()

    async def close(self) -> None:
        """Stop listening and end every relayed connection. Can be repeated."""
        tasks = [self._accepting, *self._relays]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()

    async def _accept(self) -> None:
        while True:
            try:
                client, _ = await self._loop.sock_accept(self._socket)
            except OSError as error:  # the connection was reset, or too many files are open
                logger.warning("can not accept a connection at port %s: %s", self.port, error)
                await asyncio.sleep(0.1)
                continue
            task = self._loop.create_task(self._relay(client))
            self._relays.add(task)
            task.add_done_callback(self._relays.discard)

    async def _relay(self, client: socket.socket) -> None:
        with client:
            client.setblocking(False)
            try:
                async with asyncio.timeout(FIRST_BYTES_S):
                    first, service = await self._first_bytes(client)
                async with asyncio.timeout(TARGET_S):
                    upstream = await self._connect(service)
            except (OSError, TimeoutError) as error:
                logger.info("dropped a connection to port %s: %s", self.port, error or "too slow")
                return
            with upstream:
                _prepare(client)
                _prepare(upstream)
                await self._both_ways(client, upstream, first)

    async def _first_bytes(self, client: socket.socket) -> tuple[bytes, Service]:
        first = b""
        while True:
            data = await self._loop.sock_recv(client, _PIECE)
            if not data:
                raise ConnectionResetError("closed before it said anything")
            first += data
            service = service_of(first)
            if service is not None:
                return first, service

    async def _connect(self, service: Service) -> socket.socket:
        while service not in self._targets:
            await self._changed.wait()
        host, port = self._targets[service]
        upstream = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        upstream.setblocking(False)
        try:
            await self._loop.sock_connect(upstream, (host, port))
        except BaseException:
            upstream.close()
            raise
        return upstream

    async def _both_ways(self, a: socket.socket, b: socket.socket, first: bytes) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._one_way(a, b, first))
                group.create_task(self._one_way(b, a, b""))
        except* OSError:
            pass  # one side is gone, so both connections end

    async def _one_way(self, source: socket.socket, sink: socket.socket, data: bytes) -> None:
        if data:
            await self._loop.sock_sendall(sink, data)
        while data := await self._loop.sock_recv(source, _PIECE):
            await self._loop.sock_sendall(sink, data)
        sink.shutdown(socket.SHUT_WR)


def _prepare(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
