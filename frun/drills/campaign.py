"""Campaigns: many faults of mixed kinds, drawn from a seed, each with what must come of it.

Pure: from a document (YAML or JSON, already read) to a plan. Doing it is `operator`'s.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from frun.drills import catalogue
from frun.drills.catalogue import CATALOGUE, Outcome, Scope
from frun.drills.targets import Selection
from frun.errors import UsageError
from frun.protocol.faults import Fault, FaultKind, Place

TIMEOUT_S = 120.0
_KEYS = frozenset({"kinds", "faults", "seed", "every", "times", "steps", "timeout"})
_KIND_KEYS = frozenset(
    {"fault", "weight", "cause", "expect", "duration", "phase", "rank", "host", "leader"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One line of the mix."""

    fault: Fault
    weight: float
    cause: str
    """What it stands for, such as the row of a published table; may be empty."""
    expect: frozenset[Outcome]
    selection: Selection


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """What a file says."""

    kinds: tuple[Kind, ...]
    faults: int
    seed: int
    timeout_s: float
    """Longest wait for the end of one fault."""
    every: tuple[float, float]
    """Seconds between the end of a fault and the next one: drawn from this range."""
    times: tuple[float, ...]
    """Seconds after the beginning; empty: `every` counts."""
    steps: tuple[int, ...]
    """Numbers of completed updates; empty: no step is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One fault of a plan."""

    kind: Kind
    fault: Fault
    pause_s: float
    """Since the end of the fault before it."""
    at_s: float | None
    """Since the beginning, at the earliest; None: after the pause."""


def plan(campaign: Campaign) -> tuple[Planned, ...]:
    """Return the faults in their order: the same ones for the same campaign and seed."""
    draw = random.Random(campaign.seed)
    weights = [kind.weight for kind in campaign.kinds]
    planned = []
    for number in range(campaign.faults):
        (kind,) = draw.choices(campaign.kinds, weights)
        pause_s = draw.uniform(*campaign.every)
        fault = kind.fault
        if campaign.steps:
            fault = replace(fault, at_step=campaign.steps[number])
        at_s = campaign.times[number] if campaign.times else None
        planned.append(Planned(kind=kind, fault=fault, pause_s=pause_s, at_s=at_s))
    return tuple(planned)


def without(campaign: Campaign, kinds: frozenset[FaultKind]) -> Campaign:
    """Return the campaign without these kinds. Raises UsageError if none is left."""
    left = tuple(kind for kind in campaign.kinds if kind.fault.kind not in kinds)
    if not left:
        raise UsageError("no kind of fault is left in the campaign")
    return replace(campaign, kinds=left)


def read(document: object) -> Campaign:
    """Return the campaign of a document. Raises UsageError naming what does not fit."""
    values = _mapping(document, "a campaign", _KEYS)
    lines = values.get("kinds")
    if not isinstance(lines, list) or not lines:
        raise UsageError("kinds: must be a list of faults, at least one")
    kinds = tuple(_kind(line, f"kinds[{number}]") for number, line in enumerate(lines))
    if not any(kind.weight for kind in kinds):
        raise UsageError("kinds: no weight is above 0")
    given = [name for name in ("every", "times", "steps") if name in values]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other: give one of them")
    times = _rising(values, "times")
    steps = tuple(int(step) for step in _rising(values, "steps", whole=True))
    if steps:
        _must_have_steps(kinds)
    listed = len(times or steps)
    faults = int(_number(values, "faults", listed or 1, low=1, whole=True))
    if listed and faults > listed:
        raise UsageError(f"faults: {faults} are wanted, but {given[0]} has {listed}")
    return Campaign(
        kinds=kinds,
        faults=faults,
        seed=int(_number(values, "seed", 0, low=0, whole=True)),
        timeout_s=_number(values, "timeout", TIMEOUT_S, low=0.001),
        every=_range(values),
        times=times,
        steps=steps,
    )


def _kind(line: object, where: str) -> Kind:
    try:
        return _read_kind(_mapping(line, "a kind", _KIND_KEYS))
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _read_kind(values: Mapping[str, Any]) -> Kind:
    text, phase, host = values.get("fault"), values.get("phase"), values.get("host")
    if not isinstance(text, str):
        raise UsageError("fault: must be a kind of fault, such as kill")
    if phase is not None and phase not in list(Place):
        raise UsageError(f"phase: {phase!r} is none of {', '.join(Place)}")
    duration_s = _number(values, "duration", 0.0, low=0.0)
    fault = catalogue.fault(
        text, duration_s=duration_s, place=None if phase is None else Place(phase)
    )
    rank = int(_number(values, "rank", 0, low=0, whole=True)) if "rank" in values else None
    return Kind(
        fault=fault,
        weight=_number(values, "weight", 1.0, low=0.0),
        cause=str(values.get("cause", "")),
        expect=_outcomes(values["expect"]) if "expect" in values else catalogue.expected(fault),
        selection=Selection(
            rank=rank,
            host=None if host is None else str(host),
            leader=values.get("leader") is True,
        ),
    )


def _must_have_steps(kinds: Sequence[Kind]) -> None:
    for kind in kinds:
        of_host = CATALOGUE[kind.fault.kind].scope is not Scope.WORKER
        if of_host or kind.fault.place in (Place.REBUILD, Place.COPY):
            raise UsageError(f"steps: {kind.fault} is not done at a step")


def _outcomes(given: Any) -> frozenset[Outcome]:
    names: list[Any] = given if isinstance(given, list) else [given]
    for name in names:
        if name not in list(Outcome):
            raise UsageError(f"expect: {name!r} is none of {', '.join(Outcome)}")
    return frozenset(Outcome(name) for name in names)


def _mapping(document: object, what: str, keys: frozenset[str]) -> Mapping[str, Any]:
    if not isinstance(document, dict):
        raise UsageError(f"{what} must be `key: value` lines, not {document!r}")
    for key in document:
        if key not in keys:
            raise UsageError(f"{what} has no key {key!r}; there are {', '.join(sorted(keys))}")
    return document


def _number(
    values: Mapping[str, Any], name: str, default: float, *, low: float, whole: bool = False
) -> float:
    value = values.get(name, default)
    fits = type(value) is int or (type(value) is float and not whole)
    if not fits or not value >= low:
        raise UsageError(
            f"{name}: must be a {'whole ' if whole else ''}number from {low:g} on, not {value!r}"
        )
    return float(value)


def _range(values: Mapping[str, Any]) -> tuple[float, float]:
    given = values.get("every", 0.0)
    low, high = given if isinstance(given, list) and len(given) == 2 else (given, given)
    first = _number({"every": low}, "every", 0.0, low=0.0)
    return first, _number({"every": high}, "every", 0.0, low=first)


def _rising(values: Mapping[str, Any], name: str, *, whole: bool = False) -> tuple[float, ...]:
    if name not in values:
        return ()
    given = values[name]
    if not isinstance(given, list) or not given:
        raise UsageError(f"{name}: must be a list of numbers, not {given!r}")
    return tuple(_numbers(given, name, whole=whole))


def _numbers(given: Sequence[object], name: str, *, whole: bool) -> Iterator[float]:
    least = 0.0
    for each in given:
        least = _number({name: each}, name, 0.0, low=least, whole=whole)
        yield least
