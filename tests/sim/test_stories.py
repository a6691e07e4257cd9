"""Whole jobs, told from the command to the end."""

import asyncio
from dataclasses import replace

from frun.protocol.policy import Policy
from frun.protocol.records import Phase
from tests.sim.cluster import TTL_S, Sim, play

FIXED = Policy(min_hosts=3, max_hosts=3, max_restarts=0, replace_timeout_s=30.0)
ELASTIC = Policy(min_hosts=1, max_hosts=4, max_restarts=0, last_call_s=5.0, replace_timeout_s=3.0)


def phases(sim: Sim) -> list[tuple[int, str]]:
    """Return (generation, phase) of every table written, in order."""
    return [(table.generation, table.phase.value) for table in sim.tables]


def test_three_hosts_form_train_and_end() -> None:
    """All hosts there: one generation, four tables, everybody ends with 0, nothing stays in etcd."""

    async def story(sim: Sim) -> None:
        sim.add("c", "a", "b")
        assert await sim.end() is Phase.DONE

    sim = play(Sim(FIXED), story)
    assert phases(sim) == [(1, "gather"), (1, "recover"), (1, "run"), (1, "done")]
    assert [slot.host for slot in sim.tables[-1].slots] == ["a", "b", "c"]
    assert sim.exits() == {"a": 0, "b": 0, "c": 0}


def test_the_table_follows_the_last_host_at_once() -> None:
    """Joining waits for watches, not for a period: no simulated time passes but that of messages."""

    async def story(sim: Sim) -> None:
        sim.add("a", "b")
        await asyncio.sleep(17.0)
        sim.add("c")
        await sim.until(lambda: sim.table is not None and sim.table.phase is Phase.RUN)
        assert sim.now - 17.0 < 0.1
        assert await sim.end() is Phase.DONE

    play(Sim(FIXED, latency_s=0.005), story)


def test_fifty_hosts() -> None:
    """Fifty hosts come at once, lose one, take in the spare and end."""

    async def story(sim: Sim) -> None:
        names = [f"n{index}" for index in range(51)]
        sim.add(*names, nproc=1)
        await sim.running(1)
        sim.kill("n17")
        await sim.running(2)
        assert await sim.end() is Phase.DONE

    policy = replace(FIXED, min_hosts=50, max_hosts=50)
    sim = play(Sim(policy, work_s=10.0), story)
    hosts = [slot.host for slot in sim.tables[-1].slots]
    assert hosts == [f"n{index}" if index != 17 else "n50" for index in range(50)]
    assert set(sim.exits().values()) == {0}


def test_a_lost_host_and_a_spare() -> None:
    """A spare takes the ranks of a lost host about one lease time after it died, and needs no restart."""

    async def story(sim: Sim) -> None:
        sim.add("a", "b", "c")
        await sim.until(lambda: len(sim.registered) == 3)
        sim.add("s")
        await sim.running(1)
        victim = next(name for name in "abc" if name != sim.leader)
        died = sim.now
        sim.kill(victim)
        await sim.running(2)
        assert sim.now - died < TTL_S + 1.0
        assert sim.table is not None
        assert [slot.host for slot in sim.table.slots].index("s") == "abc".index(victim)
        assert await sim.end() is Phase.DONE

    sim = play(Sim(FIXED), story)
    assert sim.tables[-1].restarts == 0


def test_the_leaders_host_is_lost() -> None:
    """A new leader knows that its predecessor died: no second lease time passes."""

    async def story(sim: Sim) -> None:
        sim.add("a", "b", "c", "s")
        await sim.running(1)
        died = sim.now
        sim.kill(sim.leader)
        await sim.running(2)
        assert sim.now - died < TTL_S + 1.0
        assert await sim.end() is Phase.DONE

    play(Sim(FIXED), story)


def test_nobody_replaces_a_lost_host() -> None:
    """After the replace timeout the job fails; every host says so with 1."""

    async def story(sim: Sim) -> None:
        sim.add("a", "b", "c")
        await sim.running(1)
        sim.kill("b")
        assert await sim.end() is Phase.FAILED

    sim = play(Sim(FIXED), story)
    assert sim.exits() == {"a": 1, "c": 1}
    assert "stayed vacant for 30 s" in sim.tables[-1].reason


def test_an_agent_started_again_takes_its_predecessors_place() -> None:
    """The world waits for it, and it gets the ranks that are vacant."""

    async def story(sim: Sim) -> None:
        sim.add("a", "b", "c")
        await sim.running(1)
        sim.kill("b")
        await sim.until(lambda: sim.table is not None and sim.table.phase is Phase.GATHER)
        await asyncio.sleep(10.0)
        sim.add("b2")
        await sim.running(2)
        assert sim.table is not None
        assert [slot.host for slot in sim.table.slots] == ["a", "b2", "c"]
        assert await sim.end() is Phase.DONE

    play(Sim(FIXED), story)


