"""What a transfer says, on every rank, when states do not fit or somebody dies."""

import os
import signal
from typing import Any

import pytest
import torch
from torch import nn

from frun.errors import StateMismatch
from frun.worker import pull
from frun.worker.copy import Donor, Receiver, agree, transfer
from frun.worker.messages import CHUNK, Wire
from frun.worker.state import Stateful
from tests.worker.ranks import Raised, run_ranks
from tests.worker.stateful import Holder, bits, planned

WAYS = pytest.mark.parametrize("read", [True, False], ids=["memory", "group"])


class Counter:
    """A user's own counter with values, no tensors."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        """Return the values."""
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take those values that it knows."""
        for key in self.values:
            self.values[key] = state[key]


def optimizer(*shapes: int, groups: int = 1) -> torch.optim.Optimizer:
    """Return one of parameters with these lengths."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    each = -(-len(parameters) // groups)
    return torch.optim.SGD(
        [{"params": parameters[n : n + each]} for n in range(0, len(parameters), each)], lr=0.1
    )


def tied(*, same: bool) -> nn.Module:
    """Return a module whose two weights are one, or two."""
    module = nn.ModuleDict({"one": nn.Linear(3, 3), "two": nn.Linear(3, 3)})
    if same:
        module["two"].weight = module["one"].weight
    return module


MISMATCHES: dict[str, tuple[Any, Any, str]] = {
    "shape": (
        lambda: nn.Linear(4, 3),
        lambda: nn.Linear(5, 3),
        "x weight is float32 [3, 5] on rank 1 and float32 [3, 4] on its donor, rank 0",
    ),
    "dtype": (
        lambda: nn.Linear(4, 3),
        lambda: nn.Linear(4, 3, dtype=torch.float64),
        "x weight is float64 [3, 4] on rank 1 and float32 [3, 4] on its donor, rank 0",
    ),
    "missing key": (
        lambda: nn.Linear(4, 3),
        lambda: nn.Linear(4, 3, bias=False),
        "x bias is absent on rank 1 and float32 [3] on its donor, rank 0",
    ),
    "further key": (
        lambda: nn.Linear(4, 3, bias=False),
        lambda: nn.Linear(4, 3),
        "x bias is float32 [3] on rank 1 and absent on its donor, rank 0",
    ),
    "class": (
        lambda: torch.optim.SGD(nn.Linear(1, 1).parameters()),
        lambda: torch.optim.Adam(nn.Linear(1, 1).parameters()),
        "x is a torch.optim.adam.Adam on rank 1 and a torch.optim.sgd.SGD on its donor, rank 0",
    ),
    "groups": (
        lambda: optimizer(1, 2, 3, 4),
        lambda: optimizer(1, 2, 3, 4, groups=2),
        "x param_groups is groups of [2, 2] parameters on rank 1 and groups of [4] parameters",
    ),
    "ties": (
        lambda: tied(same=False),
        lambda: tied(same=True),
        "x two.weight is the memory of x one.weight on rank 1 and memory of its own on its donor",
    ),
    "users keys": (
        lambda: Counter(n=1, m=2),
        lambda: Counter(n=1),
        "rank 1: x (tests.worker.test_copy_faults.Counter) took the donor's state and has another: "
        "m is absent, the donor's is present",
    ),
    "users refusal": (
        lambda: Counter(n=1),
        lambda: Counter(n=1, k=2),
        "rank 1: x (tests.worker.test_copy_faults.Counter) does not take the donor's state: KeyError: 'k'",
    ),
    "no state": (
        lambda: Holder({}),
        object,
        "rank 1: x (builtins.object) has no state_dict and load_state_dict",
    ),
    "donor can't be sent": (
        lambda: Holder({"f": lambda: 0}),
        lambda: Holder({}),
        "rank 0: the state of x (tests.worker.stateful.Holder) can't be sent:",
    ),
}


def test_states_that_do_not_fit() -> None:
    """All ranks, the bystander too, get one error that names object, path and both values, and can go on."""

    def work(rank: int) -> Any:
        said = []
        for donor, receiver, _ in MISMATCHES.values():
            try:
                transfer(planned(3, 1), rank, {"x": (receiver if rank == 1 else donor)()})
            except StateMismatch as error:
                said.append(str(error))
        return said

    donor, newcomer, bystander = run_ranks(3, work)
    assert donor == newcomer == bystander
    for text, (_, _, wanted) in zip(donor, MISMATCHES.values(), strict=True):
        assert text.startswith("restore: " + wanted)


def test_an_object_that_is_passed_on_one_side_only() -> None:
    """Names must agree; the error says who has which."""

    def work(rank: int) -> Any:
        objects: dict[str, Stateful] = {"model": nn.Linear(1, 1)}
        if rank == 0:
            objects["average"] = Holder({})
        transfer(planned(2, 1), rank, objects)

    for answer in run_ranks(2, work):
        assert answer.text.startswith(
            "restore: average is not passed to restore on rank 1 and a tests.worker.stateful.Holder on"
        )


def test_what_a_rank_met_before_is_raised_everywhere() -> None:
    """A rank that could not move its state to new objects says so to the others, and nothing is copied."""

    def work(rank: int) -> Any:
        holder = Holder({"a": torch.full((3,), float(rank))})
        fault = StateMismatch("restore: x is not what it was") if rank == 2 else None
        try:
            transfer(planned(3, 1), rank, {"x": holder}, fault=fault)
        except StateMismatch as error:
            return str(error), float(holder.state["a"][0])

    answers = run_ranks(3, work)
    assert {text for text, _ in answers} == {"restore: x is not what it was"}
    assert answers[0][1] == 0.0


def test_the_users_own_exception_is_raised_as_it_is_where_it_was() -> None:
    """An object's state_dict raises on the donor: there it is that exception, elsewhere a mismatch."""

    class Broken(Holder):
        def state_dict(self) -> Any:
            raise OverflowError("too many")

    def work(rank: int) -> Any:
        transfer(planned(2, 1), rank, {"x": Broken({}) if rank == 0 else Holder({})})

    donor, receiver = run_ranks(2, work)
    assert (donor.kind, donor.text) == ("OverflowError", "too many")
    assert receiver.kind == "StateMismatch"
    assert receiver.text == "restore: rank 0: OverflowError: too many"


