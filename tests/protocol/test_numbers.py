"""Figures that are not as they should be."""

import pytest

from frun.protocol.numbers import judge

STEADY = [2.0, 2.2, 1.9, 2.1, 2.0, 2.0, 1.8, 2.2, 2.1, 1.9]
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("value", "recent", "wrong"),
    [
        (2.5, STEADY, ""),
        (10.0, STEADY, ""),
        (10.1, STEADY, "10.1, 5.0 times its recent level"),
        (-200.0, STEADY, "-200, 100.0 times its recent level"),
        (10.1, STEADY[:9], ""),
        (10.1, [0.0] * 20, ""),  # a figure that is mostly nothing has no level
        (2.0, [*STEADY, 1e9], ""),
        (NAN, [], "not a number"),
        (INF, [], "infinite"),
        (-INF, STEADY, "infinite"),
    ],
)
def test_what_is_odd(value: float, recent: list[float], wrong: str) -> None:
    """By itself, or beside the median of the recent ones."""
    assert judge(value, recent) == wrong
