"""The store that process groups are made in: frun's group store beside one TCPStore of torch with libuv.

    python -m benchmarks.store [--clients 64,512,4096,8192] [--json FILE] [--plot FILE.png]

n clients on n/8 hosts do what c10d does for a default group and 8 subgroups: each sets its address
(`set`), gets a key that one of them has set (`hot`), takes part in nine barriers of an add and a wait
(`barrier`), and reads the addresses of its groups (`exchange`). Then a recovery: frun begins a generation
and its clients keep their connections; torch's clients connect again. Real servers, real clients; the
clients share two processes, 32 act at once in each, and of more than 64 clients only some read all addresses.

Two cores can't show that n/8 servers work at the same time, so two times are told: `wall`, with all servers
and clients on this machine, and `busy`, the CPU time of the server that has the most to do: the TCPStore,
or the agent that holds the hot key, the barriers and its share of all addresses. No store can be faster than
its busiest server, whatever the number of machines.
"""

import argparse
import json
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from benchmarks.paper import draw_store
from benchmarks.store_parts import ADDRESS, Part, serve_agents, serve_clients, serve_tcpstore
from frun.agent.groupstore import Shard
from frun.protocol.storeframe import shard_of

PER_HOST = 8
SUBGROUPS = 8
CLIENT_PROCESSES = 2
AGENT_PROCESSES = 4
READERS = 64
"""Most clients that read all addresses; the busiest server's work for the others is told from theirs."""
PHASES = ("connect", "set", "hot", "barrier", "exchange")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One kind of store at one size. Seconds."""

    store: str
    clients: int
    again: bool
    """After a recovery."""
    readers: int
    """Clients that read all addresses."""
    wall: Mapping[str, float]
    busy: Mapping[str, float]
    """CPU time of the busiest server, for all clients."""

    @property
    def total_busy(self) -> float:
        """Seconds of the busiest server in all phases but that of connecting."""
        return sum(seconds for phase, seconds in self.busy.items() if phase != "connect")


class Servers:
    """The servers of one kind of store, and the clients of it."""

    def __init__(self, n: int, folder: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.n = n
        self._clients = [
            Part(context, serve_clients, _whole_hosts(n, at)) for at in range(CLIENT_PROCESSES)
        ]
        self._folder = folder
        self._context = context
        self._parts: list[Part] = []
        self.busiest: Part

    def frun(self) -> None:
        """Be the agents of n/8 hosts; that of the first has a process of its own."""
        hosts = max(1, self.n // PER_HOST)
        paths = [f"{self._folder}/s{host}" for host in range(hosts)]
        size = -(-(hosts - 1) // AGENT_PROCESSES) or 1
        shares = [range(1), *(range(at, min(at + size, hosts)) for at in range(1, hosts, size))]
        self._parts = [
            Part(self._context, serve_agents, [paths[host] for host in share]) for share in shares
        ]
        ports = [port for part in self._parts for port in part.ask("listen")]
        self._shards = [
            Shard(host=f"h{host}", address=ADDRESS, port=port) for host, port in enumerate(ports)
        ]
        self._firsts = [share[0] for share in shares]
        self._paths = [paths[min(rank // PER_HOST, hosts - 1)] for rank in range(self.n)]
        self.busiest = self._parts[0]

    def begin(self, generation: int) -> None:
        """Begin a generation on all hosts."""
        for part, first in zip(self._parts, self._firsts, strict=True):
            part.tell("begin", generation, self._shards, first)
        for part in self._parts:
            part.hear()

    def tcp(self) -> None:
        """Be one TCPStore."""
        self._parts = [Part(self._context, serve_tcpstore)]
        self._port = self._parts[0].ask("port")
        self.busiest = self._parts[0]

    def connect(self, kind: str, generation: int) -> None:
        """Let the clients connect."""
        order = ("connect_tcp", self._port) if kind == "tcp" else None
        self.all(*(order or ("connect_frun", self._paths, generation)))

    def all(self, *order: object) -> None:
        """Let all clients do something."""
        for part in self._clients:
            part.tell(*order)
        for part in self._clients:
            part.hear()

    def one(self, *order: object) -> None:
        """Let the first client do something."""
        self._clients[0].ask(*order)

    def end(self) -> None:
        """End all processes."""
        for part in (*self._clients, *self._parts):
            part.end()


def _whole_hosts(n: int, process: int) -> list[int]:
    """Return the ranks of each host whose clients are in this process."""
    return [rank for rank in range(n) if rank // PER_HOST % CLIENT_PROCESSES == process]


def hot_key(name: str, shards: int) -> str:
    """Return a key that the first host holds, so that one known agent is the busiest."""
    return next(key for key in _variants(name) if shard_of(key.encode(), shards) == 0)


def _variants(name: str) -> Iterator[str]:
    number = 0
    while True:
        yield f"{name}.{number}"
        number += 1


class Round:
    """All phases once."""

    def __init__(self, servers: Servers, prefix: str) -> None:
        self._servers = servers
        self._prefix = prefix
        self._shards = max(1, servers.n // PER_HOST)
        self.wall: dict[str, float] = {}
        self.busy: dict[str, float] = {}

    def timed(self, phase: str, do: Callable[[], None], times: float = 1.0) -> None:
        """Do something as part of a phase; it stands for `times` as much work of the busiest server."""
        cpu, begun = self._servers.busiest.ask("cpu"), time.perf_counter()
        do()
        self.wall[phase] = self.wall.get(phase, 0.0) + time.perf_counter() - begun
        spent = (self._servers.busiest.ask("cpu") - cpu) * times
        self.busy[phase] = self.busy.get(phase, 0.0) + spent

    def run(self, *, sharded: bool) -> int:
        """Do what c10d does; return how many clients read all addresses."""
        servers, prefix, n = self._servers, self._prefix, self._servers.n
        self.timed("set", lambda: servers.all("set", prefix))
        hot = hot_key(f"{prefix}/unique", self._shards)
        servers.one("put", hot)
        self.timed("hot", lambda: servers.all("get", hot))
        for group in range(1 + SUBGROUPS):
            counter = hot_key(f"{prefix}/barrier{group}", self._shards)
            last = hot_key(f"{prefix}/last{group}", self._shards)

            def barrier(counter: str = counter, last: str = last) -> None:
                servers.all("add", counter)
                servers.one("put", last)
                servers.all("wait", last)

            self.timed("barrier", barrier)
        keys = [f"{prefix}/rank_{rank}" for rank in range(n)]
        members = keys[::SUBGROUPS]
        readers = self._readers()

        def exchange() -> None:
            servers.all("many", keys, readers)
            servers.all("many", members, readers)

        self.timed(
            "exchange",
            exchange,
            1.0 if sharded else n / len(readers),
        )
        if sharded and len(readers) < n:
            # What all the others ask of the first host; its own clients are among the readers.
            mine = [key for key in keys if shard_of(key.encode(), self._shards) == 0] or keys[:1]
            mine += [key for key in members if shard_of(key.encode(), self._shards) == 0]
            wall = dict(self.wall)
            self.timed("exchange", lambda: servers.all("many", mine, None))
            self.wall = wall
        return len(readers)

    def _readers(self) -> frozenset[int]:
        """Return who reads all addresses: whole hosts, the first among them."""
        n = self._servers.n
        hosts = max(1, min(self._shards, READERS // PER_HOST))
        if n <= READERS:
            return frozenset(range(n))
        step = self._shards // hosts
        return frozenset(
            host * step * PER_HOST + local for host in range(hosts) for local in range(PER_HOST)
        )


def measure(kind: str, n: int) -> list[Line]:
    """Set one kind of store up with n clients, and again after a recovery."""
    folder = tempfile.mkdtemp(prefix="store")
    servers = Servers(n, folder)
    lines = []
    try:
        if kind == "tcp":
            servers.tcp()
        else:
            servers.frun()
        for generation in (1, 2):
            once = Round(servers, f"g{generation}")
            if kind == "frun":
                once.timed("begin", lambda g=generation: servers.begin(g))  # type: ignore[misc]
            if kind == "frun" and generation > 1:
                once.timed("connect", lambda: servers.all("renew", 2))
            else:
                once.timed("connect", lambda g=generation: servers.connect(kind, g))  # type: ignore[misc]
            readers = once.run(sharded=kind == "frun")
            lines.append(
                Line(
                    store=kind,
                    clients=n,
                    again=generation > 1,
                    readers=readers,
                    wall=once.wall,
                    busy=once.busy,
                )
            )
    finally:
        servers.end()
        shutil.rmtree(folder, ignore_errors=True)
    return lines


def show(line: Line) -> None:
    """Print one line."""
    pairs = (f"{p} {line.wall[p]:.3f}/{line.busy[p]:.4f}" for p in PHASES if p in line.wall)
    print(
        f"{line.clients:5} clients {line.store:4} {'again' if line.again else 'first'}: "
        + "  ".join(pairs)
        + f"  | busiest server {line.total_busy:.4f} s ({line.readers} readers)",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both kinds at each size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--clients", default="64,512,2048,4800,8192")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="draw a PNG (needs matplotlib)")
    options = parser.parse_args(arguments)
    machine = describe()
    print(machine)
    print("phase wall/busy in seconds")
    lines: list[dict[str, Any]] = []
    for n in map(int, options.clients.split(",")):
        for kind in ("tcp", "frun"):
            for line in measure(kind, n):
                show(line)
                lines.append({**asdict(line), "total_busy": line.total_busy})
    if options.json is not None:
        found = {"schema": 1, "machine": machine, "lines": lines}
        options.json.write_text(json.dumps(found, indent=1))
    if options.plot is not None:
        draw_store(lines, options.plot)


if __name__ == "__main__":
    main()
