"""What several workers of this host ask of the same peer at the same time is asked once.

A barrier of thousands of ranks is a counter and a key on one host; with eight ranks per host that agent gets
an eighth of the requests. Only requests that have not been sent are put together: whoever asks while an
equal one is under way is part of the next one, so that no answer is older than its question. What a
request means is the keyspace's.
"""

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from frun.agent.groupstore_call import Call, Request
from frun.agent.groupstore_keyspace import failure
from frun.agent.groupstore_link import PeerLink, Shard
from frun.protocol.storeframe import Blobs, FrameError, Op, Status, names

_SAME_ANSWER = (Op.GET, Op.WAIT)


@dataclass(slots=True)
class _Turn:
    """Equal requests: those under way as one, and those for the next turn."""

    sent: list[Call] = field(default_factory=list)
    next: list[Call] = field(default_factory=list)


class Combiner:
    """This agent's requests to one peer."""

    def __init__(self, peer: PeerLink, loop: asyncio.AbstractEventLoop) -> None:
        self._peer = peer
        self._loop = loop
        self._turns: dict[Hashable, _Turn] = {}

    @property
    def shard(self) -> Shard:
        """Where the peer is."""
        return self._peer.shard

    def ask(self, call: Call) -> None:
        """Send a request, now or with equal ones after the one that is under way."""
        key = _kind(call.request)
        if key is None:
            self._send(call)
            return
        turn = self._turns.get(key)
        if turn is None:
            self._turns[key] = _Turn(sent=[call])
            self._begin(key)
        else:
            turn.next.append(call)
            request = call.request
            # The request that it will be part of may have more time than it has itself.
            call.bound(self._loop, 0.0, lambda: _late(request))

    def close(self) -> None:
        """End the connection; what waits is told so."""
        self._peer.close()

    def _send(self, call: Call) -> None:
        try:
            self._peer.ask(call)
        except FrameError as error:
            call.finish(*failure(Status.REFUSED, str(error)))

    def _begin(self, key: Hashable) -> None:
        """Send one request for all whose turn it is; it lives as long as any of them waits."""
        calls = self._turns[key].sent
        first = calls[0].request
        amounts = [int(call.request.blobs[1]) for call in calls] if first.op is Op.ADD else []
        blobs = (first.blobs[0], str(sum(amounts)).encode()) if amounts else first.blobs
        waiting = set(calls)

        def answered(status: Status, answer: Blobs) -> None:
            for call, own in zip(calls, _shares(status, answer, amounts, len(calls)), strict=True):
                call.finish(status, own)

        def gone(call: Call) -> None:
            waiting.discard(call)
            if not waiting:
                whole.drop()

        deadline = max(call.deadline for call in calls)
        whole = Call(replace(first, blobs=blobs), deadline, answered)
        for call in calls:
            call.at_end(lambda call=call: gone(call))  # type: ignore[misc]
        whole.at_end(lambda: self._loop.call_soon(self._turn_over, key))
        if not whole.done:
            self._send(whole)

    def _turn_over(self, key: Hashable) -> None:
        turn = self._turns[key]
        turn.sent, turn.next = [call for call in turn.next if not call.done], []
        if turn.sent:
            self._begin(key)
        else:
            del self._turns[key]


def _kind(request: Request) -> Hashable | None:
    """Return what requests that can be one have in common; None if this one must be alone."""
    if request.op in _SAME_ANSWER:
        return request.op, request.generation, request.blobs
    if request.op is Op.ADD and len(request.blobs) == 2 and _is_number(request.blobs[1]):
        return request.op, request.generation, request.blobs[0]
    return None


def _is_number(text: bytes) -> bool:
    return text.removeprefix(b"-").isdigit()


def _shares(status: Status, answer: Blobs, amounts: Sequence[int], count: int) -> list[Blobs]:
    """Return each one's answer: of a sum, what it was when one had added and those after it had not."""
    if status is not Status.OK or not amounts:
        return [answer] * count
    total = int(answer[0]) - sum(amounts)
    shares: list[Blobs] = []
    for amount in amounts:
        total += amount
        shares.append((str(total).encode(),))
    return shares


def _late(request: Request) -> tuple[Status, Blobs]:
    keys = request.blobs[:1] if request.op is Op.ADD else request.blobs
    return failure(
        Status.TIMEOUT, f"wait timeout after {request.timeout_s * 1000:.0f}ms, keys: {names(keys)}"
    )
