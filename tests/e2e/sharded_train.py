"""Trains a model of which each rank holds a part, dies where a test says, and tells a digest of it.

Arguments: `hsdp` (two replicas of two parts), `fsdp` (four parts), `own` (two replicas of two parts that are
plain tensors) or `untold` (the same, but frun is not told); and the faults as JSON lists of [rank,
generation, step, place].
"""

import hashlib
import json
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import frun

KIND, FAULTS = sys.argv[1], json.loads(sys.argv[2])
STEPS = 16


def say(*words: object) -> None:
    """Write one line in one piece."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class Deadly(torch.optim.AdamW):
    """Dies at its gate or with half of an update done."""

    fault: Any = None

    def step(self, closure: Any = None) -> Any:
        self.fault("update")
        return super().step(closure)


def parts(rank: int) -> tuple[nn.Module, Any]:
    """Return the model, and what makes gradients the same on all replicas."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    if KIND in ("own", "untold"):
        torch.manual_seed(rank % 2)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)
        groups = [dist.new_group([part, part + 2]) for part in range(2)]
        return model, groups[rank % 2]
    names = ("replicas", "parts") if KIND == "hsdp" else ("parts",)
    mesh = init_device_mesh("cpu", (2, 2) if KIND == "hsdp" else (4,), mesh_dim_names=names)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, None


@frun.resumable
def train(session: frun.Session) -> None:
    """Train, whatever dies."""

    def fault(place: str) -> None:
        if [session.rank, session.generation, session._gate.step, place] in FAULTS:
            os.kill(os.getpid(), signal.SIGKILL)

    dist.init_process_group("gloo")
    model, group = parts(session.rank)
    optimizer = Deadly(model.parameters(), lr=0.01)
    optimizer.fault = fault
    if KIND == "own":
        session.shard = f"part {session.rank % 2}"
    session.restore(model=model, optimizer=optimizer)
    say("entered", session.rank, os.getpid(), session.step)
    for step in range(session.step, STEPS):
        torch.manual_seed(1000 * step + session.rank)
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        fault("forward")
        loss.backward()
        if group is not None:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)
        fault("gate")
        optimizer.step()
        fault("after")
    digest = hashlib.sha256()
    for state in (*model.state_dict().values(), *flat(optimizer.state_dict())):
        local = state.to_local() if hasattr(state, "to_local") else state
        digest.update(local.detach().contiguous().numpy().tobytes())
    say("learnt", session.rank, session.step, digest.hexdigest())


def flat(state: dict[str, Any]) -> list[torch.Tensor]:
    """Return an optimizer's tensors in order."""
    return [value for entry in state["state"].values() for value in entry.values()]


if __name__ == "__main__":
    train()
