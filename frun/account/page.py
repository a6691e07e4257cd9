"""The account as one HTML file: nothing is loaded from anywhere, every text is escaped."""

from datetime import UTC, datetime
from html import escape

from frun.account import picture
from frun.account.alarms import KnownBy
from frun.account.summary import Account, Fault
from frun.account.timeline import Bucket
from frun.account.words import COLOURS, TITLES, duration, percent, ranks

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --dim: #5b6875; --paper: #fff; --line: #d8dde3; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ec; --dim: #9aa5b1; --paper: #16191d; --line: #333a42; }
}
body { font: 14px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1180px; margin: 2rem auto; padding: 0 1.5rem; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1.05rem; margin: 2.2rem 0 .6rem; }
p, .dim { color: var(--dim); } p { margin: .2rem 0; }
.cards { display: flex; flex-wrap: wrap; gap: 2.4rem; margin: 1.2rem 0 .4rem; }
.cards b { display: block; font-size: 1.55rem; font-weight: 600; font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem 1.1rem .25rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
td.n, th.n { text-align: right; } td.n, td.t { white-space: nowrap; }
th { color: var(--dim); font-weight: 500; }
i.c { display: inline-block; width: .8em; height: .8em; margin-right: .5em; border-radius: 2px; }
svg { display: block; } svg text { font: 11px system-ui, sans-serif; fill: var(--dim); }
svg .grid { stroke: var(--line); } svg .ratio { fill: none; stroke: #4c9f70; stroke-width: 1.6; }
svg .fault { stroke: #c8463c; stroke-width: 1; stroke-dasharray: 2 3; opacity: .8; }
.wide { overflow-x: auto; }
"""


def page(account: Account) -> str:
    """Return the whole file."""
    title = escape(f"Job {account.job}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body>"
        + _head(account)
        + f"<h2>Where the time went</h2>{picture.bar(account)}{_buckets(account)}"
        + f"<h2>Timeline</h2>{picture.timeline(account)}{_left_out(account)}"
        + _incidents(account)
        + _ratio(account)
        + _notes(account)
        + "</body></html>\n"
    )


def _head(account: Account) -> str:
    story = account.story
    began = min(journal.began_wall_us for journal in account.journals) / 1_000_000
    when = datetime.fromtimestamp(began, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    state = outcome(account)
    recoveries = sorted(fault.total_us for fault in account.faults)
    cards = [
        ("effective training time", f"{100 * account.ettr:.2f} %"),
        ("wall time", duration(account.wall_us)),
        ("incidents", str(len(account.faults))),
    ]
    if recoveries:
        cards.append(("median recovery", duration(recoveries[len(recoveries) // 2])))
    if story.told:
        cards += [("steps", f"{account.steps:,}"), ("steps done again", f"{account.steps_lost:,}")]
    shown = "".join(
        f'<div><b>{escape(value)}</b><span class="dim">{escape(name)}</span></div>'
        for name, value in cards
    )
    hosts = len(account.journals) + len(account.missing)
    return (
        f"<h1>Job {escape(account.job)}</h1><p>{escape(state)}; began {when};"
        f" {hosts} {'host' if hosts == 1 else 'hosts'}</p>{_why(account)}"
        f'<div class="cards">{shown}</div>'
    )


def _why(account: Account) -> str:
    reason = failed_because(account)
    return f"<p>{escape(reason)}</p>" if reason else ""


def failed_because(account: Account) -> str:
    """Return what ended a job that failed; empty text for any other."""
    final = account.story.final
    return account.story.why if final is not None and final[1] == "failed" else ""


def outcome(account: Account) -> str:
    """Return in words where the job stands."""
    story = account.story
    if story.final is not None:
        return {"done": "ended well", "failed": "failed"}.get(story.final[1], story.final[1])
    return "ended early" if story.over else "not ended, as far as its logs tell"


def _buckets(account: Account) -> str:
    rows = "".join(
        f'<tr><td><i class="c" style="background:{COLOURS[bucket]}"></i>{TITLES[bucket]}</td>'
        f'<td class="n">{us / 1_000_000:,.6f}</td><td class="n">{percent(us, account.wall_us)}</td></tr>'
        for bucket, us in account.buckets.items()
    )
    total = (
        f'<tr><th>wall time</th><th class="n">{account.wall_us / 1_000_000:,.6f}</th><th></th></tr>'
    )
    return (
        f'<table style="margin-top:.8rem"><tr><th></th><th class="n">seconds</th><th class="n">share</th>'
        f"</tr>{rows}{total}</table>"
    )


def _incidents(account: Account) -> str:
    if not account.faults:
        return "<h2>Incidents</h2><p>None.</p>"
    head = "<tr><th>at</th><th>cause</th><th>kind</th><th>ranks</th><th>action</th>"
    head += '<th class="n">took</th><th>split</th><th class="n">steps again</th></tr>'
    rows = "".join(_incident(fault) for fault in account.faults)
    return f'<h2>Incidents</h2><div class="wide"><table>{head}{rows}</table></div>'


def _incident(fault: Fault) -> str:
    record = fault.record
    cells = [
        str(record["cause"]),
        str(record.get("fault_class") or record["kind"]),
        ranks(list(record["ranks"])),
        str(record["action"]),
    ]
    plain = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    drawn = picture.split(fault) if fault.total_us else ""
    return (
        f'<tr><td class="t">{duration(fault.at_us)}</td>{plain}<td class="n">{duration(fault.total_us)}</td>'
        f'<td>{drawn}</td><td class="n">{record["steps_lost"]}</td></tr>'
    )


def _ratio(account: Account) -> str:
    points = account.sliding()
    if not points:
        return ""
    return (
        "<h2>Effective training time ratio of the last hour</h2>"
        + picture.ratio(points)
        + "<p>Productive by wall time in the hour before each moment; of all the time so far before a"
        " whole hour has passed.</p>"
    )


def _left_out(account: Account) -> str:
    count = len(
        {entry.fields["rank"] for j in account.journals for entry in j.all("worker_started")}
    )
    if count <= picture.SHOWN_RANKS:
        return ""
    return (
        f"<p>{picture.SHOWN_RANKS} of {count} ranks are drawn, those of incidents first; the trace"
        " (frun report --trace) has all.</p>"
    )


def notes(account: Account) -> list[str]:
    """Return what a reader must know about how complete this is."""
    found = []
    if account.missing:
        names = ", ".join(account.missing)
        found.append(
            f"No log of these hosts was found, so what only they saw is not here: {names}."
        )
    if not account.story.told:
        found.append(
            "No worker told of steps (no resumable function was entered): all time in which the"
            f" workers ran counts as {TITLES[Bucket.PRODUCTIVE]}, also what a restart did again."
        )
    idle = [notice for notice in account.story.noticed if notice.for_nothing]
    if idle:
        reasons = "; ".join(dict.fromkeys(notice.reason for notice in idle))
        found.append(
            f"{len(idle)} times something was noticed and nothing came of it, perhaps false alarms:"
            f" {reasons}."
        )
    if account.alarms.unexplained:
        causes = [f.record["cause"] for f in account.faults if f.known_by is KnownBy.NOTICE]
        found.append(
            f"{len(causes)} incidents were only noticed and no drill explains them, perhaps false alarms:"
            f" {'; '.join(dict.fromkeys(causes))}."
        )
    for journal in account.journals:
        if journal.broken:
            found.append(f"{journal.broken} lines of {journal.source} could not be read.")
    return found


def _notes(account: Account) -> str:
    found = notes(account)
    if not found:
        return ""
    return "<h2>Notes</h2>" + "".join(f"<p>{escape(note)}</p>" for note in found)
