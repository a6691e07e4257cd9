"""Error files of any content, exits in words, and the summary."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frun.agent.failures import (
    MAX_TEXT,
    RecordedError,
    build_failure,
    describe_exit,
    failure_summary,
    read_error_file,
    write_agent_error_file,
    write_agent_exception,
)
from frun.protocol.records import Failure

OLD = {
    "message": {
        "message": "ValueError: bad",
        "extraInfo": {"py_callstack": "Traceback ...\nValueError: bad", "timestamp": "1700000000"},
    }
}


def failed(**changes: Any) -> Failure:
    values = {"rank": 5, "local_rank": 1, "host": "node-a", "pid": 77, "exit_code": 1, "order": 0}
    return build_failure(**{**values, **changes})


def written(path: Path, content: object) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_both_formats_are_read(tmp_path: Path) -> None:
    """The format that `@record` writes and the newer short one give message, stack and time."""
    assert read_error_file(written(tmp_path / "old", OLD)) == RecordedError(
        message="ValueError: bad",
        traceback="Traceback ...\nValueError: bad",
        timestamp_s=1700000000.0,
    )
    new = {"message": "boom", "timestamp": 12}
    assert read_error_file(written(tmp_path / "new", new)) == RecordedError(
        message="boom", timestamp_s=12.0
    )


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        json.dumps(OLD)[:-20],
        "[]",
        "null",
        "{}",
        '{"message": 3}',
        '{"message": {}}',
        '{"message": {"message": null, "extraInfo": []}}',
        "[" * 100_000,
        "\0\0\0",
    ],
)
def test_useless_files_are_as_good_as_none(tmp_path: Path, content: str) -> None:
    """A truncated, empty or foreign error file never makes the agent fail (S04)."""
    path = written(tmp_path / "error.json", content)
    assert read_error_file(path) is None
    failure = failed(error_file=path)
    assert failure.message == "ended with exit status 1"
    assert not failure.recorded
    write_agent_error_file(str(tmp_path / "agent"), failure, now=5.0, source=path)
    assert json.loads((tmp_path / "agent").read_text())["message"]["errorCode"] == 1


@pytest.mark.parametrize("timestamp", [None, "soon", [], True, "1e999999", {"a": 1}])
def test_odd_time_keeps_the_message(tmp_path: Path, timestamp: object) -> None:
    """A time that is none is left out, the message is still used."""
    document = {"message": {"message": "m", "extraInfo": {"timestamp": timestamp}}}
    recorded = read_error_file(written(tmp_path / "e", document))
    assert recorded is not None
    assert recorded.message == "m"


def test_things_that_are_no_file(tmp_path: Path) -> None:
    """A folder, a named pipe or nothing at the path is no error and does not block."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "none", Path(os.devnull)):
        assert read_error_file(str(path)) is None


@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda x: (
            st.lists(x, max_size=3)
            | st.dictionaries(st.sampled_from(["message", "extraInfo", "timestamp"]), x)
        ),
    )
)
def test_any_json_is_survived(tmp_path_factory: pytest.TempPathFactory, document: object) -> None:
    """Whatever JSON is in the file, reading gives a record or None."""
    path = tmp_path_factory.getbasetemp() / "any.json"
    recorded = read_error_file(written(path, json.dumps(document)))
    assert recorded is None or isinstance(recorded.message, str)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "exit status 0"),
        (7, "exit status 7"),
        (255, "exit status 255"),
        (-9, "SIGKILL (9)"),
        (-11, "SIGSEGV (11)"),
        (-40, "signal 40"),
        (-99, "signal 99"),
    ],
)
def test_exits_in_words(code: int, text: str) -> None:
    """Statuses and signals are named, unknown signals too."""
    assert describe_exit(code) == text


def test_real_record_decorator(tmp_path: Path) -> None:
    """What torch's own `@record` writes is read, with type, text and stack."""
    path = tmp_path / "error.json"
    script = """
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    raise ValueError("no such luck")
main()
"""
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(path)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True)
    failure = failed(error_file=str(path), exit_code=done.returncode)
    assert failure.recorded
    assert failure.message == "ValueError: no such luck"
    assert failure.traceback.startswith("Traceback (most recent call last):")
    assert failure.traceback.endswith("ValueError: no such luck\n")
    assert failure.log == str(path)
    target = tmp_path / "agent.json"
    write_agent_error_file(str(target), failure, now=5.0, source=str(path))
    copied = json.loads(target.read_text())
    assert copied["message"].pop("errorCode") == 1
    assert copied == json.loads(path.read_text())


