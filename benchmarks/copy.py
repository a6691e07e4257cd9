"""How fast a state gets from one worker to another on this machine: `python -m benchmarks.copy`.

Compares `transfer` with plain collectives of the same bytes. Two ranks; each figure is the median of several
runs, taken in turn so that what else the machine does falls on all of them.
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from frun.protocol.restore import Plan, RankState, plan
from frun.worker.copy import CopyReport, transfer
from frun.worker.fingerprint import fingerprint
from frun.worker.messages import CHUNK
from frun.worker.placing import poison
from frun.worker.state import Stateful

MIB = 1 << 20
SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One way of moving one size."""

    way: str
    mib: float
    runs: int
    median_s: float
    best_s: float
    worst_s: float
    gb_per_s: float
    """Of the median; 1 GB is 10**9 bytes."""
    of_broadcast: float
    """Speed as a share of a plain gloo broadcast's."""
    peak_extra_mib: float
    """Most memory that the receiving rank had beyond what it had before, over all runs."""


def model(mib: float) -> dict[str, Stateful]:
    """Return a transformer-like model and its AdamW: with the moments they have this size."""
    width = 64 if mib < 8 else 512
    layer = (12 * width * width + 4 * width) * 4 * 3
    layers = max(1, round(mib * MIB / layer))
    torch.manual_seed(0)
    module = torch.nn.ModuleList()
    for _ in range(layers):
        module.append(
            torch.nn.ModuleDict(
                {
                    "attention": torch.nn.Linear(width, 4 * width, bias=False),
                    "up": torch.nn.Linear(width, 4 * width, bias=False),
                    "down": torch.nn.Linear(4 * width, width, bias=False),
                    "norms": torch.nn.Embedding(4, width),
                }
            )
        )
    optimizer = torch.optim.AdamW(module.parameters())
    return {"model": module, "optimizer": optimizer}


def make_moments(objects: dict[str, Any]) -> int:
    """Make the optimizer's lazy state and return the bytes of everything."""
    for parameter in objects["model"].parameters():
        objects["optimizer"].state[parameter] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.zeros_like(parameter.detach()),
            "exp_avg_sq": torch.zeros_like(parameter.detach()),
        }
    state = objects["optimizer"].state_dict()["state"].values()
    tensors = [*objects["model"].state_dict().values(), *(t for s in state for t in s.values())]
    return sum(tensor.nbytes for tensor in tensors)


def _rank(rank: int, folder: str, sizes: list[float], runs: int, ends: Any) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(Path(folder, "store")), 2)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    lines: list[Line] = []
    for mib in sizes:
        lines += _measure(rank, mib, runs)
    if rank == 0:
        ends.send([asdict(line) for line in lines])
    dist.barrier()
    os._exit(0)


