"""Where the main thread is, for the beats: looked up from the side, at no cost for the main thread.

Owns the reading of its stack and since when it has not moved. Whether that is a hang is decided elsewhere,
from the positions of all ranks.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Protocol, runtime_checkable

from frun.protocol.hangs import Place
from frun.worker.gate import Gate

_COLLECTIVES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
)
_STORE = "frun/worker/groupstore.py"
_LONG = (
    "torch/serialization.py",
    "torch/distributed/checkpoint/",
    "safetensors/",
    "torch/_inductor/",
    "torch/_dynamo/convert_frame.py",
    "torch/utils/cpp_extension.py",
    "triton/compiler/",
    "<frozen importlib._bootstrap>",
    "/pdb.py",
    "/bdb.py",
)
"""Files whose functions take as long as they take: checkpoints, compilation, imports, a debugger."""
_LOADERS = ("torch/utils/data/",)
_NOT_THE_SCRIPT = (
    "/torch/",
    "/frun/worker/",
    "/threading.py",
    "/multiprocessing/",
    "/selectors.py",
)
_END = "frun/worker/resumable.py"
"""What is below that in the stack does not matter."""
_LATE_S = 1.0
"""Two beats."""
_BUSY_S, _BUSY = 0.1, 0.2
"""A process that uses less CPU time than this, and this share of the time that passes, does nothing."""


@runtime_checkable
class Trained(Protocol):
    """A model, as far as it matters here."""

    training: bool


@dataclass(slots=True, kw_only=True)
class Look:
    """What was seen of the main thread."""

    place: Place
    where: str
    still_s: float


@dataclass(slots=True)
class Whereabouts:
    """The main thread's way. What is public is kept up by the main thread, `look` is for the side thread."""

    gate: Gate
    main: int = field(default_factory=threading.get_ident)
    """Ident of the main thread."""
    sequence: Callable[[], int] = lambda: 0
    """Returns the number of collectives so far."""
    phase: str = ""
    """What the script has declared to do; empty: it trains."""
    handed: int = 0
    """Batches so far."""
    models: list[Trained] = field(default_factory=list)
    """A model that is not in the mode of its last update is being evaluated."""
    modes: list[bool] = field(default_factory=list)
    _moves: tuple[object, ...] = ()
    _took_long: bool = False
    """At the last look it was where it may take long."""
    _since: float = 0.0
    _used: float = 0.0
    _looked: float = 0.0
    collected_s: float = 0.0
    """Time that full garbage collections took."""
    _counted_s: float = 0.0
    _collecting_at: float = 0.0
    _starved_s: float = 0.0

    @contextlib.contextmanager
    def declared(self, name: str, ended: Callable[[str, float], None]) -> Iterator[None]:
        """Be in a phase that the script declares; tell `ended` of an outer one, with its seconds."""
        before, self.phase = self.phase, name
        self.gate.excused = True
        began = time.monotonic()
        try:
            yield
        finally:
            self.phase = before
            if not before:
                ended(name, time.monotonic() - began)

    def watch(self, objects: Iterable[object]) -> None:
        """Know the models among these objects."""
        self.models = [each for each in objects if isinstance(each, Trained)]
        self.completed()

    def completed(self) -> None:
        """Note in which mode the models are trained."""
        self.modes = [model.training for model in self.models]

    def collects(self, phase: str, info: Mapping[str, int]) -> None:
        """Hear of the beginning and the end of garbage collections, from `gc.callbacks`."""
        if info["generation"] < 2:
            return
        now = time.monotonic()
        if phase == "start":
            self._collecting_at = now
        else:
            self.collected_s += now - self._collecting_at

    def look(self, generation: int, now: float, used: float, starved_s: float = 0.0) -> Look:
        """Look where the main thread is; `used` is the CPU time of the process.

        `starved_s` is for how long the main thread has waited for a CPU so far.
        """
        gate = self.gate
        frames = list(_stack(sys._current_frames().get(self.main)))
        innermost = frames[0] if frames else None
        kind = in_collective(innermost), in_backward(innermost)
        moves = (
            (generation, gate.step, gate.completed, gate.busy, gate.partial, gate.closed),
            (self.handed, self.phase, self.sequence(), kind),
        )
        self._since += self._lost(now, starved_s)
        if moves != self._moves:
            self._moves, self._since, self._used = moves, now, used
        idle = used - self._used < _BUSY_S + _BUSY * (now - self._since)
        place = self._place(frames, idle=idle)
        before, self._took_long = self._took_long, place is Place.PHASE
        # Many short collectives, or a thread of the script that computes, is no standing still. And how long
        # an evaluation or a checkpoint took is not held against the line of the script that comes after it.
        if (place is Place.COLLECTIVE and not idle) or self._took_long is not before:
            self._since, self._used = now, used
        gate.excused = gate.excused or place is Place.PHASE
        return Look(place=place, where=_where(frames), still_s=now - self._since)

    def _lost(self, now: float, starved_s: float) -> float:
        """Return the seconds since the last look that were not the script's.

        Those of garbage collections, and those in which others had all CPUs; and a look that comes late had
        no lock of Python's, or the process was frozen.
        """
        starved_s, self._starved_s = starved_s - self._starved_s, starved_s
        collected_s = self.collected_s - self._counted_s
        late_s = now - self._looked - _LATE_S if self._looked else 0.0
        self._counted_s, self._looked = self.collected_s, now
        return max(collected_s, late_s, starved_s, 0.0)

    def _place(self, frames: list[FrameType], *, idle: bool) -> Place:
        files = [frame.f_code.co_filename for frame in frames]
        if self.gate.closed:
            return Place.PAUSED
        evaluates = [model.training for model in self.models] != self.modes
        if self.phase or evaluates or any(each in file for file in files for each in _LONG):
            return Place.PHASE
        if frames and _waits(frames[0], idle=idle):
            return Place.COLLECTIVE
        if self.gate.busy:
            return Place.UPDATE
        if any(each in file for file in files for each in _LOADERS):
            return Place.LOADER
        return Place.SCRIPT


