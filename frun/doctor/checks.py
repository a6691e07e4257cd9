"""The checks of devices that a job would have here, and what their first poll finds. `judge` is pure."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from frun.config import LaunchConfig
from frun.devices import child, text
from frun.devices.contract import LONGEST_POLL_S
from frun.doctor.findings import Finding, failure, note, ok, warning
from frun.protocol.health import Fact

_LIMIT_S = LONGEST_POLL_S + 20.0
_CHECK = "devices"


@dataclass(frozen=True, slots=True, kw_only=True)
class Polled:
    """What the checks said."""

    facts: Mapping[str, tuple[Fact, ...]]
    """Per check that has something to look at, what is wrong."""
    absent: tuple[str, ...] = ()
    """Checks that have nothing to look at here."""
    trouble: str = ""
    """Why nothing was said at all."""


def look(config: LaunchConfig, environment: Mapping[str, str], log_folder: str) -> Polled:
    """Poll each check once, in a process of its own as in a job; takes seconds."""
    names = config.workers.device_checks
    if names == ():
        return Polled(facts={})
    command = child.command(
        sys.executable,
        str(Path(__file__).parents[1]),
        names,
        nproc=config.workers.nproc,
        log_folder=log_folder,
        once=True,
    )
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LIMIT_S,
            check=False,
        )
        document = json.loads(done.stdout)
        found = {
            name: tuple(replace(text.read(each), check=name) for each in facts)
            for name, facts in document["checks"].items()
        }
        return Polled(facts=found, absent=tuple(document["absent"]))
    except subprocess.TimeoutExpired:
        return Polled(facts={}, trouble=f"they did not answer within {_LIMIT_S:g} s")
    except OSError as error:
        return Polled(facts={}, trouble=f"they can not be started: {error.strerror}")
    except ValueError:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        why = words[-1] if words else f"status {done.returncode}"
        return Polled(facts={}, trouble=f"their process ended: {why}")


def judge(polled: Polled, config: LaunchConfig) -> Iterator[Finding]:
    """Yield what that means for this job."""
    names = config.workers.device_checks
    if names == ():
        yield note(_CHECK, "nobody looks at them: --device-checks none")
    if polled.trouble:
        yield warning(_CHECK, f"the checks do not work: {polled.trouble}")
    for name, facts in polled.facts.items():
        if not facts:
            yield ok(_CHECK, f"{name}: nothing is wrong")
        for fact in facts:
            if fact.forbids:
                yield failure(_CHECK, f"{fact}: this host is not fit for work")
            else:
                yield warning(_CHECK, str(fact))
    for name in polled.absent:
        say = note if names is None else warning
        yield say(_CHECK, f"{name}: it has nothing to look at here")
