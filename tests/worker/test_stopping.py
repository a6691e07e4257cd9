"""The order of signal, grace, SIGKILL and giving up, on real processes and a made-up clock."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator

import pytest

from frun.procfs import Process
from frun.worker.stopping import KILL_WAIT_S, Family, Stopped, Stopper

IGNORE = "import signal as s; s.signal(15, s.SIG_IGN); print(flush=True); s.pause()"


class Child:
    """A child that leads its session and ignores SIGTERM."""

    def __init__(self, family: Family) -> None:
        """Start it and wait until it ignores the signal."""
        self.process = subprocess.Popen(
            [sys.executable, "-c", IGNORE], stdout=subprocess.PIPE, start_new_session=True
        )
        assert self.process.stdout is not None
        self.process.stdout.readline()
        self.pid = self.process.pid
        self._family = family
        self._pidfd = os.pidfd_open(self.pid)
        family.born(self.pid)

    def dead(self) -> bool:
        """Tell whether it has been killed, after the time that takes, and reap it."""
        if not select.select([self._pidfd], [], [], 5.0)[0]:
            return False
        self.process.wait()
        self._family.died(frozenset({self.pid}))
        return True

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        os.close(self._pidfd)


@pytest.fixture
def family() -> Family:
    """Return a family without members; what runs below pytest already belongs to nobody in it."""
    family = Family()
    family.died(frozenset())
    return family


@pytest.fixture
def child(family: Family) -> Iterator[Child]:
    """Return a live worker of the family."""
    child = Child(family)
    yield child
    child.close()


def test_the_grace_ends_with_sigkill(family: Family, child: Child) -> None:
    """Until the grace is over nothing happens; then the worker is killed, and the stop is over."""
    stopper = Stopper(family)
    stopper.begin(1, [child.pid], signal.SIGTERM, 10.0, now=0.0)
    assert stopper.next_at == 10.0
    assert not stopper.step(9.9)
    assert not stopper.step(10.0)
    assert child.dead()
    assert stopper.step(10.1) == [Stopped(ident=1, stuck=())]
    assert not stopper.next_at
    assert child.process.wait() == -signal.SIGKILL


def test_a_second_stop_does_not_lengthen_the_first(family: Family, child: Child) -> None:
    """The earlier end of the grace holds for both."""
    stopper = Stopper(family)
    stopper.begin(1, [child.pid], signal.SIGTERM, 10.0, now=0.0)
    stopper.begin(2, [child.pid], signal.SIGTERM, 10.0, now=5.0)
    assert stopper.next_at == 10.0
    assert not stopper.step(10.0)
    assert child.dead()
    assert {done.ident for done in stopper.step(10.1)} == {1, 2}


def test_a_second_stop_may_shorten_the_first(family: Family, child: Child) -> None:
    """Grace 0 is SIGKILL at once, whatever was promised before."""
    stopper = Stopper(family)
    stopper.begin(1, [child.pid], signal.SIGTERM, 10.0, now=0.0)
    stopper.begin(2, [child.pid], signal.SIGTERM, 0.0, now=1.0)
    assert not stopper.step(1.0)
    assert child.dead()
    assert {done.ident for done in stopper.step(1.1)} == {1, 2}


def test_hurry_ends_the_grace(family: Family, child: Child) -> None:
    """After hurry, the next step kills."""
    stopper = Stopper(family)
    stopper.begin(1, [child.pid], signal.SIGTERM, 1000.0, now=0.0)
    stopper.hurry(now=1.0)
    stopper.step(1.0)
    assert child.dead()


def test_what_the_kernel_does_not_end_is_reported(family: Family, child: Child) -> None:
    """After a bounded wait the stop ends and names the pid and its state."""

    def in_vain(processes: Iterable[Process], signum: int) -> None:
        for process in processes:
            assert process.pid == child.pid

    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    stopper = Stopper(family, in_vain)
    stopper.begin(1, [child.pid], signal.SIGTERM, 0.0, now=0.0)
    assert not stopper.step(0.0)
    assert stopper.next_at == KILL_WAIT_S
    assert not stopper.step(KILL_WAIT_S - 0.1)
    (done,) = stopper.step(KILL_WAIT_S)
    assert done.stuck == ((child.pid, "T"),)


def test_only_named_workers_are_touched(family: Family, child: Child) -> None:
    """A worker that is not named, and a pid that is nobody's, are left alone."""
    other = Child(family)
    try:
        stopper = Stopper(family)
        stopper.begin(1, [other.pid, os.getpid(), os.getppid()], signal.SIGTERM, 0.0, now=0.0)
        stopper.step(0.0)
        assert other.dead()
        assert stopper.step(0.1) == [Stopped(ident=1, stuck=())]
        assert child.process.poll() is None
    finally:
        other.close()
