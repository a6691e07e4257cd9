"""Tensors as messages of bounded size between two ranks, through one bounded buffer.

Owns how tensors are cut, packed and put on a process group. What they mean is `copy`'s.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from frun.worker.fingerprint import in_memory
from frun.worker.state import pieces, write

CHUNK = 8 << 20
"""Bytes of one message at most."""
WINDOW = 4
"""Messages under way at once, and so what the buffer has room for."""
ALONE = 1 << 20
"""Bytes from which a piece is a message of its own, sent from and received into its place."""
_ALIGN = 16
_FIRST = 32 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """Point-to-point messages of a group, made of memory on the one device that it can send from."""

    group: dist.ProcessGroup | None
    device: torch.device

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> "Wire":
        """Choose main memory where the group can send it, else the group's own kind of device."""
        kinds = {device.type for device in (group or dist.group.WORLD)._device_types}  # type: ignore[union-attr]
        if "cpu" in kinds or not kinds:
            return cls(group=group, device=torch.device("cpu"))
        kind = sorted(kinds)[0]
        index = torch.get_device_module(kind).current_device()
        return cls(group=group, device=torch.device(kind, index))

    def carries(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor can be sent from, or received into, where it is."""
        return (
            tensor.device == self.device
            and tensor.is_contiguous()
            and not tensor.is_conj()
            and not tensor.is_neg()
        )

    def send(self, tensor: torch.Tensor, rank: int) -> dist.Work | None:
        """Begin to send."""
        return dist.isend(tensor, rank, group=self.group)

    def receive(self, tensor: torch.Tensor, rank: int) -> dist.Work | None:
        """Begin to receive."""
        return dist.irecv(tensor, rank, group=self.group)

    def send_bytes(self, data: bytes, rank: int) -> None:
        """Send a text whose length the other side does not know; a short one is a single message."""
        first = bytearray(_FIRST)
        first[:8] = len(data).to_bytes(8, "little")
        first[8 : 8 + len(data)] = data[: _FIRST - 8]
        parts = [first[:_FIRST], bytearray(data[_FIRST - 8 :])]
        for part in parts:
            if part:
                whole = torch.frombuffer(part, dtype=torch.uint8).to(self.device)
                finish([self.send(whole, rank)])

    def receive_bytes(self, rank: int) -> bytes:
        """Receive a text."""
        first = self._received(_FIRST, rank)
        size = int.from_bytes(first[:8], "little")
        if size <= _FIRST - 8:
            return first[8 : 8 + size]
        return first[8:] + self._received(size - _FIRST + 8, rank)

    def _received(self, size: int, rank: int) -> bytes:
        whole = torch.empty(size, dtype=torch.uint8, device=self.device)
        finish([self.receive(whole, rank)])
        whole = whole.cpu()
        return ctypes.string_at(whole.data_ptr(), size)


def finish(works: Sequence[dist.Work | None]) -> None:
    """Wait until these messages have arrived or left; None is one that needs no waiting."""
    for work in works:
        if work is not None:
            work.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What travels at once: one large piece or several small ones."""

    slots: tuple[int, ...]
    """Which tensor each piece is of."""
    starts: tuple[int, ...]
    """Bytes of that tensor before the piece."""
    parts: tuple[torch.Tensor, ...]
    offsets: tuple[int, ...]
    size: int
    """Bytes, gaps included."""

    @classmethod
    def packed(cls, found: Sequence[tuple[int, int, torch.Tensor]]) -> "Message":
        """Lay pieces one behind the other."""
        offsets, end = [], 0
        for _, _, piece in found:
            offsets.append(end)
            end += -(-piece.nbytes // _ALIGN) * _ALIGN
        if len(found) == 1:
            end = found[0][2].nbytes
        return cls(
            slots=tuple(slot for slot, _, _ in found),
            starts=tuple(start for _, start, _ in found),
            parts=tuple(piece for _, _, piece in found),
            offsets=tuple(offsets),
            size=end,
        )

    @property
    def payload(self) -> int:
        """Bytes without gaps."""
        return sum(piece.nbytes for piece in self.parts)

    def views(self, buffer: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each piece with its place in a buffer."""
        for piece, offset in zip(self.parts, self.offsets, strict=True):
            yield piece, buffer[offset : offset + piece.nbytes]


def messages(slots: Sequence[int], tensors: Sequence[torch.Tensor]) -> Iterator[Message]:
    """Cut tensors into messages; follows from shapes and dtypes alone, so both sides do it alike."""
    small: list[tuple[int, int, torch.Tensor]] = []
    large: list[tuple[int, int, torch.Tensor]] = []
    total = 0
    for slot in slots:
        start = 0
        for piece in pieces(tensors[slot], CHUNK):
            found = (slot, start, piece)
            start += piece.nbytes
            if piece.nbytes >= ALONE:
                large.append(found)
                continue
            if total + piece.nbytes + _ALIGN > CHUNK:
                yield Message.packed(small)
                small, total = [], 0
            small.append(found)
            total += -(-piece.nbytes // _ALIGN) * _ALIGN
    if small:
        yield Message.packed(small)
    for item in large:
        yield Message.packed([item])


class Staging:
    """The bounded buffer: room for the messages under way, taken in turn; memory comes with the first use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._whole: torch.Tensor | None = None
        self._turn = 0

    def place(self, size: int) -> torch.Tensor:
        """Return room for a message, once the one of WINDOW messages ago is done with."""
        if self._whole is None:
            self._whole = torch.empty(WINDOW * CHUNK, dtype=torch.uint8, device=self._device)
        begin = self._turn % WINDOW * CHUNK
        self._turn += 1
        return self._whole[begin : begin + size]


def pack(piece: torch.Tensor, place: torch.Tensor) -> None:
    """Write a piece's bytes to a place in a buffer."""
    if in_memory(piece) and place.device.type == "cpu":
        ctypes.memmove(place.data_ptr(), piece.data_ptr(), piece.nbytes)
    else:
        place.view(piece.dtype).view(piece.shape).copy_(piece)


def unpack(piece: torch.Tensor, place: torch.Tensor) -> None:
    """Write bytes from a place in a buffer to a piece."""
    if in_memory(piece) and place.device.type == "cpu":
        ctypes.memmove(piece.data_ptr(), place.data_ptr(), piece.nbytes)
    else:
        write(piece, place.view(piece.dtype).view(piece.shape))
