"""Events as lines in a file and as torchrun's events."""

import json
import logging
import os
import threading
from pathlib import Path

import pytest

from frun import events
from frun.event_sinks import KNOWN_HANDLERS, FanOut, JsonlSink, Origin, TorchEvents


class Hand:
    """A clock that is moved by hand."""

    now = 5.0


def origin(clock: Hand | None = None) -> Origin:
    """Return an origin whose clocks stand still, or are moved by hand."""
    hand = clock or Hand()
    return Origin(job="j", host="node-a", monotonic=lambda: hand.now, wall=lambda: 1_700_000_000.25)


EXIT = events.WorkerExited(
    rank=3,
    local_rank=1,
    pid=7,
    state="failed",
    exit_code=-9,
    message="ended with SIGKILL (9)",
    fault_class="process",
    evidence="ended with SIGKILL (9)",
)


def test_each_event_is_one_line_with_origin_and_clocks(tmp_path: Path) -> None:
    """The file holds one JSON object per event, appended, with job, host, generation and times."""
    path = tmp_path / "events.jsonl"
    for generation in (1, 2):
        sink = JsonlSink(str(path), origin())
        sink.emit(EXIT, generation=generation)
        sink.close(5)
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first == {
        "schema": 1,
        "event": "worker_exited",
        "job": "j",
        "host": "node-a",
        "generation": 1,
        "monotonic_s": 5.0,
        "wall_s": 1_700_000_000.25,
        "rank": 3,
        "local_rank": 1,
        "pid": 7,
        "state": "failed",
        "exit_code": -9,
        "message": "ended with SIGKILL (9)",
        "fault_class": "process",
        "evidence": "ended with SIGKILL (9)",
    }
    assert second["generation"] == 2
    assert not [t for t in threading.enumerate() if t.name == "frun-events"]


def test_no_field_hides_the_origin() -> None:
    """No event has a field that the sink adds."""
    added = {"schema", "event", "job", "host", "generation", "monotonic_s", "wall_s"}
    for kind in events.KINDS:
        assert not added & set(getattr(kind, "__slots__", ())), kind


def test_full_disk_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Events that can't be written cost one warning."""
    with caplog.at_level(logging.WARNING):
        for path in ("/dev/full", "/nowhere/events.jsonl"):
            sink = JsonlSink(path, origin())
            for _ in range(3):
                sink.emit(EXIT, generation=1)
            sink.close(5)
            sink.emit(EXIT, generation=1)
    assert [record.message for record in caplog.records] == [
        "events can not be written to /dev/full: No space left on device",
        "events can not be written to /nowhere/events.jsonl: No such file or directory",
    ]


def test_blocked_target_holds_nobody(tmp_path: Path) -> None:
    """Emitting does not wait for a target that takes nothing."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    sink = JsonlSink(str(pipe), origin())  # opening blocks: nobody reads
    for _ in range(100):
        sink.emit(EXIT, generation=1)
    with open(os.open(pipe, os.O_RDONLY), encoding="utf-8") as reader:
        sink.close(5)
        assert len(reader.readlines()) == 100


def test_console_handler_prints_torchruns_events_with_times() -> None:
    """`--event-log-handler console`: torchrun's names and metadata, and a real time (S12)."""
    read, write = os.pipe()
    clock = Hand()
    torch = TorchEvents(
        fd=write, origin=origin(clock), role="trainer", backend="etcd", entry="t.py"
    )
    sink = FanOut([torch])
    clock.now = 5.5
    for phase in ("recover", "run"):
        event = events.PhaseSeen(phase=phase, reason="", world_size=4, hosts=2, group_rank=1)
        sink.emit(event, generation=2)
        clock.now += 0.5
    sink.emit(events.WorkerStarted(rank=3, local_rank=1, pid=7), generation=2)
    sink.emit(EXIT, generation=2)
    sink.emit(events.StoreLost(reason="x"), generation=2)
    sink.emit(events.JobEnded(exit_code=0, reason="done"), generation=2)
    sink.close(5)
    os.close(write)
    with open(read, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    assert [line["name"].rsplit(".")[-1] for line in lines] == [
        "RENDEZVOUS",
        "START",
        "FAILED",
        "SUCCEEDED",
    ]
    assert [line["source"] for line in lines] == ["AGENT", "WORKER", "WORKER", "AGENT"]
    assert {line["timestamp"] for line in lines} == {1_700_000_000_250}
    failed = lines[2]["metadata"]
    assert failed["global_rank"] == 3
    assert failed["raw_error"] == "ended with SIGKILL (9)"
    assert json.loads(failed["metadata"])["exit_code"] == [-9]
    assert lines[0]["metadata"]["duration_ms"] == 500.0
    assert lines[0]["metadata"]["group_rank"] == 1
    assert json.loads(lines[1]["metadata"]["metadata"])["group_world_size"] == 2


def test_handlers_are_torchruns() -> None:
    """The names that torch has a handler for, and no others."""
    from torch.distributed.elastic.events import handlers

    assert set(KNOWN_HANDLERS) == set(handlers._log_handlers)
