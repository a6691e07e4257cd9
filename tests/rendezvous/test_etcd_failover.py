"""Members of etcd die, freeze and come back: requests and watches go on within bounds."""

import asyncio
import contextlib
import os
import resource
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from frun.errors import StoreUnavailable
from frun.rendezvous.etcd import EtcdStore
from frun.rendezvous.etcd_calls import Member, pb
from frun.rendezvous.mirror import Mirror
from frun.rendezvous.store import Compare, Put
from tests.fakes.etcd_server import EtcdServer, etcd_cluster, etcd_server, etcdctl

_PREFIX = "/frun/failover/"
_LIMIT_S = 40.0


async def _until(mirror: Mirror, holds: Callable[[], bool]) -> None:
    """Wait for a condition on a mirror."""
    async with asyncio.timeout(_LIMIT_S):
        while not holds():
            await mirror.wait_changed(mirror.version, _LIMIT_S)


async def _write_through(store: EtcdStore, strike: Callable[[], None], writes: int) -> float:
    """Write in a row, strike after some; return the seconds of the slowest write and refresh."""
    lease = await store.grant(5)
    slowest = 0.0
    for number in range(writes):
        if number == writes // 4:
            strike()
        for request in (
            store.commit([], [Put(key=_PREFIX + "n", value=str(number).encode())]),
            store.refresh(lease),
        ):
            begun = time.monotonic()
            await request
            slowest = max(slowest, time.monotonic() - begun)
    return slowest


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_one_member_of_three_goes(number: signal.Signals) -> None:
    """The member in use dies or freezes: no write fails, and the mirror ends right."""

    async def main(servers: list[EtcdServer]) -> None:
        endpoints = [server.endpoint for server in servers]
        store, watcher = EtcdStore(endpoints), EtcdStore(endpoints)
        await store.connect(_LIMIT_S)
        await watcher.connect(_LIMIT_S)

        def strike() -> None:
            next(one for one in servers if one.endpoint == watcher.endpoint).signal(number)

        async with Mirror(watcher, _PREFIX) as mirror:
            await _until(mirror, lambda: mirror.connected)
            assert await _write_through(store, strike, 100) < _LIMIT_S
            await _until(mirror, lambda: mirror.items[_PREFIX + "n"].value == b"99")
        await store.close()
        await watcher.close()

    with etcd_cluster(3) as servers:
        asyncio.run(main(servers))


def test_a_frozen_etcd_is_noticed_and_forgiven() -> None:
    """All requests on a frozen etcd end in time, its watch within 6 s, and all is well after."""

    async def main(server: EtcdServer) -> None:
        store = EtcdStore([server.endpoint], request_timeout_s=1.0)
        await store.connect(_LIMIT_S)
        lease = await store.grant(60)
        await store.commit([], [Put(key=_PREFIX + "a", value=b"1", lease=lease)])
        async with Mirror(store, _PREFIX) as mirror:
            await _until(mirror, lambda: _PREFIX + "a" in mirror.items)
            server.signal(signal.SIGSTOP)
            begun = time.monotonic()
            requests: list[Callable[[], Awaitable[object]]] = [
                lambda: store.read(_PREFIX),
                lambda: store.commit([], [Put(key=_PREFIX + "b", value=b"")]),
                lambda: store.grant(5),
                lambda: store.refresh(lease),
                lambda: store.revoke(99),
                lambda: anext(store.watch(_PREFIX, 1)),
            ]
            results = await asyncio.gather(*(one() for one in requests), return_exceptions=True)
            assert [type(one) for one in results] == [StoreUnavailable] * len(requests)
            assert time.monotonic() - begun < _LIMIT_S
            await _until(mirror, lambda: not mirror.connected)
            assert mirror.items[_PREFIX + "a"].value == b"1"
            server.signal(signal.SIGCONT)
            await _until(mirror, lambda: mirror.connected)
            await store.refresh(lease)
            assert mirror.resyncs == 2
            assert not mirror.drain_deletions()
        await store.close()

    with etcd_server() as server:
        asyncio.run(main(server))


