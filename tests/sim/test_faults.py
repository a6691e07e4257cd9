"""Faults put everywhere: a leader that dies at any write, etcd away, leases lost, data lost, storms."""

import asyncio
import itertools
import random
from dataclasses import replace

import pytest

from frun.events import IncidentRenamed
from frun.protocol.classes import FaultClass
from frun.protocol.keys import Keys
from frun.protocol.policy import Policy
from frun.protocol.records import Phase
from tests.sim.cluster import TTL_S, Sim, play

FIXED = Policy(min_hosts=3, max_hosts=3, max_restarts=1, replace_timeout_s=30.0)
ELASTIC = Policy(min_hosts=1, max_hosts=4, max_restarts=1, last_call_s=5.0, replace_timeout_s=3.0)


async def _restart(sim: Sim) -> None:
    """Form with two spares, lose a worker, end."""
    sim.add("a", "b", "c", "s", "t")
    await sim.until(lambda: sim.tables and sim.tables[-1].phase is Phase.RUN)
    await asyncio.sleep(1.0)
    members = [slot.host for slot in sim.tables[-1].slots if not sim.hosts[slot.host].dead]
    sim.hosts[members[-1]].workers.kill_one()
    await sim.end()


def _commits(resumable: bool) -> int:
    sim = play(Sim(FIXED, work_s=5.0, resumable=resumable), _restart)
    assert sim.tables[-1].phase is Phase.DONE
    return sim.commits


