"""This host's part of the store in which the process groups of a generation meet.

Owns one shard per generation, the listening sockets and the way of a request: answered here, asked
of the agent that holds the key, or cut over several. Each generation starts empty and old keys
can't be met again. Leaves to others: which generation it is (the rank table), and the workers' side
(`frun.worker.groupstore`).
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from frun.agent.groupstore_call import Call, Gather, Late, Request, join, split
from frun.agent.groupstore_combine import Combiner
from frun.agent.groupstore_keyspace import Answer, Keyspace, failure
from frun.agent.groupstore_link import Link, PeerLink, Place, Shard, shard_at, why_refused
from frun.errors import LaunchError
from frun.protocol.storeframe import (
    COMMIT_SCOPE,
    PROMPT_S,
    Blobs,
    Op,
    Status,
    names,
)

__all__ = ["GroupStore", "Shard"]

logger = logging.getLogger(__name__)

_COMMIT = COMMIT_SCOPE.encode()

PEER_SLACK_S = 5.0
"""Seconds on top of a request's own time that a peer gets to say that this time is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Generation:
    """The world whose keys this host serves now."""

    number: int
    shards: tuple[Place, ...]
    self_index: int
    space: Keyspace = field(default_factory=Keyspace)


class GroupStore:
    """One host's part of the group store. Use it from the event loop's thread only."""

    def __init__(self, token: str, job: str) -> None:
        """Prepare; nothing listens yet. An empty `token` lets no peer in until one is set."""
        self.token = token
        self.job = job
        self.links: set[Link] = set()
        self._generation: _Generation | None = None
        self._ended: _Generation | None = None
        """The one served before, of which words on updates are left."""
        self._last = 0
        self._calls: set[Call] = set()
        self._parked: dict[Call, asyncio.TimerHandle] = {}
        self._peers: dict[Shard, Combiner] = {}
        self._servers: list[asyncio.Server] = []
        self._paths: list[str] = []

    @property
    def generation(self) -> int:
        """Number of the generation that is served, or 0."""
        return self._generation.number if self._generation else 0

    async def listen_tcp(self, host: str, port: int = 0) -> int:
        """Listen for other agents on an address literal; return the port.

        Raises:
            LaunchError: the address can't be listened on.
        """
        loop = asyncio.get_running_loop()
        try:
            server = await loop.create_server(
                lambda: Link(self, loop, peer=True), host, port, backlog=1024
            )
        except OSError as error:
            raise LaunchError(
                f"can not listen for the group store on {host} port {port}: {error}"
            ) from error
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def listen_unix(self, path: str) -> None:
        """Listen for this host's workers at `path`, for this user only.

        Raises:
            LaunchError: the path can't be listened on (too long, or in use).
        """
        loop = asyncio.get_running_loop()
        try:
            server = await loop.create_unix_server(
                lambda: Link(self, loop, peer=False), path, backlog=1024
            )
            os.chmod(path, 0o600)
        except OSError as error:
            raise LaunchError(f"can not listen for the group store on {path}: {error}") from error
        self._servers.append(server)
        self._paths.append(path)

    def begin(
        self, generation: int, shards: Sequence[Place], self_index: int, token: str = ""
    ) -> None:
        """Serve `generation` with an empty store, and end the one before.

        `token` replaces the one that peers must show, if it is given: a host may listen before it
        has read the rank table. Doing it again for the same generation changes nothing.

        Raises:
            ValueError: the generation is older than one that was served, or not for this host.
        """
        current = self._generation
        if current is not None and generation == current.number:
            if (tuple(shards), self_index) != (current.shards, current.self_index):
                raise ValueError(f"generation {generation} has begun with other hosts")
            return
        if generation <= self._last:
            raise ValueError(f"generation {generation} is not newer than {self._last}")
        if not 0 <= self_index < len(shards):
            raise ValueError(f"shard {self_index} of {len(shards)} does not exist")
        self._end(generation - 1)
        if token and token != self.token:
            self.token = token
            for peer in self._peers.values():
                peer.close()
            self._peers.clear()
        self._last = generation
        self._generation = _Generation(
            number=generation, shards=tuple(shards), self_index=self_index
        )
        if self._peers:
            kept = {shard_at(place) for place in shards}
            for shard in self._peers.keys() - kept:
                self._peers.pop(shard).close()
        for link in list(self.links):
            link.check_hello()
        for call in list(self._parked):
            if call.request.generation <= generation:
                self._unpark(call)
                self._route(call)

    def end(self) -> None:
        """Serve nothing until the next `begin`; what waits is told that its generation ended."""
        self._end(self._last)

    async def close(self) -> None:
        """Stop listening, end every connection and remove the unix socket. Can be repeated."""
        self.end()
        for call in list(self._calls):
            call.finish(*failure(Status.UNREACHABLE, "this host's agent stops"))
        for server in self._servers:
            server.close()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        for link in list(self.links):
            link.close()
        for path in self._paths:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        self._servers.clear()
        self._paths.clear()
        # the loop closes the sockets of aborted connections on its next turn
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def start(self, request: Request, answer: Answer) -> Call:
        """Begin a request that came over a connection; `answer` may be called before return."""
        call = Call(request, asyncio.get_running_loop().time() + request.timeout_s, answer)
        self._calls.add(call)
        call.at_end(lambda: self._calls.discard(call))
        self._route(call)
        return call

    def verdict(self, hello: Blobs) -> str | None:
        """Return why a peer is refused, empty if it is right, None while there is no token."""
        return why_refused(hello, self.job, self.token)

    def _end(self, upto: int) -> None:
        if self._generation is not None:
            space = self._generation.space.only(_COMMIT)
            self._ended = replace(self._generation, space=space)
        self._generation = None
        for call in list(self._calls):
            if call.request.generation <= upto:
                call.finish(*_over(call.request.generation))

    def _route(self, call: Call) -> None:
        request, current = call.request, self._generation
        ended = self._ended
        if ended is not None and request.generation == ended.number and _is_word(request):
            current = ended
        if current is None or request.generation != current.number:
            if request.generation <= self._last:
                call.finish(*_over(request.generation))
            else:
                self._park(call)
            return
        if request.routed:
            self._part(call, current, current.self_index)
            return
        parts = split(request, len(current.shards))
        if len(parts) == 1:
            self._part(call, current, next(iter(parts)))
            return
        if not parts:
            call.finish(*join(request, len(current.shards), {}))
            return
        gather = Gather(call, len(current.shards), len(parts))
        for shard, blobs in parts.items():
            part = Call(replace(request, blobs=blobs), call.deadline, gather.part(shard))
            call.at_end(part.drop)
            self._part(part, current, shard)

    def _part(self, call: Call, current: _Generation, shard: int) -> None:
        if call.done:
            return
        request = call.request
        if shard == current.self_index:
            waiting = current.space.run(request.op, request.blobs, call.finish)
            if waiting is not None:
                call.at_end(waiting.drop)
                self._bound(call, 0, lambda: _late(request, waiting.missing()))
            return
        peer = self._peer(current.shards[shard])
        peer.ask(call)
        text = f"{peer.shard} did not answer a request of its group store"
        self._bound(call, PEER_SLACK_S, lambda: failure(Status.UNREACHABLE, text))

    def _bound(self, call: Call, slack_s: float, late: Late) -> None:
        call.bound(asyncio.get_running_loop(), slack_s, late)

    def _peer(self, place: Place) -> Combiner:
        shard = shard_at(place)
        peer = self._peers.get(shard)
        if peer is None:
            loop = asyncio.get_running_loop()
            link = PeerLink(shard, self.job, self.token, loop)
            peer = self._peers[shard] = Combiner(link, loop)
        return peer

    def _park(self, call: Call) -> None:
        loop = asyncio.get_running_loop()
        wait_s = min(call.deadline - loop.time(), PROMPT_S)
        text = (
            f"generation {call.request.generation} did not begin on this host within {wait_s:.1f} s"
        )
        self._parked[call] = loop.call_later(
            wait_s, lambda: call.finish(*failure(Status.TIMEOUT, text))
        )
        call.at_end(lambda: self._unpark(call))

    def _unpark(self, call: Call) -> None:
        timer = self._parked.pop(call, None)
        if timer is not None:
            timer.cancel()


def _is_word(request: Request) -> bool:
    """Whether it asks for the word on an update, which may be written after its generation."""
    blobs = request.blobs
    return request.op is Op.COMPARE_SET and bool(blobs) and blobs[0].startswith(_COMMIT)


def _over(generation: int) -> tuple[Status, Blobs]:
    return failure(Status.ENDED, f"the store of generation {generation} ended")


def _late(request: Request, missing: Sequence[bytes]) -> tuple[Status, Blobs]:
    return failure(
        Status.TIMEOUT,
        f"wait timeout after {request.timeout_s * 1000:.0f}ms, keys: {names(missing)}",
    )
