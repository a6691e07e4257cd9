"""MASTER_PORT: a TCPStore that starts when it is wanted, and one port for two services."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from frun.agent.masterport import (
    MasterPort,
    PortInUse,
    Service,
    SharedPort,
    listen,
    service_of,
)
from frun.errors import LaunchError

LIMIT_S = 40.0
SERVE = "import sys; from frun.worker.tcpstore import serve; serve([int(sys.argv[1])], [])"


class Store:
    """Stands for the zygote: starts the real server on the socket it is given."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self.processes: list[subprocess.Popen[bytes]] = []

    async def serve(self, sock: socket.socket) -> int:
        """Start a process that serves the socket."""
        fd = sock.fileno()
        # not in a thread: the clients of a test may occupy them all
        process = subprocess.Popen([sys.executable, "-c", SERVE, str(fd)], pass_fds=[fd])
        self.processes.append(process)
        return process.pid

    async def ended(self) -> list[int]:
        """Return the exit statuses of what was started."""
        return [await asyncio.to_thread(p.wait, LIMIT_S) for p in self.processes]


def client(port: int, host: str = "127.0.0.1") -> TCPStore:
    """Return torch's client, with a time-out that fails the test in time."""
    return TCPStore(host, port, None, False, timedelta(seconds=LIMIT_S))


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_store_starts_with_the_first_connection(address: str) -> None:
    """Nothing runs until a client comes; two clients then share one store; close ends it."""

    async def story() -> None:
        store = Store()
        master = MasterPort(address, store.serve)
        assert master.port > 0
        assert store.processes == []
        a = await asyncio.to_thread(client, master.port, address)
        b = await asyncio.to_thread(client, master.port, address)
        await asyncio.to_thread(a.set, "k", "v")
        assert await asyncio.to_thread(b.get, "k") == b"v"
        assert master.is_served
        assert len(store.processes) == 1
        await master.close()
        assert await store.ended() == [-signal.SIGKILL]
        await master.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(address, master.port)

    asyncio.run(story())


def test_clients_that_come_while_it_starts_are_all_served() -> None:
    """Connections queue in the kernel until the server accepts them."""

    async def story() -> None:
        store = Store()
        master = MasterPort("127.0.0.1", store.serve)
        clients = await asyncio.gather(*(asyncio.to_thread(client, master.port) for _ in range(6)))
        sums = [await asyncio.to_thread(c.add, "n", 1) for c in clients]
        assert sums == [1, 2, 3, 4, 5, 6]
        await master.close()
        assert len(await store.ended()) == 1

    asyncio.run(story())


def test_a_port_nobody_asked_for_is_let_go() -> None:
    """Closing without a client leaves no process, and the port is free."""

    async def story() -> None:
        store = Store()
        master = MasterPort("127.0.0.1", store.serve)
        await master.close()
        assert store.processes == []
        again = MasterPort("127.0.0.1", store.serve, master.port)
        assert again.port == master.port
        await again.close()

    asyncio.run(story())


def test_closing_while_the_server_starts_leaves_no_process() -> None:
    """A generation that ends during the fork still ends what was forked."""

    async def story() -> None:
        store, asked, go = Store(), asyncio.Event(), asyncio.Event()

        async def slowly(sock: socket.socket) -> int:
            asked.set()
            await go.wait()
            return await store.serve(sock)

        master = MasterPort("127.0.0.1", slowly)
        _, writer = await asyncio.open_connection("127.0.0.1", master.port)
        async with asyncio.timeout(LIMIT_S):
            await asked.wait()
            closing = asyncio.create_task(master.close())
            await asyncio.sleep(0)
            go.set()
            await closing
        assert await store.ended() == [-signal.SIGKILL]
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    asyncio.run(story())


def test_a_store_that_died_is_reported_and_refuses(caplog: pytest.LogCaptureFixture) -> None:
    """Clients are refused at once instead of waiting in the queue of a port that nobody serves."""

    async def story() -> None:
        store = Store()
        master = MasterPort("127.0.0.1", store.serve)
        await asyncio.to_thread(client, master.port)
        store.processes[0].kill()
        async with asyncio.timeout(LIMIT_S):
            while master.is_served:
                await asyncio.sleep(0.005)
        await store.ended()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", master.port)
        await master.close()

    asyncio.run(story())
    assert "the TCPStore at MASTER_PORT" in caplog.text


