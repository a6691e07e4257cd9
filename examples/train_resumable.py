"""Train a classifier of handwritten digits that goes on at the same step when workers die.

    frun --nproc-per-node 4 examples/train_resumable.py

Kill one of its workers (`kill -9 PID`, the pids are printed): the others keep their processes, a new one
takes the dead one's place and gets the state from a replica, and training ends with the same bits as if
nothing had happened. Three lines make the difference to an ordinary script: the decorator, `restore`, and
the loop over `session.batches`. The same file runs under torchrun and plain python.
"""

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import frun


def load_data() -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    """1,437 pictures of 8 x 8 pixels to learn from, 360 to check on; the same split on every rank."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    seen, unseen = order[:-360], order[-360:]
    return TensorDataset(images[seen], labels[seen]), images[unseen], labels[unseen]


@frun.resumable
def train(session: frun.Session, steps: int, batch: int) -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    session.restore(model=model, optimizer=optimizer)
    print(f"rank {session.rank}, pid {os.getpid()}: begins at step {session.step}", flush=True)

    pictures, images, labels = load_data()
    sampler = DistributedSampler(pictures, seed=0)
    loader = DataLoader(pictures, batch_size=batch, sampler=sampler, drop_last=True)
    replica = DistributedDataParallel(model)
    for inputs, targets in session.batches(loader, steps=steps, seed=0):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(replica(inputs), targets)
        loss.backward()
        optimizer.step()
        if session.rank == 0 and session.step % 50 == 0:
            print(f"step {session.step}/{steps}  loss {loss.item():.3f}", flush=True)

    model.eval()
    with torch.no_grad():
        accuracy = float((model(images).argmax(dim=1) == labels).float().mean())
    if session.rank == 0:
        print(f"accuracy on unseen digits {accuracy:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="updates in all")
    parser.add_argument("--batch", type=int, default=32, help="samples per step and rank")
    options = parser.parse_args()
    train(options.steps, options.batch)
