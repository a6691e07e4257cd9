"""States travel between real ranks over gloo, and arrive bit for bit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from frun.protocol.restore import Plan
from frun.worker.copy import CopyReport, transfer
from frun.worker.messages import CHUNK
from frun.worker.state import Stateful
from tests.worker.ranks import run_ranks
from tests.worker.stateful import Holder, Untouchable, bits, planned

WAYS = pytest.mark.parametrize("read", [True, False], ids=["memory", "group"])


def odd(seed: int) -> dict[str, Any]:
    """Return a state of every kind of tensor that is no plain float matrix."""
    made = torch.Generator().manual_seed(seed)
    numbers = torch.randn(6, 8, generator=made)
    shared = torch.randn(40, generator=made)
    integers = torch.randint(0, 100, (5, 3), generator=made)
    return {
        "bool": integers > 50,
        "kinds": [
            integers.to(kind)
            for kind in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
        ],
        "floats": tuple(
            numbers.to(kind) for kind in (torch.bfloat16, torch.float16, torch.float64)
        ),
        "float8": numbers.to(torch.float8_e4m3fn),
        "complex": torch.complex(numbers, numbers * seed),
        "conjugate": torch.complex(numbers, numbers * seed).conj(),
        "scalar": torch.tensor(float(seed)),
        "empty": torch.empty(0, 3),
        "transposed": numbers.t(),
        "strided": numbers[:, ::2],
        "expanded": torch.randn(4, 1, generator=made).expand(4, 7),
        "channels": torch.randn(2, 3, 4, 5, generator=made).to(memory_format=torch.channels_last),
        "views": {"whole": shared, "half": shared[20:], 7: shared[:3]},
        "tied": [shared, shared.view(40)],
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "large": torch.randn(CHUNK // 4 + 1000, 2, generator=made),
        "large transposed": torch.randn(3, CHUNK // 8 + 5, generator=made).t(),
        "odd bytes": torch.randint(0, 255, (CHUNK + 12345,), generator=made, dtype=torch.uint8),
        "values": {"step": seed, "names": ["a", None, (1, 2.5)]},
    }


@WAYS
@pytest.mark.parametrize("in_place", [True, False], ids=["in-place", "made-anew"])
def test_tensors_of_every_kind(read: bool, in_place: bool) -> None:
    """Each dtype, shape and layout arrives whole, whether the receiver had a place for it or not."""

    def work(rank: int) -> Any:
        holder = Holder(odd(rank + 1) if rank == 0 or in_place else {})
        before = holder.state.get("large")
        report = transfer(planned(2, 1), rank, {"odd": holder}, read_memory=read)
        same = before is None or before.data_ptr() == holder.state["large"].data_ptr()
        wanted = torch.equal(holder.state["large"], odd(1)["large"])
        holder.state = {k: v for k, v in holder.state.items() if k != "large"}
        return (
            report,
            bits(holder.state) == bits({k: v for k, v in odd(1).items() if k != "large"}),
            same,
            wanted,
        )

    (given, *donor), (got, *receiver) = run_ranks(2, work)
    assert donor == [True, True, True]
    assert receiver == [True, True, True]
    assert got.digest == given.digest != ""
    assert got.bytes == given.bytes > 3 * CHUNK
    assert got.way == given.way == ("group+memory" if read else "group")


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "plain": lambda p: torch.optim.SGD(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=3),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "groups": lambda p: torch.optim.RMSprop([{"params": q, "lr": 0.01} for q in p], centered=True),
}


class Training:
    """A small model, its optimizer and everything around it."""

    def __init__(self, seed: int, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
        self.optimizer = make(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=2)
        self.losses: list[float] = []

    def objects(self) -> dict[str, Stateful]:
        """Return what is given to restore."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
        }

    def run(self, begin: int, end: int) -> None:
        """Train some steps on data that follows from the step."""
        for step in range(begin, end):
            data = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))

            def closure(data: torch.Tensor = data) -> torch.Tensor:
                self.optimizer.zero_grad()
                loss: torch.Tensor = self.model(data).square().mean()
                torch.autograd.backward(loss)
                return loss.detach()

            self.scaler.scale(torch.ones(1))
            self.losses.append(float(self.optimizer.step(closure)))  # type: ignore[arg-type]
            self.scheduler.step()
            self.scaler.update(float(step + 1))

    def bits(self) -> Any:
        """Return all states, comparable."""
        return {name: bits(stateful.state_dict()) for name, stateful in self.objects().items()}


