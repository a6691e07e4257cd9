"""Whether a figure that a script reports, its loss for instance, is as it should be. Pure."""

import math
from collections.abc import Sequence

RECENT = 50
"""Figures that make the level."""
_ENOUGH = 10
"""With fewer of them nothing is too large: the first losses of a run fall fast."""
_TIMES = 5.0


def judge(value: float, recent: Sequence[float]) -> str:
    """Say what is wrong with a figure, after the recent ones that were right; empty: nothing.

    Their level is the median of their sizes, which one that is far off does not change.
    """
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "infinite"
    if len(recent) < _ENOUGH:
        return ""
    level = sorted(map(abs, recent))[len(recent) // 2]
    if level > 0 and abs(value) > _TIMES * level:
        return f"{value:.4g}, {abs(value) / level:.1f} times its recent level"
    return ""
