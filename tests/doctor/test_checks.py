"""The checks of devices in `frun doctor`."""

import os
from dataclasses import replace
from pathlib import Path

from frun.doctor import checks
from frun.doctor.checks import Polled
from frun.doctor.findings import Level
from frun.protocol.classes import FaultClass
from frun.protocol.health import Fact, Severity
from tests.cli.tools import configure

WARM = Fact(
    check="gpu", name="heat", severity=Severity.WARNING, fault_class=FaultClass.DEVICE,
    reason="it is warm", device=1,
)  # fmt: skip
GONE = replace(WARM, severity=Severity.FAULT, reason="it is gone", lasting=True)


def told(polled: Polled, *flags: str) -> list[tuple[str, str]]:
    """Return level and text of each finding."""
    config = configure(*flags)
    return [(each.level.value, each.text) for each in checks.judge(polled, config)]


def test_what_checks_find() -> None:
    """A line per check or per thing that is wrong; a lasting fault keeps the host from work."""
    polled = Polled(facts={"host": (), "gpu": (WARM, GONE)}, absent=("nvidia",))
    assert told(polled) == [
        ("ok", "host: nothing is wrong"),
        ("warning", "gpu: device 1: it is warm"),
        ("failure", "gpu: device 1: it is gone: this host is not fit for work"),
        ("note", "nvidia: it has nothing to look at here"),
    ]
    assert told(Polled(facts={}, absent=("nvidia",)), "--device-checks=nvidia")[0][0] == "warning"
    assert told(Polled(facts={}), "--device-checks=none") == [
        ("note", "nobody looks at them: --device-checks none")
    ]
    assert told(Polled(facts={}, trouble="why"))[0] == ("warning", "the checks do not work: why")


def test_they_are_polled_as_in_a_job(tmp_path: Path) -> None:
    """By a process with the workers' environment; a file among them."""
    facts = tmp_path / "facts.yaml"
    facts.write_text("- {severity: warning, reason: it hums}\n")
    config = configure(f"--device-checks=host,file:{facts}")
    polled = checks.look(config, dict(os.environ), str(tmp_path / "none"))
    assert [fact.name for fact in polled.facts["host"]] == ["disk"]
    assert [str(fact) for fact in polled.facts["file"]] == ["file: it hums"]
    assert {each.level for each in checks.judge(polled, config)} == {Level.WARNING}
    nothing = checks.look(configure("--device-checks=none"), {}, "/")
    assert (nothing.facts, nothing.trouble) == ({}, "")
