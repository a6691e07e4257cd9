"""Runs the training of `benchmarks.exactness` in a test's site, with faults in words."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.exactness import Run, difference, outcome, read_run
from benchmarks.exactness_plan import Expected
from benchmarks.faults import parse, plan_text
from tests.e2e.harness import TORCHRUN, Running, Site

MODULE = ("-m", "benchmarks.exactness_train")
PYTHON = (sys.executable, "-W", "ignore")


@dataclass(slots=True)
class Training:
    """One small training, as often as a test wants it: with these faults or without any."""

    site: Site
    ranks: int
    config: dict[str, Any]
    runs: int = 0

    def start(self, faults: str = "", *options: str) -> tuple[Running, Path]:
        """Start it under frun; return the launcher and the folder where the ranks write."""
        self.runs += 1
        folder = self.site.cwd / f"run{self.runs}"
        folder.mkdir()
        job = self.site.start(
            f"--nproc-per-node={self.ranks}",
            *options,
            *MODULE,
            str(folder),
            json.dumps(self.config),
            env={"EXACTNESS_FAULTS": plan_text(parse(faults))},
        )
        return job, folder

    def run(self, faults: str = "", *options: str) -> Run:
        """Run it under frun to its end."""
        job, folder = self.start(faults, *options)
        done = job.wait()
        return read_run(
            folder, self.ranks, parse(faults), code=done.code, seconds=done.wall_s, stderr=done.err
        )

    def elsewhere(self, launcher: str) -> Run:
        """Run it without faults under torchrun or plain python."""
        self.runs += 1
        folder = self.site.cwd / f"run{self.runs}"
        folder.mkdir()
        args = [*MODULE, str(folder), json.dumps(self.config)]
        if launcher == "torchrun":
            args = ["--standalone", f"--nproc-per-node={self.ranks}", *args]
        program = TORCHRUN if launcher == "torchrun" else PYTHON
        done = self.site.run(*args, program=program)
        return read_run(
            folder, self.ranks, [], code=done.code, seconds=done.wall_s, stderr=done.err
        )

    def must_be_equal(
        self, run: Run, reference: Run, faults: str, restarts: Sequence[int] = ()
    ) -> None:
        """Assert that a run ended like the reference, and each fault as it must.

        `restarts` are the numbers, from 0, of the faults after which all workers begin anew; after all
        others every process lives on but those that died.
        """
        plan = [
            Expected(fault=fault, restart=number in restarts)
            for number, fault in enumerate(parse(faults))
        ]
        assert outcome(run, plan) == "", run.stderr
        assert difference(reference, run) == ""
