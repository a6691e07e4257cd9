"""How long a rank's own part of a step takes, from its hooks to the median."""

from types import SimpleNamespace

import pytest
import torch

from frun.worker import gate, ownwork, updates
from frun.worker.gate import Gate
from frun.worker.updates import Updates


class Training:
    """Steps whose parts take as long as a test says, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        for module in (gate, ownwork, updates):
            monkeypatch.setattr(module, "time", clock, raising=False)
        self.gate = Gate()
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer.register_step_post_hook(lambda *_: self.passes(0.5))
        updating = Updates(self.gate, lambda: None, wait_for_pause=None)
        updating.register({"optimizer": self.optimizer})
        self.undo = ownwork.attach(self.gate, [self.model, self.optimizer])

    def passes(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds

    def step(self, own_s: float, wait_s: float) -> None:
        """Compute, wait for others with the gradients, and update, which takes half a second."""
        self.passes(own_s - 0.5)
        self.model(torch.ones(1, 2)).sum().backward()
        self.passes(wait_s)
        self.optimizer.step()


def test_waits_for_others_are_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long they are; the update is, and a single slow step changes nothing."""
    training = Training(monkeypatch)
    for wait_s in range(19):
        training.step(2.0, float(wait_s))
    assert training.gate.own_s == 0.0
    training.step(30.0, 0.0)
    training.step(2.0, 0.0)
    assert training.gate.own_s == pytest.approx(2.0)
    training.gate.open()
    assert training.gate.own_s == 0.0


def test_what_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that held something long, one without a gradient, and all when the hooks are gone."""
    training = Training(monkeypatch)
    for _ in range(20):
        training.step(2.0, 1.0)
        training.gate.excused = True
    assert training.gate.own_s == 0.0
    for undo in training.undo:
        undo()
    for _ in range(30):
        training.step(2.0, 1.0)
    assert training.gate.own_s == 0.0
