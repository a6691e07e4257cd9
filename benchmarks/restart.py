"""Restart after a SIGKILL, and start-up to the first step, under frun and under torchrun.

    python -m benchmarks.restart --kills 20 --starts 5 [--torchrun-kills 3] [--json FILE]

The script is the one that breaks torchrun 2.13: four ranks, gloo, DDP, a checkpoint every ten steps,
rank 1 SIGKILLed once in the middle, `--standalone --max-restarts 3`. A run counts as recovered when it
ends with 0, trained to the last step and cost exactly one restart. Start-ups alternate between the two
launchers in the same environment, since figures of different ones can't be compared. Times are from one
monotonic clock of one machine: from the start of the command until all ranks have done their first
step, and from the kill until the last rank has done its next step.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.launchers import PROGRAMS, ROOT

RANKS = 4
STEPS = 40
KILL_AT = 25
LIMIT_S = 60.0
SCRIPT = """
import os, pathlib, signal, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

steps, kill_at = int(sys.argv[1]), int(sys.argv[2])
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
folder = pathlib.Path(os.environ["BENCHMARK_FOLDER"])
saved = folder / "checkpoint.pt"

def note(word):
    with open(folder / f"{word}.{attempt}.{rank}", "w") as file:
        file.write(repr(time.monotonic()))

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(32, 32))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
first = 0
if saved.exists():
    state = torch.load(saved)
    model.load_state_dict(state["model"])
    first = state["step"]
for step in range(first, steps):
    time.sleep(0.01)
    optimizer.zero_grad()
    model(torch.ones(8, 32)).square().mean().backward()
    optimizer.step()
    if step == first:
        note("first")
    if rank == 1 and step == kill_at and attempt == 0:
        note("killed")
        os.kill(os.getpid(), signal.SIGKILL)
    if step % 10 == 9:
        if rank == 0:
            torch.save({"model": model.state_dict(), "step": step + 1}, folder / "new.pt")
            os.replace(folder / "new.pt", saved)
        dist.barrier()
note("end")
dist.destroy_process_group()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One launch. Times in seconds; None when it did not come to that."""

    launcher: str
    code: int | None
    """Exit status; None: it hung and was stopped."""
    restarts: int
    started_s: float | None
    recovered_s: float | None

    def is_clean(self, restarts: int) -> bool:
        """Return True if it ended well and cost exactly so many restarts."""
        return self.code == 0 and self.restarts == restarts and self.started_s is not None


def launch(launcher: str, *, kill: bool) -> Run:
    """Run the script once under a launcher."""
    with tempfile.TemporaryDirectory(prefix="restart") as name:
        folder = Path(name)
        script = folder / "train.py"
        script.write_text(SCRIPT, encoding="utf-8")
        steps, kill_at = (STEPS, KILL_AT) if kill else (3, -1)
        command = [
            *PROGRAMS[launcher], "--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=3",
            str(script), str(steps), str(kill_at),
        ]  # fmt: skip
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "BENCHMARK_FOLDER": name,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": name,
        }
        began = time.monotonic()
        process = subprocess.Popen(
            command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            code: int | None = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
            stop(process)
        ends = sorted(int(path.suffixes[0][1:]) for path in folder.glob("end.*.*"))
        complete = len(ends) == RANKS and len(set(ends)) == 1
        restarts = ends[-1] if complete else -1
        return Run(
            launcher=launcher,
            code=code,
            restarts=restarts,
            started_s=since(began, times(folder, "first.0")),
            recovered_s=since(
                min(times(folder, "killed.0"), default=None), times(folder, f"first.{restarts}")
            )
            if kill and complete
            else None,
        )


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a launcher that hangs, politely first: torchrun's workers outlive it otherwise."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(45)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def times(folder: Path, what: str) -> list[float]:
    """Return when each rank noted something."""
    return [float(path.read_text()) for path in folder.glob(f"{what}.*")]


def since(began: float | None, ends: Sequence[float]) -> float | None:
    """Return the time from a moment until the last rank; None if not all ranks got there."""
    if began is None or len(ends) < RANKS:
        return None
    return max(ends) - began


def figures(values: Iterable[float | None]) -> dict[str, float]:
    """Return median and extremes."""
    known = [value for value in values if value is not None]
    if not known:
        return {}
    return {
        "n": len(known),
        "median_s": round(statistics.median(known), 3),
        "best_s": round(min(known), 3),
        "worst_s": round(max(known), 3),
    }


def main() -> int:
    """Run what was asked for; exit 1 if frun did not recover each time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=20, help="runs of frun with a kill [20]")
    parser.add_argument("--torchrun-kills", type=int, default=0, help="the same of torchrun [0]")
    parser.add_argument("--starts", type=int, default=5, help="start-ups of each, alternating [5]")
    parser.add_argument("--json", help="write all runs and figures to this file")
    args = parser.parse_args()
    runs = []
    for _ in range(args.starts):
        for launcher in ("torchrun", "frun"):
            runs.append(("start", launch(launcher, kill=False)))
            show(*runs[-1])
    for launcher, count in (("frun", args.kills), ("torchrun", args.torchrun_kills)):
        for _ in range(count):
            runs.append(("kill", launch(launcher, kill=True)))
            show(*runs[-1])
    found: dict[str, object] = {
        "machine": f"{os.cpu_count()} cores, {platform.platform()}, Python {platform.python_version()}"
    }
    medians = {}
    for launcher in PROGRAMS:
        started = [r.started_s for kind, r in runs if kind == "start" and r.launcher == launcher]
        killed = [r for kind, r in runs if kind == "kill" and r.launcher == launcher]
        found[f"{launcher} start-up to the first step"] = figures(started)
        found[f"{launcher} kill to the next step"] = figures(r.recovered_s for r in killed)
        clean = sum(r.is_clean(1) for r in killed)
        found[f"{launcher} recovered with one restart"] = f"{clean} of {len(killed)}"
        medians[launcher] = figures(started).get("median_s")
    if medians["frun"] and medians["torchrun"]:
        found["start-up, torchrun / frun"] = round(medians["torchrun"] / medians["frun"], 2)
    print(json.dumps(found, indent=1))
    if args.json:
        everything = {"figures": found, "runs": [{"kind": k, **asdict(r)} for k, r in runs]}
        Path(args.json).write_text(json.dumps(everything, indent=1), encoding="utf-8")
    ours = [(kind, run) for kind, run in runs if run.launcher == "frun"]
    return 0 if all(run.is_clean(1 if kind == "kill" else 0) for kind, run in ours) else 1


def show(kind: str, run: Run) -> None:
    """Say how one run went."""
    print(
        f"{run.launcher:9} {kind:6} exit {run.code} restarts {run.restarts}"
        f" started {run.started_s} recovered {run.recovered_s}",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
