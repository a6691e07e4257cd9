"""The update gate: what may still begin when a generation is over, and what a pause waits for."""

import threading
from types import SimpleNamespace

import pytest

from frun.worker.gate import Gate
from frun.worker.paused import Paused

LIMIT_S = 40.0


def test_an_update_counts_when_it_is_complete() -> None:
    """Sections of one update are of no step until the last one is done."""
    gate = Gate()
    gate.enter()
    assert not gate.whole
    gate.leave(complete=False)
    assert (gate.step, gate.whole) == (0, False)
    gate.enter(finish=True)
    gate.leave(complete=True)
    assert (gate.step, gate.whole) == (1, True)


def test_no_update_begins_behind_a_closed_gate() -> None:
    """It raises what no `except Exception` catches, until the gate is open again."""
    gate = Gate(step=3)
    gate.close()
    with pytest.raises(Paused):
        gate.enter()
    assert not issubclass(Paused, Exception)
    gate.enter(finish=True)
    gate.leave(complete=True)
    gate.open()
    gate.enter()
    assert gate.step == 4


def test_a_pause_waits_for_the_update_that_has_begun() -> None:
    """But not for ever."""
    gate = Gate()
    gate.enter()
    assert not gate.wait_idle(0.01)
    waited: list[bool] = []
    side = threading.Thread(target=lambda: waited.append(gate.wait_idle(LIMIT_S)))
    side.start()
    gate.leave(complete=True)
    side.join(LIMIT_S)
    assert waited == [True]


def test_recent_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest but one: neither the first of an entry counts, nor one that holds something long."""
    now = [100.0]
    monkeypatch.setattr("frun.worker.gate.time", SimpleNamespace(monotonic=lambda: now[0]))
    gate = Gate()

    def step(seconds: float = 0.0) -> None:
        now[0] += seconds
        gate.enter()
        gate.leave(complete=True)

    step(0.5)
    assert (gate.recent_s, gate.fresh, gate.completed) == (0.0, False, 1)
    step()
    gate.excused = True
    step(0.5)
    for seconds in (0.05, 0.05, 0.5):
        step(seconds)
    assert gate.recent_s == pytest.approx(0.05)
    gate.open()
    assert gate.fresh
