"""The agent never keeps its event loop busy: a fault is noticed at once, whatever else it does."""

import sys
from pathlib import Path

from tests.e2e.harness import Site

TRAINING = """
import os, time
import torch.distributed as dist
import frun

@frun.resumable
def train(session):
    dist.init_process_group("gloo")
    for step in range(session.restore(), 12):
        with session.update():
            print("x" * 50_000)
        if step == 5 and session.generation == 1 and dist.get_rank() == 1:
            os.kill(os.getpid(), 9)
        dist.barrier()

train()
"""


def test_no_turn_takes_ten_milliseconds(site: Site, tmp_path: Path) -> None:
    """Start, much output in prefixed lines, a recovery and the end of a job of 4 ranks; CPU time counts."""
    slow = tmp_path / "slow"
    done = site.run(
        "--nproc-per-node=4",
        site.script("train.py", TRAINING),
        program=(sys.executable, "-m", "tests.e2e.timed_frun"),
        env={
            "FRUN_SLOW_S": "0.01",
            "FRUN_SLOW_FILE": str(slow),
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
    )
    assert done.code == 0, done.err
    assert "recovered in" in done.err
    assert slow.read_text() == ""
