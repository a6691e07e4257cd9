"""The group store means what torch's TCPStore means, over one shard and over several."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from frun.protocol.storeframe import shard_of
from frun.worker.groupstore import GenerationEnded, GroupStore
from tests.worker.groupstore_hosts import LIMIT_S, Hosts

SHORT = timedelta(milliseconds=60)
Make = Callable[[], Any]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Hosts]:
    """Two hosts in generation 1."""
    hosts = Hosts(tmp_path, 2)
    hosts.begin(1)
    yield hosts
    hosts.close()


def client(hosts: Hosts, index: int, generation: int = 1, **more: Any) -> GroupStore:
    """Return a worker's store on a host."""
    more.setdefault("timeout", timedelta(seconds=LIMIT_S))
    return GroupStore(hosts.paths[index], generation, **more)


def key_on(index: int, count: int = 2) -> str:
    """Return a key that lives on a shard."""
    return next(k for k in map(str, range(1000)) if shard_of(k.encode(), count) == index)


@pytest.fixture(params=["tcp", "one", "three", "scoped", "prefixed"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Return what makes clients of one store: torch's own, and ours over one and three shards."""
    limit = timedelta(seconds=LIMIT_S)
    if request.param == "tcp":
        server = TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
        yield lambda: TCPStore("127.0.0.1", server.port, None, False, limit)
        return
    hosts = Hosts(tmp_path, 1 if request.param == "one" else 3)
    hosts.begin(1)
    made: list[GroupStore] = []

    def build() -> Any:
        scope = "a.1/" if request.param == "scoped" else ""
        made.append(client(hosts, len(made) % len(hosts.stores), scope=scope))
        return PrefixStore("p", made[-1]) if request.param == "prefixed" else made[-1]

    yield build
    hosts.close()


def test_values_are_bytes_of_any_kind(make: Make) -> None:
    """What one sets, another gets: text, bytes, nothing at all, several megabytes."""
    a, b = make(), make()
    for n, value in enumerate(("text", b"\x00\xff", "", os.urandom(3 << 20))):
        a.set(f"k{n}", value)  # a TCPStore does not acknowledge it, so another key each time
        assert b.get(f"k{n}") == (value.encode() if isinstance(value, str) else value)


def test_add_counts_in_decimal(make: Make) -> None:
    """Sums start at 0, may fall, and are readable as text."""
    a, b = make(), make()
    assert [a.add("n", 2), b.add("n", 3), a.add("n", -7)] == [2, 5, -2]
    assert b.get("n") == b"-2"


def test_compare_set(make: Make) -> None:
    """Only the expected value is replaced; an absent key counts as empty."""
    a = make()
    assert a.compare_set("k", "x", "y") == b"x"
    assert not a.check(["k"])
    assert a.compare_set("k", "", "one") == b"one"
    assert a.compare_set("k", "two", "three") == b"one"
    assert a.compare_set("k", "one", "two") == b"two"
    assert a.get("k") == b"two"


def test_check_and_delete(make: Make) -> None:
    """Check wants all keys; delete says whether there was one."""
    a = make()
    a.set("k", "1")
    assert a.check(["k"])
    assert a.check([])
    assert not a.check(["k", "absent", "l", "m"])
    assert a.delete_key("k") is True
    assert a.delete_key("k") is False
    assert not a.check(["k"])


def test_append_and_several_at_once(make: Make) -> None:
    """Append makes or lengthens; multi_set and multi_get keep the order of their keys."""
    a, b = make(), make()
    assert a.has_extended_api()
    a.append("log", "one")
    assert a.get("log") == b"one"  # a TCPStore acknowledges no append
    b.append("log", "two")
    assert b.get("log") == b"onetwo"
    keys = [f"k{n}" for n in range(20)]
    a.multi_set(keys, [f"v{n}" for n in range(20)])
    assert b.multi_get(keys[::-1]) == [f"v{n}".encode() for n in range(19, -1, -1)]
    a.wait(keys)
    a.wait([])


def test_missing_keys_time_out_with_their_name(make: Make) -> None:
    """Get, wait and multi_get end as DistStoreError in time, and say which key is missing."""
    a = make()
    a.set("here", "1")
    with pytest.raises(dist.DistStoreError, match="absent"):
        a.wait(["here", "absent"], SHORT)
    a.set_timeout(SHORT)
    assert a.timeout == SHORT
    with pytest.raises(dist.DistStoreError, match="absent"):
        a.get("absent")
    with pytest.raises(dist.DistStoreError, match="absent"):
        a.multi_get(["here", "absent"])
    assert a.get("here") == b"1"


def test_a_wait_ends_when_the_last_key_comes(make: Make) -> None:
    """A blocked wait over keys of all shards ends with the last of them, whoever sets it."""
    a, b = make(), make()
    keys = [f"k{n}" for n in range(12)]
    with ThreadPoolExecutor(2) as pool:
        waits, gets = pool.submit(a.wait, keys), pool.submit(make().multi_get, keys)
        for key in keys[:-1]:
            b.set(key, "1")
        assert not waits.done()
        b.add(keys[-1], 1)
        waits.result(LIMIT_S)
        assert gets.result(LIMIT_S) == [b"1"] * 12


def test_barrier(make: Make) -> None:
    """Nobody leaves a barrier before all have come."""
    a, b = make(), make()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(a.barrier, "b", 2)
        assert not first.done()
        b.barrier("b", 2)
        first.result(LIMIT_S)


def test_clone_has_a_timeout_of_its_own(make: Make) -> None:
    """A clone sees the same keys; its time-out does not change the original's."""
    a = make()
    twin = a.clone()
    before = a.timeout
    twin.set("k", "1")
    assert a.get("k") == b"1"
    twin.set_timeout(SHORT)
    assert (twin.timeout, a.timeout) == (SHORT, before)


@pytest.mark.parametrize("make", ["tcp", "one", "three", "scoped"], indirect=True)
def test_queues_and_lists(make: Make) -> None:
    """Queues are first in, first out, can be waited for, and are no keys."""
    a, b = make(), make()
    a.queue_push("q", "1")
    assert a.queue_len("q") == 1  # nor a push
    b.queue_push("q", b"\x00")
    assert b.queue_len("q") == 2
    assert a.check(["q"])
    a.wait(["q"])
    assert [a.queue_pop("q"), b.queue_pop("q", False)] == [b"1", b"\x00"]
    assert a.queue_len("q") == 0
    with pytest.raises(dist.QueueEmptyError):
        a.queue_pop("q", False)
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(a.queue_pop, "q")
        b.queue_push("q", "late")
        assert taken.result(LIMIT_S) == b"late"
    a.set_timeout(SHORT)
    with pytest.raises(dist.DistStoreError, match="q"):
        a.queue_pop("q")
    assert (a.num_keys(), a.list_keys()) == (0, [])
    a.multi_set(["x", "y", "z"], ["", "", ""])
    a.wait(["x", "y", "z"])
    assert (b.num_keys(), sorted(b.list_keys())) == (3, ["x", "y", "z"])


def test_adding_to_text_is_refused_and_harms_nobody(two: Hosts) -> None:
    """A key that holds no number is an error of this call only (a TCPStore drops the client)."""
    a = client(two, 0)
    a.set("k", "text")
    with pytest.raises(ValueError, match="k holds no number"):
        a.add("k", 1)
    assert a.get("k") == b"text"


def test_a_key_deleted_during_a_long_wait_is_waited_for_again(two: Hosts) -> None:
    """A get over several keys never answers with a value that is not there."""
    first, second = [k for k in map(str, range(99)) if shard_of(k.encode(), 2) == 0][:2]
    a, b = client(two, 0), client(two, 0)
    b.set(first, "old")
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(a.multi_get, [first, second])
        two.until_waiting(0, 1)
        b.delete_key(first)
        b.set(second, "2")
        b.set(first, "new")
        assert got.result(LIMIT_S) == [b"new", b"2"]


def test_a_blocked_call_does_not_block_other_threads(two: Hosts) -> None:
    """Many threads of one process wait at once on one store object, and others still get on."""
    a = client(two, 0)
    with ThreadPoolExecutor(16) as pool:
        waits = [pool.submit(a.get, f"w{n}") for n in range(16)]
        for n in range(16):
            a.set(f"w{n}", str(n))
        assert [w.result(LIMIT_S) for w in waits] == [str(n).encode() for n in range(16)]


def test_a_forked_child_uses_connections_of_its_own(two: Hosts) -> None:
    """Parent and child may both call after a fork; neither reads the other's answers."""
    a = client(two, 0)
    a.set("k", "1")
    pid = os.fork()
    if pid == 0:
        good = all(a.get("k") == b"1" and a.add("child", 1) == n + 1 for n in range(200))
        os._exit(0 if good else 1)
    assert all(a.add("parent", 1) == n + 1 for n in range(200))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert a.get("child") == b"200"


def test_generation_change_wakes_who_waits(two: Hosts) -> None:
    """Blocked requests, own and forwarded, end with an error that says why; old ones are refused."""
    a = client(two, 0)
    errors: list[BaseException] = []

    def wait_for(index: int) -> None:
        try:
            a.get(key_on(index))
        except GenerationEnded as error:
            errors.append(error)

    threads = [threading.Thread(target=wait_for, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    two.until_waiting(0, 2)
    two.begin(2, 0)
    for thread in threads:
        thread.join(LIMIT_S)
    assert ["generation 1 ended" in str(error) for error in errors] == [True, True]
    with pytest.raises(GenerationEnded, match="generation 1 ended"):
        a.set("k", "1")
    two.begin(2, 1)
    a.generation = 2
    assert (a.num_keys(), a.add("n", 1)) == (0, 1)


def test_requests_wait_for_a_generation_that_has_not_begun(two: Hosts) -> None:
    """Hosts begin one after another; who is early waits, on the own host and on a peer."""
    early = client(two, 0, generation=2)
    with ThreadPoolExecutor(2) as pool:
        own = pool.submit(early.set, key_on(0), "own")
        far = pool.submit(early.set, key_on(1), "far")
        two.until_waiting(0, 2)
        two.begin(2, 0)
        own.result(LIMIT_S)
        two.until_waiting(1, 1)
        assert not far.done()
        two.begin(2, 1)
        far.result(LIMIT_S)
    with pytest.raises(dist.DistStoreError, match="generation 9 did not begin"):
        client(two, 0, generation=9, timeout=SHORT).get("k")


def test_end_refuses_until_the_next_begin(two: Hosts) -> None:
    """After `end` nothing of that generation is answered any more."""
    a = client(two, 0)
    a.set(key_on(0), "1")
    two.do(two.stores[0].end)
    with pytest.raises(GenerationEnded):
        a.get(key_on(0))
    assert two.stores[0].generation == 0


def test_a_lost_agent_ends_calls_at_once(two: Hosts) -> None:
    """The own agent's end, and a peer's, end blocked calls with an error that names the host."""
    a, b = client(two, 0), client(two, 1)
    with ThreadPoolExecutor(2) as pool:
        far, own = pool.submit(a.get, key_on(1)), pool.submit(b.get, key_on(1))
        two.until_waiting(1, 2)
        two.wait(two.stores[1].close())
        with pytest.raises(dist.DistNetworkError):
            own.result(LIMIT_S)
        with pytest.raises(dist.DistNetworkError):
            far.result(LIMIT_S)
    with pytest.raises(dist.DistNetworkError, match=r"host h1 \(127.0.0.1 port"):
        a.get(key_on(1))
    with pytest.raises(dist.DistNetworkError, match="lost the group store"):
        b.set("k", "1")
    a.set(key_on(0), "still")


def test_a_dead_worker_takes_nothing_from_a_queue(two: Hosts) -> None:
    """A wait whose worker is gone is dropped on both hosts, so a value is not lost to it."""
    a = client(two, 0)
    queue = key_on(1)
    pid = os.fork()
    if pid == 0:
        a.queue_pop(queue)
        os._exit(1)
    two.until_waiting(1, 1)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    two.until_waiting(1, 0)
    a.queue_push(queue, "kept")
    assert a.queue_len(queue) == 1
