"""The time without a processor, by step."""

import pytest

from frun.worker.delays import Delays


def test_the_mean_of_the_latest_steps() -> None:
    """Of twenty at least where there were so many; what was before them is forgotten."""
    look = Delays().look
    assert look(100, 7.0) == 0.0
    assert look(100, 8.0) == 0.0
    assert look(110, 9.0) == pytest.approx(0.2)
    assert look(128, 9.0) == pytest.approx(2 / 28)
    assert look(131, 9.0) == 0.0
    assert look(5, 9.5) == 0.0  # another run
