"""What frun costs when nothing fails, beside torchrun: pairs of runs, one after the other.

    python -m benchmarks.overhead [--ranks 4] [--pairs 5] [--steps 400] [--json FILE]

The same resumable script under both (under torchrun the decorator does nothing): a small DDP model, gloo,
10 ms of sleep in each step; after its steps each rank sleeps. Start-up is from the command to the first
completed step of the last rank; the step time of a run is the mean over its steps without the first ones,
on the rank with the longest. Memory is the proportional set (PSS), in which pages that processes share are
counted once. The agent's CPU use and etcd's writes are taken while the steps run (`training`) and while the
ranks sleep (`idle`).
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.error import URLError

import psutil

from benchmarks.etcd_load import Load, load
from benchmarks.launchers import PROGRAMS, ROOT, SMALL_MODEL
from benchmarks.machine import describe

LIMIT_S = 120.0
IDLE_S = 6.0
WARM_UP = 20
COMPARED = ("start_s", "step_s", "total_mib", "agent_mib")
MIB = 1 << 20
SCRIPT = (
    SMALL_MODEL
    + """
import os, pathlib, sys, time

rank, folder = os.environ["RANK"], pathlib.Path(os.environ["BENCHMARK_FOLDER"])
steps, warm_up = int(sys.argv[1]), int(sys.argv[2])

def note(what, value):
    (folder / f"{what}.{rank}.new").write_text(repr(value))
    os.replace(folder / f"{what}.{rank}.new", folder / f"{what}.{rank}")

@frun.resumable
def train(session):
    first, step = begin(session)
    for number in range(first, steps):
        if number == warm_up:
            began = time.monotonic()
        time.sleep(0.01)
        step()
        if number == first:
            note("first", time.monotonic())
    note("step", (time.monotonic() - began) / (steps - warm_up))
    while not (folder / "stop").exists():
        time.sleep(0.1)
    dist.destroy_process_group()

train()
"""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One launch."""

    launcher: str
    start_s: float
    """From the command to the first step of the last rank."""
    step_s: float
    total_mib: float
    """All processes of the job."""
    agent_mib: float
    zygote_mib: float
    """0 under torchrun."""
    agent_training: float
    """Share of one core that the launcher's own process uses while the steps run."""
    agent_idle: float
    writes_training: float
    """Keys written in etcd per second; 0 under torchrun, which has none."""
    writes_idle: float
    messages_idle: float
    """gRPC messages at etcd per second, keep-alives included."""


class Job:
    """One launch of the script and what it uses."""

    def __init__(self, launcher: str, ranks: int, steps: int, folder: Path) -> None:
        self.launcher = launcher
        self.ranks = ranks
        self.folder = folder
        script = folder / "train.py"
        script.write_text(SCRIPT, encoding="utf-8")
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "BENCHMARK_FOLDER": str(folder),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder),
        }
        command = [
            *PROGRAMS[launcher],
            *("--standalone", f"--nproc-per-node={ranks}", str(script), str(steps), str(WARM_UP)),
        ]
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._look = psutil.Process(self.process.pid)

    def values(self, what: str) -> list[float]:
        """Wait until every rank has noted something; return it."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            paths = [self.folder / f"{what}.{rank}" for rank in range(self.ranks)]
            if all(path.exists() for path in paths):
                return [float(path.read_text()) for path in paths]
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"{self.launcher} did not come to {what!r}")
            time.sleep(0.01)

    def memory(self) -> tuple[float, float, float]:
        """Return the MiB of all processes, of the launcher's own and of the zygote."""
        mib = {each: _pss_mib(each) for each in (self._look, *self._look.children(recursive=True))}
        zygotes = [mib[each] for each in mib if each.parent() == self._look and _is_zygote(each)]
        return sum(mib.values()), mib[self._look], max(zygotes, default=0.0)

    def usage(self) -> tuple[float, float, Load]:
        """Return the time now, the launcher's CPU time, and the load of its etcd."""
        times = self._look.cpu_times()
        return time.monotonic(), times.user + times.system, self._etcd_load()

    def _etcd_load(self) -> Load:
        for child in self._look.children(recursive=True):
            if child.name() != "etcd":
                continue
            for socket in child.net_connections("tcp"):
                if socket.status == psutil.CONN_LISTEN:
                    try:
                        return load(f"{socket.laddr.ip}:{socket.laddr.port}")
                    except (URLError, OSError):
                        continue  # the port for its peers
        return Load()

    def stop(self) -> None:
        """Let the ranks end."""
        (self.folder / "stop").touch()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(45)


