"""A copy in memory of everything under one prefix of the store, kept equal by a watch.

Owns the rule "snapshot, then watch, and after any break a snapshot again", so that no change is
missed, and the wake-up of those who wait for changes. What the keys mean is the owner's business.
"""

import asyncio
import contextlib
import logging
import random
from types import TracebackType
from typing import Self

from frun.errors import StoreUnavailable
from frun.rendezvous.store import Batch, KeyValue, Snapshot, Store

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_STEADY_S = 5.0
"""A watch that held this long was a good one: the next break is met without a pause."""


class Mirror:
    """Keeps `items` equal to the store under `prefix`. Use all of it from one event loop.

    `items` is replaced in place between two awaits of the owner, batch by batch: what is read
    without an await in between belongs to one revision.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        """Remember what to mirror; `start` (or `async with`) begins."""
        self._store = store
        self._prefix = prefix
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._deletions: dict[str, KeyValue] = {}
        self.items: dict[str, KeyValue] = {}
        self.revision = 0
        """The store's revision that `items` shows; 0 before the first snapshot."""
        self.version = 0
        """Grows by one per batch or snapshot taken over and per change of `connected`."""
        self.connected = False
        """Whether a watch is running; while not, `items` is what was last known."""
        self.error: StoreUnavailable | None = None
        """Why it is not connected; may be a `StoreRefused`, which the mirror retries too."""
        self.resyncs = 0
        """How many snapshots were read."""
        self.wipes = 0
        """How often the store's revision went back: it lost its data, or it is another store."""

    async def start(self) -> None:
        """Begin to mirror in a task of its own; does not wait for the first snapshot."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"mirror {self._prefix}")

    async def close(self) -> None:
        """Stop mirroring; `items` stays as last known. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})  # unlike `await`, it lets our own cancellation through
            self._task = None
        self._set_connected(connected=False)

    async def __aenter__(self) -> Self:
        """Start."""
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        await self.close()

    async def wait_changed(self, seen: int, timeout_s: float | None) -> int:
        """Wait until `version` differs from `seen`; return it, also when the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.version == seen:
                    await self._changed.wait()
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()  # only a bug ends it: show that to who waits
        return self.version

    def poke(self) -> None:
        """Wake those who wait for a change: something else than the store has changed for them."""
        self._bump()

    def drain_deletions(self) -> dict[str, KeyValue]:
        """Return and forget the keys that went away since the last call, as they were before.

        A key counts when the watch or a new snapshot showed it gone, or showed another one in its
        place (deleted and created again); it may be back in `items`.
        """
        drained, self._deletions = self._deletions, {}
        return drained

    # -- the task ------------------------------------------------------------------------------

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        pause = _FIRST_PAUSE_S
        while True:
            begun = loop.time()
            try:
                await self._follow()
            except StoreUnavailable as error:
                if self.error is None:
                    logger.info("mirror of %s is cut off: %s", self._prefix, error)
                self.error = error
                self._set_connected(connected=False)
            except Exception:
                logger.exception("mirror of %s died", self._prefix)
                self._bump()
                raise
            if loop.time() - begun > _STEADY_S:
                pause = _FIRST_PAUSE_S
            # Jitter: the hosts of a large job lose the same etcd at the same moment.
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _follow(self) -> None:
        """Mirror until the watch ends, which it does only by an error."""
        snapshot = await self._store.read(self._prefix)
        self._take_snapshot(snapshot)
        async with contextlib.aclosing(
            self._store.watch(self._prefix, snapshot.revision)
        ) as batches:
            async for batch in batches:
                self._take_batch(batch)

    def _take_snapshot(self, snapshot: Snapshot) -> None:
        if snapshot.revision < self.revision:
            self.wipes += 1
        for key, old in self.items.items():
            new = snapshot.items.get(key)
            if new is None or new.create_revision != old.create_revision:
                self._deletions[key] = old
        self.items.clear()
        self.items.update(snapshot.items)
        self.revision = snapshot.revision
        self.resyncs += 1
        self.error = None
        self.connected = True
        self._bump()

    def _take_batch(self, batch: Batch) -> None:
        for change in batch.changes:
            if change.kv is not None:
                self.items[change.key] = change.kv
            elif (old := self.items.pop(change.key, None)) is not None:
                self._deletions[change.key] = old
        self.revision = batch.revision
        self._bump()

    def _set_connected(self, *, connected: bool) -> None:
        if self.connected is not connected:
            self.connected = connected
            self._bump()

    def _bump(self) -> None:
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()
