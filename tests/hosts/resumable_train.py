"""Data-parallel training that recovers within a step, and tells the test a digest of its state after each.

Under frun it tells by datagrams, and ends when rank 0 sees the file `finish`. With a file and a number of
steps as arguments, as under torchrun, rank 0 writes the digests to that file: nothing befalls such a run.
"""

import array
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import frun

HALF_A_STEP_S = 0.02
"""Slept in front of the update and behind it, so that a fault meets either."""
Tell = Callable[[frun.Session, int, str], None]


def teller(folder: Path) -> Tell:
    """Return what tells a test of each step."""
    news = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    news.connect(str(folder / "news"))

    def tell(session: frun.Session, step: int, digest: str) -> None:
        told = {
            "at": time.monotonic(),
            "host": os.environ["TEST_HOST"],
            "name": socket.gethostname(),
            "pid": os.getpid(),
            "rank": session.rank,
            "world_size": int(os.environ["WORLD_SIZE"]),
            "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
            "generation": session.generation,
            "master_addr": os.environ["MASTER_ADDR"],
            "step": step,
            "digest": digest,
        }
        news.send(json.dumps(told).encode())

    return tell


def digest_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of every bit of the state."""
    digest = hashlib.sha256()
    for tensor in tensors(model, optimizer):
        digest.update(array.array("d", tensor.double().flatten().tolist()).tobytes())
    return digest.hexdigest()[:16]


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield parameters, buffers, and what the optimizer knows of each parameter."""
    yield from model.state_dict().values()
    for parameter in model.parameters():
        yield from (value for _, value in sorted(optimizer.state[parameter].items()))


@frun.resumable
def train(
    session: frun.Session,
    tell: Tell,
    over: Callable[[int], bool],
    pause_s: float,
    *,
    under_frun: bool,
) -> None:
    """Train until rank 0 finds that it is over; every rank asks before each step."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.restore(model=model, optimizer=optimizer)
    replica = DistributedDataParallel(model)
    while True:
        step = session.step
        finish = torch.tensor([float(over(step) and rank == 0)])
        dist.all_reduce(finish)
        if finish:
            break
        torch.manual_seed(step * 1000 + rank)
        loss = nn.functional.cross_entropy(replica(torch.randn(8, 16)), torch.randint(0, 4, (8,)))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        time.sleep(pause_s)
        optimizer.step()
        tell(session, step + 1, digest_of(model, optimizer))
        time.sleep(pause_s)
    if under_frun:
        dist.destroy_process_group()


def recover(folder: Path) -> None:
    """Train under frun."""
    train(teller(folder), lambda step: (folder / "finish").exists(), HALF_A_STEP_S, under_frun=True)


def undisturbed(file: Path, steps: int) -> None:
    """Train elsewhere, without a pause."""
    digests: dict[int, str] = {}

    def note(session: frun.Session, step: int, digest: str) -> None:
        digests[step] = digest

    train(note, lambda step: step == steps, 0.0, under_frun=False)
    if os.environ["RANK"] == "0":
        new = file.with_suffix(".new")
        new.write_text(json.dumps(digests))
        new.rename(file)
    # Rank 0 may still be in the last collective: nobody goes before it.
    limit = time.monotonic() + 30
    while not file.exists() and time.monotonic() < limit:
        time.sleep(0.01)
    # torch can abort ("terminate called without an active exception") while it takes gloo's threads
    # down as its peers do the same. All digests are known by now.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) == 2:
        recover(Path(sys.argv[1]))
    else:
        undisturbed(Path(sys.argv[1]), int(sys.argv[2]))
