"""What all detection costs: the same script with everything that looks for faults, and with nothing.

    python -m benchmarks.detection_cost [--ranks 4] [--pairs 10] [--steps 1000]

The script of `benchmarks.overhead`, steps of 10 ms of sleep and a little work. With everything: beats and
positions, checks of devices and host, the norm of all gradients in each step, a comparison of replicas every
100 steps. Pairs of runs, one after the other; the ratio is the median of the pairs'.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence

from benchmarks.machine import describe
from benchmarks.overhead import launch

EVERYTHING = ("--check-gradients=report", "--compare-replicas=100")
NOTHING = ("--beat-timeout=0", "--hang-timeout=0", "--device-checks=none")


def pair(ranks: int, steps: int, *, first: bool) -> tuple[float, float]:
    """Return the seconds of a step with everything and with nothing; `first` says which begins."""
    found = {
        flags: launch("frun", ranks, steps, 0.1, flags).step_s
        for flags in ((EVERYTHING, NOTHING) if first else (NOTHING, EVERYTHING))
    }
    return found[EVERYTHING], found[NOTHING]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args(arguments)
    print(describe())
    found = []
    for number in range(options.pairs):
        found.append(pair(options.ranks, options.steps, first=number % 2 == 0))
        on, off = found[-1]
        print(f"with {on * 1000:.3f} ms, without {off * 1000:.3f} ms", file=sys.stderr, flush=True)
    ratios = sorted(on / off for on, off in found)
    on, off = (statistics.median(values) * 1000 for values in zip(*found, strict=True))
    print(
        f"a step of {options.ranks} ranks, medians of {options.pairs}: {on:.3f} ms with all detection,"
        f" {off:.3f} ms without; ratio {statistics.median(ratios):.4f}"
        f" ({ratios[0]:.4f} to {ratios[-1]:.4f})"
    )


if __name__ == "__main__":
    main()
