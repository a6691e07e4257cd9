"""Breaks one job as an operator asks, and follows what comes of it to its end.

Owns the commands' keys on the asking side. What the end means is `verdict`'s, doing the fault the agent's.
"""

import contextlib
import random
from collections.abc import Callable, Mapping
from typing import Any, Self

from frun.clock import Clock
from frun.drills import targets
from frun.drills.catalogue import CATALOGUE, Outcome
from frun.drills.targets import Selection, Victim
from frun.drills.verdict import QUIET_S, Verdict, judge
from frun.errors import StoreUnavailable, UsageError, WireError
from frun.protocol import wire
from frun.protocol.faults import KEPT, Command, CommandState, Fault
from frun.protocol.incidents import outdated
from frun.protocol.keys import Keys
from frun.protocol.records import JobSpec
from frun.rendezvous.mirror import Mirror
from frun.rendezvous.store import Compare, Delete, Put, Store
from frun.status import status_document

_GONE_S = 10.0
"""How long the job's etcd may be silent before it is held to have ended with the job."""
_CONNECT_S = 5.0


class Operator:
    """One job, from the outside. Use it as a context manager."""

    def __init__(self, store: Store, job_id: str, clock: Clock, say: Callable[[str], None]) -> None:
        """`say` is told of each new decision of the job's leader, in a line."""
        self._store = store
        self._job_id = job_id
        self._keys = Keys(job_id)
        self._clock = clock
        self._say = say
        self._mirror = Mirror(store, self._keys.prefix)
        self._document: dict[str, Any] = {}
        self._connected_at = 0.0

    async def __aenter__(self) -> Self:
        """Read the job. Raises UsageError if it is not there or does not allow drills."""
        await self._mirror.start()
        try:
            await self._mirror.wait_changed(0, _CONNECT_S)
            self._check()
        except BaseException:
            await self._mirror.close()
            raise
        return self

    def _check(self) -> None:
        if not self._refresh():
            raise UsageError(f"there is no job {self._job_id!r}: it ended, or has another id")
        if not self._document["drills"]:
            raise UsageError(
                f"job {self._job_id!r} does not allow drills: start it with --allow-drills"
            )

    async def __aexit__(self, *_: object) -> None:
        """Stop following."""
        await self._mirror.close()

    @property
    def document(self) -> Mapping[str, Any]:
        """The job's status as last seen."""
        self._refresh()
        return self._document

    def choose(self, fault: Fault, selection: Selection, draw: random.Random) -> Victim:
        """Return who would be hit now. Raises UsageError."""
        return targets.choose(self.document, CATALOGUE[fault.kind].scope, selection, draw)

    async def inject(self, fault: Fault, victim: Victim, timeout_s: float) -> Verdict:
        """Ask for a fault, and follow the job until it is clear what came of it.

        Raises UsageError if the job has ended; StoreUnavailable.
        """
        before = int(self.document["generation"])
        command = await self._ask(fault, victim)
        try:
            return await self._follow(command, before, timeout_s, of_spare=victim.spare)
        finally:
            if self._latest(command).state in (CommandState.ASKED, CommandState.TAKEN):
                # A fault that nobody waits for must not happen later.
                with contextlib.suppress(StoreUnavailable):
                    await self._store.commit([], [Delete(key=self._keys.command(command.id))])

    async def _follow(
        self, command: Command, before: int, timeout_s: float, *, of_spare: bool
    ) -> Verdict:
        fault = command.fault
        begun = self._connected_at = self._clock.monotonic()
        done_at: float | None = None
        waits = fault.place is not None or fault.at_step >= 0
        last: object = (before, self._document["phase"], self._document["reason"])
        while True:
            version = self._mirror.version
            now = self._clock.monotonic()
            there = self._refresh()
            command = self._latest(command)
            if command.state is CommandState.TAKEN and waits:
                waits = False
                self._say(f"{command.host} waits for rank {command.rank} to come to its place")
            if command.state is CommandState.DONE and done_at is None:
                done_at = now
                self._say(command.text)
            document = self._document
            seen = (document["generation"], document["phase"], document["reason"])
            if seen != last:
                last = seen
                self._say(f"generation {seen[0]}, {seen[1]}: {seen[2]}")
            done_for_s = 0.0 if done_at is None else now - done_at
            verdict = judge(command, before, document, done_for_s, of_spare=of_spare)
            if verdict is not None:
                return verdict
            if not there or self._silent_for_s(now) > _GONE_S + fault.duration_s:
                return Verdict(outcome=Outcome.FAILED, text="the job is gone from etcd")
            left = begun + timeout_s + fault.duration_s - now
            if left <= 0:
                what = "is not over" if done_at is not None else "has not happened"
                return Verdict(outcome=Outcome.OPEN, text=f"it {what} within {timeout_s:g} s")
            await self._mirror.wait_changed(version, min(left, QUIET_S / 4))

    def _silent_for_s(self, now: float) -> float:
        if self._mirror.connected:
            self._connected_at = now
        return now - self._connected_at

    async def _ask(self, fault: Fault, victim: Victim) -> Command:
        while True:
            spec = self._spec()
            stored = sorted(
                key for key in self._mirror.items if key.startswith(self._keys.commands)
            )
            number = int(stored[-1].rpartition("/")[2]) + 1 if stored else 1
            command = Command(
                id=number, uid=spec.uid, host=victim.host, rank=victim.rank, fault=fault
            )
            key = self._keys.command(number)
            put = Put(key=key, value=wire.encode(command), lease=spec.lease)
            old = [Delete(key=each) for each in outdated(stored, KEPT)]
            version = self._mirror.version
            if await self._store.commit([Compare(key=key, revision=0)], [put, *old]) is not None:
                return command
            # Somebody else asks at the same time: take the next number once it is seen.
            await self._mirror.wait_changed(version, _CONNECT_S)

    def _spec(self) -> JobSpec:
        kv = self._mirror.items.get(self._keys.spec)
        if kv is None:
            raise UsageError(f"job {self._job_id!r} has ended")
        return wire.decode_spec(kv.value)

    def _latest(self, known: Command) -> Command:
        kv = self._mirror.items.get(self._keys.command(known.id))
        try:
            return known if kv is None else wire.decode_command(kv.value)
        except WireError:
            return known

    def _refresh(self) -> bool:
        """Look at the job; False if it is gone, and then what was last seen of it stays."""
        items = {key: kv.value for key, kv in self._mirror.items.items()}
        document = status_document(self._job_id, items)
        if document is None:
            return False
        self._document = document
        return True
