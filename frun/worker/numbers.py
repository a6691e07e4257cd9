"""Looks at the figures that a script reports in each step, and says once when one is not as it should be.

Owns the recent figures. What is odd is `protocol.numbers`' to say.
"""

import logging
from collections import deque
from collections.abc import Mapping
from typing import SupportsFloat

from frun.errors import OddNumber
from frun.protocol import numbers
from frun.protocol.channel import Odd
from frun.worker.runtime import Runtime

logger = logging.getLogger(__name__)


class Numbers:
    """The figures of one worker, by name."""

    def __init__(self, runtime: Runtime | None) -> None:
        """`runtime` tells the agent what is odd; None where frun did not start this process."""
        self._runtime = runtime
        self._recent: dict[str, deque[float]] = {}
        self._odd: set[str] = set()
        self._unwell: dict[str, int] = {}
        """Figures that were odd, and how often each has to be right until that is over."""

    def take(self, values: Mapping[str, SupportsFloat], step: int, *, stop: bool) -> None:
        """Look at the figures of a step. With `stop` raises OddNumber if one is odd."""
        for name, given in values.items():
            value = float(given)
            recent = self._recent.setdefault(name, deque(maxlen=numbers.RECENT))
            wrong = numbers.judge(value, recent)
            if not wrong:
                recent.append(value)
                self._odd.discard(name)
                if self._unwell:
                    self._recover(name)
                continue
            reason = f"{name} of step {step} is {wrong}"
            self._unwell[name] = numbers.RECENT
            if name not in self._odd:
                self._odd.add(name)
                logger.warning("frun: %s", reason)
                self._tell(reason)
            if stop:
                raise OddNumber(reason)

    def _recover(self, name: str) -> None:
        """Count a figure that is right; say so once all that were odd have been right for long."""
        left = self._unwell.pop(name, 0) - 1
        if left > 0:
            self._unwell[name] = left
        elif not self._unwell:
            self._tell("")

    def _tell(self, reason: str) -> None:
        if self._runtime is not None:
            self._runtime.tell(Odd(generation=self._runtime.generation, reason=reason))
