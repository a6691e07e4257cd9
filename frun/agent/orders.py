"""Owns the way of orders to workers: in their order, also to one that has not connected yet.

What is ordered is `workers`' business, and what becomes of one that takes no order.
"""

import asyncio
from collections.abc import Callable

from frun import procfs
from frun.agent.channel import Channel
from frun.agent.worker import Worker
from frun.protocol.channel import Pause, Resume
from frun.protocol.records import WorkerState

_DYING_S = 1.0
"""How long the news of a process's end may come behind the end of its connection."""


class Orders:
    """The orders of one agent. Use it on the agent's event loop only."""

    def __init__(self, channel: Channel, deaf: Callable[[Worker, str], None]) -> None:
        """`deaf` is called with a live worker that took no order, and what it could not be told."""
        self._channel = channel
        self._deaf = deaf

    def give(self, worker: Worker, order: Pause | Resume) -> None:
        """Send an order, or keep it until the worker has connected: it runs a little before that."""
        if not worker.connected:
            # A pause ends what was ordered before; what follows it comes behind.
            kept = () if isinstance(order, Pause) else worker.unsent
            worker.unsent = (*kept, order)
        elif not self._channel.send(worker.report.pid, order):
            what = "pause" if isinstance(order, Pause) else "go on"
            asyncio.get_running_loop().call_later(_DYING_S, self._not_taken, worker, what)

    def connected(self, worker: Worker) -> None:
        """Send what was kept: the worker has said hello."""
        worker.connected = True
        orders, worker.unsent = worker.unsent, ()
        for order in orders:
            self.give(worker, order)

    def _not_taken(self, worker: Worker, what: str) -> None:
        """Report the worker, unless it was dying for a reason of its own."""
        process = procfs.read(worker.report.pid)
        alive = worker.report.state is WorkerState.RUNNING
        if alive and process is not None and process.running:
            self._deaf(worker, f"could not be told to {what}")
