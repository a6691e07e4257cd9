"""One shard of one generation: its keys, its queues and who waits for them.

Owns the meaning of each operation. Does no I/O and knows no time: the owner of a `Waiting` drops
it when its time is over. The meanings are those of torch's TCPStore.
"""

from collections import deque
from collections.abc import Callable

from frun.protocol.storeframe import Blobs, Op, Status

Answer = Callable[[Status, Blobs], None]

_BLOCKING = (Op.GET, Op.WAIT)


def failure(status: Status, text: str) -> tuple[Status, Blobs]:
    """Return an answer that is not OK."""
    return status, (text.encode(),)


class Waiting:
    """A request that waits for keys. Answered by the keyspace, or dropped by its owner."""

    __slots__ = ("_answer", "_at", "_blobs", "_op", "_space", "key", "keys")

    def __init__(self, space: "Keyspace", op: Op, blobs: Blobs, answer: Answer) -> None:
        """Remember what to try again; `Keyspace.run` makes the first attempt."""
        self._space = space
        self._op = op
        self._blobs = blobs
        self._answer = answer
        self._at = 0
        self.keys = blobs[:1] if op is Op.POP else blobs
        self.key: bytes | None = None

    def missing(self) -> list[bytes]:
        """Return the keys that are not there now."""
        return [key for key in self.keys if not self._space.has(key)]

    def drop(self) -> None:
        """Stop waiting, without an answer."""
        if self.key is not None:
            self._space.forget(self.key, self)
            self.key = None

    def attempt(self) -> bool:
        """Answer if nothing is missing, else wait for the first key that is. True if answered."""
        self.key = None
        # keys before `_at` were seen: a long list costs one look per key, not per write
        while self._at < len(self.keys):
            key = self.keys[self._at]
            if not self._space.has(key):
                self.key = key
                self._space.remember(key, self)
                return False
            self._at += 1
        if self._op is not Op.WAIT and self.missing():  # one was deleted after we saw it
            self._at = 0
            return self.attempt()
        self._answer(*self._space.take(self._op, self._blobs))
        return True


class Keyspace:
    """Keys and queues of one shard."""

    def __init__(self) -> None:
        """Start empty."""
        self._values: dict[bytes, bytes] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        self._waiting: dict[bytes, dict[Waiting, None]] = {}
        self._operations: dict[Op, Callable[..., tuple[Status, Blobs]]] = {
            Op.SET: self._set,
            Op.GET: self._get,
            Op.WAIT: self._wait,
            Op.CHECK: self._check,
            Op.ADD: self._add,
            Op.COMPARE_SET: self._compare_set,
            Op.APPEND: self._append,
            Op.DELETE: self._delete,
            Op.NUM_KEYS: self._num_keys,
            Op.LIST_KEYS: self._list_keys,
            Op.PUSH: self._push,
            Op.POP: self._pop,
            Op.QUEUE_LEN: self._queue_len,
        }

    def run(self, op: Op, blobs: Blobs, answer: Answer) -> Waiting | None:
        """Do `op`. Calls `answer` now and returns None, or returns what waits and answers later."""
        if op in _BLOCKING or (op is Op.POP and blobs[1:] == (b"1",)):
            waiting = Waiting(self, op, blobs, answer)
            return None if waiting.attempt() else waiting
        answer(*self.take(op, blobs))
        return None

    def only(self, prefix: bytes) -> "Keyspace":
        """Return a space with the values whose keys begin with `prefix`."""
        kept = Keyspace()
        kept._values = {key: self._values[key] for key in self._keys(prefix)}
        return kept

    def has(self, key: bytes) -> bool:
        """Tell whether `key` is set or is a queue with a value in it."""
        return key in self._values or key in self._queues

    def remember(self, key: bytes, waiting: Waiting) -> None:
        """Try `waiting` again when `key` is written."""
        self._waiting.setdefault(key, {})[waiting] = None

    def forget(self, key: bytes, waiting: Waiting) -> None:
        """Undo `remember`."""
        group = self._waiting.get(key)
        if group is not None:
            group.pop(waiting, None)
            if not group:
                del self._waiting[key]

    def take(self, op: Op, blobs: Blobs) -> tuple[Status, Blobs]:
        """Do `op` without waiting and return its answer."""
        do = self._operations.get(op)
        if do is None:
            return failure(Status.REFUSED, f"operation {op.name.lower()} is not for a shard")
        try:
            return do(*blobs)
        except (TypeError, ValueError):  # their number does not fit the operation
            return failure(Status.REFUSED, f"operation {op.name.lower()} got unusable arguments")

    def _set(self, *blobs: bytes) -> tuple[Status, Blobs]:
        for key, value in zip(blobs[::2], blobs[1::2], strict=True):
            self._write(key, value)
        return Status.OK, ()

    def _get(self, *keys: bytes) -> tuple[Status, Blobs]:
        # a queue satisfies a wait but has no value of its own
        return Status.OK, tuple(self._values.get(key, b"") for key in keys)

    def _wait(self, *_keys: bytes) -> tuple[Status, Blobs]:
        return Status.OK, ()

    def _check(self, *keys: bytes) -> tuple[Status, Blobs]:
        return Status.OK, (b"1" if all(map(self.has, keys)) else b"0",)

    def _append(self, key: bytes, value: bytes) -> tuple[Status, Blobs]:
        self._write(key, self._values.get(key, b"") + value)
        return Status.OK, ()

    def _delete(self, key: bytes) -> tuple[Status, Blobs]:
        return Status.OK, (b"0" if self._values.pop(key, None) is None else b"1",)

    def _num_keys(self, prefix: bytes) -> tuple[Status, Blobs]:
        return Status.OK, (str(len(self._keys(prefix))).encode(),)

    def _list_keys(self, prefix: bytes) -> tuple[Status, Blobs]:
        return Status.OK, tuple(self._keys(prefix))

    def _write(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        self._wake(key)

    def _wake(self, key: bytes) -> None:
        for waiting in self._waiting.pop(key, ()):
            if waiting.key is not None:  # an answer that was just given may have dropped it
                waiting.attempt()

    def _add(self, key: bytes, amount: bytes) -> tuple[Status, Blobs]:
        try:
            total = int(self._values.get(key, b"0")) + int(amount)
        except ValueError:
            return failure(
                Status.REFUSED,
                f"key {key.decode(errors='replace')} holds no number, so nothing can be added",
            )
        self._write(key, str(total).encode())
        return Status.OK, (str(total).encode(),)

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> tuple[Status, Blobs]:
        current = self._values.get(key)
        if current is None and expected:
            return Status.OK, (expected,)
        if current is not None and current != expected:
            return Status.OK, (current,)
        self._write(key, desired)
        return Status.OK, (desired,)

    def _push(self, key: bytes, value: bytes) -> tuple[Status, Blobs]:
        self._queues.setdefault(key, deque()).append(value)
        self._wake(key)
        return Status.OK, ()

    def _queue_len(self, key: bytes) -> tuple[Status, Blobs]:
        return Status.OK, (str(len(self._queues.get(key, ()))).encode(),)

    def _pop(self, key: bytes, _block: bytes) -> tuple[Status, Blobs]:
        queue = self._queues.get(key)
        if not queue:
            return failure(Status.EMPTY, f"queue {key.decode(errors='replace')} is empty")
        head = queue.popleft()
        if not queue:
            del self._queues[key]
        return Status.OK, (head,)

    def _keys(self, prefix: bytes) -> list[bytes]:
        return [key for key in self._values if key.startswith(prefix)]