def _pss_mib(process: psutil.Process) -> float:
    try:
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0  # it has just ended
    return int(text.partition("\nPss:")[2].split()[0]) / 1024


def _is_zygote(process: psutil.Process) -> bool:
    return any("zygote" in part for part in process.cmdline()[:4])


def launch(launcher: str, ranks: int, steps: int, idle_s: float) -> Run:
    """Run the script once."""
    with tempfile.TemporaryDirectory(prefix="overhead") as name:
        job = Job(launcher, ranks, steps, Path(name))
        try:
            firsts = job.values("first")
            training = job.usage()
            step_s = max(job.values("step"))
            trained = job.usage()
            memory = job.memory()
            idle = job.usage()
            time.sleep(idle_s)
            idled = job.usage()
        finally:
            job.stop()
    work, rest = trained[2] - training[2], idled[2] - idle[2]
    work_s, rest_s = trained[0] - training[0], idled[0] - idle[0]
    return Run(
        launcher=launcher,
        start_s=max(firsts) - job.began,
        step_s=step_s,
        total_mib=memory[0],
        agent_mib=memory[1],
        zygote_mib=memory[2],
        agent_training=(trained[1] - training[1]) / work_s,
        agent_idle=(idled[1] - idle[1]) / rest_s,
        writes_training=work.writes / work_s,
        writes_idle=rest.writes / rest_s,
        messages_idle=(rest.messages + rest.lease_messages) / rest_s,
    )


def torch_mib() -> float:
    """Return the private memory of a process that has imported torch and done nothing else."""
    code = (
        "import torch\n"
        "text = open('/proc/self/smaps_rollup').read()\n"
        "print(int(text.partition('\\nRss:')[2].split()[0]) / 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def figures(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Return the medians of each launcher, and frun's part of torchrun's where both have one."""
    names = [name for name in Run.__dataclass_fields__ if name != "launcher"]
    found: dict[str, dict[str, float]] = {}
    for name in names:
        medians = {
            launcher: statistics.median(
                getattr(run, name) for run in runs if run.launcher == launcher
            )
            for launcher in PROGRAMS
        }
        found[name] = {**medians}
        if name in COMPARED:
            # By pair: what else the machine does falls on both of one pair.
            pairs = zip(
                (getattr(run, name) for run in runs if run.launcher == "frun"),
                (getattr(run, name) for run in runs if run.launcher == "torchrun"),
                strict=True,
            )
            found[name]["ratio"] = statistics.median(ours / theirs for ours, theirs in pairs)
    return found


def measure(ranks: int, pairs: int, steps: int, idle_s: float = IDLE_S) -> list[Run]:
    """Run the script under both launchers in turn; which one begins changes with each pair."""
    runs = []
    for number in range(pairs):
        for launcher in PROGRAMS if number % 2 == 0 else reversed(PROGRAMS):
            run = launch(launcher, ranks, steps, idle_s)
            runs.append(run)
            print(
                f"{run.launcher:9} start {run.start_s:.2f} s, step {run.step_s * 1000:.3f} ms,"
                f" all {run.total_mib:.0f} MiB",
                file=sys.stderr,
                flush=True,
            )
    return runs


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    machine = describe()
    print(machine)
    runs = measure(options.ranks, options.pairs, options.steps)
    found = figures(runs)
    bare = torch_mib()
    print(f"{'median of ' + str(options.pairs):17}  torchrun      frun     ratio")
    for name, row in found.items():
        ratio = f"{row['ratio']:9.3f}" if "ratio" in row else ""
        print(f"{name:17} {row['torchrun']:9.3f} {row['frun']:9.3f} {ratio}")
    print(f"a process that imported torch: {bare:.0f} MiB resident")
    if options.json is not None:
        everything = {
            "schema": 1,
            "machine": machine,
            "figures": found,
            "torch_mib": bare,
            "runs": [asdict(run) for run in runs],
        }
        options.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
