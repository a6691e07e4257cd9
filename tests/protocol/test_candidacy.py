"""Who campaigns when nobody leads: a few at once, all in the end."""

from frun.protocol.candidacy import waits_s
from frun.protocol.records import Phase
from tests.protocol import build


def test_few_hosts_never_wait() -> None:
    """Nor does a spare of theirs, nor anybody before there is a table."""
    table = build.table(Phase.RUN, "a b c")
    assert [waits_s(table, host) for host in ("a", "c", "spare")] == [0.0] * 3
    assert waits_s(None, "a") == 0.0


def test_of_many_hosts_a_few_campaign_at_once_and_none_much_later() -> None:
    """Each turn at most doubles those that campaigned before."""
    names = [f"h{n}" for n in range(2048)]
    table = build.table(Phase.RUN, " ".join(names))
    waits = [waits_s(table, name) for name in names]
    assert waits == sorted(waits)
    assert waits.count(0.0) == 8
    for turn in sorted(set(waits))[1:]:
        before = sum(1 for wait in waits if wait < turn)
        assert waits.count(turn) <= before
    assert max(waits) <= waits_s(table, "spare") <= 0.5
