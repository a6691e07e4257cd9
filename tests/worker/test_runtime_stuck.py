"""A main thread that stays in a collective is told from one that computes."""

import sys
from types import FrameType

import pytest
import torch
import torch.distributed as dist

from frun.worker.runtime import Stillness
from frun.worker.whereabouts import in_backward, in_collective


def _frame_in(path: str) -> FrameType:
    found: list[FrameType] = []
    code = compile("keep(sys._getframe())", path, "exec")
    exec(code, {"sys": sys, "keep": found.append})
    return found[0]


@pytest.mark.parametrize(
    ("path", "stuck"),
    [
        (dist.distributed_c10d.__file__, True),
        ("/x/site-packages/torch/distributed/_functional_collectives.py", True),
        ("/x/site-packages/torch/distributed/checkpoint/filesystem.py", False),
        ("/x/site-packages/torch/autograd/graph.py", False),
        ("/home/u/train.py", False),
    ],
)
def test_only_communication_counts(path: str, stuck: bool) -> None:
    """Saving a checkpoint and the user's own code may take their time."""
    assert in_collective(_frame_in(path)) is stuck


def test_no_thread_is_not_stuck() -> None:
    """A main thread that has ended waits for nothing."""
    assert not in_collective(None)


def _looks(path: str, share: float, count: int = 20) -> float:
    """Return what comes out of looks at a thread, four a second, in a process that is busy to this share."""
    stillness, frame = Stillness(), _frame_in(path)
    return [stillness.seconds(frame, n * 0.25, n * 0.25 * share) for n in range(count)][-1]


@pytest.mark.parametrize(
    ("path", "share", "seconds"),
    [
        (dist.distributed_c10d.__file__, 0.0, 4.75),
        (dist.distributed_c10d.__file__, 1.0, 4.75),  # another thread of the script computes
        (torch.autograd.graph.__file__, 0.02, 4.75),
        (torch.autograd.graph.__file__, 1.0, 0.0),
        ("/home/u/train.py", 0.0, 0.0),
    ],
)
def test_a_backward_pass_that_does_nothing_waits_for_others(
    path: str, share: float, seconds: float
) -> None:
    """One that computes is left alone, however long it takes."""
    assert _looks(path, share) == pytest.approx(seconds, abs=0.26)


def test_a_new_wait_begins_anew() -> None:
    """Time outside of a wait is not counted, nor is the wait before it."""
    stillness, waits = Stillness(), _frame_in(dist.distributed_c10d.__file__)
    assert stillness.seconds(waits, 0.0, 0.0) == 0.0
    assert stillness.seconds(waits, 2.0, 0.0) == 2.0
    assert stillness.seconds(_frame_in("/home/u/train.py"), 2.5, 0.0) == 0.0
    assert stillness.seconds(waits, 3.0, 0.0) == 0.0
    assert stillness.seconds(waits, 4.0, 0.0) == 1.0


def test_a_thread_that_nothing_can_release_is_given_up_sooner() -> None:
    """Only where that lasts, and the process does nothing: gloo's own thread may still have work."""
    waits = _frame_in(dist.distributed_c10d.__file__)

    def given_up(over_from: float, share: float) -> float:
        stillness = Stillness()
        for look in range(40):
            now = look * 0.25
            if stillness.is_for_ever(waits, now, now * share, over=now >= over_from):
                return now
        return -1.0

    assert given_up(0.0, 0.0) == 0.75
    assert given_up(1.0, 0.0) == 1.5
    assert given_up(0.0, 1.0) == given_up(99.0, 0.0) == 3.25


def test_the_frame_of_a_backward_pass() -> None:
    """torch runs every backward pass from a function of that file."""
    seen: list[FrameType | None] = []
    value = torch.ones(1, requires_grad=True)
    doubled = 2 * value
    doubled.register_hook(lambda _: seen.append(sys._getframe().f_back))  # type: ignore[no-untyped-call]
    torch.autograd.backward(doubled)
    assert in_backward(seen[0])
