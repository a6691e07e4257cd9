"""Reads another process's memory on the same host: one copy, no buffer, no help from its owner.

Owns finding out whether that is possible, and the reading. What is read, and whether it arrived, is `copy`'s.
"""

import contextlib
import ctypes
import errno
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from frun.worker.bootstrap import prctl

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = (1 << 64) - 1
_MOST = 1024
"""Stretches in one system call: the kernel's IOV_MAX."""


class _Stretch(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What another process needs to know to read this one's memory, and to be sure that it is this one."""

    boot: str
    """Boot of the kernel and process namespace: who has others need not try."""
    pid: int
    address: int
    secret: bytes
    """What stands at `address`."""


@contextlib.contextmanager
def offered() -> Iterator[Offer]:
    """Let processes of this user read this process's memory inside the block."""
    secret = secrets.token_bytes(16)
    held = ctypes.create_string_buffer(secret, len(secret))
    with contextlib.suppress(OSError):  # EINVAL: no Yama here, nothing to permit
        prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY)
    try:
        yield Offer(boot=_boot(), pid=os.getpid(), address=ctypes.addressof(held), secret=secret)
    finally:
        with contextlib.suppress(OSError):
            prctl(_PR_SET_PTRACER, 0)


def possible(offer: Offer) -> bool:
    """Return whether the memory of who made the offer can be read from here; tries it."""
    if offer.boot != _boot():
        return False
    held = ctypes.create_string_buffer(len(offer.secret))
    try:
        read(offer.pid, [(ctypes.addressof(held), offer.address, len(offer.secret))])
    except OSError:
        return False
    return held.raw == offer.secret


def read(pid: int, stretches: Sequence[tuple[int, int, int]]) -> None:
    """Read (address here, address there, bytes) from a process. Raises OSError.

    ConnectionResetError: the process is gone.
    """
    for begin in range(0, len(stretches), _MOST):
        _read(pid, stretches[begin : begin + _MOST])


def _read(pid: int, stretches: Sequence[tuple[int, int, int]]) -> None:
    readv = _readv()
    left = list(stretches)
    while left:
        count = len(left)
        here = (_Stretch * count)(*[_Stretch(mine, size) for mine, _, size in left])
        there = (_Stretch * count)(*[_Stretch(theirs, size) for _, theirs, size in left])
        done = readv(
            pid, here, ctypes.c_ulong(count), there, ctypes.c_ulong(count), ctypes.c_ulong(0)
        )
        if done < 0:
            number = ctypes.get_errno()
            if number == errno.EINTR:
                continue
            if number in (errno.ESRCH, errno.EFAULT):  # gone, or it went on and freed the memory
                raise ConnectionResetError(
                    number, f"connection closed by peer: process {pid} is gone"
                )
            raise OSError(number, f"memory of process {pid}: {os.strerror(number)}")
        if done == 0:
            raise ConnectionResetError(
                f"connection closed by peer: process {pid} gives no more bytes"
            )
        left = list(_rest(left, done))


@cache
def _readv() -> Callable[..., int]:
    libc = ctypes.CDLL(None, use_errno=True)
    call = libc.process_vm_readv
    call.restype = ctypes.c_ssize_t
    return call


def _rest(stretches: Sequence[tuple[int, int, int]], done: int) -> Iterator[tuple[int, int, int]]:
    """Yield what is left after so many bytes: a call may read less than it was asked for."""
    for mine, theirs, size in stretches:
        skip = min(done, size)
        done -= skip
        if skip < size:
            yield mine + skip, theirs + skip, size - skip


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(8)  # nothing known: equal to nobody's
