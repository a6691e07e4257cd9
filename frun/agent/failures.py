"""Owns what is said about a failed worker: its error file, its exit in words, the summary at the end.

Which failure is the cause is decided in `protocol.blame`; starting again is decided by the leader.
Error files are written by users' processes: anything may be in them, and nothing in them is an error
of frun.
"""

import json
import logging
import os
import signal
import traceback as tracebacks
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from frun import procfs
from frun.agent.worker import Worker
from frun.protocol import classify
from frun.protocol.channel import Raised
from frun.protocol.classes import Rule
from frun.protocol.records import Failure

logger = logging.getLogger(__name__)

MAX_TEXT = 8 * 1024
"""Characters of a traceback that are kept: it travels in a report through etcd."""
_MAX_MESSAGE = 1024
_MAX_FILE = 4 * 1024 * 1024
_SHOWN_OTHERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedError:
    """What a worker wrote about its own end."""

    message: str
    """Type and text of the exception, one or more lines."""
    traceback: str = ""
    timestamp_s: float | None = None
    """Wall clock of the worker, seconds since 1970; None if it did not say."""


def read_error_file(path: str) -> RecordedError | None:
    """Read an error file of either format; None if there is none or it says nothing usable.

    Never raises: a file that is empty, cut short, huge or not ours is as good as none.
    """
    document = _load(path)
    if document is None:
        return None
    message = document.get("message")
    if isinstance(message, str):
        return _recorded(message, document.get("traceback"), document.get("timestamp"))
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        extra = extra if isinstance(extra, dict) else {}
        return _recorded(message.get("message"), extra.get("py_callstack"), extra.get("timestamp"))
    return None


def describe_exit(code: int) -> str:
    """Return an exit code in words; a negative one is the number of a signal."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"{signal.Signals(-code).name} ({-code})"
    except ValueError:
        return f"signal {-code}"


def build_failure(
    *,
    rank: int,
    local_rank: int,
    host: str,
    pid: int,
    exit_code: int,
    order: int,
    error_file: str = "",
    log: str = "",
    last_lines: Sequence[str] = (),
) -> Failure:
    """Return the record of one failed worker, from its exit and its error file if it wrote one.

    `log` is the worker's log folder; it is not named to people if nothing is in it. `last_lines` of its
    stderr stand in for a traceback when the worker recorded nothing.
    """
    recorded = read_error_file(error_file) if error_file else None
    if recorded is not None:
        message, text = recorded.message, recorded.traceback
    else:
        message, text = "", "\n".join(last_lines)
    return Failure(
        rank=rank,
        local_rank=local_rank,
        host=host,
        exit_code=exit_code,
        pid=pid,
        message=message or f"ended with {describe_exit(exit_code)}",
        traceback=_shortened(text, MAX_TEXT),
        log=log if _holds_anything(log) else (error_file if recorded is not None else ""),
        recorded=recorded is not None,
        order=order,
    )


def of_worker(
    worker: Worker, exit_code: int, host: str, order: int, rules: Sequence[Rule], why: str
) -> Failure:
    """Return how a worker failed, and the class of that; `why` says why frun ended it, if it did."""
    streams = worker.streams
    failure = build_failure(
        rank=worker.rank,
        local_rank=worker.report.local_rank,
        host=host,
        pid=worker.report.pid,
        exit_code=exit_code,
        error_file=streams.error_file if streams else "",
        log=streams.folder if streams else "",
        order=order,
        last_lines=worker.last_lines,
    )
    failure = explained(failure, worker.raised, why)
    if worker.found is not None:
        found = worker.found
        return replace(failure, fault_class=found.fault_class, evidence=found.evidence)
    return classified(failure, rules, why, procfs.oom_kills() - worker.oom_kills)


def explained(failure: Failure, raised: Raised | None, why: str) -> Failure:
    """Add what the worker told its agent, which counts if it wrote no file, or what frun knows itself."""
    if raised is not None and not failure.recorded:
        return replace(
            failure,
            message=raised.message,
            traceback=raised.traceback,
            recorded=True,
            kind=raised.kind,
        )
    return replace(failure, message=why) if why else failure


def classified(
    failure: Failure, rules: Sequence[Rule], ended_because: str, oom_kills: int
) -> Failure:
    """Add the class of a failure, and what speaks for it; see `classify.of_failure`."""
    found = classify.of_failure(failure, rules, ended_because=ended_because, oom_kills=oom_kills)
    return replace(failure, fault_class=found.fault_class, evidence=found.evidence)


def describe_failure(failure: Failure) -> str:
    """Return one line: which worker, where, how it ended."""
    where = f"rank {failure.rank} (local rank {failure.local_rank}) on {failure.host}"
    pid = f", pid {failure.pid}" if failure.pid else ""
    return f"{where}{pid}: {describe_exit(failure.exit_code)}"


def failure_summary(
    *,
    entry: str,
    root: Failure,
    others: Sequence[Failure] = (),
    did: str,
    failed_at: float | None = None,
) -> str:
    """Return the text that a person finds at the end of a failed job: what, what frun did, where.

    `did` says what frun did about it; `failed_at` is wall time in seconds. Three lines when nothing
    more is known; the worker's own words and the failures after it are added between them.
    """
    when = f" at {local_time(failed_at)}" if failed_at is not None else ""
    lines = [f"{entry} failed: {describe_failure(root)}{when}"]
    if root.recorded:
        lines += _indented(root.traceback.rstrip() or root.message)
    elif root.traceback.strip():
        lines += ["  last lines of its stderr:", *_indented(root.traceback.rstrip(), 4)]
    for other in others[:_SHOWN_OTHERS]:
        said = f", {_one_line(other.message)}" if other.recorded else ""
        lines.append(f"after it: {describe_failure(other)}{said}")
    if len(others) > _SHOWN_OTHERS:
        lines.append(f"after it: {len(others) - _SHOWN_OTHERS} more")
    lines.append(f"frun {did}")
    if root.log:
        lines.append(f"log: {root.log} on {root.host}")
    else:
        lines.append("log: not kept; --redirects 3 or --tee 3 keeps it in --log-dir")
    return "\n".join(lines) + "\n"


def write_agent_error_file(target: str, failure: Failure, *, now: float, source: str = "") -> None:
    """Put the root cause where whoever started the agent looks for it (its TORCHELASTIC_ERROR_FILE).

    `source` is the worker's own error file if it is on this host: it is copied with `errorCode` added.
    Without one the facts are written in the same format. `now` is wall time in seconds. Never raises.
    """
    document = _load(source) if source else None
    message = document.get("message") if document is not None else None
    if document is not None and isinstance(message, dict):
        document["message"] = {**message, "errorCode": failure.exit_code}
    elif document is not None and isinstance(message, str):
        document["errorCode"] = failure.exit_code
    else:
        text = failure.message
        if not failure.recorded:
            text = f"{describe_failure(failure)}"
        document = _document(text, failure.traceback, now, errorCode=failure.exit_code)
    _dump(target, document)


def write_agent_exception(target: str, error: BaseException, *, now: float) -> None:
    """Put the agent's own error into its error file, in the format of `@record`. Never raises."""
    stack = "".join(tracebacks.format_exception(error))
    _dump(target, _document(f"{type(error).__name__}: {error}", stack, now))


