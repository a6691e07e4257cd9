"""Groups of real gloo processes are ended from a side thread and made again in place."""

import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from frun.worker.groupstore import GenerationEnded, GroupStore
from frun.worker.inject import install
from tests.worker.gloo_ranks import (
    GROUP_TIMEOUT,
    LIMIT_S,
    Member,
    Ranks,
    descriptors,
    store_server,
    threads,
    until_blocked,
)
from tests.worker.groupstore_hosts import Hosts

WORLD = 4
CYCLES = 12


@pytest.fixture
def port() -> Iterator[int]:
    """A plain TCPStore of torch, held by a process of the test."""
    with store_server() as port:
        yield port


def total(group: object = None) -> float:
    """Return the sum of ones over a group, which is its size if it works."""
    one = torch.ones(1)
    dist.all_reduce(one, group=group)
    return float(one)


def train(member: Member, port: int) -> None:
    """Train for ever; on a pause let the groups go and begin again in the next generation."""
    took_teardown = kept = 0.0
    while True:
        error: BaseException | None = None
        try:
            _generation(member, port, took_teardown, kept)
        except RuntimeError as caught:
            error = caught
        assert error is not None
        member.until_paused()
        error.__traceback__ = None
        del error
        done = member.groups.teardown()
        took_teardown, kept = done.took_s, done.kept


