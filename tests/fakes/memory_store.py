"""A store in memory with etcd's semantics, a clock that only a test moves, and faults on demand.

`MemoryCluster` is the etcd, `MemoryStore` one client of it; many clients share a cluster, so a
whole job can be simulated in one process. It passes the contract suite of the real store.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field, replace

from frun.errors import LeaseLost, StoreRefused, StoreUnavailable
from frun.rendezvous.store import Batch, Change, Compare, Delete, KeyValue, Put, Snapshot


@dataclass(slots=True)
class _Lease:
    ttl_s: float
    ends_at: float
    keys: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Watch:
    """One open watch: batches to hand out, or the reason why it ends."""

    prefix: str
    client: "MemoryStore"
    queue: asyncio.Queue[Batch | StoreUnavailable] = field(default_factory=asyncio.Queue)


class MemoryCluster:
    """The state that all clients share. Nothing in it moves by itself: time is `advance`."""

    def __init__(self) -> None:
        self.revision = 1
        self.items: dict[str, KeyValue] = {}
        self.down = False
        """While set every request of every client fails."""
        self._now = 0.0
        self._leases: dict[int, _Lease] = {}
        self.term = 1
        self._last_lease = 0
        self._history: list[Batch] = []
        self._compacted = 0
        self._watches: list[_Watch] = []

    def client(self) -> "MemoryStore":
        """Return a new client."""
        return MemoryStore(self)

    def advance(self, seconds: float) -> None:
        """Move the clock and end the leases whose time is over, in the order of their ends.

        While the cluster is down no lease ends, as with etcd.
        """
        self._now += seconds
        if self.down:
            return
        over = sorted((one.ends_at, id_) for id_, one in self._leases.items())
        for ends_at, id_ in over:
            if ends_at <= self._now:
                self.end_lease(id_)

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        """Fail everything of every client until the end of the block; leases then start anew."""
        self.stop()
        try:
            yield
        finally:
            self.restart()

    def stop(self) -> None:
        """Begin an outage: watches break, requests fail."""
        self.down = True
        self.break_watches("the fake is down")

    def restart(self) -> None:
        """End an outage. As a new leader of etcd does, give every lease its whole time again."""
        self.down = False
        for lease in self._leases.values():
            lease.ends_at = self._now + lease.ttl_s

    def break_watches(self, why: str, client: "MemoryStore | None" = None) -> None:
        """End all open watches, or those of one client, as a lost connection does."""
        for watch in self._watches:
            if client is None or watch.client is client:
                watch.queue.put_nowait(StoreUnavailable(why))

    def compact(self) -> None:
        """Forget the history up to now: watches from older revisions fail."""
        self._compacted = self.revision
        self._history.clear()

    def wipe(self) -> None:
        """Lose all data, as an etcd does that was set up again at the same address."""
        self.break_watches("the fake was wiped")
        self.items.clear()
        self._leases.clear()
        self._history.clear()
        self._compacted = 0
        self.revision = 1

    # -- what clients call -----------------------------------------------------------------------

    def read(self, prefix: str, limit: int = 0) -> Snapshot:
        """Return the snapshot of now."""
        keys = [key for key in sorted(self.items) if key.startswith(prefix)]
        items = {key: self.items[key] for key in keys[: limit or None]}
        return Snapshot(revision=self.revision, items=items)

    def commit(self, compares: Sequence[Compare], ops: Sequence[Put | Delete]) -> int | None:
        """Check, then apply."""
        _refuse_twice(ops)
        if not all(self._holds(compare) for compare in compares):
            return None
        for op in ops:
            if isinstance(op, Put) and op.lease and op.lease not in self._leases:
                raise LeaseLost("the lease is gone from the fake")
        changes: list[Change] = []
        for op in ops:
            changes += self._put(op) if isinstance(op, Put) else self._delete(op)
        self._publish(changes)
        return self.revision

    def grant(self, ttl_s: int) -> int:
        """Make a lease."""
        self._last_lease += 1
        self._leases[self._last_lease] = _Lease(ttl_s=ttl_s, ends_at=self._now + ttl_s)
        return self._last_lease

    def refresh(self, lease: int) -> None:
        """Start a lease anew."""
        if lease not in self._leases:
            raise LeaseLost("the lease is gone from the fake")
        self._leases[lease].ends_at = self._now + self._leases[lease].ttl_s

    def remaining(self, lease: int) -> int:
        """Return what a lease has left."""
        if lease not in self._leases:
            return -1
        return max(0, int(self._leases[lease].ends_at - self._now))

    def end_lease(self, lease: int) -> None:
        """End a lease; fine when it is gone."""
        ended = self._leases.pop(lease, None)
        if ended is not None:
            changes: list[Change] = []
            for key in sorted(ended.keys):
                changes += self._delete(Delete(key=key))
            self._publish(changes)

    def open_watch(self, client: "MemoryStore", prefix: str, after: int) -> _Watch:
        """Begin a watch, with the history since `after` in its queue."""
        if after < self._compacted:
            raise StoreUnavailable("the revisions to watch from are compacted")
        if after > self.revision:
            raise StoreUnavailable(f"the fake is behind revision {after}: it lost its data")
        watch = _Watch(prefix, client)
        for batch in self._history:
            if batch.revision > after:
                _offer(watch, batch)
        self._watches.append(watch)
        return watch

    def close_watch(self, watch: _Watch) -> None:
        """Forget a watch."""
        self._watches.remove(watch)

    @property
    def open_watches(self) -> int:
        """How many watches are open: none after all clients are closed."""
        return len(self._watches)

    def _holds(self, compare: Compare) -> bool:
        found = self.items.get(compare.key)
        if found is None:
            return compare.revision == 0
        return compare.revision == (
            found.create_revision if compare.created else found.mod_revision
        )

    def _put(self, op: Put) -> list[Change]:
        old = self.items.get(op.key)
        if old is not None and old.lease in self._leases:
            self._leases[old.lease].keys.discard(op.key)
        if op.lease:
            self._leases[op.lease].keys.add(op.key)
        revision = self.revision + 1
        kv = KeyValue(
            key=op.key,
            value=op.value,
            create_revision=old.create_revision if old is not None else revision,
            mod_revision=revision,
            lease=op.lease,
        )
        self.items[op.key] = kv
        return [Change(key=op.key, kv=kv)]

    def _delete(self, op: Delete) -> list[Change]:
        gone = [op.key] if op.key in self.items else []
        if op.prefix:
            gone = sorted(key for key in self.items if key.startswith(op.key))
        for key in gone:
            kv = self.items.pop(key)
            if kv.lease in self._leases:
                self._leases[kv.lease].keys.discard(key)
        return [Change(key=key, kv=None) for key in gone]

    def _publish(self, changes: Sequence[Change]) -> None:
        if not changes:
            return
        self.revision += 1
        batch = Batch(revision=self.revision, changes=tuple(changes))
        self._history.append(batch)
        for watch in self._watches:
            _offer(watch, batch)


class MemoryStore:
    """One client of a `MemoryCluster`; without one it makes its own."""

    def __init__(self, cluster: MemoryCluster | None = None) -> None:
        self.cluster = cluster if cluster is not None else MemoryCluster()
        self.cut = False
        """While set this client alone is cut off; its leases run out."""
        self.closed = False
        self.commits = 0
        """How many commits this client asked for."""
        self._lose_answers = 0

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        """Cut off this client until the end of the block."""
        self.cut = True
        self.cluster.break_watches("this client is cut off", self)
        try:
            yield
        finally:
            self.cut = False

    def lose_answers(self, count: int = 1) -> None:
        """Carry out the next commits but raise `StoreUnavailable`, as a cut after the write does."""
        self._lose_answers = count

    @property
    def term(self) -> int:
        """The cluster's term."""
        return self.cluster.term

    async def read(self, prefix: str, limit: int = 0) -> Snapshot:
        """Return the keys under `prefix`, or the first ones."""
        await self._reach()
        return self.cluster.read(prefix, limit)

    async def commit(self, compares: Sequence[Compare], ops: Sequence[Put | Delete]) -> int | None:
        """Apply all `ops` if every compare holds."""
        self.commits += 1
        await self._reach()
        revision = self.cluster.commit(compares, ops)
        if self._lose_answers:
            self._lose_answers -= 1
            raise StoreUnavailable("the answer to a write got lost")
        return revision

    async def watch(self, prefix: str, after: int) -> AsyncGenerator[Batch, None]:
        """Yield the changes under `prefix` after a revision."""
        await self._reach()
        watch = self.cluster.open_watch(self, prefix, after)
        try:
            while True:
                got = await watch.queue.get()
                if isinstance(got, StoreUnavailable):
                    raise got
                yield got
        finally:
            self.cluster.close_watch(watch)

    async def grant(self, ttl_s: int) -> int:
        """Create a lease."""
        await self._reach()
        return self.cluster.grant(ttl_s)

    async def refresh(self, lease: int) -> None:
        """Start the lease's time anew."""
        await self._reach()
        self.cluster.refresh(lease)

    async def remaining(self, lease: int) -> int:
        """Return the seconds until the lease ends."""
        await self._reach()
        return self.cluster.remaining(lease)

    async def revoke(self, lease: int) -> None:
        """End the lease."""
        await self._reach()
        self.cluster.end_lease(lease)

    async def close(self) -> None:
        """Refuse all further requests."""
        self.closed = True
        self.cluster.break_watches("the store was closed", self)

    async def _reach(self) -> None:
        """Give others a turn, as any request does, then fail if there is no way through."""
        await asyncio.sleep(0)
        if self.closed:
            raise StoreUnavailable("the store was closed")
        if self.cluster.down or self.cut:
            raise StoreUnavailable("the fake does not answer")


def _offer(watch: _Watch, batch: Batch) -> None:
    changes = tuple(one for one in batch.changes if one.key.startswith(watch.prefix))
    if changes:
        watch.queue.put_nowait(replace(batch, changes=changes))


def _refuse_twice(ops: Sequence[Put | Delete]) -> None:
    """Refuse what etcd refuses: a key that one transaction puts twice, or puts and deletes."""
    puts = [op.key for op in ops if isinstance(op, Put)]
    deleted = [op for op in ops if isinstance(op, Delete)]
    hit = any(
        key == op.key or (op.prefix and key.startswith(op.key)) for op in deleted for key in puts
    )
    if hit or len(set(puts)) < len(puts):
        raise StoreRefused("duplicate key given in txn request")
