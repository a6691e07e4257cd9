"""Knows every process group of this worker, ends them, and makes the default group again.

Owns the change to torch's group creation, the strong references that decide when a group is freed,
and torch's tables of groups. Leaves to others how a backend is released (`Unblocker`), when a pause
comes and who catches the exception (`frun.worker.runtime`, `frun.worker.resumable`).
"""

import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from frun.worker.unblock_gloo import GlooUnblocker
from frun.worker.unblock_hccl import HcclUnblocker
from frun.worker.unblock_nccl import NcclUnblocker

logger = logging.getLogger(__name__)

_POKE_S = 0.005
"""Pause between two tries to release a group that is just being made."""
_CREATION_S = 2.0
"""How long `unblock` stays with groups that are just being made."""
_DROP_S = 10.0
"""Bound on freeing the old groups."""
_TABLES = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "pg_to_tag",
    "tags_to_pg",
    "pg_coalesce_state",
    "comms",
)


class Unblocker(Protocol):
    """Releases threads that are blocked in one backend. One per backend and process."""

    backend: str
    """torch's name of the backend."""

    def creating(self, size: int) -> AbstractContextManager[None]:
        """Stand around the creation of each group of `size` ranks, whatever its backend."""

    def created(self, group: Any) -> None:
        """Know a new group of any backend; called in the thread that made it."""

    def forget(self, group: Any) -> None:
        """Know a group no more, since the script destroyed it."""

    def settle(self) -> None:
        """Wait until collectives that this thread queued on a device are done, or were ended."""

    def unblock(self) -> int:
        """End everything that blocks, from any thread, any number of times.

        Returns how many connections or communicators were ended by this call. Covers groups
        that are being created at this moment. Never waits for a peer.
        """

    def is_over(self) -> bool:
        """Return whether nothing is left by which a thread that still waits could be released."""

    def shutdown(self, group: Any) -> None:
        """End a group for good if it is of this backend; its references go right afterwards."""

    def teardown(self) -> int:
        """Called when all references are gone; returns how many groups live on nevertheless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unblocked:
    """What `Groups.unblock` did."""

    count: int
    """Connections and communicators that were ended."""
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TornDown:
    """What `Groups.teardown` did."""

    count: int
    """Groups that were let go."""
    kept: int
    """Groups that something else still refers to, such as a DDP object in a global variable."""
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _DefaultGroup:
    """The arguments with which the script made the default group."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Groups:
    """All process groups of this process, from `install` on.

    `unblock` is for the side thread; everything else belongs to the main thread.
    """

    def __init__(self, unblockers: Sequence[Unblocker] | None = None) -> None:
        """Use these unblockers, or those for gloo, NCCL and HCCL."""
        if unblockers is None:
            unblockers = (GlooUnblocker(), NcclUnblocker(os.environ), HcclUnblocker())
        self._unblockers: tuple[Unblocker, ...] = tuple(unblockers)
        self._changed = threading.Condition()
        self._creating = 0
        self._ended = False
        self._groups: list[Any] = []
        self._retired: list[Any] = []
        self._default: _DefaultGroup | None = None
        self._excepthook: Callable[..., Any] | None = None
        self._undo: list[Callable[[], None]] = []
        self.meet_again: Callable[[BaseException], bool] = lambda error: False
        """Asked when the default group could not be made; True: try again, in a new generation."""

    def install(self) -> None:
        """Change torch's group creation so that every group is known. Imports torch."""
        import torch.distributed as dist

        if self._undo or not dist.is_available():
            return
        from torch.distributed import distributed_c10d as c10d

        self._replace(c10d, "init_process_group", self._around_init)
        self._replace(c10d, "_new_process_group_helper", self._around_helper)
        self._replace(c10d, "split_group", self._around_split)
        self._replace(c10d, "destroy_process_group", self._around_destroy)

    def uninstall(self) -> None:
        """Take the change back; groups that are there stay."""
        while self._undo:
            self._undo.pop()()

    @property
    def has_default(self) -> bool:
        """Whether the default group exists now."""
        return _is_initialized()

    def sequence(self) -> int:
        """Return how many collectives all groups have begun, where their backends count."""
        with self._changed:
            return sum(_begun(group) for group in self._groups)

    def unblock(self) -> Unblocked:
        """Release every thread that is blocked in a group, or in making one.

        Idempotent, from any thread. Groups that are asked for afterwards are refused with
        `GenerationEnded` until `teardown`. Call it again while the main thread does not come out:
        where groups connect when they are first used, new waits can begin.
        """
        started = time.monotonic()
        with self._changed:
            self._ended = True
        count = self._poke()
        while time.monotonic() - started < _CREATION_S:
            with self._changed:
                if self._changed.wait_for(lambda: not self._creating, _POKE_S):
                    break
            count += self._poke()
        return Unblocked(count=count, took_s=time.monotonic() - started)

    def settle(self) -> None:
        """Wait until what this thread queued on a device is done, before an update reads it.

        A device runs behind its process. Without this a collective could be ended by `unblock`
        while the update that reads its result is queued already, and the update would spoil the
        parameters. Does nothing for gloo.

        Raises:
            GenerationEnded: `unblock` came before; what the device holds is not to be trusted.
        """
        for each in self._unblockers:
            each.settle()
        with self._changed:
            self._refuse_if_ended()

    def teardown(self) -> TornDown:
        """Let all groups go and leave torch as before the first one, ready for new groups.

        Before this, the exception that came out of the blocked call, its traceback, and with them
        the DDP objects of the old groups must be gone: a group that is freed by its last user, and
        not here, can hang for ever.
        """
        started = time.monotonic()
        c10d = sys.modules.get("torch.distributed.distributed_c10d")
        known = [*self._groups, *self._retired]
        self._groups.clear()
        self._retired.clear()
        if c10d is not None and hasattr(c10d, "_world"):
            known += [each for each in c10d._world.pg_map if all(each is not k for k in known)]
            self._shutdown(known)
            _clear_tables(c10d)
        self._restore_excepthook()
        count = len(known)
        _drop(known)
        kept = sum(each.teardown() for each in self._unblockers)
        with self._changed:
            self._ended = False
        return TornDown(count=count, kept=kept, took_s=time.monotonic() - started)

    def remake(self) -> bool:
        """Make the default group as the script did; False if the script has never made one.

        The new group meets in the store of the present generation, whatever store or address the
        script named. RANK and WORLD_SIZE are read anew unless the script gave others.
        """
        if self._default is None:
            return False
        import torch.distributed as dist

        dist.init_process_group(*self._default.args, **self._default.kwargs)
        return True

    def is_over(self) -> bool:
        """Return whether a thread that still waits, though it was unblocked, waits for ever."""
        return all(each.is_over() for each in self._unblockers)

    def _poke(self) -> int:
        return sum(each.unblock() for each in self._unblockers)

    def _shutdown(self, groups: list[Any]) -> None:
        for group in groups:
            for each in self._unblockers:
                each.shutdown(group)

    @contextmanager
    def _creation(self, size: int) -> Iterator[None]:
        with self._changed:
            self._refuse_if_ended()
            self._creating += 1
        try:
            with ExitStack() as stack:
                for each in self._unblockers:
                    stack.enter_context(each.creating(size))
                yield
        finally:
            with self._changed:
                self._creating -= 1
                self._changed.notify_all()

    def _restore_excepthook(self) -> None:
        """Take torch's hook out again: each init wraps the one before and adds its prefix."""
        if getattr(sys.excepthook, "__name__", "") == "_distributed_excepthook":
            sys.excepthook = self._excepthook or sys.__excepthook__
        self._excepthook = None

    def _refuse_if_ended(self) -> None:
        if self._ended:
            from frun.worker.groupstore import GenerationEnded

            raise GenerationEnded("the process groups of this generation were ended by frun")

    def _made(self, group: Any) -> None:
        """Keep a reference to a new group, and end it at once if it came too late."""
        with self._changed:
            retired, self._retired = self._retired, []
            self._groups.append(group)
        for each in self._unblockers:
            each.created(group)
        with self._changed:
            ended = self._ended
        _drop(retired)
        if ended:
            self._poke()
            self._refuse_if_ended()

    def _around_init(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            hook = sys.excepthook
            while True:
                try:
                    result = original(*args, **kwargs)
                    break
                except Exception as error:
                    if not self.meet_again(error):
                        raise
                # No store or address of the generation that is over.
                again = _default_group(args, kwargs)
                args, kwargs = again.args, again.kwargs
            self._default = _default_group(args, kwargs)
            if self._excepthook is None:
                self._excepthook = hook
            return result

        return init_process_group

    def _around_helper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def new_process_group_helper(*args: Any, **kwargs: Any) -> Any:
            with self._creation(int(args[0] if args else kwargs["group_size"])):
                result = original(*args, **kwargs)
            group = result[0] if isinstance(result, tuple) else result
            if _is_group(group):
                self._made(group)
            return result

        return new_process_group_helper

    def _around_split(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def split_group(*args: Any, **kwargs: Any) -> Any:
            with self._creation(1):
                group = original(*args, **kwargs)
            if _is_group(group):
                self._made(group)
            return group

        return split_group

    def _around_destroy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def destroy_process_group(group: Any = None) -> Any:
            from torch.distributed import distributed_c10d as c10d

            everything = group is None or group is c10d._world.default_pg
            result = original(group)
            # a script may destroy in a `finally` while works are in flight: the reference is kept
            # until the next group is made, so that the last one is never dropped with the GIL held
            gone = [each for each in self._groups if everything or each is group]
            for each in gone:
                for unblocker in self._unblockers:
                    unblocker.forget(each)
            with self._changed:
                self._groups = [each for each in self._groups if all(each is not g for g in gone)]
                self._retired += gone
            if everything:
                self._restore_excepthook()
            return result

        return destroy_process_group

    def _replace(
        self,
        home: ModuleType,
        name: str,
        around: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        """Put another function in place of one wherever it was imported by its name."""
        original = getattr(home, name, None)
        if original is None:
            logger.info("torch has no %s; groups made by it are found later", name)
            return
        changed = around(original)
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(name) is original:
                setattr(module, name, changed)
                self._undo.append(functools.partial(setattr, module, name, original))


def _is_group(group: Any) -> bool:
    return group is not None and not isinstance(group, int)


def _begun(group: Any) -> int:
    try:
        return int(group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):  # not of this torch, or not counted by this backend
        return 0


def _is_initialized() -> bool:
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return c10d is not None and bool(c10d.is_initialized())


def _default_group(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _DefaultGroup:
    """Return the arguments for a later generation: no store or address of this one."""
    names: tuple[str, ...] = ("backend", "init_method", "timeout", "world_size", "rank", "store")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    rest = args[len(names) :]
    if rest:  # beyond what scripts write by position
        names = (*names, "group_name", "pg_options", "device_id")
        given.update(zip(names[6:], rest, strict=False))
    for name in ("init_method", "store"):
        given.pop(name, None)
    for name in ("rank", "world_size"):
        if given.get(name, -1) == -1 or str(given[name]) == os.environ.get(name.upper()):
            given.pop(name, None)
    return _DefaultGroup(args=(), kwargs=given)


def _clear_tables(c10d: ModuleType) -> None:
    """Empty torch's tables of groups, as destroying the default group does."""
    world = c10d._world
    c10d._update_default_pg(None)
    for name in _TABLES:
        table = getattr(world, name, None)
        if table is not None:
            table.clear()
    unregister = getattr(c10d, "_unregister_all_process_groups", None)
    if unregister is not None:
        unregister()
    # names of the next groups count from here; every rank must count from the same number
    world.group_count = 0


def _drop(groups: list[Any]) -> None:
    """Drop the references, each in a thread: freeing one gloo group waits 10 ms for its loop."""
    threads = [
        threading.Thread(target=cell.clear, name="frun-drop", daemon=True)
        for cell in [[group] for group in groups]
    ]
    groups.clear()
    deadline = time.monotonic() + _DROP_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
