"""Imports what a training worker needs, lazily imported parts too, without touching a device.

A process that has opened a device can't be forked: what such a device left open is looked for at the end.
"""

import contextlib
import importlib
import os
import re
from collections.abc import Iterator, Sequence

_DEVICES = re.compile(r"/dev/(nvidia-uvm|kfd|davinci|hisi_hdc)")
_TORCH = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch.distributed.elastic.multiprocessing.errors",
    "frun.worker.groupstore",
    "frun.worker.resumable",
)


def warm(*, torch: bool, preload: Sequence[str]) -> list[str]:
    """Import torch if asked, and the modules in `preload`; return what went wrong, a line each."""
    problems = []
    with _quiet_device_check():
        for name in (*(_TORCH if torch else ()), *preload):
            problem = _import(name)
            if problem is not None:
                problems.append(problem)
                if name == "torch":
                    break
        if torch and not problems:
            _one_update()
    opened = _open_devices()
    if opened:
        problems.append(f"a preloaded module opened {opened}, which does not survive a fork")
    return problems


def _import(name: str) -> str | None:
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - somebody else's module: reported
        text = " ".join(str(error).split())[:500]
        return f"can't import {name}: {type(error).__name__}: {text}"
    return None


def _one_update() -> None:
    """Make one optimizer and one update: torch imports its compiler for the first one.

    No backward pass: on a build with devices it starts threads, which a fork loses.
    """
    import torch

    parameter = torch.nn.Parameter(torch.zeros(4))
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        optimizer = kind([parameter], lr=0.1)
        parameter.grad = torch.zeros(4)
        optimizer.step()
        optimizer.zero_grad()


@contextlib.contextmanager
def _quiet_device_check() -> Iterator[None]:
    """Let torch look for CUDA through NVML only: asking the runtime would initialise the device."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _open_devices() -> str:
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if _DEVICES.match(target):
                return target
    return ""
