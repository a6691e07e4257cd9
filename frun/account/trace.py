"""The account as a Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing.

The first process is the job with its buckets and incidents; each host is one more, with its agent and a
track per rank. The format is the JSON object form of the Trace Event Format: times are microseconds.
"""

from collections.abc import Iterator
from typing import Any

from frun.account.journal import Entry
from frun.account.summary import Account
from frun.account.tracks import spans

_JOB = 1
_SHOWN = (
    "phase_seen", "leader_elected", "host_joined", "host_left", "lease_lost", "store_lost",
    "store_back", "signal_received", "zygote_ready", "zygote_lost", "workers_stopping", "job_ended",
)  # fmt: skip
"""Events of an agent that are marks on its track."""


def trace(account: Account) -> dict[str, Any]:
    """Return the trace document; its time begins with the job."""
    return {"displayTimeUnit": "ms", "traceEvents": list(_events(account))}


def _events(account: Account) -> Iterator[dict[str, Any]]:
    began_us = account.story.began_us
    pids = {journal.host: _JOB + 1 + i for i, journal in enumerate(account.journals)}
    # Perfetto takes the thread whose number is that of its process for the process's first one.
    above = _JOB + len(pids) + 1
    yield from _named(_JOB, f"job {account.job}", {_JOB: "what the job did"})
    for piece in account.segments:
        yield {
            "ph": "X",
            "pid": _JOB,
            "tid": _JOB,
            "ts": piece.start_us - began_us,
            "dur": piece.end_us - piece.start_us,
            "name": piece.bucket.value,
            "cat": "job",
            "args": {"generation": piece.generation},
        }
    for fault in account.faults:
        yield _mark(_JOB, _JOB, fault.at_us, str(fault.record["cause"]), dict(fault.record), "p")
    for generation in account.story.generations:
        for at_us, step in generation.steps:
            yield {
                "ph": "C",
                "pid": _JOB,
                "tid": _JOB,
                "ts": at_us - began_us,
                "name": "steps",
                "args": {"completed": step},
            }
    tracks: dict[str, dict[int, str]] = {}
    for span in spans(account):
        tracks.setdefault(span.host, {})[above + span.rank] = f"rank {span.rank}"
        yield {
            "ph": "X",
            "pid": pids[span.host],
            "tid": above + span.rank,
            "ts": span.start_us - began_us,
            "dur": span.end_us - span.start_us,
            "name": span.name,
            "cat": "rank",
            "args": {"detail": span.detail} if span.detail else {},
        }
    for journal in account.journals:
        pid = pids[journal.host]
        yield from _named(
            pid, f"host {journal.host}", {pid: "agent", **tracks.get(journal.host, {})}
        )
        for entry in journal.entries:
            if entry.name in _SHOWN:
                at_us = entry.at_us - began_us
                yield _mark(pid, pid, at_us, _title(entry), dict(entry.fields), "t")


def _named(pid: int, name: str, tracks: dict[int, str]) -> Iterator[dict[str, Any]]:
    yield _meta(pid, 0, "process_name", {"name": name})
    yield _meta(pid, 0, "process_sort_index", {"sort_index": pid})
    for tid, title in sorted(tracks.items()):
        yield _meta(pid, tid, "thread_name", {"name": title})
        yield _meta(pid, tid, "thread_sort_index", {"sort_index": tid})


def _meta(pid: int, tid: int, what: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": what, "args": args}


def _mark(
    pid: int, tid: int, at_us: int, name: str, args: dict[str, Any], scope: str
) -> dict[str, Any]:
    return {
        "ph": "i",
        "s": scope,
        "pid": pid,
        "tid": tid,
        "ts": at_us,
        "name": name,
        "cat": "event",
        "args": args,
    }


def _title(entry: Entry) -> str:
    if entry.name == "phase_seen":
        return f"generation {entry.generation}: {entry.text('phase')}"
    return entry.name
