"""Fails when something became slower: the small form of each benchmark, its ratios beside the recorded ones.

    python -m benchmarks.check [--only scale,store] [--record]

Only ratios of things measured in the same run are compared, since seconds of different machines and
loads can't be. A ratio that is more than 30 % worse than in `benchmarks/recorded.json` is measured twice
more, and fails if it never is better: chance makes one run slow, a change all of them. Then the exit status
is 1. `--record` writes the ratios of this run to that file.
"""

import argparse
import asyncio
import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks import overhead, recovery, scale, store
from benchmarks.machine import describe

RECORDED = Path(__file__).parent / "recorded.json"
LOSS = 0.3
ATTEMPTS = 3
Ratios = Mapping[str, float]
"""Name to a ratio of which less is better."""


def check_launch() -> Ratios:
    """Start both once, train a little, and kill ranks of four under frun.

    A recovery is compared with a start of torchrun: both are work of processors, on any machine, where
    torchrun's own recovery is in large part sleep.
    """
    found = overhead.figures(overhead.measure(4, 1, 200, idle_s=0.1))
    recovery_s = recovery.median(recovery.measure_frun(4, 6))
    return {
        "overhead: start-up, frun / torchrun": found["start_s"]["ratio"],
        "overhead: step, frun / torchrun": found["step_s"]["ratio"],
        "overhead: memory, frun / torchrun": found["total_mib"]["ratio"],
        "recovery: frun / start-up of torchrun": recovery_s / found["start_s"]["torchrun"],
    }


def check_scale() -> Ratios:
    """Let workers die among 32 hosts and 128: what a fault costs per host must not grow with the hosts."""
    cpu_s, sent, messages = [], [], []
    for hosts in (32, 128):
        kinds = ["worker"] * 6
        trial = scale.measure(hosts, nproc=8, ttl_s=10, crowds=1, faults=kinds, idle_s=0.5)
        faults = asyncio.run(trial).faults
        cpu_s.append(sum(f.leader_cpu + f.crowd_cpu + f.etcd_cpu for f in faults) / hosts)
        sent.append(min(fault.etcd.sent_bytes for fault in faults) / hosts)
        messages.append(min(fault.etcd.messages for fault in faults) / hosts)
    return {
        "scale: CPU time per host, 128 hosts / 32 hosts": cpu_s[1] / cpu_s[0],
        "scale: bytes at etcd per host, 128 hosts / 32 hosts": sent[1] / sent[0],
        "scale: messages at etcd per host, 128 hosts / 32 hosts": messages[1] / messages[0],
    }


def check_store() -> Ratios:
    """Set both kinds of store up for 256 clients."""
    (theirs, _), (ours, again) = store.measure("tcp", 256), store.measure("frun", 256)
    return {
        "store: busiest server, frun / TCPStore": ours.total_busy / theirs.total_busy,
        "store: busiest server, after a recovery / at first": again.total_busy / ours.total_busy,
    }


def check_copy() -> Ratios:
    """Copy 64 MiB to a worker that has its tensors, and to one that has none."""
    from benchmarks import copy  # imports torch

    lines = {line["way"]: line["best_s"] for line in copy.run([64.0], 7)}
    base = lines["gloo broadcast"]
    return {
        "copy: from memory / broadcast": lines["transfer from memory"] / base,
        "copy: over the group / broadcast": lines["transfer over the group"] / base,
    }


CHECKS: Mapping[str, Callable[[], Ratios]] = {
    "store": check_store,
    "scale": check_scale,
    "launch": check_launch,
    "copy": check_copy,
}


def measure(name: str) -> dict[str, float]:
    """Run one check without its own words."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return {ratio: round(value, 4) for ratio, value in CHECKS[name]().items()}


def worse(found: Ratios, recorded: Ratios) -> list[str]:
    """Return which ratios are more than 30 % worse than the recorded ones."""
    return [
        name
        for name, value in found.items()
        if name in recorded and value > recorded[name] * (1 + LOSS)
    ]


def best(attempt: Callable[[], Ratios], recorded: Ratios) -> Ratios:
    """Measure until nothing is worse, a few times at most; return the best of each ratio."""
    found: dict[str, float] = {}
    for _ in range(ATTEMPTS):
        for name, value in attempt().items():
            found[name] = min(value, found.get(name, value))
        if not worse(found, recorded):
            break
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Check what was asked for; return 1 if anything is worse."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default=",".join(CHECKS))
    parser.add_argument("--record", action="store_true", help="make these ratios the recorded ones")
    options = parser.parse_args(arguments)
    document = json.loads(RECORDED.read_text()) if RECORDED.exists() else {"ratios": {}}
    recorded = document["ratios"]
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    machine = describe()
    print(machine)
    failed = []
    for name in options.only.split(","):
        begun = time.monotonic()
        found = measure(name) if options.record else best(partial(measure, name), recorded)
        for ratio, value in found.items():
            before = recorded.get(ratio)
            bad = not options.record and ratio in worse(found, recorded)
            failed += [ratio] if bad else []
            told = "" if before is None else f" (recorded {before:g})"
            print(f"{'WORSE ' if bad else ''}{ratio}: {value:g}{told}")
        print(f"  {name} took {time.monotonic() - begun:.0f} s", flush=True)
        if options.record:
            recorded |= found
    if options.record:
        RECORDED.write_text(json.dumps({"machine": machine, "ratios": recorded}, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
