"""From a fault to the next completed step of all ranks: frun beside torchrun, in one run.

    python -m benchmarks.recovery [--ranks 4] [--faults kill] [--times 20] [--torchrun-kills 5] [--json FILE]

One resumable script trains a small DDP model (gloo, AdamW, 10 ms of sleep per step). Under frun one rank
after another is hit in one job for each kind of fault that is mended in place: `kill` is a SIGKILL from here,
any other kind is done by `frun inject-fault`. Under torchrun, with its shared store off since it does not
recover with it (`--torchrun-default N` shows that), the same script resumes from a checkpoint that it writes
every ten steps, and a new job is started for each kill. All times are from one monotonic clock: from just
before the fault until the last of all ranks has completed its next step.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.machine import describe
from benchmarks.recovery_jobs import PHASES, Job, Recovery


def measure_frun(ranks: int, times: int, fault: str = "kill") -> list[Recovery]:
    """Hit one rank after another in one job under frun."""
    with tempfile.TemporaryDirectory(prefix="recovery") as name:
        job = Job("frun", ranks, Path(name), checkpoints=False, drills=fault != "kill")
        try:
            return [show(job.breaks(fault, number % ranks, warm_up=25)) for number in range(times)]
        finally:
            job.stop()


def measure_torchrun(ranks: int, kills: int, *, shared_store: bool = False) -> list[Recovery]:
    """Kill one rank in a new job for each kill under torchrun; leave out those that don't recover."""
    found = []
    for number in range(kills):
        with tempfile.TemporaryDirectory(prefix="recovery") as name:
            job = Job("torchrun", ranks, Path(name), checkpoints=True, shared_store=shared_store)
            try:
                found.append(show(job.breaks("kill", number % ranks, warm_up=35)))
            except TimeoutError as error:
                print(f"torchrun  rank {number % ranks} kill: {error}", flush=True)
            finally:
                job.stop()
    return found


def show(one: Recovery) -> Recovery:
    """Print one fault as it is measured."""
    print(
        f"{one.launcher:9} rank {one.rank} {one.fault}: {one.seconds:.3f} s, {one.repeated} steps again,"
        f" {one.kept} processes kept",
        flush=True,
    )
    return one


def summary(ranks: int, found: Sequence[Recovery]) -> str:
    """Return one line of the table; phases are medians."""
    times = [one.seconds for one in found]
    split = "  ".join(
        f"{statistics.median(one.phases[phase] for one in found):.3f}" if found[0].phases else "-"
        for phase in PHASES
    )
    return (
        f"{found[0].launcher:9} {ranks:2} ranks  {found[0].fault:10} {len(found):3} times: median"
        f" {statistics.median(times):.3f} s, range {min(times):.3f} to {max(times):.3f},"
        f" {max(one.repeated for one in found)} steps again, {min(one.kept for one in found)} kept | {split}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write JSON if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", default="4", help="several with commas between")
    parser.add_argument("--faults", default="kill", help="several with commas between")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--torchrun-kills", type=int, default=5)
    parser.add_argument("--torchrun-default", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    machine = describe()
    print(machine)
    lines, document = [], []
    for ranks in map(int, options.ranks.split(",")):
        ours = {
            fault: measure_frun(ranks, options.times, fault) for fault in options.faults.split(",")
        }
        theirs = measure_torchrun(ranks, options.torchrun_kills)
        shared = measure_torchrun(ranks, options.torchrun_default, shared_store=True)
        lines += [summary(ranks, found) for found in (*ours.values(), theirs) if found]
        if options.torchrun_default:
            lines.append(
                f"torchrun  {ranks:2} ranks  as it is: went on after {len(shared)} of"
                f" {options.torchrun_default} kills"
            )
        if theirs and "kill" in ours:
            ratio = median(theirs) / median(ours["kill"])
            lines.append(f"torchrun takes {ratio:.1f} times as long")
        every = [*(one for found in ours.values() for one in found), *theirs]
        document.append({"ranks": ranks, "recoveries": [asdict(one) for one in every]})
    print(f"\nmedians of: {', '.join(PHASES)} (s) at the end of each line")
    print("\n".join(lines))
    if options.json:
        options.json.write_text(
            json.dumps({"machine": machine, "sizes": document}, indent=1) + "\n", encoding="utf-8"
        )


def median(found: Sequence[Recovery]) -> float:
    """Return the median of the seconds."""
    return statistics.median(one.seconds for one in found)


if __name__ == "__main__":
    main()
