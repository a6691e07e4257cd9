"""Who is hit by a fault: read from the job's status and what was asked for. Pure, but for the draw."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from frun.drills.catalogue import Scope
from frun.errors import UsageError

MEMBER, SPARE = "member", "spare"
_LIVE = ("running",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What was asked for. With nothing given one is drawn among all."""

    rank: int | None = None
    host: str | None = None
    """Its id or name."""
    leader: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """Who it will be."""

    host: str
    """Id of the host whose agent gets the command."""
    rank: int = -1
    """-1: the host itself."""
    pid: int = 0
    spare: bool = False
    """That host has no place in the world."""

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})" if self.rank >= 0 else self.host


def choose(
    document: Mapping[str, Any], scope: Scope, selection: Selection, draw: random.Random
) -> Victim:
    """Return who is hit. Raises UsageError if there is nobody that fits."""
    match scope:
        case Scope.WORKER:
            fitting = [
                Victim(host=host["host"], rank=worker["rank"], pid=worker["pid"] or 0)
                for host in _hosts(document, selection)
                for worker in host["workers"]
                if worker["state"] in _LIVE and selection.rank in (None, worker["rank"])
            ]
            what = "no worker runs"
        case Scope.HOST:
            hosts = [host for host in _hosts(document, selection) if _has(host, selection.rank)]
            fitting = [Victim(host=host["host"]) for host in hosts]
            what = "there is no member of the job"
        case Scope.LEADER:
            hosts = [host for host in document["hosts"] if host["host"] == document["leader"]]
            fitting = [Victim(host=h["host"], spare=h["role"] == SPARE) for h in hosts]
            what = "there is no leader"
        case Scope.STORE:
            hosts = [host for host in document["hosts"] if host["keeps_store"]]
            fitting = [Victim(host=host["host"]) for host in hosts]
            what = "frun did not start this job's etcd"
    if not fitting:
        raise UsageError(f"{what} {_place(selection)}: see frun status")
    return draw.choice(fitting)


def _has(host: Mapping[str, Any], rank: int | None) -> bool:
    return rank is None or rank in [worker["rank"] for worker in host["workers"]]


def _hosts(document: Mapping[str, Any], selection: Selection) -> list[Mapping[str, Any]]:
    """Return the members that the selection leaves."""
    members = [host for host in document["hosts"] if host["role"] == MEMBER]
    if selection.leader:
        members = [host for host in members if host["host"] == document["leader"]]
    if selection.host is not None:
        members = [host for host in members if selection.host in (host["host"], host["name"])]
    return members


def _place(selection: Selection) -> str:
    if selection.rank is not None:
        return f"as rank {selection.rank}"
    if selection.host is not None:
        return f"on host {selection.host!r}"
    return "on the leader's host" if selection.leader else "in this job"
