"""Draws the faults of one job of `exactness`, and says what must follow from each.

Owns which faults can happen to which training. How a fault is done is `faults`'s.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.faults import Fault

IN_STEP = ("loader", "forward", "backward", "gate", "update", "after-update", "scheduler")
OF_NEWCOMER = ("loading", "groups", "meeting", "subgroup", "agree", "newcomer", "before-first-step")
KINDS = (
    *IN_STEP,
    "start",
    "loading",
    "loading-first",
    "twice",
    "donor",
    "survivor",
    "two-ranks",
    "all-ranks",
    "zygote",
    "end",
)
"""`start`: before the first step; `twice`: the newcomer dies too, on its way or in its step; `survivor`: a
second rank dies while it meets the newcomer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A fault and what must follow from it."""

    fault: Fault
    restart: bool = False
    """All workers are new afterwards; else only those that died."""


def make_plan(
    draw: random.Random,
    ranks: int,
    config: dict[str, Any],
    kinds: Sequence[str],
    faults: int,
    steps: int,
) -> list[Expected]:
    """Draw faults for one job, at rising steps, with at most one restart of all workers."""
    chosen: list[str] = []
    may_restart = True
    possible = [kind for kind in kinds if kind != "loader" or not config.get("workers")]
    once = {"start", "loading", "loading-first", "end"}
    size = 0
    while possible and size < faults:
        kind = draw.choice(possible)
        restarts = any(
            expected.restart for expected in faults_of(random.Random(0), kind, ranks, config, 1)
        )
        # Both while a process loads: they would wait for each other.
        other = {"loading": "loading-first", "loading-first": "loading"}.get(kind)
        if (restarts and not may_restart) or (kind in once and kind in chosen) or other in chosen:
            if all(each in once and each in chosen for each in possible):
                break
            possible = [each for each in possible if each != kind]
            continue
        may_restart = may_restart and not restarts
        chosen.append(kind)
        size += 2 if kind in ("twice", "donor", "survivor") else 1
    order = {"loading-first": 0, "loading": 1, "start": 2, "end": 9}
    chosen.sort(key=lambda kind: order.get(kind, 5))
    middle = [kind for kind in chosen if kind not in order]
    # Two steps apart, or ranks that don't wait for each other between them could die at once.
    at = sorted(draw.sample(range(2, steps, 2), len(middle)))
    plan: list[Expected] = []
    for kind in chosen:
        step = at.pop(0) if kind in middle else {"start": 0, "end": steps}.get(kind, 0)
        plan += faults_of(draw, kind, ranks, config, step)
    return plan


def faults_of(
    draw: random.Random, kind: str, ranks: int, config: dict[str, Any], step: int
) -> list[Expected]:
    """Return the faults of one kind, with what must follow."""
    victim = draw.randrange(ranks)
    who = f"rank {victim}"
    other = (victim + 1 + draw.randrange(ranks - 1)) % ranks
    in_step = [place for place in IN_STEP if place != "loader" or not config.get("workers")]
    how = draw.choice(("SIGKILL", "SIGKILL", "SIGKILL", "SIGSEGV", "exit 3"))
    first = Expected(fault=Fault(place=draw.choice(in_step), step=step, who=who, how=how))
    if kind in IN_STEP or kind == "end":
        return [Expected(fault=Fault(place=kind, step=step, who=who, how=how))]
    if kind == "start":
        return [Expected(fault=Fault(place="before-first-step", step=0, who=who, how=how))]
    if kind in ("loading", "loading-first"):
        return [
            Expected(fault=Fault(place=kind, who=who, how=how), restart=kind == "loading-first")
        ]
    if kind == "twice":
        inside = (
            OF_NEWCOMER
            if not config.get("outside")
            else tuple(p for p in OF_NEWCOMER if p != "subgroup")
        )
        place = draw.choice((*inside, "forward", "backward"))
        return [first, Expected(fault=Fault(place=place, who=who, then=True))]
    if kind == "donor":
        # Before any rank's update: a survivor that is a step behind would be copied to as well.
        before = draw.choice(
            [place for place in in_step if place in ("loader", "forward", "backward")]
        )
        first = Expected(fault=Fault(place=before, step=step, who=who, how=how))
        return [first, Expected(fault=Fault(place="donor", then=True), restart=ranks == 2)]
    if kind == "survivor":
        places = ("agree",) if config.get("outside") else ("groups", "meeting", "agree")
        fault = Fault(place=draw.choice(places), who=f"rank {other}", then=True)
        return [first, Expected(fault=fault, restart=ranks == 2)]
    place = draw.choice(in_step)
    if kind == "two-ranks":
        pair = f"ranks {min(victim, other)}, {max(victim, other)}"
        return [Expected(fault=Fault(place=place, step=step, who=pair), restart=ranks == 2)]
    names = {"all-ranks": "all ranks", "zygote": "zygote"}
    return [Expected(fault=Fault(place=place, step=step, who=names[kind]), restart=True)]
