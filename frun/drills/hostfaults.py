"""Faults of a whole host: what stands in for a lost machine, a cut cable, a full disk.

Each function either refuses before anything has happened, or returns what does it. Who is hit was decided by
others.
"""

import asyncio
import contextlib
import os
import resource
import signal
from collections.abc import Callable, Sequence

import psutil

from frun.agent import addresses
from frun.protocol.faults import Fault

Deed = Callable[[], None]

_CUT = """\
routes=$(mktemp) && ip route save dev "$1" >"$routes"
ip link set dev "$1" down; sleep "$2"; ip link set dev "$1" up
ip route restore <"$routes" 2>/dev/null; rm -f "$routes"
"""
_EMULATE = 'sleep "$2"; tc qdisc del dev "$1" root'


class Refused(Exception):
    """The fault can not be done; the text says why."""


def end_agent() -> None:
    """SIGKILL to this agent: the kernel ends its zygote, workers and etcd."""
    os.kill(os.getpid(), signal.SIGKILL)


def end_host() -> None:
    """SIGKILL to all that this host runs for the job, the agent last."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.kill()
    end_agent()


def zygote_of(worker: int) -> int:
    """Return the process that forked a worker. Raises Refused."""
    try:
        return psutil.Process(worker).ppid()
    except psutil.Error:
        raise Refused("no worker runs here that a zygote could be found by") from None


def embedded_etcd() -> int:
    """Return the etcd that this agent runs. Raises Refused."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.name() == "etcd":
                return process.pid
    raise Refused("no etcd of frun runs on this host")


def fill_disk() -> Deed:
    """Let no file of this agent grow any more, as on a full disk; return what ends that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores SIGXFSZ, so that a write only fails.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def network(fault: Fault, address: str) -> tuple[str, tuple[str, ...]]:
    """Make sure that a network fault can be done at this host's address.

    Returns what will be done, and the command that does it and ends it again, whatever becomes of the agent.
    """
    device = addresses.interface_of(address)
    if not device or device == "lo":
        raise Refused(f"the address {address} is on {device or 'no interface'}: nothing to cut")
    wait = f"{fault.duration_s:g}"
    if not fault.argument:
        await _try(["ip", "link", "set", "dev", device, "up"])
        return f"{device} down for {wait} s", ("sh", "-c", _CUT, "sh", device, wait)
    words = ["tc", "qdisc", "replace", "dev", device, "root", "netem"]
    for part in fault.argument.split(","):
        name, _, value = part.partition("=")
        words += [name, f"{value}{'ms' if name == 'delay' else '%'}"]
    await _try(words)
    return f"{' '.join(words[6:])} on {device} for {wait} s", (
        "sh", "-c", _EMULATE, "sh", device, wait,
    )  # fmt: skip


async def _try(command: Sequence[str]) -> None:
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise Refused(f"{command[0]} can not be run: {error.strerror}") from None
    _, said = await process.communicate()
    if process.returncode != 0:
        text = " ".join(said.decode(errors="replace").split())
        raise Refused(f"{' '.join(command)}: {text}")
