"""The `Store` on a real etcd cluster (v3 API), one or several endpoints, TLS and password.

Owns what each operation says to etcd and what the answers mean. `etcd_calls` owns channels and
failover, `diagnosis` the reasons why a first connection fails, `mirror` what to do when a watch ends.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, NoReturn

from frun.endpoints import ETCD_PORT, Endpoint, parse_endpoints
from frun.errors import LeaseLost, StoreRefused, StoreUnavailable
from frun.rendezvous.diagnosis import Diagnosis, Kind, diagnose
from frun.rendezvous.etcd_calls import EOF, Calls, Member, Metadata, RpcError, pb
from frun.rendezvous.store import Batch, Change, Compare, Delete, KeyValue, Put, Snapshot
from frun.rendezvous.tls import Tls, read_tls

__all__ = ["Endpoint", "EtcdStore", "Tls"]

_PROBE_KEY = b"/frun/"
_FIRST_TRY_S = 1.0
_RETRY_S = 0.25
_ASK_PROGRESS_S = 2.0
"""A watch that was silent this long is asked for a sign of life (no disk, no quorum involved)."""
_SILENCE_S = 2.5
"""No sign of life this long after the question: the connection or the member is dead."""


class EtcdStore:
    """A client of an etcd cluster. Make it and use it inside one running event loop.

    A write that was tried again may have been carried out twice, and one that timed out may be
    carried out late: guard writes with compares wherever that would matter.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        tls: Tls | None = None,
        user: str | None = None,
        password: str | None = None,
        request_timeout_s: float = 3.0,
        quiet_s: float = _ASK_PROGRESS_S,
    ) -> None:
        """Read the TLS files; connects nowhere yet. A watch that is quiet for `quiet_s` is asked if it lives.

        Raises `UsageError` for an endpoint or a file that can't be used.
        """
        self._endpoints = parse_endpoints(
            ",".join(endpoints), default_port=ETCD_PORT, name="etcd endpoint"
        )
        self._tls = tls
        self._calls = Calls(
            self._endpoints,
            tls=None if tls is None else read_tls(tls),
            user=user,
            password=password,
            timeout_s=request_timeout_s,
        )
        self._timeout_s = request_timeout_s
        self.term = 0
        self._quiet_s = quiet_s
        self._refreshing = asyncio.Lock()
        self._refreshes: dict[Endpoint, Any] = {}
        """An open stream to each member that was asked: to open one takes as much as two refreshes."""

    @property
    def endpoint(self) -> str:
        """The endpoint that answered last (before the first answer: that is asked first)."""
        return str(self._calls.preferred.endpoint)

    async def connect(self, timeout_s: float) -> None:
        """Wait until etcd answers a linearizable read, at most about `timeout_s`.

        Raises `StoreUnavailable` with one line that says what is wrong at each endpoint, and
        `StoreRefused` as soon as no endpoint can be expected to answer ever (TLS, password, not
        etcd).
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        await self._check_tls()
        while True:
            left = max(0.1, deadline - loop.time())
            try:
                await self._read(_PROBE_KEY, b"", timeout_s=min(left, _FIRST_TRY_S))
            except StoreRefused:
                raise
            except StoreUnavailable as error:
                found = await self._diagnose()
                if all(one.stays for one in found.values()):
                    raise StoreRefused(_line(found)) from error
                if loop.time() + _RETRY_S >= deadline:
                    raise _final(found, error) from error
                await asyncio.sleep(_RETRY_S)
            else:
                return

    async def local_address(self) -> str:
        """Return the address literal of this machine that the answering endpoint is reached from.

        Raises `StoreUnavailable` when the endpoint takes no connection now.
        """
        endpoint = self._calls.preferred.endpoint
        try:
            async with asyncio.timeout(self._timeout_s):
                _, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        except OSError as error:  # TimeoutError too
            raise StoreUnavailable(f"etcd at {endpoint} takes no connection: {error}") from error
        address = str(writer.get_extra_info("sockname")[0])
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return address

    async def read(self, prefix: str, limit: int = 0) -> Snapshot:
        """Return the keys that begin with `prefix`, the first `limit` of them if one is given."""
        answer = await self._read(_first(prefix), _range_end(prefix), limit=limit)
        self._note(answer)
        items = {kv.key.decode(): _key_value(kv) for kv in answer.kvs}
        return Snapshot(revision=answer.header.revision, items=items)

    async def _read(
        self, key: bytes, range_end: bytes, *, limit: int = 0, timeout_s: float | None = None
    ) -> Any:
        request = pb.RangeRequest(key=key, range_end=range_end, limit=limit)

        async def send(member: Member, metadata: Metadata, limit_s: float) -> Any:
            return await member.kv.Range(request, metadata=metadata, timeout=limit_s)

        return (await self._calls.request(send, what="read", timeout_s=timeout_s)).value

    async def commit(self, compares: Sequence[Compare], ops: Sequence[Put | Delete]) -> int | None:
        """Apply all `ops` in one step if every compare holds; return the revision or None."""
        request = pb.TxnRequest(
            compare=[_compare(one) for one in compares], success=[_op(op) for op in ops]
        )

        async def send(member: Member, metadata: Metadata, limit: float) -> Any:
            return await member.kv.Txn(request, metadata=metadata, timeout=limit)

        answer = await self._calls.request(send, what="write")
        self._note(answer.value)
        if answer.value.succeeded:
            return int(answer.value.header.revision)
        if answer.unsure:
            # The compare may have failed because of our own earlier attempt.
            raise StoreUnavailable("an attempt to write got no answer: it may have been done")
        return None

    async def grant(self, ttl_s: int) -> int:
        """Create a lease of `ttl_s` seconds; return its id."""
        request = pb.LeaseGrantRequest(TTL=ttl_s)

        async def send(member: Member, metadata: Metadata, limit: float) -> Any:
            return await member.lease.LeaseGrant(request, metadata=metadata, timeout=limit)

        answer = (await self._calls.request(send, what="lease")).value
        self._note(answer)
        return int(answer.ID)

    async def granted_ttl(self, ttl_s: int) -> int:
        """Return how many seconds etcd really grants a lease of `ttl_s`; nothing stays behind.

        It may be more: a lease must outlive an election of etcd's own.
        """
        lease = await self.grant(ttl_s)
        try:
            answer = await self._time_to_live(lease)
        finally:
            await self.revoke(lease)
        return int(answer.grantedTTL)

    async def remaining(self, lease: int) -> int:
        """Return the seconds until the lease ends, rounded down; -1 when it no longer exists."""
        return max(-1, int((await self._time_to_live(lease)).TTL))

    async def _time_to_live(self, lease: int) -> Any:
        request = pb.LeaseTimeToLiveRequest(ID=lease)

        async def send(member: Member, metadata: Metadata, limit: float) -> Any:
            return await member.lease.LeaseTimeToLive(request, metadata=metadata, timeout=limit)

        answer = (await self._calls.request(send, what="lease")).value
        self._note(answer)
        return answer

    async def refresh(self, lease: int) -> None:
        """Start the lease's time anew. Raises `LeaseLost` when it no longer exists."""

        async def send(member: Member, metadata: Metadata, limit: float) -> Any:
            async with asyncio.timeout(limit), self._refreshing:
                call = self._refreshes.get(member.endpoint)
                if call is None:
                    call = member.lease.LeaseKeepAlive(metadata=metadata)
                    self._refreshes[member.endpoint] = call
                try:
                    return await _refreshed(call, lease)
                except BaseException:
                    # An answer that comes late would be taken for that to the next question.
                    del self._refreshes[member.endpoint]
                    call.cancel()
                    raise

        answer = (await self._calls.request(send, what="lease refresh")).value
        self._note(answer)
        if answer.TTL <= 0:
            raise LeaseLost("the lease is gone from etcd")

    async def revoke(self, lease: int) -> None:
        """End the lease now and delete every key under it. A lease that is gone is fine."""
        request = pb.LeaseRevokeRequest(ID=lease)

        async def send(member: Member, metadata: Metadata, limit: float) -> Any:
            return await member.lease.LeaseRevoke(request, metadata=metadata, timeout=limit)

        with contextlib.suppress(LeaseLost):
            await self._calls.request(send, what="lease revoke")

    async def close(self) -> None:
        """Free the connections; watches end. Safe to call twice."""
        await self._calls.close()

    def _note(self, answer: Any) -> None:
        # A member that lags tells of an older one.
        self.term = max(self.term, int(answer.header.raft_term))

    # -- watch ---------------------------------------------------------------------------------

    async def watch(self, prefix: str, after: int) -> AsyncGenerator[Batch, None]:
        """Yield every change under `prefix` with a revision above `after`."""
        member, call = await self._open_watch(prefix, after)
        try:
            while True:
                response = await self._next(member, call)
                if response.events:
                    yield _batch(response)
        finally:
            call.cancel()

    async def _open_watch(self, prefix: str, after: int) -> tuple[Member, Any]:
        create = pb.WatchRequest(
            create_request=pb.WatchCreateRequest(
                key=_first(prefix), range_end=_range_end(prefix), start_revision=after + 1
            )
        )

        async def send(member: Member, metadata: Metadata, limit: float) -> tuple[Member, Any]:
            # A member that lost its leader must say so: its watch would be silent, not dead.
            call = member.watch.Watch(metadata=(*metadata, ("hasleader", "true")))
            try:
                async with asyncio.timeout(limit):
                    await call.write(create)
                    self._check(member, await call.read(), after)
            except asyncio.InvalidStateError:
                await _raise_status(call)
            except BaseException:
                call.cancel()
                raise
            return member, call

        return (await self._calls.request(send, what="watch")).value

    async def _next(self, member: Member, call: Any) -> Any:
        """Return the next response; asks for one when it is quiet."""
        reading = asyncio.ensure_future(call.read())
        try:
            done, _ = await asyncio.wait({reading}, timeout=self._quiet_s)
            if not done:
                request = pb.WatchRequest(progress_request=pb.rpc_pb2.WatchProgressRequest())
                asking = asyncio.ensure_future(call.write(request))
                try:
                    _, quiet = await asyncio.wait({reading, asking}, timeout=_SILENCE_S)
                finally:
                    # To cancel a write is to cancel the whole call: so only one that is of no use any more.
                    asking.cancel()
                    await asyncio.gather(asking, return_exceptions=True)
                if quiet:
                    self._calls.avoid(member)
                    raise StoreUnavailable(f"the watch at {member.endpoint} fell silent")
            if reading.cancelled():  # gRPC's way to say that this side closed the channel
                raise StoreUnavailable("the store was closed")
            response = reading.result()
        except RpcError as error:
            self._calls.act_on(error, member)
            self._calls.avoid(member)
            raise StoreUnavailable(
                f"the watch at {member.endpoint} broke: {error.details()}"
            ) from error
        finally:
            if not reading.done():
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
        self._check(member, response)
        self._note(response)
        return response

    def _check(self, member: Member, response: Any, after: int = 0) -> None:
        """Raise when the stream ended, etcd cancelled the watch, or it knows no such revision."""
        if response is EOF:
            self._calls.avoid(member)
            raise StoreUnavailable(f"the watch at {member.endpoint} ended")
        if response.compact_revision:
            raise StoreUnavailable("the revisions to watch from are compacted")
        if response.canceled:
            reason = response.cancel_reason
            if "permission denied" in reason.lower():
                raise StoreRefused(f"etcd at {member.endpoint} refuses the watch: {reason}")
            if "auth token" in reason:
                self._calls.forget_token()
            raise StoreUnavailable(f"etcd at {member.endpoint} ended the watch: {reason}")
        if response.header.revision < after:
            # A watch from a revision that is still to come is silent, not an error.
            self._calls.avoid(member)
            raise StoreUnavailable(
                f"etcd at {member.endpoint} has not reached revision {after}: it lags, or it lost "
                "its data"
            )

    async def _check_tls(self) -> None:
        """Raise `StoreRefused` when TLS can work nowhere: said sooner, and gRPC stays quiet."""
        looks = {one: asyncio.ensure_future(diagnose(one, self._tls)) for one in self._endpoints}
        try:
            for look in asyncio.as_completed(looks.values()):
                if (await look).kind is not Kind.NO_TLS:
                    return
        finally:
            for task in looks.values():
                task.cancel()
            await asyncio.gather(*looks.values(), return_exceptions=True)
        raise StoreRefused(_line({endpoint: task.result() for endpoint, task in looks.items()}))

    async def _diagnose(self) -> dict[Endpoint, Diagnosis]:
        found = await asyncio.gather(*(diagnose(one, self._tls) for one in self._endpoints))
        return dict(zip(self._endpoints, found, strict=True))


