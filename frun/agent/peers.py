"""Tells which hosts came and went, while this host leads."""

from collections.abc import Callable, Mapping

from frun.events import Event, HostJoined, HostLeft
from frun.protocol.records import HostRecord


class Peers:
    """The hosts as one leader saw them last; those of its first look have joined, to its knowledge."""

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self._known: set[str] = set()

    def look(self, hosts: Mapping[str, HostRecord]) -> None:
        """Take the records that exist now; tell the difference."""
        present = set(hosts)
        if present == self._known:
            return
        for host in sorted(self._known - present):
            self._emit(HostLeft(peer=host))
        for host in sorted(present - self._known):
            record = hosts[host]
            self._emit(HostJoined(peer=host, address=record.address, nproc=record.nproc))
        self._known = present
