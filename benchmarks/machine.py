"""Says in one line which machine a figure was measured on."""

import os
import platform
from importlib.metadata import version


def describe() -> str:
    """Return processor, cores that may be used, kernel, Python, torch and the load at the start."""
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    return (
        f"{cores} cores {platform.machine()}, Linux {platform.release().split('-')[0]},"
        f" Python {platform.python_version()}, torch {version('torch')}, load {load:.1f}"
    )