def waited_for_cpu_s() -> float:
    """Return for how long the main thread has waited for a CPU so far; 0 where the kernel does not say.

    Source: Documentation/scheduler/sched-stats of Linux, `/proc/<pid>/schedstat`.
    """
    try:
        with open("/proc/self/schedstat", "rb", buffering=0) as file:
            return int(file.read(100).split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _waits(frame: FrameType, *, idle: bool) -> bool:
    """Tell whether a thread waits for other ranks; in a backward pass it may compute as well."""
    in_store = frame.f_code.co_filename.endswith(_STORE)
    return in_store or in_collective(frame) or (idle and in_backward(frame))


def in_collective(frame: FrameType | None) -> bool:
    """Tell whether a thread's innermost Python frame is one of torch's communication functions."""
    return frame is not None and frame.f_code.co_filename.endswith(_COLLECTIVES)


def in_backward(frame: FrameType | None) -> bool:
    """Tell whether a thread's innermost Python frame is that which runs a backward pass."""
    return frame is not None and frame.f_code.co_filename.endswith("torch/autograd/graph.py")


def _stack(frame: FrameType | None) -> Iterable[FrameType]:
    """Yield the frames from the innermost one out, down to that which entered the script's function."""
    while frame is not None and not frame.f_code.co_filename.endswith(_END):
        yield frame
        frame = frame.f_back


def _where(frames: list[FrameType]) -> str:
    """Return the innermost line that is the script's own."""
    for frame in frames:
        file = frame.f_code.co_filename
        if not file.startswith("<") and not any(each in file for each in _NOT_THE_SCRIPT):
            return f"{os.path.basename(file)}:{frame.f_lineno} in {frame.f_code.co_name}"
    return ""
