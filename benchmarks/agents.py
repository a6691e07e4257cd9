"""How the cost of meeting grows with the number of agents at one etcd: messages, and time to form.

    python -m benchmarks.agents --agents 5,10,25,50 [--json FILE]

Every agent is a real `frun` on this machine, whose one worker is a plain process that tells that it runs and
waits for the end. The messages are counted by etcd itself, both ways, until every agent has ended; what
keeps a lease alive grows with time and is told apart. The time is from the first command to the last
worker's start, so on few cores most of it is the start of that many programs: the second figure is from
the moment at which the last host was registered.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.machine import describe
from frun.rendezvous.embedded import EmbeddedEtcd

ROOT = Path(__file__).parents[1]
LIMIT_S = 300.0
POLL_S = 0.02
WORKER = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / os.environ["RANK"]).touch()
while not (folder / "end").exists():
    time.sleep(0.1)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One job from the first command to the last agent's end."""

    agents: int
    messages: int
    """Received and sent by etcd, those of leases left out."""
    lease_messages: int
    formed_s: float
    """From the first command to the last worker's start."""
    decided_s: float
    """From the last host's registration to the last worker's start."""
    ended_s: float
    """From the word to end to the last agent's end."""


def messages(endpoint: str) -> dict[str, int]:
    """Return what etcd counted, by service."""
    with urllib.request.urlopen(f"http://{endpoint}/metrics") as answer:
        text = answer.read().decode()
    found: dict[str, int] = {}
    pattern = r'^grpc_server_msg_\w+_total\{.*grpc_service="([^"]*)".*\} (\S+)$'
    for service, count in re.findall(pattern, text, re.MULTILINE):
        found[service] = found.get(service, 0) + round(float(count))
    return found


async def measure(agents: int) -> Trial:
    """Run one job of so many agents."""
    folder = tempfile.mkdtemp(prefix="bench")
    etcd = EmbeddedEtcd()
    await etcd.start()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        return await _run(agents, Path(folder), etcd.endpoint, processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        await etcd.stop()
        shutil.rmtree(folder, ignore_errors=True)


async def _run(
    agents: int, folder: Path, endpoint: str, processes: list[subprocess.Popen[bytes]]
) -> Trial:
    script, ranks = folder / "worker.py", folder / "ranks"
    script.write_text(WORKER)
    ranks.mkdir()
    command = [
        *(sys.executable, "-m", "frun", f"--nnodes={agents}", "--start-method=spawn"),
        *("--rdzv-backend=etcd", f"--rdzv-endpoint={endpoint}", "--rdzv-id=bench"),
        *(f"--state-dir={folder}/state", "--redirects=3", str(script), str(ranks)),
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    begun = time.monotonic()
    with (folder / "said").open("wb") as said:
        for _ in range(agents):
            process = await asyncio.to_thread(
                subprocess.Popen, command, env=env, stdout=said, stderr=said
            )
            processes.append(process)
    registered = 0.0
    while len(list(ranks.iterdir())) < agents:
        if not registered and _hosts(folder) == agents:
            registered = time.monotonic()
        if time.monotonic() > begun + LIMIT_S:
            raise TimeoutError((folder / "said").read_text()[-2000:])
        await asyncio.sleep(POLL_S)
    formed = time.monotonic()
    (ranks / "end").touch()
    codes = [await asyncio.to_thread(process.wait, LIMIT_S) for process in processes]
    ended = time.monotonic()
    if any(codes):
        raise RuntimeError((folder / "said").read_text()[-2000:])
    counted = messages(endpoint)
    leases = counted.pop("etcdserverpb.Lease", 0)
    return Trial(
        agents=agents,
        messages=sum(counted.values()),
        lease_messages=leases,
        formed_s=formed - begun,
        decided_s=formed - (registered or formed),
        ended_s=ended - formed,
    )


def _hosts(folder: Path) -> int:
    """Return how many agents have registered, by their lists on this machine, which costs etcd nothing."""
    jobs = folder / "state" / "jobs"
    return len(list(jobs.glob("*.json"))) if jobs.is_dir() else 0


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print one line for each number of agents."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--agents", default="5,10,25,50")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    print(describe())
    trials = []
    for count in map(int, options.agents.split(",")):
        trial = asyncio.run(measure(count))
        trials.append(trial)
        print(
            f"{trial.agents:4} agents: {trial.messages:6} messages ({trial.messages / count:.1f} each),"
            f" leases {trial.lease_messages}; formed in {trial.formed_s:.1f} s, {trial.decided_s:.2f} s"
            f" after the last came; ended in {trial.ended_s:.1f} s"
        )
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(trial) for trial in trials], indent=1))


if __name__ == "__main__":
    main()
