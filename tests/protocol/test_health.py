"""What facts about devices mean: for whose worker, how often, and for how long."""

from collections.abc import Iterable

import pytest

from frun.protocol.classes import FaultClass
from frun.protocol.health import HOLD_S, Fact, Judged, Known, Severity, calm_in_s, judge

NPROC = 3


def fact(
    name: str = "ecc",
    *,
    device: int | None = 1,
    severity: Severity = Severity.FAULT,
    lasting: bool = False,
    reason: str = "an error",
) -> Fact:
    """Return a fact of the check `gpu`."""
    return Fact(
        check="gpu",
        name=name,
        severity=severity,
        fault_class=FaultClass.DEVICE,
        reason=reason,
        device=device,
        lasting=lasting,
    )


def story(*polls: tuple[float, Iterable[Fact]]) -> list[Judged]:
    """Judge one poll after the other."""
    known: tuple[Known, ...] = ()
    judged = []
    for now, facts in polls:
        judged.append(judge(known, facts, now, NPROC))
        known = judged[-1].known
    return judged


def struck(judged: Judged) -> list[tuple[int, str]]:
    """Return who is to be replaced, and for what."""
    return [(local_rank, one.name) for local_rank, one in judged.struck]


@pytest.mark.parametrize(
    ("one", "ranks"),
    [
        (fact(device=1), [1]),
        (fact(device=None), [0, 1, 2]),
        (fact(device=3), []),
        (fact(severity=Severity.WARNING), []),
    ],
    ids=["device", "host", "unused device", "warning"],
)
def test_whom_a_fact_is_about(one: Fact, ranks: list[int]) -> None:
    """The worker that uses the device, all of the host, nobody."""
    (judged,) = story((0.0, [one]))
    assert [local_rank for local_rank, _ in judged.struck] == ranks
    assert judged.new == ((one,) if one.device != 3 else ())


def test_a_fault_that_stays_strikes_once() -> None:
    """It is new once, and gone some time after it was last reported."""
    judged = story(*((float(now), [fact(reason=f"{now}")]) for now in range(30)))
    assert [struck(one) for one in judged] == [[(1, "ecc")]] + [[]] * 29
    assert [one.new for one in judged[1:]] == [()] * 29
    assert judged[-1].known[0].fact.reason == "0"
    held = story((0.0, [fact()]), (HOLD_S - 0.1, []), (HOLD_S, []))
    assert [len(one.known) for one in held] == [1, 1, 0]
    assert [one.gone for one in held] == [(), (), (fact(),)]


def test_faults_that_come_together_are_one() -> None:
    """What follows within a moment on the same device strikes nobody; a later one does."""
    first, second = fact("xid-48"), fact("ecc")
    judged = story((0.0, [first]), (1.0, [second]), (1.0 + HOLD_S, [fact("other")]))
    assert [struck(one) for one in judged] == [[(1, "xid-48")], [], [(1, "other")]]
    assert calm_in_s(judged[0].known, 1, 2.0, NPROC) == HOLD_S - 2.0
    assert calm_in_s(judged[0].known, 0, 2.0, NPROC) == 0
    assert calm_in_s(judged[0].known, 1, HOLD_S, NPROC) == 0


def test_of_two_at_once_the_worst_is_told() -> None:
    """One that lasts before one that does not, and a worker is struck once."""
    (judged,) = story(
        (0.0, [fact("heat", severity=Severity.WARNING), fact(), fact("lost", lasting=True)])
    )
    assert struck(judged) == [(1, "lost")]
    assert [one.name for one in judged.new] == ["lost", "ecc", "heat"]
    assert [one.forbids for one in judged.new] == [True, False, False]


def test_a_record_stays_small() -> None:
    """Of very many warnings some are kept, faults all, and of a long reason its beginning."""
    many = [fact(f"w{n}", severity=Severity.WARNING, reason="x " * 999) for n in range(50)]
    (judged,) = story((0.0, [*many, fact()]))
    assert len(judged.known) == 16
    assert judged.known[0].fact.name == "ecc"
    assert all(len(each.fact.reason) <= 200 for each in judged.known)
    assert struck(judged) == [(1, "ecc")]
    full = story((0.0, many), (1.0, [*many, fact()]))
    assert [len(one.known) for one in full] == [16, 17]
    assert struck(full[1]) == [(1, "ecc")]


def test_words() -> None:
    """A fact names its check, its device and its evidence."""
    assert str(fact()) == "gpu: device 1: an error"
    assert str(fact(device=None)) == "gpu: an error"
