"""Runs a campaign of mixed faults over four hosts with two spares; every bit must be as without.

    python -m tests.hosts.campaign FAULTS [CAMPAIGN [SEED]]

Hosts whose agent was killed get a new one, as from whatever starts agents on a cluster. Kinds that spoil a
run on purpose are left out.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.hosts.job import ROOT, Job
from tests.hosts.network import missing
from tests.hosts.scenarios import Stage, stage
from tests.hosts.scenarios_recovery import exact, training

FLAGS = ("--nnodes=4", "--nproc-per-node=1", "--replace-timeout=60", "--max-restarts=100")
LONGEST_S = 60.0
"""Per fault, on a busy machine."""


def main(faults: int, campaign: str, more: Sequence[str]) -> int:
    """Print the campaign's rows; return its exit status. Raises AssertionError if a bit differs."""
    if why := missing():
        _say(why)
        return 2
    with (
        stage() as ready,
        training(ready, *FLAGS, "--allow-drills", hosts=4, spares=2, ranks=4) as (job, _),
    ):
        output = job.folder / "drill"
        command = [sys.executable, "-m", "frun", "drill", campaign, f"--faults={faults}", "--yes"]
        command += ["--without=bitflip,nan", *more]
        code = _watched(ready, job, command, output, faults * LONGEST_S)
        _say(output.read_text())
        dead = tuple(agent for agent in job.agents if agent.process.poll() is not None)
        job.finish(without=dead, within_s=60.0)
        exact(job, 4)
        _say(f"{max(news.step for news in job.news)} steps, every state as in an undisturbed run")
        return code


def _watched(ready: Stage, job: Job, command: Sequence[str], output: Path, limit_s: float) -> int:
    """Run the campaign from a host of the etcd; start agents again that it kills."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(job.folder)}
    where = (f"--rdzv-endpoint={ready.etcd.endpoints}", f"--job-id={job.job_id}")
    process = ready.etcd.hosts[0].run([*command, *where], env=environment, output=output)
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            return process.wait(0.5)
        except subprocess.TimeoutExpired:
            for agent in tuple(job.agents):
                newest = agent is job.agent(agent.host.name)
                if newest and agent.process.poll() is not None and not agent.host.pids():
                    job.start(agent.host)
    raise AssertionError(f"the campaign did not end in {limit_s:g} s\n{output.read_text()}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    arguments = sys.argv[1:]
    file = arguments[1] if len(arguments) > 1 else str(ROOT / "configs" / "drills" / "llama3.yaml")
    seed = [f"--seed={arguments[2]}"] if len(arguments) > 2 else []
    sys.exit(main(int(arguments[0]), file, seed))
