"""The beat of a worker: a thread that tells the agent now and then how far the main thread is.

Owns the thread and its rhythm. What silence means is the agent's to judge.
"""

import threading
from collections.abc import Callable

from frun.protocol.channel import Beat

BEAT_S = 0.5
"""Seconds between two beats: the agent needs a few within its bound of two seconds."""
STILL_BEAT_S = 0.1
"""The same while the main thread stands still: a hang is known that much after its bound."""
_STILL_S = 1.0
"""How long it does so first. Steps of less than that cost no more beats."""


class Beats:
    """Beats from `begin` to `end`."""

    def __init__(self, send: Callable[[Beat], None], look: Callable[[], Beat]) -> None:
        """`look` makes a beat and `send` sends it; neither may wait for anything."""
        self._send = send
        self._look = look
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="frun-beats", daemon=True)

    def begin(self) -> None:
        """Beat from now on."""
        self._thread.start()

    def end(self) -> None:
        """Say that no beat follows: the silence of a process that ends means nothing."""
        if not self._over.is_set():
            self._over.set()
            self._send(self._look())

    def _run(self) -> None:
        while not self._over.is_set():
            beat = self._look()
            self._send(beat)
            self._over.wait(pause_s(beat.still_s))

    @property
    def over(self) -> bool:
        """Whether `end` was called."""
        return self._over.is_set()


def pause_s(still_s: float) -> float:
    """Return the seconds until the next beat of a worker that has stood still for so long."""
    return STILL_BEAT_S if still_s >= _STILL_S else BEAT_S