def test_a_server_that_can_not_start_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """If no process can be started, the client is cut off and a line says why."""

    async def fails(sock: socket.socket) -> int:
        del sock
        raise LaunchError("no zygote")

    async def story() -> None:
        master = MasterPort("127.0.0.1", fails)
        reader, writer = await asyncio.open_connection("127.0.0.1", master.port)
        async with asyncio.timeout(LIMIT_S):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()
        with contextlib.suppress(ConnectionResetError):
            await writer.wait_closed()
        await master.close()

    asyncio.run(story())
    assert "no zygote" in caplog.text


def test_a_taken_port_names_address_and_port() -> None:
    """The error says which port, where, and what to do."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=f"port {port} at 0.0.0.0 is in use.*--master-port"):
            listen("192.0.2.1", port)
    with pytest.raises(LaunchError, match="'somewhere' is no address literal"):
        listen("somewhere", 0)


@pytest.mark.parametrize(
    ("address", "family"), [("10.0.0.1", socket.AF_INET), ("fe80::1%eth0", socket.AF_INET6)]
)
def test_all_interfaces_of_the_address_family(address: str, family: socket.AddressFamily) -> None:
    """A host's own address decides the family; IPv6 also takes IPv4 clients."""
    with listen(address, 0) as sock:
        assert sock.family == family
        assert sock.getsockname()[0] in ("0.0.0.0", "::")
        with socket.create_connection(("127.0.0.1", sock.getsockname()[1]), LIMIT_S):
            pass


@pytest.mark.parametrize(
    ("first", "service"),
    [
        (b"PRI * HTTP/2.0", Service.ETCD),
        (b"\x16\x03\x01", Service.ETCD),
        (b"GET /health", Service.ETCD),
        (b"P", None),
        (b"PO", None),
        (b"PX", Service.STORE),
        (b"\x00\x00", Service.STORE),
    ],
)
def test_first_bytes_tell_the_service(first: bytes, service: Service | None) -> None:
    """gRPC, TLS and HTTP go to etcd, the rest is torch's; a doubtful beginning waits for more."""
    assert service_of(first) is service


@contextlib.asynccontextmanager
async def echo(name: bytes) -> AsyncIterator[int]:
    """Serve: read to the end, then answer with a name and what was read."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(name + await reader.read())
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def say(port: int, *pieces: bytes) -> bytes:
    """Send, end the sending half, and return the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0)
    writer.write_eof()
    async with asyncio.timeout(LIMIT_S):
        data = await reader.read()
    writer.close()
    await writer.wait_closed()
    return data


def test_one_port_for_two_services() -> None:
    """Each connection reaches its service, half-closes and large transfers pass, nothing is left."""

    async def story() -> None:
        before = len(os.listdir("/proc/self/fd"))
        async with echo(b"etcd:") as etcd, echo(b"store:") as store:
            shared = SharedPort("127.0.0.1", 0)
            shared.lead_to(Service.ETCD, etcd)
            early = asyncio.create_task(say(shared.port, b"\x00early"))
            assert await say(shared.port, b"P", b"RI * HTTP/2.0") == b"etcd:PRI * HTTP/2.0"
            assert not early.done()
            shared.lead_to(Service.STORE, store)
            assert await early == b"store:\x00early"
            large = b"\x00" + os.urandom(3_000_000)
            assert await say(shared.port, large) == b"store:" + large
            shared.lead_to(Service.STORE, 0)
            waiting = asyncio.create_task(say(shared.port, b"\x01"))
            await say(shared.port, b"\x16tls")
            await shared.close()
            with contextlib.suppress(ConnectionError):
                assert await waiting == b""
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", shared.port)
        assert len(os.listdir("/proc/self/fd")) <= before

    asyncio.run(story())


def test_a_real_store_behind_a_shared_port() -> None:
    """torch's client works through the relay, and the next generation's store is another one."""

    async def story() -> None:
        store = Store()
        shared = SharedPort("127.0.0.1", 0)
        for generation in ("1", "2"):
            master = MasterPort("127.0.0.1", store.serve)
            shared.lead_to(Service.STORE, master.port)
            a = await asyncio.to_thread(client, shared.port)
            assert not await asyncio.to_thread(a.check, ["k"])
            await asyncio.to_thread(a.set, "k", generation)
            assert await asyncio.to_thread(a.get, "k") == generation.encode()
            await master.close()
        await shared.close()
        await store.ended()

    asyncio.run(story())
