"""Faults that a worker does to itself, in this process as far as it survives them."""

from collections.abc import Callable

import pytest
import torch

from frun.protocol.channel import Fact, Inject, Injected, Withdraw
from frun.protocol.faults import Place
from frun.worker.drills import DrillError, Drills


class Worker:
    """A model, an optimizer, and drills that hook them."""

    def __init__(self, *, resumable: bool = True) -> None:
        self.step = 0
        self.told: list[Fact] = []
        self.drills = Drills(
            self.told.append,
            step=lambda: self.step,
            generation=lambda: 4,
            is_resumable=lambda: resumable,
        )
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.undo = self.drills.attach([self.model], [self.optimizer])

    def train(self) -> None:
        """Do one step."""
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()
        self.step += 1

    def order(self, kind: str, *, step: int = -1, place: str = "", duration_s: float = 0.0) -> None:
        """Ask for a fault, as the agent does."""
        argument = "0.05" if kind == "slow" else ""
        self.drills.obey(
            Inject(
                id=1, kind=kind, argument=argument, step=step, place=place, duration_s=duration_s
            )
        )

    @property
    def problems(self) -> list[str]:
        """What was said of the faults; an empty text for each that happened."""
        return [fact.problem for fact in self.told if isinstance(fact, Injected)]


@pytest.mark.parametrize("place", [Place.FORWARD, Place.BACKWARD, Place.GATE, Place.UPDATE])
def test_a_fault_happens_at_its_place_and_step(place: Place) -> None:
    """Once, and what was done until there was done."""
    worker = Worker()
    worker.order("exception", step=2, place=place.value)
    worker.train()
    before = [each.detach().clone() for each in worker.model.parameters()]
    worker.train()
    after = [each.detach().clone() for each in worker.model.parameters()]
    assert not torch.equal(before[0], after[0])
    with pytest.raises(DrillError, match="an exception on purpose"):
        worker.train()
    assert worker.told == [Injected(id=1, generation=4, step=2, problem="")]
    has_gradient = worker.model.weight.grad is not None
    assert has_gradient is (place in (Place.GATE, Place.UPDATE))
    moved = not torch.equal(after[0], worker.model.weight.detach())
    assert moved is (place is Place.UPDATE)
    worker.train()


def test_a_step_that_is_over_is_refused() -> None:
    """The order may have come too late."""
    worker = Worker()
    worker.train()
    worker.order("exception", step=0)
    worker.train()
    assert worker.problems == ["step 0 was over before"]


def test_a_fault_can_be_withdrawn() -> None:
    """Nothing happens then, and nothing is said."""
    worker = Worker()
    worker.order("exception", step=1)
    worker.drills.obey(Withdraw(id=1))
    worker.train()
    worker.train()
    assert worker.told == []


def test_a_script_that_is_not_resumable_has_no_places() -> None:
    """It is refused at once."""
    worker = Worker(resumable=False)
    worker.order("hang")
    assert worker.problems == ["it needs a place in a step, and the script is not resumable"]


@pytest.mark.parametrize("place", ["", "backward", "gate"])
def test_nan(place: str) -> None:
    """A gradient becomes NaN, and with it a parameter."""
    worker = Worker()
    worker.order("nan", place=place)
    worker.train()
    assert worker.problems == [""]
    assert worker.model.weight.isnan().any()
    assert not worker.model.bias.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_bitflip(dtype: torch.dtype) -> None:
    """One bit of one element differs from what training makes of it."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    worker = Worker()
    worker.model.to(dtype)
    before = [each.detach().clone() for each in worker.model.parameters()]
    worker.order("bitflip", place="load")
    worker.drills.at(Place.LOAD)
    changed = [
        a.view(bits) ^ b.detach().view(bits)
        for a, b in zip(before, worker.model.parameters(), strict=True)
    ]
    numbers = [int(each) for part in changed for each in part.reshape(-1) if each]
    assert len(numbers) == 1
    assert abs(numbers[0]).bit_count() == 1
    assert all(part.isfinite().all() for part in worker.model.parameters())


def waits(worker: Worker, clock: Callable[[], float]) -> float:
    """Return how long a step takes."""
    began = clock()
    worker.train()
    return clock() - began


def test_slow_and_hang_end_by_themselves() -> None:
    """Each step takes longer until the time is over."""
    import time

    worker = Worker()
    worker.order("slow", duration_s=0.3)
    assert waits(worker, time.monotonic) >= 0.05
    assert waits(worker, time.monotonic) >= 0.05
    worker.order("hang", duration_s=0.3)
    assert waits(worker, time.monotonic) >= 0.3
    worker.drills.at(Place.FORWARD)
    assert worker.drills._slow == []
    assert worker.problems == ["", ""]


def test_batches_are_places() -> None:
    """Before each batch is taken."""
    worker = Worker()
    worker.order("exception", place="load", step=1)
    batches = worker.drills.loading(iter([1, 2, 3]))
    assert next(batches) == 1
    worker.step = 1
    with pytest.raises(DrillError):
        next(batches)
    assert list(worker.drills.loading(iter([1, 2]))) == [1, 2]


def test_what_is_let_go_is_no_place_any_more() -> None:
    """After an entry of the function the objects are as before."""
    worker = Worker()
    for undo in worker.undo:
        undo()
    worker.order("exception")
    worker.train()
    assert worker.told == []
