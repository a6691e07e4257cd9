"""What counts as one update: sections of optimizers, a gradient scaler, or the script's own `update()`.

Owns the hooks on registered optimizers and the way back out of an update that was cut. The gate says whether
an update may begin.
"""

import contextlib
import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from frun.worker.commit import Commit
from frun.worker.gate import Gate
from frun.worker.paused import Paused
from frun.worker.state import Stateful


class Updates:
    """Passes the gate for registered objects. `completed` is called after each whole update."""

    def __init__(
        self,
        gate: Gate,
        completed: Callable[[], None],
        *,
        wait_for_pause: Callable[[], object] | None,
        check: Callable[[Iterable[torch.optim.Optimizer]], None] = lambda _: None,
    ) -> None:
        """`check` may refuse the gradients of optimizers before their update, by an exception.

        `wait_for_pause` waits for a pause that other ranks know of; None where none ever comes.

        There nothing has to be undone.
        """
        self._wait_for_pause = wait_for_pause
        self._gate = gate
        self._completed = completed
        self._check = check
        self._can_pause = wait_for_pause is not None
        self._objects: Mapping[str, Stateful] = {}
        self._optimizers: list[torch.optim.Optimizer] = []
        self._scaler: Any = None
        self._undo: list[Callable[[], object]] = []
        self._stepped: set[int] = set()
        self._saved: dict[str, Any] | None = None
        self._explicit = False
        self._committed = False
        """All ranks stand before this update, so it is finished even if the generation ends."""
        self._depth = 0
        """Steps inside steps: of an optimizer that calls its base class's."""

    @property
    def whole(self) -> bool:
        """Whether the registered state is that of a completed update."""
        return self._gate.whole and self._saved is None

    def register(self, objects: Mapping[str, Stateful]) -> None:
        """Take the optimizers and the scaler among these objects; earlier ones are let go."""
        self.release()
        self._objects = objects
        self._optimizers = [
            each for each in objects.values() if isinstance(each, torch.optim.Optimizer)
        ]
        for optimizer in self._optimizers:
            self._undo.append(optimizer.register_step_pre_hook(self._before).remove)
            self._undo.append(optimizer.register_step_post_hook(self._after).remove)
        scalers = [each for each in objects.values() if isinstance(each, torch.amp.GradScaler)]
        self._scaler = scalers[0] if scalers else None
        if self._scaler is not None:
            self._wrap_scaler(self._scaler)

    def release(self) -> None:
        """Take the hooks out."""
        while self._undo:
            self._undo.pop()()
        self._stepped.clear()

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """Make what is inside one update."""
        if self._explicit:
            yield
            return
        self._synchronize()
        self._check(self._optimizers)
        self._enter()
        self._explicit = True
        try:
            yield
        finally:
            self._explicit = False
        self._done()

    def roll_back(self) -> bool:
        """Undo an update that was cut; False if that is not possible."""
        self._stepped.clear()
        self._explicit = self._committed = False
        self._depth = 0
        if self._saved is not None:
            for name, state in self._saved.items():
                self._objects[name].load_state_dict(state)
            self._saved = None
            self._gate.reset(self._gate.step)
        return self._gate.whole

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._explicit:
            return
        if self._depth and not _is_nested():
            self._depth = (
                0  # the step before this one ended with an exception, and the script went on
            )
        self._depth += 1
        if self._depth > 1:
            return
        closure = kwargs.get("closure") if len(args) < 2 else args[1]
        if closure is not None or (len(self._optimizers) > 1 and not self._stepped):
            self._save()
        if closure is not None:
            # The closure computes with other ranks, so this can not be waited for; it can be undone.
            self._gate.check()
            return
        self._synchronize()
        self._check([optimizer])
        self._enter()

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._explicit:
            return
        self._depth -= 1
        if self._depth > 0:
            return
        self._stepped.add(id(optimizer))
        if self._gate.commit is not None and not self._gate.busy:
            self._enter()  # behind a closure: its update counts only if that of all ranks does
        if self._scaler is None and len(self._stepped) == len(self._optimizers):
            self._done()
        else:
            self._gate.leave(complete=False)

    def _enter(self, *, finish: bool = False) -> None:
        """Begin a section; the first one of an update, where that is needed, when all ranks are there."""
        self._gate.enter(finish=finish or self._committed)
        commit = self._gate.commit
        if commit is not None and not self._committed:
            self._commit(commit)
        self._gate.begun()

    def _commit(self, commit: Commit) -> None:
        """Wait until all ranks stand before this update. Raises Paused if they never will."""
        try:
            self._committed = commit.reached()
        finally:
            if not self._committed:
                self._gate.back_out()
        if not self._committed:
            if self._wait_for_pause is not None:
                self._wait_for_pause()
            raise Paused

    def _done(self) -> None:
        self._stepped.clear()
        self._saved = None
        self._committed = False
        self._gate.leave(complete=True)
        self._completed()

    def _wrap_scaler(self, scaler: Any) -> None:
        original = scaler.update

        def update(*args: Any, **kwargs: Any) -> None:
            """End the step: it counts even if the scaler skipped it."""
            if self._explicit:
                original(*args, **kwargs)
                return
            self._enter(finish=self._gate.partial)
            original(*args, **kwargs)
            self._done()

        scaler.update = update
        self._undo.append(lambda: scaler.__dict__.pop("update", None))

    def _save(self) -> None:
        if self._can_pause and self._saved is None:
            self._saved = {
                name: copy.deepcopy(stateful.state_dict())
                for name, stateful in self._objects.items()
            }

    def _synchronize(self) -> None:
        """Wait until the gradients are really there: a device computes behind the script's back."""
        if self._can_pause and self._on_device():
            torch.accelerator.synchronize()

    def _on_device(self) -> bool:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    return bool(parameter.device.type != "cpu")
        return False


def _is_nested() -> bool:
    """Tell whether the optimizer's step that calls the hook that calls this is inside another one."""
    frame = sys._getframe(2)
    step, outer = frame.f_code, frame.f_back
    while outer is not None and outer.f_code is not step:
        outer = outer.f_back
    return outer is not None
