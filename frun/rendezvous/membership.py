"""Owns this host's presence in the job: its lease, its record, its report and the job's specification.

Level-triggered: the caller says what the record and the report should be, and one task keeps etcd so,
whatever happens to the lease, the keys or the connection. It decides nothing about the job.

Guarantees: the record exists only while this process refreshes its lease. Not guaranteed: that this host
is still named by the rank table after an interruption; the caller reads that from the table.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from urllib.parse import unquote

from frun.clock import Clock
from frun.errors import JobRefused, LeaseLost, StoreRefused, StoreUnavailable, WireError
from frun.protocol import ranks, wire
from frun.protocol.health import Fact
from frun.protocol.keys import Keys
from frun.protocol.records import HostRecord, HostReport, JobSpec, Phase
from frun.rendezvous.store import Compare, Delete, Put, Store, read_key

logger = logging.getLogger(__name__)

JOB_LEASE_TTL_S = 60
"""How long the job's own keys outlive the last agent; long enough for a restart of etcd."""

_RETRY_S = 0.2


class Membership:
    """Keeps one host registered. Start with `join`, then run `keep` as a task, end with `leave`."""

    def __init__(
        self, store: Store, keys: Keys, record: HostRecord, ttl_s: int, clock: Clock
    ) -> None:
        self.spec: JobSpec | None = None
        self.lease = 0
        """Lease of the record; 0 while this host is not registered."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when the lease changed or the connection to etcd was lost or is back."""
        self.unreachable_since: float | None = None
        """Monotonic time since when etcd has not answered; None while it does."""
        self.losses = 0
        """How often the lease ended although this agent lives."""
        self._store = store
        self._keys = keys
        self._record = record
        self._ttl_s = ttl_s
        self._clock = clock
        self._report: HostReport | None = None
        self._written: HostReport | None = None
        self._recheck = False
        self._amended = False
        self._left = False
        self._granted = 0  # the lease to take back, also if its record was not written yet
        self._wake = asyncio.Event()

    async def finds_training(self) -> bool:
        """Return whether the job trains already. Raises StoreUnavailable."""
        return await self._phase() is Phase.RUN

    async def join(self, spec: JobSpec, patience_s: float = JOB_LEASE_TTL_S) -> JobSpec:
        """Agree on the specification and register; return the job's specification as stored.

        Waits up to `patience_s` for an etcd that does not answer, and until the last host has left a
        job of this id that has ended: this host is not part of that one.

        Raises JobRefused when the live job of this id differs, showing both values, when another live
        host claims the same --node-rank, or when an ended job's hosts stay; StoreUnavailable.
        """
        now = self._clock.monotonic()
        until = now + patience_s
        # A differing job, or a claimed rank, may belong to hosts that died a moment ago.
        deadline = now + self._ttl_s + 2.0
        said = ""
        while True:
            try:
                refusal, ending = await self._try_to_join(spec)
            except StoreRefused:
                raise
            except (StoreUnavailable, LeaseLost) as error:
                if self._clock.monotonic() >= until:
                    raise
                refusal, ending = f"trying again: {error}", True
                with contextlib.suppress(StoreUnavailable):
                    await self._store.revoke(self._granted)  # the outcome of the try is not known
            if self.lease and self.spec is not None:
                return self.spec
            now = self._clock.monotonic()
            if ending:
                deadline = min(until, now + self._ttl_s + 2.0)
            if refusal is not None and now >= deadline:
                raise JobRefused(refusal)
            if refusal is not None:
                if ending and refusal != said:
                    logger.info("%s", refusal)
                    said = refusal
                await asyncio.sleep(_RETRY_S)

    async def _try_to_join(self, spec: JobSpec) -> tuple[str | None, bool]:
        """Register if that is possible now; return why not, and if all it takes may be time.

        Reads as little for a job of thousands of hosts as for one. Who came last is read before who is
        there: whoever registers in between changes it, and then this host does not begin a job.
        """
        arrival = await read_key(self._store, self._keys.arrival)
        present = tuple((await self._store.read(self._keys.hosts, limit=1)).items)
        stored = await read_key(self._store, self._keys.spec)
        if not present:
            unchanged = [
                Compare(key=key, revision=0 if kv is None else kv.mod_revision)
                for key, kv in ((self._keys.spec, stored), (self._keys.arrival, arrival))
            ]
            return await self._found(spec, unchanged), False
        phase = await self._phase()
        if phase is not None and phase.is_final:
            stays = unquote(present[0].removeprefix(self._keys.hosts))
            return (
                f"job {spec.job_id!r} has ended, and host {stays} has not left it yet: wait until it has,"
                " or give this job another --job-id"
            ), True
        if stored is None:
            # etcd lost its data and they write it back, or they see the end of their job.
            return f"job {spec.job_id!r} has live hosts and no specification: try again", False
        live = wire.decode_spec(stored.value)
        return await self._enter(spec, live, stored.mod_revision), False

    async def _phase(self) -> Phase | None:
        """Return the phase of the stored table; None of none, or of another version's, which `join` tells."""
        stored = await read_key(self._store, self._keys.ranktable)
        if stored is None:
            return None
        try:
            return wire.decode_table(stored.value).phase
        except WireError:
            return None

    async def _found(self, spec: JobSpec, unchanged: Sequence[Compare]) -> str | None:
        """Make this the job of its id; whatever an earlier one left, all of whose agents are gone, ends.

        Nothing happens if a host registered since `unchanged` was read: that job is not abandoned.
        """
        job_lease = await self._store.grant(JOB_LEASE_TTL_S)
        mine = replace(spec, lease=job_lease)
        refusal = await self._register(
            unchanged,
            [
                Put(key=self._keys.spec, value=wire.encode(mine), lease=job_lease),
                Delete(key=self._keys.ranktable),
                Delete(key=self._keys.news),
            ],
        )
        if self.lease:
            self.spec = mine
        else:
            await self._store.revoke(job_lease)
        return refusal

    async def _enter(self, spec: JobSpec, live: JobSpec, revision: int) -> str | None:
        """Register in a live job; return why not, if it differs from what was asked here."""
        difference = _difference(spec, live)
        if difference is not None:
            return f"job {live.job_id!r} is live and differs: {difference}"
        refusal = await self._register([Compare(key=self._keys.spec, revision=revision)], [])
        self.spec = live
        return refusal

    async def is_surplus(self, wanted: int) -> bool:
        """Return True when at least `wanted` live hosts registered before this one."""
        hosts = (await self._store.read(self._keys.hosts)).items
        joined = {key: kv.create_revision for key, kv in hosts.items()}
        own = self._keys.host(self._record.host)
        return own in joined and ranks.is_surplus(joined, own, wanted)

    async def keep(self) -> None:
        """Refresh the lease and write the latest report until `leave`. Cancel to end earlier.

        Raises StoreRefused if etcd refuses this client, which no retry will change.
        """
        interval_s = self._ttl_s / 4
        next_refresh = self._clock.monotonic() + interval_s
        next_job_refresh = 0.0
        while not self._left:
            timeout = max(0.0, next_refresh - self._clock.monotonic())
            # Not `wait_for`: before Python 3.12 that loses a cancellation that comes with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._wake.wait()
            self._wake.clear()
            asked_at = self._clock.monotonic()
            try:
                await self._check_record()
                await self._write_record()
                await self._write_report()
                now = self._clock.monotonic()
                if now >= next_refresh:
                    await self._store.refresh(self.lease)
                    next_refresh = now + interval_s
                if now >= next_job_refresh and self.spec is not None and self.spec.lease:
                    try:
                        await self._store.refresh(self.spec.lease)
                    except LeaseLost:
                        await self._adopt_spec()
                    next_job_refresh = now + JOB_LEASE_TTL_S / 4
                self._mark_reachable()
            except LeaseLost:
                await self._register_again(asked_at)
            except StoreRefused:
                raise
            except StoreUnavailable as error:
                await self._mark_unreachable(error)

    def publish(self, report: HostReport | None) -> None:
        """Make this the stored report as soon as possible; only the latest one matters."""
        if report is not None and report != self._report:
            self._report = report
            self._wake.set()

    def amend(self, health: tuple[Fact, ...]) -> None:
        """Write into the record what is wrong with this host, before any later report."""
        if health != self._record.health:
            self._record = replace(self._record, health=health)
            self._amended = True
            self._wake.set()

    def reassert(self) -> None:
        """Make sure that etcd still holds this host's record; the caller saw the job's keys vanish."""
        self._recheck = True
        self._wake.set()

    async def leave(self) -> None:
        """Take back the record, the report and the leadership at once, for good. Bounded, never raises."""
        self._left = True
        granted, self._granted, self.lease = self._granted, 0, 0
        if granted:
            with contextlib.suppress(StoreUnavailable):
                await self._store.revoke(granted)

    async def restore_spec(self) -> None:
        """Write the job's specification again if it is gone (etcd was wiped), else take it over.

        Raises StoreUnavailable, and LeaseLost if etcd lost its data once more meanwhile.
        """
        if self.spec is None or await self._adopt_spec():
            return
        lease = await self._store.grant(JOB_LEASE_TTL_S)
        spec = replace(self.spec, lease=lease)
        written = await self._store.commit(
            [Compare(key=self._keys.spec, revision=0)],
            [Put(key=self._keys.spec, value=wire.encode(spec), lease=lease)],
        )
        if written is None:
            await self._store.revoke(lease)
            await self._adopt_spec()
        else:
            self.spec = spec

    async def _adopt_spec(self) -> bool:
        """Take over the stored specification, whose lease may be a new one; say if there is any."""
        stored = await read_key(self._store, self._keys.spec)
        if stored is None:
            return False
        live = wire.decode_spec(stored.value)
        if self.spec is not None and live.uid == self.spec.uid:
            self.spec = live
        return True

    async def _register(
        self, conditions: Sequence[Compare], extra: Sequence[Put | Delete]
    ) -> str | None:
        """Write the record under a new lease, in one step with `extra`.

        Sets `lease` on success. Returns why not if a --node-rank is claimed; None if a condition
        failed, so that the caller looks again.
        """
        record = self._record = replace(self._record, term=self._store.term)
        self._amended = False
        lease = await self._store.grant(self._ttl_s)
        if self._left:
            await self._store.revoke(lease)
            return None
        self._granted = lease
        compares = list(conditions)
        ops: list[Put | Delete] = [
            Put(key=self._keys.host(record.host), value=wire.encode(record), lease=lease),
            Put(key=self._keys.arrival, value=record.host.encode(), lease=lease),
            *extra,
        ]
        claim = None if record.node_rank is None else self._keys.node_rank(record.node_rank)
        if claim is not None:
            compares.append(Compare(key=claim, revision=0))
            ops.append(Put(key=claim, value=record.host.encode(), lease=lease))
        if await self._store.commit(compares, ops) is not None:
            self.lease = lease
            self._written = None
            self._wake.set()
            return None
        await self._store.revoke(lease)
        return None if claim is None else await self._claimed_text(claim)

    async def _claimed_text(self, claim: str) -> str | None:
        stored = await read_key(self._store, claim)
        if stored is None:
            return None
        holder = stored.value.decode(errors="replace")
        return (
            f"--node-rank {self._record.node_rank} is already taken by {holder}: give each host of the"
            " job its own, or none"
        )

    async def _register_again(self, asked_at: float) -> None:
        """After the lease was lost: a new lease, the same host id. The table says if we still belong.

        Who waited for etcd's answer for long was cut off; an agent that stood still itself was not.

        Raises JobRefused when the place in etcd belongs to others by now.
        """
        logger.warning("host %s lost its lease; registering again", self._record.host)
        self.losses += 1
        since = asked_at if self.unreachable_since is None else self.unreachable_since
        away_s = round(self._clock.monotonic() - since, 1)
        cut_off = away_s >= self._ttl_s / 4
        self._record = replace(self._record, cut_off_s=away_s if cut_off else 0.0)
        self.lease = 0
        self._written = None
        self._recheck = False
        if self._left:
            return
        try:
            taken = await self._register([await self._same_job()], [])
            if taken is not None and self._record.host not in taken:
                raise JobRefused(taken)
        except StoreRefused:
            raise
        except (StoreUnavailable, LeaseLost) as error:
            await self._mark_unreachable(error)
        else:
            self._mark_reachable()
            if not self.lease:
                await asyncio.sleep(_RETRY_S)
        self.on_change()

    async def _same_job(self) -> Compare:
        """Return the condition that the job of this id is still the one this host belongs to.

        Raises JobRefused when it is another one: this host was away while its job ended. A missing
        specification is no other one: etcd lost its data, or the job has ended just now.
        """
        stored = await read_key(self._store, self._keys.spec)
        if stored is None:
            return Compare(key=self._keys.spec, revision=0)
        live = wire.decode_spec(stored.value)
        if self.spec is not None and live.uid != self.spec.uid:
            raise JobRefused(
                f"job {live.job_id!r} ended while host {self._record.host} was cut off from etcd, and"
                " another job of this id is live"
            )
        return Compare(key=self._keys.spec, revision=stored.mod_revision)

    async def _check_record(self) -> None:
        if not self._recheck:
            return
        key = self._keys.host(self._record.host)
        if await read_key(self._store, key) is None:
            raise LeaseLost(f"key {key} is gone")
        self._recheck = False

    async def _write_record(self) -> None:
        if not self._amended or self.lease == 0:
            return  # the next registration writes it
        record = self._record
        put = Put(key=self._keys.host(record.host), value=wire.encode(record), lease=self.lease)
        await self._store.commit([], [put])
        self._amended = record is not self._record

    async def _write_report(self) -> None:
        report = self._report
        if self.lease == 0:
            raise LeaseLost("no lease")
        if report is None or report == self._written:
            return
        key = self._keys.report(self._record.host)
        await self._store.commit([], [Put(key=key, value=wire.encode(report), lease=self.lease)])
        self._written = report

    def _mark_reachable(self) -> None:
        if self.unreachable_since is not None:
            away_s = self._clock.monotonic() - self.unreachable_since
            logger.warning("etcd answers again after %.1f s", away_s)
            self.unreachable_since = None
            self.on_change()

    async def _mark_unreachable(self, error: Exception) -> None:
        if self.unreachable_since is None:
            self.unreachable_since = self._clock.monotonic()
            logger.warning("etcd does not answer, training goes on: %s", error)
            self.on_change()
        self._wake.set()  # the failed write or refresh is due again
        await asyncio.sleep(_RETRY_S)


def _difference(mine: JobSpec, live: JobSpec) -> str | None:
    """Return the first value that must agree and does not, with both values; None if all agree."""
    for name in JobSpec.COMPARED:
        here, there = getattr(mine, name), getattr(live, name)
        if here != there:
            return f"{_FLAGS[name]} is {here!r} here and {there!r} in the job"
    return None


_FLAGS = {
    "min_hosts": "the minimum of --nnodes",
    "max_hosts": "the maximum of --nnodes",
    "max_restarts": "--max-restarts",
    "entry": "the script",
    "version": "frun's version",
    "drills": "--allow-drills",
}
