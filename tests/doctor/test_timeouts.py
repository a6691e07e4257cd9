"""The order of a job's waits, and which of them can not go together."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frun.doctor.findings import Level
from frun.doctor.timeouts import contradictions, refuse, waits
from frun.errors import UsageError
from tests.cli.tools import configure


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--nnodes=2:4", "--job-id=j"),
        ("--shutdown-timeout=1",),
        ("--rdzv-backend=c10d", "--nnodes=2", "--rdzv-endpoint=a"),
    ],
)
def test_the_defaults_go_together(flags: tuple[str, ...]) -> None:
    """Nobody has to set a time-out, and the list is in order."""
    config = configure(*flags)
    assert [finding.level for finding in contradictions(config)] == [Level.OK]
    seconds = [wait.seconds for wait in waits(config)]
    assert seconds == sorted(seconds)
    assert len(seconds) == 12


CONTRADICTIONS = {
    "pause": (
        ("--shutdown-timeout=10", "--pause-timeout=30"),
        "--pause-timeout (30 s) must be less than",
    ),
    "beat": (("--beat-timeout=30",), "--beat-timeout (30 s) must be less than --pause-timeout"),
    "lost peer": (
        (
            "--rdzv-conf=keep_alive_interval=30,keep_alive_max_attempt=2,read_timeout=90,close_timeout=70",
        ),
        "the lease (60 s) must be less than 60 s",
    ),
    "read": (("--rdzv-conf=read_timeout=3",), "read_timeout (3 s) must be more than the lease"),
    "close": (("--rdzv-conf=close_timeout=2",), "close_timeout (2 s) must not be less than"),
    "join": (("--rdzv-conf=join_timeout=3",), "join_timeout (3 s) must be more than the lease"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_one_line_with_its_rule(name: str) -> None:
    """Both values and what would happen."""
    flags, text = CONTRADICTIONS[name]
    (finding,) = contradictions(configure(*flags))
    assert finding.level is Level.FAILURE
    assert text in finding.text
    assert ": " in finding.text


def test_what_can_not_be_meant_is_refused() -> None:
    """By `frun run` too, in the same words; what only may hurt is not."""
    for name, (flags, text) in CONTRADICTIONS.items():
        if name == "pause":
            with pytest.raises(UsageError, match=re.escape(text)):
                refuse(configure(*flags))
        else:
            refuse(configure(*flags))


@given(
    pause=st.integers(1, 100),
    shutdown=st.integers(0, 100),
    beat=st.integers(0, 100),
    read=st.integers(1, 100),
)
def test_whatever_the_values_the_list_is_whole(
    pause: int, shutdown: int, beat: int, read: int
) -> None:
    """Every wait that is not off is there once, in order; refusals are of the rule and no other."""
    config = configure(
        f"--pause-timeout={pause}", f"--shutdown-timeout={shutdown}", f"--beat-timeout={beat}",
        f"--rdzv-conf=read_timeout={read}",
    )  # fmt: skip
    listed = waits(config)
    assert listed == sorted(listed, key=lambda wait: wait.seconds)
    names = [wait.name for wait in listed]
    assert len(names) == len(set(names)) == 12 - (beat == 0) - (shutdown == 0)
    texts = [found.text for found in contradictions(config) if found.level is Level.FAILURE]
    assert len(texts) == (pause >= shutdown + 20) + (beat >= pause) + (read <= 3)
