"""What a check found: one line with its weight. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing to do."""
    WARNING = "warning"
    """The job will start, and may meet this later."""
    FAILURE = "failure"
    """The job can not run so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of `frun doctor`."""

    level: Level
    check: str
    """What was looked at, in a word or two."""
    text: str
    """What was found, and what to do about it."""


def ok(check: str, text: str) -> Finding:
    """All is well."""
    return Finding(level=Level.OK, check=check, text=text)


def note(check: str, text: str) -> Finding:
    """Worth knowing."""
    return Finding(level=Level.NOTE, check=check, text=text)


def warning(check: str, text: str) -> Finding:
    """May hurt later."""
    return Finding(level=Level.WARNING, check=check, text=text)


def failure(check: str, text: str) -> Finding:
    """Does not work."""
    return Finding(level=Level.FAILURE, check=check, text=text)


def failed(findings: Iterable[Finding]) -> bool:
    """Return True if the job can not run."""
    return any(finding.level is Level.FAILURE for finding in findings)
