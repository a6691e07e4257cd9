"""How long each fault goes unnoticed: injects each of them again and again and compares with its bound.

    python -m benchmarks.detection [--count 10] [--only WORDS] [--json FILE]

From the fault to the event of the agent that noticed it. Ends with 1 if the worst of a row is over its
bound, or a row could not be measured. Hosts that are switched off need root and the program `ip`; without
them those rows are left out.
"""

import argparse
import json
import statistics
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.detection_rows import ALL, BESIDE, JOBS, Found, Row
from benchmarks.machine import describe
from tests.hosts.network import missing


def measure(count: int, wanted: Callable[[Row], bool]) -> dict[Row, list[float]]:
    """Return what was measured of each row; a job that goes wrong is told, and its rows stay short."""
    taken: dict[Row, list[float]] = {row: [] for row in ALL if wanted(row)}

    def collect(job: Callable[[int, Callable[[Row], bool]], Found]) -> None:
        try:
            for row, value in job(count, wanted):
                taken[row].append(value)
                _say(f"{row.title}: {_value(row, value)}")
        except (AssertionError, OSError) as error:
            _say(f"{job.__name__} went wrong: {error}")

    beside = [threading.Thread(target=collect, args=(job,)) for job in BESIDE]
    for thread in beside:
        thread.start()
    for job in JOBS:
        collect(job)
    for thread in beside:
        thread.join()
    return taken


def table(taken: Mapping[Row, Sequence[float]], count: int) -> bool:
    """Print the rows; return whether all kept their bounds."""
    good = True
    _say(f"\n{'fault':<42}{'times':>6}{'median':>12}{'worst':>12}{'bound':>12}")
    for row, values in taken.items():
        if not values and row.title.startswith("host off") and missing():
            _say(f"{row.title:<42}  left out: {missing()}")
            continue
        kept = len(values) == count and max(values) <= row.bound
        good = good and kept
        median = _value(row, statistics.median(values)) if values else "-"
        worst = _value(row, max(values)) if values else "-"
        verdict = "kept" if kept else "MISSED"
        _say(
            f"{row.title:<42}{len(values):>6}{median:>12}{worst:>12}"
            f"{_value(row, row.bound):>12}  {verdict}"
        )
    return good


def _value(row: Row, value: float) -> str:
    return f"{value:g} steps" if row.unit == "steps" else f"{value:.3f} s"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, and write JSON if asked to; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--only", default="", metavar="WORDS", help="rows with this in their title")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    machine = describe()
    _say(machine)
    taken = measure(options.count, lambda row: options.only in row.title)
    good = table(taken, options.count)
    if options.json:
        rows = [
            {
                "fault": row.title,
                "unit": row.unit,
                "bound": row.bound,
                "median": statistics.median(values) if values else None,
                "worst": max(values, default=None),
                "values": values,
            }
            for row, values in taken.items()
        ]
        document = {"machine": machine, "count": options.count, "kept": good, "rows": rows}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
