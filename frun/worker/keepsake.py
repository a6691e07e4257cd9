"""What a rank's forward passes change and no replica has: its modules' buffers, kept for its successor.

Running statistics of a BatchNorm are a rank's own. They are written, each time a forward pass has changed
them, to a file in shared memory that outlives this process: once for each of the last two steps, so that a
step can be done again, here or in a newcomer of the same rank on this host. Owns that file. When, is
`session`'s.

Those that change in every step are written by one system call, which takes a fifth of the time that torch
needs to copy as many small tensors.
"""

import ctypes
import hashlib
import logging
import mmap
import os
import struct
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

logger = logging.getLogger(__name__)

LIMIT = 64 << 20
"""Bytes of buffers that are kept; of more, the smallest."""
_HEAD = struct.Struct("<q16s")
"""Step, and the mark of what follows."""
_NONE = -1
_ALIGN = 64
_PAGE = mmap.PAGESIZE
_MOST = os.sysconf("SC_IOV_MAX")
"""Pieces of memory that one system call writes."""


class Keepsake:
    """Buffers at the beginning of two steps, one even and one odd."""

    def __init__(self, path: str, modules: Iterable[torch.nn.Module], run: str) -> None:
        """Use the file at `path` for these modules' buffers; `run` names the training run.

        Raises OSError when there is no room for it.
        """
        chosen = _chosen(modules)
        # From large elements to small ones: without gaps each is where its type may be.
        self._busy = sorted(
            (each for each, silent in chosen if silent and each.is_contiguous()),
            key=lambda buffer: -buffer.element_size(),
        )
        busy = {id(buffer) for buffer in self._busy}
        others = [(each, silent) for each, silent in chosen if id(each) not in busy]
        self._others = [buffer for buffer, _ in others]
        self._silent = [silent for _, silent in others]
        self._buffers = [*self._busy, *self._others]
        self._offsets: list[int] = []
        end = _ALIGN
        for number, buffer in enumerate(self._buffers):
            if number >= len(self._busy):
                end = -(-end // _ALIGN) * _ALIGN
            self._offsets.append(end)
            end += buffer.nbytes
        self._size = -(-end // _PAGE) * _PAGE
        layout = [(tuple(buffer.shape), str(buffer.dtype)) for buffer in self._buffers]
        self._mark = hashlib.blake2b(f"{run} {layout}".encode(), digest_size=16).digest()
        self._fd, self._map = _mapped(path, 2 * self._size)
        weakref.finalize(self, os.close, self._fd)
        self._views = [self._slot(number) for number in range(2)]
        self._versions: list[list[int]] = [[_NONE] * len(self._others) for _ in range(2)]
        self._busy_size = sum(buffer.nbytes for buffer in self._busy)
        self._addresses: list[int] = []
        self._memory: list[Sequence[memoryview]] = []

    def __bool__(self) -> bool:
        """Whether there is anything to keep."""
        return bool(self._buffers)

    def begin(self, step: int) -> None:
        """Keep the buffers as they are now, at the beginning of this step, and forget all others."""
        self._head(step + 1, _NONE)
        self.write(step)

    def write(self, step: int) -> None:
        """Keep the buffers as those of the beginning of a step."""
        self._head(step, _NONE)
        if not self._write_busy(step % 2 * self._size + _ALIGN):
            return
        known = self._versions[step % 2]
        versions = [buffer._version for buffer in self._others]
        changed = [
            n for n, version in enumerate(versions) if version != known[n] or self._silent[n]
        ]
        if changed:
            views = self._views[step % 2][len(self._busy) :]
            with torch.no_grad():
                torch._foreach_copy_(
                    [views[n] for n in changed], [self._others[n] for n in changed]
                )
            self._versions[step % 2] = versions
        self._head(step, step)

    def read(self, step: int) -> bool:
        """Put the buffers back as they were at the beginning of a step; False if it isn't kept."""
        at = step % 2 * self._size
        if self._map[at : at + _HEAD.size] != _HEAD.pack(step, self._mark):
            return False
        views = self._views[step % 2]
        with torch.no_grad():
            torch._foreach_copy_(self._buffers, views)
        self._versions[step % 2] = [buffer._version for buffer in self._others]
        return True

    def _write_busy(self, at: int) -> bool:
        """Write those that change in every step; False if the disk is full."""
        addresses = [buffer.data_ptr() for buffer in self._busy]
        if addresses != self._addresses:
            self._addresses = addresses
            memory = [_bytes_of(buffer) for buffer in self._busy]
            self._memory = [memory[n : n + _MOST] for n in range(0, len(memory), _MOST)]
        for some in self._memory:
            size = sum(map(len, some)) if len(self._memory) > 1 else self._busy_size
            try:
                if os.pwritev(self._fd, some, at) != size:
                    return False
            except OSError:
                return False
            at += size
        return True

    def _head(self, step: int, says: int) -> None:
        at = step % 2 * self._size
        self._map[at : at + _HEAD.size] = _HEAD.pack(says, self._mark)

    def _slot(self, number: int) -> list[torch.Tensor]:
        return [
            torch.frombuffer(
                self._map,
                dtype=buffer.dtype,
                count=buffer.numel(),
                offset=number * self._size + offset,
            ).view(buffer.shape)
            for buffer, offset in zip(self._buffers, self._offsets, strict=True)
        ]


def _chosen(modules: Iterable[torch.nn.Module]) -> list[tuple[torch.Tensor, bool]]:
    """Return the buffers in main memory that are worth keeping, each once, and which change silently.

    torch counts the changes of a tensor, but not those that its batch normalization makes.
    """
    found: dict[int, tuple[torch.Tensor, bool]] = {}
    for module in modules:
        for part in module.modules():
            for name, buffer in part.named_buffers(recurse=False):
                silent = isinstance(part, _NormBase) or name.startswith("running_")
                if (
                    type(buffer) is torch.Tensor
                    and buffer.device.type == "cpu"
                    and buffer.numel()
                    and buffer.layout is torch.strided
                ):
                    found.setdefault(id(buffer), (buffer, silent))
    kept, total = [], 0
    for buffer, silent in sorted(found.values(), key=lambda each: each[0].nbytes):
        total += buffer.nbytes
        if total > LIMIT:
            logger.info("buffers of more than %d bytes are not kept for a repeated step", LIMIT)
            break
        kept.append((buffer, silent))
    return kept


def _bytes_of(buffer: torch.Tensor) -> memoryview:
    """Return a tensor's memory; whoever uses it holds the tensor and knows its address."""
    return memoryview((ctypes.c_char * buffer.nbytes).from_address(buffer.data_ptr()))


def _mapped(path: str, size: int) -> tuple[int, Any]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(fd).st_size != size:
            os.ftruncate(fd, 0)
            os.posix_fallocate(fd, 0, size)  # a write to a page that is not there ends the process
        return fd, mmap.mmap(fd, size)
    except BaseException:
        os.close(fd)
        raise
