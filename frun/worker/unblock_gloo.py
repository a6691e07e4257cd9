"""Releases threads that are blocked in gloo: ends the connections of its groups.

Owns the search for gloo's sockets (gloo itself has no abort): the event polls that appear while a
group is made, and whatever is registered in them when it has to end. Leaves to others which groups
there are and when they end (`frun.worker.groups`).
"""

import contextlib
import os
import re
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

_TARGET = re.compile(r"^tfd:\s*(\d+)\s(?:.*\bino:\s*([0-9a-f]+))?", re.MULTILINE)
_QUIET_S = 0.001
_QUIET_TIMES = 3
_QUIET_TRIES = 100
_PROCESSORS = len(os.sched_getaffinity(0))
_KNOCK_AGAIN_S = 0.2
_KNOCK_S = 1.0
"""Bound on one connection to this process itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Creation:
    """A group that is being made."""

    before: frozenset[int]
    """Event polls that were there when it began."""
    size: int


class GlooUnblocker:
    """Ends gloo's TCP connections so that everything that waits on them gets an error.

    Only the receiving half of a connection is shut down, and a copy of it stays open until the next
    group is made. gloo reads an end, fails what waits on it, and closes its own; the peer sees
    nothing of that. So each rank comes out by its own unblocking, and never by the end of another's
    connection, which gloo handles badly: a thread whose piece is refused, or half written, when the
    connection ends is not told, and waits for the whole time-out of the group.

    Listening sockets are left alone, because gloo ends the process when accepting fails.
    """

    backend = "gloo"

    def __init__(self) -> None:
        """Know no group yet."""
        self._lock = threading.Lock()
        self._creations: list[_Creation] = []
        self._polls: set[int] = set()
        self._largest = 0
        self._ended: dict[int, socket.socket] = {}
        self._left_behind: list[socket.socket] = []
        self._knocked: dict[int, float] = {}

    @contextlib.contextmanager
    def creating(self, size: int) -> Iterator[None]:
        """Watch for what appears while a group of `size` ranks is made in this thread."""
        creation = _Creation(before=_event_polls(), size=max(size, 1))
        with self._lock:
            self._creations.append(creation)
        try:
            yield
        finally:
            now = _event_polls()
            with self._lock:
                self._creations.remove(creation)
                self._polls = (self._polls & now) | (now - creation.before)
                self._largest = max(self._largest, creation.size)
                left, self._left_behind = self._left_behind, []
            for sock in left:
                sock.close()

    def unblock(self) -> int:
        """End all connections of all groups; return how many were still up."""
        now = _event_polls()
        with self._lock:
            creations = list(self._creations)
            polls = (self._polls & now).union(*(now - each.before for each in creations))
            size = max([self._largest, *(each.size for each in creations)])
        listeners: list[socket.socket] = []
        connected: list[socket.socket] = []
        for poll in polls:
            some, more = _sockets(poll)
            listeners += some
            connected += more
        fresh = self._not_ended(connected)
        _until_quiet(fresh, _QUIET_TIMES * _crowding())
        for sock in fresh:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RD)
        with self._lock:
            if creations:
                # a group whose making fails is freed at once: then gloo relies on its own close to
                # take the socket out of its event poll, and a copy would prevent that
                self._left_behind += fresh
                left, self._left_behind = self._left_behind, []
            else:
                self._ended.update((_inode(sock), sock) for sock in fresh)
                left = []
        for sock in left:
            sock.close()
        for sock in listeners:
            with sock:
                if (creations or _lazy()) and self._may_knock(_inode(sock)):
                    _knock(sock, size)
        return len(fresh)

    def is_over(self) -> bool:
        """Return whether gloo has closed every connection of every group.

        What waits is told while that is done. gloo forgets only a piece that had come in part, since a
        rank died while it was sending: that thread waits for the whole time-out of the group.
        """
        with self._lock:
            polls = set() if self._creations else set(self._polls)
        return bool(polls) and not any(_left_in(poll)[1] for poll in polls)

    def _not_ended(self, connected: list[socket.socket]) -> list[socket.socket]:
        """Return those that were not ended yet, and close the other copies."""
        fresh = []
        with self._lock:
            for sock in connected:
                if _inode(sock) in self._ended:
                    sock.close()
                else:
                    fresh.append(sock)
        return fresh

    def _may_knock(self, listener: int) -> bool:
        """Tell whether it is time again: gloo's thread ends only where nothing comes for 10 ms."""
        now = time.monotonic()
        if now - self._knocked.get(listener, -_KNOCK_AGAIN_S) < _KNOCK_AGAIN_S:
            return False
        self._knocked[listener] = now
        return True

    def created(self, group: object) -> None:
        """Do nothing: `creating` saw what belongs to it."""

    def forget(self, group: object) -> None:
        """Do nothing: event polls that are gone are noticed."""

    def settle(self) -> None:
        """Do nothing: when a call of gloo returns, its work is done."""

    def shutdown(self, group: object) -> None:
        """Do nothing: a gloo group ends when its last reference goes."""

    def teardown(self) -> int:
        """Return how many of the groups' event polls are still there, and go on watching those."""
        now = _event_polls()
        with self._lock:
            self._polls &= now
            polls = set(self._polls)
            self._left_behind += self._ended.values()
            self._ended.clear()
            self._knocked.clear()
        return sum(any(_left_in(poll)) for poll in polls)


