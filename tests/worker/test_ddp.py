"""Recovered runs of three ranks end bitwise as undisturbed ones, because DDP's buckets are kept."""

import hashlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from frun.worker.ddp import Layout, Layouts
from tests.worker.gloo_ranks import Member, Ranks, store_server

WORLD = 3
STEPS = 9
KILLS = {1: (2, 4), 2: (0, 7)}
"""Generation: the rank that dies in it, and the step in which it does."""


class Net(nn.Module):
    """Layers of different sizes that are used in another order than they were registered in."""

    def __init__(self) -> None:
        """Register the first layer to be used in the middle."""
        super().__init__()
        self.last = nn.Linear(17, 3)
        self.first = nn.Linear(5, 23)
        self.middle = nn.Linear(23, 17)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the output of all layers."""
        hidden: torch.Tensor = self.middle(torch.tanh(self.first(batch)))
        return self.last(torch.tanh(hidden))  # type: ignore[no-any-return]


class Run:
    """A training run of one rank, with the state that a survivor keeps."""

    def __init__(self, member: Member, port: int, *, keep: bool, early: bool) -> None:
        """Train over the store at `port`; `keep` the buckets; make DDP `early`, before restore."""
        self.member = member
        self.port = port
        self.keep = keep
        self.early = early
        self.step = 0
        self.layouts = Layouts(lambda: self.step)
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.3, momentum=0.9)
        if keep:
            assert self.layouts.install()

    def to_the_end(self, kills: dict[int, tuple[int, int]]) -> str:
        """Train to the last step through all faults; return a digest of the final state."""
        while True:
            try:
                self._entry(kills)
            except RuntimeError as error:
                self.member.until_paused()
                error.__traceback__ = None
            else:
                break
            self.member.groups.teardown()
        parts = [*self.model.parameters(), *_momenta(self.model, self.optimizer)]
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part.detach().numpy().tobytes())
        return digest.hexdigest()

    def _entry(self, kills: dict[int, tuple[int, int]]) -> None:
        self.member.init(self.port)
        self.layouts.begin()
        self.layouts.skip_sync = self.member.generation > 1
        ddp = self._wrap() if self.early else None
        self._restore()
        ddp = ddp or self._wrap()
        self.member.say(generation=self.member.generation)
        while self.step < STEPS:
            if kills.get(self.member.generation) == (self.member.rank, self.step):
                os.kill(os.getpid(), signal.SIGKILL)
            torch.manual_seed(1000 * self.step + self.member.rank)
            loss = ddp(torch.randn(7, 5)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step += 1

    def _wrap(self) -> DistributedDataParallel:
        return DistributedDataParallel(self.model, bucket_cap_mb=0.001)

    def _restore(self) -> None:
        """Take step, layouts, parameters and momenta from a rank that is furthest."""
        facts: list[Any] = [None] * WORLD
        dist.all_gather_object(facts, (self.step, self.layouts.recorded()))
        target = max(step for step, _ in facts)
        source = next(rank for rank in range(WORLD) if facts[rank][0] == target)
        self.step = target
        if target == 0:
            return
        if self.keep:
            self.layouts.use(facts[source][1], target)
        with torch.no_grad():
            for part in (*self.model.parameters(), *_momenta(self.model, self.optimizer)):
                dist.broadcast(part, source)


def _momenta(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        yield state["momentum_buffer"]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A plain TCPStore, held by a process of its own."""
    with store_server() as number:
        yield number


_PREFIXES = iter(range(100))


def digests(port: int, kills: dict[int, tuple[int, int]], **how: bool) -> set[str]:
    """Run all ranks, replace those that die, and return the digests of their final states."""
    scope = f"{next(_PREFIXES)}/"

    def story(member: Member) -> None:
        member.scope = scope
        run = Run(member, port, keep=how["keep"], early=how["early"])
        member.say(digest=run.to_the_end(kills))
        member.paused.wait()  # ends with the test; nobody's connection ends before

    ranks = Ranks(story, WORLD)
    try:
        for generation in range(1, len(kills) + 1):
            for rank in range(WORLD):
                assert ranks.hear(rank)["generation"] == generation
            victim, _ = kills[generation]
            os.waitpid(ranks.pids[victim], 0)
            ranks.tell(generation + 1, *(rank for rank in range(WORLD) if rank != victim))
            ranks.start(victim, generation + 1)
        for rank in range(WORLD):
            assert "generation" in ranks.hear(rank)
        return {ranks.hear(rank)["digest"] for rank in range(WORLD)}
    finally:
        ranks.close()


@pytest.fixture(scope="module")
def undisturbed(port: int) -> set[str]:
    """The final state of a run in which nothing happens, with DDP as it is."""
    found = digests(port, {}, keep=False, early=False)
    assert len(found) == 1
    return found


@pytest.mark.parametrize("early", [False, True], ids=["after restore", "before restore"])
def test_recovered_runs_are_bitwise_equal(port: int, undisturbed: set[str], early: bool) -> None:
    """Two of three ranks die, rank 0 too, and the parameters and momenta end the same."""
    assert digests(port, KILLS, keep=True, early=early) == undisturbed


def test_without_kept_buckets_the_last_bits_differ(port: int, undisturbed: set[str]) -> None:
    """The proof above is one: with DDP as it is, the same faults change the result."""
    assert digests(port, KILLS, keep=False, early=False) != undisturbed


def test_a_layout_is_not_used_before_its_step() -> None:
    """A step that is done again from its beginning runs on the buckets that it began with."""
    layouts = Layouts(lambda: 0)
    layouts.use([(0, Layout(buckets=((0,),), since=3))], step=2)
    assert layouts.recorded() == ()
    layouts.use([(0, Layout(buckets=((0,),), since=3))], step=3)
    assert layouts.recorded() == ((0, Layout(buckets=((0,),), since=3)),)


@pytest.mark.parametrize(("backwards", "since"), [(1, 1), (2, 1)], ids=["plain", "accumulated"])
def test_a_layout_counts_from_the_first_whole_step(port: int, backwards: int, since: int) -> None:
    """Buckets rebuilt in the middle of accumulated gradients count from the next step on."""

    def story(member: Member) -> None:
        member.scope = f"since{backwards}/"
        run = Run(member, port, keep=True, early=False)
        member.init(port)
        ddp = run._wrap()
        for _ in range(2):
            for _ in range(backwards):
                ddp(torch.randn(7, 5)).sum().backward()
            if not run.step:
                first = run.layouts.recorded()
            run.step += 1
        run.layouts.uninstall()
        number, layout = run.layouts.recorded()[0]
        member.say(first=len(first), number=number, since=layout.since)

    ranks = Ranks(story, 1)
    try:
        assert ranks.hear(0) == {"first": backwards - 1, "number": 0, "since": since}
    finally:
        ranks.close()
