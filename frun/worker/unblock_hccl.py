"""Releases threads that wait for HCCL on Ascend: stops the device, and restarts it before new groups.

Owns the order of torch_npu's recovery calls. Leaves to others which groups there are
(`frun.worker.groups`). Written from torch_npu's source and tested against recorded calls; it has
not run on a device.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any, Protocol

from frun.worker.unblock_nccl import backends_named

logger = logging.getLogger(__name__)


class HcclApi(Protocol):
    """The calls into torch_npu that this needs."""

    def backends(self, group: Any) -> list[Any]:
        """Return the HCCL backends of a group."""

    def current_device(self) -> int:
        """Return the device of the calling thread."""

    def stop_device(self, device: int) -> None:
        """Abort every task on a device; calls that wait for one raise in their threads."""

    def restart_device(self, device: int) -> None:
        """Let a stopped device work again; its memory keeps what it holds."""

    def abort(self, backend: Any, reason: str) -> None:
        """Free the communicators of a backend."""

    def settle(self) -> None:
        """Wait until what is queued on the current stream of this thread is done."""


class TorchNpu:
    """The real calls."""

    def backends(self, group: Any) -> list[Any]:
        """Return the HCCL backends of a group."""
        return backends_named(group, "ProcessGroupHCCL")

    def current_device(self) -> int:
        """Return the device of the calling thread."""
        return int(_npu().current_device())

    def stop_device(self, device: int) -> None:
        """Abort every task on a device; calls that wait for one raise in their threads."""
        npu = _npu()
        npu.set_device(device)  # a new thread begins on device 0
        npu.stop_device(device)

    def restart_device(self, device: int) -> None:
        """Let a stopped device work again; its memory keeps what it holds."""
        # rebuilding all resources would mark the survivor's own parameters as unsafe to read
        _npu().restart_device(device, rebuild_all_resources=False)

    def abort(self, backend: Any, reason: str) -> None:
        """Free the communicators of a backend."""
        backend.abort_hccl_comm(reason)

    def settle(self) -> None:
        """Wait until what is queued on the current stream of this thread is done."""
        _npu().current_stream().synchronize()


def _npu() -> Any:
    import torch

    return torch.npu  # type: ignore[attr-defined]  # there once torch_npu is imported


class HcclUnblocker:
    """Stops the device that the groups were made on.

    torch_npu looks through torch's table of groups when it stops and restarts a device, so both
    happen before the table is emptied.
    """

    backend = "hccl"

    def __init__(self, api: HcclApi | None = None) -> None:
        """Use torch_npu, or `api`."""
        self._api: HcclApi = api or TorchNpu()
        self._lock = threading.Lock()
        self._groups: list[Any] = []
        self._device: int | None = None
        self._stopped = False

    @contextlib.contextmanager
    def creating(self, size: int) -> Iterator[None]:
        """Do nothing: a group connects at its first collective."""
        del size
        yield

    def created(self, group: Any) -> None:
        """Know the group, and the device of this thread."""
        if not self._api.backends(group):
            return
        device = self._api.current_device()
        with self._lock:
            self._device = device
            self._groups.append(group)

    def unblock(self) -> int:
        """Stop the device once; return how many groups that ended."""
        with self._lock:
            device = self._device
            if device is None or self._stopped or not self._groups:
                return 0
            self._stopped = True
            count = len(self._groups)
        try:
            self._api.stop_device(device)
        except RuntimeError as error:  # the table of groups may change meanwhile: tasks are aborted
            logger.warning("stopping npu:%s was not clean: %s", device, error)
        return count

    def is_over(self) -> bool:
        """Return whether there are no groups; a device that was stopped may take its time."""
        with self._lock:
            return not self._groups

    def settle(self) -> None:
        """Wait until everything that was queued, collectives too, is done."""
        with self._lock:
            known = bool(self._groups)
        if known:
            self._api.settle()

    def shutdown(self, group: Any) -> None:
        """Restart the device if it was stopped, then free the group's communicators."""
        backends = self._api.backends(group)
        if not backends:
            return
        with self._lock:
            device, stopped, self._stopped = self._device, self._stopped, False
        if stopped and device is not None:
            self._api.restart_device(device)
        for backend in backends:
            try:
                self._api.abort(backend, "frun: a new generation begins")
            except RuntimeError as error:
                logger.warning("an HCCL communicator was not freed: %s", error)

    def forget(self, group: Any) -> None:
        """Know the group no more: the script destroyed it."""
        with self._lock:
            self._groups = [each for each in self._groups if each is not group]

    def teardown(self) -> int:
        """Know nothing any more."""
        with self._lock:
            self._groups.clear()
        return 0
