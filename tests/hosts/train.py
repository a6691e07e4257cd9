"""Data-parallel training in small: every step adds the mean of the ranks' ones, so the weight is the step.

Tells the test of every step by a datagram. Ends when rank 0 sees the file `finish`. A rank that sees its
file `fail-RANK` removes it and ends with 7. With `--alone` the ranks do not meet: each ends with its file
`end-RANK`.
"""

import json
import os
import re
import socket
import sys
import time
from pathlib import Path

SHARED = Path(sys.argv[1])
RANK = int(os.environ["RANK"])
# A script is not told its generation; its log folder is `attempt_<generation - 1>`.
GENERATION = int(re.findall(r"attempt_(\d+)", os.environ["TORCHELASTIC_ERROR_FILE"])[-1]) + 1
NEWS = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
NEWS.connect(str(SHARED / "news"))


def tell(step: int) -> None:
    news = {
        "at": time.monotonic(),
        "host": os.environ["TEST_HOST"],
        "name": socket.gethostname(),
        "pid": os.getpid(),
        "rank": RANK,
        "world_size": int(os.environ["WORLD_SIZE"]),
        "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        "generation": GENERATION,
        "master_addr": os.environ["MASTER_ADDR"],
        "step": step,
    }
    NEWS.send(json.dumps(news).encode())


def fail_if_told() -> None:
    told = SHARED / f"fail-{RANK}"
    if told.exists():
        told.unlink()
        sys.exit(7)


def alone() -> None:
    step = 0
    while not (SHARED / f"end-{RANK}").exists():
        fail_if_told()
        tell(step)
        step += 1
        time.sleep(0.05)


def together() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    checkpoint = SHARED / "checkpoint"
    weight = torch.tensor([float(checkpoint.read_text()) if checkpoint.exists() else 0.0])
    dist.broadcast(weight, 0)
    step = int(weight)
    tell(step)
    while True:
        fail_if_told()
        finish = RANK == 0 and (SHARED / "finish").exists()
        gradient = torch.tensor([1.0, float(finish)])
        dist.all_reduce(gradient)
        weight += gradient[0] / dist.get_world_size()
        step += 1
        if weight.item() != step:
            sys.exit(9)
        if RANK == 0:
            fresh = checkpoint.with_suffix(".new")
            fresh.write_text(str(weight.item()))
            fresh.replace(checkpoint)
        tell(step)
        if gradient[1]:
            break
        time.sleep(0.05)
    dist.destroy_process_group()


if __name__ == "__main__":
    tell(-1)
    if "--alone" in sys.argv:
        alone()
    else:
        together()
