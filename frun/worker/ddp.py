"""Keeps the order of summation of DistributedDataParallel over a recovery.

DDP begins with one assignment of parameters to buckets and builds another after its first backward,
in the order in which gradients came. The assignment decides in which order a ring of three or more
ranks adds up, so a DDP object that is made anew in the middle of a run must begin on the assignment
that the others would have had. Owns the record of assignments and their use in new objects; leaves
to others how the record travels to a newcomer (`frun.worker.session`).
"""

import functools
import logging
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

logger = logging.getLogger(__name__)

_Buckets = tuple[tuple[int, ...], ...]
_NEEDED = ("_rebuild_buckets", "_reset_state", "_check_reducer_finalized", "_remove_autograd_hooks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one DDP object assigns parameters to buckets after it has rebuilt them."""

    buckets: _Buckets
    """Indices of parameters, in the order of the buckets and inside them."""
    since: int
    """The first step that runs on these buckets from its beginning."""


class Layouts:
    """The layouts of this process's DDP objects, by the order in which an entry makes them.

    For the main thread. `begin` starts an entry; `recorded` is what this process knows; `use` says
    what everybody uses from the step on at which they agreed.
    """

    def __init__(self, step: Callable[[], int]) -> None:
        """Ask `step` for the number of completed steps when buckets are rebuilt."""
        self.step = step
        self.skip_sync = False
        """Whether new DDP objects leave the module as it is, in place of taking rank 0's.

        To be set on every rank or on none: otherwise it is a collective that some do not enter."""
        self._objects: list[weakref.ref[DistributedDataParallel]] = []
        self._recorded: dict[int, Layout] = {}
        self._use: dict[int, Layout] = {}
        self._undo: list[Callable[[], None]] = []

    def install(self) -> bool:
        """Change DDP so that its buckets are known; False if this torch lacks what that needs."""
        if self._undo:
            return True
        reducer: Any = getattr(dist, "Reducer", None)
        if reducer is None or not all(hasattr(reducer, name) for name in _NEEDED):
            logger.warning(
                "this torch hides the buckets of DDP: with 3 or more ranks a recovered run may "
                "differ from an undisturbed one in the last bits"
            )
            return False
        original = DistributedDataParallel.__init__

        @functools.wraps(original)
        def init(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            if self.skip_sync:
                kwargs["init_sync"] = False
            with self._making(len(self._objects)):
                original(ddp, *args, **kwargs)
            self._objects.append(weakref.ref(ddp))

        self._undo.append(functools.partial(setattr, DistributedDataParallel, "__init__", original))
        setattr(DistributedDataParallel, "__init__", init)  # noqa: B010 - mypy forbids it otherwise
        return True

    def uninstall(self) -> None:
        """Take the change back."""
        while self._undo:
            self._undo.pop()()

    def begin(self) -> None:
        """Begin an entry of the user's function: its first DDP object is number 0 again."""
        self._objects.clear()
        self._use.clear()

    def recorded(self) -> tuple[tuple[int, Layout], ...]:
        """Return the layouts that are known, each with the number of its DDP object."""
        return tuple(sorted(self._recorded.items(), key=lambda item: item[0]))

    def use(self, layouts: Sequence[tuple[int, Layout]], step: int) -> None:
        """Let DDP objects run on these layouts, those made already too, from `step` on.

        A layout that was built within or after this step is not used: without the fault the step
        would have begun without it, and it is built again.
        """
        self._recorded = {number: layout for number, layout in layouts if layout.since <= step}
        self._use = dict(self._recorded)
        for number, reference in enumerate(self._objects):
            ddp = reference()
            if ddp is not None and number in self._use:
                self._remake(ddp, number)

    @contextmanager
    def _making(self, number: int) -> Iterator[None]:
        """Let the reducer that is made meanwhile be one that we know."""
        home: Any = dist
        original = home.Reducer
        home.Reducer = functools.partial(_known(original), self, number)
        try:
            yield
        finally:
            home.Reducer = original

    def _remake(self, ddp: Any, number: int) -> None:
        """Give a DDP object a reducer on the layout in use, with its hooks."""
        ddp.reducer._remove_autograd_hooks()
        parameters, sparse = ddp._build_params_for_reducer()
        names = ddp._build_debug_param_to_name_mapping(parameters)
        with self._making(number):
            ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
        for hook, state in ddp._comm_hooks:
            dist._register_comm_hook(ddp.reducer, state, hook)  # type: ignore[attr-defined]

    def _layout_for(self, number: int, parameters: int) -> Layout | None:
        layout = self._use.get(number)
        if layout is None:
            return None
        if sorted(index for bucket in layout.buckets for index in bucket) != [*range(parameters)]:
            logger.warning(
                "DDP object %s has %s parameters now, its recorded buckets have others: "
                "they are not used",
                number,
                parameters,
            )
            return None
        return layout

    def _rebuilt(self, number: int, layout: Layout) -> None:
        self._recorded[number] = layout


@functools.cache
def _known(base: Any) -> Any:
    """Return a kind of reducer that tells its buckets and can begin on given ones."""

    class KnownReducer(base):  # type: ignore[misc]
        """torch's reducer. Methods that begin with an underscore are those that DDP calls."""

        def __init__(
            self,
            layouts: Layouts,
            number: int,
            parameters: list[Any],
            bucket_indices: list[list[int]],
            per_bucket_size_limits: list[int],
            *args: Any,
            **kwargs: Any,
        ) -> None:
            layout = layouts._layout_for(number, len(parameters))
            if layout is not None:
                bucket_indices = [list(bucket) for bucket in layout.buckets]
                per_bucket_size_limits = [max(per_bucket_size_limits)] * len(bucket_indices)
            super().__init__(parameters, bucket_indices, per_bucket_size_limits, *args, **kwargs)
            self._layouts = layouts
            self._number = number
            self._fixed = layout is not None
            self._seen_step = -1
            self._ddp_logger: Any = None

        def set_logger(self, ddp_logger: Any) -> None:
            """Keep a way to the logger, which knows the buckets."""
            self._ddp_logger = weakref.ref(ddp_logger)
            super().set_logger(ddp_logger)

        def _rebuild_buckets(self) -> bool:
            """Rebuild once, as torch does, and record the result; never when it was given."""
            if self._fixed:
                # torch goes on noting the order of gradients until buckets are rebuilt; the notes
                # would grow for ever. The check comes first, since a reset hides what it reports.
                self._check_reducer_finalized()
                self._reset_state()
                return False
            step = self._layouts.step()
            seen, self._seen_step = self._seen_step, step
            rebuilt = bool(super()._rebuild_buckets())
            if rebuilt:
                buckets = self._buckets()
                # with accumulated gradients this is the second forward of one and the same step
                since = step if step != seen else step + 1
                if buckets:
                    self._layouts._rebuilt(self._number, Layout(buckets=buckets, since=since))
            return rebuilt

        def _buckets(self) -> _Buckets:
            ddp_logger = self._ddp_logger() if self._ddp_logger is not None else None
            if ddp_logger is None:
                return ()
            ddp_logger.set_runtime_stats_and_log()
            data = ddp_logger._get_ddp_logging_data().strs_map
            text = data.get("rebuilt_per_bucket_param_indices", "")
            return tuple(
                tuple(int(index) for index in bucket.split())
                for bucket in re.split(r",\s*", text)
                if bucket
            )

    return KnownReducer
