"""What `benchmarks.check` takes for a loss."""

from benchmarks.check import worse


def test_more_than_thirty_percent_is_worse() -> None:
    """Less is better; what was never recorded is no loss."""
    recorded = {"a": 1.0, "b": 1.0, "c": 1.0}
    assert worse({"a": 1.29, "b": 1.31, "c": 0.2, "new": 9.0}, recorded) == ["b"]
