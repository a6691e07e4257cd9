"""The account as a trace and as a page."""

import io
import json
import re
from collections import defaultdict
from html.parser import HTMLParser
from typing import Any

from rich.console import Console

from frun.account.page import page
from frun.account.picture import SHOWN_RANKS
from frun.account.summary import Account, account, document
from frun.account.trace import trace
from frun.account.words import duration, ranks
from frun.report_view import report_view
from tests.account.build import (
    END,
    FAULT,
    START,
    Said,
    closed,
    died,
    first,
    journal,
    restored,
    seen,
)

EVIL = "</title><script>alert(1)</script>&\"'"
RECOVERED = (
    restored(123.0, 2, step=12, copy_s=0.5, agree_s=0.25, rebuild_s=0.75),
    first(124.0, 2, 13),
    closed(124.1, 2, 0.5),
)
STORY = (*START, restored(107.0, 1), first(108.0, 1, 1), *FAULT, *RECOVERED, *END)


def made(*said: Said) -> Account:
    """Return the account of one host."""
    return account([journal("a", *said)])


def test_each_rank_has_one_track_and_its_spans_lie_inside_one_another() -> None:
    """What Perfetto and chrome://tracing need: complete events with times, names of tracks, no crossings."""
    document = json.loads(json.dumps(trace(made(*STORY))))
    events = document["traceEvents"]
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    assert sorted(names.values()) == ["agent", "rank 0", "what the job did"]
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        assert {"ph", "pid", "tid", "ts", "name"} <= event.keys()
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        open_spans: list[int] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_spans and open_spans[-1] <= start:
                open_spans.pop()
            assert not open_spans or end <= open_spans[-1], spans
            open_spans.append(end)
    job = next(pair for pair, name in names.items() if name == "what the job did")
    assert sum(end - start for start, end in tracks[job]) == 41_000_000


def test_a_newcomers_way_is_on_its_track() -> None:
    """The process, its script, groups, agreement, copy, first step, training: each when it was."""
    spans = [
        (event["name"], event["ts"] / 1e6, event["dur"] / 1e6)
        for event in trace(made(*STORY))["traceEvents"]
        if event["ph"] == "X" and event["cat"] == "rank" and event["ts"] > 20e6
    ]
    assert spans == [
        ("process", 21.5, 18.5),
        ("rebuild", 21.5, 0.75),
        ("agree", 22.25, 0.25),
        ("copy", 22.5, 0.5),
        ("first step", 23.0, 1.0),
        ("training", 24.0, 16.0),
    ]


class Reader(HTMLParser):
    """Collects tags and what they point to; every tag must be closed in order."""

    VOID = ("meta", "br")

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, Any]]) -> None:
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, Any]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_one_file_that_loads_and_runs_nothing() -> None:
    """No script, no address, and what a job calls itself or its cause is only ever text."""
    evil = [
        (at, name, generation, {**fields, "cause": EVIL} if "cause" in fields else fields)
        for at, name, generation, fields in STORY
    ]
    text = page(made(*evil))
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    assert "script" not in reader.tags
    assert {"svg", "rect", "polyline", "table"} <= set(reader.tags)
    assert reader.links == []
    assert not re.search(r"url\(|@import|https?:", text)
    assert "&lt;script&gt;alert(1)" in text


def test_a_job_that_failed_says_why() -> None:
    """On the page, on the terminal and in the document; a job that ended well has nothing to explain."""
    gave_up = made(*START, died(120.0, 1), seen(120.5, 1, "failed", f"rank 0 failed {EVIL}"))
    assert "<p>rank 0 failed &lt;/title&gt;&lt;script&gt;" in page(gave_up)
    console = Console(file=io.StringIO(), width=200)
    console.print(report_view(gave_up))
    assert "\nrank 0 failed </title>" in console.file.getvalue()  # type: ignore[attr-defined]
    assert document(gave_up)["reason"] == f"rank 0 failed {EVIL}"
    assert "all ended" not in page(made(*STORY))


def test_many_ranks_are_drawn_in_part_and_said_so() -> None:
    """Of a thousand ranks those of incidents are shown, and the page tells how many there are."""
    many: list[Said] = [
        (105.0, "worker_started", 1, {"rank": rank, "local_rank": rank, "pid": rank})
        for rank in range(1000)
    ]
    text = page(made(*START, *many, restored(107.0, 1), first(108.0, 1, 1), *FAULT, *END))
    assert len(re.findall(r">rank \d+</text>", text)) == SHOWN_RANKS
    assert f"{SHOWN_RANKS} of 1000 ranks" in text


def test_thousands_of_faults_make_no_huge_page() -> None:
    """What no pixel could show is left out of the picture; the table has every incident."""
    said = list(START)
    for number in range(2, 2002):
        at = 100.0 + 10 * number
        said += [
            seen(at, number, "recover"),
            seen(at + 0.01, number, "run"),
            (at + 0.02, "worker_started", number, {"rank": 0, "local_rank": 0, "pid": number}),
            restored(at + 0.03, number, rebuild_s=0.005, copy_s=0.001),
            first(at + 0.04, number, number),
            closed(at + 0.05, number, 0.0),
        ]
    text = page(made(*said))
    assert text.count("it died") >= 2000
    picture = text[text.index("<h2>Timeline</h2>") : text.index("<h2>Incidents</h2>")]
    assert picture.count("<rect") < 4 * 1200


def test_a_job_of_no_time_at_all() -> None:
    """One entry is a job as well."""
    single = made((1.0, "job_started", 0, {}))
    assert "<svg" in page(single)
    assert trace(single)["traceEvents"]
    assert "waiting" in page(made(*START[:3], seen(107.0, 1, "gather")))


def test_times_and_ranks_in_words() -> None:
    """Short times have milliseconds, long ones days."""
    assert [duration(s * 1_000_000) for s in (0, 59, 61, 3_600, 200_000)] == [
        "0.000 s", "59.0 s", "1 min 01 s", "1 h 00 min", "2 d 7 h",
    ]  # fmt: skip
    assert ranks([7, 0, 1, 3, 2, 7]) == "0-3, 7"
