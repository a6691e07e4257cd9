"""Which class a fault has, from the exit, the words and the place."""

import re

import pytest

from frun.protocol.classes import FaultClass, Rule
from frun.protocol.classify import of_failure, of_hang
from frun.protocol.hangs import Hang, Place
from frun.protocol.records import Failure

RULES = (
    Rule(FaultClass.DEVICE, re.compile("Xid")),
    Rule(FaultClass.STORAGE, re.compile("no space left", re.IGNORECASE)),
)
TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 1\n    Xid = 1\n{}'


def ended(code: int, text: str = "", message: str = "", *, recorded: bool = False) -> Failure:
    return Failure(
        rank=0,
        local_rank=0,
        host="a",
        pid=7,
        exit_code=code,
        message=message or f"ended with {code}",
        traceback=text,
        recorded=recorded,
    )


@pytest.mark.parametrize(
    ("failure", "fault_class", "evidence"),
    [
        (ended(-9), FaultClass.PROCESS, "ended with -9"),
        (ended(-11), FaultClass.PROCESS, "ended with -11"),
        (ended(-7), FaultClass.HOST, "mapped memory"),
        (ended(7), FaultClass.PROCESS, "ended with 7"),
        (ended(135), FaultClass.HOST, "mapped memory"),
        (ended(1), FaultClass.UNKNOWN, "without a word"),
        (ended(1, TRACEBACK.format("KeyError: 3")), FaultClass.USER, "KeyError: 3"),
        (ended(-6, "NVRM: Xid 79\nterminate called"), FaultClass.DEVICE, "NVRM: Xid 79"),
        (ended(1, "", "KeyError: 3", recorded=True), FaultClass.USER, "KeyError: 3"),
        (
            ended(1, TRACEBACK.format("KeyError: 3"), "KeyError: 3", recorded=True),
            FaultClass.USER,
            "KeyError: 3",
        ),
        (
            ended(1, TRACEBACK.format("OSError: No space left"), "RuntimeError: x", recorded=True),
            FaultClass.STORAGE,
            "OSError: No space left",
        ),
        (
            ended(1, "", "RuntimeError: Connection closed by peer", recorded=True),
            FaultClass.NETWORK,
            "closed by peer",
        ),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_failed_worker(failure: Failure, fault_class: FaultClass, evidence: str) -> None:
    """What it wrote counts before its exit; code within a traceback is no evidence."""
    found = of_failure(failure, RULES)
    assert found.fault_class is fault_class
    assert evidence in found.evidence
    assert "\n" not in found.evidence


def test_a_worker_that_the_kernel_chose() -> None:
    """SIGKILL while the kernel was short of memory is the machine's; other signals are not."""
    assert of_failure(ended(-9), RULES, oom_kills=1).fault_class is FaultClass.HOST
    assert of_failure(ended(-11), RULES, oom_kills=1).fault_class is FaultClass.PROCESS


def test_a_worker_that_frun_ended_or_could_not_start() -> None:
    """Why frun killed it is the evidence; a process that can't be made is the machine's fault."""
    found = of_failure(ended(-9, "Xid"), RULES, ended_because="no beat for 2.0 s", oom_kills=1)
    assert (found.fault_class, found.evidence) == (FaultClass.PROCESS, "no beat for 2.0 s")
    unborn = Failure(
        rank=0, local_rank=0, host="a", exit_code=127, message="could not be started: fork"
    )
    assert of_failure(unborn, RULES, ended_because=unborn.message).fault_class is FaultClass.HOST


def test_evidence_is_short() -> None:
    """It is shown in tables."""
    assert len(of_failure(ended(-6, "Xid" * 1000), RULES).evidence) == 300


@pytest.mark.parametrize(
    ("place", "where", "fault_class"),
    [
        (None, "", FaultClass.NETWORK),
        (Place.LOADER, "a.py:1 in f", FaultClass.STORAGE),
        (Place.SCRIPT, "a.py:1 in f", FaultClass.USER),
        (Place.SCRIPT, "", FaultClass.NETWORK),
        (Place.UPDATE, "a.py:1 in f", FaultClass.PROCESS),
    ],
)
def test_a_job_that_stands_still(place: Place | None, where: str, fault_class: FaultClass) -> None:
    """It depends on where those at fault stand."""
    ranks = () if place is None else (1,)
    found = of_hang(Hang(ranks=ranks, reason="", place=place, where=where))
    assert found.fault_class is fault_class
    assert found.evidence
