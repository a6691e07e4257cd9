"""Releases threads that wait for NCCL: aborts all communicators of this process at once.

Owns the order of aborts and what has to be true before an update may read what NCCL wrote. Leaves
to others which groups there are (`frun.worker.groups`). Written from torch's source (2.4 to 2.13)
and tested against recorded calls; it has not run on a device.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, MutableMapping
from typing import Any, Protocol

logger = logging.getLogger(__name__)

_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_ABORT_S = 10.0
"""Bound on all aborts together; torch's own bound is the time-out of the group."""
_TRAPS = (
    ((2, 25, 0), (2, 26, 1), "an abort can hang"),
    ((2, 28, 3), (2, 28, 8), "an abort can crash the process"),
)
"""First and last version of NCCL, and what is known of it."""


class NcclApi(Protocol):
    """The calls into torch that this needs."""

    def backends(self, group: Any) -> list[Any]:
        """Return the NCCL backends of a group, without debug wrappers."""

    def abort(self, backend: Any) -> None:
        """Abort all communicators of one backend, from any thread."""

    def settle(self) -> None:
        """Wait until what is queued on the current stream of this thread is done."""

    def synchronize(self) -> None:
        """Wait until the device does nothing any more."""

    def version(self) -> tuple[int, ...]:
        """Return the version of NCCL, or () when it is not known."""


class TorchNccl:
    """The real calls."""

    def backends(self, group: Any) -> list[Any]:
        """Return the NCCL backends of a group, without debug wrappers."""
        return backends_named(group, "ProcessGroupNCCL")

    def abort(self, backend: Any) -> None:
        """Abort all communicators of one backend, from any thread."""
        # 2.6 and later have `abort`; before, `shutdown` aborted
        for name in ("abort", "_abort", "_shutdown", "shutdown"):
            call = getattr(backend, name, None)
            if call is not None:
                call()
                return

    def settle(self) -> None:
        """Wait until what is queued on the current stream of this thread is done."""
        import torch

        torch.cuda.current_stream().synchronize()

    def synchronize(self) -> None:
        """Wait until the device does nothing any more."""
        import torch

        torch.cuda.synchronize()

    def version(self) -> tuple[int, ...]:
        """Return the version of NCCL, or () when it is not known."""
        import torch

        return tuple(torch.cuda.nccl.version())  # type: ignore[no-untyped-call,unused-ignore]


def backends_named(group: Any, kind: str) -> list[Any]:
    """Return the backends of a group that are of a kind, each once, without debug wrappers."""
    found: list[Any] = []
    for device in getattr(group, "_device_types", ()):
        backend = group._get_backend(device)
        while hasattr(backend, "wrapped_pg"):
            backend = backend.wrapped_pg
        if type(backend).__name__ == kind and all(backend is not each for each in found):
            found.append(backend)
    return found


class NcclUnblocker:
    """Aborts the communicators of all groups, those of sub-groups and splits too.

    A communicator that is aborted ends its kernels, whatever they had written: the main thread
    goes on without an exception until its next collective. So `settle` stands before an update,
    and gradients that were reduced while an abort could strike are not to be trusted.
    """

    backend = "nccl"

    def __init__(
        self,
        environ: MutableMapping[str, str],
        api: NcclApi | None = None,
        limit_s: float = _ABORT_S,
    ) -> None:
        """Use torch, or `api`. `environ` is the process's own."""
        self._environ = environ
        self._api: NcclApi = api or TorchNccl()
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._live: list[Any] = []
        self._aborted: list[Any] = []
        self._warned = False

    @contextlib.contextmanager
    def creating(self, size: int) -> Iterator[None]:
        """Let a group that is made now leave errors to frun, unless the user decided otherwise.

        torchrun's value 1 makes torch's watchdog end the process when a peer is lost.
        """
        del size
        if self._environ.get(_HANDLING) == "1":
            self._environ[_HANDLING] = "0"
        yield

    def created(self, group: Any) -> None:
        """Know the group's backends from now on."""
        backends = self._api.backends(group)
        if not backends:
            return
        self._warn_once()
        with self._lock:
            self._live += backends

    def unblock(self) -> int:
        """Abort everything, at once and not one after the other; return how many began.

        Each abort runs in its own thread: an abort can wait for kernels of another communicator,
        which only that one's abort ends. Those that are not through in time stay running.
        """
        with self._lock:
            backends, self._live = self._live, []
            self._aborted += backends
        threads = [
            threading.Thread(target=self._abort, args=(each,), name="frun-abort", daemon=True)
            for each in backends
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + self._limit_s
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0))
        stuck = sum(thread.is_alive() for thread in threads)
        if stuck:
            logger.error("%s of %s NCCL aborts took over %s s", stuck, len(threads), self._limit_s)
        return len(backends)

    def is_over(self) -> bool:
        """Return whether there are no communicators; one that was aborted may take its time."""
        with self._lock:
            return not (self._live or self._aborted)

    def settle(self) -> None:
        """Wait until everything that was queued, collectives too, is done."""
        with self._lock:
            known = bool(self._live or self._aborted)
        if known:
            self._api.settle()

    def shutdown(self, group: Any) -> None:
        """Abort a group that was not: a peer may be gone, so nothing waits for it."""
        for backend in self._api.backends(group):
            with self._lock:
                fresh = all(backend is not each for each in self._aborted)
                self._live = [each for each in self._live if each is not backend]
            if fresh:
                self._abort(backend)

    def forget(self, group: Any) -> None:
        """Know the group no more: the script destroyed it."""
        gone = self._api.backends(group)
        with self._lock:
            self._live = [each for each in self._live if all(each is not g for g in gone)]

    def teardown(self) -> int:
        """Wait until the device stands still, and know nothing any more."""
        with self._lock:
            had = bool(self._live or self._aborted)
            self._live.clear()
            self._aborted.clear()
        if had:
            self._api.synchronize()
        return 0

    def _abort(self, backend: Any) -> None:
        try:
            self._api.abort(backend)
        except RuntimeError as error:
            logger.warning("an NCCL abort failed: %s", error)

    def _warn_once(self) -> None:
        if self._warned:
            return
        self._warned = True
        version = self._api.version()
        for first, last, trap in _TRAPS:
            if version and first <= version[:3] <= last:
                logger.warning(
                    "NCCL %s: %s; use another version", ".".join(map(str, version)), trap
                )
