"""Random numbers that a step draws again when it is done again.

Every step begins with generators that are seeded from the run's own seed and the step's number, so a random
state never has to be kept, or copied from a rank that died. Owns the generators of Python, NumPy, torch and
its devices. When a step begins is `session`'s.
"""

import hashlib
import random
import sys
from typing import Any

import torch

_WORD = (1 << 63) - 1
_NUMPY = (1 << 32) - 1


def drawn() -> int:
    """Return a number that follows from torch's present random state, without drawing from it.

    A script that seeds torch alike in two runs gets the same one in both.
    """
    return _number(torch.default_generator.get_state().numpy().tobytes())


def derived(*words: int | str) -> int:
    """Return a number that follows from these, and is unlike that of any others."""
    return _number("/".join(map(str, words)).encode())


def seed(number: int) -> None:
    """Seed every generator of this process that a script would draw from without naming one.

    A device is left alone until the script has begun to use it.
    """
    torch.default_generator.manual_seed(number)
    random.seed(number)
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(number & _NUMPY)
    for name in ("cuda", "npu", "xpu"):
        device: Any = sys.modules.get(f"torch.{name}") or getattr(torch, name, None)
        if device is not None and device.is_initialized():
            device.manual_seed_all(number)


def _number(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") & _WORD
