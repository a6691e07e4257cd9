"""Runs the scenarios that frun must survive ten times out of ten, N times each, and prints a table.

    python -m tests.hosts.repeat 10 [WORDS OF THE NAME]

Restarts of all workers after the loss of a host, and recoveries of a resumable script. There "steps again"
is until all ranks completed a step; with a late joiner it is from the start of its agent.
"""

import functools
import statistics
import sys
import traceback
from collections.abc import Callable

from tests.hosts.network import missing
from tests.hosts.scenarios import FOUR_SCENARIOS, Recovery, Stage, run_alone, stage
from tests.hosts.scenarios_recovery import THREE_SCENARIOS, run_three

SCENARIOS: dict[str, Callable[[Stage], Recovery]] = {
    **{name: functools.partial(run_alone, scenario=each) for name, each in FOUR_SCENARIOS.items()},
    **{name: functools.partial(run_three, name=name) for name in THREE_SCENARIOS},
}


def main(times: int, only: str = "") -> int:
    """Print the table; return 1 if any run went wrong."""
    if why := missing():
        _say(why)
        return 2
    good: dict[str, list[Recovery]] = {name: [] for name in SCENARIOS if only in name}
    for number in range(1, times + 1):
        for name, outcomes in good.items():
            try:
                with stage() as ready:
                    outcomes.append(SCENARIOS[name](ready))
                one = outcomes[-1]
                _say(
                    f"{number} {name}: noticed {one.noticed_s:.2f} s,"
                    f" steps again {one.trained_s:.2f} s"
                )
            except AssertionError:
                _say(f"{number} {name}: FAILED")
                traceback.print_exc()
    _say(
        f"\n{'scenario':<32}{'as it must':>12}{'noticed, median':>18}{'worst':>8}"
        f"{'steps again, median':>22}{'worst':>8}"
    )
    for name, outcomes in good.items():
        noticed = [one.noticed_s for one in outcomes] or [0.0]
        trained = [one.trained_s for one in outcomes] or [0.0]
        _say(
            f"{name:<32}{f'{len(outcomes)} of {times}':>12}"
            f"{statistics.median(noticed):>16.2f} s{max(noticed):>6.2f} s"
            f"{statistics.median(trained):>20.2f} s{max(trained):>6.2f} s"
        )
    return int(any(len(outcomes) < times for outcomes in good.values()))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
