"""Owns the race for the leader key. Leadership alone protects nothing: every write carries the fencing token.

The leader is the agent whose lease holds the `leader` key; the key's create revision is its token. An
agent that can not reach etcd does not know whether it still leads, and need not: its writes would fail.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from frun.clock import Clock
from frun.errors import LeaseLost, StoreUnavailable
from frun.protocol import candidacy
from frun.protocol.keys import Keys
from frun.protocol.records import RankTable
from frun.rendezvous.membership import Membership
from frun.rendezvous.mirror import Mirror
from frun.rendezvous.store import Compare, Put, Store

logger = logging.getLogger(__name__)

_RETRY_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One time of leadership."""

    token: int
    """Create revision of the leader key: the fencing token."""
    predecessor: str
    """Host whose leader key was seen to vanish just before, so its lease has ended; else empty."""


class Election:
    """Campaigns for ever; while elected runs `lead(term)`, and cancels it when the key is lost."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        membership: Membership,
        host: str,
        lead: Callable[[Term], Awaitable[None]],
        known: Callable[[], RankTable | None],
        clock: Clock,
    ) -> None:
        """`lead` runs while this host leads; `known` is the rank table it last saw."""
        self.leader = ""
        """Host that leads, as last heard; empty when nobody does."""
        self._store = store
        self._keys = keys
        self._membership = membership
        self._host = host
        self._lead = lead
        self._known = known
        self._clock = clock

    async def run(self) -> None:
        """Campaign until cancelled."""
        async with Mirror(self._store, self._keys.leader) as mirror:
            predecessor, seen_in = "", 0
            vacant_since: float | None = None
            while True:
                version = mirror.version
                now = self._clock.monotonic()
                held = mirror.items.get(self._keys.leader)
                self.leader = held.value.decode(errors="replace") if held else ""
                mine = held is not None and held.lease == self._membership.lease
                if held is not None and mine:
                    if mirror.resyncs != seen_in:
                        # The key went while nobody watched: with etcd's data, or in an outage (law 7).
                        predecessor = ""
                    await self._serve(
                        mirror, Term(token=held.create_revision, predecessor=predecessor)
                    )
                    predecessor, vacant_since = "", None
                    continue
                if held is not None:
                    predecessor, seen_in = self.leader, mirror.resyncs
                    vacant_since = None
                    await mirror.wait_changed(version, None)
                    continue
                vacant_since = now if vacant_since is None else vacant_since
                waits_s = candidacy.waits_s(self._known(), self._host) - (now - vacant_since)
                if waits_s > 0:
                    await mirror.wait_changed(version, waits_s)
                    continue
                if not await self._campaign():
                    await mirror.wait_changed(version, _RETRY_S)
                else:
                    await mirror.wait_changed(version, 1.0)

    async def _campaign(self) -> bool:
        lease = self._membership.lease
        if not lease:
            return False
        try:
            won = await self._store.commit(
                [Compare(key=self._keys.leader, revision=0)],
                [Put(key=self._keys.leader, value=self._host.encode(), lease=lease)],
            )
        except (StoreUnavailable, LeaseLost):
            return False
        return won is not None

    async def _serve(self, mirror: Mirror, term: Term) -> None:
        """Lead until the key shows another token."""
        logger.info("host %s leads (token %d)", self._host, term.token)
        leading = asyncio.ensure_future(self._lead(term))
        try:
            while not leading.done():
                version = mirror.version
                held = mirror.items.get(self._keys.leader)
                if held is None or held.create_revision != term.token:
                    return
                waiting = asyncio.ensure_future(mirror.wait_changed(version, None))
                await asyncio.wait({leading, waiting}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                await asyncio.wait({waiting})
            leading.result()
        finally:
            leading.cancel()
            # Not `await leading`: a cancellation of this task while it waits must not be taken for
            # the end of the other one, or this host would campaign for ever.
            await asyncio.wait({leading})
