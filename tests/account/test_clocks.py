"""Hosts whose clocks differ, on one clock."""

from hypothesis import given
from hypothesis import strategies as st

from frun.account.clocks import aligned
from frun.account.journal import read_journal
from frun.account.summary import account
from tests.account.build import END, FAULT, START, Said, first, journal, line, restored, seen

TRAINED = (restored(107.0, 1), first(108.0, 1, 1))
STORY = (*START, *TRAINED, *FAULT, *END)


def moved(said: tuple[Said, ...], by_s: float) -> list[Said]:
    """Return the same with another clock."""
    return [(at + by_s, name, generation, fields) for at, name, generation, fields in said]


@given(by_s=st.integers(-90, 10_000_000))
def test_tables_that_both_saw_align_two_hosts(by_s: int) -> None:
    """However far two monotonic clocks, and wall clocks, are apart: the account is that of one host."""
    one = journal("a", *STORY)
    other = journal("b", *moved(STORY[2:], by_s), wall_s=1_600_000_000.0)
    both = account([other, one])
    assert both.buckets == account([one]).buckets
    assert both.wall_us == account([one]).wall_us


def test_a_late_look_moves_nothing() -> None:
    """One table that came late, from an etcd that did not answer, is outvoted by the others."""
    said = moved(STORY, 1000.0)
    late = [
        (at + 5.0, name, generation, fields)
        if (name, generation, fields.get("phase")) == ("phase_seen", 2, "run")
        else (at, name, generation, fields)
        for at, name, generation, fields in said
    ]
    placed = aligned([journal("a", *STORY), journal("b", *late, wall_s=1.0)])
    assert placed[1].entries[0].at_us == placed[0].entries[0].at_us


def test_agents_of_one_machine_share_its_clock() -> None:
    """However late one of them saw the tables, nothing of it is moved."""
    late = [
        (at + 0.25 if name == "phase_seen" else at, name, generation, fields)
        for at, name, generation, fields in STORY
    ]
    placed = aligned([journal("a", *STORY), journal("b", *late)])
    assert placed[1].entries[0].at_us == placed[0].entries[0].at_us


def test_a_host_that_shares_no_table_is_placed_by_its_wall_clock() -> None:
    """It registered and was gone before it saw any."""
    alone = journal("b", (5000.0, "job_started", 0, {}), wall_s=1_700_000_000.0 - 4890.0)
    placed = aligned([journal("a", *STORY), alone])
    assert placed[1].entries[0].at_us == 110_000_000


def test_hosts_are_aligned_in_a_chain() -> None:
    """The first and the last host share no table, but both do with the one between them."""
    early = journal("a", *STORY[:6])
    late = journal("c", *moved(FAULT + END, 500.0), wall_s=1.0)
    placed = aligned([late, early, journal("b", *STORY)])
    assert placed[0].entries[0].at_us == 120_000_000
    assert placed[1].entries[0].at_us == 100_000_000


def test_what_is_broken_is_counted_and_left_out() -> None:
    """Half a line, other JSON and binary junk cost a count; a file of only such is no journal."""
    good = line("a", seen(1.0, 1, "run"))
    made = read_journal([good, good[:40], "[]", "7", "{}", "\x00\x00", ""])
    assert made is not None
    assert (len(made.entries), made.broken) == (1, 5)
    assert read_journal(["{}", "x"]) is None
