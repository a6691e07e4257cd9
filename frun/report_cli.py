"""Owns `frun report`: find a job's event logs, what etcd knows if it lives, and write its account down.

The account itself is `account`'s, finding the logs `journals`'s.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from frun import journals, registry
from frun.account.journal import Journal, microseconds
from frun.account.page import page
from frun.account.summary import Account, account, document
from frun.account.trace import trace
from frun.clock import SystemClock
from frun.errors import FrunError, UsageError
from frun.finding import CONNECT_S, job_parameters, open_store, read_job, state_dir_of, target_of

USAGE = "frun report"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What there is of one job."""

    journals: Sequence[Journal]
    now_us: Mapping[str, int] = field(default_factory=dict)
    """The present, on the clocks of agents that live here."""
    live: Mapping[str, Any] | None = None
    """Its status in etcd."""


@click.command(
    "report",
    help="Account for every second of a job, live or ended: what its time went into, its incidents"
    " with their phases, effective training time. Reads the event logs that this machine can reach."
    " Without JOB, the only live job of this machine, else the one that began last.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@job_parameters
@click.option(
    "log_dirs",
    "--log-dir",
    "--log_dir",
    metavar="DIR",
    multiple=True,
    help="Folder with logs of the job: its --log-dir, or the folder of one agent. More than once"
    " for logs that were brought together from several hosts.",
)
@click.option("as_json", "--json", is_flag=True, help="Print one JSON document.")
@click.option("--trace", "trace_file", metavar="FILE", help="Write a Chrome trace (Perfetto).")
@click.option("--html", "html_file", metavar="FILE", help="Write one HTML file with pictures.")
@click.pass_context
def report(
    ctx: click.Context,
    /,
    *,
    log_dirs: tuple[str, ...],
    as_json: bool,
    trace_file: str | None,
    html_file: str | None,
    **given: str | None,
) -> int:
    """Find the logs, make the account, write it as wanted."""
    made = account_of(ctx, log_dirs, given)
    if trace_file:
        _write(trace_file, "--trace", lambda: json.dumps(trace(made), ensure_ascii=False))
    if html_file:
        _write(html_file, "--html", lambda: page(made))
    try:
        if as_json:
            click.echo(json.dumps(document(made), ensure_ascii=False))
        else:
            _print(made)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def account_of(
    ctx: click.Context, log_dirs: Sequence[str], given: Mapping[str, str | None]
) -> Account:
    """Return the account of the job that a command's parameters mean. Raises UsageError."""
    found = find(ctx, log_dirs, given)
    live = found.live or {}
    return account(
        found.journals,
        now_us=found.now_us,
        incidents=live.get("incidents", ()),
        hosts=[host["host"] for host in live.get("hosts", ()) if host["host"]],
    )


def find(ctx: click.Context, log_dirs: Sequence[str], given: Mapping[str, str | None]) -> Found:
    """Return what there is of the job that is meant. Raises UsageError when there is nothing, or several."""
    job = given["job"] or given["job_id"]
    if log_dirs:
        found = journals.latest_run(journals.in_folders(log_dirs, job))
        if not found:
            what = "no event log" if job is None else f"no event log of job {job!r}"
            raise UsageError(f"there is {what} in {', '.join(log_dirs)}")
        return _with_live(ctx, given, Found(journals=found), found[0].job)
    state_dir = state_dir_of(given)
    alive = registry.live_jobs(state_dir)
    typed = ctx.get_parameter_source("endpoint") is click.core.ParameterSource.COMMANDLINE
    if typed or [entry for entry in alive if job in (None, entry.job_id)]:
        return _live(ctx, given, alive)
    ended = [entry for entry in registry.ended_jobs(state_dir) if job in (None, entry.job_id)]
    if not ended:
        what = "no job" if job is None else f"no job {job!r}"
        raise UsageError(
            f"{what} runs or ended lately on this machine: name its folder with --log-dir, or its"
            " etcd with --rdzv-endpoint and --job-id"
        )
    latest = ended[-1].job_id
    found = journals.latest_run(
        journals.of_agents(entry for entry in ended if entry.job_id == latest)
    )
    if not found:
        raise UsageError(
            f"job {latest!r} ended on this machine, and its event log is gone"
            f" ({ended[-1].log_folder or 'it had none: --log-dir was the null device'})"
        )
    return Found(journals=found)


def _live(
    ctx: click.Context, given: Mapping[str, str | None], alive: Sequence[registry.JobEntry]
) -> Found:
    """Return what there is of a live job: its agents' logs here, and its status."""
    target = target_of(ctx, given, USAGE)
    status = asyncio.run(_status(target))
    job = status["job_id"] if status is not None else target.job_id
    own = [entry for entry in alive if entry.job_id == job]
    found = journals.latest_run(journals.of_agents(own))
    if not found:
        raise UsageError(
            f"no event log of job {job!r} is reachable from here: run this on a host of the job, or"
            " name a folder that its hosts share with --log-dir"
        )
    now_us = microseconds(SystemClock().monotonic())
    return Found(
        journals=found,
        now_us={entry.host: now_us for entry in own},
        live=status,
    )


def _with_live(
    ctx: click.Context, given: Mapping[str, str | None], found: Found, job: str
) -> Found:
    """Add what etcd knows, if the job of these logs lives on this machine, or where an endpoint says."""
    alive = [entry for entry in registry.live_jobs(state_dir_of(given)) if entry.job_id == job]
    hosts = {journal.host for journal in found.journals}
    here = [entry for entry in alive if entry.host in hosts]
    typed = ctx.get_parameter_source("endpoint") is click.core.ParameterSource.COMMANDLINE
    if not here and not typed:
        return found
    now_us = microseconds(SystemClock().monotonic())
    status = asyncio.run(_status(target_of(ctx, {**given, "job": job, "job_id": None}, USAGE)))
    return Found(
        journals=found.journals, now_us={entry.host: now_us for entry in here}, live=status
    )


async def _status(target: Any) -> Mapping[str, Any] | None:
    """Return the job's status; None, with a word about it, when etcd does not say."""
    store = open_store(target)
    try:
        await store.connect(CONNECT_S)
        return (await read_job(store, target))[1]
    except FrunError as error:
        if target.job_id is None:
            raise
        click.echo(f"frun: from the event logs alone: {error}", err=True)
        return None
    finally:
        await store.close()


def _write(path: str, flag: str, make: Callable[[], str]) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(make())
    except OSError as error:
        raise UsageError(f"{flag} {path} can not be written: {error.strerror}") from error


def _print(made: Account) -> None:
    from rich.console import Console

    from frun.report_view import report_view

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    with console.capture() as text:
        console.print(report_view(made))
    click.echo(text.get(), nl=False)
