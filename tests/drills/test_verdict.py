"""What came of a fault."""

from dataclasses import replace
from typing import Any

import pytest

from frun.drills.catalogue import Outcome, expected, fault
from frun.drills.verdict import QUIET_S, judge
from frun.protocol.faults import Command, CommandState
from tests.drills.build import incident, status


def command(text: str, state: CommandState = CommandState.DONE, duration_s: float = 0.0) -> Command:
    """Return a command for rank 1."""
    what = fault(text, duration_s=duration_s)
    return Command(id=1, uid="u", host="a-1", rank=1, fault=what, state=state, text="because")


@pytest.mark.parametrize(
    ("document", "wanted"),
    [
        (status(), None),
        (status(generation=2, phase="recover"), None),
        (status(generation=2), None),
        (status(generation=2, incidents=[incident(2)]), Outcome.RECOVERED),
        (status(generation=3, incidents=[incident(2)]), None),
        (status(generation=2, phase="gather", incidents=[incident(2)]), None),
        (status(generation=2, incidents=[incident(2, "restart-all")]), Outcome.RESTARTED),
        (status(incidents=[incident(1)]), None),
        (status(phase="failed"), Outcome.FAILED),
        (status(phase="done"), Outcome.ENDED),
        (status(generation=2, phase="done", incidents=[incident(2)]), Outcome.RECOVERED),
    ],
)
def test_the_end_of_an_incident(document: dict[str, Any], wanted: Outcome | None) -> None:
    """It is the account of the world that runs now, and that is newer than the fault."""
    verdict = judge(command("kill"), 1, document, 100.0)
    assert (verdict.outcome if verdict is not None else None) is wanted


def test_an_incident_before_the_fault_is_another_one() -> None:
    """A fault that waits for its place may wait for a recovery, even be hit by it."""
    recovered = status(generation=2, incidents=[incident(2)])
    assert judge(command("kill", CommandState.TAKEN), 1, recovered, 0.0) is None
    happened = replace(command("kill"), generation=2)
    assert judge(happened, 1, recovered, 9.0) is None
    verdict = judge(happened, 1, status(generation=3, incidents=[incident(3)]), 9.0)
    assert verdict is not None
    assert verdict.outcome is Outcome.RECOVERED


def test_a_refusal_says_why() -> None:
    """In the words of the host that refused."""
    verdict = judge(command("kill", CommandState.REFUSED), 1, status(), 0.0)
    assert verdict is not None
    assert (verdict.outcome, verdict.text) == (Outcome.REFUSED, "because")


def test_what_is_over_by_itself_is_waited_for() -> None:
    """Its time, and a little more for what it may have set off."""
    stopped = command("stop", duration_s=2.0)
    assert judge(stopped, 1, status(), 2.0) is None
    verdict = judge(stopped, 1, status(), 2.1 + QUIET_S)
    assert verdict is not None
    assert verdict.outcome is Outcome.UNHARMED
    assert judge(command("stop"), 1, status(), 100.0) is None


def test_a_leader_that_was_a_spare_has_another_one_after_it() -> None:
    """Nobody takes its place in the world, for it had none; one that had a place is waited for."""
    killed = replace(command("leader"), host="c-3", rank=-1)
    for leader in (None, "c-3"):
        assert judge(killed, 1, status(leader=leader), 100.0, of_spare=True) is None
    assert judge(killed, 1, status(leader="b-2"), QUIET_S, of_spare=True) is None
    verdict = judge(killed, 1, status(leader="b-2"), QUIET_S + 0.1, of_spare=True)
    assert verdict is not None
    assert verdict.outcome is Outcome.UNHARMED
    assert verdict.outcome in expected(killed.fault)
    assert verdict.text == "a spare led, and b-2 leads now"
    assert judge(killed, 1, status(leader="b-2"), 100.0) is None
