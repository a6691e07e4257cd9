"""Agents' group stores on a thread of their own, for tests whose workers block."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from frun.agent.groupstore import GroupStore, Shard

T = TypeVar("T")
LIMIT_S = 40.0


class Hosts:
    """Several hosts' group stores in one process, with an event loop in a thread."""

    def __init__(
        self, folder: Path, count: int, *, token: str = "secret", job: str = "job"
    ) -> None:
        """Listen everywhere; no generation has begun."""
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="agents")
        self._thread.start()
        self.paths = [str(folder / f"s{index}") for index in range(count)]
        self.stores = [self.do(lambda: GroupStore(token, job)) for _ in range(count)]
        self.shards = []
        for index, store in enumerate(self.stores):
            port = self.wait(store.listen_tcp("127.0.0.1"))
            self.wait(store.listen_unix(self.paths[index]))
            self.shards.append(Shard(host=f"h{index}", address="127.0.0.1", port=port))

    def wait(self, coroutine: Any) -> Any:
        """Run a coroutine on the agents' loop and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(LIMIT_S)

    def do(self, call: Callable[[], T]) -> T:
        """Call a function on the agents' loop and return its result."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(call())
            except BaseException as error:  # noqa: BLE001 - goes to the test's thread
                done.set_exception(error)

        self.loop.call_soon_threadsafe(run)
        return done.result(LIMIT_S)

    def begin(self, generation: int, *indexes: int) -> None:
        """Begin a generation over all hosts, on the named ones or on all."""
        for index in indexes or range(len(self.stores)):
            self.do(partial(self.stores[index].begin, generation, self.shards, index))

    def until_waiting(self, index: int, count: int) -> None:
        """Return when exactly `count` requests are under way on a host."""

        async def watch() -> None:
            async with asyncio.timeout(LIMIT_S):
                while len(self.stores[index]._calls) != count:
                    await asyncio.sleep(0.001)

        self.wait(watch())

    def until_parked(self, count: int) -> None:
        """Return when on every host `count` requests wait for their generation to begin."""

        async def watch() -> None:
            async with asyncio.timeout(LIMIT_S):
                while any(len(store._parked) != count for store in self.stores):
                    await asyncio.sleep(0.001)

        self.wait(watch())

    def close(self) -> None:
        """Close every store, check that nothing is left, and end the thread."""
        for store in self.stores:
            self.wait(store.close())
        left = self.do(lambda: [len(store._calls) + len(store.links) for store in self.stores])
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(LIMIT_S)
        self.loop.close()
        assert not any(left)
        assert not any(Path(path).exists() for path in self.paths)