def _line(found: Mapping[Endpoint, Diagnosis]) -> str:
    told = "; ".join(f"etcd at {endpoint}: {one.text}" for endpoint, one in found.items())
    return f"cannot use {told}"


def _final(found: Mapping[Endpoint, Diagnosis], error: StoreUnavailable) -> StoreUnavailable:
    """The one line after all waiting was in vain, by what the last look showed."""
    if any(one.kind is Kind.ANSWERS for one in found.values()):
        return StoreUnavailable(f"{_line(found)} ({error})")
    told = ", ".join(f"{endpoint} ({one.text})" for endpoint, one in found.items())
    advice = "start it, or name another with --rdzv-endpoint"
    if any(one.stays for one in found.values()):
        return StoreRefused(f"no etcd answers at {told}: {advice}")
    return StoreUnavailable(f"no etcd answers at {told}: {advice}")


async def _refreshed(call: Any, lease: int) -> Any:
    """Return the answer to one refresh on an open stream."""
    try:
        await call.write(pb.LeaseKeepAliveRequest(ID=lease))
        answer = await call.read()
    except asyncio.InvalidStateError:
        await _raise_status(call)
    if answer is EOF:
        raise TimeoutError
    return answer


async def _raise_status(call: Any) -> NoReturn:
    """Raise why a stream ended before the request could be written: its reads know."""
    await call.read()
    raise TimeoutError


