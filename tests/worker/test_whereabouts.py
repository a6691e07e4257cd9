"""Where a main thread is, and since when it has not moved, from looks at it from the side."""

import sys
import time
from collections.abc import Callable
from types import FrameType

import pytest
import torch
import torch.distributed as dist

from frun.protocol.hangs import Place
from frun.worker.gate import Gate
from frun.worker.whereabouts import Look, Whereabouts, waited_for_cpu_s

SITE = "/x/site-packages"


class Model:
    """A model, as far as it matters here."""

    training = True


class Thread:
    """A main thread that is wherever a test puts it, and the looks at it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.collectives = 0
        self.now = 100.0
        self.used = 1.0
        self.starved_s = 7.0
        self.frame: FrameType | None = None
        self.gate = Gate()
        self.at = Whereabouts(self.gate, 1, lambda: self.collectives)
        monkeypatch.setattr(sys, "_current_frames", lambda: {1: self.frame})

    def looks(self, seconds: float, *, busy: float = 0.0) -> Look:
        """Let time pass, half a second from look to look; return the last one."""
        for _ in range(round(seconds * 2)):
            self.now += 0.5
            self.used += busy * 0.5
            look = self.at.look(1, self.now, self.used, self.starved_s)
        return look


@pytest.fixture
def thread(monkeypatch: pytest.MonkeyPatch) -> Thread:
    """A main thread in its script."""
    made = Thread(monkeypatch)
    made.frame = _frame("/home/u/train.py")
    made.looks(0.5)
    return made


def _frame(*paths: str) -> FrameType:
    """Return the innermost of frames in these files, the outermost first."""
    found: list[FrameType] = []

    def keep() -> None:
        frame = sys._getframe(1)
        found.append(frame)

    call: Callable[[], None] = keep
    for path in reversed(paths):
        code = compile("def run(): call()", path, "exec")
        scope = {"call": call}
        exec(code, scope)
        call = scope["run"]
    call()
    return found[0]


@pytest.mark.parametrize(
    ("paths", "place"),
    [
        (("/home/u/train.py",), Place.SCRIPT),
        (("/home/u/train.py", f"{SITE}/numpy/core.py"), Place.SCRIPT),
        (("/home/u/train.py", dist.distributed_c10d.__file__), Place.COLLECTIVE),
        (("/home/u/train.py", torch.autograd.graph.__file__), Place.COLLECTIVE),
        (("/x/frun/worker/resumable.py", "/x/frun/worker/groupstore.py"), Place.COLLECTIVE),
        (("/home/u/train.py", torch.serialization.__file__, "/x/zip.py"), Place.PHASE),
        (("/home/u/train.py", "<frozen importlib._bootstrap>", "/x/big.py"), Place.PHASE),
        (("/home/u/train.py", f"{SITE}/torch/_inductor/x.py", "/x/y.py"), Place.PHASE),
        (("/home/u/train.py", f"{SITE}/torch/utils/data/x.py", "/x/q.py"), Place.LOADER),
        (("<frozen importlib._bootstrap>", "/x/frun/worker/resumable.py", "/u/t.py"), Place.SCRIPT),
    ],
)
def test_places(thread: Thread, paths: tuple[str, ...], place: Place) -> None:
    """The files on the stack tell where a thread is; below the resumable function they don't matter."""
    thread.frame = _frame(*paths)
    look = thread.looks(3)
    assert look.place is place
    assert look.still_s >= 2.5
    assert thread.gate.excused is (place is Place.PHASE)


def test_the_line_is_the_scripts_own() -> None:
    """Not that of torch, which it called."""
    at = Whereabouts(Gate(), 0, lambda: 0)
    assert at.look(1, 1.0, 1.0).where == ""


def test_an_update_a_phase_and_a_pause(thread: Thread) -> None:
    """What the gate and the session say counts more than the stack, and each change is a move."""
    thread.gate.enter()
    assert thread.looks(2).place is Place.UPDATE
    thread.gate.leave(complete=True)
    assert thread.looks(0.5).still_s == 0.0
    thread.at.phase = "eval"
    assert thread.looks(1).place is Place.PHASE
    thread.at.phase = ""
    thread.gate.close()
    assert thread.looks(1).place is Place.PAUSED


def test_a_model_that_is_evaluated(thread: Thread) -> None:
    """In another mode than in its last update: a frozen model that is trained in evaluation mode is not."""
    model = Model()
    thread.at.models = [model]
    model.training = False
    thread.at.completed()
    assert thread.looks(1).place is Place.SCRIPT
    model.training = True
    assert thread.looks(1).place is Place.PHASE


@pytest.mark.parametrize("how", ["declared", "evaluated", "saved"])
def test_what_took_long_rightly_is_not_held_against_what_follows(thread: Thread, how: str) -> None:
    """The first look after it finds a thread that has moved, and counts from there."""
    model = Model()
    thread.at.models = [model]
    thread.at.completed()
    script = thread.frame
    if how == "declared":
        thread.at.phase = "eval"
    elif how == "evaluated":
        model.training = False
    else:
        thread.frame = _frame("/home/u/train.py", torch.serialization.__file__)
    look = thread.looks(60)
    assert (look.place, look.still_s) == (Place.PHASE, 59.5)
    thread.at.phase, model.training, thread.frame = "", True, script
    look = thread.looks(0.5)
    assert (look.place, look.still_s) == (Place.SCRIPT, 0.0)
    assert thread.looks(3).still_s == 3.0


def test_a_backward_pass_computes_or_waits(thread: Thread) -> None:
    """One that computes stands still in the script's code, if it takes too long; it waits for nobody."""
    thread.frame = _frame("/home/u/train.py", torch.autograd.graph.__file__)
    assert thread.looks(3, busy=1.0).place is Place.SCRIPT


def test_many_collectives_are_moves(thread: Thread) -> None:
    """By their number, or by the work that they make."""
    thread.frame = _frame("/home/u/train.py", dist.distributed_c10d.__file__)
    for _ in range(4):
        thread.collectives += 1
        assert thread.looks(0.5).still_s == 0.0
    assert thread.looks(3, busy=1.0).still_s == 0.0


def test_a_late_look_is_no_standing_still(thread: Thread) -> None:
    """Something held Python's lock, as a garbage collection does: that is what silence is judged by."""
    thread.looks(1)
    thread.now += 10
    assert thread.looks(0.5).still_s == 2.0


def test_waiting_for_a_cpu_is_no_standing_still(thread: Thread) -> None:
    """A script that computes takes as much longer as others take of the CPU."""
    thread.looks(1)
    for _ in range(10):
        thread.starved_s += 0.4
        look = thread.looks(0.5)
    assert look.still_s == pytest.approx(2.0)
    assert 0.0 <= waited_for_cpu_s() < time.monotonic()


def test_garbage_collections_are_not_the_scripts_time(thread: Thread) -> None:
    """However many there are in a row."""
    thread.looks(5)
    thread.at.collected_s += 3.0
    assert thread.looks(0.5).still_s == 2.5
    thread.at.collects("start", {"generation": 1, "collected": 0})
    before = thread.at.collected_s
    for phase in ("start", "stop"):
        thread.at.collects(phase, {"generation": 2, "collected": 0})
    assert thread.at.collected_s > before
