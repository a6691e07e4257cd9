"""The training of `resumable_train`, with noise in it that a test asks for: all ranks in the same step.

Files in the job's folder: `do-<step>` holds lines `<rank, or all> <word> <seconds>`, done after that step;
`slow-<rank>` holds a pid and seconds: another process of that rank takes so long for its first step.
"""

import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import frun
from tests.hosts.resumable_train import teller, train

HALF_A_STEP_S = 0.05


def sleep(session: frun.Session, seconds: float) -> None:
    """Sleep in the script's own code."""
    time.sleep(seconds)


def collect(session: frun.Session, seconds: float) -> None:
    """Collect garbage for at least so long; each collection takes a second or more."""
    kept: list[object] = [[[]] for _ in range(2_000_000)]
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        gc.collect()
    kept.clear()


def evaluate(session: frun.Session, seconds: float) -> None:
    """Take long, as declared."""
    with session.phase("eval"):
        time.sleep(seconds)


def clock(session: frun.Session, seconds: float) -> None:
    """Leave what the wall clock says, for the test to see that it was set."""
    path = Path(sys.argv[1], f"clock-{session.rank}")
    path.with_suffix(".new").write_text(str(time.clock_gettime(time.CLOCK_REALTIME)))
    path.with_suffix(".new").rename(path)


HOW: dict[str, Callable[[frun.Session, float], None]] = {
    "sleep": sleep,
    "collect": collect,
    "evaluate": evaluate,
    "clock": clock,
}


def main(folder: Path) -> None:
    """Train, and make noise."""
    tell_steps = teller(folder)
    slow = folder / f"slow-{os.environ['RANK']}"

    def over(step: int) -> bool:
        if slow.exists():
            pid, seconds = slow.read_text().split()
            if int(pid) != os.getpid():
                slow.unlink()
                time.sleep(float(seconds))
        return (folder / "finish").exists()

    def tell(session: frun.Session, step: int, digest: str) -> None:
        tell_steps(session, step, digest)
        wanted = folder / f"do-{step}"
        if wanted.exists():
            for line in wanted.read_text().splitlines():
                who, word, seconds = line.split()
                if who in ("all", str(session.rank)):
                    HOW[word](session, float(seconds))

    train(tell, over, HALF_A_STEP_S, under_frun=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
