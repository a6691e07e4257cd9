"""Owns `frun plan`: rates and costs, given or measured in a job, put into the formulas of `account.plan`."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

from frun.account.plan import (
    CostModel,
    daly_s,
    ettr_in_place,
    ettr_of_checkpoints,
    saxena_s,
    spares,
    state_survives,
    young_s,
)
from frun.account.summary import Account
from frun.account.timeline import Bucket
from frun.account.words import duration
from frun.errors import UsageError
from frun.finding import job_parameters
from frun.report_cli import account_of

SCHEMA = 1
DAY_S = 86_400.0
RESTART_S = 600.0
"""Without frun, when nothing better is known: NCCL's own time-out, after which a lost rank is noticed."""
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": DAY_S}
_DURATION = re.compile(r"([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*(s|m|min|h|d|)", re.IGNORECASE)
GIVEN, MEASURED, ASSUMED = "given", "measured", "assumed"


class Duration(click.ParamType[float]):
    """A time: 90, 90s, 1.5min, 3.09h, 54d."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return seconds, more than 0."""
        if isinstance(value, float):
            return value
        match = _DURATION.fullmatch(str(value).strip())
        seconds = float(match[1]) * _UNITS[match[2].lower()] if match is not None else 0.0
        if not 0 < seconds < math.inf:
            self.fail(f"{value!r} is no time of more than 0: 90s, 1.5min, 3.09h or 54d", param, ctx)
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number and where it comes from."""

    value: float
    source: str


@click.command(
    "plan",
    help="Say what faults will cost and how to answer them: the interval between checkpoints, the"
    " effective training time to expect with and without recovery in place, spare hosts. Rates and"
    " costs are given, or measured in JOB (live, or ended on this machine) or in --log-dir. Times are"
    " seconds, or have a unit: 90s, 1.5min, 3.09h, 54d.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@job_parameters
@click.option("log_dirs", "--log-dir", "--log_dir", metavar="DIR", multiple=True,
              help="Measure in the job whose logs are here.")  # fmt: skip
@click.option("--mtbf", type=Duration(), help="Time between faults of the whole job.")
@click.option("--host-mtbf", type=Duration(), help="The same of one host; with --hosts.")
@click.option("--hosts", type=click.IntRange(min=1), help="Hosts of the job.")
@click.option("--recovery", type=Duration(), help="What one fault costs with frun, all in all.")
@click.option("--restart", type=Duration(),
              help=f"Without frun: detection and restart [{RESTART_S:g} s].")  # fmt: skip
@click.option("--checkpoint", type=Duration(), help="How long one checkpoint holds training.")
@click.option("--interval", type=Duration(), help="Time between checkpoints [the best one].")
@click.option("--unrecovered", type=click.FloatRange(0.0, 1.0),
              help="Share of faults after which no replica is left [0].")  # fmt: skip
@click.option("--length", type=Duration(), default=30 * DAY_S, help="Length of the job [30d].")
@click.option("--refill", type=Duration(), default=DAY_S,
              help="Time until a used spare is replaced [1d].")  # fmt: skip
@click.option("--replicas", type=click.IntRange(min=2), help="Hosts that hold the same state.")
@click.option("as_json", "--json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def plan(ctx: click.Context, /, *, log_dirs: tuple[str, ...], as_json: bool, **given: Any) -> int:
    """Put the figures together and print what follows from them."""
    measured = None
    if log_dirs or given["job"] or given["job_id"]:
        measured = account_of(ctx, log_dirs, given)
    document = planned(figures(given, measured), given)
    click.echo(json.dumps(document) if as_json else "\n".join(_lines(document)))
    return 0


def figures(given: Mapping[str, Any], measured: Account | None) -> dict[str, Figure]:
    """Return every rate and cost with its source. Raises UsageError, naming the flag of a missing one."""
    found: dict[str, Figure] = {}
    for name in ("mtbf", "recovery", "restart", "checkpoint", "unrecovered"):
        if given[name] is not None:
            found[name] = Figure(value=float(given[name]), source=GIVEN)
    if given["host_mtbf"] is not None:
        if given["hosts"] is None:
            raise UsageError("--host-mtbf needs --hosts: the job's rate is that of all its hosts")
        if "mtbf" in found:
            raise UsageError("--mtbf and --host-mtbf both give the rate of faults: give one")
        found["mtbf"] = Figure(value=given["host_mtbf"] / given["hosts"], source=GIVEN)
    if measured is not None:
        found = {**_measured(measured), **found}
    found.setdefault("restart", Figure(value=RESTART_S, source=ASSUMED))
    found.setdefault("unrecovered", Figure(value=0.0, source=ASSUMED))
    for name, what in (
        ("mtbf", "the time between faults: --mtbf, or --host-mtbf and --hosts"),
        ("recovery", "what a fault costs with frun: --recovery"),
        ("checkpoint", "how long a checkpoint takes: --checkpoint"),
    ):
        if name not in found:
            where = "was not seen in this job" if measured is not None else "is not known"
            raise UsageError(f"{name} {where}, give {what}; or name a JOB in which it happened")
    return found


def _measured(account: Account) -> dict[str, Figure]:
    """Return what a job tells of its rates and costs."""
    found: dict[str, float] = {}
    # A host that joins makes a generation, too, and is no fault.
    faults = [fault for fault in account.faults if fault.record["kind"] != "membership"]
    if faults:
        found["mtbf"] = account.wall_us / len(faults) / 1_000_000
        found["recovery"] = sum(fault.total_us for fault in faults) / len(faults) / 1_000_000
        again = sum(fault.record["action"] == "restart-all" for fault in faults)
        found["unrecovered"] = again / len(faults)
    spans = account.story.checkpoints
    if spans:
        found["checkpoint"] = account.buckets[Bucket.CHECKPOINT] / len(spans) / 1_000_000
    return {name: Figure(value=value, source=MEASURED) for name, value in found.items() if value}


def planned(found: Mapping[str, Figure], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `frun plan --json` prints."""
    mtbf, checkpoint = found["mtbf"].value, found["checkpoint"].value
    restart, recovery = found["restart"].value, found["recovery"].value
    unrecovered, length = found["unrecovered"].value, given["length"]
    model = CostModel(
        duration_s=length, faults=length / mtbf, recovery_s=restart, checkpoint_s=checkpoint
    )
    # Only faults that find no replica need a checkpoint.
    rare = mtbf / unrecovered if unrecovered else None
    without_s = given["interval"] or daly_s(mtbf, checkpoint)
    with_s = given["interval"] or (None if rare is None else daly_s(rare, checkpoint))
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "figures": {
            name: {"value": figure.value, "source": figure.source}
            for name, figure in sorted(found.items())
        },
        "length_s": length,
        "faults": model.faults,
        "without_frun": {
            "young_s": young_s(mtbf, checkpoint),
            "daly_s": daly_s(mtbf, checkpoint),
            "saxena_s": saxena_s(mtbf, checkpoint, restart),
            "interval_s": without_s,
            "cost_s": model.cost_s(without_s),
            "least_cost_s": model.least_cost_s,
            "ettr": ettr_of_checkpoints(1 / mtbf, restart, checkpoint, without_s),
        },
        "with_frun": {
            "interval_s": with_s,
            "cost_s": model.faults * recovery,
            "ettr": ettr_in_place(
                1 / mtbf,
                recovery,
                unrecovered=unrecovered,
                recovery_s=restart,
                checkpoint_s=checkpoint,
                interval_s=with_s or length,
            ),
        },
        "spares": None,
        "state_survives": None,
    }
    if given["hosts"] is not None:
        probability = -math.expm1(-given["refill"] / (mtbf * given["hosts"]))
        document["spares"] = {
            "hosts": given["hosts"],
            "refill_s": given["refill"],
            "host_failure_probability": probability,
            "count": spares(given["hosts"], probability),
        }
        if given["replicas"] is not None:
            document["state_survives"] = _survival(given["hosts"], given["replicas"])
    elif given["replicas"] is not None:
        raise UsageError("--replicas needs --hosts")
    return document


