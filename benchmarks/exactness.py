"""Trains without faults, then with faults at seeded moments, and compares every loss and the final state.

    python -m benchmarks.exactness [--faults 200] [--seed 1] [--ranks 2,3,4,8] [--configs sgd,...]
                                   [--kinds backward,donor,...] [--short] [--json FILE] [--keep FOLDER]

One line per run: what was trained, the faults and their places, how they were recovered from, and `equal` or
the first difference. What must follow from each fault is known beforehand: either all other processes live
on, or (where nobody is left who has the state) all workers are restarted. Exit status 1 if anything differs.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.exactness_plan import KINDS, Expected, make_plan
from benchmarks.faults import Fault, plan_text
from benchmarks.machine import describe

ROOT = Path(__file__).parents[1]
CONFIGS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "batchnorm": True, "dropout": True, "accumulate": 2},
    "adamw": {"optimizer": "adamw", "dropout": True, "loop": "plain"},
    "lbfgs": {"optimizer": "lbfgs", "batchnorm": True, "loop": "plain"},
    "update": {
        "optimizer": "adamw",
        "batchnorm": True,
        "update": True,
        "accumulate": 2,
        "loop": "plain",
    },
    "unseeded": {"optimizer": "sgd", "dropout": True, "loop": "unseeded", "workers": 1},
    "lbfgs-batches": {"optimizer": "lbfgs", "dropout": True, "accumulate": 2},
    "outside": {"optimizer": "adamw", "batchnorm": True, "outside": True},
    "catching": {"optimizer": "sgd", "batchnorm": True, "dropout": True, "catching": True},
}
SHORT = ("sgd", "adamw", "lbfgs")
STEPS = 30
JOB_S, FAULT_S = 120.0, 25.0
STACKS_S, STILL_S = 4.0, 12.0
"""A job that stands still for so long is asked for stacks; for so long is never as it should be."""


@dataclass(slots=True)
class Log:
    """What one rank wrote."""

    pids: list[int]
    """Every process of this rank that came as far as to say so."""
    restarts: list[int]
    """For each, how often all workers had been restarted before it began."""
    restored: set[int]
    """Those that came to have a state."""
    losses: dict[tuple[int, int, int], set[str]]
    """Per step, closure call and part of the batch: every loss that was computed, with its samples."""
    done: list[tuple[int, int]]
    """(pid, step) of each update."""
    finals: list[tuple[int, str]]
    """(restart count, digest)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One job."""

    code: int | None
    """None: it did not end in time."""
    seconds: float
    still: float
    """The longest time in which no rank wrote anything."""
    forgotten: int
    """Survivors that gloo left waiting for ever, and that were replaced for it."""
    logs: list[Log]
    victims: list[str]
    """Per fault the rank that came to its place; empty if it did not happen."""
    pids: list[int]
    """Those of the processes that a fault has ended, but by way of the zygote."""
    stderr: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One line of the table."""

    config: str
    ranks: int
    faults: list[str]
    restarts: int
    forgotten: int
    seconds: float
    wrong: str
    """Empty: as expected and equal."""


# -- jobs --------------------------------------------------------------------------------------------------


def run_job(
    folder: Path, ranks: int, config: dict[str, Any], faults: Sequence[Fault], *options: str
) -> Run:
    """Run the training script once under frun and read what its ranks wrote."""
    folder.mkdir(parents=True)
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "EXACTNESS_FAULTS": plan_text(faults),
    }
    command = [sys.executable, "-m", "frun", f"--nproc-per-node={ranks}", "--max-restarts=99"]
    command += [*options, "-m", "benchmarks.exactness_train", str(folder), json.dumps(config)]
    began = time.monotonic()
    with open(folder / "stderr", "wb") as errors:
        job = subprocess.Popen(command, env=env, cwd=folder, stdout=errors, stderr=errors)
        try:
            code, still = watch(job, folder, ranks, JOB_S + FAULT_S * len(faults))
        finally:
            if job.poll() is None:
                job.kill()
                job.wait()
    return read_run(
        folder,
        ranks,
        faults,
        code=code,
        still=still,
        seconds=time.monotonic() - began,
        stderr=(folder / "stderr").read_text(errors="replace"),
    )


