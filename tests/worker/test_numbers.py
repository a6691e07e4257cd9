"""What a script reports of its steps."""

import logging
from typing import cast

import pytest
import torch

import frun
from frun.errors import OddNumber
from frun.protocol.channel import Odd
from frun.worker.numbers import Numbers
from frun.worker.runtime import Runtime

NAN = float("nan")


class Line:
    """The way to the agent."""

    generation = 1

    def __init__(self) -> None:
        self.told: list[str] = []

    def tell(self, fact: Odd) -> None:
        self.told.append(fact.reason)


def test_an_odd_figure_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Until it is right again; each name by itself."""
    line = Line()
    numbers = Numbers(cast("Runtime", line))
    with caplog.at_level(logging.WARNING):
        for step, loss in enumerate((1.0, NAN, NAN, 1.0, NAN)):
            numbers.take({"loss": torch.tensor(loss), "norm": 1.0}, step, stop=False)
    assert line.told == ["loss of step 1 is not a number", "loss of step 4 is not a number"]
    assert [record.getMessage() for record in caplog.records] == [
        f"frun: {text}" for text in line.told
    ]


def test_that_all_is_right_again_is_told_late() -> None:
    """When each figure that was odd has been right fifty times since: one that comes and goes is odd."""
    line = Line()
    numbers = Numbers(cast("Runtime", line))
    for step in range(49):
        numbers.take({"loss": 1.0 if step else NAN, "norm": 1.0}, step, stop=False)
    numbers.take({"loss": NAN, "norm": NAN}, 49, stop=False)
    del line.told[:]
    for step in range(50, 99):
        numbers.take({"loss": 1.0}, step, stop=False)
        numbers.take({"norm": 1.0}, step, stop=False)
    assert line.told == []
    for step in range(99, 120):
        numbers.take({"loss": 1.0, "norm": 1.0}, step, stop=False)
    assert line.told == [""]


def test_an_odd_figure_is_no_part_of_the_level() -> None:
    """Ten that are far off in a row are all odd."""
    line = Line()
    numbers = Numbers(cast("Runtime", line))
    for step in range(10):
        numbers.take({"loss": 1.0}, step, stop=False)
    for step in range(10, 20):
        with pytest.raises(OddNumber, match=f"loss of step {step} is 9, 9.0 times"):
            numbers.take({"loss": 9.0}, step, stop=True)
    assert len(line.told) == 1


def test_the_update_is_not_made() -> None:
    """Also where frun did not start the process."""

    @frun.resumable
    def train(session: frun.Session) -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.restore(model=model, optimizer=optimizer)
        for step in range(3):
            session.report(loss=NAN if step == 2 else 1.0, stop=True)
            optimizer.step()
            steps.append(session.step)

    steps: list[int] = []
    with pytest.raises(OddNumber):
        train()
    assert steps == [1, 2]
