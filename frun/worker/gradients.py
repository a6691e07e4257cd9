"""Looks at the norm of the gradients before each update, where the job asked for that.

Owns the norm. What is odd, and that it is told, is `numbers`' to say.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from frun.worker.gate import Gate
from frun.worker.numbers import Numbers
from frun.worker.runtime import Runtime
from frun.worker.shards import local

STOP = "stop"
"""The choice by which an odd norm ends the step before its update."""


class Gradients:
    """The gradients of the registered optimizers of one worker."""

    def __init__(self, runtime: Runtime | None, numbers: Numbers, gate: Gate) -> None:
        """`runtime` says whether to look; without one nobody does."""
        self._runtime = runtime
        self._numbers = numbers
        self._gate = gate
        self._names: dict[int, str] = {}

    def begin(self, objects: Mapping[str, object]) -> None:
        """Know the optimizers among these objects by their names."""
        named = {id(o): name for name, o in objects.items() if isinstance(o, torch.optim.Optimizer)}
        several = len(named) > 1
        self._names = {
            each: f"gradient norm of {name}" if several else "gradient norm"
            for each, name in named.items()
        }

    def look(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Look at what these are about to apply. Raises OddNumber if the job is to stop at what is odd."""
        how = self._runtime.check_gradients if self._runtime is not None else ""
        if not how:
            return
        for optimizer in optimizers:
            # A scaler's factor is still in them, and it looks for what is infinite itself.
            if getattr(optimizer, "grad_scale", None) is not None:
                continue
            found = norm(optimizer)
            if found is not None:
                name = self._names.get(id(optimizer), "gradient norm")
                self._numbers.take({name: found}, self._gate.step, stop=how == STOP)


def norm(optimizer: torch.optim.Optimizer) -> float | None:
    """Return the norm of all gradients that are here, as one vector; None where there are none.

    Of tensors that are sharded it is that of this rank's part.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                gradient = _values(parameter.grad)
                alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    if not alike:
        return None
    return math.hypot(*(_norm(each, dtype) for (_, dtype), each in alike.items()))


def _values(gradient: torch.Tensor) -> torch.Tensor:
    gradient = local(gradient).detach()
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _norm(gradients: list[torch.Tensor], dtype: torch.dtype) -> float:
    # In half precision the norm of many small numbers would be infinite.
    wide: Any = torch.float32 if dtype.itemsize < 4 else None
    norms = torch._foreach_norm(gradients, 2, dtype=wide)
    return float(torch.linalg.vector_norm(torch.stack(norms)))