def test_closing_and_cancelling_meet() -> None:
    """A request under way ends by `StoreUnavailable` on close; a cancelled one stays cancelled."""

    async def main(server: EtcdServer) -> None:
        store = EtcdStore([server.endpoint])
        await store.connect(_LIMIT_S)
        server.signal(signal.SIGSTOP)
        closed = asyncio.ensure_future(store.read(_PREFIX))
        cancelled = asyncio.ensure_future(store.read(_PREFIX))
        await asyncio.wait({closed, cancelled}, timeout=0.1)
        cancelled.cancel()
        await store.close()
        done = await asyncio.gather(closed, cancelled, return_exceptions=True)
        assert [type(one) for one in done] == [StoreUnavailable, asyncio.CancelledError]
        async with asyncio.timeout(_LIMIT_S), Mirror(store, _PREFIX) as mirror:
            await mirror.wait_changed(0, 0.1)

    with etcd_server() as server:
        asyncio.run(main(server))


def test_a_quiet_watch_stays(shared_etcd: EtcdServer) -> None:
    """A watch on which nothing happens for a while is asked for life and does not end."""

    async def main() -> None:
        store = EtcdStore([shared_etcd.endpoint])
        after = (await store.read(_PREFIX)).revision
        async with contextlib.aclosing(store.watch(_PREFIX, after)) as watch:
            waiting = asyncio.ensure_future(anext(watch))
            done, _ = await asyncio.wait({waiting}, timeout=7.0)  # quiet is what is tested
            assert not done
            await store.commit([], [Put(key=_PREFIX + "q", value=b"1")])
            async with asyncio.timeout(_LIMIT_S):
                assert (await waiting).changes[0].key == _PREFIX + "q"
        await store.close()

    asyncio.run(main())


