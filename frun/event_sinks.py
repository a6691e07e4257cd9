"""Writes events down: a file of JSON lines, and torchrun's own events on the console.

What events there are is `events`'s. No sink ever blocks or fails whoever emits.
"""

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from frun.events import (
    SCHEMA,
    Event,
    JobEnded,
    PhaseSeen,
    WorkerExited,
    WorkerStarted,
    event_name,
)

logger = logging.getLogger(__name__)

KNOWN_HANDLERS = ("null", "console", "dynamic_rendezvous")
"""Names that `--event-log-handler` takes; only `console` prints anything."""
_MAX_WAITING = 10_000


class EventSink(Protocol):
    """Takes events. No call blocks or raises, whatever the disk or the console does."""

    def emit(self, event: Event, *, generation: int) -> None:
        """Note an event of a generation (0: none yet)."""
        ...

    def close(self, timeout_s: float) -> None:
        """Write what waits, at most for `timeout_s` seconds, and free everything."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What every event of one agent shares."""

    job: str
    host: str
    monotonic: Callable[[], float]
    wall: Callable[[], float]


class JsonlSink:
    """One JSON object per line, appended to a file."""

    def __init__(self, path: str, origin: Origin) -> None:
        """`path` is made if it is missing; its folder must exist."""
        self._origin = origin
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._lines = _LineThread("frun-events", path, lambda: os.open(path, flags, 0o666))

    def emit(self, event: Event, *, generation: int) -> None:
        """Queue the event; see `EventSink`."""
        self._lines.put(json.dumps(document(event, self._origin, generation)))

    def close(self, timeout_s: float) -> None:
        """See `EventSink`."""
        self._lines.close(timeout_s)


class TorchEvents:
    """torchrun's events for `--event-log-handler console`, with real times. Others print nothing."""

    def __init__(self, *, fd: int, origin: Origin, role: str, backend: str, entry: str) -> None:
        """Lines go to descriptor `fd`, which stays open."""
        self._origin = origin
        self._role = role
        self._backend = backend
        self._entry = entry
        self._began = origin.monotonic()
        self._formed = (0, origin.monotonic())  # generation, when it was first seen
        self._seen = PhaseSeen(phase="", reason="", world_size=0)
        self._lines = _LineThread("frun-event-log", "the event log", lambda: os.dup(fd))

    def emit(self, event: Event, *, generation: int) -> None:
        """Queue the event if torchrun has one like it; see `EventSink`."""
        match event:
            case PhaseSeen():
                self._seen = event
                if generation > max(1, self._formed[0]):
                    self._formed = (generation, self._origin.monotonic())
                if event.phase == "run":
                    took_s = self._origin.monotonic() - self._formed[1]
                    self._put("RENDEZVOUS", "AGENT", generation, duration_ms=took_s * 1000)
            case WorkerStarted():
                self._put("START", "WORKER", generation, worker=event)
            case WorkerExited():
                state = {"succeeded": "SUCCEEDED", "failed": "FAILED"}.get(
                    event.state, "TERMINATED"
                )
                self._put(state, "WORKER", generation, worker=event)
            case JobEnded():
                state = "FAILED" if event.exit_code else "SUCCEEDED"
                error = event.reason if event.exit_code else None
                self._put(state, "AGENT", generation, raw_error=error)
            case _:
                pass

    def close(self, timeout_s: float) -> None:
        """See `EventSink`."""
        self._lines.close(timeout_s)

    def _put(
        self,
        state: str,
        source: str,
        generation: int,
        *,
        worker: WorkerStarted | WorkerExited | None = None,
        raw_error: str | None = None,
        duration_ms: float | None = None,
    ) -> None:
        seen = self._seen
        more: dict[str, object] = {"group_world_size": seen.hosts, "entry_point": self._entry}
        if worker is not None:
            exited = worker if isinstance(worker, WorkerExited) else None
            raw_error = exited.message or None if exited is not None else None
            # One-element lists, as torchrun writes them: readers of its events expect that.
            more |= {
                "local_rank": [worker.local_rank],
                "role_rank": [worker.rank],
                "role_world_size": [seen.world_size],
                "exit_code": [exited.exit_code if exited is not None else None],
                "worker_pid": [worker.pid],
            }
        metadata = {
            "run_id": self._origin.job,
            "global_rank": worker.rank if worker is not None else None,
            "group_rank": seen.group_rank,
            "worker_id": str(worker.pid) if worker is not None else None,
            "role": self._role,
            "hostname": self._origin.host,
            "state": state,
            "total_run_time": int(self._origin.monotonic() - self._began),
            "rdzv_backend": self._backend,
            "raw_error": raw_error,
            "metadata": json.dumps(more),
            "agent_restarts": max(0, generation - 1),
            "duration_ms": duration_ms,
        }
        record = {
            "name": f"torchelastic.worker.status.{state}",
            "source": source,
            "timestamp": int(self._origin.wall() * 1000),
            "metadata": metadata,
        }
        self._lines.put(json.dumps(record))


class FanOut:
    """Gives every event to several sinks; to none, it is the null sink."""

    def __init__(self, sinks: Sequence[EventSink]) -> None:
        self._sinks = tuple(sinks)

    def emit(self, event: Event, *, generation: int) -> None:
        """Pass on; see `EventSink`."""
        for sink in self._sinks:
            sink.emit(event, generation=generation)

    def close(self, timeout_s: float) -> None:
        """Close all; see `EventSink`."""
        for sink in self._sinks:
            sink.close(timeout_s)


def document(event: Event, origin: Origin, generation: int) -> dict[str, object]:
    """Return the JSON object of an event, read the clocks included."""
    return {
        "schema": SCHEMA,
        "event": event_name(type(event)),
        "job": origin.job,
        "host": origin.host,
        "generation": generation,
        "monotonic_s": round(origin.monotonic(), 6),
        "wall_s": round(origin.wall(), 6),
        **asdict(event),
    }


class _LineThread:
    """Writes lines to a descriptor from a thread, so that no disk and no console holds the loop."""

    def __init__(self, name: str, target: str, opener: Callable[[], int]) -> None:
        self._target = target
        self._opener = opener
        self._changed = threading.Condition()
        self._waiting: deque[str] = deque(maxlen=_MAX_WAITING)
        self._closing = False
        self._warned = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        with self._changed:
            if not self._closing:
                self._waiting.append(line)
                self._changed.notify()

    def close(self, timeout_s: float) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        fd: int | None = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    break
                line = self._waiting.popleft()
            try:
                if fd is None:
                    fd = self._opener()
                view = memoryview(f"{line}\n".encode("utf-8", "replace"))
                while view:
                    view = view[os.write(fd, view) :]
            except OSError as error:
                self._warn(error)
        if fd is not None:
            os.close(fd)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("events can not be written to %s: %s", self._target, error.strerror)
