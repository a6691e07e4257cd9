"""What a worker tells its agent when one generation ends right after another."""

import threading
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from frun.protocol.channel import Fact, Order, Out, Pause, Resume
from frun.worker.channel import Channel
from frun.worker.inject import Rendezvous
from frun.worker.runtime import Runtime

LIMIT_S = 40.0


class Line:
    """The agent's end of a channel, at hand."""

    def __init__(self) -> None:
        self.sent: list[Fact] = []
        self.obey: Callable[[Order], None] = lambda order: None

    def send(self, fact: Fact) -> None:
        self.sent.append(fact)

    def offer(self, fact: Fact) -> None:
        pass

    def listen(self, obey: Callable[[Order], None]) -> None:
        self.obey = obey

    def outs(self) -> list[int]:
        return [fact.generation for fact in self.sent if isinstance(fact, Out)]


@pytest.fixture
def line() -> Line:
    """Orders go down and facts come up by calls."""
    return Line()


@pytest.fixture
def paused(line: Line) -> Iterator[Runtime]:
    """A worker of generation 1 that is out for generation 2."""
    rendezvous = Rendezvous(
        path="", generation=1, master_addr="", master_port="", holds_port=False, env={}
    )
    runtime = Runtime(cast(Channel, line), rendezvous, {}, "")
    runtime.begin()
    try:
        side = threading.Thread(target=line.obey, args=(Pause(generation=2),))
        side.start()
        assert runtime.wait_for_pause(LIMIT_S)
        runtime.leave()
        side.join(LIMIT_S)
        assert not side.is_alive()
        yield runtime
    finally:
        runtime.end()
        runtime.groups.uninstall()


def test_out_is_told_for_every_pause(line: Line, paused: Runtime) -> None:
    """An agent kills who is not out for its latest pause, however soon the order to go on follows it."""
    assert line.outs() == [2]
    line.obey(Pause(generation=3))
    line.obey(Resume(generation=3, env={}))
    paused.wait_for_resume()
    assert line.outs() == [2, 3]
    assert paused.generation == 3


def test_an_order_to_go_on_is_void_when_its_generation_is_over(line: Line, paused: Runtime) -> None:
    """The worker tells that it is out for the newer one, and waits for the order of that."""
    line.obey(Resume(generation=2, env={}))
    line.obey(Pause(generation=3))
    waiting = threading.Thread(target=paused.wait_for_resume)
    waiting.start()
    line.obey(Resume(generation=3, env={"MASTER_PORT": "7"}))
    waiting.join(LIMIT_S)
    assert not waiting.is_alive()
    assert (line.outs(), paused.generation) == ([2, 3], 3)
