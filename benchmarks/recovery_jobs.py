"""A job that trains, under frun or torchrun, and is broken again and again: the parts of `recovery`.

Owns the script, the launch, and how long a fault takes: from the fault until the last of all ranks has
completed its next step, read from what the ranks write down themselves.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.launchers import PROGRAMS, ROOT
from tests import event_log

LIMIT_S = 60.0
LOOK_S = 0.005
PHASES = ("detect", "pause", "respawn", "rebuild", "agree", "copy", "first_step")
"""Of frun's own account of an incident."""
SCRIPT = """
import os, pathlib, sys, time
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
import frun

torch.set_num_threads(1)
rank, folder = os.environ["RANK"], pathlib.Path(os.environ["BENCHMARK_FOLDER"])
done = os.open(folder / f"steps.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
saved = folder / "checkpoint.pt"
checkpoints = bool(os.environ.get("BENCHMARK_CHECKPOINTS"))

@frun.resumable
def train(session):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = session.restore(model=model, optimizer=optimizer)
    if checkpoints and saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    replica = DistributedDataParallel(model)
    for step in range(first, int(sys.argv[1])):
        if (folder / "stop").exists() and not checkpoints:
            break
        draw = torch.Generator().manual_seed(step * 1000 + dist.get_rank())
        inputs = torch.randn(32, 256, generator=draw)
        loss = cross_entropy(replica(inputs), torch.randint(0, 10, (32,), generator=draw))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        os.write(done, f"{time.monotonic()} {step} {os.getpid()}\\n".encode())
        if checkpoints and step % 10 == 9:
            if dist.get_rank() == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "step": step + 1}, folder / "new.pt")
                os.replace(folder / "new.pt", saved)
            dist.barrier()
        time.sleep(0.01)
    dist.destroy_process_group()

train()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One fault and what came of it. Times in seconds."""

    launcher: str
    fault: str
    rank: int
    seconds: float
    """Until all ranks have completed their next step."""
    repeated: int
    """Completed steps that were done again."""
    kept: int
    """Processes of other ranks that went on."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """How frun itself splits the time, without what it can't see: the step in which the fault fell."""


@dataclass(frozen=True, slots=True)
class Row:
    """One completed step of one rank."""

    at: float
    step: int
    pid: int


class Job:
    """One launch of the script, watched through the files that its ranks write."""

    def __init__(
        self,
        launcher: str,
        ranks: int,
        folder: Path,
        *,
        checkpoints: bool,
        shared_store: bool = False,
        drills: bool = False,
    ) -> None:
        """Start it; `shared_store` is torchrun's own default, with which it does not recover."""
        self.launcher = launcher
        self.ranks = ranks
        self.folder = folder
        script = folder / "train.py"
        script.write_text(SCRIPT, encoding="utf-8")
        self._env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "BENCHMARK_FOLDER": str(folder),
            "BENCHMARK_CHECKPOINTS": "1" if checkpoints else "",
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "" if shared_store else "1",
        }
        own = [f"--state-dir={folder / 'state'}", f"--log-dir={folder / 'logs'}"]
        own += ["--allow-drills"] if drills else []
        command = [
            *PROGRAMS[launcher],
            "--standalone",
            f"--nproc-per-node={ranks}",
            "--max-restarts=100",
            *(own if launcher == "frun" else ()),
            str(script),
            "100000",
        ]
        self.process = subprocess.Popen(
            command, env=self._env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def rows(self, rank: int) -> list[Row]:
        """Return the steps that a rank has completed so far."""
        try:
            lines = (self.folder / f"steps.{rank}").read_text().split("\n")[:-1]
        except FileNotFoundError:
            return []
        fields = [line.split() for line in lines]
        return [Row(float(at), int(step), int(pid)) for at, step, pid in fields]

    def until(self, condition: Callable[[], float | None]) -> float:
        """Look until the condition gives a value. Raises TimeoutError."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            value = condition()
            if value is not None:
                return value
            if self.process.poll() is not None:
                raise TimeoutError(f"{self.launcher} ended with {self.process.returncode}")
            time.sleep(LOOK_S)
        raise TimeoutError(f"{self.launcher} did not go on within {LIMIT_S:g} s")

    def breaks(self, fault: str, rank: int, warm_up: int) -> Recovery:
        """Break a rank once every rank has completed `warm_up` more steps; wait for the next ones.

        A `kill` is done here; any other fault by `frun inject-fault`. Raises TimeoutError.
        """
        before = [len(self.rows(each)) for each in range(self.ranks)]

        def warm() -> float | None:
            more = [len(self.rows(each)) - before[each] for each in range(self.ranks)]
            return 1.0 if min(more) >= warm_up else None

        self.until(warm)
        pids = {each: self.rows(each)[-1].pid for each in range(self.ranks)}
        incidents = len(self._events("incident_closed"))
        if fault == "kill":
            began = time.monotonic()
            os.kill(pids[rank], signal.SIGKILL)
        else:
            began = self._inject(fault, rank)
        victim = pids[rank]
        last = self.until(lambda: self._all_after(rank, victim, began))
        rows = [self.rows(each) for each in range(self.ranks)]
        highest = max(row.step for mine in rows for row in mine if row.at < began)
        again = next(row.step for row in rows[rank] if row.at > began and row.pid != victim)
        kept = sum(
            1 for each in range(self.ranks) if each != rank and rows[each][-1].pid == pids[each]
        )
        return Recovery(
            launcher=self.launcher,
            fault=fault,
            rank=rank,
            seconds=last - began,
            repeated=max(0, highest + 1 - again),
            kept=kept,
            phases=self._phases(incidents) if self.launcher == "frun" else {},
        )

    def _inject(self, fault: str, rank: int) -> float:
        """Let frun do the fault; return when it was done."""
        done = len(self._events("fault_injected"))
        subprocess.run(
            [
                *PROGRAMS["frun"],
                "inject-fault",
                fault,
                f"--rank={rank}",
                "--yes",
                f"--state-dir={self.folder / 'state'}",
                "--timeout=50",
            ],
            env=self._env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=LIMIT_S,
            check=False,
        )
        return float(self._events("fault_injected")[done]["monotonic_s"])

    def _phases(self, incidents: int) -> dict[str, float]:
        """Return the split of the incident that comes after so many."""

        def closed() -> float | None:
            return 1.0 if len(self._events("incident_closed")) > incidents else None

        self.until(closed)
        incident = self._events("incident_closed")[incidents]
        return {phase: float(incident[f"{phase}_s"]) for phase in PHASES}

    def _events(self, name: str) -> list[dict[str, Any]]:
        return event_log.events(self.folder / "logs", name)

    def _all_after(self, rank: int, victim: int, began: float) -> float | None:
        """Return when the last rank completed its first step after the newcomer began.

        A survivor may complete the step in which the victim died; what counts are steps at or after
        the newcomer's first one. `victim` is the process that was hit.
        """
        new = [row for row in self.rows(rank) if row.at > began and row.pid != victim]
        if not new:
            return None
        times = [new[0].at]
        for each in range(self.ranks):
            if each == rank:
                continue
            after = [
                row.at for row in self.rows(each) if row.at > began and row.step >= new[0].step
            ]
            if not after:
                return None
            times.append(after[0])
        return max(times)

    def stop(self) -> None:
        """Let the script end; stop it if it does not."""
        (self.folder / "stop").touch()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(45)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
