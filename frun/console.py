"""Owns how a status document looks on a terminal.

What is in it is made in `status`; an agent's own lines belong to the agent.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_ROWS = 64
"""Workers shown one by one; in a larger job a host is one row, and only failures are shown apart."""
_INCIDENTS = 5
"""Recoveries shown: the last ones."""
_STATE_STYLES = {
    "running": "green",
    "succeeded": "green",
    "failed": "bold red",
    "starting": "yellow",
    "unknown": "yellow",
    "stopped": "dim",
}
_PHASE_STYLES = {"run": "green", "done": "green", "failed": "bold red"}
_ROLE_STYLES = {"lost": "bold red", "spare": "dim"}
_SEVERITY_STYLES = {"warning": "yellow", "fault": "bold red"}
_FINDINGS = 10


def status_view(document: Mapping[str, Any], note: str = "") -> RenderableType:
    """Return the picture of a status document; `note` is said below it."""
    phase = document["phase"]
    head = Text.assemble(
        ("job ", "dim"),
        (document["job_id"], "bold"),
        ("  generation ", "dim"),
        str(document["generation"]),
        ("  phase ", "dim"),
        (phase, _PHASE_STYLES.get(phase, "yellow")),
        ("  ranks ", "dim"),
        str(document["world_size"]),
        ("  restarts ", "dim"),
        _restarts(document),
        ("  leader ", "dim"),
        document["leader"] or "none",
        overflow="fold",
    )
    why = Text.assemble(("why  ", "dim"), document["reason"], overflow="fold")
    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False)
    for name in ("host", "address", "role"):
        table.add_column(name, overflow="fold")
    for name in ("rank", "local", "pid"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("since", justify="right", no_wrap=True)
    table.add_column("score", justify="right", no_wrap=True)
    table.add_column("exit", overflow="fold")
    for row in status_rows(document):
        *cells, state, since, score, left = row
        table.add_row(
            *cells[:2],
            Text(cells[2], style=_ROLE_STYLES.get(cells[2], "")),
            *cells[3:],
            Text(state, style=_STATE_STYLES.get(state, "")),
            since,
            score,
            Text(left),
        )
    parts: list[RenderableType] = [head, why, table, *_finding_lines(document["findings"])]
    if document["incidents"]:
        parts.append(incidents_view(document["incidents"][-_INCIDENTS:]))
    if note:
        parts.append(Text(note, style="yellow"))
    return Group(*parts)


def _finding_lines(found: Sequence[Mapping[str, Any]]) -> list[Text]:
    lines = [
        Text.assemble(
            (f"{one['severity']}  ", _SEVERITY_STYLES[one["severity"]]),
            f"{one['host']}: {one['text']}",
            overflow="fold",
        )
        for one in found[:_FINDINGS]
    ]
    if len(found) > _FINDINGS:
        lines.append(Text(f"and {len(found) - _FINDINGS} more findings: frun status --json"))
    return lines


def incidents_view(incidents: Sequence[Mapping[str, Any]]) -> Table:
    """Return the last recoveries, the newest at the bottom; durations in milliseconds."""
    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False, title_justify="left")
    table.add_column("generation", justify="right")
    table.add_column("incident", overflow="fold")
    table.add_column("action")
    table.add_column("class", no_wrap=True)
    for name in ("detect", "pause", "respawn", "rebuild", "copy", "total ms", "lost", "at step"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in incidents:
        phases = ("detect_s", "pause_s", "respawn_s", "rebuild_s", "copy_s", "total_s")
        table.add_row(
            str(one["generation"]),
            one["cause"],
            one["action"],
            one["fault_class"] or "",
            *(f"{one[phase] * 1000:.0f}" for phase in phases),
            str(one["steps_lost"]),
            str(one["resumed_at_step"]),
        )
    return table


def status_rows(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the cells of the table: host, address, role, rank, local, pid, state, since, score,
    exit.

    `since` is the generation in which the process was started, `score` how many times as long as its peers a
    rank takes for its own part of a step; of several ranks the highest one.
    """
    hosts = document["hosts"]
    whole = sum(len(host["workers"]) for host in hosts) <= _ROWS
    rows: list[tuple[str, ...]] = []
    for host in hosts:
        workers = host["workers"]
        shown = workers if whole else [w for w in workers if w["state"] == "failed"]
        first = (host["host"] or "(vacant)", host["address"], host["role"])
        if not shown or not whole:
            rows.append(
                (*first, _span(workers), "", "", _counts(workers), "", _highest(workers), "")
            )
            first = ("", "", "")
        for worker in shown:
            rows.append((*first, *_cells(worker)))
            first = ("", "", "")
    return rows


def _cells(worker: Mapping[str, Any]) -> tuple[str, ...]:
    values = (worker[name] for name in ("rank", "local_rank", "pid", "state", "incarnation"))
    note = "differs from its replicas" if worker["diverged"] else ""
    cells = ("-" if v is None else str(v) for v in values)
    return (*cells, _highest([worker]), worker["exit"] or note)


def _highest(workers: Sequence[Mapping[str, Any]]) -> str:
    scores = [worker["score"] for worker in workers if worker["score"] is not None]
    return f"{max(scores):.1f}x" if scores else ""


def _span(workers: Sequence[Mapping[str, Any]]) -> str:
    return f"{workers[0]['rank']}-{workers[-1]['rank']}" if workers else "-"


def _counts(workers: Sequence[Mapping[str, Any]]) -> str:
    states = [worker["state"] for worker in workers]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "-"


def _restarts(document: Mapping[str, Any]) -> str:
    most = document["max_restarts"]
    return f"{document['restarts']}" + ("" if most is None else f" of {most}")
