"""An event loop whose time jumps to the next timer whenever nothing is left to do.

Ten simulated minutes pass in milliseconds, always in the same order. Nothing may wait for the outside: a
wait that no timer ends is a deadlock and raises.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_TURN_S = 1e-8
"""Seconds that one turn of the loop takes."""


class Deadlock(RuntimeError):
    """Every task waits and no timer is set: nothing can ever happen again."""


class _Jump(selectors.DefaultSelector):
    """Instead of sleeping for the time until the next timer, says that it has passed."""

    def __init__(self) -> None:
        super().__init__()
        self.passed: Callable[[float], None] = lambda _: None

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout is None:
            raise Deadlock("every task waits, and no timer is set")
        # Every turn takes a moment: a timer may fire before its time by the clock's resolution, and on a
        # clock that stands still those who then wait for the rest could do so for ever.
        self.passed(_TURN_S if ready or not timeout else timeout + _TURN_S)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """A selector loop on a clock of its own that begins at 0."""

    def __init__(self) -> None:
        """Begin at 0 seconds."""
        jump = _Jump()
        super().__init__(jump)
        self._now = 0.0
        jump.passed = self._pass

    def time(self) -> float:
        """Return the seconds since the loop was made."""
        return self._now

    def _pass(self, seconds: float) -> None:
        self._now += seconds


class VirtualClock:
    """frun's clock on the running loop's time."""

    def monotonic(self) -> float:
        """Return the loop's seconds."""
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        """Return the loop's seconds as a date in 1970."""
        return asyncio.get_running_loop().time()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a virtual loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
