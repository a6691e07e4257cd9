"""What kind of thing is at fault, and the rules that tell it from what was written. Plain data.

Reading rules from files is `fault_patterns`', applying them `classify`'s.
"""

import re
from dataclasses import dataclass
from enum import StrEnum


class FaultClass(StrEnum):
    """Who has to look at a fault."""

    USER = "user"
    """The script, or what it was given."""
    PROCESS = "process"
    """One process ended or froze, and nothing beyond it is known to be wrong."""
    DEVICE = "device"
    HOST = "host"
    """The machine: gone, out of memory, at a limit."""
    NETWORK = "network"
    STORAGE = "storage"
    """A disk or a file system, local or remote."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Rule:
    """A line that matches is evidence of a class."""

    fault_class: FaultClass
    pattern: re.Pattern[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A class and why."""

    fault_class: FaultClass
    evidence: str
    """What was seen, for people, on one line."""
