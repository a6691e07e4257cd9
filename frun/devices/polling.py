"""Polls one check again and again in a thread of its own, so that one that hangs holds up no other."""

import threading
from collections.abc import Callable
from dataclasses import replace

from frun.clock import Clock
from frun.devices.contract import LONGEST_POLL_S, POLL_S, Fact, Plugin
from frun.devices.loading import broken
from frun.protocol.health import warning


class Poller:
    """One check and what it said last."""

    def __init__(self, name: str, plugin: Plugin, clock: Clock, tell: Callable[[], None]) -> None:
        """`tell` is called in the check's thread after each poll."""
        self.name = name
        self.polled = False
        """It has answered once."""
        self._plugin = plugin
        self._clock = clock
        self._tell = tell
        self._facts: tuple[Fact, ...] = ()
        self._began: float | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Poll from now on, until the process ends."""
        self._thread.start()

    def facts(self, now: float) -> tuple[Fact, ...]:
        """Return what the last poll that ended found, and that the present one takes too long."""
        began = self._began
        if began is None or now - began < LONGEST_POLL_S:
            return self._facts
        why = f"the check has not answered for {LONGEST_POLL_S:g} s"
        slow = warning("silent", why, check=self.name)
        return (*self._facts, slow)

    def _run(self) -> None:
        while True:
            began = self._began = self._clock.monotonic()
            self._facts = self._poll()
            self._began = None
            self.polled = True
            self._tell()
            left = began + POLL_S - self._clock.monotonic()
            threading.Event().wait(max(0.0, left))

    def _poll(self) -> tuple[Fact, ...]:
        try:
            return tuple(replace(fact, check=self.name) for fact in self._plugin.poll())
        except Exception as error:  # noqa: BLE001 - other people's code, which must not end the checks
            return (broken(self.name, "fails", error),)
