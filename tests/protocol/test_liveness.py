"""A silent worker is frozen, or it does something that holds Python's lock."""

import pytest

from frun.protocol import liveness
from frun.protocol.liveness import TURN_S, Activity, Limits

LIMITS = Limits(silent_s=2.0, busy_s=30.0)


@pytest.mark.parametrize(
    ("silent_s", "states", "used_s", "stepped", "why"),
    [
        (1.9, "TT", 0.0, True, ""),
        (2.0, "TT", 0.0, True, "no beat for 2.0 s, stopped by a signal"),
        (2.0, "TT", 0.0, False, "no beat for 2.0 s, stopped by a signal"),
        (2.1, "SSS", 0.0, True, "no beat for 2.1 s"),
        (2.1, "DSS", 0.0, True, "no beat for 2.1 s"),  # it waits for a page that was swapped out
        (2.1, "TSS", 0.0, True, "no beat for 2.1 s"),
        (99.0, "DSS", 0.0, False, ""),  # it loads a library from a slow disk
        (99.0, "tSS", 0.0, True, ""),  # somebody looks at it with a debugger
        (29.0, "SSS", 10.0, True, ""),  # it collects garbage
        (29.0, "SRS", 0.0, True, ""),  # it would like to run, and others do
        (30.0, "RSS", 29.0, True, "although it computes"),
        (2.1, "", 0.0, True, "no beat for 2.1 s"),  # it is gone already
    ],
)
def test_what_silence_means(
    silent_s: float, states: str, used_s: float, stepped: bool, why: str
) -> None:
    """The kernel's word on the process decides how long silence is borne."""
    activity = Activity(states=states, used_s=used_s)
    found = liveness.frozen(silent_s, activity, LIMITS, stepped=stepped)
    assert why in found
    assert bool(why) is bool(found)


def test_zero_turns_it_off() -> None:
    """With a limit of 0 nothing is ever frozen."""
    off = Limits(silent_s=0.0, busy_s=30.0)
    assert liveness.frozen(1e6, Activity(states="T", used_s=0.0), off, stepped=True) == ""


def test_an_agent_that_stood_still_counts_its_own_turns_only() -> None:
    """However long it was frozen: that time says nothing of its workers."""
    silent_s = liveness.silence(0.0, 3600.0)
    assert silent_s == 2 * TURN_S
    assert liveness.silence(silent_s, TURN_S) == 3 * TURN_S
