"""Tells the agent how far a worker is: its first step of a generation, then now and then.

Owns when that is due; completed steps are counted by the gate.
"""

import time

from frun.protocol.channel import FirstStep, Progress, Restored
from frun.worker.runtime import Runtime

PROGRESS_S = 5.0
"""Seconds between two words to the agent about the step."""


class Teller:
    """One worker's word about its steps."""

    def __init__(self, runtime: Runtime) -> None:
        """`runtime` is the way to the agent."""
        self._runtime = runtime
        self._restored_at = 0.0
        self._first_of = 0
        self._told_at = 0.0
        self._caught_up_at = 0
        """Number of steps at which all that was lost has been done again."""

    def restored(self, fact: Restored) -> None:
        """The state is there."""
        self._restored_at = time.monotonic()
        self._caught_up_at = fact.step + fact.steps_lost
        self._runtime.tell(fact)

    def completed(self, step: int) -> None:
        """So many steps are complete."""
        runtime, now = self._runtime, time.monotonic()
        generation = runtime.generation
        if self._first_of != generation:
            self._first_of, self._told_at = generation, now
            took = now - self._restored_at
            runtime.tell(FirstStep(generation=generation, step=step, took_s=took))
        elif now - self._told_at >= PROGRESS_S or step == self._caught_up_at:
            self._told_at = now
            runtime.tell(Progress(generation=generation, step=step))
