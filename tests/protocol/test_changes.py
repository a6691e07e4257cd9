"""What hosts are sent instead of a whole rank table gives the same table."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from frun.protocol import changes, wire
from frun.protocol.records import Phase, RankTable, Slot
from tests.protocol import build

SLOTS = st.builds(
    Slot,
    host=st.sampled_from(["", "a", "b", "c", "d"]),
    address=st.sampled_from(["", "10.0.0.1", "10.0.0.2"]),
    port=st.sampled_from([0, 4000]),
    first_rank=st.integers(0, 3),
    nproc=st.integers(1, 2),
    incarnations=st.sampled_from([(), (1, 1), (1, 2), (2, 2), (3, 3)]),
)
TABLES = st.builds(
    replace,
    st.just(build.table(Phase.RUN)),
    generation=st.integers(1, 3),
    phase=st.sampled_from(Phase),
    slots=st.lists(SLOTS, max_size=4).map(tuple),
)
REVISION = 7


def _sent(old: RankTable, new: RankTable) -> changes.TableChange:
    """Return the change after its way through etcd."""
    return wire.decode_change(wire.encode(changes.between(old, REVISION, new)))


@given(TABLES, TABLES)
def test_a_change_makes_the_new_table_of_the_old_one(old: RankTable, new: RankTable) -> None:
    """For any two tables, unless it says that the new one is to be read whole."""
    change = _sent(old, new)
    assert change.base in (0, REVISION)
    if change.base:
        assert changes.apply(old, change) == new


def test_what_changes_often_is_small() -> None:
    """A phase, a worker of one host, and all workers anew are told in a few hundred bytes for 500 hosts."""
    run = build.table(Phase.RUN, " ".join(f"h{n}" for n in range(500)))
    slots = [replace(slot, incarnations=(1, 1)) for slot in run.slots]
    old = replace(run, slots=tuple(slots))
    slots[200] = replace(slots[200], incarnations=(1, 2))
    renewed = [replace(slot, incarnations=(2, 2)) for slot in old.slots]
    for new in (
        replace(old, phase=Phase.DONE),
        replace(old, generation=2, slots=tuple(slots)),
        replace(old, generation=2, slots=tuple(renewed)),
    ):
        change = _sent(old, new)
        assert changes.apply(old, change) == new
        assert len(wire.encode(change)) < 500


def test_worlds_of_other_sizes_and_unknown_tables_are_read_whole() -> None:
    """There is nothing to change from, or too much of it."""
    old, grown = build.table(Phase.RUN, "a b"), build.table(Phase.RUN, "a b c")
    assert changes.between(old, REVISION, grown).base == 0
    assert changes.between(None, 0, old).base == 0
    assert changes.between(old, REVISION, build.table(Phase.RUN, "c d")).base == 0
