"""The leader's shell: read a snapshot, ask `decide`, write what it says, wait for the next change.

It decides nothing. Its only effect is the rank table, written in one transaction that compares the leader
key (am I still the leader?) and the table's own revision (did I decide on the latest one?).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote

from frun.clock import Clock
from frun.controller.doubts import Doubts
from frun.errors import LeaseLost, StoreRefused, StoreUnavailable, WireError
from frun.protocol import changes, incidents, wire
from frun.protocol.decide import decide
from frun.protocol.incidents import IncidentRecord
from frun.protocol.keys import Keys
from frun.protocol.policy import Decision, Policy, Seen
from frun.protocol.records import HostRecord, HostReport, RankTable, Slot, View
from frun.rendezvous.election import Term
from frun.rendezvous.membership import Membership
from frun.rendezvous.mirror import Mirror
from frun.rendezvous.store import Compare, Delete, KeyValue, Put, Store

logger = logging.getLogger(__name__)

_LONGEST_REST_S = 0.1


class Controller:
    """Runs the job while this host leads. One instance per term."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        membership: Membership,
        policy: Policy,
        clock: Clock,
        answers: Callable[[Slot], Awaitable[bool]],
        on_decision: Callable[[Decision], None],
        on_incident: Callable[[IncidentRecord], None],
        on_renamed: Callable[[IncidentRecord], None],
        on_look: Callable[[View, float], float | None],
    ) -> None:
        self._store = store
        self._keys = keys
        self._membership = membership
        self._policy = policy
        self._clock = clock
        self._answers = answers
        self._on_decision = on_decision
        self._on_incident = on_incident
        self._on_renamed = on_renamed
        self._on_look = on_look
        self._last_incident = 0
        self._decoded: dict[str, tuple[int, Any]] = {}
        """The latest version of each document that was read, also of those that are gone."""

    async def run(self, term: Term, known: Callable[[], RankTable | None]) -> None:
        """Decide until leadership is lost (then return) or cancelled.

        `known` is the table this host last acted on: if etcd was wiped it is written back, so that a
        running job is not taken for a new one.
        """
        seen = Seen()
        rests_until = 0.0
        lease_s = self._policy.lease_ttl_s
        async with (
            Mirror(self._store, self._keys.prefix) as mirror,
            Doubts(self._answers, lease_s, self._clock, mirror.poke) as doubts,
        ):
            watching = _Watching(self._keys, term, self._clock)
            while True:
                version = mirror.version
                now = self._clock.monotonic()
                if watching.update(mirror, now):
                    seen = Seen()
                if not mirror.connected:
                    await mirror.wait_changed(version, None)
                    continue
                stored = mirror.items.get(self._keys.ranktable)
                lost_table = known() if stored is None else None
                if lost_table is not None:
                    await self._write_back(term, lost_table)
                    await mirror.wait_changed(version, 1.0)
                    continue
                if now < rests_until:
                    # Thousands of hosts report within a moment, and a look at them all takes longer than
                    # a report: as much time as it took is left for what else is on its way.
                    await asyncio.sleep(rests_until - now)
                    continue
                view = self._view(mirror, watching, doubts)
                look_at = self._on_look(view, now)
                await self._close_incident(term, mirror, view)
                await self._rename_incidents(term, mirror, view)
                decision = decide(view, seen, self._policy, now)
                seen = decision.seen
                self._on_decision(decision)
                looked = self._clock.monotonic()
                if decision.table is None:
                    rests_until = looked + min(looked - now, _LONGEST_REST_S)
                    wakes = [at for at in (decision.wake_at, look_at) if at is not None]
                    timeout = max(0.0, min(wakes) - now) if wakes else None
                    await mirror.wait_changed(version, timeout)
                    continue
                revision = 0 if stored is None else stored.mod_revision
                if not await self._write(term, decision.table, view.table, revision):
                    held = mirror.items.get(self._keys.leader)
                    if held is not None and held.create_revision != term.token:
                        return
                # Whether it was written or not is known when the mirror shows a newer table.
                await mirror.wait_changed(version, 1.0)

    async def _write(
        self, term: Term, table: RankTable, before: RankTable | None, revision: int
    ) -> bool:
        """Store a table, and how it differs from the one `before` it at `revision`."""
        spec = self._membership.spec
        lease = 0 if spec is None else spec.lease
        news = changes.between(before, revision, table)
        puts = [
            Put(key=self._keys.ranktable, value=wire.encode(table), lease=lease),
            Put(key=self._keys.news, value=wire.encode(news), lease=lease),
        ]
        compares = [
            Compare(key=self._keys.leader, revision=term.token, created=True),
            Compare(key=self._keys.ranktable, revision=revision),
        ]
        try:
            return await self._store.commit(compares, puts) is not None
        except StoreRefused:
            raise
        except LeaseLost:
            # The job's lease ended while etcd was away: the next try is under the job's new one.
            await self._renew_spec()
            return False
        except StoreUnavailable as error:
            logger.warning(
                "the decision for generation %d may not be stored: %s", table.generation, error
            )
            return False

    async def _renew_spec(self) -> None:
        try:
            await self._membership.restore_spec()
        except (StoreUnavailable, LeaseLost) as error:
            logger.warning("could not write the job's specification back: %s", error)

    async def _close_incident(self, term: Term, mirror: Mirror, view: View) -> None:
        """Store the account of the last fault once every host is past it; keep the latest ones."""
        record = incidents.summarize(view.table, view.reports, self._policy.lease_ttl_s)
        if record is None or record.id <= self._last_incident:
            return
        key = self._keys.incident(record.id)
        spec = self._membership.spec
        lease = 0 if spec is None else spec.lease
        ops: list[Put | Delete] = [Put(key=key, value=wire.encode(record), lease=lease)]
        stored = sorted(key for key in mirror.items if key.startswith(self._keys.incidents))
        ops += [Delete(key=old) for old in incidents.outdated(stored)]
        fence = Compare(key=self._keys.leader, revision=term.token, created=True)
        try:
            if key not in stored and await self._store.commit([fence], ops) is None:
                return
        except StoreRefused:
            raise
        except (StoreUnavailable, LeaseLost) as error:
            logger.warning("incident %d is not stored yet: %s", record.id, error)
            return
        self._last_incident = record.id
        if key not in stored:
            self._on_incident(record)

    async def _rename_incidents(self, term: Term, mirror: Mirror, view: View) -> None:
        """Correct what is stored of a fault when a lost host is back and knows more."""
        back = {name: host for name, host in view.hosts.items() if host.cut_off_s}
        if not back:
            return
        stored = {
            key: kv for key, kv in mirror.items.items() if key.startswith(self._keys.incidents)
        }
        known = [self._decode(kv, wire.decode_incident) for kv in stored.values()]
        fence = Compare(key=self._keys.leader, revision=term.token, created=True)
        for record in incidents.renamed((one for one in known if one is not None), back):
            key = self._keys.incident(record.id)
            put = Put(key=key, value=wire.encode(record), lease=stored[key].lease)
            unchanged = Compare(key=key, revision=stored[key].mod_revision)
            try:
                # Once: the mirror may not show it yet when this is looked at again.
                if await self._store.commit([fence, unchanged], [put]) is not None:
                    self._on_renamed(record)
            except StoreRefused:
                raise
            except (StoreUnavailable, LeaseLost) as error:
                logger.warning("incident %d keeps its class for now: %s", record.id, error)

    async def _write_back(self, term: Term, table: RankTable) -> None:
        logger.warning("etcd lost the job's keys; writing generation %d back", table.generation)
        await self._renew_spec()
        await self._write(term, table, None, 0)

    def _view(self, mirror: Mirror, watching: "_Watching", doubts: Doubts) -> View:
        hosts: dict[str, HostRecord] = {}
        joined: dict[str, int] = {}
        reports: list[tuple[int, HostReport]] = []
        table: RankTable | None = None
        of_hosts, of_reports, of_table = self._keys.hosts, self._keys.reports, self._keys.ranktable
        for key, kv in mirror.items.items():
            if key.startswith(of_hosts):
                host = self._decode(kv, wire.decode_host)
                if host is not None:
                    hosts[host.host] = host
                    joined[host.host] = kv.create_revision
            elif key.startswith(of_reports):
                report = self._decode(kv, wire.decode_report)
                if report is not None:
                    reports.append((kv.mod_revision, report))
            elif key == of_table:
                table = self._decode(kv, wire.decode_table)
        reports.sort(key=lambda item: item[0])
        gone = frozenset(watching.gone - hosts.keys())
        # Who leads etcd since before the lease was granted has ended it rightly.
        doubtful = {host for host in gone if not 0 < self._lease_term(host) == self._store.term}
        return View(
            hosts=hosts,
            joined=joined,
            reports={report.host: report for _, report in reports},
            table=table,
            gone=gone,
            answering=doubts.look(() if table is None else table.slots, doubtful),
            watching_since=watching.since,
        )

    def _lease_term(self, host: str) -> int:
        """Return the store's term in which a host got its lease, from its last record; 0: not known."""
        _, record = self._decoded.get(self._keys.host(host), (0, None))
        return 0 if record is None else int(record.term)

    def _decode(self, kv: KeyValue, reader: Callable[[bytes], Any]) -> Any:
        """Decode each version of a document once; report a broken one once and leave it out."""
        cached = self._decoded.get(kv.key)
        if cached is not None and cached[0] == kv.mod_revision:
            return cached[1]
        try:
            record = reader(kv.value)
        except WireError as error:
            logger.error("ignoring key %s: %s", kv.key, error)  # noqa: TRY400 - the text says it all
            record = None
        self._decoded[kv.key] = (kv.mod_revision, record)
        return record


