"""The connections of the group store: to this agent from workers and peers, and from it to a peer.

Owns framing, the hello and what happens when a connection ends. What a request means and who
answers it is decided by the `GroupStore`.
"""

import asyncio
import hmac
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

from frun.agent.groupstore_call import Call, Request
from frun.agent.groupstore_keyspace import failure
from frun.protocol.storeframe import (
    MAGIC,
    MAX_BODY,
    MAX_HELLO,
    PROTOCOL,
    Blobs,
    Decoder,
    Frame,
    FrameError,
    Op,
    Status,
    encode,
    hello_blobs,
    milliseconds,
)

logger = logging.getLogger(__name__)

HELLO_S = 60.0
"""Seconds for a hello to come, and for this host to learn the token that it must show."""
CONNECT_S = 10.0
"""Seconds to reach a peer. It listens before its record exists, so an answer is prompt."""
_ALIVE_S = 5
"""Seconds between probes of a silent connection between agents."""
_OPS = {int(op): op for op in Op}
_STATUSES = {int(status): status for status in Status}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Where one part of the group store is."""

    host: str
    """Name of the host, for messages."""
    address: str
    """Address literal."""
    port: int

    def __str__(self) -> str:
        """Return how a message names it."""
        return f"host {self.host} ({self.address} port {self.port})"


class Place(Protocol):
    """What a connection needs of a slot of the rank table, or of a `Shard`."""

    @property
    def host(self) -> str:
        """Name of the host."""
        ...

    @property
    def address(self) -> str:
        """Address literal."""
        ...

    @property
    def port(self) -> int:
        """Port of its part of the group store."""
        ...


def shard_at(place: Place) -> Shard:
    """Return what is the same in each generation in which this host has the same part."""
    return Shard(host=place.host, address=place.address, port=place.port)


class Server(Protocol):
    """What a connection needs of the store that it leads to."""

    links: set["Link"]

    def start(self, request: Request, answer: Callable[[Status, Blobs], None]) -> Call:
        """Begin a request; `answer` may be called before this returns."""
        ...

    def verdict(self, hello: Blobs) -> str | None:
        """Return why a hello is refused, empty if it is right, None if that is not known yet."""
        ...


def why_refused(hello: Blobs, job: str, token: str) -> str | None:
    """Return why this hello is refused: a reason, empty if it is right, None without a token."""
    if len(hello) != 4 or hello[0] != MAGIC:
        return "it did not say hello as a frun agent does"
    if hello[1] != str(PROTOCOL).encode():
        theirs = hello[1][:16].decode(errors="replace")
        return f"it speaks protocol {theirs}, this agent speaks {PROTOCOL}"
    if hello[2] != job.encode():
        return f"it belongs to job {hello[2][:64].decode(errors='replace')!r}, not {job!r}"
    if not token:
        return None
    return "" if hmac.compare_digest(hello[3], token.encode()) else "its token is wrong"


class Link(asyncio.Protocol):
    """A connection to this agent. From a peer it must say hello first."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop, *, peer: bool) -> None:
        """Serve requests that come over this connection from `server`."""
        self._server = server
        self._loop = loop
        self._peer = peer
        self._trusted = not peer
        self._hello: Blobs | None = None
        self._early: list[Frame] = []
        self._decoder = Decoder(MAX_HELLO if peer else MAX_BODY)
        self._calls: dict[int, Call] = {}
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take part in the store; a peer gets a bounded time to say hello."""
        self._transport = cast("asyncio.Transport", transport)
        self._server.links.add(self)
        if self._peer:
            keep_alive(transport)
            self._timer = self._loop.call_later(
                HELLO_S, lambda: self._refuse(f"no hello within {HELLO_S:.0f} s")
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop what the other side can no longer be told."""
        self._server.links.discard(self)
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.drop()

    def data_received(self, data: bytes) -> None:
        """Do every request that is complete."""
        try:
            for frame in self._decoder.feed(data):
                self._frame(frame)
        except FrameError as error:
            self._refuse(str(error))

    def close(self) -> None:
        """End the connection, with what was not sent yet."""
        if self._transport is not None:
            self._transport.abort()

    def check_hello(self) -> None:
        """Let the other side in or out, as soon as that can be told."""
        if self._trusted or self._hello is None or self._transport is None:
            return
        reason = self._server.verdict(self._hello)
        if reason is None:
            self._transport.pause_reading()
            return
        if reason:
            self._refuse(reason)
            return
        self._trusted = True
        self._decoder.limit = MAX_BODY
        if self._timer is not None:
            self._timer.cancel()
        self._send(0, Status.OK, ())
        early, self._early = self._early, []
        for frame in early:
            self._frame(frame)
        if self._transport is not None:
            self._transport.resume_reading()

    def _frame(self, frame: Frame) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._trusted:
            self._request(frame)
        elif self._hello is not None:
            self._early.append(frame)
        elif frame.code == Op.HELLO:
            self._hello = frame.blobs
            self.check_hello()
        else:
            self._refuse("it did not say hello as a frun agent does")

    def _request(self, frame: Frame) -> None:
        id_ = frame.id
        if frame.code == Op.CANCEL:
            call = self._calls.pop(id_, None)
            if call is not None:
                call.drop()
            return
        if frame.code == Op.PING:
            self._send(id_, Status.OK, ())
            return
        op = _OPS.get(frame.code)
        if op is None or op is Op.HELLO or id_ in self._calls:
            self._refuse(f"it sent request {id_} with operation {frame.code}, which makes no sense")
            return
        answered = False

        def answer(status: Status, blobs: Blobs) -> None:
            nonlocal answered
            answered = True
            self._calls.pop(id_, None)
            self._send(id_, status, blobs)

        request = Request(
            op=op,
            generation=frame.generation,
            timeout_s=frame.timeout_ms / 1000,
            blobs=frame.blobs,
            routed=self._peer,
        )
        call = self._server.start(request, answer)
        if not answered:
            self._calls[id_] = call

    def _send(self, id_: int, status: Status, blobs: Blobs) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        try:
            self._transport.write(encode(id_, status, blobs))
        except FrameError as error:
            self._transport.write(encode(id_, Status.REFUSED, (str(error).encode(),)))

    def _refuse(self, reason: str) -> None:
        if self._transport is not None:
            peer = self._transport.get_extra_info("peername") or "a worker"
            logger.warning("closed a connection to the group store from %s: %s", peer, reason)
            self._transport.abort()
            self._transport = None


