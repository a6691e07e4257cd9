"""Brings the state of donors to receivers over a process group, or out of their memory on one host.

Owns the conversation of one transfer, its bounded buffer and the comparison of fingerprints. Who copies from
whom is `frun.protocol.restore`'s, what a state is made of is `state`'s.

All ranks of the group call `transfer` with the same plan:

    donor -> receiver   layout, and where in its memory the tensors are
    all                 does everybody's state fit? else the same error everywhere
    receiver -> donor   whether it reads the donor's memory itself
    donor -> receiver   tensors, small ones packed together, then the fingerprint of every piece
    all                 did everything arrive? else the same error everywhere

A donor only sends and a receiver only receives while tensors travel, in one order that follows from the
layout, so no number of them can wait for each other in a circle.
"""

import logging
import pickle
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TypeVar

import torch
import torch.distributed as dist

from frun.errors import FrunError, StateCorrupt, StateMismatch
from frun.protocol.restore import Plan
from frun.worker import pull
from frun.worker.fingerprint import combined, fingerprint, flat_bytes, in_memory
from frun.worker.messages import WINDOW, Message, Staging, Wire, finish, messages, pack, unpack
from frun.worker.placing import destinations, poison, put
from frun.worker.state import Layout, State, Stateful, difference, take, write

logger = logging.getLogger(__name__)

_WORD = (1 << 64) - 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """What one rank's part in a transfer was."""

    bytes: int = 0
    """Received, or given to each receiver."""
    seconds: float = 0.0
    digest: str = ""
    """Of all bytes; the same for a donor and its receivers, empty for others."""
    way: str = ""
    """`memory`: read from the donor's memory; `group`: through the process group; both with a `+`."""


def transfer(
    plan: Plan,
    rank: int,
    objects: Mapping[str, Stateful],
    group: dist.ProcessGroup | None = None,
    *,
    fault: Exception | None = None,
    read_memory: bool = True,
) -> CopyReport:
    """Copy states as planned; every rank of the group calls it, with global ranks in the plan.

    `fault` is what this rank met before: it is raised everywhere instead of copying. Afterwards, or after any
    error, a donor's objects are as they were; a receiver's are whole after a return and worthless after an
    error. Raises StateMismatch or StateCorrupt on all ranks alike (a rank's own other exception: on that
    rank itself, and StateMismatch on the others), and what the group raises when a peer is gone.
    """
    began = time.perf_counter()
    wire = Wire.of(group)
    donor, receivers = plan.donor_of(rank), plan.receivers_of(rank)
    with ExitStack() as stack, torch.no_grad():
        part: Donor | Receiver | None = None
        if receivers:
            offer = stack.enter_context(pull.offered()) if read_memory else None
            part = Donor(wire=wire, rank=rank, receivers=receivers, offer=offer)
        elif donor is not None:
            part = Receiver(wire=wire, rank=rank, donor=donor)
        if part is not None:
            fault = part.meet(objects, fault)
        agree(fault, wire, group)
        if not plan.copies:
            return CopyReport(seconds=time.perf_counter() - began)
        fault = part.move(objects) if part is not None else None
        agree(fault, wire, group)
    if part is None:
        return CopyReport(seconds=time.perf_counter() - began)
    report = part.report(time.perf_counter() - began)
    logger.debug("rank %s: %s", rank, report)
    return report


# -- both sides --------------------------------------------------------------------------------------------


