"""Who gets which ranks: the documented order, and the stability of what is there."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frun.protocol import ranks
from frun.protocol.records import HostRecord, Phase, Slot
from tests.protocol.build import host, table, view


def _order(*records: HostRecord) -> list[str]:
    joined = {record.host: index for index, record in enumerate(records)}
    return [record.host for record in ranks.order(records, joined)]


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        pytest.param(
            [host("n10"), host("n2"), host("n1")], ["n1", "n2", "n10"], id="numbers-as-numbers"
        ),
        pytest.param(
            [host("r2n1"), host("r10n1"), host("r2n10"), host("r2n9")],
            ["r2n1", "r2n9", "r2n10", "r10n1"],
            id="several-numbers",
        ),
        pytest.param(
            [host("a"), host("z", node_rank=1), host("y", node_rank=0)],
            ["y", "z", "a"],
            id="node-rank-first",
        ),
        pytest.param(
            [host("b", node_rank=3), host("a", node_rank=10)], ["b", "a"], id="node-rank-as-number"
        ),
        pytest.param(
            [host("x2", label="same"), host("x1", label="same")],
            ["x1", "x2"],
            id="same-name-by-address",
        ),
        pytest.param(
            [host("b"), host("7"), host("a")], ["7", "a", "b"], id="numbers-before-letters"
        ),
    ],
)
def test_order_of_a_new_world(records: list[HostRecord], expected: list[str]) -> None:
    """--node-rank first, then names in natural order, then addresses."""
    assert _order(*records) == expected
    assert _order(*reversed(records)) == expected


def test_who_came_first_decides_between_equals() -> None:
    """Agents of one machine, alike in name and address, get ranks in the order in which they came."""
    alike = [
        HostRecord(host=f"m-{letter}", name="m", address="10.0.0.1", port=1, nproc=1)
        for letter in "cab"
    ]
    assert _order(*alike) == ["m-c", "m-a", "m-b"]


@given(st.lists(st.text("0123456789aXé٣²-", max_size=6), max_size=6))
def test_natural_order_is_total(texts: list[str]) -> None:
    """Any names can be compared, digits of other scripts included."""
    assert sorted(texts, key=ranks.natural) == sorted(reversed(texts), key=ranks.natural)


def test_waiting_hosts_come_in_the_order_of_arrival() -> None:
    """A waiting host is one in no slot and not left out; the earliest comes first."""
    snapshot = view("d c b a")
    slots = table(Phase.RUN, "a -").slots
    assert [one.host for one in ranks.waiting(snapshot, slots, without=("d",))] == ["c", "b"]


def test_a_replacement_takes_the_ranks_of_what_it_replaces() -> None:
    """All other hosts keep their places and ranks."""
    before = table(Phase.RUN, "a b c")
    slots = ranks.fill(ranks.vacate(before.slots, {"b"}), [host("z")])
    after = ranks.number(slots, 2)
    assert [(slot.host, slot.first_rank) for slot in after] == [("a", 0), ("z", 2), ("c", 4)]


def test_a_place_keeps_its_ranks_while_it_waits() -> None:
    """Vacant, or taken while others are still vacant, a place shows the ranks it had."""
    slots = ranks.vacate(table(Phase.RUN, "a b c").slots, {"b", "c"})
    assert [(slot.host, slot.first_rank) for slot in slots] == [("a", 0), ("", 2), ("", 4)]
    half = ranks.fill(slots, [host("z")])
    assert [(slot.host, slot.first_rank) for slot in half] == [("a", 0), ("z", 2), ("", 4)]


def test_a_host_is_found_at_its_place_and_a_vacant_place_is_the_first() -> None:
    """Also in a table that was made from another one; a host without a place has none."""
    whole = table(Phase.GATHER, "a - b -")
    assert [whole.slot_of(host) for host in ("a", "b", "c")] == [
        (0, whole.slots[0]),
        (2, whole.slots[2]),
        None,
    ]
    assert whole.slot_of("") == (1, whole.slots[1])
    fewer = replace(whole, slots=whole.slots[2:3])
    assert (fewer.slot_of("a"), fewer.slot_of("b")) == (None, (0, whole.slots[2]))


def test_the_spare_that_fits_is_preferred() -> None:
    """A spare with as many workers as the place had is taken before one that would move ranks."""
    slots = ranks.vacate(table(Phase.RUN, "a b").slots, {"b"})
    filled = ranks.fill(slots, [host("y", nproc=4), host("z", nproc=2)])
    assert [slot.host for slot in filled] == ["a", "z"]


def test_a_spare_is_not_wasted_on_a_place_it_does_not_fit() -> None:
    """With fewer spares than places, one that fits some place takes that and not the first."""
    places = (
        Slot(host="", address="", port=0, first_rank=0, nproc=8),
        Slot(host="", address="", port=0, first_rank=8, nproc=4),
    )
    assert [slot.host for slot in ranks.fill(places, [host("z", nproc=4)])] == ["", "z"]


worlds = st.lists(st.integers(1, 8), min_size=1, max_size=8)


@given(worlds, st.sets(st.integers(0, 7)), st.lists(st.integers(1, 8), max_size=8))
def test_ranks_are_dense_and_unique(sizes: list[int], lost: set[int], spares: list[int]) -> None:
    """Whoever is lost and whoever comes, numbered ranks are 0 to n-1, and no host has two places."""
    hosts = [host(f"h{index}", nproc=size) for index, size in enumerate(sizes)]
    slots = ranks.number([ranks.seat(one) for one in hosts], 1)
    vacated = ranks.vacate(slots, {f"h{index}" for index in lost})
    comers = [host(f"s{index}", nproc=size) for index, size in enumerate(spares)]
    filled = ranks.fill(vacated, comers)
    assert len(filled) == len(slots)
    vacant = sum(not slot.host for slot in vacated)
    assert sum(not slot.host for slot in filled) == max(0, vacant - len(comers))
    kept = [slot for slot in vacated if slot.host]
    assert [slot for slot in filled if slot in kept] == kept
    members = [slot.host for slot in filled if slot.host]
    assert len(set(members)) == len(members)
    numbered = ranks.number([slot for slot in filled if slot.host], 2)
    owned = [slot.first_rank + local for slot in numbered for local in range(slot.nproc)]
    assert owned == list(range(len(owned)))
    assert all(slot.incarnations == (2,) * slot.nproc for slot in numbered)
    assert ranks.is_full(filled) == (len(members) == len(filled))
