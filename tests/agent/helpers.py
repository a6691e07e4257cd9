"""Functions that tests run in a forked helper."""

import os
import signal
from collections.abc import Sequence


def greet(fds: Sequence[int], name: str, number: int) -> None:
    """Write to the descriptor that was passed."""
    os.write(fds[0], f"{name} {number}".encode())


def wait(fds: Sequence[int]) -> None:
    """Wait for a signal."""
    signal.pause()
