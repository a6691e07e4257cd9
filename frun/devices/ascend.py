"""Asks `npu-smi` how Ascend devices are. Written from its documentation and from recorded output.

It has never run on such a device.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping

from frun.devices.contract import Fact, FaultClass, Severity, Surroundings

_LIMIT_S = 8.0
"""Longest wait for `npu-smi info`; below the bound of a poll, so that what is wrong is said."""
_HEALTHY, _MINOR = "OK", "Warning"
# Two rows per chip: the card's number, name and health; then the chip's number, bus and figures.
_CARD_ROW = re.compile(r"^\|\s*(\d+)\s+\S+\s*\|\s*([A-Za-z]+)\s*\|")
_CHIP_ROW = re.compile(r"^\|\s*(\d+)(?:\s+\d+)?\s*\|\s*(?:NA|[0-9A-Fa-f]{4,8}:\S+)\s*\|")

Chip = tuple[int, int]
"""Number of a card and of a chip on it."""


class Ascend:
    """The devices that the workers of this host may see."""

    def __init__(self, program: str, visible: tuple[int, ...] | None) -> None:
        """`visible` are their places in the table, in the workers' order; None: all."""
        self._program = program
        self._visible = visible
        self._chips: list[Chip] = []
        """All that were ever listed, in that order: one that is not listed any more is gone."""

    def poll(self) -> Iterable[Fact]:
        """Return which devices are unwell; see `Plugin`. Raises OSError and what `subprocess` raises."""
        import subprocess

        done = subprocess.run(
            [self._program, "info"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            check=True,
        )
        healths = parse(done.stdout)
        self._chips += [chip for chip in healths if chip not in self._chips]
        return tuple(self._facts(healths))

    def _facts(self, healths: Mapping[Chip, str]) -> Iterator[Fact]:
        places = range(len(self._chips)) if self._visible is None else self._visible
        for device, place in enumerate(places):
            if place >= len(self._chips):
                continue
            health = healths.get(self._chips[place], "")
            if health == _HEALTHY:
                continue
            minor = health == _MINOR
            reason = f"npu-smi says {health}" if health else "npu-smi does not list it any more"
            yield Fact(
                name="health" if health else "lost",
                severity=Severity.WARNING if minor else Severity.FAULT,
                fault_class=FaultClass.DEVICE,
                reason=reason,
                device=device,
                lasting=not minor,
            )


def plugin(around: Surroundings) -> Ascend | None:
    """Make it where npu-smi is found and lists a device that workers may see."""
    program = _program(around.environment.get("PATH", ""))
    visible = around.environment.get("ASCEND_RT_VISIBLE_DEVICES")
    if program is None or visible == "":
        return None
    numbers = None if visible is None else _numbers(visible)
    return Ascend(program, numbers)


def _program(path: str) -> str | None:
    places = (os.path.join(folder, "npu-smi") for folder in path.split(os.pathsep) if folder)
    return next((place for place in places if os.access(place, os.X_OK)), None)


def parse(output: str) -> dict[Chip, str]:
    """Return the health of each chip, in the order of the table of `npu-smi info`."""
    healths: dict[Chip, str] = {}
    card = health = ""
    for line in output.splitlines():
        if "Process id" in line:
            break
        chip = _CHIP_ROW.match(line)
        row = _CARD_ROW.match(line)
        if health and chip:
            healths[int(card), int(chip[1])] = health
            health = ""
        elif row:
            card, health = row[1], row[2]
    return healths


def _numbers(text: str) -> tuple[int, ...]:
    """Read `0,2,5` or `0-3`, as far as it is numbers."""
    found: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if ends is None:
            break
        found += range(int(ends[1]), int(ends[2] or ends[1]) + 1)
    return tuple(found)
