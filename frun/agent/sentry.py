"""Watches the agent of one other host, and ends its lease when it is certainly gone.

Members stand in a ring, in the order of the rank table: each holds a connection to the group store of the
next one. A dead agent's kernel ends the connection at once, and refuses the next. That is proof where a
broken connection is only suspicion, so this host does then what a lease time later etcd would do. Owns
that connection; what a host's loss means is the leader's business.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from frun.agent.groupstore_link import Place, Shard, keep_alive, shard_at
from frun.clock import Clock
from frun.errors import StoreUnavailable
from frun.protocol.keys import Keys
from frun.protocol.records import RankTable
from frun.protocol.storeframe import Blobs, Op, encode, hello_blobs
from frun.rendezvous.store import Store

logger = logging.getLogger(__name__)

_AGAIN_S = 0.1
"""Pause between two refusals that make a proof: a listener may just be busy with its end or its start."""
_CONNECT_S = 1.0
_MOMENT_S = 0.3
"""A host that is off is known by so much later, and one that is busy must answer within it."""
_LONGEST_S = 1.0
"""Longest pause between two tries to reach a host that does not answer: that is for its lease to tell."""


class Sentry:
    """This host's watch over the next one. Use it on the agent's event loop only."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        host: str,
        hello: Callable[[], tuple[str, str]],
        clock: Clock,
        on_gone: Callable[[RankTable, Shard, float], None],
    ) -> None:
        """`hello` returns the job and the token of the group store.

        `on_gone` is told of a host whose agent is gone, and how many seconds ago that was suspected.
        """
        self._store = store
        self._keys = keys
        self._host = host
        self._hello = hello
        self._clock = clock
        self._on_gone = on_gone
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
        refusals, pause_s = 0, _AGAIN_S
        while True:
            tried_at = self._clock.monotonic()
            try:
                await self._hold(ward)
                refusals, suspected_at = 0, self._clock.monotonic()
            except ConnectionRefusedError:
                refusals += 1
                suspected_at = tried_at if suspected_at is None else suspected_at
            except (OSError, TimeoutError):
                refusals, suspected_at = 0, None
            if refusals > 1 and suspected_at is not None:
                break
            # One that lets nobody stay is not asked all the time.
            quick = self._clock.monotonic() - tried_at < _LONGEST_S and not refusals
            pause_s = min(2 * pause_s, _LONGEST_S) if quick else _AGAIN_S
            await asyncio.sleep(_AGAIN_S if refusals else pause_s)
        if await self._end_lease(ward):
            self._on_gone(table, ward, self._clock.monotonic() - suspected_at)

    async def _hold(self, ward: Shard) -> None:
        """Return when a connection that was made has ended. Raises OSError or TimeoutError if none was."""
        async with asyncio.timeout(_CONNECT_S):
            reader, writer = await asyncio.open_connection(ward.address, ward.port)
        try:
            keep_alive(writer.transport)
            writer.write(encode(0, Op.HELLO, hello_blobs(*self._hello())))
            with contextlib.suppress(OSError):
                while await reader.read(4096):
                    pass
        finally:
            writer.transport.abort()

    async def _end_lease(self, ward: Shard) -> bool:
        """End the lease of a host that is gone; False if it has left already, or etcd does not answer."""
        key = self._keys.host(ward.host)
        try:
            stored = (await self._store.read(key)).items.get(key)
            if stored is None or not stored.lease:
                return False
            await self._store.revoke(stored.lease)
        except StoreUnavailable as error:
            logger.warning("%s is gone, and its lease can not be ended: %s", ward, error)
            return False
        return True


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
