"""Builds journals in a few words: (seconds, event, generation, fields)."""

import json
from typing import Any

from frun.account.journal import Journal, read_journal

Said = tuple[float, str, int, dict[str, Any]]


def line(host: str, said: Said, *, wall_s: float = 1_700_000_000.0, job: str = "j") -> str:
    """Return one line of an event log."""
    at_s, event, generation, fields = said
    return json.dumps(
        {
            "schema": 1,
            "event": event,
            "job": job,
            "host": host,
            "generation": generation,
            "monotonic_s": at_s,
            "wall_s": wall_s + at_s,
            **fields,
        }
    )


def journal(host: str, *said: Said, wall_s: float = 1_700_000_000.0) -> Journal:
    """Return one host's journal."""
    made = read_journal([line(host, each, wall_s=wall_s) for each in said], f"/{host}")
    assert made is not None
    return made


def seen(at_s: float, generation: int, phase: str, reason: str = "", group_rank: int = 0) -> Said:
    """A table is seen by a member."""
    return at_s, "phase_seen", generation, {
        "phase": phase, "reason": reason, "group_rank": group_rank
    }  # fmt: skip


def restored(at_s: float, generation: int, rank: int = 0, **fields: float) -> Said:
    """A rank has its state."""
    times = {"rebuild_s": 0.0, "agree_s": 0.0, "copy_s": 0.0, "steps_lost": 0, "step": 0}
    return at_s, "worker_restored", generation, {"rank": rank, **times, **fields}


def first(at_s: float, generation: int, step: int, rank: int = 0) -> Said:
    """A rank completed its first step."""
    return at_s, "first_step_completed", generation, {"rank": rank, "step": step, "took_s": 0.1}


def steps(at_s: float, generation: int, step: int) -> Said:
    """A rank tells how far it is."""
    return at_s, "steps_completed", generation, {"rank": 0, "step": step}


def died(at_s: float, generation: int, rank: int = 0) -> Said:
    """A rank failed."""
    return at_s, "worker_exited", generation, {"rank": rank, "pid": 1, "state": "failed"}


def closed(at_s: float, generation: int, detect_s: float, kind: str = "process") -> Said:
    """The leader closed an incident."""
    return at_s, "incident_closed", generation, {
        "id": generation, "cause": "it died", "kind": kind, "ranks": [0], "hosts": ["a"],
        "action": "replace-worker", "detect_s": detect_s, "steps_lost": 0,
    }  # fmt: skip


START: tuple[Said, ...] = (
    (100.0, "job_started", 0, {}),
    (100.5, "host_registered", 0, {"run": "r1", "nproc": 1}),
    seen(101.0, 1, "gather", "waiting for hosts"),
    seen(103.0, 1, "recover", "all are here"),
    seen(104.0, 1, "run", "all are here"),
    (105.0, "worker_started", 1, {"rank": 0, "local_rank": 0, "pid": 7}),
    (105.0, "generation_started", 1, {}),
)
"""100 start, 101-103 waits, 105 started."""
FAULT: tuple[Said, ...] = (
    died(120.0, 1),
    seen(120.5, 2, "recover", "rank 0 failed"),
    (120.75, "worker_paused", 2, {"rank": 1, "step": 12}),
    seen(121.0, 2, "run", "rank 0 failed"),
    (121.5, "worker_started", 2, {"rank": 0, "local_rank": 0, "pid": 8}),
    (121.5, "generation_started", 2, {}),
)
"""120 fault, 120.5 table, 121 runs, 121.5 started."""
END: tuple[Said, ...] = (
    steps(139.0, 2, 30),
    (140.0, "worker_exited", 2, {"rank": 0, "pid": 8, "state": "succeeded", "exit_code": 0}),
    seen(140.5, 2, "done", "all ended"),
    (141.0, "job_ended", 2, {"exit_code": 0, "reason": "done"}),
)
