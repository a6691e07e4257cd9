"""Follows the rank table: by its changes where that is possible, else by reading it whole.

Owns which revision of the table this host has. What a table means to the host is the caller's.
"""

import logging
from collections.abc import Callable

from frun.errors import StoreRefused, StoreUnavailable, WireError
from frun.protocol import changes, wire
from frun.protocol.keys import Keys
from frun.protocol.records import RankTable
from frun.rendezvous.mirror import Mirror
from frun.rendezvous.store import KeyValue, Store, read_key

logger = logging.getLogger(__name__)

_RETRY_S = 0.2


class TableFollower:
    """Keeps one host informed. A change is a few hundred bytes, a table of 2,048 hosts a quarter of a MB."""

    def __init__(
        self, store: Store, keys: Keys, take: Callable[[RankTable], None], lost: Callable[[], None]
    ) -> None:
        """`take` is given each table, perhaps one twice; `lost` is called when etcd may have lost it."""
        self._store = store
        self._keys = keys
        self._take = take
        self._lost = lost
        self._table: RankTable | None = None
        self._revision = 0
        self._news: KeyValue | None = None
        """The last ones that were followed."""

    async def run(self) -> None:
        """Follow until cancelled. Raises StoreRefused."""
        async with Mirror(self._store, self._keys.news) as mirror:
            seen = 1  # a first snapshot is no news
            while True:
                version = mirror.version
                news = mirror.items.get(self._keys.news)
                if mirror.resyncs > seen:
                    # Keys may have been deleted, and the table written back, while nobody looked.
                    seen = mirror.resyncs
                    if news != self._news:
                        self._revision = 0  # revisions may be those of an etcd that begins anew
                    self._lost()
                done = not mirror.connected or await self._follow(news)
                await mirror.wait_changed(version, None if done else _RETRY_S)

    async def _follow(self, news: KeyValue | None) -> bool:
        """Get to where the news are; say if that was possible."""
        if news is not None and news.mod_revision == self._revision:
            return True
        try:
            table = None if news is None else self._changed(news)
            if table is not None and news is not None:
                self._table, self._revision = table, news.mod_revision
            elif not await self._read_whole():
                return True
        except StoreRefused:
            raise
        except StoreUnavailable:
            return False
        except WireError as error:
            logger.error("ignoring the rank table: %s", error)  # noqa: TRY400 - one clear line
            return True
        self._news = news
        if self._table is not None:
            self._take(self._table)
        return True

    def _changed(self, news: KeyValue) -> RankTable | None:
        """Return the table that the news make of the one that is known; None if it takes another one."""
        if self._table is None or not self._revision:
            return None
        change = wire.decode_change(news.value)
        return changes.apply(self._table, change) if change.base == self._revision else None

    async def _read_whole(self) -> bool:
        """Take the table as it is stored; say if there is one."""
        key = self._keys.ranktable
        stored = await read_key(self._store, key)
        if stored is None:
            if self._table is not None:
                self._lost()
            return False
        self._table, self._revision = wire.decode_table(stored.value), stored.mod_revision
        return True
