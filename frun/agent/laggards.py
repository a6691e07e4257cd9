"""Tells which ranks are slower than their peers, while this host leads.

Owns what was told, so that each is told once until it is right again. What slow means is
`protocol.stragglers`' to say.
"""

from collections.abc import Callable, Mapping

from frun.events import Event, FaultNoticed
from frun.protocol import stragglers
from frun.protocol.records import HostReport, Phase, RankTable, View
from frun.protocol.stragglers import Work


class Laggards:
    """The paces of all ranks as one leader saw them last."""

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self._generation = 0
        self._looked: Mapping[str, HostReport] = {}
        self._works: dict[int, Work] = {}
        self._found: dict[int, str] = {}
        self._since: dict[int, float] = {}
        self._told: frozenset[int] = frozenset()

    def look(self, view: View, now: float) -> float | None:
        """Take the reports that exist now; tell of a rank that has fallen behind.

        Returns when to look again even if nothing changes; None: never.
        """
        table = view.table
        if table is None or table.phase is not Phase.RUN:
            return None
        if self._take(table, view.reports):
            self._found = stragglers.compare(self._works, self._told)
            self._told &= self._found.keys()
            self._since = {rank: self._since.get(rank, now) for rank in self._found}
        hold_s = stragglers.HOLD_S if len(table.slots) > 1 else 0.0
        open_ = sorted(self._found.keys() - self._told)
        due = [rank for rank in open_ if now >= self._since[rank] + hold_s]
        for rank in due:
            since_s = stragglers.SETTLED_S + now - self._since[rank]
            self._emit(
                FaultNoticed(
                    source="straggler", rank=rank, reason=self._found[rank], since_s=since_s
                )
            )
        self._told |= frozenset(due)
        return min((self._since[rank] + hold_s for rank in open_ if rank not in due), default=None)

    def _take(self, table: RankTable, reports: Mapping[str, HostReport]) -> bool:
        """Take what is new in these reports; False: nothing is."""
        before = self._looked
        if table.generation != self._generation:
            self._generation, self._works, before = table.generation, {}, {}
        self._looked = reports
        news = {
            slot.first_rank + worker.local_rank: worker.work
            for slot in table.slots
            if (report := reports.get(slot.host)) is not before.get(slot.host)
            and report is not None
            for worker in report.workers
            if worker.work is not None
        }
        if news.items() <= self._works.items():
            return False
        self._works.update(news)
        return True
