"""What a device plugin is: the contract between frun and whoever can tell that a device is unwell.

A package offers one by an entry point of the group `frun.device_plugins`, which names a `Factory`. It runs in
a process of its own beside the agent, so nothing that it does can hold the job up.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from frun.clock import Clock
from frun.protocol.classes import FaultClass
from frun.protocol.health import Fact, Severity

__all__ = ["GROUP", "Fact", "Factory", "FaultClass", "Plugin", "Severity", "Surroundings"]

GROUP = "frun.device_plugins"
POLL_S = 1.0
"""From the beginning of one poll to that of the next, if it does not take longer."""
LONGEST_POLL_S = 10.0
"""A poll that takes longer is itself a finding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a plugin is told of the host's part in the job."""

    nproc: int
    """Workers of this host; local rank N uses the Nth device that it may see."""
    environment: Mapping[str, str]
    """The workers', as far as it is the same for all of them."""
    log_folder: str
    """Where this agent writes."""
    clock: Clock


class Plugin(Protocol):
    """Looks at one kind of device, or at one side of the host."""

    def poll(self) -> Iterable[Fact]:
        """Return all that is wrong now; nothing if all is well.

        Called about once a second, always from the same thread. It may block and it may raise: both
        become warnings with the plugin's name. A fault that is reported again and again is one fault.
        """
        ...


Factory = Callable[[Surroundings], Plugin | None]
"""Makes a plugin; None: there is nothing on this host for it to look at."""
