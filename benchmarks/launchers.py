"""The two launchers that are compared, where this project is, and the small model that scripts train."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAMS = {
    "torchrun": (sys.executable, "-m", "torch.distributed.run"),
    "frun": (sys.executable, "-m", "frun"),
}
SMALL_MODEL = """
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
import frun

torch.set_num_threads(1)

def begin(session):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    first = session.restore(model=model, optimizer=optimizer)
    replica = DistributedDataParallel(model)
    inputs, targets = torch.randn(32, 64), torch.zeros(32, dtype=torch.long)

    def step():
        loss = cross_entropy(replica(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return first, step
"""
"""The beginning of a script: `begin` returns the first step's number, and what does one."""
