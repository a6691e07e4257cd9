"""`frun report` as a program: what it finds of a job, and what it writes."""

import json
import os
import shutil
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from frun import registry
from frun.cli import COMMANDS
from frun.errors import FrunError
from frun.registry import JobEntry, conclude, current_place, ended_jobs, keep_events, register
from frun.report_cli import report
from tests.account.build import END, START, first, line, restored

STORY = (*START, restored(107.0, 1), first(108.0, 1, 1), *END)


def write(folder: Path, job: str = "j", host: str = "a", run: str = "r1", at_s: float = 0) -> Path:
    """Write the event log of one agent; return its file."""
    folder.mkdir(parents=True)
    path = folder / "events.jsonl"
    text = "".join(
        line(host, (at, name, generation, {**fields, **({"run": run} if "run" in fields else {})}),
             wall_s=1_700_000_000 + at_s, job=job) + "\n"
        for at, name, generation, fields in STORY
    )  # fmt: skip
    path.write_text(text)
    return path


def entry(job: str, log_folder: Path, started_at: float = 1.0) -> JobEntry:
    """Return the entry of an agent that is long gone."""
    return JobEntry(
        job_id=job,
        endpoints=("127.0.0.1:9",),
        host="a",
        pid=os.getpid(),
        pid_started=int(started_at),
        place=current_place(),
        started_at=started_at,
        log_folder=str(log_folder),
    )


def call(tmp_path: Path, *args: str) -> Result:
    """Call the command with a registry of its own."""
    return CliRunner().invoke(report, [*args, "--state-dir", str(tmp_path / "state")])


def answer(tmp_path: Path, *args: str) -> dict[str, Any]:
    """Return the document it prints."""
    done = call(tmp_path, *args, "--json")
    assert done.exception is None, done.exception
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def refusal(tmp_path: Path, *args: str) -> str:
    """Return why it refuses."""
    done = call(tmp_path, *args)
    assert isinstance(done.exception, FrunError), done.output
    assert "\n" not in str(done.exception)
    return str(done.exception)


def test_it_is_a_command() -> None:
    """`frun report` is this."""
    assert COMMANDS["report"] == ("frun.report_cli", "report")


def test_from_a_log_dir(tmp_path: Path) -> None:
    """A shared log dir has the folders of all hosts, and of other runs: the latest one is meant."""
    logs = tmp_path / "logs"
    write(logs / "j_1", host="a", run="old")
    write(logs / "j_2", host="a", run="new", at_s=9000)
    write(logs / "j_3", host="b", run="new", at_s=9000)
    write(logs / "other_4", job="other", host="c", run="x", at_s=1)
    document = answer(tmp_path, "--log-dir", str(logs))
    assert (document["job_id"], document["run"], document["schema"]) == ("j", "new", 1)
    assert [host["host"] for host in document["hosts"]] == ["a", "b"]
    assert sum(Decimal(repr(s)) for s in document["buckets_s"].values()) == 41
    assert answer(tmp_path, "other", "--log-dir", str(logs))["job_id"] == "other"
    single = answer(tmp_path, "--log-dir", str(logs / "j_1"))
    assert single["run"] == "old"
    assert "no event log of job 'x'" in refusal(tmp_path, "x", "--log-dir", str(logs))
    assert "is no folder" in refusal(tmp_path, "--log-dir", str(logs / "none"))


def test_of_a_job_that_ended_and_left_its_folder(tmp_path: Path) -> None:
    """Without anything the job that began last; by its id an earlier one; agents share a log dir."""
    state = str(tmp_path / "state")
    for number, job in enumerate(("first", "second"), 1):
        write(tmp_path / "logs" / f"{job}_x", job=job)
        conclude(register(state, entry(job, tmp_path / "logs" / f"{job}_x", float(number))))
    write(tmp_path / "logs" / "first_y", job="first", host="b")
    assert answer(tmp_path)["job_id"] == "second"
    hosts = answer(tmp_path, "first")["hosts"]
    assert [host["host"] for host in hosts] == ["a", "b"]
    shutil.rmtree(tmp_path / "logs" / "second_x")
    assert "its event log is gone" in refusal(tmp_path)
    assert "no job 'x'" in refusal(tmp_path, "x")


def test_of_a_job_whose_temporary_folder_went(tmp_path: Path) -> None:
    """The event log is kept beside the entry, the latest ones only."""
    state = str(tmp_path / "state")
    file = write(tmp_path / "temporary" / "j_x")
    for number in range(registry.KEPT_AGENTS + 5):
        kept = conclude(register(state, replace(entry(f"j{number}", file.parent), pid=number + 2)))
        assert kept is not None
        os.utime(kept, (number, number))
        keep_events(kept, str(file))
        os.utime(kept, (number, number))
    shutil.rmtree(tmp_path / "temporary")
    assert len(ended_jobs(state)) == registry.KEPT_AGENTS
    assert len(list((tmp_path / "state" / "ended").iterdir())) == 2 * registry.KEPT_AGENTS
    assert answer(tmp_path, "j54")["wall_s"] == 41.0
    assert "no job 'j4'" in refusal(tmp_path, "j4")


def test_kept_logs_are_bounded_in_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest go first, and the latest stays, whatever its size."""
    state = str(tmp_path / "state")
    file = write(tmp_path / "j_x")
    monkeypatch.setattr(registry, "KEPT_BYTES", 100)
    for number in (2, 3):
        keep_events(
            conclude(register(state, replace(entry(f"j{number}", file.parent), pid=number))),
            str(file),
        )
    assert [each.job_id for each in ended_jobs(state)] == ["j3"]


def test_files(tmp_path: Path) -> None:
    """--trace and --html write files beside the table; one that can't be written is one line."""
    logs = write(tmp_path / "logs" / "j_1").parent
    done = call(tmp_path, "--log-dir", str(logs), "--trace", str(tmp_path / "t.json"),
                "--html", str(tmp_path / "p.html"))  # fmt: skip
    assert done.exit_code == 0
    assert "productive" in done.output
    assert "wall time          41.000000 s" in done.output
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert (tmp_path / "p.html").read_text().startswith("<!doctype html>")
    text = refusal(tmp_path, "--log-dir", str(logs), "--html", str(tmp_path / "no" / "p.html"))
    assert "can not be written: No such file or directory" in text