@WAYS
@pytest.mark.parametrize("own_steps", [0, 5], ids=["new", "has-another-state"])
def test_a_receiver_trains_on_as_its_donor(read: bool, own_steps: int) -> None:
    """State that the optimizer never made, or made otherwise, arrives; three steps later both are equal."""

    def work(rank: int) -> Any:
        steps = own_steps if rank == 1 else 3
        return {name: _story(rank, make, read, steps) for name, make in OPTIMIZERS.items()}

    donor, newcomer = run_ranks(2, work)
    for name in OPTIMIZERS:
        before, after, later, losses = donor[name]
        assert after == before, name
        assert newcomer[name][1:] == (before, later, losses), name


def _story(rank: int, make: Callable[[Any], torch.optim.Optimizer], read: bool, steps: int) -> Any:
    training = Training(rank, make)
    training.run(0, steps)
    before = training.bits()
    transfer(planned(2, 1), rank, training.objects(), read_memory=read)
    after = training.bits()
    training.run(3, 6)
    return before, after, training.bits(), training.losses[-3:]


def test_state_in_another_dtype_than_the_parameters() -> None:
    """torch casts an optimizer's state to the parameter's dtype when it loads; here it stays what it was."""

    def work(rank: int) -> Any:
        model = nn.Linear(3, 3, dtype=torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if rank == 0:
            for parameter in model.parameters():
                optimizer.state[parameter] = {
                    "master": torch.randn(parameter.shape, dtype=torch.float64),
                    "seen": torch.arange(3),
                    "label": "exact",
                }
        transfer(planned(2, 1), rank, {"optimizer": optimizer})
        return bits(optimizer.state_dict())

    donor, newcomer = run_ranks(2, work)
    assert newcomer == donor
    assert donor["state"][0]["label"] == "exact"


def test_wrapped_or_not_a_model_is_the_same() -> None:
    """One rank passes its DistributedDataParallel object, the other the model inside."""

    def work(rank: int) -> Any:
        torch.manual_seed(5)
        ddp = DistributedDataParallel(nn.Linear(4, 4))
        with torch.no_grad():
            ddp.module.weight.add_(rank)
        transfer(planned(2, 1), rank, {"model": ddp if rank == 0 else ddp.module})
        return bits(ddp.state_dict())

    donor, newcomer = run_ranks(2, work)
    assert newcomer == donor


def test_tied_weights_travel_once_and_stay_tied() -> None:
    """Two names of one memory are one copy, and one memory afterwards."""

    def work(rank: int) -> Any:
        model = nn.ModuleDict({"one": nn.Linear(64, 64), "two": nn.Linear(64, 64)})
        model["two"].weight = model["one"].weight
        optimizer = torch.optim.Adam(model.parameters())
        if rank == 0:
            torch.autograd.backward([parameter.sum() for parameter in model.parameters()])
            optimizer.step()
        report = transfer(planned(2, 1), rank, {"model": model, "optimizer": optimizer})
        return report.bytes, bits(model.state_dict()), model["one"].weight is model["two"].weight

    donor, newcomer = run_ranks(2, work)
    assert newcomer == donor
    assert newcomer[0] == 3 * (64 * 64 + 64 + 64) * 4 + 3 * 4
    assert newcomer[2]


@WAYS
def test_two_donors_and_three_receivers_at_once(read: bool) -> None:
    """Five ranks; donors serve two and one, and a sixth keeps its state and is asked for nothing."""

    def work(rank: int) -> Any:
        plan = planned(6, 1, 3, 5)
        busy = plan.donor_of(rank) is not None or plan.receivers_of(rank)
        value = torch.full((CHUNK // 2,), 1.5 if rank in (0, 2, 4) else float(rank))
        holder: Stateful = Holder({"a": value, "b": torch.ones(3) * 7}) if busy else Untouchable()
        report = transfer(plan, rank, {"x": holder}, read_memory=read)
        fine = bool((value == 1.5).all())
        return plan.donor_of(rank), fine, report.digest

    answers = run_ranks(6, work)
    assert [answer[0] for answer in answers] == [None, 0, None, 2, None, 4]
    assert all(answer[1] for answer in answers)
    assert len({answer[2] for answer in answers}) == 1


@WAYS
def test_one_donor_serves_several(read: bool) -> None:
    """Three newcomers and one survivor: the survivor gives to all of them at once."""

    def work(rank: int) -> Any:
        holder = Holder({"a": torch.full((CHUNK,), 3 if rank == 0 else 0, dtype=torch.int16)})
        transfer(planned(4, 1, 2, 3), rank, {"x": holder}, read_memory=read)
        return bool((holder.state["a"] == 3).all())

    assert run_ranks(4, work) == [True] * 4


def test_five_ranks_two_survivors() -> None:
    """Two donors and three receivers: one donor has two of them."""

    def work(rank: int) -> Any:
        plan = planned(5, 2, 3, 4)
        holder = Holder({"a": torch.full((CHUNK,), 3 if rank < 2 else 0, dtype=torch.int16)})
        transfer(plan, rank, {"x": holder}, read_memory=False)
        return plan.donor_of(rank), bool((holder.state["a"] == 3).all())

    answers = run_ranks(5, work)
    assert answers == [(None, True), (None, True), (0, True), (1, True), (0, True)]


def test_nobody_is_asked_when_nobody_copies() -> None:
    """With everybody at the target the objects are left alone."""

    def work(rank: int) -> CopyReport:
        return transfer(planned(2), rank, {"x": Untouchable()})

    assert [(r.bytes, r.digest, r.way) for r in run_ranks(2, work)] == [(0, "", "")] * 2


def test_a_part_of_the_group() -> None:
    """A transfer may be among the ranks of a sub-group; the plan names global ranks."""

    def work(rank: int) -> Any:
        group = dist.new_group([1, 2])
        if rank == 0:
            return 9.0
        plan = planned(3, 0, 2)
        value = torch.full((5,), 9.0 if rank == 1 else 0.0)
        transfer(_only(plan, 2), rank, {"x": Holder({"a": value})}, group)
        return float(value[0])

    assert run_ranks(3, work) == [9.0, 9.0, 9.0]


def _only(plan: Plan, receiver: int) -> Plan:
    return replace(plan, actions=tuple(a for a in plan.actions if a.rank in (1, receiver)))


@WAYS
def test_extra_memory_is_one_buffer(read: bool) -> None:
    """A state of 160 MB is received, a part of it through the buffer, with less than 40 MB on top."""

    def work(rank: int) -> int:
        plain = torch.full((32 << 20,), float(rank))
        turned = torch.full((1024, 8192), float(rank)).t()
        before = _peak(reset=True)
        transfer(planned(2, 1), rank, {"x": Holder({"a": plain, "b": turned})}, read_memory=read)
        assert float(plain[-1]) == float(turned[-1, -1]) == 0.0
        return _peak() - before

    for extra in run_ranks(2, work):
        assert extra < 40 << 20


def _peak(*, reset: bool = False) -> int:
    """Return the most memory this process has had, in bytes."""
    if reset:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10
