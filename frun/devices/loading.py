"""Finds the checks that a host is to have: frun's own, those of other packages, files.

Nothing here polls. What can not be loaded becomes a fact, never an error of the job.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from frun.devices import ascend, host, nvidia
from frun.devices.contract import GROUP, Fact, Factory, Plugin, Surroundings
from frun.errors import UsageError
from frun.protocol.health import warning

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

FILE = "file:"
BUILT_IN: Mapping[str, Factory] = {
    "host": host.plugin,
    "nvidia": nvidia.plugin,
    "ascend": ascend.plugin,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check of this host, loaded."""

    name: str
    plugin: Plugin | None
    """None: there is nothing for it here, or it could not be loaded."""
    trouble: Fact | None = None
    """Why it could not be loaded."""


def load(names: Sequence[str] | None, around: Surroundings) -> list[Check]:
    """Return these checks; None: all that there are, files apart."""
    found = _offered()
    wanted = list(found) if names is None else names
    return [_load(name, found, around) for name in wanted]


def refuse_unknown(names: Sequence[str] | None) -> None:
    """Make sure that every check exists. Raises UsageError naming one that does not."""
    unknown = [name for name in names or () if name not in BUILT_IN and not name.startswith(FILE)]
    if not unknown:
        return
    found = _offered()
    for name in unknown:
        if name not in found:
            raise UsageError(
                f"--device-checks: there is no check {name!r}; there are {', '.join(found)},"
                f" {FILE}PATH and none"
            )


def _offered() -> "dict[str, Factory | EntryPoint]":
    """Return all checks that have a name; those of other packages are not imported yet."""
    if not any(map(_offers, sys.path)):
        return dict(BUILT_IN)
    from importlib.metadata import entry_points

    theirs = {each.name: each for each in entry_points(group=GROUP)}
    return {**theirs, **BUILT_IN}


def _offers(folder: str) -> bool:
    """Tell whether a package installed there has checks: to read all that is known of all takes longer."""
    try:
        names = [name for name in os.listdir(folder) if name.endswith(("-info", ".egg"))]
    except OSError:
        return False
    return any(_names_group(os.path.join(folder, name, "entry_points.txt")) for name in names)


def _names_group(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return f"[{GROUP}]".encode() in file.read()
    except OSError:
        return False


def _load(
    name: str,
    found: "Mapping[str, Factory | EntryPoint]",
    around: Surroundings,
) -> Check:
    if name.startswith(FILE):
        from frun.devices.file import FactsFile

        return Check(name=FILE[:-1], plugin=FactsFile(name.removeprefix(FILE)))
    try:
        factory = BUILT_IN.get(name) or found[name].load()  # type: ignore[union-attr]
        return Check(name=name, plugin=factory(around))
    except Exception as error:  # noqa: BLE001 - other people's code, which must not end the checks
        return Check(name=name, plugin=None, trouble=broken(name, "can not be loaded", error))


def broken(name: str, what: str, error: BaseException) -> Fact:
    """Return the fact that a check itself is out of order."""
    return warning("broken", f"the check {what}: {type(error).__name__}: {error}", check=name)
