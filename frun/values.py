"""Owns reading one value from its text, whether a flag, a variable or a file gave it.

What the values mean together is `resolve`'s business. Every refusal names source, value and fix.
"""

import difflib
import math
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass

from frun.config import Std
from frun.errors import UsageError

_TRUE = frozenset({"1", "true", "yes"})
_FALSE = frozenset({"0", "false", "no"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A value as somebody wrote it, and where."""

    text: str
    source: str
    """`--nnodes`, `PET_NNODES`, or `job.yaml:3: nnodes`; starts every message about the value."""

    def refuse(self, why: str) -> UsageError:
        """Return the error that says what is wrong with this value."""
        return UsageError(f"{self.source}: {self.text!r} {why}")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `, did you mean ...?` with the most similar known word, or nothing."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f", did you mean {found[0]!r}?" if found else ""


def integer(given: Given, *, low: int, high: int | None = None) -> int:
    """Read a whole number within bounds."""
    text = given.text.strip()
    bounds = f"of {low} or more" if high is None else f"from {low} to {high}"
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        raise given.refuse(f"is not a whole number, give one {bounds}")
    value = int(text)
    if value < low or (high is not None and value > high):
        raise given.refuse(f"is out of range, give a whole number {bounds}")
    return value


def seconds(given: Given, *, zero: bool) -> float:
    """Read a duration in seconds; `zero` says whether 0 is one."""
    rule = "0 or more" if zero else "more than 0"
    try:
        value = float(given.text)
    except ValueError:
        raise given.refuse(f"is not a number of seconds, give {rule}") from None
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise given.refuse(f"is not a duration, give seconds of {rule}")
    return value


def switch(given: Given) -> bool:
    """Read an on/off value of a variable or a file."""
    text = given.text.strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise given.refuse("is not a switch, give 1, 0, true, false, yes or no")


def choice(given: Given, choices: Iterable[str]) -> str:
    """Read one of a few words."""
    names = tuple(choices)
    if given.text in names:
        return given.text
    raise given.refuse(f"is not one of {', '.join(names)}{nearest(given.text, names)}")


def host_range(given: Given) -> tuple[int, int]:
    """Read `N` or `MIN:MAX`."""
    parts = given.text.strip().split(":")
    if len(parts) > 2 or not all(re.fullmatch(r"[0-9]{1,9}", part.strip()) for part in parts):
        raise given.refuse("is not N or MIN:MAX, for example 4 or 2:4")
    low, high = int(parts[0]), int(parts[-1])
    if not 0 < low <= high:
        raise given.refuse("breaks 0 < MIN <= MAX, for example 2:4")
    return low, high


def comma_list(given: Given) -> tuple[str, ...]:
    """Read `a,b,c`; blanks around the parts and empty parts do not count."""
    return tuple(part.strip() for part in given.text.split(",") if part.strip())


def filter_list(given: Given) -> tuple[str, ...]:
    """Read `a,b,c` where `,,` is a comma inside a part; parts are taken as they are."""
    parts = given.text.replace(",,", "\0").split(",")
    return tuple(part.replace("\0", ",") for part in parts if part)


def streams(given: Given, nproc: int) -> tuple[Std, ...]:
    """Read `0..3` for all local ranks or `rank:0..3,...`; others get nothing."""
    text = given.text.strip()
    if re.fullmatch(r"[0-3]", text):
        return (Std(int(text)),) * nproc
    if not re.fullmatch(r"[0-9]+:[0-3](,[0-9]+:[0-3])*", text):
        raise given.refuse("is not 0, 1, 2, 3 or RANK:0..3,... (1 is stdout, 2 is stderr)")
    found = [Std.NONE] * nproc
    for part in text.split(","):
        rank, _, bits = part.partition(":")
        if int(rank) < nproc:
            found[int(rank)] = Std(int(bits))
    return tuple(found)


def local_ranks(given: Given) -> frozenset[int]:
    """Read `0,1,2`."""
    parts = comma_list(given)
    if not parts or not all(re.fullmatch(r"[0-9]{1,9}", part) for part in parts):
        raise given.refuse("is not a comma list of local ranks, for example 0,1")
    return frozenset(map(int, parts))


def signal_names(given: Given) -> tuple[str, ...]:
    """Read `SIGTERM,SIGUSR1`; each name once, in order."""
    names = tuple(dict.fromkeys(comma_list(given)))
    if not names:
        raise given.refuse("names no signal, for example SIGTERM,SIGINT")
    known = {each.name for each in signal.Signals}
    for name in names:
        if name not in known:
            raise given.refuse(f"has {name!r}, which is no signal{nearest(name, known)}")
        if name in ("SIGKILL", "SIGSTOP"):
            raise given.refuse(f"has {name}, which no process can catch: leave it out")
    return names


def modules(given: Given) -> tuple[str, ...]:
    """Read dotted module names, `a,b.c`."""
    names = comma_list(given)
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise given.refuse(f"has {name!r}, which is no module name")
    return names
