"""Owns `frun drill`: reads a campaign, asks, does one fault after the other, says what came of each.

What is drawn is said in `drills.campaign`, doing a fault and judging it is `drills`'s.
"""

import asyncio
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import yaml

from frun.clock import SystemClock
from frun.drills import campaign as campaigns
from frun.drills import catalogue
from frun.drills.campaign import Campaign, Planned
from frun.drills.catalogue import Outcome
from frun.drills.operator import Operator
from frun.drills.verdict import Verdict
from frun.errors import UsageError
from frun.finding import CONNECT_S, Target, job_parameters, open_store, read_job, target_of
from frun.protocol.faults import FaultKind

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One fault that was done, and what came of it."""

    number: int
    at_s: float
    """Since the beginning of the campaign."""
    planned: Planned
    victim: str
    verdict: Verdict

    @property
    def fits(self) -> bool:
        """Whether that was expected."""
        return self.verdict.outcome in self.planned.kind.expect

    def line(self) -> str:
        """Return it for people."""
        expect = " or ".join(sorted(self.planned.kind.expect))
        cause = f" ({self.planned.kind.cause})" if self.planned.kind.cause else ""
        text = f"{self.number:3}  {self.planned.fault} of {self.victim}{cause}: "
        text += f"{self.verdict.outcome.value}: {self.verdict.text}"
        return text if self.fits else f"{text}  UNEXPECTED, not {expect}"

    def document(self) -> dict[str, Any]:
        """Return it for programs."""
        return {
            "number": self.number,
            "at_s": round(self.at_s, 3),
            "fault": str(self.planned.fault),
            "duration_s": self.planned.fault.duration_s,
            "cause": self.planned.kind.cause,
            "victim": self.victim,
            "outcome": self.verdict.outcome.value,
            "expected": sorted(self.planned.kind.expect),
            "as_expected": self.fits,
            "text": self.verdict.text,
            "incident": self.verdict.incident,
        }


@click.command(
    "drill",
    help="Break a job that was started with --allow-drills again and again, as CAMPAIGN says, a YAML"
    " file (configs/drills has some). Ends with 0 if every fault had an outcome that was expected.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.argument("campaign")
@job_parameters
@click.option("--seed", metavar="N", type=click.IntRange(min=0), help="Instead of the file's.")
@click.option("--faults", metavar="N", type=click.IntRange(min=1), help="Instead of the file's.")
@click.option("--without", metavar="KINDS", default="", help="Leave these out: a comma list.")
@click.option("--output", metavar="FILE", help="Write the JSON document into this file.")
@click.option("as_json", "--json", is_flag=True, help="Print it, and no rows.")
@click.option("--yes", is_flag=True, help="Do not ask first.")
@click.pass_context
def drill(ctx: click.Context, /, campaign: str, **given: Any) -> int:
    """Read the campaign, then do it."""
    found = campaigns.without(_read(campaign), _kinds(given["without"]))
    if given["seed"] is not None:
        found = replace(found, seed=given["seed"])
    if given["faults"] is not None:
        found = replace(found, faults=_as_many(found, given["faults"]))
    target = target_of(ctx, given, f"frun drill {campaign}")
    try:
        return asyncio.run(_drill(target, campaign, found, given))
    except KeyboardInterrupt:
        click.echo("frun: interrupted; what has not happened yet does not happen", err=True)
        return 1


def _read(path: str) -> Campaign:
    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"{path}: can not be read: {why}") from None
    except yaml.YAMLError as error:
        why = getattr(error, "problem", None) or "broken"
        raise UsageError(f"{path}: this is not YAML: {why}") from None
    try:
        return campaigns.read(document)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _kinds(text: str) -> frozenset[FaultKind]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in list(FaultKind):
            raise UsageError(f"--without: {name!r} is no kind of fault: {', '.join(FaultKind)}")
    return frozenset(FaultKind(name) for name in names)


def _as_many(campaign: Campaign, faults: int) -> int:
    listed = len(campaign.times or campaign.steps)
    if listed and faults > listed:
        raise UsageError(f"--faults: the campaign has times or steps for {listed}")
    return faults


async def _drill(target: Target, path: str, campaign: Campaign, given: dict[str, Any]) -> int:
    store = open_store(target)
    try:
        await store.connect(CONNECT_S)
        job_id, _ = await read_job(store, target)
        async with Operator(store, job_id, SystemClock(), lambda line: None) as operator:
            planned = campaigns.plan(campaign)
            if given["output"]:  # better refused now than after the last fault
                await asyncio.to_thread(_write, given["output"], "")
            if not given["yes"]:
                _ask(job_id, planned)
            rows = await _all(operator, campaign, planned, quiet=given["as_json"])
    finally:
        await store.close()
    missing = len(planned) - len(rows)
    fine = not missing and all(row.fits for row in rows)
    document = {
        "schema": SCHEMA,
        "job_id": job_id,
        "campaign": path,
        "seed": campaign.seed,
        "planned": len(planned),
        "as_expected": fine,
        "faults": [row.document() for row in rows],
    }
    text = json.dumps(document, ensure_ascii=False)
    if given["output"]:
        await asyncio.to_thread(_write, given["output"], text)
    if given["as_json"]:
        click.echo(text)
    else:
        fitting = sum(row.fits for row in rows)
        end = f"; the job was over before the other {missing}" if missing else ""
        click.echo(f"{fitting} of {len(rows)} faults ended as expected{end}")
    return 0 if fine else 1


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--output {path} can not be written: {error.strerror}") from None


def _ask(job_id: str, planned: Sequence[Planned]) -> None:
    """Have a person agree. Raises UsageError if there is none, Exit if the answer is no."""
    if not sys.stdin.isatty():
        raise UsageError("nobody is there to be asked: add --yes")
    kinds = [catalogue.spelled(each.fault.kind) for each in planned]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    if not click.confirm(f"job {job_id}: {len(planned)} faults ({counts})?", err=True):
        raise click.exceptions.Exit(1)


async def _all(
    operator: Operator, campaign: Campaign, planned: Sequence[Planned], *, quiet: bool
) -> list[_Row]:
    """Do the faults, one after the other, until the job is over."""
    draw = random.Random(campaign.seed)
    loop = asyncio.get_running_loop()
    begun = loop.time()
    rows: list[_Row] = []
    for number, each in enumerate(planned, 1):
        wait_s = each.pause_s if each.at_s is None else begun + each.at_s - loop.time()
        await asyncio.sleep(max(0.0, wait_s))
        at_s = loop.time() - begun
        victim, verdict = await _one(operator, each, draw, campaign.timeout_s)
        row = _Row(number=number, at_s=at_s, planned=each, victim=victim, verdict=verdict)
        rows.append(row)
        if not quiet:
            click.echo(row.line())
        if verdict.outcome.is_end:
            break
    return rows


async def _one(
    operator: Operator, planned: Planned, draw: random.Random, timeout_s: float
) -> tuple[str, Verdict]:
    """Do one fault; return who was hit and what came of it."""
    try:
        victim = operator.choose(planned.fault, planned.kind.selection, draw)
    except UsageError as error:
        return "nobody", Verdict(outcome=Outcome.REFUSED, text=str(error))
    return str(victim), await operator.inject(planned.fault, victim, timeout_s)
