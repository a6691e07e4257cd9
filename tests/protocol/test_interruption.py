"""Crash-safety: after any write of the leader a new one, with nothing but the store, reaches the same end."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from frun.protocol.policy import Policy
from frun.protocol.records import Phase
from tests.protocol.build import ELASTIC, POLICY, failure, victim
from tests.protocol.job import Job

Step = Callable[[Job], object]


def join(*names: str) -> Step:
    """Let hosts come."""

    def step(job: Job) -> None:
        for name in names:
            job.join(name, nproc=2)

    return step


def vanish(*names: str) -> Step:
    """Let hosts die."""

    def step(job: Job) -> None:
        for name in names:
            job.vanish(name)

    return step


def kill(name: str) -> Step:
    """Let a worker die, and one of each other host break as its peer."""

    def step(job: Job) -> None:
        assert job.fail(name, failure(name, exit_code=-9))
        for other in sorted(set(job.hosts) - {name}):
            job.fail(other, victim(other))

    return step


def raise_in(name: str) -> Step:
    """Let the user's code fail in one worker."""
    cause = failure(name, exit_code=1, message="ValueError: nan", recorded=True)
    return lambda job: job.fail(name, cause)


def wait(seconds: float) -> Step:
    """Let time pass."""

    def step(job: Job) -> None:
        job.now += seconds

    return step


def freeze(name: str) -> Step:
    """Let a host lose its lease."""
    return lambda job: job.freeze(name)


def thaw(name: str) -> Step:
    """Let a frozen host go on."""
    return lambda job: job.thaw(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What happens to a job, one step after another, each when all have come to rest."""

    policy: Policy
    steps: tuple[Step, ...]
    resumable: bool = False


STORIES = {
    "plain": Story(policy=POLICY, steps=(join("a", "b", "c"),)),
    "too-few": Story(policy=POLICY, steps=(join("a", "b"),)),
    "last-call": Story(policy=ELASTIC, steps=(join("a"), wait(10), join("b"), wait(25))),
    "restart": Story(
        policy=replace(POLICY, max_restarts=2), steps=(join("a", "b", "c"), kill("b"), kill("a"))
    ),
    "spent": Story(
        policy=replace(POLICY, max_restarts=1), steps=(join("a", "b", "c"), kill("b"), kill("c"))
    ),
    "spare": Story(policy=POLICY, steps=(join("a", "b", "c", "s"), vanish("b"))),
    "two-lost-one-spare": Story(
        policy=POLICY, steps=(join("a", "b", "c", "s"), vanish("a", "b"), join("t"))
    ),
    "replace-timeout": Story(policy=POLICY, steps=(join("a", "b", "c"), vanish("b"))),
    "shrink": Story(policy=ELASTIC, steps=(join("a", "b", "c", "d"), vanish("b"))),
    "grow": Story(policy=ELASTIC, steps=(join("a", "b", "c"), wait(31), join("d"), wait(2))),
    "dropped": Story(policy=ELASTIC, steps=(join("a", "b", "c", "d"), kill("b"))),
    "frozen": Story(policy=POLICY, steps=(join("a", "b", "c"), freeze("b"), thaw("b"))),
    "frozen-and-replaced": Story(
        policy=POLICY, steps=(join("a", "b", "c", "s"), freeze("b"), thaw("b"))
    ),
    "resumable": Story(policy=POLICY, resumable=True, steps=(join("a", "b", "c"), kill("b"))),
    "resumable-user": Story(
        policy=replace(POLICY, max_restarts=1),
        resumable=True,
        steps=(join("a", "b", "c"), raise_in("b"), raise_in("b")),
    ),
    "resumable-host": Story(
        policy=POLICY, resumable=True, steps=(join("a", "b", "c"), vanish("b"), join("t"))
    ),
    "resumable-shrink": Story(
        policy=ELASTIC,
        resumable=True,
        steps=(join("a", "b", "c", "d"), vanish("b"), wait(6), kill("c")),
    ),
    "resumable-death-while-paused": Story(
        policy=ELASTIC, resumable=True, steps=(join("a", "b", "c", "d"), vanish("b"), kill("c"))
    ),
}


def _tell(story: Story, crash_after: int | None) -> Job:
    """Tell the story; after that write the leader dies, and its successor knows only the store."""
    job = Job(story.policy, resumable=story.resumable)

    def after_write() -> None:
        if crash_after is None or len(job.writes) == crash_after:
            job.change_leader()
            # Less than a lease, so that a successor that forgot law 7 would show.
            job.now += 1.0

    if crash_after != 0:
        job.after_write = after_write
    for step in story.steps:
        job.settle()
        step(job)
    job.settle()
    job.finish()
    job.settle()
    return job


def _end(job: Job) -> tuple[object, ...]:
    table = job.table
    assert table is not None
    assert not job.hosts
    return (
        table.phase,
        table.exit_code,
        table.generation,
        table.restarts,
        table.recoveries,
        [(slot.host, slot.first_rank, slot.nproc) for slot in table.slots],
        table.dropped,
        table.failure,
        job.exits,
    )


@pytest.mark.parametrize("name", STORIES)
def test_a_leader_that_dies_after_any_write_changes_nothing(name: str) -> None:
    """Generations, ranks, restarts, the cause and every exit status are those of the quiet job."""
    story = STORIES[name]
    quiet = _tell(story, 0)
    for crash_after in range(1, len(quiet.writes) + 1):
        assert _end(_tell(story, crash_after)) == _end(quiet), f"after write {crash_after}"
    assert _end(_tell(story, None)) == _end(quiet), "after every write"


def test_the_stories_end_as_told() -> None:
    """The quiet jobs themselves end as their names say."""
    ends = {}
    for name, story in STORIES.items():
        table = _tell(story, 0).table
        assert table is not None
        ends[name] = (table.phase, table.generation, table.restarts, len(table.slots))
    assert ends == {
        "plain": (Phase.DONE, 1, 0, 3),
        "too-few": (Phase.FAILED, 1, 0, 0),
        "last-call": (Phase.DONE, 1, 0, 2),
        "restart": (Phase.DONE, 3, 2, 3),
        "spent": (Phase.FAILED, 2, 1, 3),
        "spare": (Phase.DONE, 2, 0, 3),
        "two-lost-one-spare": (Phase.DONE, 2, 0, 3),
        "replace-timeout": (Phase.FAILED, 2, 0, 3),
        "shrink": (Phase.DONE, 2, 0, 3),
        "grow": (Phase.DONE, 2, 0, 4),
        "dropped": (Phase.DONE, 2, 0, 3),
        "frozen": (Phase.DONE, 2, 0, 3),
        "frozen-and-replaced": (Phase.DONE, 2, 0, 3),
        "resumable": (Phase.DONE, 2, 0, 3),
        "resumable-user": (Phase.FAILED, 2, 1, 3),
        "resumable-host": (Phase.DONE, 2, 0, 3),
        "resumable-shrink": (Phase.DONE, 3, 0, 3),
        "resumable-death-while-paused": (Phase.DONE, 2, 0, 3),
    }
