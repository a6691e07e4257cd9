"""Owns `frun doctor`: the flags of `frun run`, looked at instead of run."""

import asyncio
import json
from dataclasses import asdict
from typing import Any

import click

from frun.cli import RunCommand, configured, inherited, run_parameters
from frun.clock import SystemClock
from frun.config import LaunchConfig
from frun.devices import loading
from frun.doctor import checks, cluster, host, patterns, timeouts
from frun.doctor.findings import Finding, Level, failed, note, warning

SCHEMA = 1
_STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.FAILURE: "red"}
_HELP = """Check this host and its cluster before a job: names, address, etcd, ports, limits, devices,
and whether the time-outs go together. Takes the flags that the job will have; SCRIPT may be left out.
Changes nothing. Ends with 1 if the job could not run so."""


@click.pass_context
def _doctor(
    ctx: click.Context,
    /,
    script: str | None,
    args: tuple[str, ...],
    *,
    as_json: bool,
    **options: object,
) -> int:
    if options.pop("help"):
        click.echo(ctx.get_help())
        return 0
    options.pop("version")
    config = configured(options, script, args)
    loading.refuse_unknown(config.workers.device_checks)
    findings, waits = asyncio.run(_examine(config, show=not as_json))
    if as_json:
        click.echo(json.dumps(_document(findings, waits)))
    return 1 if failed(findings) else 0


async def _examine(
    config: LaunchConfig, *, show: bool
) -> tuple[list[Finding], list[timeouts.Wait]]:
    """Check all; show each finding as soon as it is there."""
    findings: list[Finding] = []

    def take(finding: Finding) -> None:
        findings.append(finding)
        if show:
            _print(finding)

    for remark in config.notes:
        take((warning if remark.warning else note)("flags", remark.text))
    listens = await cluster.hosts_endpoint(config.rendezvous)
    looking = asyncio.create_task(
        asyncio.to_thread(host.look, config, inherited(), listens=listens)
    )
    several = config.job.max_hosts > 1
    async for finding in cluster.check(config.rendezvous, SystemClock(), several_hosts=several):
        take(finding)
    facts = await looking
    for finding in host.judge(facts, config):
        take(finding)
    polled = await asyncio.to_thread(checks.look, config, inherited(), facts.log_folder)
    for finding in checks.judge(polled, config):
        take(finding)
    if config.workers.fault_patterns is not None:
        take(patterns.check(config.workers.fault_patterns))
    waits = timeouts.waits(config)
    if show:
        click.echo("time-outs, the shortest first:")
        for wait in waits:
            click.echo(f"  {wait.seconds:>8g} s  {wait.name:<40} {wait.bounds}")
    for finding in timeouts.contradictions(config):
        take(finding)
    return findings, waits


def _print(finding: Finding) -> None:
    level = click.style(f"{finding.level.value:<8}", fg=_STYLES[finding.level])
    click.echo(f"{level} {finding.check:<14} {finding.text}")


def _document(findings: list[Finding], waits: list[timeouts.Wait]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "ok": not failed(findings),
        "findings": [asdict(finding) for finding in findings],
        "timeouts": [asdict(wait) for wait in waits],
    }


class DoctorCommand(RunCommand):
    """The flags of a job behind those of the look at it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take --json away, which no job has, from the front."""
        as_json = args[:1] == ["--json"]
        rest = super().parse_args(ctx, args[1:] if as_json else args)
        ctx.params["as_json"] = as_json
        return rest

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write how to call it."""
        formatter.write_usage("frun doctor", "[--json] [FLAGS OF THE JOB] [SCRIPT]")


doctor = DoctorCommand(
    name="doctor",
    callback=_doctor,
    params=run_parameters(),
    help=_HELP,
    add_help_option=False,
    context_settings={"allow_interspersed_args": False, "max_content_width": 100},
)