def _measure(rank: int, mib: float, runs: int) -> list[Line]:
    """Time every way at one size; both ranks take part, the slower one counts."""
    objects = model(mib)
    size = make_moments(objects)
    flat = torch.full((size,), rank, dtype=torch.uint8)
    first = plan(
        [
            RankState(rank=0, host="a", step=1, has_state=True),
            RankState(rank=1, host="a", step=0, has_state=False),
        ]
    )
    assert isinstance(first, Plan)

    def copy(*, read: bool, fresh: bool) -> Callable[[], CopyReport]:
        def work() -> CopyReport:
            if rank == 1 and fresh:
                objects["optimizer"].state.clear()  # type: ignore[attr-defined]
            return transfer(first, rank, objects, read_memory=read)

        return work

    ways: dict[str, Callable[[], Any]] = {
        "gloo broadcast": lambda: dist.broadcast(flat, 0),
        "gloo send and recv": lambda: dist.send(flat, 1) if rank == 0 else dist.recv(flat, 0),
        "transfer over the group": copy(read=False, fresh=False),
        "transfer over the group, newcomer": copy(read=False, fresh=True),
        "transfer from memory": copy(read=True, fresh=False),
        "transfer from memory, newcomer": copy(read=True, fresh=True),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    peaks = dict.fromkeys(ways, 0)
    for turn in range(runs + 1):
        for way, work in ways.items():
            took, peak = _time(work)
            if turn:
                times[way].append(took)
                peaks[way] = max(peaks[way], peak)
    base = statistics.median(times["gloo broadcast"])
    return [_line(way, size, found, base, peaks[way]) for way, found in times.items()]


def _time(work: Callable[[], Any]) -> tuple[float, int]:
    """Return how long the slower rank took, and the most extra memory of rank 1."""
    before = peak_memory(reset=True)
    dist.barrier()
    began = time.perf_counter()
    work()
    took = torch.tensor([time.perf_counter() - began])
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    peak = torch.tensor([peak_memory() - before])
    dist.broadcast(peak, 1)
    return float(took), int(peak)


def _line(way: str, size: int, times: list[float], base: float, peak: int) -> Line:
    median = statistics.median(times)
    return Line(
        way=way,
        mib=round(size / MIB, 1),
        runs=len(times),
        median_s=median,
        best_s=min(times),
        worst_s=max(times),
        gb_per_s=size / median / 1e9,
        of_broadcast=base / median,
        peak_extra_mib=peak / MIB,
    )


def peak_memory(*, reset: bool = False) -> int:
    """Return the most memory this process has had, in bytes; `reset` begins anew from what it has now."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def parts(mib: int = 64, runs: int = 5) -> dict[str, float]:
    """Return GB/s of what a copy is made of, one process alone: fingerprint, zlib's crc32, poison, memcpy."""
    import zlib

    data = torch.randint(0, 256, (mib * MIB,), dtype=torch.uint8)
    other = torch.empty_like(data)
    pieces = [data[begin : begin + CHUNK] for begin in range(0, data.numel(), CHUNK)]
    held = [(ctypes.c_char * piece.nbytes).from_address(piece.data_ptr()) for piece in pieces]
    works: dict[str, Callable[[], Any]] = {
        "fingerprint": lambda: [fingerprint(piece) for piece in pieces],
        "zlib.crc32": lambda: [zlib.crc32(piece) for piece in held],
        "poison": lambda: poison([other]),
        "copy": lambda: other.copy_(data),
    }
    speeds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(runs):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            speeds[name].append(data.nbytes / (time.perf_counter() - began) / 1e9)
    return {name: statistics.median(found) for name, found in speeds.items()}


def machine() -> dict[str, Any]:
    """Describe where this ran."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in info if line.startswith("model name")), "?")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_at_begin": os.getloadavg()[0],
    }


def run(sizes: list[float], runs: int) -> list[dict[str, Any]]:
    """Start two ranks and return their figures."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(rank, folder, sizes, runs, theirs))
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        theirs.close()
        try:
            lines: list[dict[str, Any]] = mine.recv()
        except EOFError:
            sys.exit("the ranks ended without figures: see above")
        finally:
            for process in processes:
                process.join()
    return lines


def main() -> None:
    """Measure, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--sizes",
        default="1,16,128,1024",
        help="MiB of state, separated by commas (default: %(default)s)",
    )
    parser.add_argument("--runs", type=int, default=7, help="of each way and size (default: 7)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    where = machine()
    lines = run([float(size) for size in args.sizes.split(",")], args.runs)
    pieces = parts()
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    print(
        f"{'MiB':>8} {'way':<34} {'median ms':>9} {'best':>8} {'GB/s':>6} {'of bcast':>8} {'extra MiB':>9}"
    )
    for line in lines:
        print(
            f"{line['mib']:8.1f} {line['way']:<34} {line['median_s'] * 1e3:9.2f} {line['best_s'] * 1e3:8.2f}"
            f" {line['gb_per_s']:6.2f} {line['of_broadcast']:7.2f}x {line['peak_extra_mib']:9.1f}"
        )
    speeds = ", ".join(f"{name} {speed:.1f}" for name, speed in pieces.items())
    print(f"one process alone, GB/s: {speeds}")
    if args.json:
        document = {"schema": SCHEMA, "machine": where, "lines": lines, "parts_gb_per_s": pieces}
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
