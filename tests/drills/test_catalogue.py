"""How faults are spelled, and that each kind is explained."""

from pathlib import Path

import pytest

from frun.drills.catalogue import CATALOGUE, Outcome, expected, fault, spelled
from frun.errors import UsageError
from frun.protocol.faults import FaultKind, Place

DOCS = (Path(__file__).parents[2] / "docs" / "drills.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", FaultKind)
def test_every_kind_is_explained(kind: FaultKind) -> None:
    """In the catalogue, which `--list` prints, and in the documentation."""
    entry = CATALOGUE[kind]
    assert entry.text.endswith(".")
    assert entry.expects
    assert f"| `{spelled(kind)}` |" in DOCS


@pytest.mark.parametrize("text", ["kill", "exit:3", "slow", "slow:0.5"])
def test_a_fault_is_spelled_as_it_is_read(text: str) -> None:
    """There and back."""
    assert str(fault(text)) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("shoot", "no such kind of fault: 'shoot'"),
        ("kill:9", "takes nothing behind a colon"),
        ("exit", "needs a status from 1 to 255, not ''"),
        ("exit:0", "not '0'"),
        ("exit:256", "not '256'"),
        ("slow:often", "slow:S needs seconds, not 'often'"),
        ("slow:-1", "not '-1'"),
        ("network:delay=long", "takes numbers, not 'delay=long'"),
        ("network:loss=100", "takes numbers, not 'loss=100'"),
        ("network", "network needs --duration"),
        ("disk-full", "disk-full needs --duration"),
        ("device:fan", "device:warning is all that can stand behind the colon, not 'fan'"),
    ],
)
def test_what_is_no_fault_is_refused(text: str, said: str) -> None:
    """By one line that names it."""
    with pytest.raises(UsageError, match=said):
        fault(text)


def test_only_what_lasts_has_a_duration() -> None:
    """A stopped worker may go on again, a killed one not."""
    assert fault("stop", duration_s=2.0).duration_s == 2.0
    with pytest.raises(UsageError, match="kill happens at a moment"):
        fault("kill", duration_s=2.0)


def test_places_that_do_not_fit_are_refused() -> None:
    """A recovery is in no step, and a gradient is not everywhere."""
    placed = fault("kill", at_step=7, place=Place.GATE)
    assert str(placed) == "kill at step 7 in gate"
    with pytest.raises(UsageError, match="copy is a part of a recovery"):
        fault("kill", at_step=7, place=Place.COPY)
    with pytest.raises(UsageError, match="agent is done to a host"):
        fault("agent", at_step=7)
    assert str(fault("network:delay=20,loss=5", duration_s=3.0)) == "network:delay=20,loss=5"
    with pytest.raises(UsageError, match="device is done to a device"):
        fault("device", at_step=7)
    with pytest.raises(UsageError, match="its place is backward or gate"):
        fault("nan", place=Place.FORWARD)


def test_what_is_over_soon_may_do_no_harm() -> None:
    """Nobody need notice a worker that stood still for a moment."""
    assert Outcome.UNHARMED not in expected(fault("stop"))
    assert Outcome.UNHARMED in expected(fault("stop", duration_s=1.0))


def test_a_warning_ends_nothing() -> None:
    """A fault of a device does, and one that lasts moves its host's ranks to a spare."""
    assert expected(fault("device:warning")) == {Outcome.UNHARMED}
    assert expected(fault("device:warning", duration_s=9.0)) == {
        Outcome.UNHARMED,
        Outcome.RECOVERED,
    }
    assert expected(fault("device")) == {Outcome.RECOVERED}
