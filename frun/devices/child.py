"""The process that looks at devices beside an agent, and tells it what it finds, line by line.

Owns the threads of the checks and standard output. A library that crashes, hangs, or holds Python's lock
harms nobody here. It ends with its agent: at the end of standard input.
"""

import ctypes
import json
import os
import select
import signal
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from frun.clock import Clock, SystemClock
from frun.devices import text
from frun.devices.contract import LONGEST_POLL_S, POLL_S, Surroundings
from frun.devices.loading import Check, load
from frun.devices.polling import Poller

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Serve; `arguments` holds one JSON object, made by `command`.

    A line has `checks` (per name a list of facts, as `text` writes them) and `absent`: names of checks that
    have nothing to look at.
    """
    library = ctypes.CDLL(None)
    library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    library.prctl(_PR_SET_NAME, b"frun-checks", 0, 0, 0)
    asked = json.loads(arguments[0])
    # What a check prints must not get between the lines.
    out = os.dup(1)
    os.dup2(2, 1)
    clock = SystemClock()
    around = Surroundings(
        nproc=asked["nproc"], environment=environment, log_folder=asked["log_folder"], clock=clock
    )
    checks = load(asked["names"], around)
    checks += load([f"file:{path}" for path in asked["files"]], around)
    try:
        _serve(checks, clock, out, once=asked["once"])
    except BrokenPipeError:
        pass
    finally:
        # A thread may be in a call that never returns.
        os._exit(0)


def command(
    python: str,
    package: str,
    names: Sequence[str] | None,
    *,
    nproc: int,
    log_folder: str,
    files: Sequence[str] = (),
    once: bool = False,
) -> list[str]:
    """Return how to start it; `package` is frun's own folder, `once` makes it end after one line."""
    code = (
        "import os, sys; sys.path.insert(0, os.path.dirname(sys.argv.pop(1)))\n"
        "from frun.devices.child import main; main(sys.argv[1:], os.environ)"
    )
    asked = {
        "names": names,
        "nproc": nproc,
        "log_folder": log_folder,
        "files": list(files),
        "once": once,
    }
    return [python, "-P", "-c", code, package, json.dumps(asked)]


def _serve(checks: Sequence[Check], clock: Clock, out: int, *, once: bool) -> None:
    told, tells = os.pipe()
    os.set_blocking(told, False)
    os.set_blocking(tells, False)
    pollers = [
        Poller(check.name, check.plugin, clock, lambda: _wake(tells))
        for check in checks
        if check.plugin is not None
    ]
    for poller in pollers:
        poller.start()
    events = select.poll()
    events.register(told, select.POLLIN)
    if not once:
        events.register(0, select.POLLIN)
    until = clock.monotonic() + LONGEST_POLL_S + POLL_S
    while True:
        now = clock.monotonic()
        if not once or all(poller.polled for poller in pollers) or now >= until:
            _say(out, checks, pollers, now)
            if once:
                return
        ready = {fd for fd, _ in events.poll(1000 * POLL_S)}
        if 0 in ready and not os.read(0, 1):
            return
        if told in ready:
            os.read(told, 4096)


def _wake(fd: int) -> None:
    try:
        os.write(fd, b".")
    except BlockingIOError:
        return  # it is awake


def _say(out: int, checks: Sequence[Check], pollers: Sequence[Poller], now: float) -> None:
    found: dict[str, list[dict[str, Any]]] = {}
    for poller in pollers:
        found.setdefault(poller.name, []).extend(map(text.written, poller.facts(now)))
    for check in checks:
        if check.trouble is not None:
            found.setdefault(check.name, []).append(text.written(check.trouble))
    absent = [c.name for c in checks if c.plugin is None and c.trouble is None]
    line = json.dumps({"checks": found, "absent": absent})
    os.write(out, line.encode() + b"\n")
