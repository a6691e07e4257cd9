"""A job goes on with survivors only while one of them has the state; else all workers begin anew."""

from dataclasses import replace

from frun.protocol import survival
from frun.protocol.records import HostReport, Phase, RankTable
from tests.protocol.build import report, table

GENERATION = 5


def world(barren: int) -> RankTable:
    """Return the running fifth generation, after this many without a step."""
    return replace(table(Phase.RUN, "a b", generation=GENERATION), barren=barren)


def told(incarnation: int, *, has_state: bool = False, progress: bool = False) -> HostReport:
    """Return host a's report of one process that began in a generation."""
    plain = report("a", "r", generation=GENERATION)
    worker = replace(plain.workers[0], incarnation=incarnation, has_state=has_state)
    return replace(plain, workers=(worker,), progress=progress)


def gone(barren: int, one: HostReport) -> bool:
    """Tell whether the state is gone if only host a's process goes on."""
    kept = {("a", 0): one.workers[0].incarnation}
    return survival.state_is_gone(world(barren), [one], kept)


def test_a_process_of_a_generation_with_steps_has_the_state() -> None:
    """It lived when the last step was completed."""
    assert not gone(0, told(4))
    assert not gone(1, told(3))


def test_a_process_that_came_after_the_last_step_has_none() -> None:
    """Nobody gave it the state, and all others are dead."""
    assert gone(0, told(5))
    assert gone(1, told(4))


def test_a_newcomer_that_has_copied_the_state_has_it() -> None:
    """It may be the only one left before its first step."""
    assert not gone(0, told(5, has_state=True))
    assert not gone(0, told(5, progress=True))


def test_before_the_first_step_there_is_nothing_to_lose() -> None:
    """Newcomers simply begin, in whatever generation."""
    assert not gone(4, told(5))
