"""The worker's end of the channel to its agent: says who it is and why it ends, hears what it is to do.

Owns one socket. It must never disturb the script: whatever is wrong with the agent, the script goes on.
"""

import contextlib
import os
import select
import socket
import threading
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType

from frun.errors import WireError
from frun.protocol.channel import (
    MAX_TEXT,
    Explain,
    Frames,
    Hello,
    Inject,
    Message,
    Order,
    Pause,
    Raised,
    Resume,
    Withdraw,
    encode,
)

_SEND_S = 2.0
"""Longest time that a message may take; the agent reads at once unless it is stopped."""
_PIECE = 64 * 1024


class Channel:
    """A connection to the agent. Silent when there is none."""

    def __init__(self, path: str) -> None:
        """Connect to the agent's socket, if it answers."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_SEND_S)
        try:
            self._socket.connect(path)
        except OSError:
            self._close()

    def send(self, message: Message) -> None:
        """Send one message, from any thread.

        A child that the script forked sends nothing: it is not the worker.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._socket is None:
                return
            try:
                self._socket.sendall(encode(message))
            except OSError:
                self._close()

    def offer(self, message: Message) -> None:
        """Send one message if nobody has to wait for it; else it is dropped."""
        if os.getpid() != self._pid or not self._lock.acquire(blocking=False):
            return
        try:
            if self._socket is not None and _has_room(self._socket):
                self._socket.sendall(encode(message))
        except OSError:
            self._close()
        finally:
            self._lock.release()

    def listen(self, obey: Callable[[Order], None]) -> None:
        """Call `obey` for each order of the agent, in a thread of its own, for as long as both live."""
        thread = threading.Thread(
            target=self._listen, args=(obey,), name="frun-channel", daemon=True
        )
        thread.start()

    def raised(self, error: BaseException, trace: TracebackType | None) -> None:
        """Tell the agent which exception the script let out."""
        lines = traceback.format_exception(type(error), error, trace)
        message = "".join(traceback.format_exception_only(type(error), error)).strip()
        kind = str(getattr(error, "frun_kind", ""))
        text = "".join(lines)[-MAX_TEXT:]
        self.send(Raised(message=message[:MAX_TEXT], traceback=text, kind=kind))

    def _listen(self, obey: Callable[[Order], None]) -> None:
        poll, frames, sock = select.poll(), Frames(), self._socket
        if sock is None:
            return
        poll.register(sock, select.POLLIN)
        while True:
            poll.poll()
            try:
                data = sock.recv(_PIECE)
                messages = frames.feed(data)
            except (OSError, WireError):
                return
            for message in messages:
                if isinstance(message, Pause | Resume | Explain | Inject | Withdraw):
                    obey(message)
            if not data:
                return

    def _close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None


def _has_room(sock: socket.socket) -> bool:
    """Tell whether a short message fits in the socket's buffer. An agent that stands still empties none."""
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    return bool(poll.poll(0))


def open_channel(env: Mapping[str, str]) -> Channel | None:
    """Connect as FRUN_CHANNEL says and introduce this worker; None if it says nothing."""
    path = env.get("FRUN_CHANNEL", "")
    if not path:
        return None
    channel = Channel(path)
    channel.send(Hello(rank=int(env["RANK"]), generation=int(env["FRUN_GENERATION"])))
    return channel