@pytest.mark.parametrize("resumable", [False, True], ids=["restart-all", "resumable"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_host_dies_at_any_write(when: str, *, resumable: bool) -> None:
    """Whoever asks for the n-th commit dies just before or just after it, for every n: the job ends well."""
    for number in range(1, _commits(resumable) + 1):
        sim = Sim(FIXED, work_s=5.0, resumable=resumable)
        (sim.kill_before if when == "before" else sim.kill_after).add(number)
        play(sim, _restart)
        dead = [host.name for host in sim.hosts.values() if host.dead]
        assert len(dead) <= 1
        living = {name for name in sim.hosts if name not in dead}
        # A host that dies as the last of all leaves is missed by nobody.
        assert sim.tables[-1].phase is Phase.DONE, f"commit {number}: {sim.story()}"
        assert sim.exits() == dict.fromkeys(living, 0), f"commit {number}: {sim.story()}"
        assert sim.tables[-1].restarts <= 1


@pytest.mark.parametrize("seconds", [20, 120])
def test_etcd_is_away_while_all_is_well(seconds: int) -> None:
    """An outage alone never stops training: same processes, same generation, a good end."""

    async def story(sim: Sim) -> None:
        sim.add("a", "b", "c", "s")
        await sim.running(1)
        async with sim.outage():
            await asyncio.sleep(seconds)
        assert await sim.end() is Phase.DONE

    sim = play(Sim(FIXED, work_s=seconds + 30.0), story)
    assert sim.tables[-1].generation == 1
    assert sim.exits() == {"a": 0, "b": 0, "c": 0, "s": 0}


@pytest.mark.parametrize("seconds", [20, 120])
def test_every_host_is_cut_off_from_etcd(seconds: int) -> None:
    """All leases run out, those of the job too, while everybody trains on; the job is written back."""

    async def story(sim: Sim) -> None:
        sim.add("a", "b", "c")
        await sim.running(1)
        sim.wiped = True  # the job's own lease ends as well
        with sim.cut_off("a", "b", "c"):
            await asyncio.sleep(seconds)
        await asyncio.sleep(10.0)
        assert sim.registered == {"a", "b", "c"}
        assert await sim.end() is Phase.DONE

    sim = play(Sim(FIXED, work_s=seconds + 30.0), story)
    assert sim.tables[-1].generation == 1


@pytest.mark.parametrize("names", [("b",), ("a", "b", "c")])
def test_leases_that_etcd_ends_too_early_are_no_deaths(names: tuple[str, ...]) -> None:
    """Hosts that answer register again, the leader's host too, and everybody trains on."""

    async def story(sim: Sim) -> None:
        sim.add("a", "b", "c", "s")
        await sim.running(1)
        sim.etcd.term += 1
        for name in names:
            sim.etcd.end_lease(sim.etcd.items[Keys("sim").host(name)].lease)
        await asyncio.sleep(10.0)
        assert sim.registered == {"a", "b", "c", "s"}
        assert await sim.end() is Phase.DONE

    sim = play(Sim(FIXED, work_s=20.0), story)
    assert sim.tables[-1].generation == 1


@pytest.mark.parametrize("elected", [False, True])
def test_a_host_without_etcd_is_lost_also_if_it_answers(*, elected: bool) -> None:
    """Its lease proves that, and one lease later where etcd elected a leader after it was granted."""

    async def story(sim: Sim) -> None:
        sim.add("a", "b", "c", "s")
        await sim.running(1)
        sim.etcd.term += elected
        lost = next(name for name in "abc" if name != sim.leader)
        began = sim.now
        with sim.cut_off(lost):
            await sim.until(lambda: sim.table is not None and sim.table.generation == 2)
            assert sim.table is not None
            assert lost not in {slot.host for slot in sim.table.slots}
            took_s = sim.now - began
            assert took_s < TTL_S + 0.5 if not elected else TTL_S < took_s < 2 * TTL_S + 0.5
            await sim.running(2)
        assert await sim.end() is Phase.DONE

    play(Sim(FIXED, work_s=20.0), story)


def test_a_host_that_is_back_says_that_it_was_cut_off() -> None:
    """Its loss is one of the network from then on, in etcd and in the events, and told once."""

    async def story(sim: Sim) -> None:
        sim.add("a", "b", "c", "s")
        await sim.running(1)
        lost = next(name for name in "abc" if name != sim.leader)
        with sim.cut_off(lost):
            await sim.running(2)
            await sim.until(lambda: bool(sim.incidents))
            assert sim.incidents[-1].fault_class is FaultClass.HOST
        await sim.until(lambda: sim.incidents[-1].fault_class is FaultClass.NETWORK)
        assert sim.incidents[-1].hosts == (lost,)
        await asyncio.sleep(5.0)
        assert await sim.end() is Phase.DONE

    sim = play(Sim(FIXED, work_s=40.0, resumable=True), story)
    renamed = [event for _, _, event in sim.events if isinstance(event, IncidentRenamed)]
    assert [event.fault_class for event in renamed] == ["network"]


def test_a_worker_fails_while_etcd_is_away() -> None:
    """The failure is told when etcd is back, and the job goes on within its budget."""

    async def story(sim: Sim) -> None:
        sim.add("a", "b", "c")
        await sim.running(1)
        async with sim.outage():
            await asyncio.sleep(5.0)
            sim.hosts["b"].workers.kill_one()
            await asyncio.sleep(15.0)
        await sim.running(2)
        assert await sim.end() is Phase.DONE

    sim = play(Sim(FIXED, work_s=30.0), story)
    assert sim.tables[-1].failure is not None
    assert sim.tables[-1].failure.host == "b"


def test_etcd_stays_away_while_a_decision_is_needed() -> None:
    """Hosts that can't go on without etcd give up after their bound and stop what still runs."""

    async def story(sim: Sim) -> None:
        sim.add("a", "b", "c")
        await sim.running(1)
        async with sim.outage():
            sim.hosts["b"].workers.kill_one()
            await sim.until(lambda: len(sim.exits()) == 3, 120.0)

    sim = play(Sim(FIXED, work_s=1000.0), story)
    assert sim.exits() == {"a": 1, "b": 1, "c": 1}
    assert not any(host.workers.alive for host in sim.hosts.values())


def test_etcd_is_away_while_the_world_is_made() -> None:
    """An outage during recovery is not counted against the hosts that get ready."""

    async def story(sim: Sim) -> None:
        sim.add("a", "b")
        sim.add("c", stop_s=1.0)
        await sim.running(1)
        sim.hosts["a"].workers.kill_one()
        await sim.until(lambda: sim.tables[-1].phase is Phase.RECOVER)
        async with sim.outage():
            await asyncio.sleep(40.0)
        assert await sim.end() is Phase.DONE

    sim = play(Sim(replace(FIXED, prepare_timeout_s=30.0), work_s=10.0), story)
    assert sim.tables[-1].generation == 2


def test_the_leader_is_lost_while_etcd_is_away() -> None:
    """After the outage the survivors elect a new leader, wait one lease time, and replace the host."""

    async def story(sim: Sim) -> None:
        sim.add("a", "b", "c", "s")
        await sim.running(1)
        async with sim.outage():
            await asyncio.sleep(5.0)
            sim.kill(sim.leader or "a")
            await asyncio.sleep(5.0)
        back = sim.now
        await sim.running(2)
        assert sim.now - back < 3 * TTL_S
        assert await sim.end() is Phase.DONE

    play(Sim(FIXED), story)


@pytest.mark.parametrize("who", ["leader", "other"])
def test_a_frozen_host_is_replaced_and_comes_back(who: str) -> None:
    """It lost its lease and its place; when it wakes it stops its workers and is a spare."""

    async def story(sim: Sim) -> None:
        sim.add("a", "b", "c", "s")
        await sim.running(1)
        members = [slot.host for slot in sim.tables[-1].slots]
        frozen = next(name for name in members if (name == sim.leader) == (who == "leader"))
        sim.freeze(frozen)
        await sim.running(2)
        await asyncio.sleep(5.0)
        sim.thaw(frozen)
        await sim.until(lambda: not sim.hosts[frozen].workers.alive)
        await sim.until(lambda: frozen in sim.registered)
        assert await sim.end() is Phase.DONE

    sim = play(Sim(FIXED, work_s=30.0), story)
    assert sim.exits() == {"a": 0, "b": 0, "c": 0, "s": 0}
    assert sim.tables[-1].generation == 2


@pytest.mark.parametrize("who", ["leader", "other"])
def test_a_frozen_host_comes_back_to_its_place(who: str) -> None:
    """Nobody took its place meanwhile: the next generation runs on the same hosts."""

    async def story(sim: Sim) -> None:
        sim.add("a", "b", "c")
        await sim.running(1)
        frozen = next(n for n in "abc" if (n == sim.leader) == (who == "leader"))
        sim.freeze(frozen)
        await sim.until(lambda: sim.tables[-1].phase is Phase.GATHER)
        await asyncio.sleep(5.0)
        sim.thaw(frozen)
        assert await sim.end() is Phase.DONE

    sim = play(Sim(FIXED, work_s=30.0), story)
    assert [slot.host for slot in sim.tables[-1].slots] == ["a", "b", "c"]
    assert sim.exits() == {"a": 0, "b": 0, "c": 0}


def test_a_short_freeze_is_nothing() -> None:
    """A host that stands still for less than its lease keeps its place."""

    async def story(sim: Sim) -> None:
        sim.add("a", "b", "c")
        await sim.running(1)
        for name in "abc":
            sim.freeze(name)
            await asyncio.sleep(1.5)
            sim.thaw(name)
        assert await sim.end() is Phase.DONE

    assert play(Sim(FIXED), story).tables[-1].generation == 1


@pytest.mark.parametrize("phase", [Phase.GATHER, Phase.RECOVER, Phase.RUN])
def test_etcd_loses_its_data(phase: Phase) -> None:
    """Every host registers again, the rank table is written back, and training never noticed."""

    async def story(sim: Sim) -> None:
        sim.add("a", "b")
        await asyncio.sleep(1.0)
        if phase is not Phase.GATHER:
            sim.add("c", stop_s=1.0)
            await sim.running(1)
        if phase is Phase.RECOVER:
            sim.hosts["a"].workers.kill_one()
            await sim.until(lambda: sim.tables[-1].phase is Phase.RECOVER)
        sim.wipe()
        await sim.until(lambda: sim.registered >= {"a", "b"})
        await asyncio.sleep(TTL_S + 1.0)
        if phase is Phase.GATHER:
            sim.add("c")
        assert await sim.end() is Phase.DONE

    sim = play(Sim(FIXED, work_s=30.0), story)
    assert sim.tables[-1].generation == (2 if phase is Phase.RECOVER else 1)
    assert sim.exits() == {"a": 0, "b": 0, "c": 0}


def test_the_job_outlives_a_wipe_and_then_its_leader() -> None:
    """Keys written back live as long as any agent does, and any agent can lead on."""

    async def story(sim: Sim) -> None:
        sim.add("a", "b", "c", "s")
        await sim.running(1)
        sim.wipe()
        await sim.until(lambda: len(sim.registered) == 4 and sim.leader)
        await asyncio.sleep(2.0)
        sim.kill(sim.leader)
        await sim.running(2)
        await asyncio.sleep(150.0)
        assert sim.table is not None, "the job's own keys ran out"
        assert await sim.end() is Phase.DONE

    sim = play(Sim(FIXED, work_s=200.0), story)
    assert sim.tables[-1].generation == 2


def test_an_answer_gets_lost() -> None:
    """The leader's write happened but it was not told: it reads before it writes again."""

    async def story(sim: Sim) -> None:
        sim.add("a", "b", "c")
        await sim.until(lambda: sim.leader)
        for host in sim.hosts.values():
            host.client.lose_answers(2)
        assert await sim.end() is Phase.DONE

    assert play(Sim(FIXED), story).tables[-1].generation == 1


def test_the_finished_hosts_of_a_broken_job_do_not_wait() -> None:
    """R38, R80: when a peer's host is lost after some have ended, they end within a lease time, with 1."""

    async def story(sim: Sim) -> None:
        sim.add("a", "b", "c")
        await sim.running(1)
        for name in "ab":
            for rank in range(6):
                sim.hosts[name].workers.end(rank, exit_code=0)
        await asyncio.sleep(0.5)
        lost = sim.now
        sim.kill("c")
        assert await _ended(sim) - lost < 2 * TTL_S + 1.0
        assert await sim.end() is Phase.FAILED

    sim = play(Sim(FIXED, work_s=1000.0, resumable=True), story)
    assert sim.exits() == {"a": 1, "b": 1}


async def _ended(sim: Sim) -> float:
    await sim.until(lambda: len(sim.exits()) == 2)
    return sim.now


# -- storms -----------------------------------------------------------------------------------------


FAULTS = [
    "join",
    "kill",
    "kill",
    "freeze",
    "worker",
    "worker",
    "outage",
    "cut",
    "answers",
    "leader",
]


class Storm:
    """Random faults, told by the simulation's seed."""

    def __init__(self, sim: Sim) -> None:
        self._sim = sim
        self._names = (f"h{index}" for index in itertools.count())
        self._frozen: set[str] = set()

    async def story(self, sim: Sim) -> None:
        """Strike a dozen times, then let every world become complete."""
        chance = sim.random
        self._join(sim.policy.max_hosts)
        for _ in range(12):
            await asyncio.sleep(chance.choice([0.0, 0.01, 0.1, 0.5, 3.0]))
            await self._strike(chance.choice(FAULTS))
        for name in self._frozen:
            sim.thaw(name)
        self._join(sim.policy.max_hosts)
        await sim.end()

    def _join(self, count: int, nproc: int = 2) -> None:
        self._sim.add(*itertools.islice(self._names, count), nproc=nproc)

    async def _strike(self, fault: str) -> None:
        sim, chance = self._sim, self._sim.random
        alive = [n for n, h in sim.hosts.items() if not h.dead and h.task and not h.task.done()]
        if not alive or fault == "join":
            self._join(1, chance.choice([1, 2]))
            return
        target = chance.choice(alive)
        match fault:
            case "kill":
                sim.kill(target)
            case "leader":
                sim.kill(sim.leader if sim.leader in alive else target)
            case "freeze":
                await self._freeze(target)
            case "worker":
                text = chance.choice(["", "ValueError: nan"])
                sim.hosts[target].workers.kill_one(message=text, recorded=bool(text))
            case "outage":
                async with sim.outage():
                    await asyncio.sleep(chance.choice([0.3, 4.0, 25.0]))
            case "cut":
                with sim.cut_off(target):
                    await asyncio.sleep(chance.choice([0.3, 2.0, 10.0]))
            case "answers":
                sim.hosts[target].client.lose_answers(chance.choice([1, 2]))

    async def _freeze(self, target: str) -> None:
        chance = self._sim.random
        self._sim.freeze(target)
        self._frozen.add(target)
        if chance.random() < 0.7:
            await asyncio.sleep(chance.choice([0.5, 2.0, 8.0]))
            self._sim.thaw(target)
            self._frozen.discard(target)


@pytest.mark.parametrize("seed", range(40))
def test_storm(seed: int) -> None:
    """A dozen faults in any order: every agent ends, and the laws hold. Told again by its seed."""
    chance = random.Random(seed)
    policy = replace(
        chance.choice([FIXED, ELASTIC]), max_restarts=chance.choice([0, 1, 3]), join_timeout_s=60.0
    )
    sim = Sim(
        policy,
        work_s=chance.choice([2.0, 15.0]),
        resumable=chance.choice([False, True]),
        seed=seed,
        latency_s=chance.choice([0.0, 0.002, 0.05]),
    )
    play(sim, Storm(sim).story)
    if sim.tables:
        assert sim.tables[-1].phase.is_final or not sim.exits()
