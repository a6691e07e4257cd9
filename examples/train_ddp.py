"""Train a small classifier on scikit-learn's handwritten digits with DistributedDataParallel.

Run it on one machine with two workers:

    frun --nproc-per-node 2 examples/train_ddp.py

With --checkpoint FILE it saves its state every few steps and goes on from there when it is started again,
so `frun --max-restarts 3 ... --checkpoint FILE` survives the death of any worker. The same file runs under
torchrun.
"""

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@dataclass(frozen=True)
class Data:
    """1,437 pictures of 8 x 8 pixels to learn from, 360 to check on; the same split on every rank."""

    train: TensorDataset
    images: torch.Tensor
    labels: torch.Tensor


def load_data() -> Data:
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    seen, unseen = order[:-360], order[-360:]
    return Data(TensorDataset(images[seen], labels[seen]), images[unseen], labels[unseen])


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write to a new file and rename it: a death in the middle leaves the old checkpoint whole."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, new)
    new.rename(path)


def accuracy(model: nn.Module, data: Data) -> float:
    with torch.no_grad():
        guesses = model(data.images).argmax(dim=1)
    return float((guesses == data.labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32, help="samples per step and rank")
    parser.add_argument("--checkpoint", type=Path, help="file to save to and to resume from")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data = load_data()
    sampler = DistributedSampler(data.train, seed=0)
    loader = DataLoader(data.train, batch_size=options.batch, sampler=sampler, drop_last=True)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    step = 0
    if options.checkpoint is not None and options.checkpoint.exists():
        state = torch.load(options.checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
        print(f"rank {rank}: resumed at step {step}", flush=True)
    replica = DistributedDataParallel(model)

    began = time.perf_counter()
    for epoch in range(step // len(loader), options.epochs):
        sampler.set_epoch(epoch)
        for index, (images, labels) in enumerate(loader):
            if epoch * len(loader) + index < step:
                continue  # done before the checkpoint
            loss = nn.functional.cross_entropy(replica(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if options.checkpoint is not None and rank == 0 and step % options.every == 0:
                save(options.checkpoint, model, optimizer, step)
        if rank == 0:
            shown = f"loss {loss.item():.3f}  accuracy on unseen digits {accuracy(model, data):.3f}"
            print(f"epoch {epoch + 1}/{options.epochs}  step {step}  {shown}", flush=True)
    if rank == 0:
        took = time.perf_counter() - began
        print(f"trained on {world_size} ranks in {took:.1f} s", flush=True)
    # First what uses the group: DDP's last reference would end it while Python's lock is held, and gloo's
    # thread may need that lock to end. The process would then hang now and then, under any launcher.
    del replica
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
