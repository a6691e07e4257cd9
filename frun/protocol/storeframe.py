"""The frames of the group store: what a worker asks its agent, and an agent its peers.

Owns the bytes only. What an operation does is the agent's (`frun.agent.groupstore`); how a worker
waits for its answer is the client's (`frun.worker.groupstore`).

A frame is a head and a list of blobs. Numbers are big-endian; nothing is pickled::

    head   u32 bytes after the head | u32 id | u32 generation | u32 timeout in ms | u8 op or status
    body   per blob: u32 length, bytes

An answer carries the id of its request; its generation and timeout are 0.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from zlib import crc32

from frun.errors import FrunError

PROTOCOL = 1
"""Number of this protocol; agents that speak another one refuse each other."""

MAGIC = b"frun-groupstore"
"""First blob of a hello, so that a stranger's bytes are not taken for one."""

MAX_BODY = 1 << 30
"""Bytes; larger bodies are refused instead of filling the agent's memory."""

MAX_HELLO = 4096
"""Bytes; all that a connection may send before it has shown the job's token."""

PROMPT_S = 60.0
"""Seconds for an operation that does not wait for a key: it may still wait for its generation."""

COMMIT_SCOPE = "frun/commit/"
"""Prefix of keys on which a word may still be written when their generation has ended: whether an update was
made must not depend on which host saw the end first."""

_HEAD = struct.Struct("!IIIIB")
_LENGTH = struct.Struct("!I")
_MAX_U32 = 0xFFFFFFFF

HEAD_SIZE = _HEAD.size


class FrameError(FrunError):
    """Bytes that are no frame of this protocol, or one that is too large."""


class Op(IntEnum):
    """What is asked."""

    HELLO = 1
    """magic, protocol, job, token. First on a TCP connection; not used on the unix socket."""
    SET = 2
    """key, value, key, value, ..."""
    GET = 3
    """keys; waits until all are there; answers their values."""
    ADD = 4
    """key, decimal increment; answers the decimal sum."""
    WAIT = 5
    """keys; waits until all are there."""
    CHECK = 6
    """keys; answers b"1" if all are there, else b"0"."""
    COMPARE_SET = 7
    """key, expected, desired; answers what is stored afterwards."""
    DELETE = 8
    """key; answers b"1" if it was there, else b"0"."""
    NUM_KEYS = 9
    """prefix; answers the decimal number of keys that begin with it, on all shards."""
    APPEND = 10
    """key, bytes to add at its end."""
    PUSH = 11
    """queue, value."""
    POP = 12
    """queue, b"1" to wait for a value or b""; answers the value."""
    QUEUE_LEN = 13
    """queue; answers the decimal length."""
    LIST_KEYS = 14
    """prefix; answers the keys that begin with it, on all shards."""
    CANCEL = 15
    """Nobody waits for the request of this id any more; it is not answered."""
    PING = 16
    """Answered at once, whatever the generation: the agent lives."""


class Status(IntEnum):
    """How a request ended. All but OK carry one blob: a line for people."""

    OK = 128
    TIMEOUT = 129
    """Keys were not there in time."""
    UNREACHABLE = 130
    """The agent that holds the key is gone or does not answer."""
    ENDED = 131
    """The request names a generation that is over."""
    EMPTY = 132
    """The queue has no value and the request does not want to wait."""
    REFUSED = 133
    """The request makes no sense: no number to add to, unknown operation, too large."""


Blobs = tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One request or answer."""

    id: int
    code: int
    """An `Op` in a request, a `Status` in an answer."""
    generation: int = 0
    timeout_ms: int = 0
    """How long the answer may take, waiting for the generation to begin included."""
    blobs: Blobs = ()


def encode(
    id_: int, code: int, blobs: Sequence[bytes], generation: int = 0, timeout_ms: int = 0
) -> bytes:
    """Return the bytes of one frame.

    Raises:
        FrameError: the blobs are larger than `MAX_BODY` together.
    """
    pieces = [b""]
    size = 0
    for blob in blobs:
        pieces.append(_LENGTH.pack(len(blob) if len(blob) <= MAX_BODY else 0))
        pieces.append(blob)
        size += _LENGTH.size + len(blob)
    if size > MAX_BODY:
        raise FrameError(
            f"{size} bytes in one request to the group store are too many; the limit is {MAX_BODY}"
        )
    pieces[0] = _HEAD.pack(size, id_, generation, min(timeout_ms, _MAX_U32), code)
    return b"".join(pieces)


def decode_head(head: bytes | bytearray) -> tuple[int, int, int, int, int]:
    """Return (body size, id, generation, timeout in ms, code) of `HEAD_SIZE` bytes."""
    size, id_, generation, timeout_ms, code = _HEAD.unpack_from(head)
    return size, id_, generation, timeout_ms, code


def decode_body(body: bytes | bytearray | memoryview) -> Blobs:
    """Return the blobs of a body.

    Raises:
        FrameError: a length points past the end.
    """
    blobs: list[bytes] = []
    at, end = 0, len(body)
    with memoryview(body) as view:
        while at < end:
            if end - at < _LENGTH.size:
                raise FrameError("a frame of the group store ends inside a length")
            (length,) = _LENGTH.unpack_from(view, at)
            at += _LENGTH.size
            if length > end - at:
                raise FrameError("a frame of the group store ends inside a value")
            blobs.append(bytes(view[at : at + length]))
            at += length
    return tuple(blobs)


class Decoder:
    """Cuts a stream of bytes into frames. One per connection; keeps what is not yet complete."""

    __slots__ = ("_buffer", "_need", "limit")

    def __init__(self, limit: int = MAX_BODY) -> None:
        """Refuse bodies of more than `limit` bytes; `limit` may be raised later."""
        self.limit = limit
        self._buffer = bytearray()
        self._need = HEAD_SIZE

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Take `data` and yield the frames that are complete now.

        Raises:
            FrameError: the stream is not one of this protocol; nothing after it can be read.
        """
        self._buffer += data
        # `_need` saves looking at a large value again with each of its many pieces
        while len(self._buffer) >= self._need:
            size, id_, generation, timeout_ms, code = decode_head(self._buffer)
            if size > self.limit:
                raise FrameError(f"a frame of {size} bytes is larger than {self.limit}")
            end = HEAD_SIZE + size
            self._need = end
            if len(self._buffer) < end:
                return
            with memoryview(self._buffer) as view:
                blobs = decode_body(view[HEAD_SIZE:end])
            del self._buffer[:end]
            self._need = HEAD_SIZE
            yield Frame(
                id=id_, code=code, generation=generation, timeout_ms=timeout_ms, blobs=blobs
            )


def shard_of(key: bytes, shards: int) -> int:
    """Return which of `shards` parts holds `key`; the same on every host and Python."""
    return crc32(key) % shards


def milliseconds(seconds: float) -> int:
    """Return whole milliseconds for a frame, at least 1, at most what fits."""
    return max(1, min(int(seconds * 1000), _MAX_U32))


def hello_blobs(job: str, token: str) -> Blobs:
    """Return what a hello says."""
    return (MAGIC, str(PROTOCOL).encode(), job.encode(), token.encode())


def names(keys: Iterable[bytes], limit: int = 8) -> str:
    """Return keys for a message, the first `limit` of them."""
    all_keys = [key.decode(errors="replace") for key in keys]
    more = f" and {len(all_keys) - limit} more" if len(all_keys) > limit else ""
    return ", ".join(all_keys[:limit]) + more
