"""Builders for tests of device checks."""

from collections.abc import Mapping

from frun.devices.contract import Surroundings


class HandClock:
    """Clocks that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.offset = 1_700_000_000.0

    def monotonic(self) -> float:
        """Return what was set."""
        return self.now

    def wall(self) -> float:
        """Return what was set."""
        return self.now + self.offset


def around(
    *,
    nproc: int = 2,
    environment: Mapping[str, str] | None = None,
    log_folder: str = "/tmp",
    clock: HandClock | None = None,
) -> Surroundings:
    """Return what a check is told."""
    return Surroundings(
        nproc=nproc,
        environment=environment or {},
        log_folder=log_folder,
        clock=clock or HandClock(),
    )