def _event_polls() -> frozenset[int]:
    found = []
    with os.scandir("/proc/self/fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if os.readlink(entry.path) == "anon_inode:[eventpoll]":
                    found.append(int(entry.name))
    return frozenset(found)


def _lazy() -> bool:
    """Tell whether groups connect when they are first used, so waits for a peer can come late."""
    return os.environ.get("TORCH_GLOO_LAZY_INIT", "").lower() in {"1", "true", "yes", "y", "on"}


def _sockets(poll: int) -> tuple[list[socket.socket], list[socket.socket]]:
    """Return copies of the listening and the other sockets in an event poll, if it is gloo's.

    gloo's polls hold a pipe and TCP sockets. Anything else (the unix socket of an asyncio loop,
    an eventfd) shows that the poll belongs to someone else in this process.
    """
    listeners: list[socket.socket] = []
    others: list[socket.socket] = []
    try:
        with open(f"/proc/self/fdinfo/{poll}", encoding="ascii") as file:
            targets = _TARGET.findall(file.read())
    except OSError:
        return [], []
    foreign = False
    for number, inode in targets:
        try:
            copy = os.dup(int(number))
        except OSError:
            continue
        status = os.fstat(copy)
        if inode and status.st_ino != int(inode, 16):  # closed meanwhile, the number is another's
            os.close(copy)
        elif not stat.S_ISSOCK(status.st_mode):
            foreign = foreign or not stat.S_ISFIFO(status.st_mode)
            os.close(copy)
        else:
            sock = socket.socket(fileno=copy)
            foreign = foreign or not _is_tcp(sock)
            listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            (listeners if listening else others).append(sock)
    if foreign:
        for sock in (*listeners, *others):
            sock.close()
        return [], []
    return listeners, others


def _left_in(poll: int) -> tuple[int, int]:
    """Return how many listening and other sockets are in an event poll, if it is gloo's."""
    listeners, others = _sockets(poll)
    for sock in (*listeners, *others):
        sock.close()
    return len(listeners), len(others)


def _inode(sock: socket.socket) -> int:
    return os.fstat(sock.fileno()).st_ino


def _is_tcp(sock: socket.socket) -> bool:
    return sock.family in {socket.AF_INET, socket.AF_INET6} and sock.type == socket.SOCK_STREAM


def _crowding() -> int:
    """Return how many threads there are for each processor, at least 1: a peer may wait its turn to send."""
    try:
        with open("/proc/loadavg", encoding="ascii") as file:
            runnable = int(file.read().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return 1
    return max(1, runnable // _PROCESSORS)


def _until_quiet(connections: list[socket.socket], times: int) -> None:
    """Wait until no bytes go over the connections any more, for so many milliseconds.

    A piece that is on its way then would be half written (see `GlooUnblocker`). Where a rank is
    missing the others soon stand still, and nothing is.
    """
    seen = None
    quiet = 0
    for _ in range(_QUIET_TRIES):
        now = [_traffic(sock) for sock in connections]
        quiet = quiet + 1 if now == seen else 0
        if quiet >= times or not connections:
            return
        seen = now
        select.select([], [], [], _QUIET_S)


def _traffic(sock: socket.socket) -> bytes:
    """Return the kernel's counts of bytes that were acknowledged and received."""
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)[120:136]
    except OSError:
        return b""


def _knock(listener: socket.socket, size: int) -> None:
    """Connect to our own listening socket in place of each peer, and hang up.

    A rank that waits to be connected to by a peer that died has no socket that could be shut
    down. gloo takes a connection for the peer's by the 8-byte number that it begins with; these
    run from 0 to the size of the group.
    """
    family = listener.family
    address = listener.getsockname()
    for number in range(size):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.settimeout(_KNOCK_S)
            sock.connect(address)
            sock.sendall(struct.pack("=q", number))
