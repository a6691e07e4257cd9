"""A worker's side of the group store: a torch Store that asks this host's agent.

Owns the connections of this process. Every call uses one for itself, so a call that waits never
holds up another thread. What the operations mean is the agent's (`frun.agent.groupstore`).
"""

import os
import socket
from collections import deque
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError, DistStoreError, QueueEmptyError

from frun.protocol.storeframe import (
    HEAD_SIZE,
    PROMPT_S,
    Blobs,
    FrameError,
    Op,
    Status,
    decode_body,
    decode_head,
    encode,
    milliseconds,
)

Key = str | bytes
Value = str | bytes

_SLACK_S = 15.0
"""Seconds on top of a request's own time after which the agent is taken for stuck."""
_IDLE = 8
"""Connections kept for the next call; more are closed after use."""
_PIECE = 1 << 20


class GenerationEnded(DistNetworkError):  # type: ignore[misc,unused-ignore]
    """The store's generation is over: another one has begun, or the job ends."""


_ERRORS: dict[int, type[Exception]] = {
    Status.TIMEOUT: DistStoreError,
    Status.UNREACHABLE: DistNetworkError,
    Status.ENDED: GenerationEnded,
    Status.EMPTY: QueueEmptyError,
    Status.REFUSED: ValueError,
}


class Connections:
    """Connections of this process to its agent. Safe in threads and after a fork."""

    def __init__(self, path: str) -> None:
        """Connect to the unix socket at `path` when the first call needs it."""
        self.path = path
        # append and pop of a deque are atomic, so a fork can't inherit a held lock
        self._idle: deque[tuple[int, socket.socket]] = deque()

    def ask(self, op: Op, blobs: Sequence[bytes], generation: int, timeout_s: float) -> Blobs:
        """Do one request and return its answer.

        Raises:
            DistStoreError: not answered in time, because keys are missing.
            DistNetworkError: the agent, or the one that holds the key, is gone.
            GenerationEnded: the generation is over.
            ValueError: the request makes no sense.
        """
        try:
            frame = encode(1, op, blobs, generation, milliseconds(timeout_s))
            sock = self._take()
            try:
                sock.settimeout(timeout_s + _SLACK_S)
                sock.sendall(frame)
                code, answer = _receive(sock)
            except BaseException:  # an interrupted call leaves half an answer in the connection
                sock.close()
                raise
        except TimeoutError as error:
            raise DistNetworkError(
                f"the frun agent did not answer within {timeout_s + _SLACK_S:.0f} s"
            ) from error
        except (OSError, EOFError) as error:
            raise DistNetworkError(
                f"lost the group store of the frun agent at {self.path}: {error}"
            ) from error
        except FrameError as error:
            raise ValueError(str(error)) from error
        self._give(sock)
        if code != Status.OK:
            text = b" ".join(answer).decode(errors="replace")
            raise _ERRORS.get(code, ValueError)(text)
        return answer

    def close(self) -> None:
        """Close what is idle; the next call connects again."""
        while self._idle:
            self._idle.pop()[1].close()

    def __del__(self) -> None:
        """Close with the last store that uses this, without a ResourceWarning."""
        self.close()

    def _take(self) -> socket.socket:
        while True:
            try:
                pid, sock = self._idle.pop()
            except IndexError:
                break
            if pid == os.getpid():
                return sock
            sock.close()  # the parent's; closing our copy does not end it
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(_SLACK_S)
            sock.connect(self.path)
        except BaseException:
            sock.close()
            raise
        return sock

    def _give(self, sock: socket.socket) -> None:
        if len(self._idle) < _IDLE:
            self._idle.append((os.getpid(), sock))
        else:
            sock.close()


def _receive(sock: socket.socket) -> tuple[int, Blobs]:
    head = _exactly(sock, HEAD_SIZE)
    size, _, _, _, code = decode_head(head)
    return code, decode_body(_exactly(sock, size)) if size else ()