def _generation(member: Member, port: int, took_teardown: float, kept: float) -> None:
    started = time.monotonic()
    member.init(port)
    init_s = time.monotonic() - started
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ddp = DistributedDataParallel(model)
    said = False
    while True:
        loss = ddp(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert total(pairs[member.rank // 2]) == 2
        assert total(mesh.get_group("replica")) == total(mesh.get_group("shard")) == 2
        dist.barrier()
        if not said:
            said = True
            member.say(
                generation=member.generation,
                unblock_s=member.unblock_s,
                unblocked=member.unblocked,
                teardown_s=took_teardown,
                kept=kept,
                init_s=init_s,
                descriptors=descriptors(),
                threads=threads(),
            )


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_many_faults_in_a_row(port: int, how: str) -> None:
    """Survivors go on in their processes after each fault, and nothing grows in them."""
    ranks = Ranks(lambda member: train(member, port), WORLD)
    said = []
    try:
        first = [ranks.hear(rank) for rank in range(WORLD)]
        for cycle in range(CYCLES):
            victim = 2 + cycle % 2
            survivors = [rank for rank in range(WORLD) if rank != victim]
            generation = cycle + 2
            frozen = 0
            if how == "killed":
                ranks.kill(victim)
            else:
                frozen = ranks.freeze(victim)
            ranks.tell(generation, *survivors)
            ranks.start(victim, generation)
            facts = [ranks.hear(rank) for rank in range(WORLD)]
            if frozen:
                os.kill(frozen, signal.SIGKILL)
                os.waitpid(frozen, 0)
            assert [each["generation"] for each in facts] == [generation] * WORLD
            said += [facts[rank] for rank in survivors]
            last = facts
    finally:
        ranks.close()
    for name in ("unblock_s", "teardown_s", "init_s"):
        values = [1000 * each[name] for each in said]
        print(  # noqa: T201 - measured; shown with -s
            f"{how} {name}: median {statistics.median(values):.1f} ms, worst {max(values):.1f} ms"
        )
    assert not any(each["kept"] for each in said)
    for rank in (0, 1):
        for name in ("descriptors", "threads"):
            assert last[rank][name] <= first[rank][name], (name, first[rank], last[rank])
    assert max(each["unblock_s"] for each in said) < LIMIT_S / 2


class Vanishing(Store):
    """A store for a rank that is lost in the middle of meeting the others.

    It publishes the address on which it listens, and then stops for ever where it would have
    asked for the others' addresses.
    """

    def __init__(self, inner: Store, member: Member) -> None:
        """Publish in `inner`, and tell the test when that is done."""
        super().__init__()
        self._inner = inner
        self._member = member

    def set(self, key: str, value: Any) -> None:
        """Publish."""
        self._inner.set(key, value)

    def wait(self, keys: object, timeout: object = None) -> None:
        """Vanish."""
        self._member.say(published=True)
        self._member.paused.wait()

    def get(self, key: str) -> bytes:
        """Vanish."""
        self.wait(key)
        return b""


def released(member: Member) -> float:
    """Wait for the pause that freed us; return how long the unblocking took, in seconds."""
    member.until_paused()
    return member.unblock_s


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_unblocked_while_a_group_is_being_made(tmp_path: Path, how: str) -> None:
    """A peer that is lost after it published its address keeps nobody, whoever was to connect."""

    hosts = Hosts(tmp_path, 1)
    hosts.begin(1)
    kept: list[Store] = []

    def story(member: Member) -> None:
        while True:
            store: Store = GroupStore(hosts.paths[0], member.generation, timeout=GROUP_TIMEOUT)
            lost = member.rank == 2 and member.generation == 1
            store = Vanishing(store, member) if lost else store
            kept.append(store)  # C++ keeps only its half
            try:
                dist.init_process_group(
                    "gloo",
                    store=store,
                    rank=member.rank,
                    world_size=3,
                    timeout=GROUP_TIMEOUT,
                )
                assert total() == 3
                break
            except RuntimeError as error:
                error.__traceback__ = None
            member.say(unblock_s=released(member))
            member.groups.teardown()
        member.say(generation=member.generation, descriptors=descriptors(), threads=threads())
        member.paused.wait()

    ranks = Ranks(story, 3)
    try:
        assert ranks.hear(2) == {"published": True}
        for rank in (0, 1):
            until_blocked(ranks.pids[rank])
        if how == "killed":
            ranks.kill(2)
        else:
            frozen = ranks.freeze(2)
        ranks.tell(2, 0, 1)
        hosts.begin(2)  # as the agents do: who waits in the store of generation 1 gets an error
        assert max(ranks.hear(rank)["unblock_s"] for rank in (0, 1)) < LIMIT_S / 2
        ranks.start(2, 2)
        assert {ranks.hear(rank)["generation"] for rank in range(3)} == {2}
        if how == "frozen":
            os.kill(frozen, signal.SIGKILL)
            os.waitpid(frozen, 0)
    finally:
        ranks.close()
        hosts.close()


def test_unblocked_in_a_barrier_and_with_nothing_to_unblock(port: int) -> None:
    """A barrier is left at once; unblocking again, or without groups, does no harm."""

    def story(member: Member) -> None:
        nothing = member.groups.unblock()
        assert nothing.count == 0
        with pytest.raises(GenerationEnded, match="were ended by frun"):
            member.init(port)
        assert member.groups.teardown().count == 0
        member.init(port)
        assert total() == 2
        member.say(ready=True)
        if member.rank == 1:
            member.paused.wait()
        else:
            with pytest.raises(RuntimeError):
                dist.barrier()
            member.until_paused()
            again = member.groups.unblock()
            assert again.took_s < LIMIT_S / 2
            with pytest.raises(GenerationEnded, match="were ended by frun"):
                dist.new_group([0])
            torn = member.groups.teardown()
            assert (torn.count, torn.kept) == (1, 0)
            assert not dist.is_initialized()
        member.say(done=True)

    ranks = Ranks(story, 2)
    try:
        assert all(ranks.hear(rank) == {"ready": True} for rank in range(2))
        until_blocked(ranks.pids[0])
        ranks.tell(2, 0)
        assert ranks.hear(0) == {"done": True}
    finally:
        ranks.close()


def test_torch_is_left_as_before_its_first_group(port: int) -> None:
    """Names, counts, tables and the exception hook are those of a process that never had groups."""

    def story(member: Member) -> None:
        hook = sys.excepthook
        for _ in range(3):
            member.init(port)
            names = [c10d._world.pg_names[dist.new_group([0])] for _ in range(2)]
            assert sys.excepthook is not hook
            # left to the script: half of the groups, then everything
            dist.destroy_process_group()
            assert sys.excepthook is hook
            member.scope += "x"
            member.init(port)
            names += [c10d._world.pg_names[dist.new_group([0])] for _ in range(2)]
            assert names[:2] == names[2:]
            torn = member.groups.teardown()
            assert (torn.count, torn.kept) == (3, 0)
            assert sys.excepthook is hook
            assert c10d._world.group_count == 0
            assert not c10d._world.pg_map
            assert not c10d._world.tags_to_pg
            member.scope += "x"
        member.groups.uninstall()
        assert "frun" not in dist.init_process_group.__code__.co_filename
        member.say(done=True)

    ranks = Ranks(story, 1)
    try:
        assert ranks.hear(0) == {"done": True}
    finally:
        ranks.close()


def test_the_default_group_is_made_again_with_the_scripts_arguments(tmp_path: Path) -> None:
    """Time-out and backend are kept; rank, size and store are those of the new generation."""
    hosts = Hosts(tmp_path, 1)
    hosts.begin(1)

    def story(member: Member) -> None:
        os.environ.update(
            FRUN_STORE=hosts.paths[0],
            FRUN_GENERATION="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="1",
            RANK=str(member.rank),
            WORLD_SIZE="2",
        )
        rendezvous = install(os.environ)
        assert rendezvous is not None
        assert not member.groups.remake()
        dist.init_process_group(
            "cpu:gloo", rank=member.rank, world_size=2, timeout=timedelta(minutes=7)
        )
        assert member.groups.has_default
        assert total() == 2
        member.say(ready=True)
        member.until_paused()
        member.groups.teardown()
        rendezvous.generation = 2
        assert member.groups.remake()
        assert total() == 2
        group = dist.group.WORLD
        assert group is not None
        backend = group._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timedelta(minutes=7)
        member.say(done=True)
        member.until_paused()

    ranks = Ranks(story, 2)
    try:
        assert all(ranks.hear(rank) == {"ready": True} for rank in range(2))
        ranks.tell(2, 0, 1)
        hosts.until_parked(2)
        hosts.begin(2)
        assert all(ranks.hear(rank) == {"done": True} for rank in range(2))
    finally:
        ranks.close()
        hosts.close()
