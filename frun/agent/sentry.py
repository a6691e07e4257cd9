"""Watches the agent of one other host, and ends its lease when it is certainly gone.

Members stand in a ring, in the order of the rank table: each holds a connection to the group store of the
next one. A dead agent's kernel ends the connection at once, and refuses the next. That is proof where a
broken connection is only suspicion, so this host does then what a lease time later etcd would do. That an
agent says nothing (its host is off, frozen or cut off) proves nothing: its lease decides, and is ended here
as soon as it has run out, for which etcd looks only every half second. Owns the connection; what a host's
loss means is the leader's business.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from frun.agent.groupstore_link import Place, Shard, keep_alive, shard_at
from frun.clock import Clock
from frun.errors import StoreUnavailable
from frun.protocol.keys import Keys
from frun.protocol.records import RankTable
from frun.protocol.storeframe import Blobs, Op, encode, hello_blobs
from frun.rendezvous.store import Store, read_key

logger = logging.getLogger(__name__)

_AGAIN_S = 0.1
"""Pause between two refusals that make a proof: a listener may just be busy with its end or its start."""
_CONNECT_S = 1.0
_MOMENT_S = 0.3
"""A host that is off is known by so much later, and one that is busy must answer within it."""
_PING_S = 0.25
_SILENT_S = 0.75
"""An answer that takes longer lets this host look at the other one's lease, and harms nobody."""
_LEASE_LOOK_S = 0.05
"""Pause between two looks at a lease that may have less than a second left."""
_CLOSE_S = 0.5
"""Longest time between two of them that prove something together."""
_SHORTEST_S = 2
"""A lease of one second is always in its last, so that etcd alone can judge it."""
_LONGEST_S = 1.0
"""Longest pause between two tries to reach a host that does not answer, or two looks at its lease."""
_PIECE = 4096
_PING = encode(0, Op.PING, ())
_REFUSES = "is gone: its group store refuses connections"
_RAN_OUT = "says nothing, and the lease of its host has run out"


