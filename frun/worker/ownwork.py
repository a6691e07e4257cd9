"""Notes when the last gradient of a step is made: where a rank's own work ends and it may wait for others.

Owns the hooks on the models' parameters. The gate keeps the times. On a device the script runs ahead of what
is computed, so there is nothing to note.
"""

import time
from collections.abc import Callable, Iterable

import torch

from frun.worker.gate import Gate


def attach(gate: Gate, objects: Iterable[object]) -> list[Callable[[], None]]:
    """Note the last gradient of each model among these objects; return what undoes it."""
    undo: list[Callable[[], None]] = []

    def made(_: torch.Tensor) -> None:
        gate.gradients_at = time.monotonic()

    for module in objects:
        if not isinstance(module, torch.nn.Module):
            continue
        # A backward pass ends with what the forward pass began with.
        first = next((each for each in module.parameters() if each.requires_grad), None)
        if first is not None and first.device.type == "cpu":
            undo.append(first.register_hook(made).remove)  # type: ignore[no-untyped-call]
    return undo
