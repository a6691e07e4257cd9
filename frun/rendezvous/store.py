"""The seam to etcd: what frun needs of a key-value store with leases, transactions and watches.

`etcd.EtcdStore` is the real one; `tests.fakes.memory_store.MemoryStore` the fake. Both pass the same
contract suite (`tests/rendezvous/test_store_contract.py`). Keys are text, values bytes.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValue:
    """One key as stored. Revisions are etcd's: one counter for the whole store."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What is under a prefix at one revision."""

    revision: int
    items: Mapping[str, KeyValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One key was written (`kv` is its new state) or deleted (`kv` is None)."""

    key: str
    kv: KeyValue | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Changes up to and including `revision`, in the order in which they happened."""

    revision: int
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compare:
    """A condition of a transaction: the key's revision is exactly this. 0 means: no such key.

    With `created` the create revision is compared (same key, whatever was written since: a fencing
    token), else the mod revision (nothing was written since).
    """

    key: str
    revision: int
    created: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """Write a key, under a lease if one is given."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """Delete a key, or with `prefix` all keys that begin with it."""

    key: str
    prefix: bool = False


async def read_key(store: "Store", key: str) -> KeyValue | None:
    """Return one key, None if there is no such. Raises StoreUnavailable."""
    return (await store.read(key, limit=1)).items.get(key)  # of a prefix its own key is the first


class Store(Protocol):
    """A consistent key-value store. Every call is bounded in time.

    All methods raise `StoreUnavailable` when no answer came within the store's request timeout, and
    `StoreRefused` when an answer came that no retry will change (TLS, password).
    """

    @property
    def term(self) -> int:
        """The latest term of the store's own leader that any answer told of; 0 before the first."""
        ...

    async def read(self, prefix: str, limit: int = 0) -> Snapshot:
        """Return the keys that begin with `prefix`, as of one revision (linearizable).

        With a `limit` only so many, the first ones in the order of keys.
        """
        ...

    async def commit(self, compares: Sequence[Compare], ops: Sequence[Put | Delete]) -> int | None:
        """Apply all `ops` in one step if every compare holds.

        Returns the new revision, or None (and nothing was written) when a compare failed. On
        `StoreUnavailable` it is unknown whether the write happened: read before you try again.
        Raises `LeaseLost` when a put names a lease that no longer exists.
        """
        ...

    def watch(self, prefix: str, after: int) -> AsyncGenerator[Batch, None]:
        """Yield every change under `prefix` with a revision above `after`.

        Ends only by raising: `StoreUnavailable` when the stream broke, was compacted or was silent for
        too long (the caller reads a snapshot and watches again). Closing the iterator frees the stream.
        """
        ...

    async def grant(self, ttl_s: int) -> int:
        """Create a lease that ends `ttl_s` seconds after its last refresh; return its id."""
        ...

    async def refresh(self, lease: int) -> None:
        """Start the lease's time anew. Raises `LeaseLost` when it no longer exists."""
        ...

    async def remaining(self, lease: int) -> int:
        """Return the seconds until the lease ends, rounded down; -1 when it no longer exists.

        0 is its last second, or that it has run out and still exists: etcd looks for such leases twice a
        second.
        """
        ...

    async def revoke(self, lease: int) -> None:
        """End the lease now and delete every key under it. A lease that is gone is fine."""
        ...

    async def close(self) -> None:
        """Free the connection. Safe to call twice."""
        ...