class SlowToWrite:
    """A call of gRPC whose answer comes before its write has returned; to cancel that would end the call."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.ended = False

    async def read(self) -> Any:
        """Return what the write asks for."""
        await self.asked.wait()
        return pb.WatchResponse()

    async def write(self, request: Any) -> None:
        """Return a moment after the answer."""
        assert request.HasField("progress_request")
        self.asked.set()
        try:
            await asyncio.sleep(0.2)
        except asyncio.CancelledError:
            self.ended = True
            raise


def test_an_answer_before_its_question_has_returned_ends_no_watch() -> None:
    """The write may finish: the call, and with it the watch, would end otherwise."""

    async def main() -> None:
        store, call = EtcdStore(["127.0.0.1:9"], quiet_s=0.0), SlowToWrite()
        response = await store._next(cast("Member", None), call)
        assert response == pb.WatchResponse()
        assert not call.ended
        await store.close()

    asyncio.run(main())


def test_a_compacted_watch_is_unavailable(shared_etcd: EtcdServer) -> None:
    """Revisions that etcd has dropped can not be watched: the caller must read again."""

    async def main() -> None:
        store = EtcdStore([shared_etcd.endpoint])
        for number in range(3):
            await store.commit([], [Put(key=_PREFIX + "c", value=str(number).encode())])
        now = (await store.read(_PREFIX)).revision
        etcdctl(shared_etcd, "compact", str(now))
        with pytest.raises(StoreUnavailable, match="compacted"):
            await anext(store.watch(_PREFIX, now - 3))
        await store.close()

    asyncio.run(main())


def test_an_etcd_that_restarts_changes_nothing() -> None:
    """While etcd is down nothing spins; after its return leases and mirror are as before."""

    async def main(server: EtcdServer) -> None:
        store = EtcdStore([server.endpoint], request_timeout_s=1.0)
        other = EtcdStore([server.endpoint])
        await store.connect(_LIMIT_S)
        lease = await store.grant(20)
        await store.commit([], [Put(key=_PREFIX + "mine", value=b"", lease=lease)])
        await store.commit([], [Put(key=_PREFIX + "old", value=b"")])
        async with Mirror(store, _PREFIX) as mirror:
            await _until(mirror, lambda: len(mirror.items) == 2)
            server.kill()
            # The kill may come between the snapshot and its watch, which is asked for until a request's end.
            await _until(mirror, lambda: not mirror.connected)
            begun = time.monotonic()
            before = resource.getrusage(resource.RUSAGE_SELF)
            while time.monotonic() - begun < 3.0:
                with contextlib.suppress(StoreUnavailable):
                    await store.refresh(lease)
            after = resource.getrusage(resource.RUSAGE_SELF)
            spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            assert spent < 1.5
            server.start()
            await other.connect(_LIMIT_S)
            # Several changes in one step right after the return, before the mirror is back.
            await other.commit([Compare(key=_PREFIX + "old", revision=0)], [])
            await other.commit([], [Put(key=_PREFIX + name, value=b"") for name in ("x", "y", "z")])
            await store.refresh(lease)
            await _until(mirror, lambda: len(mirror.items) == 5)
            assert set(mirror.items) == {_PREFIX + n for n in ("mine", "old", "x", "y", "z")}
        await store.close()
        await other.close()

    with etcd_server() as server:
        asyncio.run(main(server))


def test_a_write_without_an_answer_is_not_called_failed() -> None:
    """A compare that may have failed by the caller's own earlier attempt is unknown, not None."""

    async def main(server: EtcdServer, second: EtcdServer) -> None:
        # The first endpoint swallows the request: what it did with it nobody knows.
        async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            upstream_reader, upstream = await asyncio.open_connection(
                *server.endpoint.rsplit(":", 1)
            )
            try:
                await asyncio.gather(
                    _copy(reader, upstream, lambda: True),
                    _copy(upstream_reader, writer, lambda: not swallowing),
                )
            finally:
                upstream.close()
                writer.close()

        swallowing = False
        relay = await asyncio.start_server(swallow, "127.0.0.1", 0)
        port = relay.sockets[0].getsockname()[1]
        store = EtcdStore([f"127.0.0.1:{port}", server.endpoint])
        while not store.endpoint.endswith(f":{port}"):
            await store.close()
            store = EtcdStore([f"127.0.0.1:{port}", server.endpoint])
        await store.connect(_LIMIT_S)
        swallowing = True
        with pytest.raises(StoreUnavailable, match="it may have been done"):
            await store.commit(
                [Compare(key=_PREFIX + "once", revision=0)], [Put(key=_PREFIX + "once", value=b"1")]
            )
        assert (await store.read(_PREFIX)).items[_PREFIX + "once"].value == b"1"
        await store.close()
        relay.close()
        await relay.wait_closed()

    with etcd_server() as server:
        asyncio.run(main(server, server))


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passing: Callable[[], bool]
) -> None:
    """Copy bytes while `passing`, else swallow them."""
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            if passing():
                writer.write(data)
    writer.close()


def test_streams_leave_nothing_behind(shared_etcd: EtcdServer) -> None:
    """Many watches opened and closed cost no descriptor."""

    async def main() -> None:
        store = EtcdStore([shared_etcd.endpoint])
        after = (await store.read(_PREFIX)).revision
        counts = []
        for number in range(30):
            async with contextlib.aclosing(store.watch(_PREFIX, after)) as watch:
                await store.commit([], [Put(key=_PREFIX + "s", value=b"")])
                await anext(watch)
            if number in (5, 29):
                counts.append((len(_open_files()), len(asyncio.all_tasks())))
        await store.close()
        assert counts[0] == counts[1]

    asyncio.run(main())


def _open_files() -> list[str]:
    return os.listdir("/proc/self/fd")
