"""Beats and silence of real processes, in turns that the test makes."""

import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest

from frun import procfs
from frun.agent.pulse import Pulse
from frun.clock import SystemClock
from frun.protocol.channel import Beat, Explain, Order, Stacks
from frun.protocol.hangs import Place, Standing
from frun.protocol.liveness import TURN_S
from frun.protocol.stragglers import Work

WAITS = "print(flush=True); input()"
COMPUTES = "print(flush=True)\nwhile True: pass"


class Workers:
    """Notes who was given up."""

    def __init__(self, *pids: int) -> None:
        self.pids = list(pids)
        self.given_up: list[tuple[int, str]] = []
        self.asked = 0
        self.standing: list[Standing | None] = []
        self.works: list[Mapping[int, Work]] = []

    def connected(self) -> list[int]:
        return self.pids

    def stands(self, pid: int, standing: Standing | None, generation: int) -> None:
        self.standing.append(standing)

    def send(self, pid: int, order: Order) -> bool:
        assert isinstance(order, Explain)
        self.asked += 1
        return True

    def takes(self, works: Mapping[int, Work]) -> None:
        self.works.append(works)

    def give_up(self, pid: int, why: str, since_s: float) -> None:
        assert since_s >= 2.0
        self.given_up.append((pid, why))


def beat(
    *,
    completed: int = 1,
    cpu_s: float = 0.0,
    last: bool = False,
    still_s: float = 0.0,
    own_s: float = 0.0,
) -> Beat:
    """Return a beat."""
    return Beat(
        generation=1,
        step=completed,
        completed=completed,
        fresh=not completed,
        recent_s=0.01,
        own_s=own_s,
        team="",
        delay_s=0.0,
        place="script",
        where="train.py:1 in train",
        still_s=still_s,
        cpu_s=cpu_s,
        last=last,
    )


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs the code which the test names."""
    child = subprocess.Popen(
        [sys.executable, "-c", request.param], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child
        child.kill()


def turns(pulse: Pulse, seconds: float) -> None:
    """Let that much time pass for the pulse."""
    for _ in range(round(seconds / TURN_S)):
        pulse.turn(TURN_S)


def pulse_of(workers: Workers) -> Pulse:
    """Return a pulse with the limits that are the default."""
    return Pulse(workers, workers, 2.0, 2.0, SystemClock())


@pytest.mark.parametrize("process", [WAITS], indirect=True)
def test_a_silent_process_that_waits_is_given_up_once(process: subprocess.Popen[bytes]) -> None:
    """Two seconds after its last beat, and never before it completed a step."""
    workers = Workers(process.pid)
    pulse = pulse_of(workers)
    used_s = procfs.activity(process.pid)[1]
    pulse.heard(process.pid, beat(completed=0, cpu_s=used_s))
    turns(pulse, 60)
    assert workers.given_up == []
    pulse.heard(process.pid, beat(cpu_s=used_s))
    turns(pulse, 1.75)
    assert workers.given_up == []
    turns(pulse, 60)
    assert workers.given_up == [(process.pid, "no beat for 2.0 s")]


@pytest.mark.parametrize("process", [COMPUTES], indirect=True)
def test_a_silent_process_that_computes_is_borne(process: subprocess.Popen[bytes]) -> None:
    """Until it is stopped: that is seen at once."""
    workers = Workers(process.pid)
    pulse = pulse_of(workers)
    pulse.heard(process.pid, beat(cpu_s=procfs.activity(process.pid)[1]))
    turns(pulse, 10)
    assert workers.given_up == []
    process.send_signal(signal.SIGSTOP)
    while set(procfs.activity(process.pid)[0]) != {"T"}:
        pass
    turns(pulse, TURN_S)
    assert [why for _, why in workers.given_up] == ["no beat for 10.2 s, stopped by a signal"]


@pytest.mark.parametrize("process", [WAITS], indirect=True)
def test_no_beat_is_missed_of_those_that_said_farewell(process: subprocess.Popen[bytes]) -> None:
    """Nor of one whose connection is gone, such as one that executed another program."""
    workers = Workers(process.pid)
    pulse = pulse_of(workers)
    pulse.heard(process.pid, beat())
    pulse.heard(process.pid, beat(last=True))
    turns(pulse, 60)
    pulse.heard(process.pid, beat())
    workers.pids.clear()
    turns(pulse, 60)
    assert workers.given_up == []


@pytest.mark.parametrize("process", [WAITS], indirect=True)
def test_an_agent_that_stood_still_hears_first(process: subprocess.Popen[bytes]) -> None:
    """One turn that comes an hour late is no silence of a worker."""
    workers = Workers(process.pid)
    pulse = pulse_of(workers)
    pulse.heard(process.pid, beat())
    pulse.turn(3600.0)
    assert workers.given_up == []


def test_who_stands_still_is_reported_until_it_moves() -> None:
    """With the place and the line, after two seconds; what its threads do is asked in time."""
    workers = Workers(1)
    pulse = pulse_of(workers)
    for still_s in (0.9, 1.4, 1.9, 2.0):
        pulse.heard(1, beat(still_s=still_s))
    assert pulse.still_s(1) == 2.0
    pulse.heard(1, beat())
    stands = Standing(place=Place.SCRIPT, step=1, where="train.py:1 in train")
    assert workers.standing == [None, None, None, stands, None]
    pulse.heard(1, Stacks(generation=1, text="MainThread"))
    assert (workers.asked, pulse.explained({0: 1, 1: 2})) == (1, {0: "MainThread", 1: ""})


@pytest.mark.parametrize("process", [WAITS], indirect=True)
def test_a_step_between_two_beats_counts(process: subprocess.Popen[bytes]) -> None:
    """A worker that was frozen right after its first step, before a beat told of that, is given up."""
    workers = Workers(process.pid)
    pulse = pulse_of(workers)
    pulse.heard(process.pid, beat(completed=0, cpu_s=procfs.activity(process.pid)[1]))
    turns(pulse, 4.0)
    assert not workers.given_up
    pulse.stepped(process.pid)
    turns(pulse, 60)
    assert [pid for pid, _ in workers.given_up] == [process.pid]
