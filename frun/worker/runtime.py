"""What a worker of frun is, across generations: its gate, its groups, its line to the agent.

Owns the side thread's work on a pause and the hand-over between it and the main thread. What the main
thread does in between is `resumable`'s and `session`'s.
"""

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import MutableMapping
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING

from frun.protocol import channel as messages
from frun.protocol.channel import (
    Beat,
    Explain,
    Fact,
    Inject,
    Order,
    Out,
    Pause,
    Progress,
    Ready,
    Resume,
    Stacks,
    Withdraw,
)
from frun.worker import stacks
from frun.worker.beats import Beats
from frun.worker.channel import Channel
from frun.worker.delays import Delays
from frun.worker.gate import Gate
from frun.worker.groups import Groups
from frun.worker.inject import Rendezvous
from frun.worker.paused import Paused
from frun.worker.whereabouts import Whereabouts, in_backward, in_collective, waited_for_cpu_s

if TYPE_CHECKING:
    from frun.worker.drills import Drills
    from frun.worker.groupstore import GroupStore

logger = logging.getLogger(__name__)

LOST_PEER_S = 60.0
"""How long the pause may take to come that others know of: a lost host takes a lease time to be missed."""
UPDATE_S = 20.0
"""How long a pause waits for an update that has begun; less than the agent waits for a survivor."""
_LOOK_S = 60.0
_AGAIN_S = 0.25
"""Groups are unblocked again and again until the main thread is out: new waits can begin."""

STUCK_S = 3.0
"""How long the main thread may stay in one collective after it was unblocked, which takes milliseconds."""
FORGOTTEN_S = 0.5
"""The same where nothing is left that could release it."""
_TEAM = 64
"""Characters of a part's name that are told."""
_BUSY_S, _BUSY = 0.1, 0.2
"""A process that uses less CPU time than this, and this share of the time that passes, does nothing."""

started: "list[Runtime]" = []
"""The runtime of this process, if frun started it. A process has one, as it has one environment."""


