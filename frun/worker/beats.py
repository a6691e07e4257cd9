"""The beat of a worker: a thread that tells the agent now and then how far the main thread is.

Owns the thread and its rhythm. What silence means is the agent's to judge.
"""

import threading
from collections.abc import Callable

from frun.protocol.channel import Beat

BEAT_S = 0.5
"""Seconds between two beats: the agent needs a few within its bound of two seconds."""


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
            self._send(self._look())
            self._over.wait(BEAT_S)

    @property
    def over(self) -> bool:
        """Whether `end` was called."""
        return self._over.is_set()
