"""Does faults to its own process, on order of the agent. Loaded only where a job allows drills.

Owns the places where a fault may be wanted, and how each kind is done from inside. Who is hit was decided
by others. Faults at a place, and those that need the script's own thread, wait in a list until the main
thread comes by.
"""

import ctypes
import mmap
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

from frun.protocol.channel import Fact, Inject, Injected, Withdraw
from frun.protocol.faults import FaultKind, Place
from frun.protocol.restore import Plan, Receive

T = TypeVar("T")

AT_ONCE = frozenset({FaultKind.EXIT, FaultKind.SEGFAULT, FaultKind.OOM, FaultKind.GIL})
"""Kinds that the side thread can do, whatever the main thread is in."""
_USUAL = {FaultKind.NAN: Place.BACKWARD, FaultKind.BITFLIP: Place.GATE}
"""Where a kind is done if no place was asked for; else in the forward pass, before ranks meet."""
_CHUNK = 32 << 20
_NAP_S = 0.02
_SLOW_S = 1.0


class DrillError(Exception):
    """What the kind `exception` lets the script raise."""


class Drills:
    """The faults of one worker process."""

    def __init__(
        self,
        tell: Callable[[Fact], None],
        *,
        step: Callable[[], int],
        generation: Callable[[], int],
        is_resumable: Callable[[], bool],
    ) -> None:
        """`tell` sends a fact to the agent, from any thread."""
        self._tell = tell
        self._step = step
        self._generation = generation
        self._is_resumable = is_resumable
        self._waiting: list[Inject] = []
        self._pid = os.getpid()
        self._slow: list[tuple[float, float]] = []
        """Seconds that each step takes longer, and until when."""
        self._parameters: list[torch.nn.Parameter] = []
        self._spoil = False
        """The gradient that is being made is to become NaN."""

    def obey(self, order: Inject | Withdraw) -> None:
        """Do a fault, or let the main thread do it. Called by the side thread."""
        if isinstance(order, Withdraw):
            self._drop(order)
            return
        placed = bool(order.place) or order.step >= 0
        if FaultKind(order.kind) in AT_ONCE and not placed:
            self._happens(order)
            self._do(order)
        elif not self._is_resumable():
            self._happens(order, "it needs a place in a step, and the script is not resumable")
        elif order.id not in [each.id for each in self._waiting]:
            self._waiting.append(order)

    # -- main thread ---------------------------------------------------------------------------------------

    def at(self, place: Place) -> None:
        """Do the faults that belong here. To be called whenever the main thread comes by."""
        if (self._waiting or self._slow) and os.getpid() != self._pid:
            return  # a child that the script forked is not the worker
        if place is Place.FORWARD and self._slow:
            self._be_slow()
        for order in self._waiting[:]:
            if order.step >= 0 and self._step() > order.step:
                self._drop(order)
                self._happens(order, f"step {order.step} was over before")
            elif order.step in (-1, self._step()) and place is _place_of(order):
                self._drop(order)
                self._happens(order)
                self._do(order)

    def _drop(self, order: Inject | Withdraw) -> None:
        self._waiting = [each for each in self._waiting if each.id != order.id]

    def rebuilding(self) -> None:
        """Be the place where process groups meet."""
        self.at(Place.REBUILD)

    def copying(self, plan: Plan) -> None:
        """Be a place before state is copied, if any is."""
        if any(isinstance(action, Receive) for action in plan.actions):
            self.at(Place.COPY)

    def loading(self, batches: Iterator[T]) -> Iterator[T]:
        """Be a place before each batch."""
        while True:
            self.at(Place.LOAD)
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def attach(
        self, modules: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]
    ) -> list[Callable[[], None]]:
        """Make places of these objects, before the update gate hooks them; return what undoes it."""
        undo: list[Callable[[], None]] = []
        self._parameters = []
        for module in modules:
            undo.append(module.register_forward_pre_hook(lambda *_: self.at(Place.FORWARD)).remove)
            self._parameters += module.parameters()
            # The first one's gradient comes last: others are under way to other ranks already.
            first = next((each for each in module.parameters() if each.requires_grad), None)
            if first is not None:
                undo.append(first.register_hook(self._in_backward).remove)  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            undo.append(optimizer.register_step_pre_hook(lambda *_: self.at(Place.GATE)).remove)
            undo.append(optimizer.register_step_post_hook(lambda *_: self.at(Place.UPDATE)).remove)
        return undo

    def _in_backward(self, gradient: torch.Tensor) -> torch.Tensor | None:
        self.at(Place.BACKWARD)
        if not self._spoil:
            return None
        self._spoil = False
        return torch.full_like(gradient, float("nan"))

    def _be_slow(self) -> None:
        now = time.monotonic()
        self._slow = [(each, until) for each, until in self._slow if now < until]
        time.sleep(sum(each for each, _ in self._slow))

    # -- faults --------------------------------------------------------------------------------------------

    def _happens(self, order: Inject, problem: str = "") -> None:
        generation, step = self._generation(), self._step()
        self._tell(Injected(id=order.id, generation=generation, step=step, problem=problem))

    def _do(self, order: Inject) -> None:
        duration_s = order.duration_s or float("inf")
        match FaultKind(order.kind):
            case FaultKind.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case FaultKind.STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
            case FaultKind.EXIT:
                os._exit(int(order.argument))
            case FaultKind.SEGFAULT:
                ctypes.string_at(0)
            case FaultKind.OOM:
                _exhaust_memory()
            case FaultKind.EXCEPTION:
                raise DrillError(f"drill {order.id}: an exception on purpose")
            case FaultKind.HANG:
                _wait(time.sleep, duration_s)
            case FaultKind.GIL:
                _wait(_hold_gil, duration_s)
            case FaultKind.SLOW:
                more_s = float(order.argument or _SLOW_S)
                self._slow.append((more_s, time.monotonic() + duration_s))
                time.sleep(more_s)
            case FaultKind.NAN:
                self._spoil_gradients(_place_of(order))
            case FaultKind.BITFLIP:
                self._flip_bit(random.Random(order.id))
            case _:
                pass  # of hosts

    def _spoil_gradients(self, place: Place) -> None:
        """Make a gradient NaN: the one that is being made, else one that was made."""
        if place is Place.BACKWARD:
            self._spoil = True
            return
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.fill_(float("nan"))
                return

    def _flip_bit(self, draw: random.Random) -> None:
        """Flip the highest bit of the mantissa, or of the number, of one element."""
        # Like a fault of the memory, unseen by autograd.
        data = draw.choice([each.data for each in self._parameters if each.numel()])
        number = draw.randrange(data.numel())
        element = data.reshape(-1)[number : number + 1].cpu().clone()
        raw = element.view(torch.uint8)
        raw[max(0, element.element_size() - 2)] ^= 0x40 if element.element_size() > 2 else 0x08
        position = [int(each) for each in torch.unravel_index(torch.tensor(number), data.shape)]
        data[tuple(position)] = element[0]


def _place_of(order: Inject) -> Place:
    if order.place:
        return Place(order.place)
    return _USUAL.get(FaultKind(order.kind), Place.FORWARD)


def _exhaust_memory() -> None:
    """Take memory until the kernel ends this process: this one and no other, if it has the choice."""
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
    taken = []
    try:
        while True:
            piece = mmap.mmap(-1, _CHUNK)
            piece.write(b"x" * _CHUNK)
            taken.append(piece)
    except (OSError, MemoryError):
        # A limit of this process: what the kernel refuses it can not take too much of.
        os.kill(os.getpid(), signal.SIGKILL)


def _wait(pause: Callable[[float], object], seconds: float) -> None:
    """Wait in naps, since a signal ends some of them early."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        pause(min(left, _NAP_S if pause is time.sleep else 3600.0))


def _hold_gil(seconds: float) -> None:
    """Wait in C without letting other threads run."""
    ctypes.PyDLL(None).usleep(max(1, int(min(seconds, 4000.0) * 1e6)))
