"""Draws the account as SVG: the bar of buckets, the timeline of job and ranks, the ratio over time.

Every text that comes from a job is escaped. Widths are in the pixels of a picture that is `WIDTH` wide.
"""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

from frun.account.summary import Account, Fault
from frun.account.timeline import Bucket
from frun.account.tracks import PAUSED, TRAINING, Span, spans
from frun.account.words import COLOURS, TITLES, duration, percent

WIDTH = 1120
SHOWN_RANKS = 64
_LEFT = 110
_ROW, _GAP = 16, 5
_SPANS = {
    "process": "#dfe3e8",
    "script": COLOURS[Bucket.START_UP],
    "rebuild": COLOURS[Bucket.REBUILD],
    "agree": COLOURS[Bucket.COPY],
    "copy": COLOURS[Bucket.COPY],
    "first step": COLOURS[Bucket.FIRST_STEP],
    TRAINING: COLOURS[Bucket.PRODUCTIVE],
    PAUSED: COLOURS[Bucket.PAUSE],
    "checkpoint": COLOURS[Bucket.CHECKPOINT],
}
_OTHER = "#9aa5b1"
_NICE = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)


def bar(account: Account) -> str:
    """Return all buckets as one bar."""
    wall_us = account.wall_us
    parts, at = [], 0.0
    for bucket, us in account.buckets.items():
        width = WIDTH * us / wall_us if wall_us else 0.0
        if width:
            title = f"{TITLES[bucket]}: {duration(us)}, {percent(us, wall_us)}"
            parts.append(_box(at, 0, width, 26, COLOURS[bucket], title, least=0.0))
        at += width
    return _svg(26, parts)


def split(fault: Fault) -> str:
    """Return the phases of one incident as a small bar of their own scale."""
    parts, at = [], 0.0
    for bucket, us in fault.spent_us.items():
        width = 260 * us / fault.total_us
        title = f"{TITLES[bucket]}: {duration(us)}"
        parts.append(_box(at, 0, width, 12, COLOURS[bucket], title, least=0.0))
        at += width
    return f'<svg viewBox="0 0 260 12" width="260" height="12">{"".join(parts)}</svg>'


def timeline(account: Account) -> str:
    """Return the picture of the whole job: its own row, one row per rank, a line per incident."""
    began_us, wall_us = account.story.began_us, max(account.wall_us, 1)
    scale = (WIDTH - _LEFT) / wall_us
    rows = _rows(spans(account), account)
    height = (len(rows) + 1) * (_ROW + _GAP) + 34
    parts = [_text(0, 13, "job")]
    room = _Room()
    for piece in account.segments:
        title = f"{TITLES[piece.bucket]}: {duration(piece.end_us - piece.start_us)}"
        recovers = piece.bucket not in (Bucket.PRODUCTIVE, Bucket.IDLE, Bucket.START_UP)
        x = _LEFT + (piece.start_us - began_us) * scale
        width = (piece.end_us - piece.start_us) * scale
        if room.shows(x, width):
            least = 1.5 if recovers else 0.0
            parts.append(_box(x, 0, width, _ROW, COLOURS[piece.bucket], title, least=least))
    for index, (rank, found) in enumerate(rows, 1):
        y = index * (_ROW + _GAP)
        parts.append(_text(0, y + 13, f"rank {rank}"))
        room = _Room()
        for span in found:
            x = _LEFT + (span.start_us - began_us) * scale
            took_us = span.end_us - span.start_us
            colour = _SPANS.get(span.name, _OTHER)
            detail = f" ({span.detail})" if span.detail else ""
            title = f"rank {rank}, {span.name}: {duration(took_us)}{detail}"
            if room.shows(x, took_us * scale):
                parts.append(_box(x, y, took_us * scale, _ROW, colour, title, least=0.4))
    bottom = (len(rows) + 1) * (_ROW + _GAP)
    for fault in account.faults:
        x = _LEFT + fault.at_us * scale
        title = escape(f"{duration(fault.at_us)}: {fault.record['cause']}")
        parts.append(
            f'<line class="fault" x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="{bottom}">'
            f"<title>{title}</title></line>"
        )
    parts += _axis(wall_us, scale, bottom)
    return _svg(height, parts)


def ratio(points: Sequence[tuple[int, float]]) -> str:
    """Return the sliding ratio over the job's life."""
    height, top = 120, 8
    last_us = max(points[-1][0], 1)
    scale = (WIDTH - _LEFT) / last_us
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = top + (1 - share) * (height - 2 * top)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH}" y1="{y}" y2="{y}"/>')
        parts.append(_text(0, y + 4, f"{share:.1f}"))
    places = " ".join(
        f"{_LEFT + at_us * scale:.1f},{top + (1 - value) * (height - 2 * top):.2f}"
        for at_us, value in points
    )
    parts.append(f'<polyline class="ratio" points="{places}"/>')
    parts += _axis(last_us, scale, height)
    return _svg(height + 30, parts)


class _Room:
    """Leaves out of one row what would only lie on top of each other: years of a job make no huge file."""

    def __init__(self) -> None:
        self._taken = -1

    def shows(self, x: float, width: float) -> bool:
        """Return True for what is a pixel wide, and for the first of what is less in each pixel."""
        pixel = int(x)
        if width < 1 and pixel == self._taken:
            return False
        if width < 1:
            self._taken = pixel
        return True


def _rows(found: Iterable[Span], account: Account) -> list[tuple[int, list[Span]]]:
    """Return the ranks to show: all, or those that incidents name and the first ones."""
    rows = {rank: list(group) for rank, group in groupby(found, key=lambda span: span.rank)}
    if len(rows) <= SHOWN_RANKS:
        return sorted(rows.items())
    named = [rank for fault in account.faults for rank in fault.record["ranks"] if rank in rows]
    chosen = list(dict.fromkeys([*named, *sorted(rows)]))[:SHOWN_RANKS]
    return [(rank, rows[rank]) for rank in sorted(chosen)]


def _axis(wall_us: int, scale: float, y: float) -> list[str]:
    step_s = next((s for s in _NICE if wall_us / 1_000_000 / s <= 10), None)
    if step_s is None:
        step_s = 86400 * max(1, round(wall_us / 1_000_000 / 86400 / 8))
    parts = []
    for second in range(0, wall_us // 1_000_000 + 1, step_s):
        x = _LEFT + second * 1_000_000 * scale
        parts.append(f'<line class="grid" x1="{x:.2f}" x2="{x:.2f}" y1="{y}" y2="{y + 5}"/>')
        anchor = "start" if not second else "end" if x > WIDTH - 30 else "middle"
        parts.append(_text(x, y + 18, _clock(second), anchor=anchor))
    return parts


def _clock(second: int) -> str:
    days, rest = divmod(second, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, seconds = divmod(rest, 60)
    if days:
        return f"{days} d {hours} h" if hours else f"{days} d"
    if hours or minutes >= 10:
        return f"{hours}:{minutes:02d} h" if hours else f"{minutes} min"
    return f"{minutes}:{seconds:02d}" if minutes else f"{seconds} s"


def _box(
    x: float, y: float, width: float, height: float, colour: str, title: str, *, least: float
) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, least):.2f}" height="{height}"'
        f' fill="{colour}"><title>{escape(title)}</title></rect>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: float, parts: Iterable[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" width="100%" role="img">' + "".join(parts) + "</svg>"
    )
