"""Owns `frun inject-fault`: asks, has the fault done, shows the incident to its end, prints its table.

Which faults there are, who is hit and what came of it is said in `drills`.
"""

import asyncio
import json
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from frun.errors import UsageError
from frun.finding import CONNECT_S, Target, job_parameters, open_store, read_job, target_of
from frun.protocol.faults import Place

if TYPE_CHECKING:
    from frun.drills.operator import Operator
    from frun.drills.targets import Selection, Victim
    from frun.drills.verdict import Verdict
    from frun.protocol.faults import Fault

SCHEMA = 1
_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def _list_kinds(ctx: click.Context, param: click.Parameter, given: bool) -> None:
    if not given or ctx.resilient_parsing:
        return
    from frun.drills.catalogue import CATALOGUE, spelled

    formatter = click.HelpFormatter(width=100)
    formatter.write_dl([(spelled(kind), entry.text) for kind, entry in CATALOGUE.items()])
    click.echo(formatter.getvalue(), nl=False)
    ctx.exit(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wish:
    """What was typed."""

    fault: "Fault"
    selection: "Selection"
    count: int
    every_s: float
    timeout_s: float
    seed: int | None
    yes: bool
    as_json: bool


@click.command(
    "inject-fault",
    help="Break a job that was started with --allow-drills, and follow it to the end of the"
    " incident. Without --rank, --host or --leader a worker is drawn. Ends with 0 if the job goes on.",
    context_settings=_SETTINGS,
)
@click.argument("kind")
@job_parameters
@click.option("--rank", metavar="R", type=click.IntRange(min=0), help="The worker of this rank.")
@click.option("--host", metavar="H", help="On this host: its id or name.")
@click.option("--leader", is_flag=True, help="On the leader's host.")
@click.option("--random", "anyone", is_flag=True, help="Anywhere; the same as nothing of these.")
@click.option(
    "--at-step", metavar="N", type=click.IntRange(min=0), help="When N updates are complete."
)
@click.option(
    "--phase",
    type=click.Choice([place.value for place in Place]),
    help="When the worker is in this part of a step, or of a recovery.",
)
@click.option(
    "--duration", metavar="S", type=click.FloatRange(min=0.0), default=0.0, help="It ends after S."
)
@click.option("--count", metavar="N", type=click.IntRange(min=1), default=1, help="Do it N times.")
@click.option(
    "--every",
    metavar="S",
    type=click.FloatRange(min=0.0),
    default=0.0,
    help="With --count: begin every S seconds, at the earliest when the last one is over.",
)
@click.option(
    "--timeout",
    metavar="S",
    type=click.FloatRange(min=0.0),
    default=120.0,
    help="Wait at most S seconds for the end of an incident [120].",
)
@click.option("--seed", metavar="N", type=int, help="Draw the same victims again.")
@click.option("--yes", is_flag=True, help="Do not ask first.")
@click.option("as_json", "--json", is_flag=True, help="Print one JSON document at the end.")
@click.option(
    "--list", is_flag=True, is_eager=True, expose_value=False, callback=_list_kinds,
    help="Explain the kinds of faults.",
)  # fmt: skip
@click.pass_context
def inject_fault(ctx: click.Context, /, kind: str, **given: Any) -> int:
    """Check what was typed, then break the job and follow it."""
    wish = _wish(kind, given)
    target = target_of(ctx, given, f"frun inject-fault {kind}")
    try:
        return asyncio.run(_inject(target, wish))
    except KeyboardInterrupt:
        click.echo("frun: interrupted; what has not happened yet does not happen", err=True)
        return 1


def _wish(kind: str, given: Mapping[str, Any]) -> _Wish:
    from frun.drills import catalogue
    from frun.drills.targets import Selection

    rank, host, leader = given["rank"], given["host"], given["leader"]
    if sum((rank is not None, host is not None, leader, given["anyone"])) > 1:
        raise UsageError("--rank, --host, --leader and --random exclude each other: give one")
    return _Wish(
        fault=catalogue.fault(
            kind,
            duration_s=given["duration"],
            at_step=-1 if given["at_step"] is None else given["at_step"],
            place=Place(given["phase"]) if given["phase"] else None,
        ),
        selection=Selection(rank=rank, host=host, leader=leader),
        count=given["count"],
        every_s=given["every"],
        timeout_s=given["timeout"],
        seed=given["seed"],
        yes=given["yes"],
        as_json=given["as_json"],
    )


async def _inject(target: Target, wish: _Wish) -> int:
    from frun.clock import SystemClock
    from frun.drills.catalogue import LIVES
    from frun.drills.operator import Operator

    store = open_store(target)
    try:
        await store.connect(CONNECT_S)
        job_id, _ = await read_job(store, target)
        say = _say_nothing if wish.as_json else click.echo
        async with Operator(store, job_id, SystemClock(), say) as operator:
            verdicts = await _repeat(operator, job_id, wish)
    finally:
        await store.close()
    if wish.as_json:
        rows = [_row(wish.fault, victim, verdict) for victim, verdict in verdicts]
        document = {"schema": SCHEMA, "job_id": job_id, "faults": rows}
        click.echo(json.dumps(document, ensure_ascii=False))
    return 0 if all(verdict.outcome in LIVES for _, verdict in verdicts) else 1


async def _repeat(operator: "Operator", job_id: str, wish: _Wish) -> "list[tuple[Victim, Verdict]]":
    """Do the fault as often as was asked for, or until the job is over."""
    draw = random.Random(wish.seed)
    loop = asyncio.get_running_loop()
    verdicts: list[tuple[Victim, Verdict]] = []
    while True:
        begun = loop.time()
        victim = operator.choose(wish.fault, wish.selection, draw)
        if not (wish.yes or verdicts):
            _ask(job_id, wish, victim)
        verdict = await operator.inject(wish.fault, victim, wish.timeout_s)
        verdicts.append((victim, verdict))
        if not wish.as_json:
            _show(wish.fault, victim, verdict)
        if len(verdicts) == wish.count or verdict.outcome.is_end:
            return verdicts
        await asyncio.sleep(max(0.0, begun + wish.every_s - loop.time()))


def _ask(job_id: str, wish: _Wish, victim: "Victim") -> None:
    """Have a person agree. Raises UsageError if there is none, Exit if the answer is no."""
    if not sys.stdin.isatty():
        raise UsageError("nobody is there to be asked: add --yes")
    times = "" if wish.count == 1 else f", {wish.count} times, the others drawn in the same way"
    if not click.confirm(f"job {job_id}: {wish.fault} of {victim}{times}?", err=True):
        raise click.exceptions.Exit(1)


def _say_nothing(line: str) -> None:
    pass


def _row(fault: "Fault", victim: "Victim", verdict: "Verdict") -> dict[str, Any]:
    return {
        "fault": str(fault),
        "host": victim.host,
        "rank": victim.rank if victim.rank >= 0 else None,
        "outcome": verdict.outcome.value,
        "text": verdict.text,
        "incident": verdict.incident,
    }


def _show(fault: "Fault", victim: "Victim", verdict: "Verdict") -> None:
    """Print how it ended, and the times of the incident."""
    from rich.console import Console

    from frun.console import incidents_view

    click.echo(f"{fault} of {victim}: {verdict.outcome.value}: {verdict.text}")
    if verdict.incident is not None:
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
        with console.capture() as text:
            console.print(incidents_view([verdict.incident]))
        click.echo(text.get(), nl=False)
