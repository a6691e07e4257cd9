"""What detection costs a training process: the same steps with all that looks for faults, and with nothing.

    python -m benchmarks.detection_cost [--rounds 5] [--steps 5000] [--json FILE]

One rank with a small DDP model and steps without any sleep, so that what a step costs more shows: a step of
10 ms takes longer by the same microseconds. Each round runs every choice once, in turn; of each the median
of blocks of 400 steps counts, the median of the rounds is printed, and what part of 10 ms the difference is.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.launchers import PROGRAMS, ROOT, SMALL_MODEL
from benchmarks.machine import describe

LIMIT_S = 120.0
STEP_US = 10_000.0
OFF = ("--beat-timeout=0", "--hang-timeout=0", "--device-checks=none")
CHOICES: dict[str, Sequence[str]] = {
    "nothing": OFF,
    "as by default": (),
    "--check-gradients alone": (*OFF, "--check-gradients=report"),
    "--compare-replicas 100 alone": (*OFF, "--compare-replicas=100"),
    "everything": ("--check-gradients=report", "--compare-replicas=100"),
}
SCRIPT = (
    SMALL_MODEL
    + """
import pathlib, statistics, sys, time

BLOCK, WARM_UP = 400, 100

@frun.resumable
def train(session):
    _, step = begin(session)
    blocks = []
    for number in range(int(sys.argv[2])):
        if number >= WARM_UP and (number - WARM_UP) % BLOCK == 0:
            blocks.append(time.perf_counter())
        step()
    took = [(after - before) / BLOCK for before, after in zip(blocks, blocks[1:])]
    pathlib.Path(sys.argv[1]).write_text(repr(statistics.median(took)))
    dist.destroy_process_group()

train()
"""
)


def step_us(flags: Sequence[str], steps: int) -> float:
    """Return the microseconds of a step under frun with these flags."""
    with tempfile.TemporaryDirectory(prefix="cost") as name:
        script, found = Path(name, "train.py"), Path(name, "found")
        script.write_text(SCRIPT, encoding="utf-8")
        command = [*PROGRAMS["frun"], "--standalone", "--nproc-per-node=1", *flags]
        subprocess.run(
            [*command, str(script), str(found), str(steps)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": name},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=LIMIT_S,
            check=True,
        )
        return float(found.read_text(encoding="utf-8")) * 1e6


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    machine = describe()
    print(machine)
    taken: dict[str, list[float]] = {name: [] for name in CHOICES}
    for number in range(options.rounds):
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
        for name, flags in CHOICES.items():
            taken[name].append(step_us(flags, options.steps))
    medians = {name: statistics.median(values) for name, values in taken.items()}
    for name, median in medians.items():
        more = median - medians["nothing"]
        print(f"{name:30} {median:7.1f} us a step, {more:+6.1f} us, {more / STEP_US:+.2%} of 10 ms")
    if options.json is not None:
        document = {"machine": machine, "step_us": taken}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
