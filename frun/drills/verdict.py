"""What became of a job after a fault: judged from what was seen before and what is seen now. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from frun.drills.catalogue import Outcome, expected
from frun.protocol.faults import Command, CommandState, FaultKind

QUIET_S = 3.0
"""Seconds without a reaction after which a fault counts as harmless, where it may be harmless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How it ended, and the job's account of it."""

    outcome: Outcome
    text: str
    incident: Mapping[str, Any] | None = None
    """The last incident, as in `frun status --json`; None if there was none."""


def judge(
    command: Command,
    before: int,
    document: Mapping[str, Any],
    done_for_s: float,
    *,
    of_spare: bool = False,
) -> Verdict | None:
    """Return the verdict once it is clear; None before.

    `before` is the generation in which the fault was asked for, `done_for_s` the time since it happened.
    `of_spare`: its host had no place in the world, so nobody has to take it.
    """
    if command.state is CommandState.REFUSED:
        return Verdict(outcome=Outcome.REFUSED, text=command.text)
    if document["phase"] == "failed":
        return Verdict(outcome=Outcome.FAILED, text=document["reason"])
    happened = command.state is CommandState.DONE
    before = max(before, command.generation)
    incident = _incident(document, before) if happened else None
    if document["phase"] == "done":
        if incident is None:
            return Verdict(outcome=Outcome.ENDED, text=document["reason"])
        return _recovered(incident)
    if document["phase"] != "run":
        return None
    if incident is not None:
        return _recovered(incident)
    quiet = happened and document["generation"] == before
    if not quiet or done_for_s <= command.fault.duration_s + QUIET_S:
        return None
    if command.fault.kind is FaultKind.LEADER:
        return _elected(command, document) if of_spare else None
    if Outcome.UNHARMED in expected(command.fault):
        return Verdict(outcome=Outcome.UNHARMED, text="nothing had to be done")
    return None


def _elected(command: Command, document: Mapping[str, Any]) -> Verdict | None:
    """Return the verdict on a leader that was a spare: its one duty is another host's now."""
    leader = document["leader"]
    if leader in (None, command.host):
        return None
    return Verdict(outcome=Outcome.UNHARMED, text=f"a spare led, and {leader} leads now")


def _incident(document: Mapping[str, Any], before: int) -> Mapping[str, Any] | None:
    """Return the account of the running generation, if it is newer than the fault."""
    found = [one for one in document["incidents"] if one["generation"] > before]
    closed = [one for one in found if one["generation"] == document["generation"]]
    return closed[-1] if closed else None


def _recovered(incident: Mapping[str, Any]) -> Verdict:
    restarted = incident["action"] == "restart-all"
    return Verdict(
        outcome=Outcome.RESTARTED if restarted else Outcome.RECOVERED,
        text=f"{incident['cause']}: {incident['action']}, {incident['total_s']:.2f} s, at step"
        f" {incident['resumed_at_step']}, {incident['steps_lost']} steps lost",
        incident=incident,
    )
