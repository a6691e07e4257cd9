"""What every rank and host did, as spans of time: the picture behind `--trace` and `--html`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from frun.account.journal import Entry, Journal, microseconds
from frun.account.summary import Account

TRAINING, PAUSED = "training", "paused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One thing that one rank did."""

    rank: int
    host: str
    name: str
    """`process` encloses the others: `script`, `rebuild`, `agree`, `copy`, `first step`, `training`,
    `paused`, and declared phases."""
    start_us: int
    end_us: int
    detail: str = ""


def spans(account: Account) -> list[Span]:
    """Return all spans of all ranks, outer ones first."""
    found = [
        span for journal in account.journals for span in _of_host(journal, account.story.ended_us)
    ]
    return sorted(found, key=lambda span: (span.rank, span.start_us, -span.end_us))


def _of_host(journal: Journal, ended_us: int) -> Iterator[Span]:
    by_rank: dict[int, list[Entry]] = {}
    for entry in journal.entries:
        if "rank" in entry.fields:
            by_rank.setdefault(int(entry.number("rank")), []).append(entry)
    for rank, entries in by_rank.items():
        yield from _Rank(rank, journal.host, min(journal.entries[-1].at_us, ended_us)).read(entries)


class _Rank:
    """Follows one rank on one host through its entries."""

    def __init__(self, rank: int, host: str, ended_us: int) -> None:
        self._rank = rank
        self._host = host
        self._ended_us = ended_us
        self._pid = 0
        self._born_us: int | None = None
        self._doing = ""
        self._since_us = 0

    def read(self, entries: Sequence[Entry]) -> Iterator[Span]:
        """Yield the spans."""
        for entry in entries:
            match entry.name:
                case "worker_started":
                    yield from self._gone(entry.at_us, "")
                    self._born_us, self._pid = entry.at_us, int(entry.number("pid"))
                    self._doing, self._since_us = "script", entry.at_us
                case "worker_restored":
                    yield from self._restored(entry)
                case "first_step_completed":
                    yield from self._now(TRAINING, entry.at_us)
                case "worker_paused":
                    yield from self._now(PAUSED, entry.at_us)
                case "worker_phase_ended":
                    start_us = entry.at_us - microseconds(entry.number("took_s"))
                    yield self._span(entry.text("phase"), start_us, entry.at_us)
                case "worker_exited":
                    yield from self._gone(entry.at_us, entry.text("message") or entry.text("state"))
        yield from self._gone(self._ended_us, "")

    def _restored(self, entry: Entry) -> Iterator[Span]:
        """The worker told how long each of three things took, when they were over."""
        copied_us = entry.at_us
        agreed_us = copied_us - microseconds(entry.number("copy_s"))
        met_us = agreed_us - microseconds(entry.number("agree_s"))
        resumed_us = max(met_us - microseconds(entry.number("rebuild_s")), self._since_us)
        yield from self._now("", resumed_us)
        detail = f"step {int(entry.number('step'))}"
        yield self._span("rebuild", resumed_us, met_us)
        yield self._span("agree", met_us, agreed_us)
        yield self._span("copy", agreed_us, copied_us, detail)
        self._doing, self._since_us = "first step", copied_us

    def _now(self, doing: str, at_us: int) -> Iterator[Span]:
        if self._doing and self._born_us is not None and self._since_us < at_us:
            yield self._span(self._doing, self._since_us, at_us)
        self._doing, self._since_us = doing, at_us

    def _gone(self, at_us: int, how: str) -> Iterator[Span]:
        if self._born_us is None:
            return
        yield from self._now("", at_us)
        detail = f"pid {self._pid}" + (f": {how}" if how else "")
        yield self._span("process", self._born_us, at_us, detail)
        self._born_us = None

    def _span(self, name: str, start_us: int, end_us: int, detail: str = "") -> Span:
        return Span(
            rank=self._rank,
            host=self._host,
            name=name,
            start_us=start_us,
            end_us=max(start_us, end_us),
            detail=detail,
        )
