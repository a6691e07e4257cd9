"""Ends workers that overstepped a limit: one that they set themselves, or one of their host.

Owns finding whose process it is and the signals. Timers are `timers`'; what becomes of a failed worker,
or of a host that is not fit, is for others.
"""

import asyncio
import logging
import signal
from collections.abc import Callable, Collection
from typing import Protocol

from frun import procfs
from frun.agent.timers import Expired
from frun.clock import Clock
from frun.protocol.records import WorkerReport, WorkerState

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_SHOWN = 100


class Workers(Protocol):
    """The workers of this host, as far as a watchdog must know them."""

    @property
    def reports(self) -> Collection[WorkerReport]:
        """What is known of each."""
        ...

    def condemn(self, pid: int, why: str) -> None:
        """Note why the worker of this pid is about to be ended."""
        ...


class Watchdog:
    """Acts on what is noticed. Use it on the agent's event loop only."""

    def __init__(self, workers: Workers, grace_s: float) -> None:
        """`grace_s` is what a worker has between the signal it asked for and SIGKILL."""
        self._workers = workers
        self._grace_s = grace_s

    def timer_expired(self, expired: Expired) -> None:
        """End the process that let its timer run out, and the worker that it belongs to.

        A process that belongs to no worker here is never signalled.
        """
        # The name is a worker's text: one line of it will do.
        scope = " ".join(expired.scope.split())[:_SHOWN]
        pid, text = expired.process.pid, f"timer {scope} expired"
        owner = self._owner(pid)
        worker = procfs.read(owner) if owner is not None else None
        if worker is None:
            logger.warning("%s: pid %d belongs to no worker here and is left alone", text, pid)
        elif expired.signum == 0:
            logger.warning("%s: pid %d asked for no signal", text, pid)
        else:
            logger.warning("%s: pid %d gets signal %d", text, pid, expired.signum)
            self._workers.condemn(worker.pid, text)
            procfs.send(expired.process, expired.signum)
            # A signal can be caught, and a worker can outlive its child.
            loop = asyncio.get_running_loop()
            loop.call_later(self._grace_s, procfs.send, worker, signal.SIGKILL)

    async def watch_kernel(
        self, limit_s: float, clock: Clock, on_stuck: Callable[[str], None]
    ) -> None:
        """Look now and then whether a worker sleeps in the kernel, where no signal reaches it.

        Tell once when one was seen there, and only there, for `limit_s` seconds, and end.
        """
        since: dict[int, float] = {}
        while True:
            found = [procfs.read(pid) for pid in self._live()]
            now = clock.monotonic()
            since = {one.pid: since.get(one.pid, now) for one in found if one and one.state == "D"}
            over = sorted(pid for pid, began in since.items() if now - began >= limit_s)
            if over:
                on_stuck(
                    f"worker pid {over[0]} did not leave the kernel (state D) for {limit_s:g} s"
                )
                return
            await asyncio.sleep(min(_LOOK_EVERY_S, limit_s / 4))

    def _live(self) -> set[int]:
        return {one.pid for one in self._workers.reports if one.state is WorkerState.RUNNING}

    def _owner(self, pid: int) -> int | None:
        """Return the pid of the live worker that this process is, or comes from."""
        live = self._live()
        process = procfs.read(pid)
        while process is not None:
            # A worker leads its session; an orphan is the zygote's child but keeps that session.
            for name in (process.pid, process.session):
                if name in live:
                    return name
            process = procfs.read(process.parent)
        return None
