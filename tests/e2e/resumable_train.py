"""A small training run that kills itself where a test says, and tells a digest of what it has learnt.

Arguments: number of steps, names of variants joined by commas, and the faults as JSON lists of
[rank, generation, step, place].
"""

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import frun
from frun.worker.runtime import started

STEPS, VARIANTS, FAULTS = int(sys.argv[1]), sys.argv[2].split(","), json.loads(sys.argv[3])
RUNS: list[frun.Session] = []


def fault(place: str) -> None:
    """Die here if the test wants it."""
    rank = int(os.environ["RANK"])
    step = RUNS[0]._gate.step if RUNS else -1
    generation = started[0].generation if started else 0
    for each in FAULTS:
        if each == [rank, generation, step, place]:
            if place == "import":
                until_another_entered()
            os.kill(os.getpid(), signal.SIGKILL)


def until_another_entered() -> None:
    """Wait until frun can know that the script is resumable: before, a death is like any script's."""
    deadline = time.monotonic() + 20
    while not Path("entered").exists() and time.monotonic() < deadline:
        time.sleep(0.002)


class Digits(Dataset[tuple[torch.Tensor, int]]):
    """Random pictures with noise that is drawn when they are loaded."""

    def __init__(self) -> None:
        self.images = torch.randn(192, 16, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        fault("loader")
        return self.images[index] + 0.1 * torch.randn(16), index % 4


class Model(nn.Module):
    """Dropout, running statistics, and a weight that is large enough for several buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.norm = nn.BatchNorm1d(64)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(64, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(torch.relu(self.norm(self.first(images))))
        fault("forward")
        out: torch.Tensor = self.last(hidden)
        return out


class Counter:
    """State of the script's own."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Deadly(torch.optim.SGD):
    """Dies when half of its parameters are new, or while it takes a state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        fault("copy")
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        if any(each[3] == "update" for each in FAULTS):
            self.param_groups[0]["params"] = parameters[:2]
            super().step()
            fault("update")
            self.param_groups[0]["params"] = parameters[2:]
            super().step()
            self.param_groups[0]["params"] = parameters
            return None
        return super().step(closure)


def optimizers(model: nn.Module) -> dict[str, Any]:
    """Return what the variant trains with."""
    if "adamw" in VARIANTS:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    else:
        optimizer = Deadly(model.parameters(), lr=0.05, momentum=0.9)
    if "several" in VARIANTS:
        other = torch.optim.SGD(model.get_submodule("last").parameters(), lr=0.01)
        return {"optimizer": optimizer, "other": other}
    return {"optimizer": optimizer}


def loader() -> DataLoader[tuple[torch.Tensor, int]]:
    """Return the variant's loader."""
    data = Digits()
    workers = 2 if "workers" in VARIANTS else 0
    if "shuffle" in VARIANTS:
        return DataLoader(data, batch_size=16, shuffle=True, num_workers=workers)
    return DataLoader(data, batch_size=16, sampler=DistributedSampler(data), num_workers=workers)


def learn(
    session: frun.Session, model: nn.Module, replica: nn.Module, parts: dict[str, Any], batch: Any
) -> None:
    """Do one step."""
    images, labels = batch
    optimizer = parts["optimizer"]
    if "scaler" in VARIANTS:
        scaled(replica, parts, batch)
        fault("after")
        return
    optimizer.zero_grad()
    torch.autograd.backward(nn.functional.cross_entropy(replica(images), labels))
    fault("gate")
    if "atomic" in VARIANTS:
        with session.update():
            optimizer.step()
            parts["scheduler"].step()
            parts["counter"].seen += len(images)
    else:
        optimizer.step()
        if "other" in parts:
            parts["other"].step()
    fault("after")


def scaled(replica: nn.Module, parts: dict[str, Any], batch: Any) -> None:
    """Do a step with scaled gradients; now and then they overflow and the step is skipped."""
    images, labels = batch
    optimizer, scaler = parts["optimizer"], parts["scaler"]
    optimizer.zero_grad()
    found = nn.functional.cross_entropy(replica(images), labels)
    scaler.scale(found * (float("inf") if RUNS[0].step % 5 == 2 else 1.0)).backward()
    scaler.step(optimizer)
    fault("gate")
    scaler.update()


def batches(session: frun.Session) -> Iterator[Any]:
    """Return the batches, in one pass or epoch by epoch."""
    seed = None if "unseeded" in VARIANTS else 5
    data = loader()
    if "epochs" not in VARIANTS:
        yield from session.batches(data, steps=STEPS, seed=seed)
        return
    while session.step < STEPS:
        yield from session.batches(data, seed=seed)


@frun.resumable
def train(session: frun.Session) -> None:
    """Train, whatever dies."""
    RUNS[:] = [session]
    rank = session.rank
    Path("entered").touch()
    fault("entry")
    dist.init_process_group("gloo")
    fault("met")
    torch.manual_seed(0)
    model: Any = Model()
    model.last.weight.register_hook(lambda gradient: fault("backward"))
    parts: dict[str, Any] = optimizers(model)
    parts["counter"] = Counter()
    if "scaler" in VARIANTS:
        parts["scaler"] = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)
    if "atomic" in VARIANTS:
        parts["scheduler"] = torch.optim.lr_scheduler.StepLR(parts["optimizer"], 5, 0.9)
    if "compiled" in VARIANTS:
        model = torch.compile(model, backend="eager")
    replica = DistributedDataParallel(model) if "wrapped" in VARIANTS else None
    session.restore(model=replica or model, **parts)
    fault("restored")
    replica = replica or DistributedDataParallel(model)
    say(f"entered {rank} {os.getpid()} {session.generation} {session.step}")
    for batch in batches(session):
        if "raises" in VARIANTS and session.step == 3 and rank == 1:
            raise ValueError("a picture is upside down")
        learn(session, model, replica, parts, batch)
    digest = hashlib.sha256()
    for part in ("model", "optimizer"):
        digest.update(repr(flat((model if part == "model" else parts[part]).state_dict())).encode())
    say(f"learnt {rank} {session.step} {parts['counter'].seen} {digest.hexdigest()}")


def say(line: str) -> None:
    """Write a line at once: ranks share the stream."""
    os.write(1, f"{line}\n".encode())


def flat(value: Any) -> Any:
    """Return nested state as plain values."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): flat(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [flat(item) for item in value]
    return value


if __name__ == "__main__":
    torch.set_num_threads(1)
    fault("import")
    train()
