"""How long a fault takes from the first word to the last host, at 4 to 2,048 hosts of 8 ranks.

    python -m benchmarks.scale [--hosts 4,16,64,256,1024,2048] [--json FILE] [--plot FILE.png]

Real agents, elections, memberships and group stores, a real controller and a real etcd; the leader and one
member have a process each, all other hosts share `--crowds` processes. Simulated: the workers, which pause
and start at once. One fault of each class: a worker dies (`worker`), the state of the job is lost, so that
all workers begin anew (`all`), a host dies and a spare takes its ranks (`host`), the leader's host dies
(`leader`). Times are from the fault, for dead hosts from the moment at which their lease ends, on the
machine's monotonic clock:

    decided    (a) the new rank table is in etcd
    known      (b) every host has it
    paused     (c) every survivor was told to pause
    prepared   (d) every host's part of the group store of the new generation is ready
    started    (c) the world is complete: every newcomer was started and every survivor goes on

What is one host's own work, done once on each machine of a cluster, is done here by two cores for all
hosts: the columns `host` (CPU time of the member that has a process of its own), `leader` and `etcd` say
what of it a cluster would wait for.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.etcd_load import Load, load
from benchmarks.machine import describe
from benchmarks.paper import draw_scale
from frun.protocol import wire
from frun.protocol.keys import Keys
from frun.protocol.records import Phase
from frun.rendezvous.embedded import EmbeddedEtcd
from frun.rendezvous.etcd import EtcdStore
from frun.rendezvous.mirror import Mirror

ROOT = Path(__file__).parents[1]
KEYS = Keys("scale")
LIMIT_S = 900.0
LOOK_S = 0.05
SPARES = 2
FAULTS = ("worker", "all", "host", "leader")
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault and its recovery. Times in seconds from the fault, or from the end of its lease."""

    hosts: int
    ranks: int
    kind: str
    lease_s: float
    """From the death of a host to the end of its lease; 0 where a process died."""
    decided: float
    known: float
    paused: float
    """0 if nobody survived."""
    prepared: float
    started: float
    leader_cpu: float
    """CPU seconds of the leader's process until the end, or -1 where the leader is the one to die."""
    host_cpu: float
    """The same of one member's process."""
    crowd_cpu: float
    """The same of all other hosts together, which on a cluster have their own processors."""
    etcd_cpu: float
    etcd: Load
    table_bytes: int
    table_parse_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One job at one size."""

    hosts: int
    ranks: int
    formed_s: float
    """From the first host's start to the last worker's."""
    idle_writes: float
    """Keys written in etcd per host and second while nothing happens."""
    idle_requests: float
    """Messages at etcd per host and second meanwhile, those of leases too."""
    agent_mib: float
    """Resident memory of a process with one agent."""
    leader_mib: float
    lease_ttl_s: int
    faults: tuple[Fault, ...]


class Process:
    """A crowd: a process with some of the hosts."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._turn = asyncio.Lock()
        self.look = psutil.Process(process.pid)

    @classmethod
    async def start(cls) -> "Process":
        """Start it, without hosts."""
        return cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "benchmarks.scale_crowd"),
                cwd=ROOT,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=1 << 26,
            )
        )

    async def ask(self, **order: object) -> Any:
        """Give an order and return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        async with self._turn:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            line = await self._process.stdout.readline()
        answer = json.loads(line or b'{"error": "the process ended"}')
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["answer"]

    @property
    def cpu_s(self) -> float:
        """CPU time so far."""
        times = self.look.cpu_times()
        return float(times.user + times.system)

    @property
    def mib(self) -> float:
        """Resident memory."""
        return float(self.look.memory_info().rss / MIB)

    async def end(self) -> None:
        """End it, however it is."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


