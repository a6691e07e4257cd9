"""The one place that reads a clock. Everything that decides takes `now` as an argument."""

import time
from typing import Protocol


class Clock(Protocol):
    """Reads time. Monotonic seconds for durations, wall seconds only to show to people."""

    def monotonic(self) -> float:
        """Seconds on a clock that never steps; comparable within one host only."""
        ...

    def wall(self) -> float:
        """Seconds since 1970; may step, so it is shown and never subtracted."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        """Return CLOCK_MONOTONIC in seconds."""
        return time.monotonic()

    def wall(self) -> float:
        """Return the wall clock in seconds since 1970."""
        return time.time()  # noqa: TID251 - this is the seam that the ban protects
