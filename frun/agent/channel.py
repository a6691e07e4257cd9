"""The agent's end of the worker channel: one unix socket per worker, facts up and orders down.

Owns the connections and who is at their other end (by the kernel's word, not the worker's). What a fact
means is for the owner of the workers.
"""

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Callable

from frun.errors import LaunchError, WireError
from frun.protocol.channel import Frames, Message, Order, encode

logger = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")
_PIECE = 64 * 1024


class Channel:
    """Listens for this host's workers. Use it on the agent's event loop only."""

    def __init__(self, path: str) -> None:
        """Listen at `path`, for this user only. Raises LaunchError."""
        self.on_message: Callable[[int, Message], None] = lambda pid, message: None
        """Called with the worker's pid for each message."""
        self.path = path
        self._loop = asyncio.get_running_loop()
        self._links: dict[int, _Link] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(path)
            os.chmod(path, 0o600)
            self._socket.listen(1024)
        except OSError as error:
            self._socket.close()
            raise LaunchError(f"can not listen for workers on {path}: {error}") from error
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._accept)

    def send(self, pid: int, order: Order) -> bool:
        """Send an order to a worker; False if it is not connected or does not read.

        Orders are short and few, so one that doesn't fit in the socket's buffer means a stuck worker.
        """
        link = self._links.get(pid)
        if link is None:
            return False
        frame = encode(order)
        try:
            return link.socket.send(frame) == len(frame)
        except OSError:
            return False

    def reaches(self, pid: int) -> bool:
        """Tell whether a worker is connected."""
        return pid in self._links

    def drain(self, pid: int) -> None:
        """Handle what a worker, now dead, had sent before its end, and forget it."""
        self._accept()
        link = self._links.get(pid)
        if link is not None:
            self._read(link)
            self._forget(link)

    def close(self) -> None:
        """End all connections and remove the socket."""
        for link in list(self._links.values()):
            self._forget(link)
        self._loop.remove_reader(self._socket)
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                logger.warning("a worker can not connect to its agent: %s", error)
                return
            connection.setblocking(False)
            raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid = _CREDENTIALS.unpack(raw)[0]
            known = self._links.get(pid)
            if known is not None:
                self._forget(known)
            link = _Link(pid, connection)
            self._links[pid] = link
            self._loop.add_reader(connection, self._read, link)

    def _read(self, link: "_Link") -> None:
        while link.pid in self._links:
            try:
                data = link.socket.recv(_PIECE)
                messages = link.frames.feed(data)
            except BlockingIOError:
                return
            except (OSError, WireError) as error:
                logger.warning("worker pid %d: %s", link.pid, error)
                self._forget(link)
                return
            for message in messages:
                self.on_message(link.pid, message)
            if not data:
                self._forget(link)

    def _forget(self, link: "_Link") -> None:
        if self._links.get(link.pid) is link:
            del self._links[link.pid]
            self._loop.remove_reader(link.socket)
            link.socket.close()


class _Link:
    """One worker's connection."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.socket = connection
        self.frames = Frames()
