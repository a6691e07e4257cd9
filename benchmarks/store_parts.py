"""The processes of `benchmarks.store`: agents' group stores, torch's TCPStore, and clients of either.

Each is told what to do over a pipe, and answers with the CPU time that it took.
"""

import asyncio
import contextlib
import os
import resource
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from typing import Any, TypeVar

from frun.agent.groupstore import GroupStore, Shard

T = TypeVar("T")
ADDRESS = "127.0.0.1"
LIMIT = timedelta(seconds=300)
THREADS = 32


def cpu_s() -> float:
    """Return the CPU time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Part:
    """A process that obeys orders, from the side of who gives them."""

    def __init__(self, context: SpawnContext, serve: Callable[..., None], *args: object) -> None:
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, *args), daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, *order: object) -> None:
        """Give an order without waiting for its end."""
        self._pipe.send(order)

    def hear(self) -> Any:
        """Return the answer to the oldest order."""
        answer = self._pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def ask(self, *order: object) -> Any:
        """Give an order and wait for its end."""
        self.tell(*order)
        return self.hear()

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def obey(pipe: Connection, orders: dict[str, Callable[..., object]]) -> None:
    """Carry out orders until the other side is gone."""
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            name, *args = pipe.recv()
            try:
                pipe.send(orders[name](*args))
            except Exception as error:  # noqa: BLE001 - told to who gave the order
                pipe.send(RuntimeError(f"{name}: {error!r}"))


def serve_agents(pipe: Connection, paths: Sequence[str]) -> None:
    """Be the group stores of some hosts, one for each path of a unix socket, on a loop of their own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    stores = [GroupStore("secret", "store") for _ in paths]

    def wait(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    async def call(function: Callable[[], T]) -> T:
        return function()

    def listen() -> list[int]:
        for store, path in zip(stores, paths, strict=True):
            wait(store.listen_unix(path))
        return [wait(store.listen_tcp(ADDRESS)) for store in stores]

    def begin(generation: int, shards: Sequence[Shard], first: int) -> float:
        before = cpu_s()
        for at, store in enumerate(stores):
            wait(call(partial(store.begin, generation, shards, first + at)))
        return cpu_s() - before

    obey(pipe, {"listen": listen, "begin": begin, "cpu": cpu_s})


def serve_tcpstore(pipe: Connection) -> None:
    """Be torch's TCPStore server, with libuv."""
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    from torch._C._distributed_c10d import TCPStore

    # Of its own it listens for IPv6 too, and then asks DNS for the names of IPv4 clients, one by one.
    listener = socket.socket()
    listener.bind((ADDRESS, 0))
    listener.listen(1024)
    store = TCPStore(
        ADDRESS,
        listener.getsockname()[1],
        None,
        True,
        wait_for_workers=False,
        use_libuv=True,
        master_listen_fd=listener.detach(),
    )
    obey(pipe, {"port": lambda: store.port, "cpu": cpu_s})


class Clients:
    """Some clients, each with a connection of its own; as many act at once as have a thread."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._clients: dict[int, Any] = {}
        self._pool = ThreadPoolExecutor(THREADS)

    def _each(self, do: Callable[[int, Any], object]) -> None:
        """Let each do something; those of one host at about the same time."""
        for _ in self._pool.map(do, *zip(*self._clients.items(), strict=True)):
            pass

    def connect_frun(self, paths: Sequence[str], generation: int) -> None:
        """Connect to the agents at these unix sockets, one for each rank."""
        from frun.worker.groupstore import GroupStore as Client

        for rank in self._ranks:
            client = self._clients[rank] = Client(paths[rank], generation, timeout=LIMIT)
            client.check([])

    def connect_tcp(self, port: int) -> None:
        """Connect to the TCPStore."""
        from torch._C._distributed_c10d import TCPStore

        def connect(_: int) -> TCPStore:
            return TCPStore(ADDRESS, port, None, False, timeout=LIMIT, wait_for_workers=False)

        self._clients.clear()
        stores = self._pool.map(connect, self._ranks)
        self._clients.update(zip(self._ranks, stores, strict=True))

    def renew(self, generation: int) -> None:
        """Go on in another generation with the same connections."""
        for client in self._clients.values():
            client.generation = generation

    def set_own(self, prefix: str) -> None:
        """Set each one's address."""
        value = os.urandom(128)
        self._each(lambda rank, client: client.set(f"{prefix}/rank_{rank}", value))

    def put(self, key: str) -> None:
        """Let the first one set a key."""
        next(iter(self._clients.values())).set(key, b"hot")

    def get(self, key: str) -> None:
        """Let each get a key."""
        self._each(lambda _, client: client.get(key))

    def add(self, key: str) -> None:
        """Let each count itself."""
        self._each(lambda _, client: client.add(key, 1))

    def wait(self, key: str) -> None:
        """Let each wait for a key."""
        self._each(lambda _, client: client.wait([key], LIMIT))

    def many(self, keys: Sequence[str], chosen: frozenset[int] | None) -> None:
        """Let each of the chosen ones (None: all) get all these keys at once."""
        wanted = list(keys)

        def read(rank: int, client: Any) -> None:
            if chosen is None or rank in chosen:
                client.multi_get(wanted)

        self._each(read)


def serve_clients(pipe: Connection, ranks: Sequence[int]) -> None:
    """Be some clients."""
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # it warns of each name that DNS does not know
    clients = Clients(ranks)
    obey(
        pipe,
        {
            "connect_frun": clients.connect_frun,
            "connect_tcp": clients.connect_tcp,
            "renew": clients.renew,
            "set": clients.set_own,
            "put": clients.put,
            "get": clients.get,
            "add": clients.add,
            "wait": clients.wait,
            "many": clients.many,
        },
    )
