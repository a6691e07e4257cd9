"""Requests of the group store that are under way: each is answered once or dropped.

Owns their time bound and clean-up, and how a request over several shards is cut and put together
again. What the operations mean is the keyspace's.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from frun.agent.groupstore_keyspace import Answer
from frun.protocol.storeframe import Blobs, Op, Status, shard_of

_ALL_SHARDS = (Op.NUM_KEYS, Op.LIST_KEYS)
_SEVERAL_KEYS = (Op.SET, Op.GET, Op.WAIT, Op.CHECK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked, free of the connection it came over."""

    op: Op
    generation: int
    timeout_s: float
    blobs: Blobs
    routed: bool = False
    """It came from another agent, so it is for this shard and never forwarded again."""


class Call:
    """One request under way, or one part of it."""

    __slots__ = ("_deliver", "_undo", "deadline", "done", "request")

    def __init__(self, request: Request, deadline: float, deliver: Answer) -> None:
        """Answer through `deliver`; `deadline` is on the loop's clock."""
        self.request = request
        self.deadline = deadline
        self.done = False
        self._deliver = deliver
        self._undo: list[Callable[[], object]] = []

    def finish(self, status: Status, blobs: Blobs) -> None:
        """Answer, unless it was answered or dropped before."""
        if not self.done:
            self.drop()
            self._deliver(status, blobs)

    def drop(self) -> None:
        """Forget the request: nobody waits for it any more."""
        if not self.done:
            self.done = True
            for undo in self._undo:
                undo()
            self._undo.clear()

    def at_end(self, undo: Callable[[], object]) -> None:
        """Call `undo` when the request is answered or dropped, now if it already is."""
        if self.done:
            undo()
        else:
            self._undo.append(undo)

    def bound(self, loop: asyncio.AbstractEventLoop, slack_s: float, answer: "Late") -> None:
        """Finish with what `answer` says when the deadline and `slack_s` are over."""
        if not self.done:
            timer = loop.call_at(self.deadline + slack_s, lambda: self.finish(*answer()))
            self.at_end(timer.cancel)


Late = Callable[[], tuple[Status, Blobs]]


def split(request: Request, shards: int) -> dict[int, Blobs]:
    """Return which shard gets which blobs. Empty only for a request over no keys."""
    if request.op in _ALL_SHARDS:
        return dict.fromkeys(range(shards), request.blobs)
    if request.op not in _SEVERAL_KEYS:
        return {shard_of(request.blobs[0] if request.blobs else b"", shards): request.blobs}
    width = 2 if request.op is Op.SET else 1
    parts: dict[int, list[bytes]] = {}
    for at in range(0, len(request.blobs), width):
        part = parts.setdefault(shard_of(request.blobs[at], shards), [])
        part.extend(request.blobs[at : at + width])
    return {shard: tuple(blobs) for shard, blobs in parts.items()}


def join(request: Request, shards: int, answers: dict[int, Blobs]) -> tuple[Status, Blobs]:
    """Return the answer of the whole request from the OK answers of its parts."""
    match request.op:
        case Op.GET:
            iterators = {shard: iter(blobs) for shard, blobs in answers.items()}
            values = [next(iterators[shard_of(key, shards)], b"") for key in request.blobs]
            return Status.OK, tuple(values)
        case Op.CHECK:
            return Status.OK, (b"1" if all(a == (b"1",) for a in answers.values()) else b"0",)
        case Op.NUM_KEYS:
            return Status.OK, (str(sum(int(a[0]) for a in answers.values())).encode(),)
        case Op.LIST_KEYS:
            return Status.OK, tuple(key for blobs in answers.values() for key in blobs)
        case _:
            return Status.OK, ()


class Gather:
    """Waits for the parts of one request; the first failure is the answer of the whole."""

    def __init__(self, call: Call, shards: int, parts: int) -> None:
        """Finish `call` when `parts` answers are in."""
        self._call = call
        self._shards = shards
        self._missing = parts
        self._answers: dict[int, Blobs] = {}

    def part(self, shard: int) -> Answer:
        """Return what to call with the answer of `shard`."""

        def arrived(status: Status, blobs: Blobs) -> None:
            if status is not Status.OK:
                self._call.finish(status, blobs)
                return
            self._answers[shard] = blobs
            self._missing -= 1
            if self._missing == 0 and not self._call.done:
                self._call.finish(*join(self._call.request, self._shards, self._answers))

        return arrived
