"""The update gate: counts a worker's steps and decides which updates may still begin.

Owns the step tag and the lock around it. Which calls make up an update is `updates`', when a generation
ends is the runtime's.
"""

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from frun.worker.paused import Paused

if TYPE_CHECKING:
    from frun.worker.commit import Commit

_RECENT = 20
"""Steps whose time is remembered."""


class Gate:
    """Open while a generation runs. The main thread passes it; the side thread closes it.

    An update is made of one or more sections. While a section runs (`busy`) a pause waits for it. Between the
    sections of one update the state is of no step (`partial`).
    """

    def __init__(self, step: int = 0) -> None:
        """Begin open, after this many updates."""
        self.step = step
        """Completed updates."""
        self.completed = 0
        """Those of them that this process did itself."""
        self.fresh = True
        """None of them since the gate was opened, or the step set."""
        self.excused = False
        """The one that is under way holds something that takes long, and does not count."""
        self.gradients_at = 0.0
        """When the last gradient was made here: from then on this rank may wait for others."""
        self._took: deque[float] = deque(maxlen=_RECENT)
        self._own: deque[float] = deque(maxlen=_RECENT)
        self._began_at = 0.0
        """When the update that is under way really began; 0: not known."""
        self._last_at = 0.0
        """The same of the one before."""
        self._completed_at = 0.0
        self.closed = False
        self.busy = False
        self.partial = False
        self.commit: Commit | None = None
        """Where ranks hold different parts of the state: no update begins before all stand before it."""
        self._changed = threading.Condition()

    @property
    def whole(self) -> bool:
        """Whether the state is that of `step` completed updates."""
        return not (self.busy or self.partial)

    @property
    def recent_s(self) -> float:
        """The longest time but one of the latest steps, from one to the next; 0: not known yet.

        The longest alone tells nothing: all ranks are as slow as one that evaluated.
        """
        with self._changed:
            return sorted(self._took)[-2:][0] if self._took else 0.0

    @property
    def own_s(self) -> float:
        """The median time that this rank's own part of the latest steps took; 0: not known yet.

        From the beginning of an update to the last gradient of the next step. Then ranks wait for each
        other, so the whole step takes them all the same time.
        """
        with self._changed:
            return sorted(self._own)[_RECENT // 2] if len(self._own) == _RECENT else 0.0

    def check(self) -> None:
        """Raise Paused if the generation is over."""
        if self.closed:
            raise Paused

    def enter(self, *, finish: bool = False) -> None:
        """Begin a section. Raises Paused if the gate is closed, unless this is to finish an update."""
        with self._changed:
            if self.closed and not finish:
                raise Paused
            self.busy = True

    def begun(self) -> None:
        """Note that the section which was entered has waited for all that it waits for."""
        if not self.partial:
            self._began_at = time.monotonic()

    def back_out(self) -> None:
        """End a section in which nothing was done."""
        with self._changed:
            self.busy = False
            self._changed.notify_all()

    def leave(self, *, complete: bool) -> None:
        """End a section; `complete` if the update is now done."""
        with self._changed:
            self.busy = False
            self.partial = not complete
            if complete:
                self.step += 1
                self.completed += 1
                self._note_time()
            self._changed.notify_all()

    def _note_time(self) -> None:
        now = time.monotonic()
        if not self.fresh and not self.excused:
            self._took.append(now - self._completed_at)
            if 0.0 < self._last_at < self.gradients_at:
                self._own.append(self.gradients_at - self._last_at)
        self._last_at, self._began_at = self._began_at, 0.0
        self.fresh = self.excused = False
        self._completed_at = now

    def reset(self, step: int) -> None:
        """Set the step of a state that was put in order."""
        with self._changed:
            self.busy = self.partial = False
            self.step = step
            self.fresh = True
            self._changed.notify_all()

    def close(self) -> None:
        """Let no update begin any more."""
        with self._changed:
            self.closed = True

    def settle(self) -> None:
        """End a wait of the main thread for other ranks inside of a section, after `close`."""
        commit = self.commit
        if commit is not None:
            commit.settle()

    def open(self) -> None:
        """Let updates begin."""
        with self._changed:
            self.closed = False
            self.fresh = True
            self._own.clear()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait for the end of the section that runs, if one does; False if it takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.busy, timeout_s)
