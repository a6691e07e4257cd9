"""The norm of gradients that are about to be applied."""

import math
from typing import cast

import pytest
import torch

from frun.errors import OddNumber
from frun.protocol.channel import Odd
from frun.worker.gate import Gate
from frun.worker.gradients import Gradients, norm
from frun.worker.numbers import Numbers
from frun.worker.runtime import Runtime
from frun.worker.updates import Updates


class Line:
    """The way to the agent, and what the job asked for."""

    generation = 1

    def __init__(self, how: str) -> None:
        self.check_gradients = how
        self.told: list[str] = []

    def tell(self, fact: Odd) -> None:
        """Keep the reason."""
        self.told.append(fact.reason)


class Training:
    """One parameter and the gradients that a test gives it."""

    def __init__(self, how: str) -> None:
        self.line = Line(how)
        runtime = cast("Runtime", self.line)
        self.gate = Gate()
        gradients = Gradients(runtime, Numbers(runtime), self.gate)
        self.parameter = torch.nn.Parameter(torch.zeros(2))
        self.optimizer = torch.optim.SGD([self.parameter], lr=1.0)
        self.updates = Updates(self.gate, lambda: None, wait_for_pause=None, check=gradients.look)
        gradients.begin({"optimizer": self.optimizer})
        self.updates.register({"optimizer": self.optimizer})

    def step(self, gradient: float, *, explicit: bool = False) -> None:
        """Do a step with this gradient."""
        self.parameter.grad = torch.tensor([gradient, 0.0])
        if explicit:
            with self.updates.update():
                self.optimizer.step()
        else:
            self.optimizer.step()


@pytest.mark.parametrize("explicit", [False, True])
def test_an_odd_norm_is_told_in_the_same_step(*, explicit: bool) -> None:
    """Once; the update is made."""
    training = Training("report")
    for gradient in [1.0] * 10 + [9.0, 9.0, 1.0, math.nan]:
        training.step(gradient, explicit=explicit)
    assert training.line.told == [
        "gradient norm of step 10 is 9, 9.0 times its recent level",
        "gradient norm of step 13 is not a number",
    ]
    assert training.gate.step == 14


@pytest.mark.parametrize("explicit", [False, True])
def test_an_update_that_is_refused_changes_nothing(*, explicit: bool) -> None:
    """Neither the parameters nor the step; a script that goes on with the next one can."""
    training = Training("stop")
    training.step(1.0, explicit=explicit)
    with pytest.raises(OddNumber, match="gradient norm of step 1 is infinite"):
        training.step(math.inf, explicit=explicit)
    assert (training.gate.step, training.gate.whole) == (1, True)
    training.step(2.0, explicit=explicit)
    assert training.parameter.tolist() == [-3.0, 0.0]
    assert training.gate.step == 2


def test_nobody_looks_unless_asked() -> None:
    """A gradient that is no number is the script's."""
    training = Training("")
    training.step(math.nan)
    assert training.line.told == []


def test_the_norm_is_that_of_all_gradients() -> None:
    """Whatever their precision; a gradient that is not there, or sparse, does no harm."""
    table = torch.nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 1, 3])).sum().backward()
    half, double, without = (
        torch.nn.Parameter(torch.zeros(4, dtype=each))
        for each in (torch.float16, torch.float64, torch.float32)
    )
    half.grad = torch.full_like(half, 50_000.0)
    double.grad = torch.full_like(double, 3.0)
    optimizer = torch.optim.SGD([table.weight, half, double, without], lr=0.1)
    expected = math.sqrt(2 * 4 + 2 + 4 * 50_000.0**2 + 4 * 9)
    assert norm(optimizer) == pytest.approx(expected, rel=1e-3)
    optimizer.zero_grad()
    assert norm(optimizer) is None


def test_gradients_with_a_scalers_factor_are_left_to_the_scaler() -> None:
    """A fused optimizer gets them as they are, and skips the step itself where one is infinite."""
    training = Training("stop")
    optimizer = torch.optim.SGD([training.parameter], lr=1.0, fused=True)
    training.updates.register({"optimizer": optimizer})
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    training.parameter.grad = torch.tensor([math.inf, 0.0])
    scaler.step(optimizer)
    assert training.line.told == []
    assert (training.gate.step, training.parameter.tolist()) == (1, [0.0, 0.0])