def _exactly(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    with memoryview(data) as view:
        at = 0
        while at < size:
            count = sock.recv_into(view[at:], min(size - at, _PIECE))
            if count == 0:
                raise EOFError("the agent closed the connection")
            at += count
    return data


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else bytes(text)


class GroupStore(Store):
    """The store of one generation, as torch's process groups use it.

    torch calls it from threads of C++ too, and those keep only the C++ half alive: whoever gives
    one to torch must keep a reference to it for as long as the process lives.
    """

    timeout: timedelta
    """How long a wait may take. Kept by torch, whose `PrefixStore.set_timeout` sets it there."""

    def __init__(
        self,
        path: str,
        generation: int,
        scope: str = "",
        timeout: timedelta | None = None,
        connections: Connections | None = None,
    ) -> None:
        """Use the agent's unix socket at `path`.

        `scope` is put in front of every key, so that groups that are made one after another do
        not meet each other's keys. `generation` may be set later, for the keys of a newer one.
        """
        super().__init__()
        self.generation = generation
        self.scope = scope
        self._prefix = scope.encode()
        self._connections = connections or Connections(path)
        self._clones: list[GroupStore] = []
        if timeout is not None:
            self.set_timeout(timeout)

    @property
    def path(self) -> str:
        """Path of the agent's socket."""
        return self._connections.path

    def clone(self) -> "GroupStore":
        """Return another store with the same keys and a time-out of its own."""
        twin = GroupStore(self.path, self.generation, self.scope, self.timeout, self._connections)
        self._clones.append(twin)  # C++ keeps only its half
        return twin

    def set(self, key: Key, value: Value) -> None:
        """Store `value` at `key`."""
        self._prompt(Op.SET, self._key(key), _bytes(value))

    def get(self, key: Key) -> bytes:
        """Return the value at `key`; wait for it as long as the store's time-out says."""
        return self._wait(Op.GET, [self._key(key)], None)[0]

    def add(self, key: Key, value: int) -> int:
        """Add to the number at `key` (0 if absent) and return the sum."""
        return int(self._prompt(Op.ADD, self._key(key), str(int(value)).encode())[0])

    def check(self, keys: Sequence[Key]) -> bool:
        """Tell whether all keys are there."""
        return self._prompt(Op.CHECK, *map(self._key, keys))[0] == b"1"

    def wait(self, keys: Sequence[Key], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        self._wait(Op.WAIT, [self._key(key) for key in keys], timeout)

    def compare_set(self, key: Key, expected_value: Value, desired_value: Value) -> bytes:
        """Replace `expected_value` (empty: or nothing) by `desired_value`; return what is there."""
        return self._prompt(
            Op.COMPARE_SET, self._key(key), _bytes(expected_value), _bytes(desired_value)
        )[0]

    def delete_key(self, key: Key) -> bool:
        """Remove `key`; tell whether it was there."""
        return self._prompt(Op.DELETE, self._key(key))[0] == b"1"

    def num_keys(self) -> int:
        """Return how many keys there are."""
        return int(self._prompt(Op.NUM_KEYS, self._prefix)[0])

    def append(self, key: Key, value: Value) -> None:
        """Add bytes at the end of the value at `key`."""
        self._prompt(Op.APPEND, self._key(key), _bytes(value))

    def multi_get(self, keys: Sequence[Key]) -> list[bytes]:
        """Return the values at `keys`, waiting as `get` does."""
        return list(self._wait(Op.GET, [self._key(key) for key in keys], None))

    def multi_set(self, keys: Sequence[Key], values: Sequence[Value]) -> None:
        """Store each value at its key."""
        pairs = zip(keys, values, strict=True)
        self._prompt(
            Op.SET, *(blob for key, value in pairs for blob in (self._key(key), _bytes(value)))
        )

    def has_extended_api(self) -> bool:
        """Tell that append, multi_get and multi_set work."""
        return True

    def queue_push(self, key: Key, value: Value) -> None:
        """Put a value at the end of a queue."""
        self._prompt(Op.PUSH, self._key(key), _bytes(value))

    def queue_pop(self, key: Key, block: bool = True) -> bytes:
        """Take the first value of a queue; wait for one if `block`.

        Raises:
            QueueEmptyError: there is none and `block` is false.
        """
        if not block:
            return self._prompt(Op.POP, self._key(key), b"")[0]
        return self._wait(Op.POP, [self._key(key), b"1"], None)[0]

    def queue_len(self, key: Key) -> int:
        """Return how many values a queue holds."""
        return int(self._prompt(Op.QUEUE_LEN, self._key(key))[0])

    def list_keys(self) -> list[str]:
        """Return all keys."""
        cut = len(self._prefix)
        return [key[cut:].decode() for key in self._prompt(Op.LIST_KEYS, self._prefix)]

    # torch's C++ side looks these two up under their C++ names
    deleteKey = delete_key
    getNumKeys = num_keys

    def _key(self, key: Key) -> bytes:
        return self._prefix + _bytes(key)

    def _prompt(self, op: Op, *blobs: bytes) -> Blobs:
        return self._connections.ask(op, blobs, self.generation, PROMPT_S)

    def _wait(self, op: Op, blobs: Sequence[bytes], timeout: timedelta | None) -> Blobs:
        seconds = (self.timeout if timeout is None else timeout).total_seconds()
        return self._connections.ask(op, blobs, self.generation, max(seconds, 0.001))
