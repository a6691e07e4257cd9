"""Which failure is the cause: what it is decides, then who was seen first; never a clock."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frun.protocol import blame
from frun.protocol.records import Failure
from tests.protocol.build import VICTIM, failure, victim


def test_a_kill_beats_the_recorded_error_of_its_peer() -> None:
    """R35: the rank that died without a word is named, whichever of the two is reported first."""
    killed = failure("b", exit_code=-9)
    assert blame.ranked([killed, victim("a")])[0] == killed
    assert blame.ranked([victim("a"), killed])[0] == killed


@pytest.mark.parametrize(
    ("one", "clear"),
    [
        pytest.param(failure("a", exit_code=-9), True, id="SIGKILL"),
        pytest.param(failure("a", exit_code=-11), True, id="SIGSEGV"),
        pytest.param(failure("a", exit_code=3), True, id="own-status"),
        pytest.param(failure("a", exit_code=127), True, id="not-started"),
        pytest.param(failure("a", exit_code=1), False, id="status-1-says-nothing"),
        pytest.param(
            failure("a", exit_code=1, message="ValueError: bad loss", recorded=True),
            True,
            id="own-exception",
        ),
        pytest.param(victim("a"), False, id="gloo-peer-closed"),
        pytest.param(
            failure(
                "a",
                exit_code=1,
                recorded=True,
                message="DistBackendError: NCCL error ... ncclRemoteError: remote process exited",
            ),
            False,
            id="nccl-remote",
        ),
        pytest.param(
            failure(
                "a",
                exit_code=1,
                recorded=True,
                message="RuntimeError: [enforce fail] connectFullMesh failed",
            ),
            False,
            id="gloo-full-mesh",
        ),
        pytest.param(
            failure(
                "a",
                exit_code=1,
                recorded=True,
                message="DistStoreError: wait timeout after 300000ms, keys: /default/0",
            ),
            False,
            id="store-timeout",
        ),
        pytest.param(
            failure("a", exit_code=1, message=VICTIM, recorded=False), False, id="text-from-a-log"
        ),
    ],
)
def test_what_can_be_a_cause(one: Failure, *, clear: bool) -> None:
    """A signal, a status of the script's own and an exception about anything but a peer are causes."""
    assert blame.is_clear(one) is clear


def test_within_a_host_its_own_order_counts() -> None:
    """Two clear failures of one host stay in the order in which its agent saw them."""
    later, first = failure("a", exit_code=4, order=1), failure("a", exit_code=5, order=0)
    assert blame.ranked([later, first]) == [first, later]


def test_between_hosts_the_first_reported_counts() -> None:
    """Two clear failures of two hosts stay in the order in which the leader learnt of them."""
    one, other = failure("b", exit_code=4), failure("a", exit_code=5)
    assert blame.ranked([one, other]) == [one, other]
    assert blame.ranked([other, one]) == [other, one]


def test_nothing_failed() -> None:
    """No failures, nobody to blame."""
    assert blame.ranked([]) == []


failures = st.builds(
    failure,
    st.sampled_from("abc"),
    exit_code=st.sampled_from([1, 3, -9]),
    message=st.sampled_from(["", VICTIM, "ValueError"]),
    recorded=st.booleans(),
    order=st.integers(0, 3),
)


@given(st.lists(failures, max_size=6))
def test_ranked_loses_nothing(found: list[Failure]) -> None:
    """The order is a permutation with every possible cause before every likely victim."""
    ordered = blame.ranked(iter(found))
    assert sorted(map(repr, ordered)) == sorted(map(repr, found))
    clear = [blame.is_clear(one) for one in ordered]
    assert clear == sorted(clear, reverse=True)
    for one, other in itertools.pairwise(ordered):
        if one.host == other.host and blame.is_clear(one) == blame.is_clear(other):
            assert one.order <= other.order
