"""Hosts whose records vanished from etcd although they may live: asked at their own address.

The end of a lease is no proof. A member of etcd that led, stood still for longer than a lease and goes on
can end all the leases that it thinks have run out, before it learns that another one leads (etcd-io/etcd,
issue 15247). Its hosts register again as soon as they hear of it. So a host that answers is given time for
that, no longer than a lease: one that can't reach etcd is of no use. What its loss means is not decided here.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Self

from frun.clock import Clock
from frun.protocol.records import Slot

_AGAIN_S = 0.1


class Doubts:
    """Who has vanished and may live. Use it on one event loop only."""

    def __init__(
        self,
        answers: Callable[[Slot], Awaitable[bool]],
        limit_s: float,
        clock: Clock,
        on_settled: Callable[[], None],
    ) -> None:
        """`answers` asks the agent at a place if it lives, within a moment.

        `on_settled` is called when a host does not answer any more, or has done so for `limit_s`.
        """
        self._answers = answers
        self._limit_s = limit_s
        self._clock = clock
        self._on_settled = on_settled
        self._asking: dict[str, asyncio.Task[None]] = {}

    def look(self, slots: Collection[Slot], gone: Collection[str]) -> frozenset[str]:
        """Return the hosts, of those in `gone` that have a place, that may live.

        Whose lease etcd must have ended rightly is not to be in `gone`: that would only take time.
        """
        places = {slot.host: slot for slot in slots if slot.host in gone} if gone else {}
        for host in self._asking.keys() - places.keys():
            self._asking.pop(host).cancel()
        for host in places.keys() - self._asking.keys():
            task = asyncio.create_task(self._ask(places[host]), name=f"asks {host}")
            task.add_done_callback(lambda _: self._on_settled())
            self._asking[host] = task
        return frozenset(host for host, task in self._asking.items() if not task.done())

    async def __aenter__(self) -> Self:
        """Begin."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ask no more."""
        tasks, self._asking = list(self._asking.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, slot: Slot) -> None:
        until = self._clock.monotonic() + self._limit_s
        while await self._answers(slot) and self._clock.monotonic() < until:
            await asyncio.sleep(_AGAIN_S)
