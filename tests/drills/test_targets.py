"""Who is hit."""

import random

import pytest

from frun.drills.catalogue import Scope
from frun.drills.targets import Selection, Victim, choose
from frun.errors import UsageError
from tests.drills.build import status, worker


def ranks(selection: Selection) -> set[int]:
    """Return who may be drawn."""
    return {
        choose(status(), Scope.WORKER, selection, random.Random(seed)).rank for seed in range(50)
    }


@pytest.mark.parametrize(
    ("selection", "wanted"),
    [
        (Selection(), {0, 1, 2, 3}),
        (Selection(rank=2), {2}),
        (Selection(host="b"), {2, 3}),
        (Selection(host="b-2"), {2, 3}),
        (Selection(leader=True), {0, 1}),
    ],
    ids=str,
)
def test_who_may_be_hit(selection: Selection, wanted: set[int]) -> None:
    """All that fit, and nobody else."""
    assert ranks(selection) == wanted


def test_the_victim_is_named_with_its_host_and_process() -> None:
    """An operator who is asked must know what will die."""
    victim = choose(status(), Scope.WORKER, Selection(rank=3), random.Random(0))
    assert (victim.host, victim.pid) == ("b-2", 103)
    assert str(victim) == "rank 3 (pid 103 on b-2)"


@pytest.mark.parametrize(
    ("selection", "said"),
    [
        (Selection(rank=9), "as rank 9"),
        (Selection(host="d"), "on host 'd'"),
        (Selection(host="c"), "on host 'c'"),
    ],
    ids=str,
)
def test_nobody_fits(selection: Selection, said: str) -> None:
    """The line says where was looked."""
    with pytest.raises(UsageError, match=said):
        choose(status(), Scope.WORKER, selection, random.Random(0))


def test_the_dead_are_not_hit() -> None:
    """A worker that has ended, or is not there yet, is no victim."""
    document = status(leader=None)
    document["hosts"][0]["workers"] = [worker(0, "failed"), worker(1, "starting")]
    assert choose(document, Scope.WORKER, Selection(host="b"), random.Random(0)).rank in (2, 3)
    with pytest.raises(UsageError):
        choose(document, Scope.WORKER, Selection(host="a"), random.Random(0))
    with pytest.raises(UsageError, match="on the leader's host"):
        choose(document, Scope.WORKER, Selection(leader=True), random.Random(0))


@pytest.mark.parametrize(
    ("scope", "selection", "wanted"),
    [
        (Scope.HOST, Selection(), {"a-1", "b-2"}),
        (Scope.HOST, Selection(rank=3), {"b-2"}),
        (Scope.HOST, Selection(host="a"), {"a-1"}),
        (Scope.HOST, Selection(leader=True), {"a-1"}),
        (Scope.LEADER, Selection(), {"a-1"}),
        (Scope.STORE, Selection(), {"b-2"}),
    ],
)
def test_a_host_may_be_hit(scope: Scope, selection: Selection, wanted: set[str]) -> None:
    """Then no worker is named."""
    victims = {choose(status(), scope, selection, random.Random(seed)) for seed in range(30)}
    assert {victim.host for victim in victims} == wanted
    assert {victim.rank for victim in victims} == {-1}


def test_a_spare_may_lead_and_no_host_may_keep_the_store() -> None:
    """Who leads need not be a member; an etcd that runs anyway is not frun's to break."""
    document = status(leader="c-3")
    assert choose(document, Scope.LEADER, Selection(), random.Random(0)) == Victim(
        host="c-3", spare=True
    )
    document["hosts"][1]["keeps_store"] = False
    with pytest.raises(UsageError, match="frun did not start this job's etcd"):
        choose(document, Scope.STORE, Selection(), random.Random(0))
