"""The plan of a restore: stories of who copies from whom, and laws that hold for any states."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frun.protocol.restore import (
    Action,
    Keep,
    NoDonor,
    Plan,
    RankState,
    Receive,
    Start,
    homes,
    plan,
    strangers,
)


def rank(
    number: int,
    step: int = 5,
    *,
    host: str = "a",
    new: bool = False,
    torn: bool = False,
    cut: bool = False,
    replica: str = "",
) -> RankState:
    """Return what a rank says; by default a survivor at step 5."""
    return RankState(
        rank=number,
        host=host,
        step=0 if new else step,
        has_state=not new and not cut,
        torn=torn,
        cut=cut,
        replica=replica,
    )


def planned(*states: RankState) -> Plan:
    """Return the plan; it must be one."""
    result = plan(states)
    assert isinstance(result, Plan), result
    return result


def test_a_newcomer_copies_and_the_others_keep() -> None:
    """One of three ranks is new: it takes the state of a survivor at the survivors' step."""
    result = planned(rank(0), rank(1, new=True), rank(2))
    assert result.target == 5
    assert result.actions == (Keep(rank=0), Receive(rank=1, donor=0), Keep(rank=2))
    assert result.donor_of(1) == 0
    assert result.donor_of(2) is None
    assert result.receivers_of(0) == (1,)
    assert result.receivers_of(2) == ()
    assert result.copies == 1
    assert result.reason == "step 5: 1 copy (1 from 0)"


def test_on_how_many_hosts_a_part_is() -> None:
    """Ranks that hold the same part count once per host, newcomers too: they have it afterwards."""
    states = [
        rank(0, replica="x"),
        rank(1, replica="y"),
        rank(2, replica="x"),
        rank(3, replica="x", host="b", new=True),
    ]
    assert [homes(states, part) for part in ("x", "y", "z")] == [2, 1, 0]


def test_a_part_that_is_new_does_not_begin_where_others_know_of_a_step() -> None:
    """Also if those who know of it lost its result, and what is sound is of the beginning."""
    result = plan([rank(0, 0), rank(1, 0), rank(2, 0, cut=True, replica="x"), rank(3, 1, cut=True)])
    assert isinstance(result, NoDonor)
    assert (result.replica, result.target) == ("x", 0)


def test_nobody_has_a_state() -> None:
    """In the first generation everybody starts at step 0."""
    result = planned(rank(0, new=True), rank(1, new=True))
    assert result.target == 0
    assert result.actions == (Start(rank=0), Start(rank=1))
    assert result.reason == "step 0: ranks 0, 1 start"


def test_before_the_first_update_a_newcomer_takes_the_survivors_state() -> None:
    """The state of step 0 counts too: random initial values are the survivors'."""
    assert planned(rank(0, 0), rank(1, new=True)).of(1) == Receive(rank=1, donor=0)


def test_a_rank_behind_copies_from_one_ahead() -> None:
    """With a donor at the target one way serves all."""
    result = planned(rank(0, 5), rank(1, 6), rank(2, 5))
    assert result.target == 6
    assert [type(action) for action in result.actions] == [Receive, Keep, Receive]


def test_each_part_comes_from_its_own_replicas() -> None:
    """Newcomers of two parts have a donor each, and it holds what they need."""
    result = planned(
        rank(0, 6, replica="x"),
        rank(1, 6, replica="y"),
        rank(2, new=True, replica="x"),
        rank(3, new=True, replica="y"),
    )
    assert result.donor_of(2) == 0
    assert result.donor_of(3) == 1


@pytest.mark.parametrize(
    ("states", "said"),
    [
        (
            [rank(0, 6, replica="x"), rank(1, new=True, replica="y")],
            "no replica 'y' has the state of step 6: rank 1 is new",
        ),
        (
            [rank(0, 6, replica="x"), rank(1, 5, replica="y")],
            "no replica 'y' has the state of step 6: rank 1 is at step 5",
        ),
        (
            [rank(0, 6, replica="x"), rank(1, 6, torn=True, replica="y")],
            "no replica 'y' has the state of step 6: rank 1 was cut inside an update",
        ),
        (
            [rank(0, 6, torn=True), rank(1, new=True)],
            "no rank has a whole state: the update of rank 0 was cut in the middle",
        ),
        (
            [rank(0, new=True), rank(1, 4, cut=True), rank(2, 0, cut=True)],
            "no rank has a state: the donor died while it was copied to rank 1",
        ),
        (
            [rank(0, 6, replica="x"), rank(1, 5, cut=True, replica="y")],
            "no replica 'y' has the state of step 6: the copy to rank 1 was cut",
        ),
        (
            [rank(0, 0, replica="x"), rank(1, 0, torn=True, replica="y")],
            "no replica 'y' has the state of step 0: rank 1 was cut inside an update",
        ),
    ],
)
def test_what_is_lost_is_said(states: list[RankState], said: str) -> None:
    """Without a donor the answer names the shard, the step and each of its ranks."""
    result = plan(states)
    assert isinstance(result, NoDonor)
    assert result.reason == said


def test_donors_on_the_same_host_come_first_among_equals() -> None:
    """Eight ranks on two hosts, one lost on each: both are served at home, by different donors."""
    states = [rank(n, host="a" if n < 4 else "b", new=n in (3, 7)) for n in range(8)]
    result = planned(*states)
    assert result.donor_of(3) == 0
    assert result.donor_of(7) == 4