class Liar(Donor):
    """Has other bytes than it sends."""

    def give(self, *args: Any) -> None:
        """Spoil the first fingerprint."""
        first = not self.marks
        super().give(*args)
        if first:
            self.marks[0] ^= 1


def test_bytes_that_are_not_the_donors() -> None:
    """A fingerprint that differs is an error on all ranks that names the tensor, and nothing is loaded."""

    def work(rank: int) -> Any:
        holder = Holder({"a": torch.ones(5), "n": rank})
        if rank == 1:
            try:
                transfer(planned(2, 1), rank, {"x": holder})
            finally:
                assert holder.state["n"] == 1
        wire = Wire.of(None)
        liar = Liar(wire=wire, rank=0, receivers=(1,), offer=None)
        agree(liar.meet({"x": holder}, None), wire, None)
        agree(liar.move({}), wire, None)

    for answer in run_ranks(2, work):
        assert answer.kind == "StateCorrupt"
        assert answer.text.startswith(
            "restore: x a on rank 1 is not what rank 0 has: fingerprints "
        )


@WAYS
def test_a_donor_dies_in_the_middle(read: bool) -> None:
    """The receiver raises at once, and what it holds is nonsense, not a mixture that looks like a state."""

    class Dying(Donor):
        def give(self, slots: Any, receivers: Any) -> None:
            if not read:
                super().give(slots[:1], receivers)
            os.kill(os.getpid(), signal.SIGKILL)

    def work(rank: int) -> Any:
        state = {key: torch.full((CHUNK,), rank + 1.0) for key in "abc"}
        if rank == 1:
            try:
                transfer(planned(2, 1), rank, {"x": Holder(state)}, read_memory=read)
            except (RuntimeError, ConnectionError) as error:
                return str(error), bool(state["c"].isnan().any())
        wire = Wire.of(None)
        with pull.offered() as offer:
            dying = Dying(wire=wire, rank=0, receivers=(1,), offer=offer if read else None)
            agree(dying.meet({"x": Holder(state)}, None), wire, None)
            dying.move({})
        return None

    donor, receiver = run_ranks(2, work)
    assert donor is None
    assert not isinstance(receiver, Raised), receiver.trace
    assert "connection" in receiver[0].lower()
    assert receiver[1] or read


@WAYS
def test_a_receiver_dies_in_the_middle(read: bool) -> None:
    """The donor and the other receiver raise; the donor's state is what it was."""

    def work(rank: int) -> Any:
        state = {key: torch.full((CHUNK,), float(rank)) for key in "abc"}
        before = bits(state["a"][:9])
        if rank != 2:
            try:
                transfer(planned(3, 1, 2), rank, {"x": Holder(state)}, read_memory=read)
            except (RuntimeError, ConnectionError) as error:
                return str(error), bits(state["a"][:9]) == before, float(state["c"].max())
        wire = Wire.of(None)
        receiver = Receiver(wire=wire, rank=rank, donor=0)
        agree(receiver.meet({"x": Holder(state)}, None), wire, None)
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    donor, other, dead = run_ranks(3, work)
    assert dead is None
    assert "connection" in donor[0].lower()
    assert donor[1:] == (True, 0.0)
    assert "connection" in other[0].lower()
