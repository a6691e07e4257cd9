"""Owns `frun status`: find the job, fetch its keys, show them once or for as long as they change.

What the keys mean is `status`'s business, how it looks `console`'s. Heavy imports wait until they are
needed: the answer should be there in a blink.
"""

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from frun.finding import (
    CONNECT_S,
    Target,
    job_parameters,
    open_store,
    read_job,
    target_of,
)

if TYPE_CHECKING:
    from frun.rendezvous.etcd import EtcdStore
    from frun.rendezvous.mirror import Mirror


@click.command(
    "status",
    help="Show the state of a job: its phase and why, hosts, workers, exits. Without JOB the only"
    " job known on this machine. Live on a terminal, until the job ends.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@job_parameters
@click.option("as_json", "--json", is_flag=True, help="Print one JSON document.")
@click.option("--once", is_flag=True, help="Print once, also on a terminal.")
@click.option(
    "--interval",
    metavar="S",
    type=click.FloatRange(min=0.0),
    default=0.2,
    help="Redraw at most every S seconds [0.2].",
)
@click.pass_context
def status(
    ctx: click.Context,
    /,
    *,
    as_json: bool,
    once: bool,
    interval: float,
    **given: str | None,
) -> int:
    """Find the job, then print it once or follow it."""
    target = target_of(ctx, given, "frun status")
    live = not (as_json or once) and sys.stdout.isatty()
    try:
        return asyncio.run(_show(target, as_json=as_json, live=live, interval_s=interval))
    except KeyboardInterrupt:
        return 0  # the usual way to leave a live table
    except BrokenPipeError:
        # `| head`: the reader has what it wanted. Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


async def _show(target: Target, *, as_json: bool, live: bool, interval_s: float) -> int:
    store = open_store(target)
    try:
        await store.connect(CONNECT_S)
        job_id, document = await read_job(store, target)
        if as_json:
            click.echo(json.dumps(document, ensure_ascii=False))
        elif live:
            await _follow(store, job_id, document, interval_s)
        else:
            _print(document)
    finally:
        await store.close()
    return 0


def _print(document: Mapping[str, Any]) -> None:
    from rich.console import Console

    from frun.console import status_view

    # A pipe has no width: long reasons and host names must not be folded for its reader.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    # Written by click: rich itself ends the process with 1 when the reader of a pipe has left.
    with console.capture() as text:
        console.print(status_view(document))
    click.echo(text.get(), nl=False)


async def _follow(
    store: "EtcdStore", job_id: str, document: dict[str, Any], interval_s: float
) -> None:
    """Redraw on every change until the job has ended; the last picture stays."""
    from rich.console import Console
    from rich.live import Live

    from frun.console import status_view
    from frun.protocol.keys import Keys
    from frun.rendezvous.mirror import Mirror
    from frun.status import is_final

    console = Console(highlight=False)
    async with Mirror(store, Keys(job_id).prefix) as mirror:
        version = 0
        with Live(status_view(document), console=console, auto_refresh=False) as live:
            while True:
                version = await mirror.wait_changed(version, None)
                latest, note = _latest(mirror, job_id, document)
                document = latest or document
                live.update(status_view(document, note), refresh=True)
                if latest is None or is_final(latest):
                    return
                await asyncio.sleep(interval_s)  # bounds the redraws; changes are not polled for


def _latest(
    mirror: "Mirror", job_id: str, before: dict[str, Any]
) -> tuple[dict[str, Any] | None, str]:
    """Return the newest status, None when the job has gone; and what is to be said below it."""
    from frun.status import is_final, status_document

    if not mirror.revision:
        return before, "" if mirror.error is None else f"etcd: {mirror.error}"
    items = {key: kv.value for key, kv in mirror.items.items()}
    document = status_document(job_id, items)
    if document is None:
        return None, "the job has ended" if is_final(before) else "the job is gone from etcd"
    note = "" if mirror.connected else f"etcd does not answer, last known state: {mirror.error}"
    return document, note