def watch(
    job: subprocess.Popen[bytes], folder: Path, ranks: int, limit_s: float
) -> tuple[int | None, float]:
    """Wait for a job's end; return its status (None: not in time) and the longest time without a step.

    Ranks that stand still for long are asked once for their stacks.
    """
    logs = [folder / f"log.{rank}" for rank in range(ranks)]
    began = changed = time.monotonic()
    size, longest, asked = 0, 0.0, False
    while time.monotonic() < began + limit_s:
        try:
            return job.wait(0.2), longest
        except subprocess.TimeoutExpired:
            pass
        now, grown = time.monotonic(), sum(path.stat().st_size for path in logs if path.exists())
        if grown != size:
            size, changed, asked = grown, now, False
        if size == 0:
            continue  # torch is being imported
        longest = max(longest, now - changed)
        if now - changed > STACKS_S and not asked:
            asked = True
            for path in logs:
                if path.exists() and (pids := read_log(path).pids):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pids[-1], signal.SIGUSR1)
    return None, longest


def read_run(
    folder: Path,
    ranks: int,
    faults: Sequence[Fault],
    *,
    code: int | None,
    seconds: float,
    stderr: str,
    still: float = 0.0,
) -> Run:
    """Return what a job that ended has left in its folder."""
    markers = [folder / f"fault.{number}" for number in range(len(faults))]
    done = [path.read_text().split() if path.exists() else [] for path in markers]
    return Run(
        code=code,
        seconds=seconds,
        still=still,
        forgotten=stderr.count("frun: a collective does not end"),
        logs=[read_log(folder / f"log.{rank}") for rank in range(ranks)],
        victims=[words[0] if words else "" for words in done],
        pids=[int(pid) for words in done for pid in words[1:]],
        stderr=stderr,
    )


def read_log(path: Path) -> Log:
    """Read what one rank wrote. After an error that the script swallowed losses mean nothing."""
    log = Log([], [], set(), {}, [], [])
    caught = False
    for line in path.read_text().splitlines() if path.exists() else ():
        kind, *words = line.split()
        if kind == "start":
            log.pids.append(int(words[0]))
            log.restarts.append(int(words[1]))
            caught = False
        elif kind == "enter":
            caught = False
        elif kind == "restored":
            log.restored.add(int(words[0]))
        elif kind == "caught":
            caught = True
        elif kind == "loss" and not caught:
            step, evaluation, part = (int(word) for word in words[:3])
            log.losses.setdefault((step, evaluation, part), set()).add(" ".join(words[3:]))
        elif kind == "done":
            log.done.append((int(words[1]), int(words[0])))
        elif kind == "final":
            log.finals.append((int(words[1]), words[3]))
    return log


# -- judgement ---------------------------------------------------------------------------------------------


def difference(reference: Run, run: Run) -> str:
    """Return the first thing that differs from the run that nothing happened to; empty if none does."""
    for rank, (ours, theirs) in enumerate(zip(run.logs, reference.logs, strict=True)):
        for key in sorted(theirs.losses | ours.losses):
            got, wanted = ours.losses.get(key, set()), theirs.losses.get(key, set())
            if got != wanted:
                where = f"rank {rank} step {key[0]} evaluation {key[1]} part {key[2]}"
                return f"{where}: loss and samples {sorted(got)}, without faults {sorted(wanted)}"
    for rank, (ours, theirs) in enumerate(zip(run.logs, reference.logs, strict=True)):
        states, wanted_states = {d for _, d in ours.finals}, {d for _, d in theirs.finals}
        if states != wanted_states:
            return (
                f"rank {rank}: final state {sorted(states)}, without faults {sorted(wanted_states)}"
            )
    return ""


def outcome(run: Run, plan: Sequence[Expected]) -> str:
    """Return what was not as it must be after these faults; empty if all was."""
    if run.code != 0:
        tail = " | ".join(run.stderr.splitlines()[-4:])
        return f"{'did not end' if run.code is None else f'exit status {run.code}'}: {tail}"
    for number, expected in enumerate(plan):
        if not run.victims[number]:
            return f"fault {number + 1} ({expected.fault}) did not happen"
    imports = any(expected.fault.who == "zygote" for expected in plan)
    if run.still > (JOB_S if imports else STILL_S):
        return f"stood still for {run.still:.1f} s"
    restarts = sum(expected.restart for expected in plan)
    lost: list[str] = []
    for rank, log in enumerate(run.logs):
        counted = {count for count, _ in log.finals}
        # One that gloo left waiting can have been the last that had the state.
        if len(counted) != 1 or not restarts <= max(counted) <= restarts + run.forgotten:
            return f"rank {rank} was restarted {sorted(counted)} times, not {restarts}"
        lives = list(zip(log.pids, log.restarts, strict=True))
        for (pid, before), (_, after) in pairwise(lives):
            # One without a state is nobody's survivor: it may be started anew.
            if pid in log.restored and pid not in run.pids and after == before:
                lost.append(f"rank {rank} lost process {pid}, which no fault had ended")
        for (pid, step), (next_pid, next_step) in pairwise(log.done):
            if pid == next_pid and next_step <= step:
                return f"rank {rank} did update {next_step} again after {step}"
    return lost[0] if len(lost) > run.forgotten else ""


