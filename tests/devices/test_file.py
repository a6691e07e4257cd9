"""Facts that stand in a file."""

import json
from pathlib import Path

import pytest

from frun.devices import text
from frun.devices.file import FactsFile
from frun.protocol.classes import FaultClass
from frun.protocol.health import Fact, Severity

FULL = Fact(
    name="fan",
    severity=Severity.FAULT,
    fault_class=FaultClass.HOST,
    reason="it stands",
    device=3,
    lasting=True,
)


def test_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    """YAML or JSON; without the file, and with an empty one, all is well."""
    path = tmp_path / "facts.yaml"
    check = FactsFile(str(path))
    assert check.poll() == ()
    path.write_text("- {severity: warning, reason: it hums}\n")
    (fact,) = check.poll()
    assert (fact.name, fact.device, fact.fault_class) == ("fact", None, FaultClass.DEVICE)
    path.write_text(json.dumps([text.written(FULL)]))
    assert check.poll() == (FULL,)
    assert check.poll() == (FULL,)
    path.write_text("")
    assert check.poll() == ()
    path.unlink()
    assert check.poll() == ()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("[", "it is not YAML"),
        ("severity: fault", "it must be a list of facts"),
        ("- 7", "a fact is a mapping, not 7"),
        ("- {severity: bad, reason: x}", "severity is 'bad', not one of warning, fault"),
        ("- {severity: fault}", "reason must be a text, not ''"),
        ("- {severity: fault, reason: x, device: -1}", "device must be a number from 0 on"),
        ("- {severity: fault, reason: x, device: true}", "device must be a number from 0 on"),
        ("- {severity: fault, reason: x, lasting: 1}", "lasting must be true or false, not 1"),
        ("- {severity: fault, reason: x, class: gpu}", "class is 'gpu', not one of user, "),
        ("- {severity: fault, reason: x, rank: 3}", "no such field: 'rank'; there are name, "),
        ("x" * 70000, "it has more than 65536 bytes"),
    ],
)
def test_a_file_that_is_wrong_is_a_warning(tmp_path: Path, content: str, why: str) -> None:
    """It names the file and what is wrong, for as long as it is."""
    path = tmp_path / "facts"
    path.write_text(content)
    check = FactsFile(str(path))
    for _ in range(2):
        (fact,) = check.poll()
        assert (fact.name, fact.severity) == ("unreadable", Severity.WARNING)
        assert fact.reason.startswith(f"{path} can not be read: {why}")