def local_time(wall_s: float) -> str:
    """Return a wall time in the machine's own zone, for people."""
    return datetime.fromtimestamp(wall_s, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _holds_anything(folder: str) -> bool:
    try:
        return bool(folder and os.listdir(folder))
    except OSError:
        return False


def _load(path: str) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if there is no such thing."""
    try:
        # Not blocking: a worker may have put a named pipe there.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            data = file.read(_MAX_FILE)
        document = json.loads((data or b"").decode("utf-8", "replace"))
    except (OSError, ValueError, RecursionError) as error:
        if not isinstance(error, FileNotFoundError):
            logger.debug("error file %s can not be read: %s", path, error)
        return None
    return document if isinstance(document, dict) else None


def _dump(target: str, document: dict[str, Any]) -> None:
    # Written in place: the target may be a mounted file or a device, which no rename can replace.
    try:
        with open(target, "w", encoding="utf-8") as file:
            json.dump(document, file)
    except OSError as error:
        logger.warning("error file %s can not be written: %s", target, error.strerror)


def _document(message: str, stack: str, now: float, **more: int) -> dict[str, Any]:
    extra = {"py_callstack": stack, "timestamp": str(int(now))}
    return {"message": {"message": message, **more, "extraInfo": extra}}


def _recorded(message: object, stack: object, timestamp: object) -> RecordedError | None:
    if not isinstance(message, str):
        return None
    return RecordedError(
        message=_shortened(message, _MAX_MESSAGE),
        traceback=_shortened(stack, MAX_TEXT) if isinstance(stack, str) else "",
        timestamp_s=_seconds(timestamp),
    )


def _seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _shortened(text: str, limit: int) -> str:
    """Keep the beginning and, mostly, the end: the last lines of a traceback say what happened."""
    if len(text) <= limit:
        return text
    head = limit // 4
    return f"{text[:head]}\n... {len(text) - limit} characters left out ...\n{text[head - limit :]}"


def _one_line(text: str, limit: int = 200) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def _indented(text: str, spaces: int = 2) -> list[str]:
    return [" " * spaces + line for line in text.splitlines()]
