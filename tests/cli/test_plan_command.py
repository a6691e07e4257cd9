"""`frun plan` as a command: figures from flags or from a job, and what follows."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from frun.cli import COMMANDS
from frun.plan_cli import plan
from tests.account.build import END, FAULT, START, closed, first, line, restored

LLAMA3 = ("--mtbf", "3.09308h", "--checkpoint", "40", "--recovery", "147.5")


def answer(*args: str) -> dict[str, Any]:
    """Return the document it prints."""
    done = CliRunner().invoke(plan, [*args, "--json"])
    assert done.exception is None, (done.output, done.exception)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_it_is_a_command() -> None:
    """`frun plan` is this."""
    assert COMMANDS["plan"] == ("frun.plan_cli", "plan")


def test_from_flags() -> None:
    """Llama 3's rate: checkpoints every quarter of an hour without frun, none with it."""
    document = answer(*LLAMA3, "--hosts", "512", "--refill", "1d", "--replicas", "2")
    assert document["schema"] == 1
    assert document["figures"]["restart"] == {"value": 600.0, "source": "assumed"}
    assert document["without_frun"]["young_s"] == pytest.approx(943.83, abs=0.1)
    assert document["without_frun"]["ettr"] == pytest.approx(0.8653, abs=1e-4)
    assert document["with_frun"]["interval_s"] is None
    assert document["with_frun"]["ettr"] == pytest.approx(0.98675, abs=1e-5)
    assert document["spares"]["count"] == 15
    assert document["state_survives"]["2"] == pytest.approx(1 - 1 / 511)


def test_faults_without_a_replica_need_checkpoints_all_the_same() -> None:
    """One in a hundred: ten times as seldom as without frun."""
    document = answer(*LLAMA3, "--unrecovered", "0.01")
    ratio = document["with_frun"]["interval_s"] / document["without_frun"]["interval_s"]
    assert ratio == pytest.approx(10, rel=0.05)
    assert document["without_frun"]["ettr"] < document["with_frun"]["ettr"] < 0.98675


def test_measured_in_a_job(tmp_path: Path) -> None:
    """Rate and recovery are what the job had; a flag says otherwise."""
    story = (
        *START, restored(107.0, 1), first(108.0, 1, 1), *FAULT, restored(123.0, 2, step=12),
        first(124.0, 2, 13), closed(124.1, 2, 0.5),
        (130.0, "worker_phase_ended", 2, {"rank": 0, "phase": "checkpoint", "took_s": 2.0}), *END,
    )  # fmt: skip
    (tmp_path / "j_1").mkdir()
    text = "\n".join(line("a", said) for said in story)
    (tmp_path / "j_1" / "events.jsonl").write_text(text)
    figures = answer("--log-dir", str(tmp_path))["figures"]
    assert figures["mtbf"] == {"value": 41.0, "source": "measured"}
    assert figures["recovery"] == {"value": 4.0, "source": "measured"}
    assert figures["checkpoint"] == {"value": 2.0, "source": "measured"}
    figures = answer("--log-dir", str(tmp_path), "--mtbf", "3h")["figures"]
    assert figures["mtbf"] == {"value": 10_800.0, "source": "given"}


def test_for_people() -> None:
    """A dozen lines with every figure's source."""
    done = CliRunner().invoke(plan, [*LLAMA3, "--hosts", "8"])
    assert done.exit_code == 0
    assert "given" in done.output
    assert "assumed" in done.output
    assert "none needed" in done.output
    assert "spares that are enough 99 times of 100" in done.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "mtbf is not known, give the time between faults: --mtbf"),
        (("--mtbf", "3h"), "recovery is not known"),
        (("--mtbf", "0"), "'0' is no time of more than 0"),
        (("--mtbf", "1e400"), "is no time"),
        (("--host-mtbf", "3d"), "--host-mtbf needs --hosts"),
        ((*LLAMA3, "--host-mtbf", "3d", "--hosts", "2"), "give one"),
        ((*LLAMA3, "--replicas", "2"), "--replicas needs --hosts"),
        ((*LLAMA3, "--hosts", "3", "--replicas", "2"), "is no multiple"),
    ],
)
def test_refusals_name_the_flag(args: tuple[str, ...], message: str) -> None:
    """What is missing or makes no sense is one line."""
    done = CliRunner().invoke(plan, list(args))
    text = str(done.exception) if done.exit_code == 1 else done.output
    assert message in text