def test_a_host_of_newcomers_is_served_by_all_of_the_other() -> None:
    """Four newcomers on one host, four survivors on the other: each donor has one receiver."""
    states = [rank(n, host="a" if n < 4 else "b", new=n >= 4) for n in range(8)]
    assert [planned(*states).donor_of(n) for n in range(4, 8)] == [0, 1, 2, 3]


def test_a_torn_rank_takes_the_state_anew() -> None:
    """A survivor whose update was cut is treated as a newcomer, whatever its step says."""
    result = planned(rank(0, 9, torn=True), rank(1, 5))
    assert result.target == 5
    assert result.of(0) == Receive(rank=0, donor=1)


@pytest.mark.parametrize(
    ("one", "two", "found"),
    [
        ((1.0, -2.0, 3.0), (0.4, 0.1, -3.0), True),
        ((1.0, -2.0, 3.0), (1.01, -2.0, 3.1), False),
        ((1.0, -2.0, 3.0), (0.0, -2.0, 3.0), False),
        ((1.0, -2.0, 3.0), (), False),
        ((0.0, 0.0, 1.0), (0.0, 0.0, -1.0), False),
        ((float("nan"),) * 3, (float("nan"),) * 3, False),
    ],
)
def test_ranks_that_are_no_replicas(
    one: tuple[float, ...], two: tuple[float, ...], found: bool
) -> None:
    """Most values are far from each other; a few are not enough, and drift is allowed."""
    states = [replace(rank(0, new=True), rank=n) for n in range(2)]
    states += [replace(rank(n), sample=values) for n, values in ((2, one), (3, two))]
    assert strangers(states) == ((2, 3) if found else None)
    assert strangers([replace(state, step=0) for state in states]) is None
    later = [*states[:3], replace(states[3], step=6)]
    assert strangers(later) == ((2, 3) if found else None)
    apart = [replace(state, replica=str(state.rank)) for state in states]
    assert strangers(apart) is None


def test_a_first_update_may_change_zeros_to_anything() -> None:
    """As in adapters that begin at zero: of ranks that are an update apart one has them still."""
    behind, ahead = (0.0, 0.0, 0.0, 1.0), (0.1, -0.2, 0.1, 1.1)
    states = [replace(rank(n, 1 + n), sample=values) for n, values in enumerate((behind, ahead))]
    assert strangers(states) is None
    assert strangers([replace(state, step=2) for state in states]) == (0, 1)


def test_an_unknown_rank_is_a_key_error() -> None:
    """Nobody may act on a plan that does not name it."""
    with pytest.raises(KeyError):
        planned(rank(0)).of(1)


STATES = st.lists(
    st.builds(
        rank,
        st.just(0),
        st.integers(0, 4),
        host=st.sampled_from("abc"),
        new=st.booleans(),
        torn=st.booleans(),
        cut=st.booleans(),
        replica=st.sampled_from(["", "x"]),
    ),
    min_size=1,
    max_size=12,
).map(lambda states: [_numbered(state, number) for number, state in enumerate(states)])


def _numbered(state: RankState, number: int) -> RankState:
    return replace(state, rank=number)


@given(STATES, st.randoms())
def test_all_ranks_come_to_the_same_plan(states: list[RankState], shuffle: random.Random) -> None:
    """The order in which the states arrive does not matter."""
    mixed = list(states)
    shuffle.shuffle(mixed)
    assert plan(mixed) == plan(states)


@given(STATES)
def test_everybody_ends_at_the_target(states: list[RankState]) -> None:
    """A plan has one action a rank; each is possible and leads to the highest sound step."""
    result = plan(states)
    sound = [state.step for state in states if state.sound]
    if isinstance(result, NoDonor):
        members = [state for state in states if state.replica == result.replica]
        assert not any(state.sound and state.step == result.target for state in members)
        return
    assert result.target == max(sound, default=0)
    assert [action.rank for action in result.actions] == [state.rank for state in states]
    by_rank = {state.rank: state for state in states}
    for action in result.actions:
        _possible(action, by_rank[action.rank], by_rank, result)


@given(STATES)
def test_no_completed_step_is_forgotten(states: list[RankState]) -> None:
    """Where any rank knows of one, training never begins anew as if there had been none."""
    result = plan(states)
    if isinstance(result, Plan) and any(isinstance(action, Start) for action in result.actions):
        assert not any(state.step for state in states)


def _possible(action: Action, state: RankState, states: dict[int, RankState], whole: Plan) -> None:
    match action:
        case Keep():
            assert state.sound
            assert state.step == whole.target
        case Start():
            assert whole.target == 0
            assert not state.has_state
        case Receive(donor=donor):
            assert not (state.sound and state.step == whole.target)
            assert states[donor].replica == state.replica
            assert isinstance(whole.of(donor), Keep)


@given(STATES)
def test_donors_share_the_work(states: list[RankState]) -> None:
    """Within a shard no donor has two receivers more than another."""
    result = plan(states)
    if isinstance(result, NoDonor):
        return
    for replica in {state.replica for state in states}:
        ranks = [state.rank for state in states if state.replica == replica]
        donors = [r for r in ranks if isinstance(result.of(r), Keep)]
        load = Counter(result.donor_of(r) for r in ranks if result.donor_of(r) is not None)
        if donors:
            loads = [load[donor] for donor in donors]
            assert max(loads) - min(loads) <= 1