def _first(prefix: str) -> bytes:
    """The first key of a prefix: etcd knows no empty key."""
    return prefix.encode() or b"\0"


def _range_end(prefix: str) -> bytes:
    """The first key after all that begin with `prefix`."""
    raw = prefix.encode().rstrip(b"\xff")
    return raw[:-1] + bytes([raw[-1] + 1]) if raw else b"\0"


def _key_value(kv: Any) -> KeyValue:
    return KeyValue(
        key=kv.key.decode(),
        value=kv.value,
        create_revision=kv.create_revision,
        mod_revision=kv.mod_revision,
        lease=kv.lease,
    )


def _batch(response: Any) -> Batch:
    deletes = pb.kv_pb2.Event.DELETE
    changes = tuple(
        Change(
            key=event.kv.key.decode(),
            kv=None if event.type == deletes else _key_value(event.kv),
        )
        for event in response.events
    )
    # Not the header's revision: while catching up it is ahead of the events that were sent.
    return Batch(revision=response.events[-1].kv.mod_revision, changes=changes)


def _compare(compare: Compare) -> Any:
    key = compare.key.encode()
    if compare.created:
        return pb.Compare(
            key=key,
            result=pb.Compare.EQUAL,
            target=pb.Compare.CREATE,
            create_revision=compare.revision,
        )
    return pb.Compare(
        key=key, result=pb.Compare.EQUAL, target=pb.Compare.MOD, mod_revision=compare.revision
    )


def _op(op: Put | Delete) -> Any:
    if isinstance(op, Put):
        return pb.RequestOp(
            request_put=pb.PutRequest(key=op.key.encode(), value=op.value, lease=op.lease)
        )
    if op.prefix:
        delete = pb.DeleteRangeRequest(key=_first(op.key), range_end=_range_end(op.key))
    else:
        delete = pb.DeleteRangeRequest(key=op.key.encode())
    return pb.RequestOp(request_delete_range=delete)