class Runtime:
    """One per worker process. The side thread obeys orders, the main thread waits here for what follows."""

    def __init__(
        self, channel: Channel, rendezvous: Rendezvous, env: MutableMapping[str, str], folder: str
    ) -> None:
        """Take what the agent gave; nothing is changed in the process before `begin`.

        `folder` is this host's own for the run; what is in it outlives a worker, not the agent.
        """
        self.folder = folder
        self.gate = Gate()
        self.groups = Groups()
        self.generation = rendezvous.generation
        self.resumed_at = time.monotonic()
        """When this worker entered its generation."""
        self.calls: list[str] = []
        """Names of the resumable functions that were called."""
        self.compare_every = 0
        """Steps between two comparisons of what replicas hold; 0: there are none."""
        self.check_gradients = ""
        """`report` or `stop`: the norm of the gradients is looked at before each update."""
        self.team = ""
        """Part of the state that the script says this rank holds: only ranks of the same do the same work."""
        self._channel = channel
        self._rendezvous = rendezvous
        self._env = env
        self._pid = os.getpid()
        self._main = threading.main_thread().ident or 0
        self._news = threading.Condition()
        self._ended_by = 0
        self._resume: Resume | None = None
        self._told = 0
        """The pause that the agent was last told this worker is out for."""
        self._is_out = False
        self._unblocking = threading.Lock()
        """Held while groups are ended or let go: one that is let go must not be ended afterwards."""
        self._begun = False
        self._listens = False
        self.drills: Drills | None = None
        """Faults on purpose; None where the job does not allow them."""
        self.whereabouts = Whereabouts(self.gate, self._main, self._sequence)
        """Where the main thread is."""
        self._delays = Delays()
        self._beats = Beats(channel.offer, self._beat)

    @property
    def is_here(self) -> bool:
        """False in a child that the script forked, which is no worker."""
        return os.getpid() == self._pid

    @property
    def is_paused(self) -> bool:
        """Whether a generation was announced that this worker has not entered."""
        return self._ended_by > self.generation

    def begin(self) -> None:
        """Tell the agent that the script is resumable, and obey it from now on."""
        if self._begun:
            return
        self._begun = True
        self.groups.install()
        self._listen()
        self._channel.send(Ready())
        gc.callbacks.append(self.whereabouts.collects)
        self._beats.begin()

    def end(self) -> None:
        """Beat no more: what the script does now is no training."""
        if self._begun:
            gc.callbacks.remove(self.whereabouts.collects)
            self._beats.end()

    def _beat(self) -> Beat:
        gate, used = self.gate, time.process_time()
        now, waited_s = time.monotonic(), waited_for_cpu_s()
        look = self.whereabouts.look(self.generation, now, used, waited_s)
        return Beat(
            generation=self.generation,
            step=gate.step,
            completed=gate.completed,
            fresh=gate.fresh,
            recent_s=gate.recent_s,
            own_s=gate.own_s,
            team=self.team[:_TEAM],
            delay_s=self._delays.look(gate.completed, waited_s),
            place=look.place.value,
            where=look.where,
            still_s=look.still_s,
            cpu_s=used,
            last=self._beats.over,
        )

    def _sequence(self) -> int:
        """Count the collectives; a group that is being let go is not touched."""
        if not self._unblocking.acquire(blocking=False):
            return -1
        try:
            return self.groups.sequence()
        finally:
            self._unblocking.release()

    def allow_drills(self) -> None:
        """Obey orders to break this process, from its first line on."""
        from frun.worker.drills import Drills

        self.drills = Drills(
            self.tell,
            step=lambda: self.gate.step,
            generation=lambda: self.generation,
            is_resumable=lambda: self._begun,
        )
        self._rendezvous.meeting = self.drills.rebuilding
        self._listen()

    def _listen(self) -> None:
        if not self._listens:
            self._listens = True
            self._channel.listen(self._obey)

    def tell(self, fact: Fact) -> None:
        """Send a fact to the agent."""
        self._channel.send(fact)

    def store_of(self, scope: str) -> "GroupStore":
        """Return a store for the ranks of this generation, in which keys begin with `scope`."""
        from frun.worker.groupstore import GroupStore

        return GroupStore(
            self._rendezvous.path,
            self.generation,
            scope=scope,
            timeout=timedelta(seconds=_LOOK_S),
            connections=self._rendezvous.connections,
        )

    def meet_at_end(self) -> None:
        """Return when every rank's function has returned. Raises Paused if one of them died before.

        A process that has ended can be nobody's donor, so the last step counts as done when all have it.
        """
        from frun.worker.groupstore import GenerationEnded

        self.tell(Progress(generation=self.generation, step=self.gate.step))
        world = int(self._env["WORLD_SIZE"])
        store = self._rendezvous.store(int(self._env["RANK"]), world, timedelta(seconds=_LOOK_S))
        try:
            if store.add("returned", 1) == world:
                store.set("all", b"")
            while not self._all_returned(store):
                self.gate.check()
        except GenerationEnded as error:
            if self.wait_for_pause(_LOOK_S):
                raise Paused from error
            raise

    def _all_returned(self, store: "GroupStore") -> bool:
        from torch.distributed import DistStoreError

        try:
            store.wait(["all"])
        except DistStoreError:
            return False
        return True

    def wait_for_pause(self, timeout_s: float = LOST_PEER_S) -> bool:
        """Wait for the news that this generation is over; False if none comes."""
        with self._news:
            return self._news.wait_for(lambda: self.is_paused, timeout_s)

    def leave(self, *, some_stay: bool = False) -> None:
        """Let the groups go and say so. The script's function and its exception are gone already.

        `some_stay`: what the session keeps refers to some, until there are new ones.
        """
        with self._unblocking:
            torn_down = self.groups.teardown()
            with self._news:
                self._is_out = True
                generation = self._told = self._ended_by
                self._news.notify_all()
        if torn_down.kept:
            logger.log(
                logging.DEBUG if some_stay else logging.WARNING,
                "%d process groups of generation %d are still referred to by the script",
                torn_down.kept,
                self.generation,
            )
        else:
            # Those of the generation that ends stay for one more: a thread may be on its way out.
            self._rendezvous.forget_stores(self.generation)
        self._channel.send(Out(generation=generation, step=self.gate.step))

    def wait_for_resume(self) -> None:
        """Wait until the agent lets this worker go on, and enter that generation."""
        while True:
            with self._news:
                self._news.wait_for(self._has_news, _LOOK_S)
                again, self._told = self._ended_by > self._told, self._ended_by
                order = self._resume
                entered = order is not None and order.generation >= self._ended_by
                if order is not None and entered:
                    self._enter(order)
            if again:
                # Also when the order to go on came right behind the pause: the agent waits for this.
                self._channel.send(Out(generation=self._told, step=self.gate.step))
            if entered:
                return

    def _has_news(self) -> bool:
        order = self._resume
        return self._ended_by > self._told or (
            order is not None and order.generation >= self._ended_by
        )

    def _enter(self, order: Resume) -> None:
        self._env.update(order.env)
        rendezvous = self._rendezvous
        rendezvous.generation = self.generation = order.generation
        rendezvous.master_addr = self._env.get("MASTER_ADDR", "")
        rendezvous.master_port = self._env.get("MASTER_PORT", "")
        self.resumed_at = time.monotonic()
        self._resume = None
        self._is_out = False
        self.gate.open()

    # -- side thread ---------------------------------------------------------------------------------------

    def _obey(self, order: Order) -> None:
        if isinstance(order, Explain):
            self._channel.send(Stacks(generation=self.generation, text=stacks.text()))
            return
        if isinstance(order, Inject | Withdraw):
            if self.drills is not None:
                self.drills.obey(order)
            return
        with self._news:
            if isinstance(order, Resume):
                self._resume = order
                self._news.notify_all()
                return
            if order.generation <= max(self.generation, self._ended_by):
                return
            self._ended_by = order.generation
            self.gate.close()
            self._news.notify_all()
        self._pause(order)

    def _pause(self, order: Pause) -> None:
        began = time.monotonic()
        self.gate.settle()
        idle = self.gate.wait_idle(UPDATE_S)
        self._unblock()
        self._channel.send(
            messages.Paused(
                generation=order.generation,
                step=self.gate.step,
                in_update=not idle,
                took_s=time.monotonic() - began,
            )
        )
        stillness = Stillness()
        while not self._wait_out(_AGAIN_S):
            self._unblock()
            frame = sys._current_frames().get(self._main)
            over, now, used = self.groups.is_over(), time.monotonic(), time.process_time()
            if stillness.is_for_ever(frame, now, used, over=over):
                self._give_up()

    def _give_up(self) -> None:
        """End this process: what its main thread waits for never comes.

        gloo can forget a thread whose large message was cut in the middle. Such a survivor is worth less
        than a newcomer, which copies the state from another rank.
        """
        os.write(2, b"frun: a collective does not end, replacing this rank\n")
        os.kill(self._pid, signal.SIGKILL)

    def _unblock(self) -> None:
        with self._unblocking:
            if not self._is_out:
                self.groups.unblock()

    def _wait_out(self, timeout_s: float) -> bool:
        with self._news:
            return self._news.wait_for(lambda: self._is_out, timeout_s)


