"""The file that tells what all threads did when all ranks stood still."""

from frun.agent.pulse import Pulse
from frun.agent.stacks import noticed, report
from frun.clock import SystemClock
from frun.protocol.records import Incident
from tests.agent.test_pulse import Workers, beat


def test_equal_stacks_stand_together_outliers_first() -> None:
    """Who is at fault comes first, then who is alone, then the many."""
    stacks = {0: "waits\n", 1: "waits\n", 2: "reads\n", 3: "", 4: "waits\n", 5: "loops\n"}
    text = report("rank 5 hangs", stacks, (5,))
    assert [line for line in text.splitlines() if line.startswith(("rank", "==="))] == [
        "rank 5 hangs",
        "=== rank 5",
        "=== rank 2",
        "=== rank 3",
        "=== 3 ranks: 0, 1, 4",
    ]
    assert "no answer" in text


def test_who_tells_of_a_hang() -> None:
    """The host of the rank at fault; the first host where nobody is."""
    workers = Workers(11, 12)
    pulse = Pulse(workers, workers, 2.0, 2.0, SystemClock())
    pulse.heard(11, beat(still_s=2.5))
    pulse.heard(12, beat(still_s=3.5))
    pids = {4: 11, 5: 12}
    hang = Incident(cause="rank 4 hangs", kind="hang", action="replace-worker", ranks=(4,))
    event = noticed(hang, pids, pulse, first=False)
    assert event is not None
    assert (event.rank, event.since_s, event.reason) == (4, 2.5, "rank 4 hangs")
    assert noticed(hang, {6: 13}, pulse, first=True) is None
    link = Incident(cause="all wait", kind="link", action="retry")
    event = noticed(link, pids, pulse, first=True)
    assert event is not None
    assert (event.rank, event.since_s) == (-1, 3.5)
    assert noticed(link, pids, pulse, first=False) is None
