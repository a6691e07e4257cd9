"""What `benchmarks.check` takes for a loss."""

from benchmarks.check import ATTEMPTS, best, worse


def test_more_than_thirty_percent_is_worse() -> None:
    """Less is better; what was never recorded is no loss."""
    recorded = {"a": 1.0, "b": 1.0, "c": 1.0}
    assert worse({"a": 1.29, "b": 1.31, "c": 0.2, "new": 9.0}, recorded) == ["b"]


def test_chance_is_measured_again() -> None:
    """The best of each ratio counts, and what is good at once is measured once."""
    recorded = {"a": 1.0, "b": 1.0}
    runs = [{"a": 1.4, "b": 1.0}, {"a": 1.2, "b": 1.9}, {"a": 0.1, "b": 0.1}]
    left = iter(runs)
    assert best(lambda: next(left), recorded) == {"a": 1.2, "b": 1.0}
    assert list(left) == runs[2:]
    slow = iter([{"a": 2.0, "b": 1.0}] * (ATTEMPTS + 1))
    assert best(lambda: next(slow), recorded) == {"a": 2.0, "b": 1.0}
    assert len(list(slow)) == 1
