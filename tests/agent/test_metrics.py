"""The agent's figures as Prometheus reads them, and the dashboard that shows them."""

import json
import re
import socket
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from frun import events
from frun.agent.metrics import RECOVERY, Metrics
from frun.errors import LaunchError, UsageError
from frun.event_sinks import Origin
from frun.introduction import sinks
from tests.cli.tools import configure

DASHBOARD = Path(__file__).parents[2] / "configs" / "grafana.json"
INCIDENT = events.IncidentClosed(
    id=2, cause="rank 1 failed", kind="process", ranks=(1,), hosts=("a",), action="replace-worker",
    detect_s=0.01, pause_s=0.02, respawn_s=0.02, rebuild_s=0.1, agree_s=0.02, copy_s=0.5,
    first_step_s=0.1, total_s=0.77, copied_bytes=1000, steps_lost=3, resumed_at_step=7,
)  # fmt: skip


def made() -> Metrics:
    """Return the metrics of one agent."""
    return Metrics(job="my/job", host="node-a", version="1", entry="train.py")


def served(metrics: Metrics) -> dict[str, float]:
    """Return all samples, read over HTTP, by name and labels."""
    port = metrics.serve(0, "127.0.0.1")
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    finally:
        metrics.close(1)
    return {
        sample.name + "".join(f" {k}={v}" for k, v in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_what_is_wrong_is_counted() -> None:
    """Findings that hold, by how bad they are."""
    metrics = made()
    warning: dict[str, Any] = {
        "check": "host",
        "severity": "warning",
        "fault_class": "host",
        "device": -1,
        "lasting": False,
        "reason": "",
    }
    for name, holds in (("memory", True), ("disk", True), ("memory", False)):
        metrics.emit(events.HealthChanged(name=name, holds=holds, **warning), generation=0)
    found = served(metrics)
    assert found["frun_health_findings severity=warning"] == 1
    assert found["frun_health_findings severity=fault"] == 0


def test_what_a_recovery_leaves_behind() -> None:
    """Gauges stand where the job does, counters and phases have the incident; the port is free again."""
    metrics = made()
    for generation, event in (
        (1, events.LeaderElected(peer="node-a")),
        (1, events.PhaseSeen(phase="run", reason="", world_size=4)),
        (1, events.WorkerStarted(rank=0, local_rank=0, pid=7)),
        (1, events.WorkerStarted(rank=1, local_rank=1, pid=8)),
        (1, events.GenerationStarted(group_rank=0, world_size=4, took_s=1.0)),
        (1, events.FirstStepCompleted(rank=0, step=1, took_s=0.1)),
        (1, events.WorkerExited(rank=1, local_rank=1, pid=8, state="failed", exit_code=-9)),
        (2, events.PhaseSeen(phase="recover", reason="", world_size=4)),
        (2, events.StoreLost(reason="x")),
        (2, events.LeaseLost(reason="x")),
        (2, events.StoreBack(outage_s=1.0)),
        (2, INCIDENT),
    ):
        metrics.emit(event, generation=generation)
    found = served(metrics)
    assert found["frun_info entry=train.py host=node-a job_id=my/job version=1"] == 1
    assert (found["frun_generation"], found["frun_world_size"], found["frun_workers"]) == (2, 4, 1)
    assert found["frun_phase phase=recover"] == 1
    assert found["frun_phase phase=run"] == 0
    assert (found["frun_training"], found["frun_step"], found["frun_leader"]) == (0, 1, 1)
    assert found["frun_worker_exits_total state=failed"] == 1
    assert found["frun_incidents_total action=replace-worker kind=process"] == 1
    assert (found["frun_steps_lost_total"], found["frun_copied_bytes_total"]) == (3, 1000)
    assert found["frun_store_reachable"] == found["frun_leases_lost_total"] == 1
    for phase in RECOVERY:
        assert found[f"frun_recovery_seconds_count phase={phase}"] == 1
    assert found["frun_recovery_seconds_sum phase=copy"] == 0.5
    assert not [each for each in threading.enumerate() if "serve_forever" in each.name]


def test_training_of_scripts_that_tell_of_steps_and_of_others() -> None:
    """Where first steps are told, only they begin training again; else the start of the workers does."""
    started = events.GenerationStarted(group_rank=0, world_size=1, took_s=1.0)
    restored = events.WorkerRestored(
        homes=1,
        rank=0,
        step=0,
        steps_lost=0,
        rebuild_s=0.0,
        agree_s=0.0,
        copy_s=0.0,
        copied_bytes=0,
    )
    seen = []
    metrics = made()
    for event in (
        started,
        events.PhaseSeen(phase="recover", reason="", world_size=1),
        started,
        restored,
        events.PhaseSeen(phase="recover", reason="", world_size=1),
        started,
        events.FirstStepCompleted(rank=0, step=1, took_s=0.1),
    ):
        metrics.emit(event, generation=1)
        seen.append(metrics.registry.get_sample_value("frun_training"))
    assert seen == [1, 0, 1, 1, 0, 0, 1]


def test_a_port_that_is_taken_is_one_line() -> None:
    """Two agents of one machine need two ports."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"--metrics-port {port} can not be served"):
            made().serve(port, "127.0.0.1")


def test_without_prometheus_client_the_flag_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The package is an extra."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "frun.agent.metrics")
    config = configure("--metrics-port=9100")
    origin = Origin(job="j", host="a", monotonic=lambda: 0.0, wall=lambda: 0.0)
    with pytest.raises(UsageError, match=r"pip install 'frun\[metrics\]'"):
        sinks(config, origin, "")


def expressions(node: Any) -> list[str]:
    """Return all PromQL of the dashboard."""
    if isinstance(node, dict):
        found = [
            text for key, text in node.items() if key in ("expr", "query") if isinstance(text, str)
        ]
        return found + [text for value in node.values() for text in expressions(value)]
    if isinstance(node, list):
        return [text for value in node for text in expressions(value)]
    return []


def test_the_dashboard_asks_for_what_there_is() -> None:
    """Every metric that a panel names exists, every one that exists is shown; panels don't overlap."""
    dashboard = json.loads(DASHBOARD.read_text())
    metrics = made()
    metrics.emit(INCIDENT, generation=2)
    known = {sample.name for family in metrics.registry.collect() for sample in family.samples}
    asked = {
        name for text in expressions(dashboard) for name in re.findall(r"\bfrun_[a-z_]+", text)
    }
    assert asked <= known
    shown = {re.sub(r"_(total|sum|count)$", "", name) for name in asked}
    there = {re.sub(r"_(total|sum|count|created|bucket)$", "", name) for name in known}
    assert shown == there
    cells = [
        (x, y)
        for panel in dashboard["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
