"""Owns what an agent knows of one worker process, and what all its workers have in common.

Data only; `workers` keeps it up to date.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from frun.agent.logs import WorkerStreams
from frun.config import LaunchConfig
from frun.protocol.channel import Pause, Raised, Resume
from frun.protocol.classes import Finding, Rule
from frun.protocol.records import WorkerReport


@dataclass(slots=True, kw_only=True)
class Worker:
    """One process of the current generation and what belongs to it."""

    rank: int
    report: WorkerReport
    streams: WorkerStreams | None = None
    stopped_by_us: bool = False
    raised: Raised | None = None
    """What the worker said over the channel before it ended."""
    connected: bool = False
    """It has said hello over the channel."""
    unsent: tuple[Pause | Resume, ...] = ()
    """Orders that it gets when it has."""
    pausing: int = 0
    """Generation that it was last told to pause for."""
    out: int = 0
    """Generation for which it last left its groups."""
    ended_because: str = ""
    """Why frun killed it; empty if it did not."""
    found: Finding | None = None
    """The class of that, where it is known beforehand."""
    captured: bool = False
    """Its stderr goes through the log pump."""
    last_lines: tuple[str, ...] = ()
    oom_kills: int = 0
    """How many processes the kernel had killed for want of memory when this one began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What is the same for every worker that this host ever starts."""

    config: LaunchConfig
    job_id: str
    host: str
    base_environment: Mapping[str, str]
    """The agent's own environment."""
    store_path: str
    """Unix socket of this host's part of the group store."""
    channel_path: str
    """Unix socket of the worker channel."""
    rules: Sequence[Rule]
    """Which lines of a worker are evidence of what."""
    py_spy: str | None = None
    """Path of the program that reads stacks from outside; None: there is none."""
    prefixes: Sequence[tuple[str, ...]] = ()
    """What stands in front of the commands, one for each local rank; none at all: nothing does."""