class Stillness:
    """Tells how long a thread has been in one wait for other ranks, from looks at it now and then."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._used = 0.0
        self._over_since: float | None = None

    def is_for_ever(self, frame: FrameType | None, now: float, used: float, *, over: bool) -> bool:
        """Take what `seconds` takes, and whether nothing is left by which the thread could be released."""
        still_s = self.seconds(frame, now, used)
        if not (over and still_s > 0.0 and self._is_idle(now, used)):
            self._over_since = None
        elif self._over_since is None:
            self._over_since = now
        forgotten = self._over_since is not None and now - self._over_since >= FORGOTTEN_S
        return forgotten or still_s > STUCK_S

    def seconds(self, frame: FrameType | None, now: float, used: float) -> float:
        """Take the thread's innermost Python frame and the process's CPU seconds; return the time so far.

        In a communication function a thread waits, and nothing else. In a backward pass it computes, which
        may take long, or waits for the gradients of other ranks: then the process does nothing at all.
        """
        waits = in_collective(frame)
        if not waits and in_backward(frame) and self._since is not None:
            waits = self._is_idle(now, used)
        if waits and self._since is not None:
            return now - self._since
        self._since = now if in_collective(frame) or in_backward(frame) else None
        self._used = used
        return 0.0

    def _is_idle(self, now: float, used: float) -> bool:
        since = now if self._since is None else self._since
        return used - self._used < _BUSY_S + _BUSY * (now - since)