class _Watching:
    """Since when this leader has watched without a break, and which hosts it saw vanish meanwhile."""

    def __init__(self, keys: Keys, term: Term, clock: Clock) -> None:
        self.since = clock.monotonic()
        self.gone: set[str] = {term.predecessor} if term.predecessor else set()
        self._keys = keys
        self._resyncs = -1
        self._present: dict[str, str] = {}

    def update(self, mirror: Mirror, now: float) -> bool:
        """Note a break, and the difference in hosts since the last look; say if there was a break.

        After one a leader is like a new one: nobody could answer meanwhile, so its waits start anew.
        """
        broken = mirror.resyncs != self._resyncs and self._resyncs > 0
        if mirror.resyncs != self._resyncs:
            self.since = now
            if broken:
                # Leases may have run out while nobody could refresh them: that is no death (law 7).
                # Not at the first snapshot: that the predecessor's lease ended was seen before.
                self.gone.clear()
                self._present.clear()
            self._resyncs = mirror.resyncs
        prefix = self._keys.hosts
        present = {key: key[len(prefix) :] for key in mirror.items if key.startswith(prefix)}
        if mirror.resyncs and self._keys.ranktable not in mirror.items:
            # No lease of a host holds the table: somebody deleted keys, which tells of no death either.
            self.gone.clear()
            self._present.clear()
            self.since = now
        for key in self._present.keys() - present.keys():
            self.gone.add(unquote(self._present[key]))
        self._present = present
        return broken
