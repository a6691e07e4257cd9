"""Owns where one run's sockets are: a folder in the temporary one, or in a shallower place.

What is put into it belongs to others; whoever makes it removes it.
"""

import os
import tempfile

_PREFIX = "frun_run_"
_LONGEST = 85
"""Bytes of its path: a socket's whole path may have 107."""
_SHALLOW = "/tmp"


def make_run_dir() -> str:
    """Make a fresh folder for sockets and return its path.

    Schedulers like to make TMPDIR deep; sockets then go to /tmp, where their names fit.
    """
    path = tempfile.mkdtemp(prefix=_PREFIX)
    if len(os.fsencode(path)) <= _LONGEST:
        return path
    os.rmdir(path)
    return tempfile.mkdtemp(prefix=_PREFIX, dir=_SHALLOW)