def test_silent_death_is_written_for_the_agents_parent(tmp_path: Path) -> None:
    """A worker that recorded nothing still leaves facts in the agent's error file (R36)."""
    target = tmp_path / "agent.json"
    write_agent_error_file(str(target), failed(exit_code=-9), now=1700000000.9)
    message = json.loads(target.read_text())["message"]
    assert message["message"] == "rank 5 (local rank 1) on node-a, pid 77: SIGKILL (9)"
    assert message["errorCode"] == -9
    assert message["extraInfo"]["timestamp"] == "1700000000"


def test_agents_own_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The agent's own exception has the format of `@record`; an unwritable file is one warning."""
    target = tmp_path / "agent.json"
    write_agent_exception(str(target), RuntimeError("no port"), now=7.0)
    recorded = read_error_file(str(target))
    assert recorded is not None
    assert recorded.message == "RuntimeError: no port"
    write_agent_exception(str(tmp_path), RuntimeError("x"), now=7.0)
    write_agent_exception("/dev/full", RuntimeError("x"), now=7.0)
    assert [r.levelname for r in caplog.records] == ["WARNING", "WARNING"]


def test_summary_is_three_lines_when_nothing_more_is_known(tmp_path: Path) -> None:
    """What failed, what frun did, where the log is."""
    (tmp_path / "stdout.log").touch()
    text = failure_summary(
        entry="train.py",
        root=failed(exit_code=-9, log=str(tmp_path)),
        did="stopped the job, no restarts were left (--max-restarts 0)",
    )
    assert text == (
        "train.py failed: rank 5 (local rank 1) on node-a, pid 77: SIGKILL (9)\n"
        "frun stopped the job, no restarts were left (--max-restarts 0)\n"
        f"log: {tmp_path} on node-a\n"
    )


def test_an_empty_log_folder_is_not_named(tmp_path: Path) -> None:
    """A person is told how to keep a log rather than sent to an empty folder."""
    text = failure_summary(entry="t.py", root=failed(log=str(tmp_path)), did="gave up")
    assert text.endswith("log: not kept; --redirects 3 or --tee 3 keeps it in --log-dir\n")


def test_summary_shows_traceback_and_what_came_after(tmp_path: Path) -> None:
    """The worker's own traceback follows the first line, later failures are one line each."""
    root = failed(error_file=written(tmp_path / "e", OLD))
    others = [failed(rank=rank, exit_code=-6) for rank in range(20)]
    text = failure_summary(entry="t.py", root=root, others=others, did="gave up", failed_at=0.0)
    lines = text.splitlines()
    assert lines[0].startswith(
        "t.py failed: rank 5 (local rank 1) on node-a, pid 77: exit status 1 at "
    )
    assert lines[1:3] == ["  Traceback ...", "  ValueError: bad"]
    assert lines[3] == "after it: rank 0 (local rank 1) on node-a, pid 77: SIGABRT (6)"
    assert lines[11:13] == ["after it: 12 more", "frun gave up"]


def test_last_lines_of_stderr_stand_in_for_a_traceback() -> None:
    """Without a record the captured end of stderr is shown, and named as such."""
    root = failed(last_lines=["Traceback ...", "KeyError: 1"])
    text = failure_summary(entry="t.py", root=root, did="gave up")
    assert "  last lines of its stderr:\n    Traceback ...\n    KeyError: 1\n" in text


def test_huge_tracebacks_are_bounded_and_keep_their_end(tmp_path: Path) -> None:
    """A traceback of megabytes is cut in the middle: its last line says what happened."""
    document = {"message": {"message": "E", "extraInfo": {"py_callstack": "x" * 10**6 + "END"}}}
    failure = failed(error_file=written(tmp_path / "e", document))
    assert len(failure.traceback) < MAX_TEXT + 100
    assert failure.traceback.endswith("END")
