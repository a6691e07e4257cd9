"""Whether recoveries leave anything behind: descriptors, threads, memory, keys in etcd.

    python -m benchmarks.leaks [--recoveries 100] [--json FILE]

One job of three ranks on this machine (the script of `benchmarks.recovery`). Ranks 1 and 2 are SIGKILLed in
turn, so that rank 0 lives through many recoveries in one process; in the last quarter all three are. Every
ten recoveries the agent, the zygote, the workers and the job's keys in etcd are counted. Something grows
if the slope of its figures after the first twenty recoveries exceeds a limit per hundred recoveries: 2 of
descriptors, threads or keys, 4 MB of memory. The accounts of incidents in etcd do grow, to 100 of them;
they are counted apart. torch's flight recorder is off: in any run it keeps its last 2,000 collectives,
which takes 2 MB until it is full. Exit status 1 if anything grows.
"""

import argparse
import base64
import json
import os
import re
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.machine import describe
from benchmarks.recovery_jobs import Job
from frun.protocol.incidents import KEPT

RANKS = 3
EVERY = 10
WARM_UP = 20
YOUNG = ("rank 1", "rank 2")
"""Those that are killed all the time."""
LIMITS = {"fds": 2.0, "threads": 2.0, "rss_mb": 4.0, "keys": 2.0}
"""Of a slope, per hundred recoveries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """What one process had at one moment."""

    pid: int
    fds: int
    threads: int
    rss_mb: float

    @classmethod
    def of(cls, pid: int) -> "Count":
        """Count now."""
        process = psutil.Process(pid)
        with process.oneshot():
            rss_mb = process.memory_info().rss / 1e6
            return cls(pid=pid, fds=process.num_fds(), threads=process.num_threads(), rss_mb=rss_mb)

    def __str__(self) -> str:
        return f"{self.fds:>4} {self.threads:>3} {self.rss_mb:>6.1f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Everything after so many recoveries."""

    recoveries: int
    processes: dict[str, Count]
    """Of the agent, the zygote and each rank."""
    keys: int
    """Of the job in etcd, without incidents."""
    incidents: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """How something developed after the first recoveries."""

    what: str
    figure: str
    per_hundred: float

    @property
    def grows(self) -> bool:
        """Whether it exceeds its limit."""
        return self.per_hundred > LIMITS[self.figure]


def victim(number: int, recoveries: int) -> int:
    """Return the rank that is killed in this recovery."""
    return number % RANKS if number >= recoveries * 3 // 4 else 1 + number % (RANKS - 1)


def settle(job: Job, steps: int = 10) -> dict[int, int]:
    """Wait until all ranks made some more steps; return their pids."""
    before = [len(job.rows(rank)) for rank in range(RANKS)]

    def further() -> float | None:
        more = [len(job.rows(rank)) - before[rank] for rank in range(RANKS)]
        return 1.0 if min(more) >= steps else None

    job.until(further)
    return {rank: job.rows(rank)[-1].pid for rank in range(RANKS)}


def sample(job: Job, recoveries: int) -> Sample:
    """Count everything."""
    pids = settle(job)
    agent = job.process.pid
    zygote = psutil.Process(pids[0]).ppid()
    named = {"agent": agent, "zygote": zygote, **{f"rank {r}": pid for r, pid in pids.items()}}
    keys = keys_of(etcd_of(agent))
    incidents = sum("/incidents/" in key for key in keys)
    return Sample(
        recoveries=recoveries,
        processes={name: Count.of(pid) for name, pid in named.items()},
        keys=len(keys) - incidents,
        incidents=incidents,
    )


def etcd_of(agent: int) -> str:
    """Return the URL of the etcd that this agent has started."""
    for child in psutil.Process(agent).children(recursive=True):
        found = re.search(r"--listen-client-urls=(\S+)", " ".join(child.cmdline()))
        if found:
            return found[1]
    raise LookupError("the agent runs no etcd")


