"""What a resumable function is given: the step, the state that lives on, the data, the update.

Owns what happens at the beginning and the end of a step. How ranks agree is `agree`'s, what is one update
`updates`', when a generation ends the runtime's.
"""

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, SupportsFloat, TypeVar

import torch

from frun.errors import StateLost, StateMismatch, UsageError
from frun.protocol.channel import PhaseEnded, Restored
from frun.protocol.restore import RankState, homes
from frun.protocol.storeframe import COMMIT_SCOPE
from frun.worker import agree, ownwork, rng, shards
from frun.worker.agree import Memory, Said
from frun.worker.batches import Position, Source, check
from frun.worker.commit import Commit
from frun.worker.ddp import Layouts
from frun.worker.gate import Gate
from frun.worker.gradients import Gradients
from frun.worker.keepsake import Keepsake
from frun.worker.numbers import Numbers
from frun.worker.placing import adopt
from frun.worker.progress import Teller
from frun.worker.replicas import Replicas
from frun.worker.runtime import Runtime
from frun.worker.state import Stateful, called, sample, unwrapped
from frun.worker.updates import Updates
from frun.worker.whereabouts import Whereabouts

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch")


class Session:
    """One training run as the function sees it, on every entry the same object.

    Under torchrun or plain python there is nothing to recover; everything here works nevertheless, and
    the same random numbers are drawn.

    After any faults the state is bitwise that of a run without faults if

    - everything that training changes is passed to `restore`, and every replica holds the same of it;
    - it changes in the step of the registered optimizer, or in `update()`;
    - the data comes from `batches`, and random numbers from generators that it seeds: Python's, NumPy's,
      torch's and the devices' own ones;
    - the computation itself gives the same bits when it is repeated.

    Buffers that forward passes change (BatchNorm) are a rank's own. They are exact while the rank stays on
    its host and they are in main memory; a rank that moves gets those of its donor.
    """

    def __init__(self, runtime: Runtime | None) -> None:
        """Begin at step 0; `runtime` is None where frun did not start this process."""
        self._runtime = runtime
        self._gate = runtime.gate if runtime is not None else Gate()
        self._whereabouts = runtime.whereabouts if runtime is not None else Whereabouts(self._gate)
        wait = runtime.wait_for_pause if runtime is not None else None
        self._numbers = Numbers(runtime)
        self._gradients = Gradients(runtime, self._numbers, self._gate)
        self._updates = Updates(
            self._gate, self._completed, wait_for_pause=wait, check=self._gradients.look
        )
        self.shard = ""
        """Which part of the state this rank holds, for parts that are plain tensors (pipeline stages,
        experts, a library's own tensor parallelism): ranks with the same text are replicas. Set it before
        `restore`. Not needed for DTensors (`fully_shard`, `parallelize_module`)."""
        self._part = ""
        """The same as `restore` found it."""
        self._objects: dict[str, Stateful] = {}
        self._memory = Memory()
        self._keepsake: Keepsake | None = None
        self._called: list[torch.nn.Module] = []
        self._kept = -1
        """Step whose beginning was kept by a forward pass of the step before."""
        self._undo: list[Callable[[], None]] = []
        self._layouts = Layouts(step=lambda: self._gate.step)
        if runtime is not None:
            self._layouts.install()
        self._main = threading.get_ident()
        self._has_state = False
        self._is_newcomer = True
        self._torn = False
        self._cut = False
        self._teller = Teller(runtime) if runtime is not None else None
        self._replicas = Replicas(runtime)
        self._seed: int | None = None
        self._generators: dict[int, tuple[torch.Generator, int]] = {}
        self.has_met = False
        """Whether this entry's `restore` is done, for the decorator."""
        self._passes = 0
        self._sources: dict[int, Source] = {}
        self._in_pass = False
        self._fresh = True
        self._handed = self._memory.position

    @property
    def step(self) -> int:
        """Number of completed updates; the one that is being worked on has this number."""
        if self._gate.closed and self._gate.whole and threading.get_ident() == self._main:
            self._gate.check()
        return self._gate.step

    @property
    def generation(self) -> int:
        """Number of the world that this worker is in; 0 where frun did not start it."""
        return self._runtime.generation if self._runtime is not None else 0

    @property
    def rank(self) -> int:
        """This worker's rank among all workers."""
        return int(os.environ.get("RANK", "0"))

    @property
    def is_newcomer(self) -> bool:
        """Whether this process enters the function with no state of its own."""
        return self._is_newcomer

    def restore(self, **stateful: Stateful) -> int:
        """Put these objects in the state of the step at which all ranks go on; return that step.

        Call it on every entry, once, after the default process group is made and with the same names:
        model, optimizers, schedulers, scaler, anything with `state_dict` and `load_state_dict`. A model
        may be wrapped already. On a survivor objects that are the same ones keep what they hold, and new
        ones get what their predecessors held; a newcomer's are filled from a replica. At the start of a
        run nothing is changed.

        Gradients are dropped, and random generators are seeded for the step.

        Raises:
            StateMismatch: the objects differ from those of the other ranks, or of the last entry.
            StateLost: no live rank has the state.
            UsageError: called twice, or before the default process group exists.
        """
        if self.has_met:
            raise UsageError("session.restore was called twice: pass all objects in one call")
        if agree.NAME in stateful:
            raise UsageError(f"session.restore can not take an object named {agree.NAME}")
        shards.refuse_unknown(stateful)
        objects = {name: unwrapped(value) for name, value in stateful.items()}
        self._called = [
            called(each) for each in stateful.values() if isinstance(each, torch.nn.Module)
        ]
        if self._runtime is None:
            self._register(objects)
        else:
            self._restore(self._runtime, objects)
        self.has_met = True
        self._begin_step()
        return self._gate.step

    def update(self) -> AbstractContextManager[None]:
        """Make everything inside one update: all of it counts as one step, or none of it.

        Put the steps of several optimizers, the scheduler's and your counters in it, but no
        communication with other ranks. Without it each step of the registered optimizer is an update;
        with several, one step of each, and with a registered GradScaler its `update()` ends it. Several
        optimizers without `update()`, and those with closures, cost a copy of the state in each step.

        An exception inside leaves the state of this rank unusable.
        """
        return self._updates.update()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Declare that what is inside takes as long as it takes: `with session.phase("eval"):`.

        While this rank is in it, it does not hang, however long the others wait for it. Checkpoints of
        torch, compilation, imports, and models in evaluation mode are known without it. The time of
        `phase("checkpoint")` is told apart in `frun report`.
        """
        return self._whereabouts.declared(name, self._phase_ended)

    def report(self, *, stop: bool = False, **values: SupportsFloat) -> None:
        """Tell figures of this step, such as `session.report(loss=loss)`, before the update.

        One that is not a number, infinite, or over five times its recent level is an event and a warning,
        once until it is right again. A tensor on a device is waited for.

        Raises:
            OddNumber: with `stop`, so that the update is not made.
        """
        self._numbers.take(values, self._gate.step, stop=stop)

    def batches(
        self, loader: Iterable[Batch], steps: int | None = None, seed: int | None = None
    ) -> Iterator[Batch]:
        """Yield the batches of one epoch, or of as many as it takes to complete `steps` updates.

        Continues behind the batches of completed updates, without loading those again where the loader is a
        DataLoader with a sampler. Calls are counted: on a later entry of the function, those that were
        completed yield nothing. `set_epoch` is called with the number of the epoch in the run.

        All random generators are seeded at the beginning of each step from (`seed`, rank, step), so a step
        that is done again draws the same numbers; without a `seed`, from torch's random state when the run
        began.

        Raises:
            TypeError: the loader can't be begun again (an iterator).
            UsageError: an epoch of the loader is empty.
        """
        check(loader)
        if seed is not None:
            self._seed = rng.derived(seed, self.rank)
        number, self._passes = self._passes, self._passes + 1
        kept = self._sources.get(id(loader))
        source = kept if kept is not None else Source(loader, self._generators)
        self._sources[id(loader)] = source
        return self._pass(source, number, steps)

    @property
    def holds_groups(self) -> bool:
        """Whether the state itself refers to process groups: sharded tensors lie on a mesh of them."""
        return bool(self._part)

    # -- for the decorator ---------------------------------------------------------------------------------

    def enter(self) -> None:
        """Begin an entry of the function."""
        self._layouts.begin()
        self._layouts.skip_sync = self.generation > 1

    def leave(self) -> None:
        """Put the state in order after the function was left, whatever it was doing."""
        self._whereabouts.phase = ""
        if not self._updates.roll_back():
            self._torn = True
        self._release()
        self._gate.commit = None
        if self._keepsake is not None:
            self._keepsake.read(self._gate.step)
            self._keepsake, self._kept = None, -1
        self._is_newcomer = not self._has_state
        self._begin_entry()

    def _begin_entry(self) -> None:
        self.has_met = False
        self._passes = 0
        self._sources = {}
        self._in_pass = False
        self._fresh = True
        self._handed = self._memory.position

    # -- steps ---------------------------------------------------------------------------------------------

    def _pass(self, source: Source, number: int, steps: int | None) -> Iterator[Any]:
        at = self._memory.position
        if number < at.pass_:
            return
        epoch, index = (at.epoch, at.index) if number == at.pass_ else (self._handed.epoch + 1, 0)
        self._in_pass = True
        try:
            while steps is None or self._gate.step < steps:
                before = self._handed
                yield from self._epoch(
                    source, Position(pass_=number, epoch=epoch, index=index), steps
                )
                if steps is None:
                    return
                if index == 0 and self._handed == before:
                    raise UsageError("session.batches: the loader has no batches")
                epoch, index = epoch + 1, 0
        finally:
            self._in_pass = False

    def _epoch(self, source: Source, at: Position, steps: int | None) -> Iterator[Any]:
        pass_, epoch, index = at.pass_, at.epoch, at.index
        iterator = source.begin(epoch, index, rng.derived(self._base(), "epoch", epoch))
        if self._runtime is not None and self._runtime.drills is not None:
            iterator = self._runtime.drills.loading(iterator)
        # Beginning an epoch has seeded anew; what belongs to a step that has begun goes on from there.
        self._fresh = self._fresh or self._handed == self._memory.position
        while steps is None or self._gate.step < steps:
            self._gate.check()
            if self._fresh:
                self._begin_step()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            index += 1
            self._whereabouts.handed += 1
            self._handed = Position(pass_=pass_, epoch=epoch, index=index)
            yield batch

    def _base(self) -> int:
        """Return what this rank's random numbers follow from."""
        if self._seed is not None:
            return self._seed
        return self._memory.seeds.setdefault(self.rank, rng.drawn())

    def _begin_step(self) -> None:
        self._fresh = False
        rng.seed(rng.derived(self._base(), "step", self._gate.step))

    def _completed(self) -> None:
        self._memory.position = self._handed
        self._whereabouts.completed()
        self._fresh = True
        if self._keepsake is not None and self._kept != self._gate.step:
            self._keepsake.write(
                self._gate.step
            )  # no forward pass was seen, as in a compiled model
        if not self._in_pass:
            self._begin_step()
        if self._teller is not None:
            self._replicas.completed(self.rank, self._gate.step)
            self._teller.completed(self._gate.step)

    def _phase_ended(self, name: str, took_s: float) -> None:
        if self._runtime is not None:
            self._runtime.tell(PhaseEnded(generation=self.generation, phase=name, took_s=took_s))

    # -- agreement -----------------------------------------------------------------------------------------

    def _restore(self, runtime: Runtime, objects: dict[str, Stateful]) -> None:
        began = time.monotonic()
        fault = self._adopt(objects)
        self._memory.layouts = self._layouts.recorded()
        everybody = agree.gather(self._said())
        decided = agree.decide(everybody, self._memory, runtime.generation)
        agree.share_layouts(everybody, self._memory)
        agreed = time.monotonic()
        receives = decided.donor_of(self.rank) is not None
        if receives:
            self._has_state, self._cut = False, True
        if runtime.drills is not None:
            runtime.drills.copying(decided)
        report = agree.copy(decided, self.rank, {**objects, agree.NAME: self._memory}, fault)
        self._has_state, self._torn, self._cut = True, False, False
        copied = time.monotonic()
        self._gate.reset(decided.target)
        if any(said.state.replica for said in everybody):
            self._gate.commit = Commit(runtime.store_of(COMMIT_SCOPE), len(everybody))
        self._handed = self._memory.position
        self._layouts.use(self._memory.layouts, decided.target)
        self._make_places(runtime, objects)
        self._register(objects)
        if self._part and not self._is_newcomer:
            gc.collect()  # old sharded modules are in circles: their memory and groups would stay for long
        self._keep(runtime.folder, own=receives)
        alike = [said.state.rank for said in everybody if said.state.replica == self._part]
        self._replicas.begin(self._part, alike, objects.values())
        ahead = max(said.state.step for said in everybody) - decided.target
        if self._teller is not None:
            fact = Restored(
                generation=runtime.generation,
                step=decided.target,
                steps_lost=max(ahead, 0),
                rebuild_s=began - runtime.resumed_at,
                agree_s=agreed - began,
                copy_s=copied - agreed,
                copied_bytes=report.bytes if receives else 0,
                homes=homes((said.state for said in everybody), self._part),
            )
            self._teller.restored(fact)

    def _adopt(self, objects: dict[str, Stateful]) -> Exception | None:
        """Move what this rank holds to the objects of this entry; return why that is not possible."""
        before, self._part = self._part, self.shard or shards.part_of(objects.values())
        if self._has_state and before != self._part:
            raise StateLost(
                f"restore: rank {self.rank} held part {before or 'all'!r} of the state and is now to hold "
                f"{self._part or 'all'!r}: the state can't be put together anew from live ranks"
            )
        if self._has_state and not self._torn:
            try:
                adopt(self._objects, objects)
            except StateMismatch as error:
                return error
            self._objects = objects
        return None

    def _said(self) -> Said:
        return Said(
            state=RankState(
                rank=self.rank,
                host=os.environ.get("GROUP_RANK", ""),
                step=self._gate.step if self._has_state or self._cut else 0,
                has_state=self._has_state,
                cut=self._cut,
                torn=self._torn,
                diverged=self._replicas.diverged,
                replica=self._part,
                sample=sample(self._objects.values()) if self._has_state else (),
            ),
            run=self._memory.run,
            seed=rng.drawn(),
            layouts=tuple((number, layout.since) for number, layout in self._memory.layouts),
        )

    def _register(self, objects: dict[str, Stateful]) -> None:
        self._objects = objects
        self._updates.register(objects)
        self._gradients.begin(objects)
        self._whereabouts.watch(objects.values())
        if self._runtime is not None:
            self._runtime.team = self.shard
            self._undo += ownwork.attach(self._gate, objects.values())
        for stateful in objects.values():
            if isinstance(stateful, torch.nn.Module):
                stateful.zero_grad(set_to_none=True)

    def _make_places(self, runtime: Runtime, objects: dict[str, Stateful]) -> None:
        """Let drills hook the objects, before anything else does."""
        if runtime.drills is not None:
            optimizers = [o for o in objects.values() if isinstance(o, torch.optim.Optimizer)]
            self._undo += runtime.drills.attach(self._called, optimizers)

    def _keep(self, folder: str, *, own: bool) -> None:
        """Keep the buffers from now on; `own`: first put back what this rank kept before, if it did."""
        modules = [each for each in self._objects.values() if isinstance(each, torch.nn.Module)]
        if not any(True for module in modules for _ in module.buffers()):
            return
        path = os.path.join(folder, f"rank.{self.rank}")
        try:
            self._keepsake = Keepsake(path, modules, self._memory.run)
        except OSError as error:
            logger.warning(
                "buffers of modules are not kept for a step that is done again: %s", error
            )
            return
        if own:
            self._keepsake.read(self._gate.step)
        self._keepsake.begin(self._gate.step)
        self._undo += [
            each.register_forward_hook(self._after_forward).remove for each in self._called
        ]
        self._called = []

    def _after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        # Before backward: when others have this rank's gradients, its buffers must be safe.
        if not torch.compiler.is_compiling() and module.training and self._keepsake is not None:
            self._kept = self._gate.step + 1
            self._keepsake.write(self._kept)

    def _release(self) -> None:
        self._updates.release()
        while self._undo:
            self._undo.pop()()