def agree(fault: Exception | None, wire: Wire, group: dist.ProcessGroup | None) -> None:
    """Raise on all ranks if one of them has a fault."""
    flag = torch.tensor([int(fault is not None)], dtype=torch.int64, device=wire.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    if not int(flag.item()):
        return
    own = None if fault is None else (isinstance(fault, StateCorrupt), _text(fault))
    said: list[tuple[bool, str] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, own, group=group)
    if fault is not None and not isinstance(fault, FrunError):
        raise fault
    ranks = range(len(said)) if group is None else dist.get_process_group_ranks(group)
    corrupt, text = next(item for item in said if item is not None)
    if not text.startswith("restore: "):
        text = f"restore: rank {ranks[said.index((corrupt, text))]}: {text}"
    raise (StateCorrupt if corrupt else StateMismatch)(text) from fault


def _text(error: Exception) -> str:
    if isinstance(error, FrunError):
        return str(error)
    return " ".join(f"{type(error).__name__}: {error}".split())


def _tried(call: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Call the script's code; its exception must reach the other ranks before it is raised here."""
    try:
        return call(), None
    except Exception as error:  # noqa: BLE001 - raised again by agree, on this rank as it is
        return None, error


def _primaries(layout: Layout, addresses: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the tensors to copy: those that must be sent, and those that can be read in memory."""
    own = [number for number, first in enumerate(layout.same) if first == number]
    return [n for n in own if not addresses[n]], [n for n in own if addresses[n]]


def _unpacked(message: Message, buffer: torch.Tensor) -> list[int]:
    """Write a message's pieces to their tensors and return their fingerprints."""
    marks = []
    for piece, place in message.views(buffer):
        unpack(piece, place)
        marks.append(fingerprint(piece if in_memory(piece) else place))
    return marks


def _in_lanes(
    work: Callable[[Sequence[Message]], list[list[int]]], found: Sequence[Message]
) -> list[int]:
    """Return the fingerprints of messages, which two threads take in turn: one alone does not fill memory's
    bandwidth, and everything that takes long leaves the interpreter's lock."""
    if len(found) < 4:
        return [mark for marks in work(found) for mark in marks]
    with ThreadPoolExecutor(2, thread_name_prefix="frun-copy") as pool:
        one, two = pool.map(work, (found[::2], found[1::2]))
    nothing: list[int] = []
    in_turn = zip_longest(one, two, fillvalue=nothing)
    return [mark for pair in in_turn for marks in pair for mark in marks]


# -- donor -------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Donor:
    """Gives its state to one or more receivers; writes nothing to it."""

    wire: Wire
    rank: int
    receivers: tuple[int, ...]
    offer: pull.Offer | None
    layout: Layout = field(init=False)
    tensors: tuple[torch.Tensor, ...] = ()
    addresses: list[int] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    bytes: int = 0
    digest: str = ""
    way: str = ""

    def meet(self, objects: Mapping[str, Stateful], fault: Exception | None) -> Exception | None:
        """Tell the receivers what will come; nothing if there is a fault."""
        state = None
        if fault is None:
            state, fault = _tried(lambda: take(objects))
        header = b""
        if state is not None:
            self.layout, self.tensors = state.layout, state.tensors
            self.addresses = [
                tensor.data_ptr() if self.offer and in_memory(tensor) and tensor.numel() else 0
                for tensor in self.tensors
            ]
            header = pickle.dumps((self.layout, self.offer, self.addresses))
        for receiver in self.receivers:
            self.wire.send_bytes(header, receiver)
        return fault

    def move(self, objects: Mapping[str, Stateful]) -> Exception | None:
        """Send what the receivers do not read themselves, and the fingerprints."""
        del objects
        readers = {receiver for receiver in self.receivers if self._reads(receiver)}
        askers = tuple(receiver for receiver in self.receivers if receiver not in readers)
        sent, readable = _primaries(self.layout, self.addresses)
        self.give(sent, self.receivers)
        if askers:
            self.give(readable, askers)
        else:
            self.show(readable)
        self.way = _way(sent=bool(sent or askers), read=bool(readable and readers))
        marks = torch.tensor(self.marks, dtype=torch.int64)
        self.digest = combined(marks)
        marks = marks.to(self.wire.device)
        if self.marks:
            finish([self.wire.send(marks, receiver) for receiver in self.receivers])
        return None

    def _reads(self, receiver: int) -> bool:
        answer = torch.zeros(1, dtype=torch.int64, device=self.wire.device)
        finish([self.wire.receive(answer, receiver)])
        return bool(answer.item())

    def give(self, slots: Sequence[int], receivers: Sequence[int]) -> None:
        """Send tensors to these receivers; make the fingerprints while bytes travel."""
        staging = Staging(self.wire.device)
        under_way: deque[list[dist.Work | None]] = deque()
        for message in messages(slots, self.tensors):
            if len(under_way) == WINDOW:
                finish(under_way.popleft())
            self.bytes += message.payload
            if len(message.parts) == 1 and self.wire.carries(message.parts[0]):
                buffer = flat_bytes(message.parts[0])
            else:
                buffer = staging.place(message.size)
                for piece, place in message.views(buffer):
                    pack(piece, place)
            under_way.append([self.wire.send(buffer, receiver) for receiver in receivers])
            for piece, place in message.views(buffer):
                self.marks.append(fingerprint(piece if in_memory(piece) else place))
        for works in under_way:
            finish(works)

    def show(self, slots: Sequence[int]) -> None:
        """Make the fingerprints of tensors that everybody reads in this process's memory."""
        found = list(messages(slots, self.tensors))
        self.bytes += sum(message.payload for message in found)
        self.marks += _in_lanes(
            lambda lane: [[fingerprint(piece) for piece in message.parts] for message in lane],
            found,
        )

    def report(self, seconds: float) -> CopyReport:
        """Return what was given."""
        return CopyReport(bytes=self.bytes, seconds=seconds, digest=self.digest, way=self.way)


def _way(*, sent: bool, read: bool) -> str:
    return "+".join(word for word, used in (("group", sent), ("memory", read)) if used)


# -- receiver ----------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Receiver:
    """Takes the state of one donor into its own objects."""

    wire: Wire
    rank: int
    donor: int
    layout: Layout = field(init=False)
    offer: pull.Offer | None = None
    tensors: tuple[torch.Tensor, ...] = ()
    addresses: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    """The tensor of each fingerprint."""
    marks: list[int] = field(default_factory=list)
    bytes: int = 0
    digest: str = ""
    way: str = ""

    def meet(self, objects: Mapping[str, Stateful], fault: Exception | None) -> Exception | None:
        """Compare the donor's layout with what is here, and make nonsense of what is here."""
        header = self.wire.receive_bytes(self.donor)
        if fault is not None or not header:
            return fault
        state, fault = _tried(lambda: take(objects))
        if state is None:
            return fault
        self.layout, self.offer, self.addresses = pickle.loads(header)
        found = difference(self.layout, state.layout)
        if found is not None:
            return StateMismatch(
                f"restore: {found.where} is {found.here} on rank {self.rank} and {found.donor} on its "
                f"donor, rank {self.donor}: build the same objects on every rank"
            )
        return self._make_room(state)

    def _make_room(self, state: State) -> Exception | None:
        poison(state.tensors)
        tensors, fault = _tried(lambda: destinations(self.layout, state))
        if tensors is not None:
            poison(tensors)
            self.tensors = tensors
        return fault

    def move(self, objects: Mapping[str, Stateful]) -> Exception | None:
        """Receive or read everything, compare fingerprints, and load what was not filled in place."""
        reads = self.offer is not None and pull.possible(self.offer)
        answer = torch.tensor([int(reads)], dtype=torch.int64, device=self.wire.device)
        finish([self.wire.send(answer, self.donor)])
        sent, readable = _primaries(self.layout, self.addresses)
        self._take(sent)
        if reads and self.offer is not None:
            self._read(readable, self.offer)
        else:
            self._take(readable)
        self.way = _way(sent=bool(sent) or not reads, read=bool(readable) and reads)
        fault = self._compare()
        if fault is None:
            self._fill_ties()
            _, fault = _tried(lambda: put(objects, self.layout, self.tensors))
        return fault

    def _take(self, slots: Sequence[int]) -> None:
        """Receive tensors; while one message travels the one before it is worked on."""
        staging = Staging(self.wire.device)
        under_way: deque[tuple[Message, torch.Tensor, dist.Work | None]] = deque()
        for message in messages(slots, self.tensors):
            if len(under_way) == WINDOW:
                self._finish(*under_way.popleft())
            if len(message.parts) == 1 and self.wire.carries(message.parts[0]):
                buffer = flat_bytes(message.parts[0])
            else:
                buffer = staging.place(message.size)
            under_way.append((message, buffer, self.wire.receive(buffer, self.donor)))
        for item in under_way:
            self._finish(*item)

    def _finish(self, message: Message, buffer: torch.Tensor, work: dist.Work | None) -> None:
        finish([work])
        if len(message.parts) == 1 and self.wire.carries(message.parts[0]):
            self.marks.append(fingerprint(buffer))
        else:
            self.marks += _unpacked(message, buffer)
        self._count(message)

    def _read(self, slots: Sequence[int], offer: pull.Offer) -> None:
        """Read tensors out of the donor's memory."""
        found = list(messages(slots, self.tensors))
        self.marks += _in_lanes(lambda lane: self._read_lane(lane, offer), found)
        for message in found:
            self._count(message)

    def _read_lane(self, found: Sequence[Message], offer: pull.Offer) -> list[list[int]]:
        """Read messages one after the other; a piece is still in the cache when its mark is made."""
        staging = Staging(torch.device("cpu"))
        marks = []
        for message in found:
            places = zip(message.slots, message.starts, strict=True)
            there = [self.addresses[slot] + start for slot, start in places]
            sizes = [piece.nbytes for piece in message.parts]
            if all(in_memory(piece) for piece in message.parts):
                here = [piece.data_ptr() for piece in message.parts]
                pull.read(offer.pid, list(zip(here, there, sizes, strict=True)))
                marks.append([fingerprint(piece) for piece in message.parts])
            else:
                buffer = staging.place(message.size)
                here = [buffer.data_ptr() + offset for offset in message.offsets]
                pull.read(offer.pid, list(zip(here, there, sizes, strict=True)))
                marks.append(_unpacked(message, buffer))
        return marks

    def _count(self, message: Message) -> None:
        self.slots += message.slots
        self.bytes += message.payload

    def _compare(self) -> Exception | None:
        """Compare the donor's fingerprints with those of what is here."""
        mine = torch.tensor(self.marks, dtype=torch.int64)
        self.digest = combined(mine)
        if not self.marks:
            return None
        theirs = torch.zeros(len(self.marks), dtype=torch.int64, device=self.wire.device)
        finish([self.wire.receive(theirs, self.donor)])
        for slot, there, here in zip(self.slots, theirs.tolist(), self.marks, strict=True):
            if there != here:
                name, place = self.layout.places[slot]
                return StateCorrupt(
                    f"restore: {name} {place.path} on rank {self.rank} is not what rank {self.donor} "
                    f"has: fingerprints {here & _WORD:016x} and {there & _WORD:016x}"
                )
        return None

    def _fill_ties(self) -> None:
        """Give tensors that are one memory at the donor their values where they are several here."""
        for number, first in enumerate(self.layout.same):
            if first != number and self.tensors[number] is not self.tensors[first]:
                write(self.tensors[number], self.tensors[first])

    def report(self, seconds: float) -> CopyReport:
        """Return what was received."""
        return CopyReport(bytes=self.bytes, seconds=seconds, digest=self.digest, way=self.way)
