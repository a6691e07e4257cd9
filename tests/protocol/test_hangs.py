"""Who hangs, from where all ranks stand."""

from dataclasses import replace

import pytest

from frun.protocol import hangs
from frun.protocol.hangs import Place, Position, Standing

AT = Position(
    generation=2, step=7, completed=3, fresh=False, recent_s=0.1, place="script",
    where="train.py:9 in train", still_s=2.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "barren", "bound"),
    [
        ({}, 0, 2.0),
        ({"recent_s": 1.5}, 0, 4.5),
        ({}, 1, 8.0),
        ({}, 9, 2048.0),  # bounded: it is never for ever
        ({"place": "phase"}, 0, None),
        ({"place": "paused"}, 0, None),
        ({"fresh": True}, 0, hangs.FIRST_S),
        ({"fresh": True, "completed": 0}, 0, hangs.FIRST_S),
        ({"fresh": True, "completed": 0, "generation": 1}, 0, None),  # it may download its data
    ],
)
def test_how_long_a_worker_may_stand(
    changes: dict[str, object], barren: int, bound: float | None
) -> None:
    """Three of its latest steps, and the limit at least; more with every try that was in vain."""
    at = replace(AT, **changes)  # type: ignore[arg-type]
    assert hangs.bound_s(at, 2.0, barren) == bound
    assert hangs.bound_s(at, 0.0, barren) is None
    if bound is not None:
        assert hangs.standing(replace(at, still_s=bound - 0.01), 2.0, barren) is None
        stands = hangs.standing(replace(at, still_s=bound), 2.0, barren)
        assert stands == Standing(place=Place.SCRIPT, step=7, where="train.py:9 in train")


def judged(places: str) -> tuple[int, ...] | None:
    """Return who hangs; a letter for each rank, `.` moves."""
    kinds = {place.value[0]: place for place in Place}
    found = hangs.judge(
        {
            rank: None if letter == "." else Standing(place=kinds[letter], step=7)
            for rank, letter in enumerate(places)
        }
    )
    return None if found is None else found.ranks


@pytest.mark.parametrize(
    ("places", "guilty"),
    [
        ("cccs", (3,)),
        ("lccc", (0,)),
        ("cu", (1,)),
        ("sccls", None),  # more than wait for them: it looks like work
        ("sccl", (0, 3)),
        ("ccc.", None),
        ("ccc", ()),
        ("c", None),
        ("s", None),
        ("sss", None),
        ("", None),
    ],
)
def test_who_hangs(places: str, guilty: tuple[int, ...] | None) -> None:
    """Who does not wait while all others do; nobody if all wait; nothing is said while one moves."""
    assert judged(places) == guilty


def test_the_reason_names_rank_place_and_line() -> None:
    """It is read by an operator."""
    waits = Standing(place=Place.COLLECTIVE, step=7)
    stuck = Standing(place=Place.LOADER, step=7, where="data.py:3 in read")
    found = hangs.judge({0: waits, 1: stuck})
    assert found is not None
    assert found.reason == (
        "rank 1 stands still in the loader of step 7, at data.py:3 in read, and the others wait"
    )
