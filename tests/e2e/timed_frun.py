"""frun's command, of which the CPU time of each turn of the agent's event loop is measured.

asyncio's own debug mode measures the wall clock, on which other processes of a busy machine take a part.
Writes the turns that took longer than `FRUN_SLOW_S` to the file `FRUN_SLOW_FILE`, one in a line.
"""

import asyncio.events
import os
import sys
import time
from pathlib import Path

from frun.cli import main

_LIMIT_S = float(os.environ["FRUN_SLOW_S"])
_run = asyncio.events.Handle._run
_slow: list[str] = []


def _timed(handle: asyncio.events.Handle) -> None:
    text = repr(handle)
    begun = time.thread_time()
    _run(handle)
    took_s = time.thread_time() - begun
    if took_s > _LIMIT_S:
        _slow.append(f"{took_s:.4f} s in {text}\n")


if __name__ == "__main__":
    asyncio.events.Handle._run = _timed  # type: ignore[assignment,method-assign]
    try:
        main(sys.argv[1:])
    finally:
        Path(os.environ["FRUN_SLOW_FILE"]).write_text("".join(_slow))
