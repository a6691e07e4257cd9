"""Who is slower than its peers, and when a change is one."""

import pytest

from frun.protocol.stragglers import SETTLED_S, Settling, Work, compare, scores, settle


def works(*own_ms: float, team: str = "") -> dict[int, Work]:
    """Return what ranks take, in milliseconds."""
    return {rank: Work(own_s=ms / 1000, team=team) for rank, ms in enumerate(own_ms)}


@pytest.mark.parametrize(
    ("own_ms", "expected"),
    [
        ((10, 10, 10, 25), [1.0, 1.0, 1.0, 2.5]),
        ((10, 20), [1.0, 2.0]),
        ((10, 20, 10), [1.0, 2.0, 1.0]),
        ((10, 10, 30, 30), [1.0, 1.0, 3.0, 3.0]),  # where half is slow it is they who are
        ((30, 30, 30, 10), [1.0, 1.0, 1.0, 0.33]),
    ],
)
def test_a_score_is_by_the_median(own_ms: tuple[float, ...], expected: list[float]) -> None:
    """Of an even number by the lower of the two in the middle."""
    found = scores(works(*own_ms))
    assert [found[rank] for rank in sorted(found)] == pytest.approx(expected, abs=0.01)


def test_only_those_of_the_same_work_are_compared() -> None:
    """The stages of a pipeline take what they take; who is alone, or not known, has no score."""
    ranks = {**works(10, 10), 2: Work(own_s=0.05, team="late"), 3: Work(own_s=0.1, team="late")}
    assert scores(ranks) == pytest.approx({0: 1.0, 1: 1.0, 2: 1.0, 3: 2.0})
    assert scores({**works(10, 0), 2: Work(own_s=0.1, team="x")}) == {}


def test_a_straggler_is_one_until_it_is_right() -> None:
    """By half and by some milliseconds; who was told of remains one a little longer."""
    assert compare(works(10, 10, 62), ()) == {
        2: "rank 2 takes 62 ms for its own part of a step, 6.2 times the median of 10 ms"
    }
    assert compare(works(100, 100, 140), ()) == {}
    assert list(compare(works(100, 100, 140), (2,))) == [2]
    assert compare(works(100, 100, 125), (2,)) == {}
    assert compare(works(2, 2, 6), ()) == {}  # milliseconds are noise


def test_waiting_for_a_processor_is_not_a_ranks_own() -> None:
    """On a crowded machine some rank waits longer than others, by chance."""
    crowded = {**works(65, 69, 93), 3: Work(own_s=0.124, delay_s=0.05)}
    assert compare(crowded, ()) == {}
    assert list(compare({**works(13, 12, 11), 3: Work(own_s=0.06, delay_s=0.01)}, ())) == [3]


def told(*own_ms: float, known_ms: float = 0.0) -> Settling:
    """Return what an agent keeps after these beats, half a second apart."""
    settling = Settling(known_s=known_ms / 1000)
    for beat, ms in enumerate(own_ms):
        settling = settle(settling, ms / 1000, beat / 2)
    return settling


def test_a_change_must_last() -> None:
    """Each beat must differ, in the same direction; the one that differs least is reported."""
    beats = int(SETTLED_S * 2)
    assert not told(*[50.0] * beats, known_ms=10).is_due((beats - 1) / 2)
    lasting = told(*[50.0] * beats, 20.0, known_ms=10)
    assert lasting.is_due(beats / 2)
    assert lasting.reported() == Settling(known_s=0.02)
    for broken in ([*[50.0] * beats, 11.0], [*[50.0] * beats, 5.0]):
        assert not told(*broken, known_ms=10).is_due(beats / 2)
    assert told(*[12.0] * 100, known_ms=10) == Settling(known_s=0.01)
    assert told(0.0, 0.0) == Settling()
