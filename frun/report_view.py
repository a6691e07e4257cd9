"""Draws the account of a job for a terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from frun.account.page import failed_because, notes, outcome
from frun.account.summary import Account
from frun.account.timeline import RECOVERY, Bucket
from frun.account.words import COLOURS, TITLES, duration, percent, ranks

_BAR = 60


def report_view(account: Account) -> RenderableType:
    """Return head, buckets, incidents and notes."""
    parts: list[RenderableType] = [_head(account), _bar(account), _buckets(account)]
    if account.faults:
        parts.append(_incidents(account))
    parts += [Text(f"note: {note}", style="dim") for note in notes(account)]
    return Group(*parts)


def _head(account: Account) -> Text:
    text = Text()
    text.append(f"job {account.job}", style="bold")
    text.append(f"  {outcome(account)}, {duration(account.wall_us)}")
    text.append(f", effective training time {100 * account.ettr:.2f} %")
    sliding = account.sliding()
    if sliding:
        text.append(f" (last hour {100 * sliding[-1][1]:.2f} %)")
    if account.story.told:
        text.append(f", {account.steps:,} steps, {account.steps_lost:,} done again")
    alarms = account.alarms.count
    text.append(f", {alarms} false {'alarm' if alarms == 1 else 'alarms'}")
    reason = failed_because(account)
    if reason:
        text.append(f"\n{reason}")
    return text


def _bar(account: Account) -> Text:
    text = Text()
    for bucket, us in account.buckets.items():
        width = round(_BAR * us / account.wall_us) if account.wall_us else 0
        text.append("█" * width, style=COLOURS[bucket])
    return text


def _buckets(account: Account) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    for bucket, us in account.buckets.items():
        name = Text("■ ", style=COLOURS[bucket]).append(TITLES[bucket], style="default")
        table.add_row(name, f"{us / 1_000_000:,.6f} s", percent(us, account.wall_us))
    table.add_row("  wall time", f"{account.wall_us / 1_000_000:,.6f} s", "", style="bold")
    return table


def _incidents(account: Account) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("at", "cause", "kind", "ranks", "took"):
        table.add_column(title, overflow="fold")
    for bucket in (*RECOVERY, Bucket.WAITING):
        table.add_column(TITLES[bucket], justify="right")
    table.add_column("again", justify="right")
    for fault in account.faults:
        record = fault.record
        table.add_row(
            duration(fault.at_us),
            str(record["cause"]),
            str(record.get("fault_class") or record["kind"]),
            ranks(list(record["ranks"])),
            duration(fault.total_us),
            *(_seconds(fault.spent_us.get(bucket, 0)) for bucket in (*RECOVERY, Bucket.WAITING)),
            str(record["steps_lost"]),
        )
    return table


def _seconds(us: int) -> str:
    return f"{us / 1_000_000:.3f}" if us else "-"
