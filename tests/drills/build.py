"""The status of a job as drills read it."""

from typing import Any


def worker(rank: int, state: str = "running") -> dict[str, Any]:
    """Return one worker's part; its pid follows from its rank."""
    return {"rank": rank, "local_rank": rank % 2, "pid": 100 + rank, "state": state, "exit": None}


def host(name: str, role: str, *workers: dict[str, Any]) -> dict[str, Any]:
    """Return one host's part."""
    return {
        "host": name,
        "name": name[0],
        "role": role,
        "keeps_store": False,
        "workers": list(workers),
    }


def status(
    *, generation: int = 1, phase: str = "run", leader: str | None = "a-1", **more: Any
) -> dict[str, Any]:
    """Return a job of hosts a and b with two workers each, and a spare c; a leads, b keeps the etcd."""
    hosts = [
        host("a-1", "member", worker(0), worker(1)),
        {**host("b-2", "member", worker(2), worker(3)), "keeps_store": True},
        host("c-3", "spare"),
    ]
    document = {
        "generation": generation,
        "phase": phase,
        "reason": "why",
        "leader": leader,
        "hosts": hosts,
        "incidents": [],
    }
    return {**document, **more}


def incident(generation: int, action: str = "replace-worker") -> dict[str, Any]:
    """Return the account of a fault."""
    return {
        "generation": generation,
        "cause": "rank 1 failed",
        "action": action,
        "total_s": 0.2,
        "resumed_at_step": 7,
        "steps_lost": 0,
    }
