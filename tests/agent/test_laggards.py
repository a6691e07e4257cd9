"""What an agent makes of its workers' paces, and a leader of all of them."""

from dataclasses import replace

from frun.agent.laggards import Laggards
from frun.agent.paces import Paces
from frun.events import Event, FaultNoticed
from frun.protocol.records import (
    HostReport,
    Phase,
    RankTable,
    Slot,
    View,
    WorkerReport,
    WorkerState,
)
from frun.protocol.stragglers import HOLD_S, REST_S, SETTLED_S, Work


class Time:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 50.0

    def monotonic(self) -> float:
        """Return seconds."""
        return self.now

    def wall(self) -> float:
        """Return seconds, too."""
        return self.now


def beats(paces: Paces, time: Time, seconds: float, *own_s: float) -> list[dict[int, Work]]:
    """Let workers beat twice a second; return the reports that come of it."""
    found = []
    for _ in range(round(seconds * 2)):
        time.now += 0.5
        found += [paces.heard(pid, Work(own_s=each)) for pid, each in enumerate(own_s)]
    return [each for each in found if each]


def test_changes_are_reported_together_and_seldom() -> None:
    """All that changed within a second in one report, and then none for a while."""
    time = Time()
    paces = Paces(time)
    first = beats(paces, time, SETTLED_S + 2, 0.0123456, 0.02)
    assert first == [{0: Work(own_s=0.0123), 1: Work(own_s=0.02)}]
    assert beats(paces, time, 600, 0.012, 0.022) == []
    assert beats(paces, time, SETTLED_S + 2, 0.05, 0.02) == [{0: Work(own_s=0.05)}]
    assert beats(paces, time, REST_S - 2, 0.01, 0.02) == []
    assert beats(paces, time, 3, 0.01, 0.02) == [{0: Work(own_s=0.01)}]
    paces.forget(0)
    assert beats(paces, time, REST_S + SETTLED_S, 0.01, 0.02) == [{0: Work(own_s=0.01)}]


def view(*own_s: float, generation: int = 1, hosts: int = 1) -> View:
    """Return a job of so many hosts, with ranks that take so long for their own part."""
    nproc = len(own_s) // hosts
    worker = WorkerReport(local_rank=0, incarnation=1, state=WorkerState.RUNNING)
    slots, reports = [], {}
    for first in range(0, len(own_s), nproc):
        name = f"h{first}"
        slots.append(Slot(host=name, address="10.0.0.1", port=1, first_rank=first, nproc=nproc))
        workers = [
            replace(worker, local_rank=number, work=Work(own_s=each) if each else None)
            for number, each in enumerate(own_s[first : first + nproc])
        ]
        reports[name] = HostReport(host=name, generation=generation, workers=tuple(workers))
    table = RankTable(generation=generation, phase=Phase.RUN, reason="runs", slots=tuple(slots))
    return View(table=table, reports=reports)


def test_a_leader_tells_of_each_once() -> None:
    """Until it is right again, also through a recovery; a rank that was replaced has none yet."""
    told: list[Event] = []
    laggards = Laggards(told.append)
    for seen in (
        view(0.01, 0.01, 0.01),
        view(0.01, 0.01, 0.05),
        view(0.01, 0.01, 0.06),
        view(0.01, 0.01, 0.06, generation=2),
    ):
        assert laggards.look(seen, 1.0) is None
    assert [each.rank for each in told if isinstance(each, FaultNoticed)] == [2]
    laggards.look(view(0.01, 0.01, 0.0, generation=3), 1.0)
    for own_s in (0.01, 0.06, 0.01, 0.06):
        laggards.look(view(0.01, 0.01, own_s, generation=3), 1.0)
    assert [each.source for each in told if isinstance(each, FaultNoticed)] == ["straggler"] * 3


def test_of_several_hosts_all_can_report_first() -> None:
    """What slows all of them reaches the leader from one after the other, and is no straggler."""
    told: list[Event] = []
    laggards = Laggards(told.append)
    laggards.look(view(0.01, 0.01, 0.01, hosts=3), 0.0)
    assert laggards.look(view(0.01, 0.05, 0.01, hosts=3), 1.0) == 1.0 + HOLD_S
    assert laggards.look(view(0.05, 0.05, 0.05, hosts=3), 9.0) is None
    assert laggards.look(view(0.05, 0.05, 0.09, hosts=3), 30.0) == 30.0 + HOLD_S
    assert told == []
    assert laggards.look(view(0.05, 0.05, 0.09, hosts=3), 30.0 + HOLD_S) is None
    (found,) = told
    assert isinstance(found, FaultNoticed)
    assert (found.rank, found.since_s) == (2, SETTLED_S + HOLD_S)