def _survival(hosts: int, replicas: int) -> dict[str, float]:
    if hosts % replicas:
        raise UsageError(f"--hosts {hosts} is no multiple of --replicas {replicas}")
    return {
        str(lost): state_survives(hosts, replicas, lost) for lost in range(2, min(5, hosts) + 1)
    }


def _lines(document: Mapping[str, Any]) -> list[str]:
    """Return the document for people."""
    lines = ["from"]
    names = {
        "mtbf": "time between faults",
        "recovery": "a fault costs with frun",
        "restart": "detection and restart without frun",
        "checkpoint": "a checkpoint holds training for",
    }
    for name, words in names.items():
        figure = document["figures"][name]
        lines.append(f"  {words:<36} {_time(figure['value']):>14}  {figure['source']}")
    share = document["figures"]["unrecovered"]
    lines.append(
        f"  {'faults without a replica left':<36} {share['value']:>14.1%}  {share['source']}"
    )
    plain, ours = document["without_frun"], document["with_frun"]
    length, faults = document["length_s"], document["faults"]
    interval = "none needed" if ours["interval_s"] is None else _time(ours["interval_s"])
    lines += [
        f"expected in {_time(length)}, with {faults:.1f} faults"
        + f"{'without frun':>20} {'with frun':>14}",
        f"  {'checkpoint every':<36} {_time(plain['interval_s']):>14} {interval:>14}",
        f"  {'effective training time':<36} {plain['ettr']:>14.2%} {ours['ettr']:>14.2%}",
        f"  {'time lost (cost model of the paper)':<36} {_within(plain['cost_s'], length):>14}"
        f" {_within(ours['cost_s'], length):>14}",
        f"best interval without frun: Young {_time(plain['young_s'])}, Daly {_time(plain['daly_s'])},"
        f" Saxena {_time(plain['saxena_s'])}",
    ]
    if document["spares"] is not None:
        found = document["spares"]
        lines.append(
            f"spares that are enough 99 times of 100: {found['count']} ({found['hosts']} hosts, each"
            f" fails with {found['host_failure_probability']:.3%} in {_time(found['refill_s'])})"
        )
    for lost, chance in (document["state_survives"] or {}).items():
        lines.append(f"a replica of everything is left when {lost} hosts go at once: {chance:.4%}")
    return lines


def _within(cost_s: float, length_s: float) -> str:
    return _time(cost_s) if cost_s < length_s else "all of it"


def _time(seconds: float) -> str:
    return duration(round(seconds * 1_000_000))