def test_an_elastic_world_shrinks_and_grows() -> None:
    """A lost host leaves the world smaller; a new one makes it larger again."""

    async def story(sim: Sim) -> None:
        sim.add("a", "b", "c", "d")
        await sim.running(1)
        sim.kill("c")
        await sim.running(2)
        assert sim.table is not None
        assert [slot.host for slot in sim.table.slots] == ["a", "b", "d"]
        sim.add("e")
        await sim.running(3)
        assert [slot.host for slot in sim.table.slots] == ["a", "b", "d", "e"]
        assert await sim.end() is Phase.DONE

    sim = play(Sim(ELASTIC), story)
    assert sim.exits() == {"a": 0, "b": 0, "d": 0, "e": 0}


def test_a_worker_fails_within_and_over_the_budget() -> None:
    """Two restarts are allowed, the third failure ends the job; its cause is the kill, not the victims."""

    async def story(sim: Sim) -> None:
        sim.add("a", "b", "c")
        for generation in (1, 2, 3):
            await sim.running(generation)
            assert sim.hosts["b"].workers.kill_one()
        assert await sim.end() is Phase.FAILED

    sim = play(Sim(replace(FIXED, max_restarts=2), latency_s=0.005), story)
    assert sim.exits() == {"a": 1, "b": 1, "c": 1}
    last = sim.tables[-1]
    assert (last.restarts, last.generation) == (2, 3)
    assert last.failure is not None
    assert (last.failure.host, last.failure.exit_code) == ("b", -9)


def test_a_host_that_fails_for_good_leaves_an_elastic_world() -> None:
    """R62: the others go on, and it ends with 1."""

    async def story(sim: Sim) -> None:
        sim.add("a", "b", "c", "d")
        await sim.running(1)
        sim.hosts["b"].workers.kill_one()
        assert await sim.end() is Phase.DONE

    sim = play(Sim(ELASTIC), story)
    assert sim.exits() == {"a": 0, "b": 1, "c": 0, "d": 0}
    assert sim.tables[-1].dropped == ("b",)


def test_a_resumable_job_keeps_its_processes() -> None:
    """Of six workers only the one that died is started again."""

    async def story(sim: Sim) -> None:
        sim.add("a", "b", "c")
        await sim.running(1)
        sim.hosts["b"].workers.kill_one()
        await sim.running(2)
        assert await sim.end() is Phase.DONE

    sim = play(Sim(FIXED, resumable=True), story)
    assert {name: host.workers.starts for name, host in sim.hosts.items()} == {
        "a": 2,
        "b": 3,
        "c": 2,
    }


def test_two_hosts_at_once() -> None:
    """Two hosts die in the same moment: one generation replaces both."""

    async def story(sim: Sim) -> None:
        sim.add("a", "b", "c", "s", "t")
        await sim.running(1)
        doomed = [slot.host for slot in sim.tables[-1].slots][:2]
        for name in doomed:
            sim.kill(name)
        assert await sim.end() is Phase.DONE

    sim = play(Sim(FIXED), story)
    assert sim.tables[-1].generation <= 3
    assert sim.tables[-1].restarts == 0


def test_a_signal_takes_a_host_out_at_once_and_for_good() -> None:
    """The place is vacant before its workers have stopped, and the host does not come back meanwhile."""

    async def story(sim: Sim) -> None:
        sim.add("a", "c")
        sim.add("b", stop_s=4.0)
        await sim.running(1)
        sim.add("s")
        await sim.until(lambda: "s" in sim.registered)
        agent = sim.hosts["b"].agent
        assert agent is not None
        agent.interrupt(15)
        begun = sim.now
        await sim.until(lambda: "b" not in sim.registered)
        assert sim.now - begun < 0.1
        while sim.hosts["b"].outcome is None:
            assert "b" not in sim.registered, "registered again while it leaves"
            await asyncio.sleep(0.01)
        assert sim.now - begun > 3.9
        assert await sim.end() is Phase.DONE

    sim = play(Sim(FIXED), story)
    assert sim.exits() == {"a": 0, "b": 1, "c": 0, "s": 0}
    assert sim.tables[-1].generation == 2


def test_everybody_is_interrupted() -> None:
    """Ctrl-C on all hosts ends all with 1 and leaves nothing in etcd."""

    async def story(sim: Sim) -> None:
        sim.add("a", "b", "c")
        await sim.running(1)
        for host in sim.hosts.values():
            assert host.agent is not None
            host.agent.interrupt(2)
        await sim.end()

    sim = play(Sim(FIXED), story)
    assert sim.exits() == {"a": 1, "b": 1, "c": 1}