class Sentry:
    """This host's watch over the next one. Use it on the agent's event loop only."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        host: str,
        hello: Callable[[], tuple[str, str]],
        clock: Clock,
        on_gone: Callable[[RankTable, Shard, str, float], None],
        lease_s: int,
    ) -> None:
        """`hello` returns the job and the token of the group store, `lease_s` is what hosts ask for.

        `on_gone` is told of a host whose lease was ended: why, and how many seconds ago it was suspected.
        """
        self._store = store
        self._keys = keys
        self._host = host
        self._hello = hello
        self._clock = clock
        self._on_gone = on_gone
        self._reads_leases = lease_s >= _SHORTEST_S
        self._ward: Shard | None = None
        self._task: asyncio.Task[None] | None = None

    def look(self, table: RankTable) -> None:
        """Watch the host that follows this one in the table."""
        ward = None if table.phase.is_final else next_host(table, self._host)
        if ward == self._ward:
            return
        self._ward = ward
        if self._task is not None:
            self._task.cancel()
        self._task = None if ward is None else asyncio.create_task(self._watch(table, ward))

    async def close(self) -> None:
        """Watch no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self, table: RankTable, ward: Shard) -> None:
        suspected_at: float | None = None
        refusals, pause_s = 0, _AGAIN_S / 2
        while True:
            tried_at = self._clock.monotonic()
            try:
                silence = await self._hold(ward)
                if silence is not None:
                    await self._end(table, ward, _RAN_OUT, silence.since, silence.lease)
                    return
                refusals, suspected_at = 0, self._clock.monotonic()
            except ConnectionRefusedError:
                refusals += 1
                suspected_at = tried_at if suspected_at is None else suspected_at
            except (OSError, TimeoutError):
                refusals, suspected_at = 0, None
            if refusals > 1 and suspected_at is not None:
                await self._end(table, ward, _REFUSES, suspected_at)
                return
            if self._clock.monotonic() - tried_at >= _LONGEST_S and suspected_at is not None:
                pause_s = _AGAIN_S / 2
                continue  # the end of a connection that held: who is gone refuses the next one now
            # One that lets nobody stay is not asked all the time.
            pause_s = _AGAIN_S if refusals else min(2 * pause_s, _LONGEST_S)
            await asyncio.sleep(pause_s)

    async def _hold(self, ward: Shard) -> "_Silence | None":
        """Return when a connection that was made has ended, or is silent and the host's lease has run out.

        Raises OSError or TimeoutError if none was made.
        """
        async with asyncio.timeout(_CONNECT_S):
            reader, writer = await asyncio.open_connection(ward.address, ward.port)
        try:
            keep_alive(writer.transport)
            writer.write(encode(0, Op.HELLO, hello_blobs(*self._hello())))
            with contextlib.suppress(OSError):
                if await reader.read(_PIECE):
                    return await self._listen(reader, writer, ward)
            return None
        finally:
            writer.transport.abort()

    async def _listen(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ward: Shard
    ) -> "_Silence | None":
        """Ask again and again whether the agent lives; return like `_hold`."""
        heard = asyncio.ensure_future(reader.read(_PIECE))
        try:
            while True:
                # Between two questions nothing is heard but the end, and that at once.
                await asyncio.wait((heard,), timeout=_PING_S)
                asked_at = self._clock.monotonic()
                if not heard.done():
                    writer.write(_PING)
                    await asyncio.wait((heard,), timeout=_SILENT_S)
                silent = not heard.done() and self._reads_leases
                lease = await self._runs_out(ward, heard) if silent else 0
                if lease:
                    return _Silence(lease=lease, since=asked_at)
                if not await heard:
                    return None
                heard = asyncio.ensure_future(reader.read(_PIECE))
        finally:
            heard.cancel()

    async def _runs_out(self, ward: Shard, answer: "asyncio.Future[bytes]") -> int:
        """Wait until the host is heard again or has no lease; return the one that ran out before, if any.

        One that was in its last second for a second was not refreshed meanwhile, and can't be any more. That
        takes looks that follow closely: two that are a lease time apart would miss a refresh in between.
        """
        last: tuple[int, float] | None = None
        """The lease that is in its last second, and since when at least."""
        looked_at = 0.0
        while not answer.done():
            pause_s, asked_at = _LEASE_LOOK_S, self._clock.monotonic()
            try:
                lease = await self._lease_of(ward)
                left_s = await self._store.remaining(lease) if lease else -1
            except StoreUnavailable:
                last, pause_s = None, _AGAIN_S
            else:
                before, now = looked_at, self._clock.monotonic()
                looked_at = now
                if left_s != 0:
                    last, pause_s = None, min(max(pause_s, abs(left_s) - 1.0), _LONGEST_S)
                elif last is None or last[0] != lease or now - before > _CLOSE_S:
                    last = lease, now
                elif asked_at - last[1] >= 1.0:
                    return lease
            await asyncio.wait((answer,), timeout=pause_s)
        return 0

    async def _lease_of(self, ward: Shard) -> int:
        """Return the lease of a host's record; 0 if there is none. Raises StoreUnavailable."""
        key = self._keys.host(ward.host)
        stored = await read_key(self._store, key)
        return 0 if stored is None else stored.lease

    async def _end(
        self, table: RankTable, ward: Shard, why: str, since: float, lease: int | None = None
    ) -> None:
        """End a host's lease, the present one if none is named, and tell; nothing if it has none."""
        try:
            lease = await self._lease_of(ward) if lease is None else lease
            if not lease:
                return
            await self._store.revoke(lease)
        except StoreUnavailable as error:
            logger.warning("%s is gone, and its lease can not be ended: %s", ward, error)
            return
        self._on_gone(table, ward, why, self._clock.monotonic() - since)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Silence:
    """A host that was not heard since a moment until its lease had run out."""

    lease: int
    since: float


async def answers(place: Place, hello: Blobs) -> bool:
    """Tell whether the agent at a place lets this one in, within a moment: then it lives."""
    try:
        async with asyncio.timeout(_MOMENT_S):
            reader, writer = await asyncio.open_connection(place.address, place.port)
            try:
                writer.write(encode(0, Op.HELLO, hello))
                return bool(await reader.read(1))
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError):
        return False


def next_host(table: RankTable, host: str) -> Shard | None:
    """Return the member that follows this one in the ring; None if there is none, or this is no member."""
    place = table.slot_of(host)
    if place is None:
        return None
    at = place[0]
    for slot in (*table.slots[at + 1 :], *table.slots[:at]):
        if slot.host:
            return shard_at(slot)
    return None
