"""Requests to the zygote and its messages, over one socket that keeps message boundaries.

Owns the socket and which answer belongs to which request. What is asked is `frun.agent.zygote`'s.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from frun.errors import LaunchError

Message = dict[str, Any]
Future = asyncio.Future[Message]

_LONGEST = 1 << 18


class Link:
    """The agent's end. All methods belong to the event loop that made it."""

    def __init__(
        self, connection: socket.socket, on_message: Callable[[Message, list[int]], None]
    ) -> None:
        """Own `connection`; `on_message` gets every message, and owns the descriptors with it."""
        self._loop = asyncio.get_running_loop()
        self._socket = connection
        self._socket.setblocking(False)
        self._on_message = on_message
        self._requests: dict[int, Future] = {}
        self._last = 0
        self._why_closed = ""
        self._writable: asyncio.Future[None] | None = None
        self._loop.add_reader(self._socket, self.read)

    async def ask(self, request: Mapping[str, Any], fds: Sequence[int] = ()) -> Future:
        """Send a request; return what its answer will be put in. Raises LaunchError."""
        self._last += 1
        ident = self._last
        await self._send(json.dumps({**request, "id": ident}).encode(), fds)
        future: Future = self._loop.create_future()
        if self._why_closed:
            raise LaunchError(self._why_closed)
        self._requests[ident] = future
        return future

    def tell(self, request: Mapping[str, Any]) -> None:
        """Send what has no answer, if the zygote still listens."""
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps(request).encode())

    def answer(self, message: Message) -> None:
        """Finish the request that this message answers."""
        future = self._requests.pop(message["id"], None)
        if future is not None and not future.done():
            future.set_result(message)

    def read(self) -> None:
        """Handle all messages that have come."""
        while not self._why_closed:
            try:
                data, fds, _, _ = socket.recv_fds(
                    self._socket, _LONGEST, 1, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                # The zygote is about to end; its pidfd tells when.
                self._loop.remove_reader(self._socket)
                return
            self._on_message(json.loads(data), fds)

    def finish(self) -> None:
        """Let the zygote see the end of all requests, which ends it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self, why: str) -> None:
        """Fail all requests, those to come as well."""
        if self._why_closed:
            return
        self._why_closed = why
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        for future in self._requests.values():
            if not future.done():
                future.set_exception(LaunchError(why))
                future.exception()  # whoever waited may have gone
        self._requests.clear()

    async def _send(self, data: bytes, fds: Sequence[int]) -> None:
        while not self._why_closed:
            try:
                socket.send_fds(self._socket, [data], list(fds))
            except BlockingIOError:
                await self._until_writable()
            except OSError as error:
                raise LaunchError(f"the zygote does not listen: {error.strerror}") from error
            else:
                return
        raise LaunchError(self._why_closed)

    async def _until_writable(self) -> None:
        """Wait for room, or for the end; several requests may wait."""
        if self._writable is None or self._writable.done():
            self._writable = self._loop.create_future()
            self._loop.add_writer(self._socket, self._room)
        await asyncio.shield(self._writable)

    def _room(self) -> None:
        self._loop.remove_writer(self._socket)
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
