"""Times one host's way into a generation, phase by phase, on this host's clock.

Owns stopwatches only; what is worth timing is told by the agent and its workers.
"""

from dataclasses import dataclass, field, replace

from frun.protocol.channel import FirstStep, Restored
from frun.protocol.records import Recovery


@dataclass(slots=True, kw_only=True)
class RecoveryTimer:
    """The stopwatches of the latest generation."""

    generation: int = 0
    _ended_at: float | None = None
    _table_at: float = 0.0
    _run_at: float = 0.0
    _times: Recovery = field(default_factory=Recovery)
    _waiting: set[int] = field(default_factory=set)
    """Local ranks whose first step is not complete."""
    _done: Recovery | None = None

    def ended(self, now: float) -> None:
        """A worker's end was seen; the first one since the last table is the fault."""
        if self._ended_at is None:
            self._ended_at = now

    def table(self, generation: int, now: float) -> None:
        """A table of a new generation was seen."""
        if generation == self.generation:
            return
        detect = 0.0 if self._ended_at is None else now - self._ended_at
        self.generation = generation
        self._ended_at = None
        self._table_at = now
        self._run_at = now
        self._times = Recovery(detect_s=detect)
        self._waiting = set()
        self._done = None

    def stopped(self, now: float) -> None:
        """Workers were stopped, or the last survivor is out of its old groups."""
        pause = max(self._times.pause_s, now - self._table_at)
        self._times = replace(self._times, pause_s=pause)

    def run(self, local_ranks: set[int], now: float) -> None:
        """The world is complete; the first steps of these local ranks are waited for."""
        self._run_at = now
        self._waiting = set(local_ranks)

    def started(self, now: float) -> None:
        """The last newcomer here was started."""
        self._times = replace(self._times, respawn_s=now - self._run_at)

    def whole(self, now: float) -> None:
        """All workers here are in this generation, and nobody tells of steps."""
        self._finish(now)

    def restored(self, fact: Restored) -> None:
        """A worker has its state."""
        if fact.generation != self.generation:
            return
        t = self._times
        self._times = replace(
            t,
            rebuild_s=max(t.rebuild_s, fact.rebuild_s),
            agree_s=max(t.agree_s, fact.agree_s),
            copy_s=max(t.copy_s, fact.copy_s),
            copied_bytes=t.copied_bytes + fact.copied_bytes,
            step=fact.step,
            steps_lost=max(t.steps_lost, fact.steps_lost),
        )

    def first_step(self, local_rank: int, fact: FirstStep, now: float) -> None:
        """A worker completed a step."""
        if fact.generation != self.generation:
            return
        self._times = replace(self._times, first_step_s=max(self._times.first_step_s, fact.took_s))
        self._waiting.discard(local_rank)
        if not self._waiting:
            self._finish(now)

    def over(self, local_rank: int, now: float) -> None:
        """A worker ended well without a further step."""
        if local_rank in self._waiting:
            self._waiting.discard(local_rank)
            if not self._waiting:
                self._finish(now)

    @property
    def result(self) -> tuple[int, Recovery] | None:
        """The generation and its times, once this host is in it."""
        return None if self._done is None else (self.generation, self._done)

    def _finish(self, now: float) -> None:
        if self._done is None:
            total = now - self._table_at + self._times.detect_s
            self._done = replace(self._times, total_s=total)
