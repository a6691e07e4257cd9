"""A training that does to itself what a test writes into a file, in the forward pass of its next step.

Arguments: the folder of those files (`do.<rank>`, one word and a number of seconds) and the number of steps.
"""

import ctypes
import gc
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import frun

FOLDER, STEPS = Path(sys.argv[1]), int(sys.argv[2])
STEP_S = 0.01
AFTERWARDS_S = 0.8
"""Some beats, and less than a rank may stand still."""
RUNS: list[frun.Session] = []
COUNTED: list[int] = []
"""Steps that are left until something is to be said."""


def stop(seconds: float) -> None:
    """Stop this process as a signal or a debugger would."""
    os.kill(os.getpid(), signal.SIGSTOP)


def hold(seconds: float) -> None:
    """Wait in C with Python's lock held."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def collect(seconds: float) -> None:
    """Collect garbage, with Python's lock held all the time, for at least so long."""
    kept: list[object] = [[[]] for _ in range(1_000_000)]
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        # No Python code runs within one call, but between two: they must be long to show anything.
        gc.collect()
    kept.clear()


def spin(seconds: float) -> None:
    """Compute in C for ever, with Python's lock held."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def count(steps: float) -> None:
    """Say when so many steps are done from here on."""
    COUNTED.append(int(steps))


def loop(seconds: float) -> None:
    """Run for ever in code of the script."""
    while True:
        time.sleep(0.01)


def declare(seconds: float) -> None:
    """Take long for a declared reason, and a while for the next step."""
    with RUNS[0].phase("eval"):
        time.sleep(seconds)
    time.sleep(AFTERWARDS_S)


def evaluate(seconds: float) -> None:
    """Take long in evaluation mode, which nobody declared, and a while for the next step."""
    model = RUNS[0]._whereabouts.models[0]
    model.training = False
    time.sleep(seconds)
    model.training = True
    time.sleep(AFTERWARDS_S)


def fill(seconds: float) -> None:
    """Write to a disk that is full."""
    with open("/dev/full", "wb", buffering=0) as file:
        file.write(b"checkpoint")


def dial(seconds: float) -> None:
    """Connect to a port at which nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = unused.getsockname()
    socket.create_connection(address)


def ecc(seconds: float) -> None:
    """Raise what torch does when a device has lost a memory cell."""
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


def nan(seconds: float) -> None:
    """Report a loss that is no number, and one that is."""
    say(f"nan at {RUNS[0].step}")
    RUNS[0].report(loss=float("nan"))
    RUNS[0].report(loss=1.0)


def barrier(seconds: float) -> None:
    """Wait in a collective that no other rank enters."""
    dist.barrier()


HOW: dict[str, Callable[[float], None]] = {
    "stop": stop,
    "hold": hold,
    "spin": spin,
    "collect": collect,
    "sleep": time.sleep,
    "loop": loop,
    "declare": declare,
    "evaluate": evaluate,
    "barrier": barrier,
    "fill": fill,
    "dial": dial,
    "ecc": ecc,
    "nan": nan,
    "count": count,
}


def fault(rank: int) -> None:
    """Do what a file says, once."""
    path = FOLDER / f"do.{rank}"
    if path.exists():
        word, _, seconds = path.read_text(encoding="ascii").strip().partition(" ")
        path.unlink()
        say(f"does {word} {rank} {os.getpid()} {time.monotonic():.3f}")
        HOW[word](float(seconds or 0))


def say(line: str) -> None:
    """Write a line at once: ranks share the stream."""
    os.write(1, f"{line}\n".encode())


@frun.resumable
def train(session: frun.Session) -> None:
    """Train small steps of 10 ms."""
    RUNS[:] = [session]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.restore(model=model, optimizer=optimizer)
    replica = DistributedDataParallel(model)
    say(f"entered {session.rank} {os.getpid()} {session.step}")
    while session.step < STEPS:
        fault(session.rank)
        time.sleep(STEP_S)
        optimizer.zero_grad()
        replica(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        if COUNTED:
            COUNTED[0] -= 1
            if COUNTED[0] <= 0:
                COUNTED.clear()
                say("counted")
    say(f"learnt {session.rank} {os.getpid()} {session.step}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    train()
