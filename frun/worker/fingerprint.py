"""Fingerprints of tensors' bytes, made at memory speed: what donor and receiver compare.

Owns how bytes become 64 bits. They find what goes wrong by accident (a lost, stale, swapped or flipped
part), not what somebody forges.
"""

import ctypes
import hashlib

import torch

_ROW = 256
"""Words of 8 bytes that are added up before they are hashed."""
_SMALL = 16 << 10
"""Bytes up to which a cryptographic hash alone is as fast as anything that goes through torch."""


def in_memory(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's bytes lie in this process's memory, in order and as they are meant."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's bytes as a flat view of it."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def fingerprint(tensor: torch.Tensor) -> int:
    """Return 64 bits, signed, that depend on every byte of a contiguous tensor and on its place.

    Words are added up in rows of 2 KiB, modulo 2**64, so any one changed word changes its row, and the sums
    are hashed in order with BLAKE2, with the bytes that are left over. Only what exchanges words within a row
    goes unseen. A tensor of at most 16 KiB is hashed as it is. Weights for the words would close that gap at
    half the speed: 20 GB/s a core instead of 35, zlib's crc32 6.6, SHA-256 2.
    """
    size = tensor.nbytes
    if in_memory(tensor):
        held = (ctypes.c_char * size).from_address(tensor.data_ptr())
        if size <= _SMALL:
            return _hash(held, b"")
        rows = size // (_ROW * 8)
        words = torch.frombuffer(held, dtype=torch.int64, count=rows * _ROW)
        sums = words.view(rows, _ROW).sum(dim=1)
        return _hash(_raw(sums), memoryview(held)[rows * _ROW * 8 :])
    return fingerprint_on_device(flat_bytes(tensor))


def fingerprint_on_device(flat: torch.Tensor) -> int:
    """Do the same with a device's own arithmetic: only the sums are brought here."""
    size = flat.numel()
    if size <= _SMALL:
        return _hash(_raw(flat.cpu()), b"")
    rows = size // (_ROW * 8)
    head = flat[: rows * _ROW * 8]
    if head.storage_offset() % 8 != 0:
        head = head.clone()
    sums = head.view(torch.int64).view(rows, _ROW).sum(dim=1)
    return _hash(_raw(sums.cpu()), _raw(flat[rows * _ROW * 8 :].cpu()))


def combined(fingerprints: torch.Tensor) -> str:
    """Return one short text for a list of fingerprints."""
    return hashlib.blake2b(_raw(fingerprints.contiguous()), digest_size=16).hexdigest()


def _raw(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""


def _hash(one: object, two: object) -> int:
    state = hashlib.blake2b(one, digest_size=8)  # type: ignore[arg-type]
    state.update(two)  # type: ignore[arg-type]
    return int.from_bytes(state.digest(), "little", signed=True)
