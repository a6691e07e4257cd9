"""How long the main thread waits for a processor in each step, from the kernel's count at some of them."""

from collections import deque

_STEPS = 20
"""As many as make the median of a rank's own time."""


class Delays:
    """The count at some of the latest steps. For the side thread."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque()

    def look(self, completed: int, waited_s: float) -> float:
        """Take the count after so many completed steps; return the seconds for each of the latest ones."""
        seen = self._seen
        if seen and completed < seen[-1][0]:
            seen.clear()
        if not seen or completed > seen[-1][0]:
            seen.append((completed, waited_s))
        while len(seen) > 2 and seen[1][0] <= completed - _STEPS:
            seen.popleft()
        steps = completed - seen[0][0]
        return (waited_s - seen[0][1]) / steps if steps else 0.0