class PeerLink(asyncio.Protocol):
    """This agent's connection to the agent of another shard, opened by the first request."""

    def __init__(self, shard: Shard, job: str, token: str, loop: asyncio.AbstractEventLoop) -> None:
        """Prepare to ask the agent at `shard`."""
        self.shard = shard
        self._hello = encode(0, Op.HELLO, hello_blobs(job, token))
        self._loop = loop
        self._calls: dict[int, Call] = {}
        self._next_id = 1
        self._queued: list[bytes] = []
        self._decoder = Decoder()
        self._transport: asyncio.Transport | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._accepted = False

    def ask(self, call: Call) -> None:
        """Send a request; `call` is finished with the answer, or with why there is none.

        Raises:
            FrameError: the request is too large.
        """
        id_, self._next_id = self._next_id, self._next_id % 0xFFFFFFFF + 1
        request = call.request
        left_s = call.deadline - self._loop.time()
        frame = encode(id_, request.op, request.blobs, request.generation, milliseconds(left_s))
        self._calls[id_] = call
        call.at_end(lambda: self._done(id_))
        self._write(frame)
        if self._transport is None and self._connecting is None:
            self._connecting = self._loop.create_task(self._connect())

    def close(self) -> None:
        """End the connection; what waits is told so."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._transport is not None:
            self._transport.abort()
        self._fail(f"the connection to {self.shard} was closed")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say hello; requests follow when the other side has answered it."""
        self._transport = cast("asyncio.Transport", transport)
        self._decoder = Decoder()
        self._accepted = False
        keep_alive(transport)
        self._transport.write(self._hello)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell who waits; the next request opens a new connection."""
        self._transport = None
        if self._accepted:
            why = f"lost the connection to {self.shard}"
        else:
            why = (
                f"{self.shard} closed the connection to its group store before it said hello: it "
                "stopped, or refused this agent (another job, token or version of frun; its log "
                "says which)"
            )
        self._fail(f"{why}: {exc}" if exc else why)

    def data_received(self, data: bytes) -> None:
        """Finish the requests that are answered here."""
        try:
            for frame in self._decoder.feed(data):
                if not self._accepted:
                    self._accepted = True
                    queued, self._queued = self._queued, []
                    self._write(*queued)
                # taken out first, so that `_done` has nobody to cancel
                call = self._calls.pop(frame.id, None)
                if call is not None:
                    call.finish(_STATUSES.get(frame.code, Status.REFUSED), frame.blobs)
        except FrameError as error:
            logger.warning("closed the connection to the group store of %s: %s", self.shard, error)
            if self._transport is not None:
                self._transport.abort()

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._loop.create_connection(
                    lambda: self, self.shard.address, self.shard.port
                )
        except (OSError, TimeoutError) as error:
            reason = str(error) or f"no answer within {CONNECT_S:.0f} s"
            self._fail(f"can not reach the group store of {self.shard}: {reason}")
        finally:
            self._connecting = None

    def _fail(self, text: str) -> None:
        self._queued.clear()
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.finish(*failure(Status.UNREACHABLE, text))

    def _done(self, id_: int) -> None:
        if self._calls.pop(id_, None) is not None:
            self._write(encode(id_, Op.CANCEL, ()))

    def _write(self, *frames: bytes) -> None:
        if self._transport is not None and self._accepted:
            self._transport.writelines(frames)
        else:
            self._queued.extend(frames)


def keep_alive(transport: asyncio.BaseTransport) -> None:
    """Make the kernel notice within about 20 s that the other machine is gone."""
    sock: socket.socket | None = transport.get_extra_info("socket")
    if sock is not None and sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ALIVE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ALIVE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
