"""What every check keeps, whatever it looks at; and that one that misbehaves harms nobody."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import frun
from frun.devices import loading, nvidia, text
from frun.devices.ascend import Ascend
from frun.devices.child import command
from frun.devices.contract import LONGEST_POLL_S, FaultClass, Plugin
from frun.devices.file import FactsFile
from frun.devices.host import Host
from frun.devices.polling import Poller
from frun.errors import UsageError
from frun.protocol.health import Fact, Severity
from tests.devices.build import HandClock, around
from tests.devices.test_ascend import table
from tests.fakes.nvml import FakeNvml, Gpu

PACKAGE = str(Path(frun.__file__).parent)
PATIENCE_S = 60.0


def of_nvidia(folder: Path, *, well: bool) -> Plugin:
    """Look at a device that is hot, or not."""
    gpu = Gpu()
    gpu.temperature = 40 if well else 99
    check = nvidia.using(FakeNvml(gpu), {})
    assert check is not None
    return check


def of_ascend(folder: Path, *, well: bool) -> Plugin:
    """Look at a card with an alarm, or without."""
    program = folder / "npu-smi"
    (folder / "output").write_text(table("OK" if well else "Alarm"))
    program.write_text(f'#!/bin/sh\nexec cat "{folder}/output"\n')
    program.chmod(0o755)
    return Ascend(str(program), None)


def of_host(folder: Path, *, well: bool) -> Plugin:
    """Look at a folder that is there, or not."""
    return Host(around(log_folder=str(folder if well else folder / "none")), folder)


def of_file(folder: Path, *, well: bool) -> Plugin:
    """Look at a file that says something, or nothing."""
    path = folder / "facts"
    path.write_text("" if well else "[{severity: fault, reason: smoke, device: 0}]")
    return FactsFile(str(path))


@pytest.mark.parametrize("make", [of_nvidia, of_ascend, of_host, of_file])
def test_a_check(make: Callable[..., Plugin], tmp_path: Path) -> None:
    """Nothing if all is well; else facts that are known again, and that survive the way to the agent."""
    assert list(make(tmp_path, well=True).poll()) == []
    check = make(tmp_path, well=False)
    first, second = list(check.poll()), list(check.poll())
    assert first
    assert [(f.name, f.severity, f.device) for f in first] == [
        (f.name, f.severity, f.device) for f in second
    ]
    for fact in first:
        assert "\n" not in fact.reason
        assert text.read(json.loads(json.dumps(text.written(fact)))) == fact


class Odd:
    """A check that does what a test wants."""

    def __init__(self, act: Callable[[], Iterable[Fact]]) -> None:
        self.poll = act


def polled(act: Callable[[], Iterable[Fact]], clock: HandClock) -> tuple[Poller, threading.Event]:
    """Start to poll a check."""
    told = threading.Event()
    poller = Poller("odd", Odd(act), clock, told.set)
    poller.start()
    return poller, told


def test_a_check_that_fails_is_a_warning() -> None:
    """Whatever it raises, and a list that is none."""

    def act() -> Iterable[Fact]:
        raise RuntimeError("out of order")

    clock = HandClock()
    poller, told = polled(act, clock)
    assert told.wait(PATIENCE_S)
    (fact,) = poller.facts(clock.now)
    assert (fact.check, fact.name, fact.severity) == ("odd", "broken", Severity.WARNING)
    assert fact.reason == "the check fails: RuntimeError: out of order"


def test_a_check_that_hangs_is_a_warning_and_what_it_said_stays() -> None:
    """Told after its bound, in the place of an answer; over as soon as there is one."""
    clock, goes_on, hangs = HandClock(), threading.Event(), threading.Event()
    answers = 0
    fact = Fact(name="x", severity=Severity.WARNING, fault_class=FaultClass.DEVICE, reason="said")

    def act() -> Iterable[Fact]:
        nonlocal answers
        answers += 1
        if answers == 1:
            return (fact,)
        hangs.set()
        goes_on.wait(PATIENCE_S)
        return ()

    poller, told = polled(act, clock)
    assert told.wait(PATIENCE_S)
    told.clear()
    assert hangs.wait(PATIENCE_S)
    assert [each.name for each in poller.facts(clock.now)] == ["x"]
    late = poller.facts(clock.now + LONGEST_POLL_S)
    assert [each.name for each in late] == ["x", "silent"]
    assert {each.check for each in late} == {"odd"}
    goes_on.set()
    assert told.wait(PATIENCE_S)
    assert poller.facts(clock.now) == ()


PACKAGE_OF_CHECKS = """
import os, sys, threading
from frun.devices.contract import Fact, FaultClass, Severity

class Loud:
    def poll(self):
        print("to standard output")
        os.write(1, b"and around it\\n")
        return [Fact(name="loud", severity=Severity.WARNING, fault_class=FaultClass.HOST, reason="!")]

class Stuck:
    def poll(self):
        threading.Event().wait()

def loud(around):
    assert around.nproc == 2 and around.environment["PATH"]
    return Loud()

def stuck(around):
    return Stuck()

def absent(around):
    return None

def wrong(around):
    raise OSError("no library")
"""


def installed(folder: Path, *names: str) -> None:
    """Install a package that offers these checks."""
    (folder / "checks.py").write_text(PACKAGE_OF_CHECKS)
    info = folder / "checks-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: checks\nVersion: 1.0\n")
    lines = "".join(f"{name} = checks:{name}\n" for name in names)
    (info / "entry_points.txt").write_text(f"[frun.device_plugins]\n{lines}")


def once(folder: Path, names: list[str] | None) -> dict[str, Any]:
    """Run the checks for one line."""
    done = subprocess.run(
        command(sys.executable, PACKAGE, names, nproc=2, log_folder=str(folder), once=True),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "PYTHONPATH": str(folder)},
        check=True,
    )
    return dict(json.loads(done.stdout))


def test_checks_of_other_packages(tmp_path: Path) -> None:
    """All that are installed, beside frun's own; what they print does no harm, nor that one can't be made."""
    installed(tmp_path, "loud", "absent", "wrong")
    line = once(tmp_path, None)
    assert set(line["checks"]) >= {"loud", "wrong"}
    assert [fact["name"] for fact in line["checks"]["loud"]] == ["loud"]
    (fact,) = line["checks"]["wrong"]
    assert fact["reason"] == "the check can not be loaded: OSError: no library"
    assert "absent" in line["absent"]
    assert once(tmp_path, ["loud"])["checks"].keys() == {"loud"}


def test_the_process_ends_with_its_agent_whatever_a_check_does(tmp_path: Path) -> None:
    """Lines come in spite of a check that never returns; the end of standard input ends all of it."""
    installed(tmp_path, "stuck", "loud")
    names = ["stuck", "loud"]
    with subprocess.Popen(
        command(sys.executable, PACKAGE, names, nproc=2, log_folder=str(tmp_path)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        seen: dict[str, Any] = {}
        while not seen.get("loud"):
            seen = json.loads(process.stdout.readline())["checks"]
        assert seen["stuck"] == []
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0


def test_an_unknown_check_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line names those that there are, also those of other packages."""
    installed(tmp_path, "loud")
    monkeypatch.syspath_prepend(str(tmp_path))
    loading.refuse_unknown(None)
    loading.refuse_unknown(["host", "file:/x", "loud"])
    with pytest.raises(
        UsageError, match=r"no check 'gpu'; there are loud, host, .*file:PATH and none"
    ):
        loading.refuse_unknown(["host", "gpu"])