# -- command -----------------------------------------------------------------------------------------------


def examine(
    folder: Path,
    name: str,
    ranks: int,
    reference: Run | None,
    plan: Sequence[Expected],
    config: dict[str, Any],
) -> tuple[Report, Run]:
    """Run one job and judge it."""
    faults = [expected.fault for expected in plan]
    run = run_job(folder, ranks, config, faults)
    report = Report(
        config=name,
        ranks=ranks,
        faults=[str(fault) for fault in faults],
        restarts=sum(expected.restart for expected in plan),
        forgotten=run.forgotten,
        seconds=round(run.seconds, 1),
        wrong=outcome(run, plan) or (difference(reference, run) if reference is not None else ""),
    )
    return report, run


def show(report: Report) -> None:
    """Print one run."""
    what = "; ".join(report.faults) or "no faults"
    how = f"{len(report.faults) - report.restarts} recovered, {report.restarts} restarts"
    if report.forgotten:
        how += f", {report.forgotten} survivors replaced since gloo left them waiting"
    verdict = f"WRONG: {report.wrong}" if report.wrong else f"equal ({how}, {report.seconds:g} s)"
    print(f"{report.config}, {report.ranks} ranks: {what}: {verdict}", flush=True)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=200, help="at least so many in all")
    parser.add_argument("--per-job", type=int, default=7, help="about so many in one job")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", default="2,3,4,8")
    parser.add_argument("--configs", default=",".join(CONFIGS))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--short", action="store_true", help="few configurations, 2 and 3 ranks")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for what runs that differ have written")
    options = parser.parse_args(argv)
    if options.short:
        options.ranks, options.configs, options.faults = "2,3", ",".join(SHORT), 30
    options.ranks = [int(word) for word in options.ranks.split(",")]
    options.configs, options.kinds = options.configs.split(","), options.kinds.split(",")
    for word in (*(set(options.configs) - set(CONFIGS)), *(set(options.kinds) - set(KINDS))):
        parser.error(f"{word!r} is neither of {', '.join(CONFIGS)} nor of {', '.join(KINDS)}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the matrix until enough faults were made; return the exit status."""
    options = parse_arguments(argv)
    print(describe(), flush=True)
    draw = random.Random(options.seed)
    reports: list[Report] = []
    references: dict[tuple[str, int], Run] = {}
    turns = [(name, ranks) for name in options.configs for ranks in options.ranks]
    draw.shuffle(turns)
    made, turn = 0, 0
    with tempfile.TemporaryDirectory(prefix="exactness") as temporary:
        while made < options.faults:
            name, ranks = turns[turn % len(turns)]
            turn += 1
            config = {**CONFIGS[name], "steps": STEPS}
            folder = Path(temporary, f"seed{options.seed}.{turn}")
            plan = make_plan(draw, ranks, config, options.kinds, options.per_job, STEPS)
            if (name, ranks) not in references:
                report, run = examine(folder / "reference", name, ranks, None, [], config)
                references[name, ranks] = run
                if report.wrong:
                    reports.append(report)
                    show(report)
            report, _ = examine(folder / "run", name, ranks, references[name, ranks], plan, config)
            show(report)
            reports.append(report)
            made += len(plan)
            if report.wrong and options.keep:
                shutil.copytree(folder, options.keep / folder.name, dirs_exist_ok=True)
            shutil.rmtree(folder)
    return summarize(reports, options.json)


def summarize(reports: Sequence[Report], path: Path | None) -> int:
    """Print what came out; return 1 if anything was wrong."""
    wrong = [report for report in reports if report.wrong]
    faults = sum(len(report.faults) for report in reports)
    exact = sum(len(report.faults) for report in reports if not report.wrong)
    restarts = sum(report.restarts for report in reports)
    print(
        f"{exact} of {faults} faults in {len(reports) - len(wrong)} of {len(reports)} jobs: bitwise equal and"
        f" as expected, {restarts} of them by a restart of all workers;"
        f" {sum(report.forgotten for report in reports)} survivors replaced since gloo left them waiting"
    )
    if path is not None:
        document = {"machine": describe(), "runs": [asdict(report) for report in reports]}
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