class Trial:
    """One job of one size."""

    def __init__(self, hosts: int, nproc: int, ttl_s: int, etcd: EmbeddedEtcd) -> None:
        self._hosts = hosts
        self._nproc = nproc
        self._ttl_s = ttl_s
        self._etcd = etcd
        self._store = EtcdStore((etcd.endpoint,), request_timeout_s=60.0)
        self._processes: list[Process] = []
        self._where: dict[str, Process] = {}
        self._written: dict[tuple[int, Phase], float] = {}
        self._vanished: dict[str, float] = {}
        self._generation = 0
        self._table_bytes = b""
        self._members: list[str] = []
        self._leader = ""
        (self._etcd_process,) = (
            child for child in psutil.Process().children(recursive=True) if child.name() == "etcd"
        )

    async def run(self, crowds: int, faults: Sequence[str], idle_s: float) -> Size:
        """Form the job and break it once in each way."""
        followers = [
            asyncio.create_task(self._follow_table()),
            asyncio.create_task(self._follow_hosts()),
        ]
        try:
            begun = time.monotonic()
            await self._form(crowds)
            formed = time.monotonic() - begun
            await asyncio.sleep(1.0)
            before = await asyncio.to_thread(load, self._etcd.endpoint)
            await asyncio.sleep(idle_s)
            idle = await asyncio.to_thread(load, self._etcd.endpoint) - before
            total = self._hosts + SPARES
            size = Size(
                hosts=self._hosts,
                ranks=self._hosts * self._nproc,
                formed_s=formed,
                idle_writes=idle.writes / total / idle_s,
                idle_requests=(idle.messages + idle.lease_messages) / total / idle_s,
                agent_mib=self._processes[1].mib,
                leader_mib=self._processes[0].mib,
                lease_ttl_s=self._ttl_s,
                faults=tuple([await self._break(kind) for kind in faults]),
            )
        finally:
            for task in followers:
                task.cancel()
            await asyncio.gather(*followers, return_exceptions=True)
            for process in self._processes:
                await process.end()
            await self._store.close()
        return size

    async def _form(self, crowds: int) -> None:
        names = [f"host-{number:04}" for number in range(self._hosts + SPARES)]
        job = {
            "endpoint": self._etcd.endpoint,
            "hosts": self._hosts,
            "nproc": self._nproc,
            "ttl_s": self._ttl_s,
        }
        self._processes = list(await asyncio.gather(*(Process.start() for _ in range(2 + crowds))))
        shares = [names[:1], names[1:2], *(names[2 + at :: crowds] for at in range(crowds))]
        for process, share in zip(self._processes, shares, strict=True):
            self._where |= dict.fromkeys(share, process)
        # The first one leads, so that the leader has a process of its own; spares come last.
        for process, share in zip(self._processes[:2], shares[:2], strict=True):
            await process.ask(do="start", names=share, job=job)
        waiting = set(names[self._hosts :])
        for chosen in (lambda name: name not in waiting, lambda name: name in waiting):
            await asyncio.gather(
                *(
                    process.ask(do="start", names=list(filter(chosen, share)), job=job)
                    for process, share in zip(self._processes[2:], shares[2:], strict=True)
                )
            )
        self._generation = 1
        await self._until(1, "started", self._hosts)
        self._leader = names[0]

    async def _break(self, kind: str) -> Fault:
        """Make one fault and follow it to its end."""
        generation = self._generation + 1
        victim = self._victim(kind)
        await asyncio.sleep(0.5)
        before = await asyncio.to_thread(load, self._etcd.endpoint)
        cpu = [p.cpu_s for p in self._processes]
        times = self._etcd_process.cpu_times()
        etcd_cpu = times.user + times.system
        home = self._where[victim]
        if kind in ("host", "leader"):
            fault = died = await home.ask(do="die", name=victim)
            while victim not in self._vanished:
                await asyncio.sleep(0.001)
            fault = self._vanished[victim]  # seen here; the leader may have seen it sooner
        else:
            wanted = "no_donor" if kind == "all" else ""
            fault = died = await home.ask(do="fail", name=victim, kind=wanted)
        marks = await self._until(generation, "started", self._hosts)
        used = await asyncio.to_thread(load, self._etcd.endpoint) - before
        now = [p.cpu_s for p in self._processes]
        times = self._etcd_process.cpu_times()
        self._generation = generation
        parse_s = min(_timed_parse(self._table_bytes) for _ in range(5))

        def last(mark: str) -> float:
            return marks[mark][2] - fault if mark in marks else 0.0

        written = min(self._written[generation, Phase.RECOVER], marks["saw"][1])
        fault = min(fault, written)
        return Fault(
            hosts=self._hosts,
            ranks=self._hosts * self._nproc,
            kind=kind,
            lease_s=fault - died,
            decided=written - fault,
            known=last("saw"),
            paused=last("paused"),
            prepared=last("prepared"),
            started=last("started"),
            leader_cpu=-1.0 if kind == "leader" else now[0] - cpu[0],
            host_cpu=now[1] - cpu[1],
            crowd_cpu=sum(now[2:]) - sum(cpu[2:]),
            etcd_cpu=times.user + times.system - etcd_cpu,
            etcd=used,
            table_bytes=len(self._table_bytes),
            table_parse_s=parse_s,
        )

    def _victim(self, kind: str) -> str:
        if kind == "leader":
            return self._leader
        return self._members[len(self._members) // 2]

    async def _until(
        self, generation: int, mark: str, count: int
    ) -> dict[str, tuple[int, float, float]]:
        """Wait until so many hosts have reached a point; return all points of the generation."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            every = await asyncio.gather(
                *(p.ask(do="marks", generation=generation) for p in self._processes)
            )
            merged: dict[str, tuple[int, float, float]] = {}
            for marks in every:
                for name, (n, first, last) in marks.items():
                    m, low, high = merged.get(name, (0, first, last))
                    merged[name] = (m + n, min(low, first), max(high, last))
            if merged.get(mark, (0,))[0] >= count:
                return merged
            if time.monotonic() > deadline:
                raise TimeoutError(f"generation {generation}: {merged}")
            await asyncio.sleep(LOOK_S)

    async def _follow_table(self) -> None:
        async with Mirror(self._store, KEYS.ranktable) as mirror:
            while True:
                version = await mirror.wait_changed(mirror.version, None)
                stored = mirror.items.get(KEYS.ranktable)
                if stored is None:
                    continue
                at = time.monotonic()
                table = wire.decode_table(stored.value)
                self._table_bytes = stored.value
                self._written.setdefault((table.generation, table.phase), at)
                self._members = [slot.host for slot in table.slots if slot.host]
                assert version <= mirror.version

    async def _follow_hosts(self) -> None:
        async with Mirror(self._store, KEYS.hosts) as mirror:
            while True:
                version = mirror.version
                for key in mirror.drain_deletions():
                    self._vanished[key.rpartition("/")[2]] = time.monotonic()
                await mirror.wait_changed(version, None)


def _timed_parse(data: bytes) -> float:
    begun = time.perf_counter()
    wire.decode_table.__wrapped__(data)
    return time.perf_counter() - begun


async def measure(
    hosts: int, *, nproc: int, ttl_s: int, crowds: int, faults: Sequence[str], idle_s: float
) -> Size:
    """Run one job of a size on an etcd of its own."""
    etcd = EmbeddedEtcd()
    await etcd.start()
    try:
        trial = Trial(hosts, nproc, ttl_s, etcd)
        return await trial.run(min(crowds, hosts), faults, idle_s)
    finally:
        await etcd.stop()


def lease_for(hosts: int) -> int:
    """Return the lease time: two cores can't refresh thousands of leases four times in three seconds."""
    return max(3, hosts // 64)


def show(size: Size) -> None:
    """Print one size."""
    print(
        f"{size.hosts} hosts, {size.ranks} ranks: formed in {size.formed_s:.1f} s, lease"
        f" {size.lease_ttl_s} s; idle {size.idle_writes:.2f} writes and {size.idle_requests:.1f} messages per"
        f" host and second; an agent {size.agent_mib:.0f} MiB, the leader's {size.leader_mib:.0f} MiB"
    )
    for one in size.faults:
        print(
            f"  {one.kind:7} decided {one.decided:6.3f}  known {one.known:6.3f}  paused {one.paused:6.3f}"
            f"  prepared {one.prepared:6.3f}  started {one.started:6.3f} s"
            f" | CPU leader {one.leader_cpu:.2f} host {one.host_cpu:.3f} crowd {one.crowd_cpu:.2f}"
            f" etcd {one.etcd_cpu:.2f} s"
            f" | etcd {one.etcd.messages} messages, {one.etcd.writes} writes,"
            f" {one.etcd.sent_bytes / 1e6:.1f} MB out, {one.etcd.received_bytes / 1e6:.1f} MB in"
            f" | table {one.table_bytes / 1000:.1f} kB, {one.table_parse_s * 1000:.2f} ms",
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every size that was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--hosts", default="4,16,64,256,1024,2048")
    parser.add_argument("--nproc", type=int, default=8, help="ranks per host [8]")
    parser.add_argument("--crowds", type=int, default=2, help="processes that share the hosts [2]")
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--idle", type=float, default=10.0, help="seconds without a fault [10]")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="draw a PNG (needs matplotlib)")
    options = parser.parse_args(arguments)
    machine = describe()
    print(machine)
    sizes = []
    for hosts in map(int, options.hosts.split(",")):
        size = asyncio.run(
            measure(
                hosts,
                nproc=options.nproc,
                ttl_s=lease_for(hosts),
                crowds=options.crowds,
                faults=options.faults.split(","),
                idle_s=options.idle,
            )
        )
        sizes.append(asdict(size))
        show(size)
    if options.json is not None:
        found = {"schema": 1, "machine": machine, "sizes": sizes}
        options.json.write_text(json.dumps(found, indent=1))
    if options.plot is not None:
        draw_scale(sizes, options.plot)


if __name__ == "__main__":
    main()