def keys_of(url: str) -> list[str]:
    """Return all keys of frun."""
    asked = {name: base64.b64encode(key).decode() for name, key in _RANGE.items()}
    body = json.dumps({**asked, "keys_only": True}).encode()
    with urllib.request.urlopen(f"{url}/v3/kv/range", body, timeout=10) as answer:
        found = json.load(answer)
    return [base64.b64decode(kv["key"]).decode() for kv in found.get("kvs", [])]


_RANGE = {"key": b"/frun/", "range_end": b"/frun0"}


def slopes(samples: Sequence[Sample]) -> list[Slope]:
    """Return how each figure developed.

    Rank 0 as long as its first process lived; of the other ranks descriptors and threads of whichever
    process they had, since what leaks in the zygote is inherited. Their memory says only how old each is.
    """
    warm = [each for each in samples if each.recoveries >= WARM_UP]
    found = [_slope("etcd", "keys", [(each.recoveries, each.keys) for each in warm])]
    for name in samples[0].processes:
        counts = [(each.recoveries, each.processes[name]) for each in warm]
        if name == "rank 0":
            counts = [(at, count) for at, count in counts if count.pid == counts[0][1].pid]
        for figure in ("fds", "threads", "rss_mb"):
            if figure == "rss_mb" and name in YOUNG:
                continue
            points = [(at, float(getattr(count, figure))) for at, count in counts]
            found.append(_slope(name, figure, points))
    return found


def _slope(what: str, figure: str, points: Sequence[tuple[int, float]]) -> Slope:
    if len(points) < 3:
        return Slope(what=what, figure=figure, per_hundred=0.0)
    x, y = zip(*points, strict=True)
    return Slope(
        what=what, figure=figure, per_hundred=100 * statistics.linear_regression(x, y).slope
    )


def show(samples: Sequence[Sample]) -> None:
    """Print the table."""
    names = list(samples[0].processes)
    print("per process: descriptors, threads, resident MB; * a new process since the row above")
    print("after  " + "".join(f"{name:^19}" for name in names) + "  keys  incidents")
    last: dict[str, int] = {}
    for each in samples:
        cells = []
        for name in names:
            count = each.processes[name]
            new = "*" if last.get(name, count.pid) != count.pid else " "
            last[name] = count.pid
            cells.append(f"{count!s:>16}{new}  ")
        print(f"{each.recoveries:>5}  {''.join(cells)}  {each.keys:>4}  {each.incidents:>9}")


def main(argv: Sequence[str] | None = None) -> int:
    """Recover again and again, print the table and the verdict."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recoveries", type=int, default=100)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    machine = describe()
    print(machine)
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"  # inherited by the job
    samples = []
    with tempfile.TemporaryDirectory(prefix="leaks") as folder:
        job = Job("frun", RANKS, Path(folder), checkpoints=False)
        try:
            for number in range(options.recoveries):
                if number % EVERY == 0:
                    samples.append(sample(job, number))
                kill = job.breaks("kill", victim(number, options.recoveries), warm_up=3)
                if kill.kept != RANKS - 1:
                    print(f"recovery {number}: only {kill.kept} processes lived on")
                    return 1
            samples.append(sample(job, options.recoveries))
        finally:
            job.stop()
    show(samples)
    found = slopes(samples)
    growing = [each for each in found if each.grows]
    for each in growing:
        print(f"GROWS: {each.what}, {each.figure}: {each.per_hundred:+.1f} per 100 recoveries")
    if not growing:
        steepest = max((each for each in found if each.figure == "rss_mb"), key=_steepness)
        print(
            f"nothing grows; steepest memory: {steepest.what}"
            f" {steepest.per_hundred:+.1f} MB per 100 recoveries"
        )
    if options.json:
        document = {
            "machine": machine,
            "samples": [asdict(each) for each in samples],
            "slopes": [asdict(each) for each in found],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(bool(growing) or samples[-1].incidents > KEPT)


def _steepness(slope: Slope) -> float:
    return slope.per_hundred


if __name__ == "__main__":
    sys.exit(main())
