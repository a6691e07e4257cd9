"""Campaigns: what a file may say, and that a seed tells all that is drawn."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from frun.drills.campaign import plan, read, without
from frun.drills.catalogue import Outcome
from frun.errors import UsageError
from frun.protocol.faults import FaultKind

CONFIGS = Path(__file__).parents[2] / "configs" / "drills"
TOTALS = {"llama3": 419, "byterobust": 55_365}
"""Sums of the published tables."""


def campaign(**more: Any) -> dict[str, Any]:
    """Return a document of two kinds."""
    kinds = [{"fault": "kill", "weight": 3}, {"fault": "stop", "duration": 1, "cause": "swap"}]
    return {"kinds": kinds, "faults": 10, **more}


@pytest.mark.parametrize("name", TOTALS)
def test_a_published_mix(name: str) -> None:
    """Its weights are the table's counts, and what is drawn from it comes near its shares."""
    found = read(yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")))
    assert sum(kind.weight for kind in found.kinds) == TOTALS[name]
    assert all(kind.cause for kind in found.kinds)
    many = 20_000
    drawn = Counter(each.kind for each in plan(replace(found, faults=many)))
    for kind in found.kinds:
        share = kind.weight / TOTALS[name]
        assert drawn[kind] / many == pytest.approx(share, abs=0.012)


def test_every_mix_is_tested() -> None:
    """No file is forgotten."""
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(TOTALS)


def test_a_seed_tells_all() -> None:
    """The same one the same faults and pauses, another one others."""
    found = read(campaign(seed=1, every=[1, 3]))
    assert plan(found) == plan(found)
    assert plan(found) != plan(replace(found, seed=2))
    assert all(1 <= each.pause_s <= 3 for each in plan(found))


def test_times_and_steps() -> None:
    """Each fault has its own; there are as many faults as numbers, or fewer."""
    timed = read({"kinds": [{"fault": "kill"}], "times": [0, 5, 5.5]})
    assert [each.at_s for each in plan(timed)] == [0, 5, 5.5]
    stepped = read({"kinds": [{"fault": "kill", "phase": "gate"}], "steps": [10, 20], "faults": 1})
    assert [str(each.fault) for each in plan(stepped)] == ["kill at step 10 in gate"]


def test_what_is_expected() -> None:
    """By the kind, unless the file says what."""
    found = read(campaign(kinds=[{"fault": "kill"}, {"fault": "kill", "expect": ["failed"]}]))
    assert [set(kind.expect) for kind in found.kinds] == [{Outcome.RECOVERED}, {Outcome.FAILED}]


def test_kinds_can_be_left_out() -> None:
    """But not all."""
    found = without(read(campaign()), frozenset({FaultKind.STOP}))
    assert {each.fault.kind for each in plan(found)} == {FaultKind.KILL}
    with pytest.raises(UsageError, match="no kind of fault is left"):
        without(found, frozenset({FaultKind.KILL}))


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([], "a campaign must be `key: value` lines"),
        ({}, "kinds: must be a list of faults"),
        (campaign(often=3), "a campaign has no key 'often'; there are every, faults"),
        (campaign(faults=0), "faults: must be a whole number from 1 on, not 0"),
        (campaign(faults=1.5), "not 1.5"),
        (campaign(faults=True), "not True"),
        (campaign(every=-1), "every: must be a number from 0 on, not -1"),
        (campaign(every=[3, 1]), "every: must be a number from 3 on, not 1"),
        (campaign(every=1, times=[1]), "every and times exclude each other"),
        (campaign(times=[1, 2]), "faults: 10 are wanted, but times has 2"),
        (campaign(times=[2, 1], faults=2), "times: must be a number from 2 on, not 1"),
        (campaign(steps=7), "steps: must be a list of numbers, not 7"),
        (campaign(kinds=[{"weight": 1}]), r"kinds\[0\]: fault: must be a kind of fault"),
        (campaign(kinds=[{"fault": "shoot"}]), r"kinds\[0\]: no such kind of fault: 'shoot'"),
        (campaign(kinds=[{"fault": "kill", "weight": 0}]), "no weight is above 0"),
        (campaign(kinds=[{"fault": "kill", "phase": "noon"}]), "phase: 'noon' is none of load"),
        (campaign(kinds=[{"fault": "kill", "expect": "joy"}]), "expect: 'joy' is none of"),
        (campaign(kinds=[{"fault": "agent"}], steps=[1]), "agent is not done at a step"),
        (campaign(kinds=["kill"]), r"kinds\[0\]: a kind must be `key: value` lines, not 'kill'"),
    ],
)
def test_what_is_no_campaign_is_refused(document: object, said: str) -> None:
    """By one line that names the key."""
    with pytest.raises(UsageError, match=said):
        read(document)
